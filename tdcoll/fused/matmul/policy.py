# SPDX-License-Identifier: Apache-2.0
"""The algorithm of a matmul that communicates, and how it is cut: a pure function of facts that are
the same on every rank.

A tuning table, which ``python -m tdcoll tune matmul`` measures, says which algorithm and which cut
are the fastest by the rows of the long matrix. Where it says nothing, the defaults here decide.

The default cuts were measured on one H200 with two ranks, bf16, as ``benchmarks/matmul_kernels.py``
does. Beside the times of the link, which that leaves out, the default decides by the rows of the
long matrix only: cuBLAS is taken up to :data:`COMPOSED_ROWS`, because it splits the depth of a few
rows and the kernels here don't.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from tdcoll.base.limits import MATMULS, MAX_CHUNKS, MOST_CHUNKS
from tdcoll.calls.plan import Facts, needs_stores, shares_gpu
from tdcoll.calls.tuning import Entry, Section

GATHER, SCATTER, REDUCE = NAMES = MATMULS

FUSED = "fused"
COPIED = "copied"
ONE_SHOT = "one_shot"
TWO_SHOT = "two_shot"
COMPOSED = "composed"

ALGORITHMS = {
    GATHER: (FUSED, COPIED, COMPOSED),
    SCATTER: (FUSED, COMPOSED),
    REDUCE: (ONE_SHOT, TWO_SHOT, COMPOSED),
}
"""The algorithms of each operation."""

MOST_RANKS = 8
"""Ranks of a fused kernel, at most, because it unrolls loops over peers."""

CHUNKS = MOST_CHUNKS
"""Signals of each rank in the contexts that tdcoll makes for these calls: a reduce-scatter has one
for each tile."""

FP8_STEP = 128
"""Depth of a step of fp8 operands, on which the bits depend."""

_TILE_PIECES = 126
"""Pieces that the rows of a tile may touch in one shard: one for each thread of the smallest thread
block, less two at its ends."""

_LEAST_PIECE, _MOST_PIECE = 16 << 10, 512 << 10
"""Bytes of a piece of a shard."""

COPIED_BYTES = 32 << 20
"""Bytes that a rank sends in an all-gather from which copy engines send them. A push takes time of
the multiprocessors, on one H200 0.6 to 0.8 us for each MB and peer. Copy engines take none, but the
call has a hop and a launch more, 5 to 10 us. Whole calls have not been compared."""

_LEAST_COPY = 4 << 20
"""Bytes of a piece for a copy engine, at least: a copy of 1 MB has half the speed of the link, one
of 4 MB three quarters."""

_COPIES = 4
"""Pieces of a shard for copy engines, at most, because the host takes a few us to queue each."""

_TWO_SHOT_BYTES = 64 << 10
"""Bytes of a result from which an all-reduce of more than two ranks is two-shot."""


@dataclass(frozen=True)
class Cut:
    """How a matmul is cut and compiled.

    Attributes:
        rows, columns, depth: of a tile of the result, and the depth of a step.
        num_stages: steps whose operands are on their way at the same time, and the step that is
            computed.
        num_warps: of a thread block.
        group: rows of tiles that are computed side by side.
    """

    rows: int
    columns: int
    depth: int
    num_stages: int
    num_warps: int
    group: int = 8

    def tiles(self, rows: int, columns: int) -> int:
        """Return the number of tiles of a result of this size."""
        return -(-rows // self.rows) * -(-columns // self.columns)

    @property
    def options(self) -> dict[str, int]:
        """Launch options."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


class MeasuredCut(NamedTuple):
    """How matmuls of a number of rows are made, as measured.

    Attributes:
        up_to: rows of the long matrix; None: of any number.
        cut: for operands of two bytes.
        pushers: thread blocks that send a shard.
        lag, stages: of a reduce-scatter, see :mod:`tdcoll.fused.matmul.kernels_scatter`.
    """

    up_to: int | None
    cut: Cut
    pushers: int = 0
    lag: int = 1
    stages: int = 1


