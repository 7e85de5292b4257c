# SPDX-License-Identifier: Apache-2.0
"""The kinds of calls that dense collectives have: where tensor and result lie, and how they are
made."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from itertools import cycle, islice
from typing import Any, NamedTuple

import torch
from landings import landing_of

import tdcoll
from tdcoll.calls.plan import Landing, Plan
from tdcoll.calls.spec import Collective

GUARD = 3
"""Elements around tensors and results, which must stay as they are."""


class Kind(Enum):
    """How a call is made.

    Attributes:
        OUT_OF_PLACE: tensor and result have memory of their own.
        IN_PLACE: the smaller of tensor and result is this rank's segment of the larger, or both are
            the same.
        SYMMETRIC: as ``OUT_OF_PLACE``, with ``symmetric=True``: peers may write into the result.
        SYMMETRIC_IN_PLACE: as ``IN_PLACE``, with ``symmetric=True``.
        CALLER_BUFFER: the form ``NAME_``, whose peers write into the caller's symmetric buffer.
        OTHER: not a call of the collective under test, but of another one on the same context.
    """

    OUT_OF_PLACE = "out of place"
    IN_PLACE = "in place"
    SYMMETRIC = "symmetric"
    SYMMETRIC_IN_PLACE = "symmetric in place"
    CALLER_BUFFER = "caller buffer"
    OTHER = "other"

    def __str__(self) -> str:
        return self.value

    @property
    def form(self) -> dict[str, bool]:
        """The facts of a plan (:class:`~tdcoll.calls.plan.Facts`) that the kind decides."""
        symmetric = self in (Kind.SYMMETRIC, Kind.SYMMETRIC_IN_PLACE)
        return {"in_place": self is Kind.CALLER_BUFFER, "symmetric": symmetric}

    @property
    def landing(self) -> Landing:
        """Where peers' data lands in such calls."""
        return landing_of(**self.form)

    @property
    def shares_memory(self) -> bool:
        """Whether tensor and result lie in one piece of memory."""
        return self in (Kind.IN_PLACE, Kind.SYMMETRIC_IN_PLACE, Kind.CALLER_BUFFER)

    @property
    def needs_symmetric_memory(self) -> bool:
        """Whether the result lies in symmetric memory."""
        return any(self.form.values())


OUT_OF_PLACE = Kind.OUT_OF_PLACE
IN_PLACE = Kind.IN_PLACE
SYMMETRIC = Kind.SYMMETRIC
SYMMETRIC_IN_PLACE = Kind.SYMMETRIC_IN_PLACE
CALLER_BUFFER = Kind.CALLER_BUFFER
OTHER = Kind.OTHER

Kinds = tuple[Kind, ...]


def kinds_of(spec: Collective) -> Kinds:
    """The kinds of calls that a collective has."""
    kinds = [OUT_OF_PLACE]
    if spec.may_overlap_at(1, 0) is not None:
        kinds.append(IN_PLACE)
    if spec.reduces and not spec.scatters:
        kinds += [SYMMETRIC, SYMMETRIC_IN_PLACE]
    if spec.in_place:
        kinds.append(CALLER_BUFFER)
    return tuple(kinds)


def supported(kinds: Sequence[Kind], supported_kinds: Sequence[Kind]) -> Kinds:
    """Those of ``kinds`` that a collective or an algorithm supports, in order."""
    return tuple(kind for kind in kinds if kind in supported_kinds)


def in_turn(kinds: Sequence[Kind], n_calls: int) -> Kinds:
    """So many calls, whose kinds are these in turn."""
    return tuple(islice(cycle(kinds), n_calls))


class Placement(NamedTuple):
    """Where a call's tensor and result lie: in one piece of memory or in two, with more around
    them."""

    tensor: torch.Tensor
    out: torch.Tensor
    memories: tuple[torch.Tensor, ...]

    def expected(
        self,
        memory: torch.Tensor,
        given: torch.Tensor,
        wanted: torch.Tensor,
    ) -> torch.Tensor:
        """What has to be in one of ``memories`` after the call: the result, what is left of the
        tensor, and what was around them."""
        content = torch.full_like(memory, GUARD)
        for part, numbers in ((self.tensor, given), (self.out, wanted)):
            if part.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr():
                begin = part.storage_offset() - memory.storage_offset()
                content[begin : begin + part.numel()] = numbers
        return content


def place(
    spec: Collective, kind: Kind, n: int, offset: int, ctx: Any, dtype: torch.dtype,
    shared: torch.Tensor | None,
) -> Placement:  # fmt: skip
    """Find room for a call of this kind, of ``n`` elements in a segment.

    Args:
        offset: elements from an aligned address.
        shared: symmetric memory of the group, for the kinds that need it.
    """
    tensor_size = n * ctx.world_size if spec.scatters else n
    result_size = n * ctx.world_size if spec.gathers else n
    begin = 16 + offset

    def room(symmetric: bool, size: int) -> torch.Tensor:
        if symmetric:
            assert shared is not None
            return shared[: begin + size + 1].fill_(GUARD)
        return torch.full((begin + size + 1,), GUARD, dtype=dtype, device=ctx.device)

    if kind.shares_memory:
        memory = room(kind.needs_symmetric_memory, max(tensor_size, result_size))
        larger = memory[begin:-1]
        at = abs(spec.may_overlap_at(n, ctx.rank) or 0)
        smaller = larger[at : at + min(tensor_size, result_size)]
        if spec.gathers:
            return Placement(smaller, larger, (memory,))
        return Placement(larger, smaller, (memory,))
    around_tensor = room(False, tensor_size)
    around_result = room(kind.needs_symmetric_memory, result_size)
    memories = (around_tensor, around_result)
    return Placement(around_tensor[begin:-1], around_result[begin:-1], memories)


def make_call(
    spec: Collective, kind: Kind, tensor: torch.Tensor, out: Any, ctx: Any,
    algorithm: str | Plan = "auto", op: str = "sum", root: int = 0, **more: Any,
) -> torch.Tensor:  # fmt: skip
    """Make a call of this kind by the public function; ``more`` are further arguments of it."""
    if kind is CALLER_BUFFER:
        return getattr(tdcoll, f"{spec.name}_")(out, ctx=ctx, algorithm=algorithm)
    if spec.reduces:
        more["op"] = op
    if spec.rooted:
        more["root"] = root
    if kind.needs_symmetric_memory:
        more["symmetric"] = True
    return getattr(tdcoll, spec.name)(tensor, ctx=ctx, out=out, algorithm=algorithm, **more)
