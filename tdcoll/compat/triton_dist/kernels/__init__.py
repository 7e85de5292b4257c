# SPDX-License-Identifier: Apache-2.0
"""``triton_dist.kernels``: what its tutorials import of it."""

from tdcoll.compat.triton_dist.kernels.nvidia import common_ops  # noqa: F401
