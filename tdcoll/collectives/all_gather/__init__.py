# SPDX-License-Identifier: Apache-2.0
"""All-gather: LL, direct stores, ring, 1D push, and 2D push by rails."""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tdcoll.collectives.all_gather.op import (
        all_gather,
        all_gather_in_place,
        all_gather_into_tensor,
        exchange_counted,
    )

__all__ = ["all_gather", "all_gather_in_place", "all_gather_into_tensor", "exchange_counted"]

if not TYPE_CHECKING:

    def __getattr__(name):
        """A public name, imported now: who reads the policy needs no Triton."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(_import_module(f"{__name__}.op"), name)
