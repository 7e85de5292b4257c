# SPDX-License-Identifier: Apache-2.0
"""The machine that kernels of this process run on; :mod:`.interpreter` puts it here."""

from __future__ import annotations

from tdcoll.errors import NotInitializedError
from tdcoll.runtime.simulator.machine import Machine

__all__ = ["machine", "machine_or_none", "put"]

_machine: Machine | None = None


def machine() -> Machine:
    """The machine that kernels run on.

    Raises:
        NotInitializedError: there is none.
    """
    if _machine is None:
        raise NotInitializedError(
            "the device language needs a simulated machine: call tdcoll.initialize(), or run inside "
            "tdcoll.testing.World.run()"
        )
    return _machine


def machine_or_none() -> Machine | None:
    """The machine that kernels run on, or None."""
    return _machine


def put(wanted: Machine | None) -> None:
    """Let kernels run on this machine; None: on none."""
    global _machine
    _machine = wanted
