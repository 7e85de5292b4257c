# SPDX-License-Identifier: Apache-2.0
"""``torch.distributed`` on tdcoll: the backend ``"tdcoll"``, and sparse gradients under DDP with
any backend.

``import tdcoll`` registers the backend: ``init_process_group("tdcoll")``, or
``"cpu:gloo,cuda:tdcoll"``. See ``docs/distributed.md``.
"""

from tdcoll.base.torch_internals import breaks_graphs
from tdcoll.distributed.backend import TdcollProcessGroup
from tdcoll.distributed.clip import clip_grad_norm_
from tdcoll.distributed.ddp import sparse_hook
from tdcoll.distributed.description import explain
from tdcoll.distributed.functions import (
    all_gather_into_tensor,
    all_reduce,
    all_to_all_single,
    reduce_scatter_tensor,
)
from tdcoll.distributed.options import Options
from tdcoll.distributed.sparse_reducer import SparseGradientReducer
from tdcoll.distributed.work import BackendTimeout

__all__ = [
    "BackendTimeout",
    "Options",
    "SparseGradientReducer",
    "TdcollProcessGroup",
    "all_gather_into_tensor",
]
__all__ += [
    "all_reduce",
    "all_to_all_single",
    "clip_grad_norm_",
    "explain",
    "reduce_scatter_tensor",
    "sparse_hook",
]

for _name, _operator in {
    "all_gather_into_tensor": "all_gather",
    "all_reduce": "all_reduce",
    "all_to_all_single": "all_to_all",
    "reduce_scatter_tensor": "reduce_scatter",
    "SparseGradientReducer": None,
    "clip_grad_norm_": None,
    "explain": None,
}.items():
    globals()[_name] = breaks_graphs(globals()[_name], f"{__name__}.{_name}", _operator)
