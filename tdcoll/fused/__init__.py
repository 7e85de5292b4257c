# SPDX-License-Identifier: Apache-2.0
"""Collectives fused with the operations before or behind them: matmuls that communicate, and
all-reduce + residual + RMSNorm."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tdcoll.fused.matmul.op import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter
    from tdcoll.fused.op import all_reduce_rms_norm

__all__ = ["all_gather_matmul", "all_reduce_rms_norm", "matmul_all_reduce", "matmul_reduce_scatter"]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Import the function when it is requested, because a policy needs no Triton."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from tdcoll.base.torch_internals import breaks_graphs

        module = import_module("tdcoll.fused.matmul.op" if "matmul" in name else "tdcoll.fused.op")
        function = breaks_graphs(getattr(module, name), f"{__name__}.{name}", name)
        globals()[name] = function  # a look-up here takes longer than all checks of a call
        return function
