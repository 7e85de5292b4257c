# SPDX-License-Identifier: Apache-2.0
"""The cost of a call: of torch.distributed's on backend "tdcoll" and on NCCL, and of tdcoll's own on a context.

    bash launch.sh --nproc 2 benchmarks/backend_calls.py [--sizes 4K,256K,4M] [--blocks 32,64,128] [--json FILE]
    bash launch.sh --nproc 2 benchmarks/backend_calls.py --groups 1,3,10 --sizes 4K,64K,1M,16M,256M [--json FILE]
    bash launch.sh --nproc 2 benchmarks/backend_calls.py --beside [--json FILE]
    python benchmarks/backend_calls.py --table FILE

Host times are of calls of 4 KB that are only queued, for all-gather (out of place and in place), reduce-scatter and
all-reduce. Calls of torch.distributed are synchronous, and with async_op=True and wait(), over the backend both handled
and falling back. Each of tdcoll's own calls has its own context. Device times are of a graph of ten synchronous calls,
by the number of thread blocks that a group requests, or of the groups with the given numbers, of as many in one
process: later groups get fewer thread blocks, and fall back at smaller sizes. Bytes are what each rank brings to an
all-gather and an all-reduce, what it gets from a reduce-scatter, and what goes to each rank of an all-to-all. The
compared calls take turns for five rounds; the table has the median round of the slowest rank, and in brackets the
fastest and the slowest round. `--beside` has device times of two matmuls and of all-gathers on another stream beside
them, all in one graph.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import tdcoll
from tdcoll.base import arguments as checks
from tdcoll.distributed import Options, explain
from tdcoll.tools.bench.provenance import provenance
from tdcoll.tools.bench.rows import Row, save

ROUNDS, CALLS, CAPTURED = 5, 50, 10
KINDS = "all_gather", "reduce_scatter", "all_reduce", "all_to_all"
GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
Call = Callable[..., Any]


def call_of(kind: str, nbytes: int, group: Any) -> Call:
    """Return a function that makes a call of ``nbytes``; it takes ``async_op``."""
    world, n = dist.get_world_size(), max(1, nbytes // 2)
    device = torch.device("cuda", torch.cuda.current_device())
    if kind == "all_reduce":
        tensor = torch.ones(n, dtype=torch.bfloat16, device=device)
        return lambda async_op=False: dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group, async_op=async_op)
    whole = torch.ones(world * n, dtype=torch.bfloat16, device=device)
    part = torch.ones(n, dtype=torch.bfloat16, device=device)
    out = torch.empty_like(whole) if kind == "all_to_all" else part
    if kind == "all_to_all":  # of a rank's part for each other one
        return lambda async_op=False: dist.all_to_all_single(out, whole, group=group, async_op=async_op)
    if kind == "reduce_scatter":
        return lambda async_op=False: SCATTER(part, whole, group=group, async_op=async_op)
    if kind == "all_gather in place":
        part = whole[dist.get_rank() * n : (dist.get_rank() + 1) * n]
    return lambda async_op=False: GATHER(whole, part, group=group, async_op=async_op)


def slowest(us: float) -> float:
    """Return the largest of all ranks' times."""
    found = torch.tensor([us], device="cuda")
    dist.all_reduce(found, dist.ReduceOp.MAX, group=PLAIN)
    return float(found)


def call_us(call: Call, asynchronous: bool = False) -> float:
    """Return the microseconds of this rank's host per call."""
    torch.cuda.synchronize()
    dist.barrier(group=PLAIN)
    torch.cuda.synchronize()
    began = time.perf_counter()
    if asynchronous:
        for _ in range(CALLS):
            call(async_op=True).wait()
    else:
        for _ in range(CALLS):
            call()
    took = time.perf_counter() - began
    torch.cuda.synchronize()
    return 1e6 * took / CALLS


def host_us(call: Call, asynchronous: bool = False) -> float:
    """Return the microseconds of the slowest rank's host per call."""
    return slowest(call_us(call, asynchronous))


def device_us(graph: torch.cuda.CUDAGraph, calls: int = CAPTURED) -> float:
    """Return the microseconds of the device per captured call."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    dist.barrier(group=PLAIN)
    torch.cuda.synchronize()
    graph.replay()
    begin.record()
    for _ in range(3):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return slowest(1e3 * begin.elapsed_time(end) / (3 * calls))


def captured(call: Call, calls: int = CAPTURED) -> torch.cuda.CUDAGraph:
    """Return a graph of so many calls, which keeps their tensors."""
    side_stream = torch.cuda.Stream()
    side_stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(side_stream):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(side_stream)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=side_stream):
        for _ in range(calls):
            call()
    graph.kept = call
    return graph


def rounds(ways: dict[str, Callable[[], float]]) -> dict[str, list[float]]:
    """Return the times of every way; the ways take turns."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS + 1):  # the first warms up
        for name, measure in ways.items():
            found[name].append(measure())
    return {name: times[1:] for name, times in found.items()}


