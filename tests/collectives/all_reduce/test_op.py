# SPDX-License-Identifier: Apache-2.0
"""All-reduce as users call it: what is chosen, bits that depend on nothing but the values, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import ReduceOp

import tdcoll
import tdcoll.distributed
from tdcoll.collectives._host.plan import MOST_EPOCHS, Facts, Plan
from tdcoll.collectives.all_reduce.algorithms import ALL_REDUCE
from tdcoll.collectives.all_reduce.policy import POLICY, part_bytes
from tdcoll.collectives.reduce_scatter.reference import reduce_parts
from tdcoll.limits import lamport_bytes
from tdcoll.primitives.group import EPOCH_SHIFT
from tdcoll.primitives.reduce import OPERATIONS_OF, TORCH_OPERATIONS
from tdcoll.runtime.topology import Topology
from tdcoll.testing import World
from tdcoll.tuning import SIMULATOR, Entry, Section, Table

from ..reduce_scatter.cases import same_bits, values

FP8 = torch.float8_e5m2
K, M, G = 1 << 10, 1 << 20, 1 << 30


def nodes_of(*sizes: int) -> Topology:
    ids = [node for node, size in enumerate(sizes) for _ in range(size)]
    return Topology.of(0, range(len(ids)), ids)


def choose(nbytes: int, nodes: tuple[int, ...], algorithm: Any = "auto", sections: Any = (), **facts: Any) -> Plan:
    return POLICY.choose(Facts(nbytes, nodes_of(*nodes), **{"itemsize": 4, **facts}), algorithm, sections)


# ---------------------------------------------------------------------- the policy

USUAL = {"stores": True, "lamport_bytes": 512 * K, "ll_bytes": 340 * K}
FLAGS = {**USUAL, "lamport_bytes": 0}
LARGE = {**USUAL, "lamport_bytes": 16 * M}


@pytest.mark.parametrize(
    ("nbytes", "nodes", "facts", "algorithm", "chunk"),
    [
        (0, (4,), USUAL, "one_shot", 64 * 16),
        (1, (4,), USUAL, "one_shot", 64 * 16),
        (0, (4,), FLAGS, "one_shot", 64 * 12),
        (64 * K, (4,), FLAGS, "one_shot", 64 * 12),
        (128 * K, (4,), USUAL, "one_shot", 64 * 16),
        (640 * K // 3, (4,), USUAL, "one_shot", 128 * 16),
        (640 * K // 3 + 1, (4,), USUAL, "two_shot", 64 * 16),
        (60 * K, (8,), USUAL, "one_shot", 64 * 16),
        (61 * K, (8,), USUAL, "two_shot", 64 * 16),
        (1536 * K, (2,), LARGE, "one_shot", 512 * 16),
        (1536 * K + 1, (2,), LARGE, "two_shot", 512 * 16),
        (16 * M, (2,), LARGE, "two_shot", 512 * 16),
        # Several epochs, of at least 4 MB each:
        (16 * M + 1, (2,), LARGE, "two_shot", 512 * 16),
        (G, (2,), LARGE, "two_shot", 512 * 16),
        (16 * M, (3,), {**LARGE, "lamport_bytes": 32 * M // 3}, "two_shot", 512 * 16),  # 16 bytes over the room
        (64 * M, (8,), {**LARGE, "lamport_bytes": 4 * M}, "two_shot", 512 * 16),
        (8 * M, (4,), {**LARGE, "lamport_bytes": 2 * M}, "two_shot", 512 * 16),
        (8 * M - 32, (4,), {**LARGE, "lamport_bytes": 2 * M}, "direct", 16 * K),
        (16 * M + 1, (2,), {**LARGE, "symmetric": True}, "direct", 32 * K + 128),
        (16 * M + 1, (2,), {**LARGE, "lamport_bytes": 0}, "direct", 32 * K + 128),
        (16 * M + 1, (2,), {**LARGE, "simulated": True}, "direct", 32 * K + 128),
        (16 * M + 1, (2,), {**LARGE, "stores": False}, "1d", 509 * 128),
        (M, (4,), USUAL, "two_shot", 128 * 16),
        (M + 1, (4,), USUAL, "direct", 121 * 128),  # both halves are over the room
        (G, (8,), USUAL, "direct", 512 * K),
        (64, (4,), {**USUAL, "itemsize": 8}, "direct", 128),
        (64, (4,), {**USUAL, "simulated": True}, "direct", 128),
        (64, (4,), {}, "1d", 128),  # ranks that cannot store to each other's memory
        (64, (2, 2), USUAL, "2d", 128),
        (64, (2, 1), USUAL, "1d", 128),
        (64, (1, 1), USUAL, "1d", 128),
        (64, (2, 2), {**USUAL, "stores": False}, "1d", 128),
        (64, (1,), USUAL, "one_shot", 64 * 16),
    ],
)
def test_what_is_taken_where_nothing_was_measured(
    nbytes: int, nodes: tuple[int, ...], facts: dict[str, Any], algorithm: str, chunk: int
) -> None:
    plan = choose(nbytes, nodes, **facts)
    assert (plan.algorithm, plan.chunk) == (algorithm, chunk)
    small = choose(nbytes, nodes, max_programs=100, **facts)
    assert "shot" in small.algorithm or small.channels * (2 * sum(nodes) + 1) < 100


@given(
    nbytes=st.one_of(st.integers(0, 4096), st.integers(0, 4 * M)),
    world=st.integers(1, 16),
    itemsize=st.sampled_from([1, 2, 4, 8]),
    lamport=st.sampled_from([0, 1, 100, 128 * K, 2 * M]),
    flagged=st.sampled_from([0, 100, 128 * K]),
    channels=st.sampled_from([2, 3, 512]),
)
def test_plans_cover_the_data_and_fit(
    nbytes: int, world: int, itemsize: int, lamport: int, flagged: int, channels: int
) -> None:
    """Whatever the policy makes can be launched, in its first epoch: its own check takes it."""
    facts = Facts(
        nbytes, nodes_of(world), flagged, stores=True, lamport_bytes=lamport, itemsize=itemsize, channels=channels
    )
    tried = 0
    for name in POLICY.names:
        if POLICY.admits(name, facts):
            plan, tried = POLICY.choose(facts, name), tried + 1
            assert POLICY.choose(facts, plan) == plan
            if name in ("one_shot", "two_shot"):
                epoch = POLICY.rules[name].epoch(facts)
                assert epoch == nbytes or name == "two_shot"
                width = 16 if plan.chunk % 16 == 0 and plan.chunk // 16 & (plan.chunk // 16 - 1) == 0 else 12
                words = max(1, -(-epoch // width))
                sent = words if name == "one_shot" else 2 * -(-words // world)
                room = -(-lamport // 16) if width == 16 else max(1, -(-flagged // 12))
                assert sent <= room
                assert (plan.channels - 1) * plan.chunk < width * (words if name == "one_shot" else -(-words // world))
            else:
                part = part_bytes(nbytes, world)
                assert part % 16 == 0
                assert nbytes <= world * part < nbytes + 16 * world + 16 * (nbytes == 0)
                assert 2 * plan.channels <= channels
    assert tried >= 2
    assert POLICY.choose(facts).algorithm in POLICY.names


@pytest.mark.parametrize(
    ("algorithm", "facts", "message"),
    [
        ("ring", {}, "algorithm must be one of auto, one_shot, two_shot, direct, 1d, 2d; got 'ring'"),
        (
            "one_shot",
            {**USUAL, "itemsize": 8},
            "'one_shot' needs elements of at most 4 bytes; got elements of 8 bytes on",
        ),
        (
            "two_shot",
            {},
            "algorithm='two_shot' needs one node whose ranks can store to each other's memory; got 4 rank",
        ),
        (
            "one_shot",
            {"stores": True, "ll_bytes": 12},
            "needs fewer bytes, or a context with more lamport_bytes or fla",
        ),
        *(
            (
                "two_shot",
                {"stores": True, "lamport_bytes": n},
                "two_shot' needs fewer bytes, or a context with more",
            )
            for n in (0, 16)  # none, and a word for one of the two halves
        ),
        ("direct", {}, "algorithm='direct' needs one node whose ranks can store"),
        (
            "direct",
            {"stores": True, "channels": 1},
            "algorithm='direct' needs a context with at least 2 channels; got 1",
        ),
        ("1d", {"channels": 1}, "algorithm='1d' needs a context with at least 2 channels; got 1 on 4 rank"),
        (Plan("direct", 1, 128, 3), USUAL, "a Plan's num_warps must be one of 1, 2, 4, 8, 16, 32; got 3"),
        (Plan("direct", 1, 24, 1), USUAL, "chunks must be a multiple of 16 bytes and cover all 32 bytes; got 1 of 24"),
        (Plan("direct", 3, 16, 1), {**USUAL, "channels": 5}, "a Plan's channels must be 1 to 2, got 3"),
        (Plan("one_shot", 1, 96, 1), USUAL, "must be 16 times a power of two, at most 16384, bytes and cover all 112"),
        (Plan("one_shot", 1, 128, 1), FLAGS, "must be 12 times a power of two, at most 12288, bytes and cover all 108"),
        (Plan("one_shot", 3, 64, 1), USUAL, "a Plan's channels must be 1 to 2, got 3"),
        (Plan("two_shot", 2, 32, 1), USUAL, "a Plan's channels must be 1 to 1, got 2"),
    ],
)
def test_what_cannot_be_had(algorithm: Any, facts: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        choose(100, (4,), algorithm, **facts)


def test_auto_never_says_to_use_auto() -> None:
    """A context of one channel has no signal for sums."""
    assert choose(100, (4,), **USUAL, channels=1, simulated=True).algorithm == "one_shot"
    assert choose(M, (4,), **USUAL, channels=1, simulated=True).algorithm == "two_shot"
    for nodes in ((4,), (2, 2)):
        with pytest.raises(ValueError, match=r"^all_reduce needs a context with at least 2 channels; got 1 on [^.]*$"):
            choose(G, nodes, **FLAGS, channels=1)


def test_words_are_for_less_than_half_of_what_32_bits_count() -> None:
    huge = {**USUAL, "lamport_bytes": 4 * G, "ll_bytes": 4 * G}
    assert choose(G - 1, (2,), "two_shot", **huge).algorithm == "two_shot"
    for nbytes, several in ((G, [G // 2] * 2), (3 * G, [3 * G // 4] * 4)):
        assert epochs(Facts(nbytes, nodes_of(2), **huge)) == several
        for name, facts in (("one_shot", huge), ("two_shot", {**huge, "lamport_bytes": 0})):
            with pytest.raises(ValueError, match=f"algorithm='{name}' needs less than {G} bytes"):
                choose(nbytes, (2,), name, **facts)


def epochs(facts: Facts) -> list[int]:
    """Bytes of each epoch of a two-shot."""
    each = POLICY.rules["two_shot"].epoch(facts)
    return [min(each, facts.nbytes - begin) for begin in range(0, facts.nbytes, each)]


@given(
    nbytes=st.one_of(st.integers(1, 4096), st.integers(1, 64 * M)),
    world=st.integers(1, 16),
    lamport=st.sampled_from([16, 32, 33, 100, 4 * K, 2 * M]),
    flagged=st.sampled_from([-1, 0, 100, 4 * K]),
)
def test_two_shot_is_as_few_equal_epochs_as_can_be(nbytes: int, world: int, lamport: int, flagged: int) -> None:
    facts = Facts(nbytes, nodes_of(world), flagged, stores=True, lamport_bytes=lamport, itemsize=1)
    room = -(-lamport // 16) // 2 * world * 16
    if not POLICY.admits("two_shot", facts):
        assert nbytes > MOST_EPOCHS * room
        return
    first, *others = epochs(facts)
    if not others:  # by either kind of words
        return
    assert len(others) == -(-nbytes // room) - 1 < MOST_EPOCHS
    assert first % 16 == 0
    assert others[:-1] == [first] * (len(others) - 1)
    assert first - 16 * len(others) - 16 < others[-1] <= first <= room
    for each in (first, others[-1]):
        part = Facts(each, facts.topology, flagged, stores=True, lamport_bytes=lamport, itemsize=1)
        assert epochs(part) == [each]
    assert POLICY.choose(facts, "two_shot") == POLICY.choose(
        Facts(first, facts.topology, flagged, stores=True, lamport_bytes=lamport, itemsize=1), "two_shot"
    )


def test_entries_of_a_table() -> None:
    def plan(entry: Entry, nbytes: int = 100 * K, **facts: Any) -> Plan:
        table = Table((Section(SIMULATOR, "all_reduce", 4, 1, "eager", False, (entry,)),))
        sections = POLICY.sections(Table.parse(table.text()).sections, "t.json")
        return choose(nbytes, (4,), sections=sections, **{**USUAL, **facts})

    assert plan(Entry(None, "two_shot", chunk=64 * 16, num_warps=2)) == Plan("two_shot", 25, 64 * 16, 2)
    assert plan(Entry(None, "one_shot", chunk=256 * 12, num_warps=8)) == Plan("one_shot", 50, 128 * 16, 4)  # at most
    assert plan(Entry(None, "one_shot", chunk=256 * 12), lamport_bytes=0) == Plan("one_shot", 34, 256 * 12, 8)
    assert plan(Entry(None, "direct", channels=5)) == Plan("direct", 5, 40 * 128, 8)
    assert plan(Entry(None, "two_shot"), nbytes=M + 1).algorithm == "two_shot"  # in two epochs
    assert plan(Entry(None, "two_shot"), nbytes=G + 1).algorithm == "direct"  # which cannot be had
    for entry, message in (
        (Entry(None, "ll"), "algorithm: expected one of one_shot, two_shot, direct, 1d, 2d, got ll"),
        (Entry(None, "nccl"), "algorithm: expected one of one_shot, two_shot, direct, 1d, 2d, got nccl"),
        (Entry(None, "one_shot", chunk=640), "expected 16 times a power of two, from 512 .* or 12 times .* got 640"),
        (Entry(None, "direct", chunk=100), "chunk: expected a multiple of 128 bytes, got 100"),
    ):
        with pytest.raises(ValueError, match=message):
            plan(entry)


def test_room_for_words_by_default() -> None:
    assert [lamport_bytes(world, 1) * world for world in (1, 2, 4, 8)] == [32 * M] * 4
    assert lamport_bytes(8, 2) == 0


# ---------------------------------------------------------------------- bits

ANY = st.sampled_from(["auto", "one_shot", "two_shot", "direct", "1d"])


@settings(max_examples=20, deadline=None)
@given(
    algorithm=ANY,
    world=st.integers(1, 4),
    kind=st.sampled_from([(dtype, op) for dtype, ops in OPERATIONS_OF.items() if dtype.itemsize <= 4 for op in ops]),
    rows=st.integers(1, 5),
    width=st.integers(1, 20),
    row=st.integers(0, 4),
    words=st.sampled_from([0, 64, 4096]),
    flags=st.sampled_from([0, 4096]),
    seed=st.integers(0, 9),
)
def test_a_row_has_the_bits_that_it_has_alone(
    algorithm: str, world: int, kind: Any, rows: int, width: int, row: int, words: int, flags: int, seed: int
) -> None:
    """Of a batch of any size, by any algorithm, in one epoch or several, with chunks cut anyhow, on every rank."""
    (dtype, op), row = kind, row % rows
    if algorithm == "one_shot" or (algorithm == "two_shot" and not (words and dtype.is_floating_point)):
        flags = 4096  # which take a call that cannot be several epochs
    batches = [values(pe, seed, rows * width, dtype).view(rows, width) for pe in range(world)]
    wanted = reduce_parts(batches, [0] * world, op)
    reached = []

    def host(pe: int) -> None:
        with tdcoll.CollectiveContext(max_bytes_per_rank=96, flagged_bytes=flags, lamport_bytes=words) as ctx:
            whole = tdcoll.all_reduce(batches[pe], ctx, op=op, algorithm=algorithm)
            alone = tdcoll.all_reduce(batches[pe][row].clone(), ctx, op=op)
            ctx.check()
            assert same_bits(whole, wanted) == same_bits(alone, wanted[row]) == 0
            reached.append(pe)

    World(world, seed=seed, heap_bytes=M).run(host)
    assert len(reached) == world


# ---------------------------------------------------------------------- in place


def test_calls_in_place_go_by_sections_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several epochs as well; and with ``out=tensor`` a call is out of place for the table."""
    table = Table(
        tuple(
            Section(SIMULATOR, "all_reduce", 2, 1, "eager", in_place, (Entry(None, algorithm),))
            for in_place, algorithm in ((False, "1d"), (True, "direct"))
        )
    )
    took: set[tuple[bool, int, str]] = set()
    real = ALL_REDUCE.launches_of

    def noted(ctx: Any, facts: Facts, plan: Plan, *more: Any) -> Any:
        if not facts.graph:
            took.add((facts.in_place, facts.nbytes, plan.algorithm))
        return real(ctx, facts, plan, *more)

    monkeypatch.setattr(ALL_REDUCE, "launches_of", noted)

    def host(pe: int) -> None:
        with tdcoll.CollectiveContext(max_bytes_per_rank=256, tuning=table, debug=True) as ctx:
            for n in (16, 400):
                expected = [2.0 * i + 1 for i in range(n)]
                for _ in range(3):  # the first goes the long way
                    x = torch.arange(n, dtype=torch.float32) + pe
                    y = x.clone()
                    assert tdcoll.all_reduce_(x, ctx) is x
                    assert x.tolist() == expected
                    assert tdcoll.all_reduce(y, ctx, y) is y
                    assert y.tolist() == expected
            with pytest.raises(tdcoll.RankMismatchError, match="differ in in_place"):
                (tdcoll.all_reduce_ if pe else tdcoll.all_reduce)(torch.ones(7), ctx)

    World(2).run(host)
    assert took == {(place, n, "direct" if place else "1d") for place in (False, True) for n in (28, 64, 1600)}


