# SPDX-License-Identifier: Apache-2.0
"""Host functions, launches, the control plane, barriers, gets, counts and timelines of a World."""

from __future__ import annotations

import json
import re
import traceback
from collections import defaultdict

import kernels
import protocols
import pytest
import torch
from cases import gather

import tdcoll
import tdcoll.language as tdl
from tdcoll import runtime
from tdcoll.errors import NotInitializedError, RankMismatchError, TdcollError
from tdcoll.testing import Deadlock, World, first_failure, replay


def test_host_results_and_runtimes():
    world = World(3, ranks_per_node=2, heap_bytes=1000)

    def host(pe):
        job = runtime.current()
        assert (job.rank, job.world_size, job.simulated) == (pe, 3, True)
        assert job.heap.nbytes == 1024
        assert job.node_ids == (0, 0, 1)
        assert job.topology().n_nodes == 2
        assert job.heap.peer_base(pe) == job.heap.base
        assert (job.heap.peer_base(2) == 0) == (pe != 2)
        return pe * 10

    assert world.run(host) == [0, 10, 20]
    assert runtime.current_or_none() is None


def test_allocations_are_collective_over_any_group():
    def host(pe):
        job = runtime.current()
        group = [0, 2] if pe in (0, 2) else [1, 3]
        tensor = job.allocate((4,), torch.int32, group=group, name="mine")
        tensor.fill_(pe)
        offset = job.offset_of(tensor, "tensor")
        job.release(tensor)
        return offset

    assert World(4).run(host) == [0, 0, 0, 0]


def test_missing_rank_is_a_deadlock():
    def host(pe):
        if pe != 2:
            runtime.current().allocate((4,), torch.int32, name="rows")

    with pytest.raises(Deadlock) as raised:
        World(3).run(host)
    assert [str(line) for line in raised.value.blocked] == [
        f"pe{pe} host waits in 'allocate rows' for rank(s) [2]" for pe in range(2)
    ]


def test_other_call_is_a_mismatch():
    def host(pe):
        runtime.current().control.all_gather([0, 1], "left" if pe else "right", None)

    with pytest.raises(RankMismatchError, match=r"rank 0 is in 'right', but \{1: 'left'\} are elsewhere"):
        World(2).run(host)


def test_grid_positions_and_start_order():
    out = torch.zeros(24, dtype=torch.int32)
    World(1).run(lambda pe: kernels.see_grid[(2, 3, 4)](out, 2, 3))
    assert out.tolist() == [234] * 24

    world = World(1, resident=1, trace=True)
    world.run(lambda pe: kernels.see_grid[lambda args: (2, 2)](out, 2, 2, num_warps=8))
    events = json.loads(world.trace.to_json())["traceEvents"]
    names = [event["name"] for event in events if event["ph"] == "X"]
    assert names == [f"see_grid({x},{y},0)" for y in (0, 1) for x in (0, 1)] + ["see_grid"]


def test_launch_arguments_are_checked():
    out = torch.zeros(4, dtype=torch.int32)

    def raises(error, match, launch):
        with pytest.raises(error, match=match):
            World(1).run(lambda pe: launch())

    place = rf"{re.escape(str(kernels.__file__))}, line {kernels.see_grid.fn.__code__.co_firstlineno + 1}\n"
    raises(
        TypeError, rf"see_grid\(\): missing a required argument: 'y'; .*{place}", lambda: kernels.see_grid[(1,)](out, 2)
    )
    raises(TypeError, "too many positional arguments", lambda: kernels.see_grid[(1,)](out, 2, 3, 4))
    raises(TypeError, "unknown keyword", lambda: kernels.see_grid[(1,)](out, 2, 3, num_warp=8))
    raises(ValueError, "1 to 3 extents", lambda: kernels.see_grid[(1, 1, 1, 1)](out, 2, 3))
    raises(ValueError, "must be a CPU tensor", lambda: kernels.see_grid[(1,)](out.to("meta"), 2, 3))


