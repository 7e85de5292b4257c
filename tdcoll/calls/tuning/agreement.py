# SPDX-License-Identifier: Apache-2.0
"""The tuning of a context, on which its ranks agree when they make it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch

from tdcoll import runtime
from tdcoll.base import arguments
from tdcoll.base.errors import RankMismatchError
from tdcoll.calls.tuning.table import SIMULATOR, Table, shipped

__all__ = ["agree", "architectures"]

_VARIABLE = "TDCOLL_TUNING"


def architectures(device: torch.device) -> tuple[str, ...]:
    """Return the names of a device in tables: its name, its compute capability."""
    if device.type != "cuda":
        return (SIMULATOR,)
    major, minor = torch.cuda.get_device_capability(device)
    return torch.cuda.get_device_name(device), f"sm_{major}{minor}"


def _table(given: Any) -> Table:
    if isinstance(given, Table):
        return given
    name = "tuning"
    if given is None:
        name, given = _VARIABLE, os.environ.get(_VARIABLE)
        if not given:
            return shipped()
    arguments.instance(name, given, (str, os.PathLike), "a tuning table (Table), the path of its file, or None")
    try:
        return Table.load(given)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def agree(owner: runtime.Runtime, ranks: Sequence[int], given: Table | str | os.PathLike[str] | None) -> Table:
    """Return the sections of a tuning table that are for a new context's GPUs and group; none if the GPUs differ.

    Tables are compared because all ranks must choose alike. Collective over ``ranks``.

    Args:
        given: a table, or the path of its file; if None, that of ``TDCOLL_TUNING``, otherwise tdcoll's own.

    Raises:
        TypeError: ``given`` is none of these.
        ValueError: the file is no table, here or on another rank.
        RankMismatchError: another rank has another table.
    """
    problem: Exception | None = None
    table: Table | None = None
    try:
        table = _table(given)
    except Exception as error:  # of any kind, because the other ranks wait for it
        problem = error
    names = architectures(owner.device)
    mine = (None if problem is None else str(problem), table and (table.digest, table.name), names)
    answers = owner.exchange(ranks, "CollectiveContext: tuning table", mine)
    if problem is not None:
        raise problem
    for rank, (other, _, _) in enumerate(answers):
        if other is not None:
            raise ValueError(f"CollectiveContext: rank {rank} cannot read its tuning table: {other}")
    assert table is not None
    if len({answer[1][0] for answer in answers}) > 1:
        listing = ", ".join(f"rank {rank}: {name} ({digest})" for rank, (_, (digest, name), _) in enumerate(answers))
        raise RankMismatchError(f"the tuning table must be the same on all ranks; got {listing}")
    alike = len({answer[2] for answer in answers}) == 1  # nothing was measured on GPUs of several kinds
    topology = owner.topology(ranks)
    shape = (topology.ranks_per_node, topology.n_nodes)
    sections = (found for found in table.of(names if alike else ()) if (found.ranks_per_node, found.nodes) == shape)
    return Table(tuple(sections), table.name)