# ---------------------------------------------------------------------- errors and contexts


def test_bad_arguments_are_named() -> None:
    def host(pe: int) -> None:
        x = torch.zeros(8)
        call, by_hand = tdcoll.all_reduce, Plan("direct", 4, 128, 1)
        with tdcoll.CollectiveContext(max_bytes_per_rank=64) as ctx:
            for kind, message, arguments in (
                (TypeError, r"tensor must be a torch\.Tensor", ([1.0], ctx)),
                (TypeError, r"ctx must be a .*CollectiveContext.*got 3", (x, 3)),
                (TypeError, "tensor must be of float16, .*float8_e5m2; got torch.int16", (x.to(torch.int16), ctx)),
                (ValueError, "op must be one of max, min for torch.int8; got 'sum'", (x.to(torch.int8), ctx)),
                (ValueError, "one of sum, mean, max, min for torch.float8_e5m2", (x.to(FP8), ctx, None, "prod")),
                (ValueError, "tensor must be contiguous", (x.view(2, 4).T, ctx)),
                (ValueError, "op must be one of sum, mean, max, min, prod; got 'avg'", (x, ctx, None, "avg")),
                (ValueError, "sum, max, min, prod for torch.int32; got 'mean'", (x.int(), ctx, None, "mean")),
                (ValueError, "op must be one of SUM, AVG, MAX, MIN, PRODUCT; got BAND", (x, ctx, None, ReduceOp.BAND)),
                (TypeError, r"out must be a torch\.Tensor", (x, ctx, 3)),
                (ValueError, r"out must be torch.float32 of shape \[8\]; got torch.float32 of \[4\]", (x, ctx, x[:4])),
                (ValueError, r"out must be torch.float32 of shape \[8\]; got torch.float64", (x, ctx, x.double())),
                (ValueError, "out must be contiguous", (x[:4], ctx, torch.zeros(8)[::2])),
                (ValueError, r"out must not overlap tensor, except to be tensor; .* byte 4 of", (x[:-1], ctx, x[1:])),
                (ValueError, "algorithm must be one of auto, one_shot", (x, ctx, None, "sum", "ring")),
                (TypeError, "algorithm must be a str or a Plan", (x, ctx, None, "sum", 3)),
                (ValueError, "'one_shot' needs elements of at most 4", (x.double(), ctx, None, "sum", "one_shot")),
                (ValueError, "no Plan for a call of several epochs", (torch.zeros(99), ctx, None, "sum", by_hand)),
                (tdcoll.ContextError, r"epochs of 64 bytes. .*max_bytes_per_rank=\d+ or", (torch.zeros(1 << 15), ctx)),
            ):  # fmt: skip
                with pytest.raises(kind, match=message):
                    call(*arguments)
            for kind, message, arguments in (
                (ValueError, "op must be one of sum, mean, max, min, prod; got 'SUM'", (x, "SUM")),
                (TypeError, r"tensor must be a torch\.Tensor", (3,)),
                (ValueError, "op must be one of SUM, AVG, MAX, MIN, PRODUCT; got BXOR", (x, ReduceOp.BXOR)),
                (ValueError, r"SUM, MAX, MIN, PRODUCT for torch\.int32; got AVG", (x.int(), ReduceOp(ReduceOp.AVG))),
                (ValueError, r"op must be one of MAX, MIN for torch\.uint8; got SUM", (x.byte(),)),
                (TypeError, r"tensor must be of float16, .*; got torch\.bool", (x.bool(),)),
            ):
                with pytest.raises(kind, match=message):
                    tdcoll.distributed.all_reduce(*arguments)
            assert tdcoll.all_reduce_(x + pe, ctx).tolist() == [1.0] * 8
            ctx.check()
        with pytest.raises(tdcoll.ContextError, match="closed"):
            call(x, ctx)

    World(2).run(host)


