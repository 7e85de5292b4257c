# SPDX-License-Identifier: Apache-2.0
"""Collectives that run inside Triton kernels over NVSHMEM symmetric memory."""

import sys

# `python -m tdcoll`, which only has commands, must run where these imports fail. While Python looks for the module that
# it was told to run, argv[0] is "-m"; the module stands before the rest of argv.
if not (sys.argv[:1] == ["-m"] and sys.orig_argv[-len(sys.argv)] == "tdcoll"):
    from tdcoll.collectives.all_gather import all_gather, all_gather_in_place, all_gather_into_tensor
    from tdcoll.collectives.index_match import match_indices, match_lists
    from tdcoll.collectives.sparse_all_reduce import (
        PaddedRows,
        SparseContext,
        sparse_all_reduce,
        sparse_all_reduce_padded,
        sparse_all_reduce_rows,
    )
    from tdcoll.context import CollectiveContext
    from tdcoll.errors import (
        AlreadyInitializedError,
        CollectiveTimeout,
        ContextError,
        HeapExhaustedError,
        NotInitializedError,
        NotSymmetricError,
        RankMismatchError,
        TdcollError,
    )
    from tdcoll.language.jit import jit
    from tdcoll.memory import barrier, device, empty, free, heap_info, topology, zeros
    from tdcoll.monitor import WaitMonitor
    from tdcoll.runtime.lifecycle import finalize, initialize, is_initialized

__version__ = "0.1.0"

__all__ = [
    "AlreadyInitializedError",
    "CollectiveContext",
    "CollectiveTimeout",
    "ContextError",
    "HeapExhaustedError",
    "NotInitializedError",
    "NotSymmetricError",
    "PaddedRows",
    "RankMismatchError",
    "SparseContext",
    "TdcollError",
    "WaitMonitor",
    "__version__",
    "all_gather",
    "all_gather_in_place",
    "all_gather_into_tensor",
    "barrier",
    "device",
    "empty",
    "finalize",
    "free",
    "heap_info",
    "initialize",
    "is_initialized",
    "jit",
    "match_indices",
    "match_lists",
    "sparse_all_reduce",
    "sparse_all_reduce_padded",
    "sparse_all_reduce_rows",
    "topology",
    "zeros",
]
