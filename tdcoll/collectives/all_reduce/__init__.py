# SPDX-License-Identifier: Apache-2.0
"""All-reduce: one-shot and two-shot by Lamport or LL, two-shot by stores, and by puts."""
