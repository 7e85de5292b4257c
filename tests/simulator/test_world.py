# SPDX-License-Identifier: Apache-2.0
"""Host functions, launches, the control plane, barriers, gets, counts and timelines of a World."""

from __future__ import annotations

import json
import traceback
from collections import defaultdict
from itertools import combinations

import protocols
import pytest
import torch
import triton.language as tl
import triton.runtime.interpreter as interpreter
from cases import case, device, expect, gather
from protocols import Steps

import tdcoll
import tdcoll.language as tdl
from tdcoll import runtime
from tdcoll.base.errors import NotInitializedError, RankMismatchError, TdcollError
from tdcoll.language.jit import jit
from tdcoll.simulator.shortcuts import shortcuts
from tdcoll.testing import Deadlock, World, replay


def test_host_results_and_runtimes():
    def host(pe):
        job = runtime.current()
        assert (job.rank, job.world_size, job.simulated, job.node_ids) == (pe, 3, True, (0, 0, 1))
        assert (job.heap.nbytes, job.topology().n_nodes) == (1024, 2)
        assert job.heap.peer_base(pe) == job.heap.base
        assert (job.heap.peer_base(2) == 0) == (pe != 2)
        return pe * 10

    assert World(3, ranks_per_node=2, heap_bytes=1000).run(host) == [0, 10, 20]
    assert runtime.current_or_none() is None


def test_autograds_mode_is_each_hosts_own():
    """Although hosts share a thread, and one leaves ``no_grad`` while another is inside."""

    def host(pe):
        tdcoll.barrier()
        with torch.set_grad_enabled(pe != 1):
            for _ in range(pe + 1):
                tdcoll.barrier()
                assert torch.is_grad_enabled() == (pe != 1)
            if pe == 2:
                raise ValueError("while the others are inside")
        while True:
            tdcoll.barrier()
            assert torch.is_grad_enabled()

    for _ in range(2):
        with pytest.raises(ValueError, match="while the others"):
            World(3).run(host)
        assert torch.is_grad_enabled()


def test_exchanges_are_collective_over_any_group():
    def host(pe):
        job = runtime.current()
        tensor = job.allocate((4,), torch.int32, group=[pe % 2, pe % 2 + 2], name="mine")
        offset = job.offset_of(tensor, "tensor")
        job.release(tensor)
        return offset

    assert World(4).run(host) == [0, 0, 0, 0]
    with pytest.raises(Deadlock, match=r"2 task\(s\) blocked") as raised:
        World(3).run(lambda pe: pe == 2 or tdcoll.zeros(4, torch.int32, name="rows"))
    assert [str(line) for line in raised.value.blocked] == [
        f"pe{pe} host waits in 'allocate rows' for rank(s) [2]" for pe in range(2)
    ]
    with pytest.raises(RankMismatchError, match="rank 0 is in 'right', and rank 1 in 'left'"):
        World(2).run(
            lambda pe: runtime.current().control.all_gather([0, 1], "left" if pe else "right", None)
        )


@jit
def see_grid(out, x, y):
    i, j, k = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    tl.store(
        out + i + x * (j + y * k),
        tl.num_programs(0) * 100 + tl.num_programs(1) * 10 + tl.num_programs(2),
    )


def test_grid_positions_and_start_order():
    out = torch.zeros(24, dtype=torch.int32)
    World(1).run(lambda pe: see_grid[(2, 3, 4)](out, 2, 3))
    assert out.tolist() == [234] * 24

    world = World(1, resident=1, trace=True)
    world.run(lambda pe: see_grid[lambda args: (2, 2)](out, 2, 2, num_warps=8))
    events = json.loads(world.trace.to_json())["traceEvents"]
    names = [event["name"] for event in events if event["ph"] == "X"]
    assert names == [f"see_grid({x},{y},0)" for y in (0, 1) for x in (0, 1)] + ["see_grid"]


