# SPDX-License-Identifier: Apache-2.0
"""All-reduce: one-shot and two-shot by words without signals, two stages by stores, and by puts."""
