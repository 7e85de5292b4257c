# SPDX-License-Identifier: Apache-2.0
"""All dense collectives, as users call them, on every rank of a job; compared with the reference,
to the bit.

Each check is for all of them. The calls are those of tests/collectives/suite, of larger sizes. A
kernel takes seconds to compile, so there are few kinds of them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from dense_parts import (
    CALLER_BUFFER,
    IN_PLACE,
    OUT_OF_PLACE,
    SPECS,
    SYMMETRIC,
    Calls,
    Watched,
    cases,
    data,
    in_pieces,
    in_turn,
    kind_of,
    kinds_of,
    left_alone,
    make_call,
    place,
    reference,
    replay_captured,
    right,
    served,
    sizes_of,
    supported,
    wanted,
)
from harness import (
    check,
    covering,
    device,
    expect,
    expect_raises,
    patience_s,
    puts,
    rank,
    scaled,
    simulated,
    world,
)

import tdcoll
from tdcoll import runtime
from tdcoll.calls.call_launches import launches_of
from tdcoll.calls.launch_spec import KernelOptions
from tdcoll.calls.plan import Facts
from tdcoll.primitives.reduce import OPERATIONS_OF

OTHERS = (torch.bool, torch.int16, torch.complex64, torch.float8_e4m3fn)
"""Dtypes of tensors that are only moved."""

# ---------------------------------------------------------------------- sizes, dtypes, forms


@check
def sizes() -> str:
    """Every kind of call of every size, by every algorithm; filled anew and read without a
    synchronisation."""
    seen = []
    for spec in SPECS:
        dtype, most = kind_of(spec), max(sizes_of(spec))
        watched, used = Watched(spec, most, dtype), set()
        with tdcoll.CollectiveContext(dist.group.WORLD, max_bytes_per_rank=4 * most) as ctx:
            for call, n in enumerate(sizes_of(spec)):
                every = data(spec, call, n, dtype)
                should = wanted(spec, every)
                for kind in kinds_of(spec):
                    for algorithm in ("auto", *served(spec, ctx, n * dtype.itemsize, dtype, kind)):
                        watched.call(ctx, kind, every, n, algorithm, should, offset=3 * (call % 2))
                        used.add(algorithm)
                        # more chunks and words than anything takes by itself
                        if n == 1000 and algorithm != "auto":
                            facts = Facts.of(
                                ctx,
                                n * dtype.itemsize,
                                dtype if spec.reduces else None,
                                kind.landing,
                            )
                            if len(spec.epochs(facts, algorithm)) == 1:
                                plan = in_pieces(spec, facts, algorithm, 7, warps=8)
                                watched.call(ctx, kind, every, n, plan, should)
            ctx.check()
        watched.done("sizes")
        usable = {each.name for each in spec.algorithms if puts() or each.name not in ("1d", "2d")}
        expect(
            tdcoll.topology().n_nodes > 1 or used - {"auto"} >= usable - {"2d"},
            f"only {used} of {spec.name} were to be had",
        )
        seen.append(f"{spec.name}: {', '.join(sorted(used))}")
    return "; ".join(seen)


@check
def dtypes_and_operations() -> str:
    """Every dtype by every algorithm, and with every operation, of special numbers as well. In the
    simulator a few, one of each kind: tests of their own have them all."""
    done = 0
    for spec in SPECS:
        make_context = partial(tdcoll.CollectiveContext, max_bytes_per_rank=1 << 14)
        with make_context() as usual, make_context(lamport_bytes=0) as flagged:
            found = list(OPERATIONS_OF.items()) if spec.reduces else [(d, ("",)) for d in OTHERS]
            for call, (dtype, ops) in enumerate(found[:: scaled(1, 3)]):
                every = data(spec, call, 333, dtype)
                if spec.reduces and dtype.is_floating_point:
                    every[-1][::7] = float("nan")
                    for tensor in every:
                        tensor[3::11] = -0.0
                ways = [(usual, name) for name in served(spec, usual, 333 * dtype.itemsize, dtype)]
                if spec.reduces and dtype.is_floating_point:  # others have flags in any case
                    ways += [(flagged, name) for _, name in ways if spec.algorithm(name).words]
                for (ctx, algorithm), op in covering(ways, ops, call):
                    out = torch.empty_like(wanted(spec, every, op))
                    make_call(spec, OUT_OF_PLACE, every[rank()], out, ctx, algorithm, op)
                    right(
                        out, wanted(spec, every, op), f"{spec.name}, {algorithm}, {op} of {dtype}"
                    )
                    done += 1
            usual.check()
            flagged.check()
    return f"{done} kinds of calls"


@check
def larger_calls_are_several_epochs() -> None:
    for spec in SPECS:
        dtype = kind_of(spec)
        unit = 512 // dtype.itemsize
        watched = Watched(spec, 10 * unit, dtype)
        few = dict.fromkeys(("max_bytes_per_rank", "flagged_bytes", "lamport_bytes"), 512)
        with tdcoll.CollectiveContext(dist.group.WORLD, **few) as ctx:
            for n in (
                (unit, unit + 1, 8 * unit - 24, 10 * unit)
                if not simulated()
                else (unit, 2 * unit + 1)
            ):
                every = data(spec, n, n, dtype)
                should = wanted(spec, every)
                for kind in kinds_of(spec):
                    for algorithm in ("auto", *served(spec, ctx, n * dtype.itemsize, dtype, kind)):
                        watched.call(ctx, kind, every, n, algorithm, should)
            far = torch.zeros(world() << 20, dtype=dtype, device=device())
            refused = partial(
                make_call,
                spec,
                OUT_OF_PLACE,
                far,
                far.new_zeros(spec.results(far.shape, world())[0]),
                ctx,
            )
            expect_raises(tdcoll.ContextError, refused, "epochs of", "max_bytes_per_rank=")
            ctx.check()
        watched.done("larger calls")


@check(gpu_only=True)
def large_calls_by_words_are_several_epochs() -> str:
    """By default, out of place and in place, in one graph with calls of one epoch."""
    spec = next(spec for spec in SPECS if spec.name == "all_reduce")
    # of bfloat16, three epochs of at most 16 MB
    numel, room = (17 << 20) + 5, (32 << 20) // world()
    every = data(spec, 5, numel, torch.bfloat16)
    mine, should = every[rank()], wanted(spec, every)
    few = wanted(spec, [tensor[:1000] for tensor in every])
    with tdcoll.CollectiveContext(max_bytes_per_rank=room) as ctx:
        facts = Facts.of(ctx, mine.nbytes, mine.dtype)
        launch = launches_of(spec, ctx, facts, options=KernelOptions(mine.dtype, "sum"))
        out, inside, less = torch.empty_like(mine), mine.clone(), mine[:1000].clone()

        def calls() -> None:
            tdcoll.all_reduce(mine, ctx=ctx, out=out)
            tdcoll.all_reduce_(less.copy_(mine[:1000]), ctx=ctx)
            tdcoll.all_reduce_(inside.copy_(mine), ctx=ctx)

        calls()
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            calls()
        for replay in range(5):
            for got, numbers in ((out, should), (inside, should), (less, few)):
                ctx.check()
                right(got, numbers, f"before replay {replay}: {got.numel()} numbers")
                got.zero_()
            graph.replay()
        ctx.check()
    if ctx.lamport_bytes == room:  # on one node whose ranks can store to each other's memory
        expect(launch.plan.algorithm == "two_shot", f"{launch.plan} was taken")
    return str(launch.plan)


@check
def numbers_of_8_bits() -> None:
    """Numbers are rounded as PyTorch rounds on CPUs. In the simulator tests of their own show
    it."""
    codes = torch.arange(256).to(torch.uint8)
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        got, expected = cases.decoded(codes.to(device()), dtype).cpu(), codes.view(dtype).float()
        nan = expected.isnan()
        expect(torch.equal(got.isnan(), nan), f"{dtype}: codes of NaN")
        right(got[~nan], expected[~nan], f"{dtype}: codes as numbers")
        values, wanted = cases.roundings(dtype)
        got, nan = cases.encoded(values.to(device()), dtype).cpu(), values.isnan()
        right(got[~nan], wanted[~nan], f"{dtype}: rounded numbers")
        expect(bool((got[nan] & 0x7F == 0x7F).all()), f"{dtype}: NaN")


# ---------------------------------------------------------------------- many calls


@check
def many_calls_with_a_straggler() -> str:
    """Thousands of calls of all collectives on one context, of changing sizes, not synchronised;
    one rank is late."""
    calls, most = scaled(5000, 24, shared_gpus=900), scaled(1500, 150)
    chooser, wrong = random.Random(7), torch.zeros((), dtype=torch.int64, device=device())
    ready = {spec.name: data(spec, 0, most, torch.int32) for spec in SPECS}
    with tdcoll.CollectiveContext(max_bytes_per_rank=16 * most) as ctx:
        for call in range(calls):
            spec, n, step = (
                SPECS[chooser.randrange(len(SPECS))],
                chooser.randrange(1, most),
                call % 5 + 1,
            )
            many = n * world() if spec.scatters else n
            every = [tensor[:many] * step for tensor in ready[spec.name]]
            late, cycles = chooser.randrange(world()), chooser.choice((0, 0, 20_000, 200_000))
            if rank() == late and cycles and not simulated():
                torch.cuda._sleep(cycles)
            names = served(spec, ctx, 4 * n, torch.int32)
            should = wanted(spec, every, "max")
            kinds = supported((OUT_OF_PLACE, IN_PLACE), kinds_of(spec))
            kind = kinds[call % len(kinds)]
            placed = place(spec, kind, n, 0, ctx, torch.int32, None)
            placed.tensor.copy_(every[rank()])
            make_call(
                spec,
                kind,
                placed.tensor,
                placed.out,
                ctx,
                names[chooser.randrange(len(names))],
                "max",
            )
            wrong += (placed.out != should).sum()
        ctx.check()
    expect(int(wrong) == 0, f"{int(wrong)} wrong numbers in {calls} calls")
    return f"{calls} calls"


@check
def epochs_of_more_than_32_bits() -> None:
    """LL's flags are 32 of them: the second call has words that were never written, and whose flag
    would be zero."""
    for spec in SPECS:
        for words in (None, 0) if spec.reduces else (None,):
            calls = Calls(
                spec,
                ("auto",),
                4 * (OUT_OF_PLACE,),
                counts=(100, 1000),
                first=(1 << 32) - 1,
                lamport_bytes=words,
                pieces=0,
            )
            with calls.context() as ctx:
                names = served(spec, ctx, 1000, calls.tensor_dtype)
            for name in names:
                replace(calls, algorithms=(name,)).host(rank())


@check
def subgroups() -> None:
    """A strided half of the ranks, as a ProcessGroup and as a list; reversed ranks; heap use that
    differs."""
    halves = [list(range(first, world(), 2)) for first in range(min(2, world()))]
    groups = [dist.new_group(half) for half in halves]
    mine = rank() % 2 if world() > 1 else 0
    half = halves[mine]
    extra = tdcoll.empty(4096, torch.uint8, group=half) if mine == 0 else None
    for given in (groups[mine], half, half[::-1]):
        order = given if isinstance(given, list) else half
        with tdcoll.CollectiveContext(given, max_bytes_per_rank=4000) as ctx:
            expect(ctx.rank == order.index(rank()), f"group rank {ctx.rank}")
            for spec in SPECS:
                every = data(spec, 2, 40, kind_of(spec), len(order))
                should = reference(spec, every, ctx.topology)
                out = torch.empty_like(should)
                make_call(spec, OUT_OF_PLACE, every[ctx.rank], out, ctx)
                right(out, should, f"{spec.name} in {order}")
            ctx.check()
        if world() > 1:
            outside = partial(tdcoll.CollectiveContext, halves[1 - mine], max_bytes_per_rank=1)
            expect_raises(ValueError, outside, "does not contain")
    for spec in SPECS:  # all ranks, whose heaps differ
        kinds = in_turn(supported((OUT_OF_PLACE, IN_PLACE), kinds_of(spec)), 2)
        Calls(spec, ("auto",), kinds, counts=(100,)).host(rank())
    if extra is not None:
        tdcoll.free(extra)


# ---------------------------------------------------------------------- errors


@check(gpu_only=True)
def other_devices() -> None:
    """What tests on CPUs cannot refuse: tensors on another device, and memory that peers do not
    reach."""
    with tdcoll.CollectiveContext(dist.group.WORLD, max_bytes_per_rank=256) as ctx:
        for spec in SPECS:
            call, x = (
                partial(getattr(tdcoll, spec.name), ctx=ctx),
                torch.zeros(4 * world(), device=device()),
            )
            expect_raises(ValueError, partial(call, x.cpu()), "tensor", "cuda")
            for kind in supported((SYMMETRIC, CALLER_BUFFER), kinds_of(spec)):
                ordinary = place(spec, IN_PLACE, 4, 0, ctx, torch.float32, None)
                refused = partial(make_call, spec, kind, ordinary.tensor, ordinary.out, ctx)
                expect_raises(tdcoll.NotSymmetricError, refused, "symmetric heap")
            call(x)
        ctx.check()


# ---------------------------------------------------------------------- graphs and streams


@check(gpu_only=True)
def graphs() -> None:
    """Odd and even numbers of captured calls; among them calls of several epochs."""
    for spec in SPECS:
        for n, captured in ((100, 1), (1000, 2), (5000, 3), (333, 20), (30_000, 5)):
            replay_captured(spec, n, captured, scaled(50, 0, shared_gpus=11))


@check(gpu_only=True)
def capture_errors() -> None:
    with tdcoll.CollectiveContext(max_bytes_per_rank=4096) as ctx:
        x = torch.zeros(32 * world(), device=device())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for spec in SPECS:
                call = getattr(tdcoll, spec.name)
                expect_raises(tdcoll.ContextError, partial(call, x, ctx=ctx), "capturing")
            x.add_(1)


@check(gpu_only=True)
def streams_in_turn() -> None:
    """A context follows its caller from stream to stream, eagerly and within one capture; both
    streams are busy."""
    here, side_stream = torch.cuda.current_stream(), torch.cuda.Stream()
    side_stream.wait_stream(here)
    for spec in SPECS:
        every = [data(spec, call, 1024, torch.float32) for call in range(12)]
        outs = [torch.empty_like(wanted(spec, one)) for one in every]
        with tdcoll.CollectiveContext(max_bytes_per_rank=4096) as ctx:

            def calls(
                first: int, streams: Sequence[Any], ctx: tdcoll.CollectiveContext = ctx
            ) -> None:
                for number in range(first, first + 4):
                    with torch.cuda.stream(streams[number % 2]):
                        torch.cuda._sleep(200_000 * (1 + number % 3))
                        make_call(spec, OUT_OF_PLACE, every[number][rank()], outs[number], ctx)  # noqa: B023

            calls(0, (here, side_stream))
            graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                main = torch.cuda.current_stream()
                side_stream.wait_stream(main)
                calls(4, (main, side_stream))
                main.wait_stream(side_stream)
            for _ in range(3):
                graph.replay()
            calls(8, (here, side_stream))
            here.wait_stream(side_stream)
            for number, (one, out) in enumerate(zip(every, outs, strict=True)):
                right(out, wanted(spec, one), f"{spec.name}, call {number}")
            ctx.check()


@check(gpu_only=True)
def some_ranks_replay_what_others_call() -> str:
    """Even ranks replay a graph while odd ones call eagerly, in place or not: all have the same
    plan. Here the tables that are shipped for two H200s say most."""
    spec, dtype, plans = (
        next(spec for spec in SPECS if spec.name == "all_reduce"),
        torch.bfloat16,
        [],
    )
    with tdcoll.CollectiveContext(max_bytes_per_rank=32 << 20) as ctx:
        for n in [1 << power for power in range(15, 23)]:
            every = data(spec, 5, n, dtype)
            should, mine = wanted(spec, every), every[rank()]
            out = torch.empty_like(mine)
            tdcoll.all_reduce(mine, ctx=ctx, out=out)
            plan = launches_of(
                spec, ctx, Facts.of(ctx, mine.nbytes, dtype), options=KernelOptions(dtype, "sum")
            ).plan
            plans.append(f"{mine.nbytes >> 10} KB {plan.algorithm}")
            graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                tdcoll.all_reduce(mine, ctx=ctx, out=out)
            for _ in range(3):
                out.zero_()
                got = out
                if rank() % 2 == 0:
                    graph.replay()
                else:
                    got = tdcoll.all_reduce_(mine.clone(), ctx=ctx)
                ctx.check()
                right(got, should, f"{mine.nbytes} bytes")
    return ", ".join(plans)


# ---------------------------------------------------------------------- peers that are gone: the last checks


@check
def timeouts_name_the_peer() -> str:
    """One rank does not make the second call. The others must name it, or one that waits for it in
    turn. In the simulator by one algorithm of each collective: tests of their own have them all."""
    if world() == 1:
        return "one rank waits for nobody"
    absent, tried, owner = world() - 1, [], runtime.current()
    for spec in SPECS:
        for algorithm in ("auto",) if simulated() else spec.names:
            owner.failed = False  # what failed is over, and all ranks are here
            ctx = tdcoll.CollectiveContext(max_bytes_per_rank=2048, timeout_s=patience_s())
            peers = None
            if algorithm in ("auto", *served(spec, ctx, 256, torch.float32)):
                x = torch.ones(64 * (world() if spec.scatters else 1), device=device())
                call = partial(getattr(tdcoll, spec.name), x, ctx=ctx, algorithm=algorithm)
                call()
                if rank() != absent:
                    call()
                    error = expect_raises(tdcoll.CollectiveTimeout, ctx.check)
                    expect(error.rank == rank() != error.peer and error.epoch >= 2, str(error))  # type: ignore[attr-defined]
                    peers = [error.peer, *error.others]  # type: ignore[attr-defined]
                    expect_raises(tdcoll.CollectiveTimeout, call)
                    ctx.close()
                tried.append(algorithm)
                named = owner.control.all_gather(
                    range(world()), f"peers of {spec.name}, {algorithm}", peers
                )
                passed_on = algorithm == "ring" or tdcoll.topology().n_nodes > 1
                if passed_on:
                    fine = any(peers and absent in peers for peers in named)
                else:
                    fine = all(peers is None or absent in peers for peers in named)
                expect(fine, f"{spec.name}, {algorithm}: {named}")
            left_alone()
    return f"peer named by {', '.join(tried)}"