def test_an_argument_that_a_helper_misses_is_traced_to_the_lines_that_call_it():
    def frames(launch):
        with pytest.raises(TypeError, match="missing 1 required positional argument: 'second'") as raised:
            World(1).run(lambda pe: launch())
        found = [(frame.name, frame.line) for frame in traceback.extract_tb(raised.value.__traceback__)]
        return [frame for frame in found if frame[0] in ("calls_a_caller", "caller")]

    out = torch.zeros(1)
    call = ("caller", "tl.store(out, _of_two(1))")
    kernel = ("calls_a_caller", "caller(out)")
    assert frames(lambda: kernels.caller[(1,)](out))[-1:] == [call]
    assert frames(lambda: kernels.calls_a_caller[(1,)](out))[-2:] == [kernel, call]
    assert frames(lambda: kernels.calls_a_caller[(1,)](out)).count(kernel) == 1


def test_runtime_ranges_nested_functions_and_bools():
    out = torch.zeros(8, dtype=torch.int64)
    World(1).run(lambda pe: kernels.nested[(1,)](out, 5, True))
    assert out.tolist() == [7, 1, 4, 9, 16, 0, 0, 0]


def test_spin_on_ordinary_memory_lets_others_run():
    flag, out = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    World(1).run(lambda pe: kernels.launch_flag[(2,)](flag, out))
    assert out.item() == 1


def test_errors_of_hosts_and_programs_name_them():
    def host(pe):
        raise KeyError("mine")

    with pytest.raises(KeyError) as raised:
        World(2).run(host)
    assert raised.value.__notes__ == ["raised by pe0 host"]

    def launches(pe):
        kernels.fails[(2,)](runtime.current().allocate((1,), torch.int64), 1)

    with pytest.raises(ValueError, match="sig_op must be SIGNAL_SET or SIGNAL_ADD, got 77") as raised:
        World(2).run(launches)
    assert "raised by pe1 fails(1,0,0)" in raised.value.__notes__


def test_world_outlives_a_run_and_keeps_its_memory():
    world, case = World(4, seed=3, weak=True), gather("put_signal")
    case(world)
    steps = world.steps
    case(world)
    assert world.steps > steps
    assert [job.heap_info.allocations for job in world.runtimes] == [4] * 4


def test_messages_outlive_their_launch():
    """The end of a kernel does not complete its puts, and the end of a run does."""

    def host(pe):
        word = runtime.current().allocate((1,), torch.int64, name="word")
        source = torch.full((1,), 5, dtype=torch.int64)
        if pe == 0:
            kernels.put[(1,)](word, source, 8, 1)
        return word

    world = World(2, weak=True)
    seen = []
    world.run(lambda pe: seen.append(host(pe)) or (pe == 1 and seen.append(int(seen[-1]))))
    words = [entry for entry in seen if isinstance(entry, torch.Tensor)]
    assert sorted(int(word) for word in words) == [0, 5]


def test_only_one_world_at_a_time_and_hooks_are_restored():
    import triton.language as tl
    import triton.runtime.interpreter as interpreter

    before = {name: getattr(interpreter, name) for name in ("GridExecutor", "_patch_lang", "interpreter_builder")}
    builder, transformer = type(interpreter.interpreter_builder), interpreter.FunctionRewriter.ast_transformer
    load, cache = tl.load, interpreter.InterpretedFunction.rewritten_fn
    address = torch.Tensor.data_ptr

    def host(pe):
        assert type(interpreter.interpreter_builder) is not builder
        if pe:
            raise ArithmeticError("boom")
        World(1).run(lambda pe: None)

    for _ in range(2):
        with pytest.raises((TdcollError, ArithmeticError)):
            World(2, seed=0).run(host)
        assert {name: getattr(interpreter, name) for name in before} == before
        assert type(interpreter.interpreter_builder) is builder
        assert interpreter.FunctionRewriter.ast_transformer is transformer
        assert interpreter.InterpretedFunction.rewritten_fn is cache
        assert tl.load is load
        assert torch.Tensor.data_ptr is address
        assert runtime.current_or_none() is None
    with pytest.raises(TdcollError, match="only one can be"):
        World(1).run(host)


