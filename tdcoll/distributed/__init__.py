# SPDX-License-Identifier: Apache-2.0
"""``torch.distributed`` on tdcoll: the backend ``"tdcoll"``, and sparse gradients under DDP with any backend.

Importing this registers the backend: ``init_process_group("tdcoll")``, or ``"cpu:gloo,cuda:tdcoll"``. See
``docs/distributed.md``.
"""

import torch.distributed as _dist

from tdcoll.collectives.all_reduce.op import all_reduce_in_group as all_reduce
from tdcoll.distributed.backend import TdcollProcessGroup, create, explain
from tdcoll.distributed.ddp import SparseGradientReducer, sparse_hook
from tdcoll.distributed.options import Options
from tdcoll.work import BackendTimeout

__all__ = ["BackendTimeout", "Options", "SparseGradientReducer", "TdcollProcessGroup", "all_reduce", "explain"]
__all__ += ["sparse_hook"]

_dist.Backend.register_backend("tdcoll", create, extended_api=True, devices=["cpu", "cuda"])
