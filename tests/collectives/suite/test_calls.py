# SPDX-License-Identifier: Apache-2.0
"""Dense collectives as users call them: any arguments, what is refused, contexts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from exploring import explore
from hypothesis import given, settings
from hypothesis import strategies as st
from landings import facts_on, make_facts
from ranks import on_ranks
from torch.distributed import ReduceOp

import tdcoll
import tdcoll.distributed
from tdcoll.base.call_log import MOST_CALLS, record_of
from tdcoll.calls.call_launches import launches_of
from tdcoll.calls.collective import spec_of
from tdcoll.calls.launch_spec import KernelOptions
from tdcoll.calls.plan import MOST_EPOCHS
from tdcoll.calls.spec import Collective
from tdcoll.calls.tuning import SIMULATOR, Entry, Section, Table
from tdcoll.primitives.group import EPOCH_SHIFT
from tdcoll.primitives.reduce import OPERATIONS_OF
from tdcoll.testing import World

from .algorithm_cases import topology_of
from .calls import Calls
from .data import SPECS, different, reference, values
from .kinds import kinds_of

FP8 = torch.float8_e5m2
GATHER = spec_of("all_gather")
SCATTER = spec_of("reduce_scatter")
REDUCE = spec_of("all_reduce")
each_spec = pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_call_has_the_bits_of_the_reference(data: st.DataObject) -> None:
    """By any algorithm, in one epoch or several, with chunks cut anyhow: so a row has the bits that
    it has alone."""
    spec = data.draw(st.sampled_from(SPECS))
    world = data.draw(st.integers(1, 4))
    dtype, ops = data.draw(st.sampled_from(sorted(OPERATIONS_OF.items(), key=str)))
    count = data.draw(st.integers(0, 120))
    room = data.draw(st.sampled_from([96, 256, 4096]))
    kinds = data.draw(st.lists(st.sampled_from(kinds_of(spec)), min_size=1, max_size=3))
    usual = make_facts(
        count * dtype.itemsize,
        topology_of((world,)),
        capacity=room,
        ll_bytes=room,
        stores=True,
        itemsize=dtype.itemsize if spec.reduces else 1,
    )
    facts = [replace(usual, landing=kind.landing) for kind in kinds]
    names = [how.name for how in spec.algorithms if not any(map(how.supports, facts))]
    case = Calls(
        spec,
        (data.draw(st.sampled_from(["auto", *names])),),
        kinds,
        counts=(count,),
        dtype=dtype,
        ops=data.draw(st.permutations(ops)),
        offset=data.draw(st.integers(0, 5)),
        max_bytes_per_rank=room,
        pieces=0,
        lamport_bytes=data.draw(st.sampled_from([0, 64, 4096])),
    )
    explore(case, n_pes=world, seeds=[data.draw(st.integers(0, 9))], heap_bytes=1 << 20)


# ---------------------------------------------------------------------- what is refused


def refused_by_all(
    spec: Collective, ctx: Any
) -> list[tuple[type[Exception], str, tuple[Any, ...], dict[str, Any]]]:
    """Wrong arguments of any collective: error, message, arguments."""
    x = torch.zeros(8)
    out = torch.zeros(spec.results((8,), 2)[0])
    n = out.numel()
    shape = rf"out must be torch.float32 of shape \[{n}\].*; got"
    found: list[Any] = [
        (TypeError, r"tensor must be a torch\.Tensor", ([1.0], ctx), {}),
        (TypeError, r"ctx must be a .*CollectiveContext.*got 3", (x, 3), {}),
        (ValueError, "tensor must be contiguous", (x.view(2, 4).T, ctx), {}),
        (TypeError, r"out must be a torch\.Tensor", (x, ctx), {"out": 3}),
        (
            ValueError,
            rf"{shape} torch.float32 of \[{n + 1}\]",
            (x, ctx),
            {"out": torch.zeros(n + 1)},
        ),
        (ValueError, f"{shape} torch.float64", (x, ctx), {"out": out.double()}),
        (ValueError, "out must be contiguous", (x, ctx), {"out": torch.zeros(2 * n)[::2]}),
        (
            ValueError,
            rf"algorithm must be one of auto, {', '.join(spec.names)}",
            (x, ctx),
            {"algorithm": "3d"},
        ),
        (TypeError, "algorithm must be a str, got 3", (x, ctx), {"algorithm": 3}),
        (
            tdcoll.ContextError,
            r"epochs of .*max_bytes_per_rank=\d+ or",
            (torch.zeros(1 << 18), ctx),
            {},
        ),
    ]
    if spec.scatters:
        found += [
            (ValueError, r"first dimension must be divisible by the 2 rank\(s\)", (x[1:], ctx), {})
        ]
        found += [(ValueError, r"first dimension must be divisible", (x[0], ctx), {})]
    if spec.reduces:
        found += [
            (
                TypeError,
                "tensor must be of float16, .*float8_e5m2; got torch.int16",
                (x.to(torch.int16), ctx),
                {},
            ),
            (
                ValueError,
                "op must be one of max, min for torch.int8; got 'sum'",
                (x.to(torch.int8), ctx),
                {},
            ),
            (
                ValueError,
                "one of sum, mean, max, min for torch.float8_e5m2",
                (x.to(FP8), ctx),
                {"op": "prod"},
            ),
            (
                ValueError,
                "op must be one of sum, mean, max, min, prod; got 'median'",
                (x, ctx),
                {"op": "median"},
            ),
            (
                ValueError,
                r"op must be one of sum, mean, max, min, prod; got \['sum'\]",
                (x, ctx),
                {"op": ["sum"]},
            ),
            (
                ValueError,
                "sum, max, min, prod for torch.int32; got 'mean'",
                (x.int(), ctx),
                {"op": "mean"},
            ),
            (
                ValueError,
                "op must be one of SUM, AVG, MAX, MIN, PRODUCT; got BAND",
                (x, ctx),
                {"op": ReduceOp.BAND},
            ),
        ]
    if spec is not SCATTER:
        found += [(TypeError, "symmetric must be a bool, got 1", (x, ctx), {"symmetric": 1})]
    return found


@each_spec
@on_ranks(2)
def test_bad_arguments_are_named(pe: int, spec: Collective) -> None:
    call = getattr(tdcoll, spec.name)
    x = torch.arange(8.0) + pe
    with tdcoll.CollectiveContext(max_bytes_per_rank=64) as ctx:
        for kind, message, arguments, named in refused_by_all(spec, ctx):
            with pytest.raises(kind, match=message):
                call(arguments[0], ctx=arguments[1], **named)
        assert int(ctx.control) == 0, "nothing has begun"
        wanted = reference(spec, [torch.arange(8.0) + rank for rank in range(2)], ctx.topology)
        assert torch.equal(call(x, ctx=ctx), wanted)
        ctx.check()
    with pytest.raises(tdcoll.ContextError, match=f"{spec.name}: the context is closed"):
        call(x, ctx=ctx)


@each_spec
@on_ranks(2)
def test_tensors_overlap_only_where_they_may(pe: int, spec: Collective) -> None:
    """Where one has a segment for each rank, this rank's may be the other; where neither has, both
    may be the same."""
    whole = torch.zeros(12)
    if spec.scatters and spec.gathers:
        with tdcoll.CollectiveContext(max_bytes_per_rank=64) as ctx:
            for at in (0, 4):
                with pytest.raises(
                    ValueError, match=rf"tensor must not overlap out; it lies at byte {-4 * at} of"
                ):
                    getattr(tdcoll, spec.name)(whole[:8], ctx=ctx, out=whole[at:][:8])
        return
    part = {True: whole[4 * pe :][:4], False: whole[:8]}[spec.scatters or spec.gathers]
    larger = whole[:8]
    allowed = (part, larger) if spec.gathers else (larger, part)
    moved = whole[1:5] if spec.scatters or spec.gathers else whole[1:9]
    wrong = (moved, larger) if spec.gathers else (larger, moved)
    call = getattr(tdcoll, spec.name)
    with tdcoll.CollectiveContext(max_bytes_per_rank=64) as ctx:
        call(allowed[0], ctx=ctx, out=allowed[1])
        with pytest.raises(
            ValueError, match=r"must not overlap .*, except (as|to be) .*; it lies at byte 4 of"
        ):
            call(wrong[0], ctx=ctx, out=wrong[1])
        ctx.check()


@each_spec
@on_ranks(2)
def test_debug_mode_compares_arguments(pe: int, spec: Collective) -> None:
    call = getattr(tdcoll, spec.name)
    x = torch.ones(6)
    with tdcoll.CollectiveContext(max_bytes_per_rank=64, debug=True) as ctx:
        bad: list[dict[str, Any]] = [{"algorithm": "1d" if pe else "direct"}]
        bad += [
            {"op": "sum" if pe else "max"},
            {"op": "min" if pe else ReduceOp.MAX},
        ] * spec.reduces
        bad += [{"root": pe}] * spec.rooted
        for named in bad:
            with pytest.raises(
                tdcoll.RankMismatchError,
                match=f"{spec.name} arguments .* differ in {next(iter(named))}",
            ):
                call(x, ctx=ctx, **named)
        for other, differ in (
            (torch.ones(6 + 2 * pe), "bytes"),
            (x.int() if pe else x, r"dtype \(rank 0: torch.float32, rank 1: torch.int32\)$"),
        ):
            with pytest.raises(tdcoll.RankMismatchError, match=f"differ in {differ}"):
                call(other, ctx=ctx)
        assert int(ctx.control) == 0, "nothing has begun"
        assert torch.equal(call(x, ctx=ctx), reference(spec, [x, x], ctx.topology))


@pytest.mark.parametrize(
    "spec", [spec for spec in SPECS if spec.rooted], ids=lambda spec: spec.name
)
@on_ranks(2)
def test_roots_are_ranks_of_the_group(pe: int, spec: Collective) -> None:
    """Also if a call with the same arguments but a valid root was made before."""
    call = getattr(tdcoll, spec.name)
    x = torch.full((3,), 7.0 + pe)
    with tdcoll.CollectiveContext([1, 0], max_bytes_per_rank=64) as ctx:
        for root in (0, 1, 0):
            assert call(x, root, ctx=ctx).tolist() == 3 * [8.0 - root]
        for wrong in (-1, 2):
            with pytest.raises(ValueError, match=f"root must be 0 to 1, got {wrong}"):
                call(x, wrong, ctx=ctx)
        for invalid in (True, 1.0, None, "0"):
            with pytest.raises(TypeError, match="root must be an int, got"):
                call(x, invalid, ctx=ctx)
        ctx.check()


@on_ranks(2)
def test_symmetric_tensors_are_as_they_should_be_on_all_ranks(pe: int) -> None:
    x = torch.ones(64)
    call = tdcoll.all_reduce
    here = tdcoll.empty((128,))
    with tdcoll.CollectiveContext(max_bytes_per_rank=256, debug=True) as ctx:
        for kind, message, out in (
            (
                ValueError,
                r"out must be given with symmetric=True: one that tdcoll\.empty\(\) has made",
                None,
            ),
            (tdcoll.NotSymmetricError, "out must .*symmetric", torch.empty(64)),
            (ValueError, r"out must be torch.float32 of shape \[64\]", here),
        ):
            with pytest.raises(kind, match=message):
                call(x, ctx=ctx, out=out, symmetric=True)
        with pytest.raises(
            tdcoll.RankMismatchError, match="differ in offset in the symmetric heap"
        ):
            call(x, ctx=ctx, out=here[64 * pe :][:64], symmetric=True)
        with pytest.raises(tdcoll.RankMismatchError, match="differ in"):
            call(x, ctx=ctx, out=here[:64], symmetric=pe == 0)
        # others than those that need it are as without it
        for algorithm in ("auto", "direct", "one_shot", "1d"):
            got = call(x + pe, ctx=ctx, out=here[:64], algorithm=algorithm, symmetric=True)
            assert got.tolist() == [3.0] * 64
        assert tdcoll.all_reduce_(here[:0], ctx=ctx, symmetric=True).shape == (0,)
        ctx.check()
    alone = tdcoll.empty((64,), group=[pe])
    alone_is_wrong = pytest.raises(
        tdcoll.NotSymmetricError, match=r"out must be made by .* belongs to ranks \["
    )
    with tdcoll.CollectiveContext(max_bytes_per_rank=256) as ctx, alone_is_wrong:
        call(x, ctx=ctx, out=alone, symmetric=True)


@on_ranks(3, seed=1, weak=True)
def test_copies_go_directly_into_symmetric_memory(pe: int) -> None:
    """However small the context: one epoch each, and again by the fast path."""
    out, sums = tdcoll.empty((96,), torch.int32), tdcoll.empty((12,), torch.int32)
    with tdcoll.CollectiveContext(max_bytes_per_rank=16) as ctx:
        for turn in range(4):
            x = torch.arange(32, dtype=torch.int32) + 1000 * pe + turn
            tdcoll.all_gather(x, ctx=ctx, out=out, algorithm="ce", symmetric=True)
            assert out.tolist() == torch.cat([x + 1000 * (rank - pe) for rank in range(3)]).tolist()
            tdcoll.all_reduce(x[:12], ctx=ctx, out=sums, algorithm="ce", symmetric=True)
            assert sums.tolist() == (3 * x[:12] - 3000 * pe + 3000).tolist()
            tdcoll.barrier()  # before a peer writes there again
        assert int(ctx.control) >> EPOCH_SHIFT.value == 16, "even epochs only"
        ctx.check()


@on_ranks(3, seed=1, weak=True)
def test_an_all_to_all_into_symmetric_memory_is_as_into_any_other(pe: int) -> None:
    """Copies that are queued may not write into memory of a peer that may be late."""
    out = tdcoll.empty((96,), torch.int32)
    with tdcoll.CollectiveContext(max_bytes_per_rank=16) as ctx:
        for turn in range(2):
            x = torch.arange(96, dtype=torch.int32) + 1000 * pe + turn
            tdcoll.all_to_all(x, ctx=ctx, out=out, algorithm="ce", symmetric=True)
            parts = [torch.arange(32 * pe, 32 * pe + 32) + 1000 * rank + turn for rank in range(3)]
            assert out.tolist() == torch.cat(parts).tolist()
        assert int(ctx.control) >> EPOCH_SHIFT.value == 2 * 2 * 8, "epochs of 16 bytes"
        ctx.check()


@on_ranks(2)
def test_the_epochs_of_calls_are_known_with_and_without_copies(pe: int) -> None:
    x = torch.ones(96)
    with tdcoll.CollectiveContext(max_bytes_per_rank=64) as ctx:
        for algorithm in ("ce", "direct", "direct", "direct", "ce", "ce", "direct", "ce"):
            tdcoll.all_reduce(x, ctx=ctx, algorithm=algorithm)
            epoch = int(ctx.control) >> EPOCH_SHIFT.value
            assert ctx.calls.describe().endswith(f"the last one all_reduce, up to epoch {epoch}")
        assert ctx.calls.name_of(epoch, False).startswith("all_reduce, call 8 of ")
        ctx.check()


@on_ranks(2)
def test_a_context_remembers_so_many_calls_and_an_object_of_each_kind(pe: int) -> None:
    """In a simulated world, too, where no thread asks for their names."""
    with tdcoll.CollectiveContext(max_bytes_per_rank=64) as ctx:
        for shape in ((8,), (9,), (4, 2), (8,)):
            tdcoll.all_reduce(torch.ones(shape), ctx=ctx)
        noted = ctx.calls.log
        assert (len(noted), len({id(each) for each in noted})) == (4, 1)
        for number in range(4, 5 * MOST_CALLS):
            ctx.note(record_of("all_reduce"))
            assert len(ctx.calls.log) < MOST_CALLS, number
        made = f"{5 * MOST_CALLS} calls made, the last one all_reduce, up to epoch {5 * MOST_CALLS}"
        assert ctx.calls.describe().endswith(made)


@on_ranks(2)
def test_a_first_call_by_copies_in_a_graph_is_an_error_that_names_the_operation(
    pe: int, monkeypatch
) -> None:
    with tdcoll.CollectiveContext(max_bytes_per_rank=64) as ctx:
        monkeypatch.setattr("tdcoll.base.capture.capturing", lambda device: True)
        with pytest.raises(tdcoll.ContextError, match=r"^all_gather: the first call of a kind"):
            launches_of(GATHER, ctx, facts_on(ctx, 16), "ce")
        monkeypatch.undo()


# ---------------------------------------------------------------------- contexts


@on_ranks(2, ranks_per_node=1)
def test_a_context_says_what_it_must_be_made_with(pe: int) -> None:
    """And with that, the call is made. Calls of no bytes need no room."""
    x = torch.ones(60_000)
    with tdcoll.CollectiveContext(max_bytes_per_rank=0) as ctx:
        with pytest.raises(
            tdcoll.ContextError, match=r"240000 bytes would .*max_bytes_per_rank=1064 or more"
        ):
            tdcoll.all_reduce(x, ctx=ctx)
        # half: the outbox
        with pytest.raises(tdcoll.ContextError, match=r"16 bytes would .*max_bytes_per_rank=128"):
            tdcoll.reduce_scatter(torch.zeros(4, dtype=torch.int64), ctx=ctx)
        for shape in ((0,), (0, 3)):
            for spec in SPECS:
                assert getattr(tdcoll, spec.name)(torch.zeros(shape), ctx=ctx).shape == shape
        x16 = torch.arange(16, dtype=torch.int32) + pe
        got = tdcoll.all_gather(x16, ctx=ctx)  # in epochs of 16 bytes, the least that there is
        assert torch.equal(
            got.view(2, 16) - torch.arange(2)[:, None], torch.arange(16).expand(2, 16)
        )
        assert int(ctx.control) >> EPOCH_SHIFT.value == 2 * len(SPECS) + 4
        ctx.check()
    with tdcoll.CollectiveContext(max_bytes_per_rank=1064) as ctx:
        launches_of(
            REDUCE, ctx, facts_on(ctx, x.nbytes, x.dtype), options=KernelOptions(x.dtype, "sum")
        )


@on_ranks(2)
def test_a_call_by_words_is_as_many_lamport_calls_as_epochs(pe: int) -> None:
    """Also in place, and by the fast path, which the second call takes. One of no bytes is one."""
    with tdcoll.CollectiveContext(max_bytes_per_rank=96, flagged_bytes=0, lamport_bytes=32) as ctx:
        assert ctx.device_lamport is not None
        control = ctx.device_lamport.control
        made = 0
        for n, several in ((0, 1), (8, 1), (9, 2), (97, 13)):  # of 32 bytes, at most
            every = [values(rank, n, n, torch.float32) for rank in range(2)]
            for in_place in (False, False, True, True):
                x = every[pe].clone()
                call = tdcoll.all_reduce_ if in_place else tdcoll.all_reduce
                got = call(x, ctx=ctx, algorithm="two_shot")
                assert not n or different(got, reference(REDUCE, every, ctx.topology)) == 0
                made += several
                assert int(control) >> EPOCH_SHIFT.value == made
        assert int(ctx.control) == 0, "epochs are counted apart"
        x = torch.ones(97)
        with pytest.raises(
            ValueError, match="'one_shot' needs fewer bytes, or a context with more lamport_bytes"
        ):
            tdcoll.all_reduce(x, ctx=ctx, algorithm="one_shot")
        far = torch.ones(8 * MOST_EPOCHS + 1)
        integers = x.int()
        for wrong in (far, integers):
            with pytest.raises(
                ValueError, match="'two_shot' needs fewer bytes, or a context with more"
            ):
                tdcoll.all_reduce(wrong, ctx=ctx, algorithm="two_shot")
        ctx.check()


def test_the_kernels_of_all_epochs_are_made_before_a_graph() -> None:
    """Calls whose last epochs alone have the same kernel are of two kinds: each needs a first call
    of its own."""
    entries = (
        Entry(40, "two_shot", chunk=32 * 16, num_warps=1),
        Entry(None, "two_shot", chunk=64 * 16, num_warps=1),
    )
    table = Table((Section(SIMULATOR, "all_reduce", 2, 1, False, entries),))

    def host(pe: int) -> None:
        make = tdcoll.CollectiveContext
        with make(max_bytes_per_rank=96, flagged_bytes=0, lamport_bytes=64, tuning=table) as ctx:
            options = KernelOptions(torch.float16, "sum")
            one, same, two = (
                launches_of(REDUCE, ctx, facts_on(ctx, n, torch.float16), options=options)
                for n in (40, 38, 66)
            )
            assert [len(each.steps) for each in (one, same, two)] == [1, 1, 2]
            assert one.variant == same.variant != two.variant

    World(2).run(host)


@each_spec
@on_ranks(2, heap_bytes=4 << 20)
def test_tdcolls_own_context_grows_and_leaves_room_in_the_heap(pe: int, spec: Collective) -> None:
    """Calls of 700 KB in a heap of 4 MB are several epochs."""
    for n in (2, 500, 350_000 if spec.reduces else 30_000, 6):
        every = [torch.arange(float(n)) + rank for rank in range(2)]
        wanted = reference(spec, every, tdcoll.topology())
        out = torch.empty_like(wanted)
        assert torch.equal(getattr(tdcoll, spec.name)(every[pe]), wanted)
        assert torch.equal(getattr(tdcoll, spec.name)(every[pe], out=out), wanted)
    assert tdcoll.heap_info().used < 2 << 20
    (pool,) = (
        each for key, each in tdcoll.runtime.current().contexts.items() if key[0] == spec.name
    )
    assert (pool.context.lamport_bytes > 0) == spec.reduces


@pytest.mark.parametrize(
    ("spec", "algorithm", "sent"), [(GATHER, "1d", 2), (GATHER, "2d", 1), (SCATTER, "1d", 2)]
)
def test_segments_cross_between_nodes_as_often_as_they_must(
    spec: Collective, algorithm: str, sent: int
) -> None:
    world = World(4, ranks_per_node=2)

    def host(pe: int) -> None:
        with tdcoll.CollectiveContext(max_bytes_per_rank=1 << 10) as ctx:
            x = torch.ones(64 * 4 if spec.scatters else 64)
            getattr(tdcoll, spec.name)(x, ctx=ctx, algorithm=algorithm)
            ctx.check()

    world.run(host)
    assert [counts.inter_node_bytes for counts in world.counts] == [sent * 256] * 4