def test_language_outside_of_a_machine():
    with pytest.raises(NotInitializedError, match=r"tdcoll\.initialize\(\)"):
        tdl.my_pe()


# ---------------------------------------------------------------------- barriers, gets, counts, timelines


@pytest.mark.parametrize("how", ["barrier_all", "sync_all"])
def test_barriers_complete_puts_or_not(how):
    stale = 0
    for seed in range(30):
        world = World(3, seed=seed, weak=True)

        def host(pe):
            job = runtime.current()
            dest = job.allocate((16,), torch.uint8)
            source = torch.full((16,), pe + 1, dtype=torch.uint8)
            protocols.put_then_barrier[(1,)](dest, source, 16, 3, how)
            return bool((dest == (pe - 1) % 3 + 1).all())

        stale += world.run(host).count(False)
    assert (stale == 0) == (how == "barrier_all")


@pytest.mark.parametrize(("how", "complete"), [("barrier_all", True), ("sync_all", False)])
def test_barrier_completes_puts_of_an_earlier_launch(how, complete):
    def case(world):
        def host(pe):
            dest, source = tdcoll.zeros(16, torch.uint8), torch.full((16,), pe + 1, dtype=torch.uint8)
            tdcoll.barrier()
            kernels.put[(1,)](dest, source, 16, (pe + 1) % 3)
            kernels.barrier[(1,)](how)
            assert (dest == (pe - 1) % 3 + 1).all(), "not there"

        world.run(host)

    failure = first_failure(case, n_pes=3, seeds=30)
    assert (failure is None) == complete
    assert complete or "not there" in failure.report


@pytest.mark.parametrize("how", ["barrier_all", "quiet", "fence", "sync_all", "nothing"])
def test_what_another_program_has_put_is_ordered_and_completed_as_well(how):
    """NVSHMEM's fence, quiet and barrier_all are the PE's: whoever has issued an operation, if it was before."""

    def case(world):
        def host(pe):
            dest, flag = tdcoll.zeros(16, torch.uint8), tdcoll.zeros(1, torch.int64)
            source, done = torch.full((16,), pe + 1, dtype=torch.uint8), torch.zeros(1, dtype=torch.int32)
            tdcoll.barrier()
            protocols.put_by_another_program[(2,)](dest, source, 16, done, flag, 3, how)
            assert (dest == (pe - 1) % 3 + 1).all(), "not there"

        world.run(host)

    failure = first_failure(case, n_pes=3, seeds=30)
    ordered = how not in ("sync_all", "nothing")
    assert (failure is None) == ordered
    assert ordered or "not there" in failure.report


def test_barrier_without_everybody_is_a_deadlock():
    def host(pe):
        kernels.barrier[(1,)]("sync_all" if pe else "barrier_all")

    with pytest.raises(Deadlock, match=r"pe1 barrier\(0,0,0\) waits in sync_all number 1 for pe0"):
        World(2).run(host)


@pytest.mark.parametrize("how", ["get", "get_nbi, quiet", "get_nbi"])
def test_gets(how):
    stale = 0
    for seed in range(20):

        def host(pe):
            job = runtime.current()
            mine = job.allocate((16,), torch.uint8)
            mine.fill_(pe + 1)
            job.control.all_gather(range(3), "filled", None)
            out = torch.zeros(3, 16, dtype=torch.uint8)
            protocols.pull[(3,)](out, mine, 16, how)
            right = bool((out == torch.arange(1, 4)[:, None]).all())
            job.control.all_gather(range(3), "read", None)
            return right

        stale += World(3, seed=seed, weak=True).run(host).count(False)
    assert (stale == 0) == (how != "get_nbi")


