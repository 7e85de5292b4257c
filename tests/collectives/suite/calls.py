# SPDX-License-Identifier: Apache-2.0
"""Calls of any dense collective, as users make them: a case for `tdcoll.testing.explore`, and for
jobs on GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from itertools import cycle, groupby
from typing import Any, NamedTuple

import torch
from landings import facts_on

import tdcoll
from tdcoll.base.limits import COLLECTIVES
from tdcoll.calls.collective import spec_of
from tdcoll.calls.plan import Facts, Plan
from tdcoll.calls.spec import Collective
from tdcoll.primitives.group import EPOCH_SHIFT
from tdcoll.primitives.reduce import OPERATIONS_OF

from .data import different, pattern, reference, special, values
from .epilogues import Residual, expected, less_twice, residual_of
from .kinds import OTHER, OUT_OF_PLACE, Kind, Placement, kinds_of, make_call, place


def in_pieces(spec: Collective, facts: Facts, algorithm: str, pieces: int, warps: int = 1) -> Plan:
    """A plan made by hand: segments are cut into so many chunks, the last of which is short. A warp
    has 32 words."""
    how = spec.algorithm(algorithm)
    payload = how.payload(facts)
    unit = payload.width if how.words else 16
    chunk = max(1, -(-payload.nbytes // (unit * pieces)))
    if how.words:
        chunk = 1 << (chunk - 1).bit_length()
        warps = max(1, min(warps, chunk // 32))
    n_chunks = max(1, -(-payload.nbytes // (unit * chunk)))
    return Plan(algorithm, n_chunks, unit * chunk, warps)


class Call(NamedTuple):
    """One of :class:`Calls`.

    Attributes:
        number: its place in the sequence.
        spec: of its collective.
        n: elements of a segment.
    """

    number: int
    spec: Collective
    kind: Kind
    n: int
    algorithm: str
    op: str


class Comparison(NamedTuple):
    """Memory after a call, and what should be there."""

    got: torch.Tensor
    expected: torch.Tensor


@dataclass(frozen=True)
class Calls:
    """Makes calls on every rank, one of each of ``kinds`` in order, without a synchronisation, and
    then looks at all results.

    Calls with symmetric memory all have the same, which is filled anew before, and copied right
    after the call. A call of another collective has as much as the context has room for.

    Attributes:
        spec: the collective.
        algorithms: of its calls in turn.
        kinds: of all calls, in order.
        counts: elements of a segment, in turn.
        dtype: None: fp32 if elements are reduced, and else bytes.
        ops: operations of reductions, in turn.
        roots: of calls that have one, in turn, modulo the ranks. By default a root comes again
            after another one, and twice in a row.
        offset: elements from an aligned address to those of tensors and results.
        group: ranks that take part; None for all.
        pieces: into which plans made by hand cut a segment; 0: the policy cuts.
        max_bytes_per_rank: of the context; None: so much that each call is one epoch.
        lamport_bytes, max_blocks: of the context. Without room for Lamport words all words have
            flags; with few thread blocks each takes several blocks of words.
        first: number of the first epoch, and of the first Lamport call.
        others: names of the collectives of calls of the kind ``OTHER``, in turn; none: all others.
        specials: tensors hold special numbers.
        sets_epochs_aside: the words from which kernels take their epochs have no order to be
            explored (:meth:`tdcoll.testing.World.ignore_order_of`).
        columns: of the result, if the calls have an epilogue (:mod:`.epilogues`); results whose
            elements it doesn't divide have one row. 0: there is no epilogue.
    """

    spec: Collective
    algorithms: Sequence[str]
    kinds: Sequence[Kind]
    counts: Sequence[int] = (50,)
    dtype: torch.dtype | None = None
    ops: Sequence[str] = ("sum",)
    roots: Sequence[int] = (1, 0, 1, 1)
    offset: int = 0
    group: Sequence[int] | None = None
    pieces: int = 2
    max_bytes_per_rank: int | None = None
    lamport_bytes: int | None = None
    max_blocks: int | None = None
    first: int = 1
    others: Sequence[str] = ()
    specials: bool = False
    columns: int = 0
    sets_epochs_aside: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.algorithms, str):
            raise TypeError(f"algorithms must be a sequence of names, got {self.algorithms!r}")
        unsupported = set(self.kinds) - {*kinds_of(self.spec), OTHER}
        if unsupported or not self.kinds:
            expected = ", ".join(map(str, (*kinds_of(self.spec), OTHER)))
            given = ", ".join(map(str, self.kinds))
            raise ValueError(f"kinds of {self.spec.name} must be of {expected}; got {given}")

    def __str__(self) -> str:
        runs = [(kind, len(list(calls))) for kind, calls in groupby(self.kinds)]
        kinds = ", ".join(str(kind) if n == 1 else f"{n} x {kind}" for kind, n in runs)
        described = ("spec", "algorithms", "kinds")
        more = {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if field.name not in described and getattr(self, field.name) != field.default
        }
        return f"{self.spec.name} {' '.join(self.algorithms)} [{kinds}] {more or ''}".rstrip()

    def __call__(self, world: tdcoll.testing.World) -> None:
        world.run(partial(self.host, world=world))

    @property
    def tensor_dtype(self) -> torch.dtype:
        """The dtype of the tensors."""
        return self.dtype or (torch.float32 if self.spec.reduces else torch.uint8)

    def data(self, owner: int, call: int, count: int, spec: Collective) -> torch.Tensor:
        """What a rank gives to a call of a collective."""
        if not spec.reduces:
            return pattern(owner, call, count, self.tensor_dtype)
        if self.specials:
            return special(owner, count, self.tensor_dtype)
        return values(owner, call, count, self.tensor_dtype)

    def context(self, world: tdcoll.testing.World | None = None) -> tdcoll.CollectiveContext:
        """A context for the calls, whose numbers begin with ``first``."""
        room = self.max_bytes_per_rank
        if room is None:
            room = 4 * max(self.counts) * self.tensor_dtype.itemsize + 256
        ctx = tdcoll.CollectiveContext(
            self.group,
            max_bytes_per_rank=room,
            lamport_bytes=self.lamport_bytes,
            max_blocks=self.max_blocks,
        )
        controls = [ctx.control]
        if ctx.device_lamport:
            controls.append(ctx.device_lamport.control)
        for control in controls:
            control.fill_((self.first - 1) << EPOCH_SHIFT.value)
            if world is not None and self.sets_epochs_aside:
                world.ignore_order_of(control)
        if self.first > 1:
            tdcoll.barrier(self.group)
        return ctx

    def shared_memory(self, ctx: tdcoll.CollectiveContext) -> torch.Tensor | None:
        """Symmetric memory for all calls that need it."""
        if not any(kind.needs_symmetric_memory for kind in self.kinds):
            return None
        segments = ctx.world_size if self.spec.scatters or self.spec.gathers else 1
        size = 17 + self.offset + max(self.counts) * segments
        return tdcoll.empty((size,), self.tensor_dtype, group=self.group, name="shared")

    def host(self, pe: int, world: tdcoll.testing.World | None = None) -> None:
        """Run on one rank of a job, or of a ``world``."""
        if self.group is not None and pe not in self.group:
            return
        used = tdcoll.heap_info().used
        with self.context(world) as ctx:
            shared = self.shared_memory(ctx)
            made = [(call, self.make(ctx, call, shared)) for call in self.sequence(ctx)]
            ctx.check()
            if shared is not None:
                tdcoll.free(shared)
            for call, comparisons in made:
                wrong = sum(int(different(*comparison)) for comparison in comparisons)
                where = f"rank {ctx.rank}, call {call.number} ({call.kind})"
                assert wrong == 0, f"{where}: {wrong} wrong elements"
        assert tdcoll.heap_info().used == used

    def sequence(self, ctx: tdcoll.CollectiveContext) -> Iterator[Call]:
        """The calls, in order."""
        names = self.others or [name for name in COLLECTIVES if name != self.spec.name]
        others = cycle(names)
        algorithms = cycle(self.algorithms)
        counts = cycle(self.counts)
        ops = cycle(self.ops)
        for number, kind in enumerate(self.kinds):
            if kind is OTHER:
                n = ctx.max_bytes_per_rank // self.tensor_dtype.itemsize
                op = OPERATIONS_OF[self.tensor_dtype][0]
                yield Call(number, spec_of(next(others)), OUT_OF_PLACE, n, "auto", op)
            else:
                algorithm = next(algorithms)
                yield Call(number, self.spec, kind, next(counts), algorithm, next(ops))

    def make(
        self,
        ctx: tdcoll.CollectiveContext,
        call: Call,
        shared: torch.Tensor | None,
    ) -> list[Comparison]:
        """Make a call; return what it leaves in all memory that it has."""
        spec = call.spec
        tensor_size = call.n * ctx.world_size if spec.scatters else call.n
        owners = ctx.topology.pes
        data = [self.data(owner, call.number, tensor_size, spec) for owner in owners]
        given = [tensor.to(ctx.device) for tensor in data]
        placed = place(spec, call.kind, call.n, self.offset, ctx, self.tensor_dtype, shared)
        placed.tensor.copy_(given[ctx.rank])
        how = self.plan(ctx, call)
        root = self.roots[call.number % len(self.roots)] % ctx.world_size
        tensor, out, epilogue, more = self.finishing(ctx, call, placed)
        got = make_call(spec, call.kind, tensor, out, ctx, how, call.op, root, **more)
        assert got is out
        wanted = reference(spec, given, ctx.topology, call.op, root, epilogue)
        comparisons = []
        for memory in placed.memories:
            # The next call fills shared memory anew.
            content = memory.clone() if call.kind.needs_symmetric_memory else memory
            expected = placed.expected(memory, given[ctx.rank], wanted)
            comparisons.append(Comparison(content, expected))
        return comparisons

    def finishing(self, ctx: tdcoll.CollectiveContext, call: Call, placed: Placement) -> Any:
        """Return tensor and result as a call gets them, its epilogue, as it has to be, and further
        arguments."""
        if not self.columns or call.kind is OTHER or not call.spec.reduces:
            return placed.tensor, placed.out, None, {}
        columns = self.columns if call.n and call.n % self.columns == 0 else call.n
        shape = (call.n // columns, columns) if columns else (1, 0)
        # Each rank may take from another residual if it has a result of its own.
        owner = ctx.rank if call.spec.scatters else 0
        residual = residual_of(owner, call.number, shape, self.tensor_dtype, self.offset)
        residual = residual.to(ctx.device)
        extra = Residual(residual, residual.shape[1])
        # A tensor of one row has one dimension.
        sizes = (-1, columns) if shape[0] > 1 else (-1,)
        tensor = placed.tensor.view(sizes)
        out = tensor if placed.out is placed.tensor else placed.out.view(sizes)
        more = {"epilogue": less_twice, "extra": extra}
        return tensor, out, expected(residual, columns), more

    def plan(self, ctx: tdcoll.CollectiveContext, call: Call) -> str | Plan:
        """The call's plan made by hand, or the name of its algorithm if the policy cuts."""
        if not self.pieces or call.algorithm == "auto":
            return call.algorithm
        dtype = self.tensor_dtype if call.spec.reduces else None
        facts = facts_on(ctx, call.n * self.tensor_dtype.itemsize, dtype, **call.kind.form)
        return in_pieces(call.spec, facts, call.algorithm, self.pieces)
