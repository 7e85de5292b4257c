# SPDX-License-Identifier: Apache-2.0
"""Reduce-scatter: LL, direct stores, and puts; one stage."""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tdcoll.collectives.reduce_scatter.op import reduce_scatter, reduce_scatter_tensor

__all__ = ["reduce_scatter", "reduce_scatter_tensor"]

if not TYPE_CHECKING:

    def __getattr__(name):
        """A public name, imported now: who reads the policy needs no Triton."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(_import_module(f"{__name__}.op"), name)
