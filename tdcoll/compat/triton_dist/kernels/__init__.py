# SPDX-License-Identifier: Apache-2.0
"""``triton_dist.kernels``: what its tutorials import of it."""
