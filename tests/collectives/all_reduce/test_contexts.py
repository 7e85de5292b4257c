# SPDX-License-Identifier: Apache-2.0
"""All-reduces and their contexts: tables, epochs, kernels that are kept, and the room that they need."""

from __future__ import annotations

import pytest
import torch

import tdcoll
import tdcoll.distributed
from tdcoll.collectives._host.launches import launches_of
from tdcoll.collectives._host.plan import MOST_EPOCHS, Plan
from tdcoll.collectives.all_reduce.spec import SPEC as ALL_REDUCE
from tdcoll.collectives.reduce_scatter.reference import reduce_parts
from tdcoll.primitives.group import EPOCH_SHIFT
from tdcoll.testing import World
from tdcoll.tuning import SIMULATOR, Entry, Section, Table

from ..reduce_scatter.cases import same_bits, values


def test_all_ranks_choose_alike_whatever_each_passes_as_the_result() -> None:
    """One rank's result is its input, another's is not. Also of several epochs, in debug mode, and when repeated."""
    entries = Entry(64, "one_shot"), Entry(None, "direct")
    table = Table((Section(SIMULATOR, "all_reduce", 3, 1, False, entries),))

    def host(pe: int) -> None:
        with tdcoll.CollectiveContext(max_bytes_per_rank=256, tuning=table, debug=True) as ctx:
            for n in (16, 400):
                for _ in range(3):
                    x = torch.arange(n, dtype=torch.float32) + pe
                    got = tdcoll.all_reduce_(x, ctx) if pe == 1 else tdcoll.all_reduce(x, ctx, x if pe else None)
                    assert got.tolist() == [3.0 * i + 3 for i in range(n)]
            ctx.check()

    World(3).run(host)


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
            launches_of(ALL_REDUCE, ctx, x.nbytes, "auto", options=(torch.float32, "sum"), dtype=torch.float32)

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
    table = Table((Section(SIMULATOR, "all_reduce", 2, 1, False, entries),))

    def host(pe: int) -> None:
        make = tdcoll.CollectiveContext
        with make(max_bytes_per_rank=96, flagged_bytes=0, lamport_bytes=64, tuning=table) as ctx:
            options = {"options": (torch.float16, "sum"), "dtype": torch.float16}
            one, same, two = (launches_of(ALL_REDUCE, ctx, n, "auto", **options) for n in (40, 38, 66))
            assert [len(each._launches) for each in (one, same, two)] == [1, 1, 2]
            assert one._variant == same._variant != two._variant

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