def words(times: list[float]) -> str:
    return f"{statistics.median(times):.1f} [{min(times):.1f}, {max(times):.1f}]"


def show(rows: Iterable[dict[str, Any]], what: str) -> None:
    if dist.get_rank() == 0:
        for row in rows:
            cells = "  ".join(f"{name} {words(times)}" for name, times in row["us"].items())
            print(f"{what:6s} {row['kind']:20s} {row['nbytes']:>9d} bytes  {cells}", flush=True)


def host_rows(kinds: list[str]) -> list[dict[str, Any]]:
    """Measure and show calls of 4 KB that tdcoll handles, and that fall back."""
    falling_back = dist.new_group(backend="tdcoll", pg_options=Options(max_bytes_per_rank=0))
    rows = []
    for kind in kinds:
        ways: dict[str, Callable[[], float]] = {}
        for name, group in (("nccl", PLAIN), ("tdcoll", dist.group.WORLD), ("falls back", falling_back)):
            call = call_of(kind, 4096, group)
            ways[name] = lambda call=call: host_us(call)
            ways[f"{name} async"] = lambda call=call: host_us(call, True)
        rows.append({"kind": kind, "nbytes": 4096, "us": rounds(ways)})
        show(rows[-1:], "host")
    dist.destroy_process_group(falling_back)
    return rows


class Waits:
    """An event of the device that counts the seconds in which the host waits for it."""

    def __init__(self, event: Any) -> None:
        self.record, self._event, self.seconds = event.record, event, 0.0

    def synchronize(self) -> None:
        began = time.perf_counter()
        self._event.synchronize()
        self.seconds += time.perf_counter() - began


def sparse_us(ctx: tdcoll.SparseContext) -> float:
    """Return the microseconds of the host per sparse all-reduce of 1,000 rows, its wait for the device excluded."""
    torch.manual_seed(dist.get_rank())
    ids, rows = torch.randint(0, 100_000, (1, 1000)), torch.ones(1000, 64)
    tensor = torch.sparse_coo_tensor(ids, rows, (100_000, 64), device=ctx.device, check_invariants=False)
    event, ctx.status_event = ctx.status_event, (waits := Waits(ctx.status_event))
    try:
        took = call_us(lambda: tdcoll.sparse_all_reduce(tensor, ctx=ctx))
        return slowest(took - 1e6 * waits.seconds / CALLS)
    finally:
        ctx.status_event = event


def own_row() -> dict[str, Any]:
    """Measure and show tdcoll's own calls of 4 KB and a sparse one, beside each other."""
    world, n = dist.get_world_size(), 1024
    buffer, shared = tdcoll.zeros(world * n), tdcoll.zeros(n)
    part, whole = torch.ones(n, device=shared.device), torch.ones(world * n, device=shared.device)
    with contextlib.ExitStack() as stack:  # maxima, since a sum in place would grow from call to call

        def on_a_context(call: Callable[..., torch.Tensor], tensor: torch.Tensor, **more: Any) -> Callable[[], float]:
            ctx = stack.enter_context(tdcoll.CollectiveContext(max_bytes_per_rank=4 * n))
            return lambda: host_us(lambda: call(tensor, ctx=ctx, **more))

        ways = {
            "all_gather": on_a_context(tdcoll.all_gather, part),
            "all_gather_": on_a_context(tdcoll.all_gather_, buffer),
            "reduce_scatter": on_a_context(tdcoll.reduce_scatter, whole, op="max"),
            "all_reduce": on_a_context(tdcoll.all_reduce, part, op="max"),
            "all_reduce_": on_a_context(tdcoll.all_reduce_, part, op="max"),
            "all_reduce_ symmetric": on_a_context(tdcoll.all_reduce_, shared, op="max", symmetric=True),
        }
        sparse = stack.enter_context(tdcoll.SparseContext(max_rows_per_rank=1000, max_row_bytes=256))
        ways["sparse_all_reduce of 1,000 rows"] = lambda: sparse_us(sparse)
        row = {"kind": "own calls", "nbytes": 4 * n, "us": rounds(ways)}
    tdcoll.free(buffer)
    tdcoll.free(shared)
    show([row], "host")
    return row


