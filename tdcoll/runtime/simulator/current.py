# SPDX-License-Identifier: Apache-2.0
"""The machine that kernels of this process run on; :mod:`.interpreter` puts it here."""

from __future__ import annotations

from tdcoll.errors import NotInitializedError, TdcollError
from tdcoll.runtime.simulator.machine import Machine
from tdcoll.runtime.simulator.pointers import PointerAccess

__all__ = ["machine", "pointers", "put"]

_machine: Machine | None = None


def machine() -> Machine:
    """Return the machine that kernels run on.

    Raises:
        NotInitializedError: there is none.
    """
    if _machine is None:
        raise NotInitializedError(
            "the device language needs a simulated machine: call tdcoll.initialize(), or run inside "
            "tdcoll.testing.World.run()"
        )
    return _machine


def pointers() -> PointerAccess:
    """Return the loads and stores of that machine."""
    return PointerAccess(machine())


def put(wanted: Machine | None) -> None:
    """Let kernels run on this machine, or on none if it is None.

    Raises:
        TdcollError: they run on another one.
    """
    global _machine
    if wanted is not None and _machine is not None:
        raise TdcollError("a simulated machine is active in this process already; only one can be")
    _machine = wanted
