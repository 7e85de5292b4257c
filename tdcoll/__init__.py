# SPDX-License-Identifier: Apache-2.0
"""Collectives that run inside Triton kernels over NVSHMEM symmetric memory.

>>> import torch, tdcoll
>>> tdcoll.initialize()  # joins the job that torchrun or `python -m tdcoll run` has started
>>> y = tdcoll.all_reduce(torch.ones(1024, device=tdcoll.device()), op="sum")
>>> tdcoll.check()  # calls are asynchronous: raises CollectiveTimeout if a rank didn't answer
>>> tdcoll.finalize()

Every public name is imported when it is first used. ``import tdcoll`` therefore costs nothing, a
process pays only for the collectives that it calls, and ``python -m tdcoll`` runs even if PyTorch
or Triton cannot be imported. Importing tdcoll also makes ``init_process_group("tdcoll")`` known to
``torch.distributed``.
"""

import os as _os
import sys as _sys
from importlib import import_module as _import_module
from typing import TYPE_CHECKING

from tdcoll_torch import register as _register

if TYPE_CHECKING:
    from tdcoll.base.errors import AlreadyInitializedError as AlreadyInitializedError
    from tdcoll.base.errors import CollectiveTimeout as CollectiveTimeout
    from tdcoll.base.errors import ContextError as ContextError
    from tdcoll.base.errors import HeapExhaustedError as HeapExhaustedError
    from tdcoll.base.errors import NotInitializedError as NotInitializedError
    from tdcoll.base.errors import NotSymmetricError as NotSymmetricError
    from tdcoll.base.errors import RankMismatchError as RankMismatchError
    from tdcoll.base.errors import TdcollError as TdcollError
    from tdcoll.calls.context import CollectiveContext as CollectiveContext
    from tdcoll.calls.monitor import WaitMonitor as WaitMonitor
    from tdcoll.calls.monitor import check as check
    from tdcoll.calls.streams import barrier_on_stream as barrier_on_stream
    from tdcoll.calls.streams import copy_on_stream as copy_on_stream
    from tdcoll.calls.streams import peer_tensor as peer_tensor
    from tdcoll.calls.streams import wait_on_stream as wait_on_stream
    from tdcoll.calls.streams import write_on_stream as write_on_stream
    from tdcoll.calls.tuning import Table as Table
    from tdcoll.collectives.all_gather.op import all_gather as all_gather
    from tdcoll.collectives.all_gather.op import all_gather_ as all_gather_
    from tdcoll.collectives.all_reduce.op import all_reduce as all_reduce
    from tdcoll.collectives.all_reduce.op import all_reduce_ as all_reduce_
    from tdcoll.collectives.all_to_all.op import all_to_all as all_to_all
    from tdcoll.collectives.broadcast.op import broadcast as broadcast
    from tdcoll.collectives.broadcast.op import broadcast_ as broadcast_
    from tdcoll.collectives.index_match.op import match_indices as match_indices
    from tdcoll.collectives.reduce_scatter.op import reduce_scatter as reduce_scatter
    from tdcoll.collectives.sparse_all_reduce.context import SparseContext as SparseContext
    from tdcoll.collectives.sparse_all_reduce.op import sparse_all_reduce as sparse_all_reduce
    from tdcoll.collectives.sparse_all_reduce.op import (
        sparse_all_reduce_padded as sparse_all_reduce_padded,
    )
    from tdcoll.collectives.sparse_all_reduce.op import (
        sparse_all_reduce_rows as sparse_all_reduce_rows,
    )
    from tdcoll.collectives.sparse_all_reduce.operation import PaddedRows as PaddedRows
    from tdcoll.explanation.call import Explanation as Explanation
    from tdcoll.explanation.call import explain as explain
    from tdcoll.explanation.memory import MemoryPlan as MemoryPlan
    from tdcoll.explanation.memory import memory_plan as memory_plan
    from tdcoll.job.lifecycle import finalize as finalize
    from tdcoll.job.lifecycle import initialize as initialize
    from tdcoll.job.lifecycle import is_initialized as is_initialized
    from tdcoll.job.memory import barrier as barrier
    from tdcoll.job.memory import device as device
    from tdcoll.job.memory import empty as empty
    from tdcoll.job.memory import free as free
    from tdcoll.job.memory import heap_info as heap_info
    from tdcoll.job.memory import rank as rank
    from tdcoll.job.memory import topology as topology
    from tdcoll.job.memory import world_size as world_size
    from tdcoll.job.memory import zeros as zeros
    from tdcoll.language.jit import jit as jit
    from tdcoll.primitives.group import begin_epoch as begin_epoch
    from tdcoll.runtime.topology import Topology as Topology

