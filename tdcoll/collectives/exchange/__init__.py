# SPDX-License-Identifier: Apache-2.0
"""Kernels that bring every rank a segment of every other: of all-to-all, and of all-gather, whose ``source_stride`` is
0."""