CUTS = {
    GATHER: (
        MeasuredCut(256, Cut(64, 128, 128, 4, 4), pushers=8),
        MeasuredCut(1024, Cut(128, 128, 64, 4, 8), pushers=16),
        MeasuredCut(3072, Cut(128, 256, 64, 4, 8), pushers=8),
        MeasuredCut(6144, Cut(128, 256, 64, 3, 8), pushers=16),
        MeasuredCut(None, Cut(128, 256, 64, 4, 8), pushers=32),
    ),
    SCATTER: (
        MeasuredCut(256, Cut(64, 128, 128, 4, 4)),
        MeasuredCut(3072, Cut(128, 256, 64, 3, 8)),
        MeasuredCut(6144, Cut(128, 256, 64, 3, 8), lag=2),
        MeasuredCut(None, Cut(128, 256, 64, 3, 8)),
    ),
    REDUCE: (
        MeasuredCut(16, Cut(16, 64, 256, 4, 4)),
        MeasuredCut(128, Cut(64, 64, 128, 4, 4)),
        MeasuredCut(None, Cut(128, 128, 128, 3, 8)),
    ),
}
"""How the matmuls of each operation are made by default."""

COMPOSED_ROWS = {GATHER: range(256), SCATTER: range(1024), REDUCE: range(48)}
"""Rows with which the parts in a row are faster, because cuBLAS splits the depth. On 2 H200s a
scatter of 512 rows takes 93 us in one kernel, and 76 by cuBLAS and NCCL."""

REDUCED_ROWS = 256
"""Rows of a matmul + all-reduce in one kernel, at most. Beyond, the kernel's one hop sends too much
beside the link."""


