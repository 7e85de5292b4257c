# SPDX-License-Identifier: Apache-2.0
"""Sparse all-reduce: the sum over the ranks of tensors that have few of their rows."""

from tdcoll.collectives.sparse_all_reduce.context import SparseContext
from tdcoll.collectives.sparse_all_reduce.op import (
    PaddedRows,
    sparse_all_reduce,
    sparse_all_reduce_padded,
    sparse_all_reduce_rows,
)

__all__ = [
    "PaddedRows",
    "SparseContext",
    "sparse_all_reduce",
    "sparse_all_reduce_padded",
    "sparse_all_reduce_rows",
]