__version__ = "0.1.0"

if not TYPE_CHECKING:  # a type checker that sees __getattr__ takes any name for a public one
    _NAMES = {
        "collectives.all_gather.op": "all_gather all_gather_",
        "collectives.all_reduce.op": "all_reduce all_reduce_",
        "collectives.all_to_all.op": "all_to_all",
        "collectives.broadcast.op": "broadcast broadcast_",
        "collectives.index_match.op": "match_indices",
        "collectives.reduce_scatter.op": "reduce_scatter",
        "collectives.sparse_all_reduce.context": "SparseContext",
        "collectives.sparse_all_reduce.op": "sparse_all_reduce sparse_all_reduce_padded sparse_all_reduce_rows",
        "collectives.sparse_all_reduce.operation": "PaddedRows",
        "calls.context": "CollectiveContext",
        "base.errors": (
            "AlreadyInitializedError CollectiveTimeout ContextError HeapExhaustedError NotInitializedError "
            "NotSymmetricError RankMismatchError TdcollError"
        ),
        "explanation.call": "Explanation explain",
        "explanation.memory": "MemoryPlan memory_plan",
        "language.jit": "jit",
        "job.memory": "barrier device empty free heap_info rank topology world_size zeros",
        "calls.monitor": "WaitMonitor check",
        "primitives.group": "begin_epoch",
        "job.lifecycle": "finalize initialize is_initialized",
        "runtime.topology": "Topology",
        "calls.streams": "barrier_on_stream copy_on_stream peer_tensor wait_on_stream write_on_stream",
        "calls.tuning": "Table",
    }
    _MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}
    __all__ = ["__version__", *_MODULE_OF]
    _NOT_TRACED = {
        "all_gather": "all_gather all_gather_",
        "all_reduce": "all_reduce all_reduce_",
        "all_to_all": "all_to_all",
        "broadcast": "broadcast broadcast_",
        "reduce_scatter": "reduce_scatter",
        "": (
            "CollectiveContext SparseContext WaitMonitor barrier barrier_on_stream check copy_on_stream empty explain "
            "finalize free heap_info initialize peer_tensor sparse_all_reduce sparse_all_reduce_padded "
            "sparse_all_reduce_rows wait_on_stream write_on_stream zeros"
        ),
    }
    """Names at which torch.compile breaks the graph, by the operator of ``tdcoll.ops`` that it can
    trace instead."""
    _OPERATOR_OF = {
        name: operator or None for operator, names in _NOT_TRACED.items() for name in names.split()
    }
    _SUBMODULES = {
        "base",
        "calls",
        "collectives",
        "distributed",
        "fused",
        "job",
        "language",
        "ops",
        "runtime",
    }

    def __getattr__(name):
        """A public name or a module that belongs to one, imported now (PEP 562)."""
        if name in _MODULE_OF:
            value = getattr(_import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
            if name in _OPERATOR_OF:
                breaks_graphs = _import_module(f"{__name__}.base.torch_internals").breaks_graphs
                value = breaks_graphs(value, f"{__name__}.{name}", _OPERATOR_OF[name])
        elif name in _SUBMODULES:
            value = _import_module(f"{__name__}.{name}")
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value
        return value

    def __dir__():
        return sorted({*globals(), *__all__, *_SUBMODULES})


def _in_child() -> None:
    """Have a forked child know which process group it was forked with."""
    if "torch.distributed.distributed_c10d" in _sys.modules:
        _import_module(f"{__name__}.base.forks").in_child()


_os.register_at_fork(after_in_child=_in_child)
_register()