@pytest.mark.parametrize("op", TORCH_OPERATIONS)
def test_operations_of_torch_are_the_named_ones(op: Any) -> None:
    """The ranks may spell them differently, also where debug mode compares the arguments."""
    name = TORCH_OPERATIONS[op]

    def host(pe: int) -> None:
        x = torch.tensor([3.0, -2.0, 0.5]) * (pe + 1)
        with tdcoll.CollectiveContext(max_bytes_per_rank=256, debug=True) as ctx:
            whole, part = tdcoll.all_reduce(x, ctx, op=name), tdcoll.reduce_scatter(torch.cat([x, x]), ctx, op=name)
            for spelled in (op, ReduceOp(op), name):
                mixed: Any = spelled if pe else name
                for _ in "ab":  # the second call takes the short way
                    assert torch.equal(tdcoll.all_reduce(x, ctx, op=mixed), whole)
                    assert torch.equal(tdcoll.all_reduce_(x.clone(), ctx, op=mixed), whole)
                    assert torch.equal(tdcoll.reduce_scatter(torch.cat([x, x]), ctx, op=mixed), part)
                mine = x.clone()
                assert tdcoll.distributed.all_reduce(mine, mixed) is None
                assert torch.equal(mine, whole)
            other: Any = "min" if pe else ReduceOp.MAX
            with pytest.raises(tdcoll.RankMismatchError, match="op"):
                tdcoll.all_reduce(x, ctx, op=other)

    World(2).run(host)