@pytest.mark.parametrize(
    ("error", "match", "grid", "arguments"),
    [
        (TypeError, r"see_grid\(\): missing a required argument: 'y'", (1,), (2,)),
        (TypeError, r"see_grid\(\): too many positional arguments", (1,), (2, 3, 4)),
        *(
            (ValueError, "1 to 3 sizes of at least 0", grid, (2, 3))
            for grid in ((1, 1, 1, 1), (1, -1))
        ),
        (ValueError, "must be a CPU tensor", (1,), (2, torch.zeros(1, device="meta"))),
    ],
)
def test_launch_arguments_are_checked(error, match, grid, arguments):
    with pytest.raises(error, match=match):
        World(1).run(lambda pe: see_grid[grid](torch.zeros(4), *arguments))


@jit
def _of_two(first, second):
    return first + second


@jit
def caller(out):
    tl.store(out, _of_two(1))


@jit
def calls_a_caller(out):
    caller(out)


def test_an_argument_that_a_helper_misses_is_traced_to_the_lines_that_call_it():
    def frames(kernel):
        with pytest.raises(
            TypeError, match="missing 1 required positional argument: 'second'"
        ) as raised:
            World(1).run(lambda pe: kernel[(1,)](torch.zeros(1)))
        found = [
            (frame.name, frame.line) for frame in traceback.extract_tb(raised.value.__traceback__)
        ]
        return [frame for frame in found if frame[0] in ("calls_a_caller", "caller")]

    call, kernel = ("caller", "tl.store(out, _of_two(1))"), ("calls_a_caller", "caller(out)")
    assert frames(caller) == [call]
    assert frames(calls_a_caller) == [kernel, call]


@jit
def nested(out, n, FLAG: tl.constexpr):
    for i in range(n):
        tl.store(out + i, _square(i))
    if FLAG:
        tl.store(out, 7)


@jit
def _square(value):
    return value * value


def test_runtime_ranges_nested_functions_and_loads_of_ordinary_memory():
    out, flag, ended = (torch.zeros(n, dtype=torch.int64) for n in (8, 1, 1))

    def one_waits(flag, out):
        if tl.program_id(0) == 1:
            tl.atomic_add(flag, 1)
        else:
            while tl.load(flag) == 0:
                pass
            tl.store(out, 1)

    def host(pe):
        nested[(1,)](out, 5, True)
        device(one_waits, flag, ended, grid=(2,))

    World(1).run(host)
    assert out.tolist() == [7, 1, 4, 9, 16, 0, 0, 0]
    assert ended.item() == 1


def test_world_outlives_a_run_and_keeps_its_memory():
    world, gathers = World(4, seed=3, weak=True), gather()
    gathers(world)
    steps = world.scheduler.steps
    gathers(world)
    assert world.scheduler.steps > steps
    assert [job.arena.info.allocations for job in world.runtimes] == [4] * 4


def test_only_one_world_at_a_time_and_hooks_are_restored():
    def state():
        names = "GridExecutor", "_patch_lang", "_patch_attr", "interpreter_builder"
        function, rewriter = interpreter.InterpretedFunction, interpreter.FunctionRewriter
        of_classes = (
            rewriter.ast_transformer,
            function.rewritten_fn,
            function.__call__,
            torch.Tensor.data_ptr,
            tl.load,
        )
        fast = [getattr(owner, name) for owner, name, _ in shortcuts(check_overflow=False)]
        return [
            *(getattr(interpreter, name) for name in names),
            *of_classes,
            *fast,
            type(interpreter.interpreter_builder),
        ]

    before = state()

    def host(pe):
        assert type(interpreter.interpreter_builder) is not before[-1]
        if pe:
            raise ArithmeticError("boom")
        World(1).run(lambda pe: None)

    for _ in range(2):
        with pytest.raises((TdcollError, ArithmeticError)):
            World(2, seed=0).run(host)
        assert all(now is then for now, then in zip(state(), before, strict=True))
        assert runtime.current_or_none() is None
    with pytest.raises(TdcollError, match="only one can be"):
        World(1).run(host)
    with pytest.raises(NotInitializedError, match=r"tdcoll\.initialize\(\)"):
        tdl.my_pe()