@dataclass(frozen=True)
class MatmulShape:
    """A call, as the policy sees it.

    Attributes:
        name: of the operation.
        rows: of the long matrix: of all ranks' shards.
        columns, depth: of this rank's matmul.
        itemsize, out_itemsize: bytes of an element of ``x`` and of the result.
        full_precision: operands are fp32, and not multiplied in TF32.
        multiprocessors: of the GPU, the same on all ranks.
        has_descriptors: whether the GPU has asynchronous stores by descriptors (Hopper and later).
        measured: The entry of a tuning table that holds for the call; None if there is none.
    """

    name: str
    rows: int
    columns: int
    depth: int
    itemsize: int
    out_itemsize: int
    full_precision: bool = False
    multiprocessors: int = 132
    has_descriptors: bool = True
    measured: Entry | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of a rank's segment: of its shard before an all-gather, of its result, of the whole
        result."""
        return self.rows * (
            self.depth * self.itemsize if self.name == GATHER else self.columns * self.out_itemsize
        )

    @property
    def entry(self) -> MeasuredCut:
        """How it is made: as the tuning table says, and otherwise by default."""
        default = next(
            entry for entry in CUTS[self.name] if entry.up_to is None or self.rows <= entry.up_to
        )
        found = self.measured
        if found is None:
            return default
        cut = default.cut
        if found.tile is not None and found.num_stages is not None and found.num_warps is not None:
            cut = Cut(*found.tile, found.num_stages, found.num_warps)
        return MeasuredCut(
            found.up_to,
            cut,
            found.pushers or default.pushers,
            found.lag or default.lag,
            default.stages,
        )


@dataclass(frozen=True)
class MatmulPlan:
    """How a call is launched.

    Attributes:
        algorithm: one of the operation's.
        cut: of the matmul, if a kernel of tdcoll's does it.
        blocks: thread blocks that multiply.
        pushers, keepers, piece: of a gather: thread blocks that send, thread blocks that copy the
            gathered matrix for the caller, and bytes of a piece.
        lag, stages: of a reduce-scatter.
    """

    algorithm: str
    cut: Cut
    blocks: int
    pushers: int = 0
    keepers: int = 0
    piece: int = 0
    lag: int = 1
    stages: int = 1


def measured_entry(
    name: str, rows: int, world: int, sections: Sequence[Section], table: str = "a tuning table"
) -> Entry | None:
    """Return the first entry of a tuning table that holds for this many rows of an operation.

    Args:
        sections: For these GPUs.
        table: The table's name, for messages.

    Raises:
        ValueError: An entry's algorithm isn't one of the operation's.
    """
    for section in sections:
        if section.kind[1:] != (name, world, 1, False):
            continue
        for entry in section.entries:
            if entry.algorithm not in ALGORITHMS[name]:
                raise ValueError(
                    f"{table}: {section.where(entry)}: algorithm: expected one of "
                    f"{', '.join(ALGORITHMS[name])}, got {entry.algorithm}"
                )
            if entry.up_to is None or rows <= entry.up_to:
                return entry
    return None


def cut_of(shape: MatmulShape) -> Cut:
    """Return the cut, with steps of as many bytes for elements of any size."""
    cut = shape.entry.cut
    if shape.itemsize == 1:
        return Cut(cut.rows, min(cut.columns, 128), FP8_STEP, 3, cut.num_warps)
    if (
        shape.full_precision
    ):  # without tensor cores, a thread has to keep all operands of its part in registers
        return Cut(min(cut.rows, 32), 64, 32, 3, 8)
    if shape.itemsize == 4:
        return Cut(cut.rows, min(cut.columns, 128), max(16, cut.depth // 2), 3, cut.num_warps)
    if (
        shape.out_itemsize == 4 and cut.columns > 128
    ):  # a tile of the result takes shared memory beside the operands
        return Cut(cut.rows, 128, cut.depth, 3, cut.num_warps)
    return cut


def plan_of(shape: MatmulShape, world: int, algorithm: str, keeps: bool) -> MatmulPlan:
    """Return the plan of a call by an algorithm.

    Args:
        keeps: whether the gathered matrix is wanted.
    """
    if shape.measured is not None and shape.measured.algorithm != algorithm:
        shape = replace(shape, measured=None)
    cut = cut_of(shape)
    entry = shape.entry
    whole_rows = shape.rows
    if shape.name == SCATTER and algorithm == FUSED:
        whole_rows = shape.rows // world
    blocks = max(1, min(shape.multiprocessors, cut.tiles(whole_rows, shape.columns)))
    if shape.name != GATHER or algorithm == COMPOSED:
        return MatmulPlan(algorithm, cut, blocks, lag=entry.lag, stages=entry.stages)
    shard = shape.nbytes // world
    keepers = entry.pushers if keeps else 0
    if algorithm == COPIED:
        piece = max(_LEAST_COPY, -(-shard // (1024 * _COPIES)) * 1024)
        return MatmulPlan(algorithm, cut, blocks, 0, keepers, piece)
    row_bytes = shape.depth * shape.itemsize
    least = max(_LEAST_PIECE, cut.rows * row_bytes // _TILE_PIECES, shard // MAX_CHUNKS)
    piece = max(least, min(_MOST_PIECE, shard // (4 * entry.pushers))) // 1024 * 1024 + 1024
    pieces = max(1, -(-shard // piece))
    senders = min(entry.pushers, pieces * max(1, world - 1))
    return MatmulPlan(algorithm, cut, blocks, senders, keepers, piece)


def is_whole(shape: MatmulShape, plan: MatmulPlan, world: int) -> bool:
    """Return whether tiles of a gather span several shards, because shards have fewer rows than a
    tile."""
    return world > 1 and shape.rows // world < plan.cut.rows


def inbox_bytes(shape: MatmulShape, plan: MatmulPlan, world: int) -> int:
    """Return the bytes of a rank's segment in the inbox, or in the Lamport inbox of an
    all-reduce."""
    cut = plan.cut
    if plan.algorithm == COMPOSED:
        return 0
    if shape.name == GATHER:
        return shape.rows // world * (shape.depth * shape.itemsize + 4)
    if shape.name == SCATTER:
        return scatter_bytes(cut, shape.rows // world, shape.columns, shape.out_itemsize)
    two_shot = plan.algorithm == TWO_SHOT
    return reduce_bytes(
        cut, shape.rows, shape.columns, shape.out_itemsize, world, two_shot=two_shot
    )


def scatter_bytes(cut: Cut, rows: int, columns: int, itemsize: int) -> int:
    """Return the bytes that the parts of one rank take in the inbox of another."""
    return cut.tiles(rows, columns) * cut.rows * cut.columns * itemsize


def reduce_bytes(
    cut: Cut, rows: int, columns: int, itemsize: int, world: int, *, two_shot: bool
) -> int:
    """Return the bytes that the words of one rank take in the Lamport memory of another."""
    stride = min(rows, cut.rows) * cut.columns * itemsize // 16
    words = 2 * -(-stride // world) if two_shot else stride
    return 16 * words * cut.tiles(rows, columns)


def problem_of(shape: MatmulShape, plan: MatmulPlan, facts: Facts) -> str | None:
    """Return why a call doesn't support a plan, as a sentence that begins with ``needs``; None if
    it does."""
    world = facts.topology.world_size
    if plan.algorithm == COMPOSED:
        return None
    problem = needs_stores(facts)
    if problem is not None:
        return problem
    if not shape.has_descriptors:
        return "needs GPUs with tensor descriptors (Hopper and later); got "
    if world > MOST_RANKS:
        return f"needs at most {MOST_RANKS} ranks; got "
    if plan.algorithm == COPIED and is_whole(shape, plan, world):
        return f"needs at least {plan.cut.rows} rows of each rank; got {shape.rows // world} on "
    if shares_gpu(facts):
        return "needs all multiprocessors, hence a context without max_blocks; got "
    nbytes = inbox_bytes(shape, plan, world)
    room = facts.lamport_bytes if shape.name == REDUCE else facts.capacity
    if nbytes > room:
        argument = "lamport_bytes" if shape.name == REDUCE else "max_bytes_per_rank"
        return f"needs {argument}={nbytes} or more in the context; got {room} on "
    signals = 0
    if shape.name == SCATTER:
        signals = plan.cut.tiles(shape.rows // world, shape.columns)
    elif shape.name == GATHER:
        signals = -(-(shape.nbytes // world) // plan.piece)
    if signals > facts.chunks:
        return f"needs chunks={signals} or more in the context; got {facts.chunks} on "
    if plan.algorithm == TWO_SHOT:
        words = min(shape.rows, plan.cut.rows) * plan.cut.columns * shape.out_itemsize // 16
        if (
            world < 2
            or shape.columns < plan.cut.columns
            or (world - 1) * -(-words // world) >= words
        ):
            return f"needs a share of each tile for each of at least 2 ranks; got {shape.rows} rows on "
    return None


def choose(
    shape: MatmulShape,
    facts: Facts,
    algorithm: str | MatmulPlan,
    batch_invariant: bool,
    keeps: bool,
) -> tuple[MatmulPlan, str]:
    """Return the plan of a call, and the reason in words if it isn't the default's one kernel.

    Args:
        facts: of the context; ``nbytes`` is ignored.
        algorithm: ``"auto"`` or one of :data:`ALGORITHMS`; or, from measurements and tests, a plan.
            ``"auto"`` takes what the tuning table says if that supports the call, and the default
            otherwise. If it is named, the table's cut holds only for its own algorithm.
        batch_invariant: cuBLAS is excluded, so that few rows are no reason against one kernel.
    """
    world = facts.topology.world_size
    where = facts.topology.describe()
    names = ALGORITHMS[shape.name]
    if isinstance(algorithm, MatmulPlan):
        problem = problem_of(shape, algorithm, facts)
        if problem is None and keeps and algorithm.algorithm != COMPOSED and not algorithm.keepers:
            problem = "has no keepers, which gathered=True needs"
        if problem is not None:
            raise ValueError(f"algorithm={algorithm} {problem}{where}")
        return algorithm, ""
    if algorithm not in ("auto", *names):
        raise ValueError(f"algorithm must be one of auto, {', '.join(names)}; got {algorithm!r}")
    if algorithm != "auto":
        plan = plan_of(shape, world, algorithm, keeps)
        problem = problem_of(shape, plan, facts)
        if problem is not None:
            raise ValueError(f"algorithm={algorithm!r} {problem}{where}. Use algorithm='auto'.")
        return plan, ""
    entry = shape.measured
    if entry is not None:
        plan = plan_of(shape, world, entry.algorithm, keeps)
        problem = problem_of(shape, plan, facts)
        if problem is not None:
            problem += where
        if batch_invariant and entry.algorithm == COMPOSED:
            problem = "is excluded by batch_invariant=True"
        if problem is None:
            return plan, by_table(entry)
        default, why = choose(replace(shape, measured=None), facts, "auto", batch_invariant, keeps)
        reasons = [f"{by_table(entry)}, {entry.algorithm}, {problem}"]
        if why:
            reasons.append(why)
        return default, "; ".join(reasons)
    composed = plan_of(shape, world, COMPOSED, keeps)
    if not batch_invariant and shape.rows in COMPOSED_ROWS[shape.name]:
        return composed, f"two parts are faster up to {COMPOSED_ROWS[shape.name].stop - 1} rows"
    if world == 1:
        return composed, "there is nothing to communicate"
    if shape.name == REDUCE and shape.rows > REDUCED_ROWS:
        return composed, f"one kernel is for up to {REDUCED_ROWS} rows"
    order = [name for name in names if name != COMPOSED]
    if shape.name == REDUCE and world > 2 and shape.nbytes >= _TWO_SHOT_BYTES:
        order.reverse()
    if shape.name == GATHER and (world - 1) * shape.nbytes // world >= COPIED_BYTES:
        order.reverse()
    reasons = []
    for name in order:
        plan = plan_of(shape, world, name, keeps)
        problem = problem_of(shape, plan, facts)
        if problem is None:
            return plan, ""
        reasons.append(f"{name} {problem}{where}")
    return composed, "; ".join(reasons)


def by_table(entry: Entry) -> str:
    """Return the reason for a plan of a tuning table."""
    up_to = "any number of rows" if entry.up_to is None else f"up to {entry.up_to} rows"
    return f"the tuning table's entry for {up_to}"