def test_asynchronous_drop_ins_return_a_work() -> None:
    def host(pe: int) -> None:
        world = 3
        x, out, part = torch.full((2,), pe + 1.0), torch.zeros(2 * world), torch.zeros(2)
        for call, result, wanted in (
            (lambda: tdcoll.distributed.all_reduce(x, async_op=True), x, [6.0, 6.0]),
            (lambda: tdcoll.all_gather_into_tensor(out, x + pe, async_op=True), out, [6.0, 6, 7, 7, 8, 8]),
            (lambda: tdcoll.reduce_scatter_tensor(part, out, "max", async_op=True), part, [6.0 + pe] * 2),
        ):
            work = call()
            assert isinstance(work, torch.distributed.Work)
            assert work.wait() is True
            assert work.is_completed()
            assert work.is_success()
            assert result.tolist() == wanted
            assert [given.data_ptr() for given in work.get_future().wait()] == [result.data_ptr()]

    World(3).run(host)


def test_an_asynchronous_drop_in_without_its_peer_says_so() -> None:
    told = {}

    def host(pe: int) -> None:
        x = torch.ones(2)
        tdcoll.distributed.all_reduce(x)
        if pe == 1:
            world.kill(pe)
        with pytest.raises(tdcoll.distributed.BackendTimeout) as raised:
            tdcoll.distributed.all_reduce(x, async_op=True)
        told[pe] = (raised.value.rank, raised.value.peer)

    world = World(2)
    world.run(host)
    assert told == {0: (0, 1)}