def table(file: dict[str, Any]) -> str:
    """Return the median times of a file as Markdown: the host's of tdcoll's own calls, then of torch.distributed's; the
    device's if there are no others. A star is a call that tdcoll handles.

    Files of older commits have other names for two of them.
    """
    if not file["host"]:
        columns = list(file["device"][0]["us"])
        lines = [f"| call | bytes | {' | '.join(columns)} |", f"|---|---:|{'---:|' * len(columns)}"]
        for row in file["device"]:
            stars = {name: "*" * (name in row["handled"]) for name in columns}
            cells = [f"{statistics.median(row['us'][name]):.1f}{stars[name]}" for name in columns]
            lines.append(f"| {row['kind']} | {row['nbytes']} | {' | '.join(cells)} |")
        return "\n".join(lines)
    own, *others = file["host"]
    lines = ["| own call | µs |", "|---|---|"]
    for name, times in own["us"].items():
        lines.append(f"| `{name.replace('all_gather_in_place', 'all_gather_')}` | {statistics.median(times):.1f} |")
    names = [name.replace("handed over", "falls back") for name in others[0]["us"]]  # older files say the former
    lines += ["", f"| call | {' | '.join(names)} |", f"|---|{'---|' * len(names)}"]
    for row in others:
        lines.append(f"| {row['kind']} | {' | '.join(f'{statistics.median(t):.1f}' for t in row['us'].values())} |")
    return "\n".join(lines)


def groups_of(blocks: list[int], most: int, numbers: list[int]) -> dict[str, Any]:
    """Return the groups to measure: by the thread blocks that they request, or those with these numbers (from 1) of as
    many groups as a process may have, with default options.

    All of them hold thread blocks at once, so later ones get fewer.
    """
    if numbers:
        made = [dist.new_group(backend="tdcoll") for _ in range(max(numbers))]
        for group in made:
            for kind in KINDS:
                call_of(kind, 4096, group)()  # makes the context
        torch.cuda.synchronize()
        return {f"group {number}": made[number - 1] for number in numbers}
    options = {number: Options(max_bytes_per_rank=most, blocks=number) for number in blocks}
    return {f"{number} blocks": dist.new_group(backend="tdcoll", pg_options=options[number]) for number in blocks}


def device_rows(kinds: Iterable[str], sizes: list[int], groups: dict[str, Any]) -> list[dict[str, Any]]:
    """Measure and show calls in graphs, of NCCL and of groups of tdcoll; say what tdcoll handles of them itself."""
    rows = []
    for kind in kinds:
        for nbytes in sizes:
            graphs, handled = {"nccl": captured(call_of(kind, nbytes, PLAIN))}, []
            for name, group in groups.items():
                before = sum(count for (_, by, _), count in group.dispatcher.counts.items() if by == "tdcoll")
                graphs[name] = captured(call_of(kind, nbytes, group))
                after = sum(count for (_, by, _), count in group.dispatcher.counts.items() if by == "tdcoll")
                handled += [name] * (after > before)
            ways = {name: (lambda graph=graph: device_us(graph)) for name, graph in graphs.items()}
            rows.append({"kind": kind, "nbytes": nbytes, "us": rounds(ways), "handled": handled})
            ways.clear()
            graphs.clear()  # NCCL's group cannot be destroyed while one lives
            show(rows[-1:], "device")
    return rows


def shares(rows: list[dict[str, Any]]) -> Iterable[str]:
    """Yield, for each group, the share of rows that tdcoll handles, and the worst ratio to NCCL's time."""
    for name in [name for name in rows[0]["us"] if name != "nccl"]:
        ratios = {handled: [0.0] for handled in (True, False)}
        for row in rows:
            time, nccl = (statistics.median(row["us"][way]) for way in (name, "nccl"))
            ratios[name in row["handled"]].append(time / nccl)
        own, other = ratios[True], ratios[False]
        yield (
            f"{name}: handles {len(own) - 1} of {len(rows)} rows, at most {max(own):.2f} of NCCL's time; the others at "
            f"most {max(other):.2f}"
        )


