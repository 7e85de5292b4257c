# SPDX-License-Identifier: Apache-2.0
"""The tuning table of a context, and the names of its GPU in tables."""

from __future__ import annotations

import os
from typing import Any

import torch

from tdcoll.base import arguments
from tdcoll.calls.tuning.table import SIMULATOR, Table, shipped

_VARIABLE = "TDCOLL_TUNING"


def architectures(device: torch.device) -> tuple[str, ...]:
    """Return the names of a device in tables: its name, its compute capability."""
    if device.type != "cuda":
        return (SIMULATOR,)
    major, minor = torch.cuda.get_device_capability(device)
    return torch.cuda.get_device_name(device), f"sm_{major}{minor}"


def read(tuning: Any) -> Table:
    """Return a table, or read one from a file. If ``tuning`` is None, ``TDCOLL_TUNING`` names the
    file; without it, tdcoll's own table is used."""
    if isinstance(tuning, Table):
        return tuning
    name = "tuning"
    if tuning is None:
        name = _VARIABLE
        tuning = os.environ.get(_VARIABLE)
        if not tuning:
            return shipped()
    arguments.instance(
        name, tuning, (str, os.PathLike), "a tuning table (Table), the path of its file, or None"
    )
    try:
        return Table.load(tuning)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
