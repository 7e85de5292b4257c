# SPDX-License-Identifier: Apache-2.0
"""Calls of any dense collective, as users make them: a case for `tdcoll.testing.explore`, and for jobs on GPUs.

Everything comes from the collective's spec: how many segments tensor and result have, and what is reduced.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any, NamedTuple

import torch
from landings import facts_on

import tdcoll
from tdcoll.base.limits import COLLECTIVES
from tdcoll.calls.collective import spec_of
from tdcoll.calls.plan import Facts, Plan
from tdcoll.calls.spec import Collective
from tdcoll.collectives.reduce_scatter.reference import reduce_parts
from tdcoll.primitives.group import EPOCH_SHIFT
from tdcoll.primitives.reduce import OPERATIONS_OF
from tdcoll.runtime.topology import Topology

SPECS = tuple(map(spec_of, COLLECTIVES))
GUARD = 3
"""Elements around a result, which must stay as they are."""


# ---------------------------------------------------------------------- data, and what comes of it


def values(owner: int, call: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """``[count]``: numbers whose sums show their order, and when an operand is of another rank or call."""
    made = torch.Generator().manual_seed(1 + owner + 1000 * call)
    if dtype.is_floating_point:
        scale = torch.exp2(torch.randint(-4, 5, (count,), generator=made).double())
        return (torch.randn(count, generator=made, dtype=torch.float64) * scale).to(dtype)
    limits = torch.iinfo(dtype)
    return torch.randint(limits.min, limits.max, (count,), generator=made, dtype=dtype)


def pattern(owner: int, call: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """``[count]``: bytes that name rank, call and index; of booleans one bit of that."""
    index = torch.arange(count * dtype.itemsize)
    found = (index * 7 + (index >> 8) * 3 + owner * 41 + call * 89) % (2 if dtype == torch.bool else 251)
    return found.to(torch.uint8).view(dtype)


def special(owner: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """``[count]``: infinities, NaN, zeros of both signs, subnormal and large numbers; in all pairs on two ranks."""
    kinds = torch.finfo(dtype)
    numbers = [0.0, -0.0, 1.0, -1.0, kinds.max, -kinds.max, kinds.tiny, float("inf"), float("nan")]
    numbers.append(-kinds.tiny * kinds.eps)  # the smallest: half of it is rounded to -0.0
    numbers += [0.0, 0.0, 0.0, -0.0]  # of 8 bits: a word that no sender may send as it is
    index = torch.arange(count)
    chosen = index if owner % 2 == 0 else index // len(numbers)
    return torch.tensor(numbers, dtype=torch.float64).to(dtype)[chosen % len(numbers)]


def reference(spec: Collective, tensors: Sequence[torch.Tensor], topology: Topology, op: str = "sum") -> torch.Tensor:
    """``world`` times what a rank gives ``->`` what the rank of ``topology`` has to get; both are flat."""
    world, rank = topology.world_size, topology.rank
    parts = [each.view(world, -1)[rank] if spec.scatters else each for each in tensors]
    return reduce_parts(parts, topology.nodes, op) if spec.reduces else torch.cat(parts)


def different(got: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Count the elements whose bits differ; any NaN is the same as any other."""
    assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape), f"{got.dtype} {got.shape}, not {wanted.shape}"
    got, wanted = got.reshape(-1), wanted.reshape(-1)
    wrong = got.view(torch.uint8).view(-1, got.itemsize) != wanted.view(torch.uint8).view(-1, wanted.itemsize)
    wrong = wrong.any(1)
    if got.dtype.is_floating_point:
        got, wanted = (each.float() if each.itemsize == 1 else each for each in (got, wanted))
        wrong &= ~(got.isnan() & wanted.isnan())
    return wrong.sum()


# ---------------------------------------------------------------------- calls


def kinds_of(spec: Collective) -> str:
    """The kinds of calls (:class:`Calls`) that a collective has."""
    in_place = spec.may_overlap_at(1, 0) is not None
    return "o" + "i" * in_place + "st" * (spec.reduces and not spec.scatters) + "p" * spec.in_place


def had(spec: Collective, calls: str) -> str:
    """These calls, out of place where the collective has no such kind."""
    return "".join(kind if kind in f"{kinds_of(spec)}x" else "o" for kind in calls)