def beside_row(count: int, nbytes: int) -> dict[str, Any]:
    """Measure and show two matmuls of 8192 x 8192 x 8192, alone and with ``count`` all-gathers on another stream."""
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    out, side_stream = torch.empty_like(a), torch.cuda.Stream(priority=-1)
    part = torch.ones(nbytes, dtype=torch.uint8, device="cuda")
    whole = torch.empty(dist.get_world_size() * nbytes, dtype=torch.uint8, device="cuda")
    shared = tdcoll.empty(whole.numel(), torch.uint8)

    def step(gather: Call) -> None:
        main = torch.cuda.current_stream()
        side_stream.wait_stream(main)
        with torch.cuda.stream(side_stream):
            for _ in range(count):
                gather()
        for _ in range(2):
            torch.mm(a, a, out=out)
        main.wait_stream(side_stream)

    with tdcoll.CollectiveContext(max_bytes_per_rank=nbytes, max_blocks=64) as ctx:

        def ours(algorithm: str) -> Call:
            return lambda: tdcoll.all_gather(part, ctx=ctx, out=whole, algorithm=algorithm)

        gathers: dict[str, Call] = {
            "alone": lambda: None,
            "nccl": lambda: GATHER(whole, part, group=PLAIN),
            "ce in place": lambda: tdcoll.all_gather_(shared, ctx=ctx, algorithm="ce"),
            **{name: ours(name) for name in ("ce", "loop", "direct")},
        }
        graphs = {name: captured(lambda gather=gather: step(gather), 1) for name, gather in gathers.items()}
        ways = {name: lambda graph=graph: device_us(graph, 1) for name, graph in graphs.items()}
        row = {"kind": f"{count} all-gathers", "nbytes": nbytes, "us": rounds(ways)}
        ways.clear()
        graphs.clear()  # NCCL's group cannot be destroyed while one lives
    tdcoll.free(shared)
    show([row], "beside")
    return row


def beside_rows(of: dict[str, Any], ranks: int) -> list[Row]:
    """Return the rows of a file, for `report`; ``added`` is by how much each round took longer than that without
    all-gathers."""
    rows = []
    for name, times in of["us"].items():
        facts = {"gathers": of["kind"], "nbytes": of["nbytes"], "times": times}
        facts["added"] = [time - least for time, least in zip(times, of["us"]["alone"], strict=True)]
        kind: dict[str, Any] = {"algorithm": name, "peer": name in ("alone", "nccl"), "launch": "graph", "check": "ok"}
        rows.append(Row(ranks=ranks, nodes=1, median_us=statistics.median(times), facts=facts, **kind))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="4K,64K,256K,1M,4M,16M", help="of the device times; '' for none")
    parser.add_argument("--blocks", default="32,64", help="numbers with commas between them")
    parser.add_argument("--groups", default="", help="numbers of groups of a process instead, such as 1,3,10")
    parser.add_argument("--heap", default="4G", help="symmetric heap of each rank")
    parser.add_argument("--json", help="write what was measured there")
    parser.add_argument("--beside", action="store_true", help="measure only all-gathers beside matmuls")
    parser.add_argument("--table", help="measure nothing, but print the times of such a file as Markdown")
    arguments = parser.parse_args()
    if arguments.table:
        print(table(json.loads(Path(arguments.table).read_text())))
        return
    if not torch.cuda.is_available():
        sys.exit("backend_calls.py measures GPUs, and there is none")
    began = datetime.now(timezone.utc).isoformat(timespec="seconds")
    sizes = [checks.byte_count("--sizes", size) for size in arguments.sizes.split(",") if size]
    blocks = [int(number) for number in arguments.blocks.split(",")]
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("tdcoll", pg_options=Options(heap_bytes=arguments.heap))
    global PLAIN
    PLAIN = dist.new_group(backend="nccl")
    if arguments.beside:
        beside, facts = [beside_row(4, 16 << 20), beside_row(18, 4 << 20)], provenance()
        if dist.get_rank() == 0 and arguments.json:
            command = f"bash launch.sh --nproc {dist.get_world_size()} benchmarks/backend_calls.py --beside"
            head = {"benchmark": "beside", "command": command, "started": began, "provenance": facts}
            save(Path(arguments.json), head, [row for one in beside for row in beside_rows(one, dist.get_world_size())])
        dist.destroy_process_group()
        return
    numbers = [int(number) for number in arguments.groups.split(",") if number]
    host = [] if numbers else [own_row(), *host_rows(["all_gather", "all_gather in place", *KINDS[1:3]])]
    device: list[dict[str, Any]] = []
    if sizes:
        groups = groups_of(blocks, max(sizes), numbers)
        device = device_rows(KINDS, sizes, groups)
        explained = {name: explain(group) for name, group in groups.items()}
    facts = provenance()
    if dist.get_rank() == 0:
        print(*(shares(device) if device else ()), sep="\n")
        if arguments.json:
            found = {**facts, "host": host, "device": device, "explain": explained if sizes else {}}
            Path(arguments.json).write_text(json.dumps(found, indent=1))
    dist.destroy_process_group()


PLAIN: Any = None

if __name__ == "__main__":
    main()