def test_symmetric_results_are_as_they_should_be_on_all_ranks() -> None:
    def host(pe: int) -> None:
        x, call, here = torch.ones(64), tdcoll.all_reduce, tdcoll.empty((128,))
        with tdcoll.CollectiveContext(max_bytes_per_rank=256, debug=True) as ctx:
            for kind, message, out in (
                (ValueError, r"out must be given with symmetric=True: one that tdcoll\.empty\(\) has made", None),
                (tdcoll.NotSymmetricError, "out must .*symmetric", torch.empty(64)),
                (ValueError, r"out must be torch.float32 of shape \[64\]", here),
            ):
                with pytest.raises(kind, match=message):
                    call(x, ctx, out, symmetric=True)
            with pytest.raises(TypeError, match="symmetric must be a bool, got 1"):
                call(x, ctx, here[:64], symmetric=1)
            with pytest.raises(tdcoll.RankMismatchError, match="differ in offset in the symmetric heap"):
                call(x, ctx, here[64 * pe :][:64], symmetric=True)
            with pytest.raises(tdcoll.RankMismatchError, match="differ in"):
                call(x, ctx, here[:64], symmetric=pe == 0)
            for algorithm in ("auto", "direct", "one_shot", "1d"):
                got = call(x + pe, ctx, here[:64], algorithm=algorithm, symmetric=True)
                assert got.tolist() == [3.0] * 64
            assert tdcoll.all_reduce_(here[:0], ctx, symmetric=True).shape == (0,)
            ctx.check()
        alone = tdcoll.empty((64,), group=[pe])
        alone_is_wrong = pytest.raises(tdcoll.NotSymmetricError, match=r"out must be made by .* belongs to ranks \[")
        with tdcoll.CollectiveContext(max_bytes_per_rank=256) as ctx, alone_is_wrong:
            call(x, ctx, alone, symmetric=True)

    World(2).run(host)