@pytest.mark.parametrize("weak", [False, True])
def test_signal_add_and_int_p(weak):
    def host(pe):
        job = runtime.current()
        total, flag = job.allocate((1,), torch.int64), job.allocate((1,), torch.int32)
        kernels.add_up[(1,)](total, flag, 3, num_warps=1)
        job.control.all_gather(range(3), "done", None)
        return total.item(), flag.item()

    assert World(3, seed=0, weak=weak).run(host) == [(6, 102), (0, 100), (0, 101)]


def test_counts():
    world = World(4, ranks_per_node=[3, 1])
    gather("put_signal", calls=2)(world)
    first, last = world.counts[0], world.counts[3]
    assert (first.launches, first.puts, first.put_bytes, first.signals, first.waits) == (2, 6, 96, 6, 2)
    assert (first.inter_node_puts, first.inter_node_bytes) == (2, 32)
    assert (last.inter_node_puts, last.inter_node_bytes) == (6, 96)
    stores = World(4)
    gather("copy, release", calls=1)(stores)
    assert stores.counts[0].puts == 0


def test_timeline_is_valid_chrome_trace(tmp_path):
    path = tmp_path / "trace.json"
    world = replay(gather("put_signal"), 5, n_pes=4, trace=path)
    events = json.loads(path.read_text())["traceEvents"]
    by_phase = defaultdict(list)
    for event in events:
        assert {"ph", "name", "pid", "tid"} <= event.keys()
        by_phase[event["ph"]].append(event)
    assert {event["args"]["name"] for event in by_phase["M"] if event["name"] == "process_name"} == {
        "pe0",
        "pe1",
        "pe2",
        "pe3",
    }
    assert all(0 <= event["ts"] <= event["ts"] + event["dur"] <= world.steps for event in by_phase["X"])
    assert len(by_phase["b"]) == len(by_phase["e"]) == sum(count.puts for count in world.counts)
    assert sorted(e["id"] for e in by_phase["b"]) == sorted(e["id"] for e in by_phase["e"])
    assert len(by_phase["i"]) == sum(count.signals for count in world.counts)
    assert any(event["name"].startswith("wait pe0.signals[1] and 2 more >= ") for event in by_phase["X"])
    rows = defaultdict(list)
    for event in by_phase["X"]:
        rows[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for spans in rows.values():  # spans of one row nest
        for a in spans:
            for b in spans:
                assert (
                    a[1] <= b[0] or b[1] <= a[0] or (a[0] <= b[0] and b[1] <= a[1]) or (b[0] <= a[0] and a[1] <= b[1])
                )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_pes": 0}, "n_pes must be at least 1, got 0"),
        ({"n_pes": 4, "resident": 0}, "resident must be at least 1"),
        ({"n_pes": 4, "ranks_per_node": [3, 2]}, "add up to 4"),
        ({"n_pes": 4, "ranks_per_node": 0}, "ranks_per_node must be at least 1"),
        ({"n_pes": 4, "on_timeout": "ignore"}, "on_timeout must be 'raise', 'expire' or 'early', got 'ignore'"),
        ({"n_pes": 4, "on_timeout": "early"}, "on_timeout='early' needs a seed"),
    ],
)
def test_world_arguments(arguments, message):
    with pytest.raises(ValueError, match=message.replace("[", r"\[")):
        World(arguments.pop("n_pes"), **arguments)


def test_overflow_and_device_asserts_are_errors_if_asked_for():
    out = torch.zeros(1, dtype=torch.int64)

    def run(value, **options):
        World(1, **options).run(lambda pe: kernels.times_100000[(1,)](out, value))

    run(1_000_000)
    run(7)
    run(3, check_overflow=True)
    assert out.item() == 300_000
    with pytest.raises(AssertionError, match="int32 overflow detected for operation mul"):
        run(1_000_000, check_overflow=True)
    with pytest.raises(AssertionError, match="at most five"):
        run(7, check_overflow=True)
