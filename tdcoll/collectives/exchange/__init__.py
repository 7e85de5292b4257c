# SPDX-License-Identifier: Apache-2.0
"""Kernels that bring every rank a segment of every other, for all-to-all and all-gather
(``source_stride`` 0)."""
