# SPDX-License-Identifier: Apache-2.0
"""``triton_dist.language.extra`` and ``.extra.cuda``: NVSHMEM's functions, and those of threads."""

from tdcoll.compat.triton_dist.language.extra import libshmem_device as libnvshmem_device  # noqa: F401
