# SPDX-License-Identifier: Apache-2.0
"""Communication functions for Triton kernels: ``import tdcoll.language as tdl``.

The functions of :data:`tdcoll.spec.functions.FUNCTIONS`, implemented three ways. The choice is made
here, once, at import, because Triton makes its own at that moment:

- ``TRITON_INTERPRET=1`` (before triton is first imported): the simulator;
- ``TDCOLL_COMPILER=triton_dist``: NVSHMEM's functions through an installed Triton-distributed
  compiler;
- otherwise: stock Triton and NVSHMEM's bitcode.
"""

from __future__ import annotations

import importlib
import os

from triton import knobs

from tdcoll.spec import constants as _constants
from tdcoll.spec.constants import *  # noqa: F403
from tdcoll.spec.functions import FUNCTIONS

__all__ = ["INTERPRETED", "LOWERING", *_constants.__all__, *FUNCTIONS]

INTERPRETED: bool = bool(knobs.runtime.interpret)
"""True when kernels of this process run in the simulator."""


def _lowering() -> str:
    """Name of the module that implements the language in this process."""
    compiler = os.environ.get("TDCOLL_COMPILER", "") or "triton"
    if compiler not in ("triton", "triton_dist"):
        raise ValueError(f"TDCOLL_COMPILER must be triton or triton_dist, got {compiler!r}")
    if compiler == "triton_dist":
        if INTERPRETED:
            raise ValueError(
                "TDCOLL_COMPILER=triton_dist compiles kernels, and TRITON_INTERPRET=1 asks for the simulator: unset one"
            )
        return "tdcoll.language.triton_dist"
    return "tdcoll.simulator.lowering" if INTERPRETED else "tdcoll.language.nvshmem"


LOWERING: str = _lowering()
"""The module that implements the device language in this process."""

_implementation = importlib.import_module(LOWERING)
for _name, _spec in FUNCTIONS.items():
    globals()[_name] = _function = getattr(_implementation, _name)
    if LOWERING != "tdcoll.language.triton_dist":  # some of which are another library's
        _function.__doc__ = _spec.doc
        if hasattr(_function, "fn"):  # a Triton function, which does not say how it is called
            _function.__signature__ = _spec.call
