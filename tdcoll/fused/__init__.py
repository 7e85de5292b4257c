# SPDX-License-Identifier: Apache-2.0
"""Collectives fused with the operations behind them: all-reduce + residual + RMSNorm."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tdcoll.fused.op import all_reduce_rms_norm

__all__ = ["all_reduce_rms_norm"]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Import the function when it is requested, because a policy needs no Triton."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from tdcoll.base.torch_internals import breaks_graphs
        from tdcoll.fused.op import all_reduce_rms_norm

        function = breaks_graphs(all_reduce_rms_norm, f"{__name__}.{name}", name)
        globals()[name] = function  # a look-up here takes longer than all checks of a call
        return function