class Placed(NamedTuple):
    """Where a call's tensor and result lie: in one piece of memory or in two, with more around them."""

    tensor: torch.Tensor
    out: torch.Tensor
    memories: tuple[torch.Tensor, ...]

    def should(self, memory: torch.Tensor, given: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """What has to be there after the call: the result, what is left of the tensor, and what was around them."""
        made = torch.full_like(memory, GUARD)
        for part, numbers in ((self.tensor, given), (self.out, wanted)):
            if part.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr():
                begin = part.storage_offset() - memory.storage_offset()
                made[begin : begin + part.numel()] = numbers
        return made


def place(
    spec: Collective, kind: str, n: int, offset: int, ctx: Any, dtype: torch.dtype, shared: torch.Tensor | None
) -> Placed:
    """Find room for a call of this kind, of ``n`` elements in a segment.

    Args:
        offset: elements from an aligned address.
        shared: symmetric memory of the group.
    """
    given, taken = (n * ctx.world_size if many else n for many in (spec.scatters, spec.gathers))
    begin = 16 + offset

    def room(symmetric: bool, size: int) -> torch.Tensor:
        if symmetric:
            assert shared is not None
            return shared[: begin + size + 1].fill_(GUARD)
        return torch.full((begin + size + 1,), GUARD, dtype=dtype, device=ctx.device)

    if kind in "itp":
        whole = room(kind in "tp", max(given, taken))
        inside = whole[begin:-1]
        at = abs(spec.may_overlap_at(n, ctx.rank) or 0)
        part = inside[at : at + min(given, taken)]
        return Placed(*((part, inside) if spec.gathers else (inside, part)), (whole,))
    memories = (room(False, given), room(kind == "s", taken))
    return Placed(memories[0][begin:-1], memories[1][begin:-1], memories)


def make(
    spec: Collective,
    kind: str,
    tensor: torch.Tensor,
    out: Any,
    ctx: Any,
    algorithm: str | Plan = "auto",
    op: str = "sum",
) -> torch.Tensor:
    """Make a call of this kind by the public function."""
    if kind == "p":
        return getattr(tdcoll, f"{spec.name}_")(out, ctx=ctx, algorithm=algorithm)
    more: dict[str, Any] = {"op": op} if spec.reduces else {}
    if kind in "st":
        more["symmetric"] = True
    return getattr(tdcoll, spec.name)(tensor, ctx=ctx, out=out, algorithm=algorithm, **more)


def in_pieces(spec: Collective, facts: Facts, algorithm: str, pieces: int, warps: int = 1) -> Plan:
    """A plan made by hand: segments are cut into so many chunks, the last of which is short. A warp has 32 words."""
    how = spec.algorithm(algorithm)
    payload = how.payload(facts)
    unit = payload.width if how.words else 16
    chunk = max(1, -(-payload.nbytes // (unit * pieces)))
    if how.words:
        chunk = 1 << (chunk - 1).bit_length()
        warps = max(1, min(warps, chunk // 32))
    return Plan(algorithm, max(1, -(-payload.nbytes // (unit * chunk))), unit * chunk, warps)


Look = tuple[torch.Tensor, torch.Tensor]
"""What is somewhere after a call, and what should be there."""


@dataclass(frozen=True)
class Calls:
    """Runs ``calls`` on every rank, without a synchronisation, and then looks at all results.

    A call is ``o`` out of place; ``i`` in place; ``s`` and ``t`` symmetric, out of place and in place, and ``p`` of the
    form whose peers write into the caller's buffer: these three have the same memory, which is filled anew, and copied
    right after the call; ``x`` is a call of another collective, with as much as the context has room for.

    Attributes:
        spec: the collective.
        algorithm: of its calls; or several, separated by spaces, for the calls in turn.
        calls: kinds of calls, in order.
        counts: elements of a segment, in turn.
        dtype: None: fp32 if elements are reduced, and else bytes.
        ops: operations of reductions, in turn.
        offset: elements from an aligned address to those of tensors and results.
        group: ranks that take part; None for all.
        pieces: into which plans made by hand cut a segment; 0: the policy cuts.
        most: as ``max_bytes_per_rank`` of the context; None: so much that each call is one epoch.
        lamport_bytes, max_blocks: of the context. Without room for Lamport words all words have flags; with few
            thread blocks each takes several blocks of words.
        first: number of the first epoch, and of the first Lamport call.
        others: collectives of the calls ``x``, in turn; none: all others.
        specials: tensors hold special numbers.
    """

    spec: Collective
    algorithm: str
    calls: str = "oio"
    counts: Sequence[int] = (50,)
    dtype: torch.dtype | None = None
    ops: Sequence[str] = ("sum",)
    offset: int = 0
    group: Sequence[int] | None = None
    pieces: int = 2
    most: int | None = None
    lamport_bytes: int | None = None
    max_blocks: int | None = None
    first: int = 1
    others: Sequence[str] = ()
    specials: bool = False

    def __str__(self) -> str:
        told = {name: value for name, value in vars(self).items() if name not in ("spec", "algorithm", "calls")}
        defaults = type(self).__dataclass_fields__
        told = {name: value for name, value in told.items() if value != defaults[name].default}
        return f"{self.spec.name} {self.algorithm} {self.calls} {told or ''}".rstrip()

    def __call__(self, world: tdcoll.testing.World) -> None:
        world.run(self.host)

    @property
    def kind(self) -> torch.dtype:
        """The dtype of the tensors."""
        return self.dtype or (torch.float32 if self.spec.reduces else torch.uint8)

    def data(self, owner: int, call: int, count: int, spec: Collective | None = None) -> torch.Tensor:
        """What a rank gives to a call."""
        if not (spec or self.spec).reduces:
            return pattern(owner, call, count, self.kind)
        return special(owner, count, self.kind) if self.specials else values(owner, call, count, self.kind)

    def context(self) -> tdcoll.CollectiveContext:
        """A context for the calls, whose numbers begin with ``first``."""
        most = 4 * max(self.counts) * self.kind.itemsize + 256 if self.most is None else self.most
        ctx = tdcoll.CollectiveContext(
            self.group, max_bytes_per_rank=most, lamport_bytes=self.lamport_bytes, max_blocks=self.max_blocks
        )
        for control in (ctx.control, *([ctx.device_lamport.control] if ctx.device_lamport else [])):
            control.fill_((self.first - 1) << EPOCH_SHIFT.value)
        if self.first > 1:
            tdcoll.barrier(self.group)
        return ctx

    def host(self, pe: int) -> None:
        """Run on one rank of a job."""
        if self.group is not None and pe not in self.group:
            return
        used = tdcoll.heap_info().used
        with self.context() as ctx:
            shared = None
            if set(self.calls) & set("stp"):
                whole = max(self.counts) * (1 if not (self.spec.scatters or self.spec.gathers) else ctx.world_size)
                shared = tdcoll.empty((17 + self.offset + whole,), self.kind, group=self.group, name="shared")
            done = self.made(ctx, shared)
            ctx.check()
            if shared is not None:
                tdcoll.free(shared)
            for call, looks in enumerate(done):
                wrong = sum(int(different(came, should)) for came, should in looks)
                assert wrong == 0, f"rank {ctx.rank}, call {call} ({self.calls[call]}): {wrong} wrong elements"
        assert tdcoll.heap_info().used == used

    def made(self, ctx: tdcoll.CollectiveContext, shared: torch.Tensor | None) -> list[list[Look]]:
        """Make all calls, one after the other."""
        others = cycle(spec_of(name) for name in self.others or COLLECTIVES if name != self.spec.name)
        done, turn, turns = [], 0, self.algorithm.split()
        for call, kind in enumerate(self.calls):
            if kind == "x":
                n = ctx.max_bytes_per_rank // self.kind.itemsize
                done.append(self.one(ctx, next(others), call, "o", n, "auto", OPERATIONS_OF[self.kind][0], None))
                continue
            n = self.counts[turn % len(self.counts)]
            algorithm, op = turns[turn % len(turns)], self.ops[turn % len(self.ops)]
            done.append(self.one(ctx, self.spec, call, kind, n, algorithm, op, shared))
            turn += 1
        return done

    def one(
        self, ctx: tdcoll.CollectiveContext, spec: Collective, call: int, kind: str, n: int, algorithm: str, op: str,
        shared: torch.Tensor | None,
    ) -> list[Look]:  # fmt: skip
        """Make a call of ``n`` elements in a segment."""
        given = n * ctx.world_size if spec.scatters else n
        every = [self.data(owner, call, given, spec).to(ctx.device) for owner in ctx.topology.pes]
        placed = place(spec, kind, n, self.offset, ctx, self.kind, shared)
        placed.tensor.copy_(every[ctx.rank])
        how: str | Plan = algorithm
        if self.pieces and algorithm != "auto":
            dtype = self.kind if spec.reduces else None
            form = {"in_place": kind == "p", "symmetric": kind in "st"}
            how = in_pieces(spec, facts_on(ctx, n * self.kind.itemsize, dtype, **form), algorithm, self.pieces)
        assert make(spec, kind, placed.tensor, placed.out, ctx, how, op) is placed.out
        wanted = reference(spec, every, ctx.topology, op)
        return [
            (memory.clone() if kind in "stp" else memory, placed.should(memory, every[ctx.rank], wanted))
            for memory in placed.memories
        ]
