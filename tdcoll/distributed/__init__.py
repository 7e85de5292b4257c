# SPDX-License-Identifier: Apache-2.0
"""``torch.distributed`` on tdcoll: the backend ``"tdcoll"``, and sparse gradients under DDP with any backend.

``import tdcoll`` registers the backend: ``init_process_group("tdcoll")``, or ``"cpu:gloo,cuda:tdcoll"``. See
``docs/distributed.md``.
"""

from tdcoll.collectives.all_reduce.op import all_reduce_in_group as all_reduce
from tdcoll.distributed.backend import TdcollProcessGroup
from tdcoll.distributed.clip import clip_grad_norm_
from tdcoll.distributed.ddp import SparseGradientReducer, sparse_hook
from tdcoll.distributed.describe import explain
from tdcoll.distributed.options import Options
from tdcoll.work import BackendTimeout

__all__ = ["BackendTimeout", "Options", "SparseGradientReducer", "TdcollProcessGroup", "all_reduce", "clip_grad_norm_"]
__all__ += ["explain", "sparse_hook"]