@settings(max_examples=12, deadline=None)
@given(
    world=st.integers(1, 4),
    kind=st.sampled_from([(dtype, op) for dtype, ops in OPERATIONS_OF.items() for op in ops]),
    count=st.integers(0, 200),
    offset=st.integers(0, 5),
    most=st.sampled_from([48, 256, 4096]),
    in_place=st.booleans(),
    seed=st.integers(0, 9),
)
def test_symmetric_results_have_the_same_bits(
    world: int, kind: Any, count: int, offset: int, most: int, in_place: bool, seed: int
) -> None:
    """Of any dtype, size and alignment, in one epoch or several."""
    (dtype, op), reached = kind, []
    given_ = [values(pe, seed, count, dtype) for pe in range(world)]
    wanted = reduce_parts(given_, [0] * world, op)

    def host(pe: int) -> None:
        out = tdcoll.empty((offset + count,), dtype)[offset:]
        with tdcoll.CollectiveContext(max_bytes_per_rank=most) as ctx:
            for _ in range(2):
                tensor = out.copy_(given_[pe]) if in_place else given_[pe]
                tdcoll.all_reduce(tensor, ctx, out, op, "direct", symmetric=True)
                assert same_bits(out.clone(), wanted) == 0
            ctx.check()
        reached.append(pe)

    World(world, seed=seed, weak=True, heap_bytes=M).run(host)
    assert len(reached) == world