def expect_put(launch, complete):
    """A case in which ``launch(dest, source)`` puts to the next of three PEs, and what is put is
    there afterwards."""

    @case
    def put(pe, n):
        dest, source = tdcoll.zeros(16, torch.uint8), torch.full((16,), pe + 1, dtype=torch.uint8)
        tdcoll.barrier()
        launch(dest, source)
        assert (dest == (pe - 1) % 3 + 1).all(), "not there"

    expect(put, complete, "not there", n_pes=3, seeds=30)


BARRIERS = {"barrier_all": tdl.barrier_all_block, "sync_all": tdl.sync_all_block}


@pytest.mark.parametrize("earlier", [False, True])
@pytest.mark.parametrize("how", BARRIERS)
def test_barriers_complete_puts_or_not(how, earlier):
    """Those of an earlier launch as well."""

    def put(dest, source):
        tdl.putmem_nbi_block(dest, source, 16, (tdl.my_pe() + 1) % 3)

    def launch(dest, source):
        if earlier:
            device(put, dest, source)
            device(BARRIERS[how])
        else:
            device(lambda dest, source: (put(dest, source), BARRIERS[how]()), dest, source)

    expect_put(launch, how == "barrier_all")


@pytest.mark.parametrize("how", ["barrier_all", "quiet", "fence", "sync_all", "nothing"])
def test_what_another_program_has_put_is_ordered_and_completed_as_well(how):
    """NVSHMEM's fence, quiet and barrier_all are the PE's: whoever has issued an operation, if it
    was before."""

    def launch(dest, source):
        flag, done = tdcoll.zeros(1, torch.int64), torch.zeros(1, dtype=torch.int32)
        protocols.put_by_another_program[(2,)](dest, source, 16, done, flag, 3, how)

    expect_put(launch, how not in ("sync_all", "nothing"))


def test_barrier_without_everybody_is_a_deadlock():
    with pytest.raises(
        Deadlock, match=r"pe1 call\(0,0,0\) waits in sync_all number 1 for pe0 \(.*cases\.py:\d+\)"
    ):
        World(2).run(lambda pe: device(BARRIERS["sync_all" if pe else "barrier_all"]))


GETS = {
    "get": tdl.getmem_block,
    "get_nbi, quiet": lambda *copy: (tdl.getmem_nbi_block(*copy), tdl.quiet()),
    "get_nbi": tdl.getmem_nbi_block,
}


@pytest.mark.parametrize("how", GETS)
def test_gets(how):
    def host(pe):
        mine, out = tdcoll.zeros(16, torch.uint8), torch.zeros(3, 16, dtype=torch.uint8)
        mine.fill_(pe + 1)
        tdcoll.barrier()
        device(
            lambda out, mine: GETS[how](out + 16 * (pe := tl.program_id(0)), mine, 16, pe),
            out,
            mine,
            grid=(3,),
        )
        right = bool((out == torch.arange(1, 4)[:, None]).all())
        tdcoll.barrier()
        return right

    stale = sum(World(3, seed=seed, weak=True).run(host).count(False) for seed in range(20))
    assert (stale == 0) == (how != "get_nbi")


def test_counts():
    world = World(4, ranks_per_node=[3, 1])
    gather(calls=2)(world)
    first, last = world.counts[0], world.counts[3]
    assert (first.puts, first.put_bytes, first.signals, first.inter_node_bytes) == (6, 96, 6, 32)
    assert last.inter_node_bytes == 96
    stores = World(4, weak=True)
    gather(Steps("copy", notify="release"), calls=1)(stores)
    assert (stores.counts[0].puts, stores.counts[0].store_bytes) == (0, 3 * (16 + 8))


