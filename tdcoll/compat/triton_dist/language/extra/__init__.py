# SPDX-License-Identifier: Apache-2.0
"""``triton_dist.language.extra``: NVSHMEM's functions, and those of threads."""
