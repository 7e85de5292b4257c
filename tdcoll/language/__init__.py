# SPDX-License-Identifier: Apache-2.0
"""Communication functions for Triton kernels: ``import tdcoll.language as tdl``.

The functions of :data:`tdcoll.spec.functions.FUNCTIONS`, implemented twice: with stock Triton and NVSHMEM's bitcode,
and, if ``TRITON_INTERPRET=1`` is set before triton is first imported, on the simulator. The choice is made here, once,
at import, because Triton makes its own at that moment.
"""

from __future__ import annotations

import importlib

from triton import knobs

from tdcoll.spec import constants as _constants
from tdcoll.spec.constants import *  # noqa: F403
from tdcoll.spec.functions import FUNCTIONS

__all__ = ["INTERPRETED", *_constants.__all__, *FUNCTIONS]

INTERPRETED: bool = bool(knobs.runtime.interpret)
"""True when kernels of this process run in the simulator."""


_implementation = importlib.import_module("tdcoll.simulator.lowering" if INTERPRETED else "tdcoll.language.nvshmem")
for _name, _spec in FUNCTIONS.items():
    globals()[_name] = _function = getattr(_implementation, _name)
    _function.__doc__ = _spec.doc
    if hasattr(_function, "fn"):  # a Triton function, which does not say how it is called
        _function.__signature__ = _spec.call
