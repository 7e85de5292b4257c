# SPDX-License-Identifier: Apache-2.0
"""``triton_dist.language.extra.cuda.libnvshmem_device``: another name of ``extra.libshmem_device``."""

from tdcoll.compat.missing import attributes_of
from tdcoll.compat.triton_dist.language.extra.libshmem_device import *  # noqa: F403

__getattr__ = attributes_of("triton_dist.language.extra.libshmem_device")
