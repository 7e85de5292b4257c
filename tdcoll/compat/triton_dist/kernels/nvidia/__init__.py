# SPDX-License-Identifier: Apache-2.0
"""``triton_dist.kernels.nvidia``: what its tutorials import of it."""
