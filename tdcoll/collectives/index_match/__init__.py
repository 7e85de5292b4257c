# SPDX-License-Identifier: Apache-2.0
"""Index matching: which of W sorted lists hold an id, and at which place."""
