# SPDX-License-Identifier: Apache-2.0
"""All-gather: LL, direct stores, ring, 1D push, and 2D push by rails."""