def test_a_context_says_what_it_must_be_made_with() -> None:
    """And with that, the call is made."""

    def host(pe: int) -> None:
        x = torch.ones(60_000)
        with tdcoll.CollectiveContext(max_bytes_per_rank=0) as ctx:
            with pytest.raises(tdcoll.ContextError, match=r"240000 bytes would .*max_bytes_per_rank=1064 or more"):
                tdcoll.all_reduce(x, ctx)
            assert tdcoll.all_reduce(x[:0], ctx).shape == (0,)
            assert tdcoll.all_reduce(torch.zeros(0, 3), ctx).shape == (0, 3)
            ctx.check()
        with tdcoll.CollectiveContext(max_bytes_per_rank=1064) as ctx:
            tdcoll.collectives.all_reduce.algorithms.ALL_REDUCE.launches(
                ctx, x.nbytes, "auto", options=(torch.float32, "sum"), dtype=torch.float32
            )

    World(2, ranks_per_node=1).run(host)


def test_a_call_by_words_is_as_many_lamport_calls_as_epochs() -> None:
    """Also in place, and by the short way, which the second call takes. One of no bytes is one."""

    def host(pe: int) -> None:
        with tdcoll.CollectiveContext(max_bytes_per_rank=96, flagged_bytes=0, lamport_bytes=32) as ctx:
            assert ctx.device_lamport is not None
            control, made = ctx.device_lamport.control, 0
            for n, several in ((0, 1), (8, 1), (9, 2), (97, 13)):  # of 32 bytes, at most
                given = [values(each, n, n, torch.float32) for each in range(2)]
                for in_place in (False, False, True, True):
                    x = given[pe].clone()
                    call = tdcoll.all_reduce_ if in_place else tdcoll.all_reduce
                    got = call(x, ctx, algorithm="two_shot")
                    assert same_bits(got, reduce_parts(given, [0, 0], "sum")) == 0
                    made += several
                    assert int(control) >> EPOCH_SHIFT.value == made
            x = torch.ones(97)
            for wrong, message in (
                (Plan("two_shot", 1, 16, 1), "no Plan for a call of several epochs: 388 bytes per rank are 13 epochs"),
                ("one_shot", "'one_shot' needs fewer bytes, or a context with more lamport_bytes"),
            ):
                with pytest.raises(ValueError, match=message):
                    tdcoll.all_reduce(x, ctx, algorithm=wrong)
            far, integers = torch.ones(8 * MOST_EPOCHS + 1), x.int()
            for wrong in (far, integers):
                with pytest.raises(ValueError, match="'two_shot' needs fewer bytes, or a context with more"):
                    tdcoll.all_reduce(wrong, ctx, algorithm="two_shot")
            ctx.check()

    World(2).run(host)