def test_timeline_is_valid_chrome_trace(tmp_path):
    path = tmp_path / "trace.json"
    world = replay(gather(), 5, n_pes=4, trace=path)
    by_phase, rows = defaultdict(list), defaultdict(list)
    for event in json.loads(path.read_text())["traceEvents"]:
        assert {"ph", "name", "pid", "tid"} <= event.keys()
        by_phase[event["ph"]].append(event)
    assert {event["args"].get("name") for event in by_phase["M"]} >= {
        "pe0",
        "pe3",
        "host",
        "signals",
        "program 0",
    }
    assert all(
        0 <= event["ts"] <= event["ts"] + event["dur"] <= world.scheduler.steps
        for event in by_phase["X"]
    )
    assert len(by_phase["b"]) == len(by_phase["e"]) == sum(count.puts for count in world.counts)
    assert sorted(e["id"] for e in by_phase["b"]) == sorted(e["id"] for e in by_phase["e"])
    assert {(e["name"], e["args"]["to"]) for e in by_phase["b"]} >= {
        ("put+signal buffer[64:80] -> pe1", "pe1.buffer[64]")
    }
    assert len(by_phase["i"]) == sum(count.signals for count in world.counts)
    assert any(
        (event["pid"], event["name"]) == (1, "pe1.signals[4] = 1") for event in by_phase["i"]
    )
    assert any(
        event["name"].startswith("wait pe0.signals[1] and 2 more >= ") for event in by_phase["X"]
    )
    for event in by_phase["X"]:
        rows[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for spans in rows.values():
        for (a, b), (c, d) in combinations(spans, 2):  # nest, or follow each other
            assert b <= c or d <= a or (a <= c and d <= b) or (c <= a and b <= d)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_pes": 0}, "n_pes must be at least 1, got 0"),
        ({"n_pes": 4, "resident": 0}, "resident must be at least 1"),
        ({"n_pes": 4, "ranks_per_node": [3, 2]}, "add up to 4"),
        ({"n_pes": 4, "ranks_per_node": 0}, "ranks_per_node must be at least 1"),
        (
            {"n_pes": 4, "on_timeout": "ignore"},
            "on_timeout must be 'raise', 'expire' or 'early', got 'ignore'",
        ),
        ({"n_pes": 4, "on_timeout": "early"}, "on_timeout='early' needs a seed"),
        ({"n_pes": 2.0}, "n_pes must be an int, got 2.0"),
        ({"n_pes": 4, "seed": "1"}, "seed must be an int or None, got '1'"),
        ({"n_pes": 4, "timeout_s": 0}, "timeout_s must be greater than 0"),
        ({"n_pes": 4, "timeout_s": "1"}, "timeout_s must be a number of seconds, got '1'"),
        ({"n_pes": 4, "resident": 1.5}, "resident must be an int, got 1.5"),
        ({"n_pes": 4, "room": 0}, "room must be at least 1, got 0"),
        ({"n_pes": 4, "seed": 1, "stragglers": 4}, "stragglers must be 0 to 3, got 4"),
        ({"n_pes": 4, "stragglers": 0}, "stragglers=0 needs a seed"),
        ({"n_pes": 4, "late_data": True}, "late_data=True needs a seed"),
    ],
)
def test_world_arguments(arguments, message):
    with pytest.raises((TypeError, ValueError), match=message):
        World(**arguments)


def test_overflow_and_device_asserts_are_errors_if_asked_for():
    out = torch.zeros(1, dtype=torch.int64)

    def times_100000(out, n):
        tl.store(out, n * 100000)
        tl.device_assert(n <= 5, "at most five")

    def run(value, **options):
        World(1, **options).run(lambda pe: device(times_100000, out, value))

    run(1_000_000)
    run(7)
    run(3, check_overflow=True)
    assert out.item() == 300_000
    for value, message in (
        (1_000_000, "int32 overflow detected for operation mul"),
        (7, "at most five"),
    ):
        with pytest.raises(AssertionError, match=message):
            run(value, check_overflow=True)
