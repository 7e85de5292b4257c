# SPDX-License-Identifier: Apache-2.0
"""The kinds of call that tdcoll serves for ``torch.distributed``, in the order in which they are listed."""

from __future__ import annotations

from tdcoll.distributed.service import AllGather, AllReduce, Barrier, ReduceScatter, Service, Setting
from tdcoll.distributed.sparse import SparseAllReduce

__all__ = ["KINDS", "make_services"]

_SERVICES: tuple[type[Service], ...] = (AllGather, AllReduce, ReduceScatter, SparseAllReduce, Barrier)

KINDS = tuple(service.kind for service in _SERVICES)
"""The kinds of call that tdcoll's kernels can serve."""


def make_services(setting: Setting) -> dict[str, Service]:
    """Make a service of each kind for one group."""
    for service in _SERVICES:
        setting.services[service.kind] = service(setting)
    return setting.services