def test_the_kernels_of_all_epochs_are_made_before_a_graph() -> None:
    """Calls whose last epochs alone have the same kernel are of two kinds: each needs a first call of its own."""
    entries = Entry(40, "two_shot", chunk=32 * 16, num_warps=1), Entry(None, "two_shot", chunk=64 * 16, num_warps=1)
    table = Table((Section(SIMULATOR, "all_reduce", 2, 1, "eager", False, entries),))

    def host(pe: int) -> None:
        make = tdcoll.CollectiveContext
        with make(max_bytes_per_rank=96, flagged_bytes=0, lamport_bytes=64, tuning=table) as ctx:
            options = {"options": (torch.float16, "sum"), "dtype": torch.float16}
            one, same, two = (ALL_REDUCE.launches(ctx, n, "auto", **options) for n in (40, 38, 66))
            assert [len(each._launches) for each in (one, same, two)] == [1, 1, 2]
            assert one._variant == same._variant != two._variant

    World(2).run(host)


def test_debug_mode_compares_arguments() -> None:
    def host(pe: int) -> None:
        with tdcoll.CollectiveContext(max_bytes_per_rank=64, debug=True) as ctx:
            for bad in ({"op": "sum" if pe else "max"}, {"algorithm": "1d" if pe else "direct"}):
                with pytest.raises(tdcoll.RankMismatchError, match="all_reduce arguments"):
                    tdcoll.all_reduce(torch.ones(3), ctx, **bad)
            with pytest.raises(tdcoll.RankMismatchError, match="differ in bytes"):
                tdcoll.all_reduce(torch.ones(3 + pe), ctx)
            assert tdcoll.all_reduce(torch.ones(3), ctx).tolist() == [2.0] * 3

    World(2).run(host)


def test_tdcolls_own_context_leaves_room_in_the_heap() -> None:
    """Calls of 640 KB in a heap of 4 MB are several epochs; and words that need no signal have room."""

    def host(pe: int) -> None:
        got = tdcoll.all_reduce(torch.ones(160_000))
        assert got.eq(2).all()
        assert tdcoll.heap_info().used < 2 << 20
        small = torch.ones(5)
        tdcoll.distributed.all_reduce(small)
        assert small.tolist() == [2.0] * 5
        (pool,) = (each for key, each in tdcoll.runtime.current().contexts.items() if key[0] == "all_reduce")
        assert pool.context.lamport_bytes > 0

    World(2, heap_bytes=4 << 20).run(host)


def test_two_contexts_at_once() -> None:
    def host(pe: int) -> None:
        make = tdcoll.CollectiveContext
        with make(max_bytes_per_rank=256) as one, make([2, 0, 1], max_bytes_per_rank=256) as other:
            got = []
            for call, name in enumerate(("one_shot", "direct", "two_shot", "1d")):
                got += [
                    tdcoll.all_reduce(torch.full((20,), pe + 10.0 * call), ctx, algorithm=name) for ctx in (one, other)
                ]
            one.check()
            other.check()
            assert [each.tolist() for each in got] == [[3.0 + 30 * (i // 2)] * 20 for i in range(8)]

    World(3, seed=3, weak=True).run(host)
