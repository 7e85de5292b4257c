# SPDX-License-Identifier: Apache-2.0
"""The cost of a call: torch.distributed's on backend "tdcoll" and on NCCL, and tdcoll's own.

\b
    job="bash launch.sh --nproc 2 benchmarks/backend_calls.py"
    $job [--sizes 4K,256K,4M] [--blocks 32,64,128] [--json FILE]
    $job --groups 1,3,10 --sizes 4K,64K,1M,16M,256M [--json FILE]
    $job --beside [--json FILE]
    python benchmarks/backend_calls.py --table FILE

Host times are of calls of 4 KB that are only queued, for all-gather (out of place and in place),
reduce-scatter and all-reduce. Calls of torch.distributed are synchronous, and with async_op=True
and wait(), over the backend both handled and falling back. Each of tdcoll's own calls has its own
context.

Device times are of a graph of ten synchronous calls, by the number of thread blocks that a group
requests, or of the groups with the given numbers, of as many in one process: later groups get fewer
thread blocks, and fall back at smaller sizes. Bytes are what each rank brings to an all-gather and
an all-reduce, what it gets from a reduce-scatter, and what goes to each rank of an all-to-all.

The compared calls take turns for five rounds; the table has the median round of the slowest rank,
and in brackets the fastest and the slowest round. `--beside` has device times of two matmuls and of
all-gathers on another stream beside them, all in one graph.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist

import tdcoll
from benchmarks import parsing
from benchmarks.backend_timing import CALLS, Clock, Measures, captured, group_call, rounds, show
from benchmarks.beside import WORK, beside_rows, measure_beside
from benchmarks.grid import Column, grid
from tdcoll.distributed import Options, explain
from tdcoll.tools.measure.provenance import provenance
from tdcoll.tools.measure.results import save

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
HOST_KINDS = ("all_gather", "all_gather in place", "reduce_scatter", "all_reduce")
HOST_BYTES = 4096


def host_rows(clock: Clock, kinds: Iterable[str]) -> list[dict[str, Any]]:
    """Measure and show calls that tdcoll handles, and that fall back. Collective."""
    falling_back = dist.new_group(backend="tdcoll", pg_options=Options(max_bytes_per_rank=0))
    groups = {"nccl": clock.nccl, "tdcoll": dist.group.WORLD, "falls back": falling_back}
    rows = []
    for kind in kinds:
        measures: Measures = {}
        for name, group in groups.items():
            call = group_call(kind, HOST_BYTES, group)
            measures[name] = partial(clock.host_us, call)
            measures[f"{name} async"] = partial(clock.host_us, call, asynchronous=True)
        rows.append({"kind": kind, "nbytes": HOST_BYTES, "us": rounds(measures)})
        show(rows[-1:], "host")
    dist.destroy_process_group(falling_back)
    return rows


class TimedEvent:
    """An event of the device that counts the seconds in which the host waits for it."""

    def __init__(self, event: Any) -> None:
        self.record = event.record
        self.seconds = 0.0
        self._event = event

    def synchronize(self) -> None:
        began = time.perf_counter()
        self._event.synchronize()
        self.seconds += time.perf_counter() - began


def sparse_us(clock: Clock, ctx: tdcoll.SparseContext) -> float:
    """Return the microseconds of the host per sparse all-reduce of 1,000 rows.

    Its wait for the device doesn't count.
    """
    torch.manual_seed(dist.get_rank())
    ids = torch.randint(0, 100_000, (1, 1000))
    rows = torch.ones(1000, 64)
    tensor = torch.sparse_coo_tensor(
        ids, rows, (100_000, 64), device=ctx.device, check_invariants=False
    )
    event = ctx.status_event
    timed: Any = TimedEvent(event)
    ctx.status_event = timed
    try:
        took = clock.call_us(lambda: tdcoll.sparse_all_reduce(tensor, ctx=ctx))
        return clock.slowest(took - 1e6 * timed.seconds / CALLS)
    finally:
        ctx.status_event = event


def own_row(clock: Clock) -> dict[str, Any]:
    """Measure and show tdcoll's own calls of 4 KB and a sparse one, in turns. Collective."""
    world = dist.get_world_size()
    n = HOST_BYTES // 4
    buffer = tdcoll.zeros(world * n)
    shared = tdcoll.zeros(n)
    part = torch.ones(n, device=shared.device)
    whole = torch.ones(world * n, device=shared.device)
    with contextlib.ExitStack() as stack:

        def on_a_context(
            call: Callable[..., torch.Tensor], tensor: torch.Tensor, **more: Any
        ) -> Callable[[], float]:
            ctx = stack.enter_context(tdcoll.CollectiveContext(max_bytes_per_rank=HOST_BYTES))
            return lambda: clock.host_us(lambda: call(tensor, ctx=ctx, **more))

        # Maxima, since a sum in place would grow from call to call.
        measures = {
            "all_gather": on_a_context(tdcoll.all_gather, part),
            "all_gather_": on_a_context(tdcoll.all_gather_, buffer),
            "reduce_scatter": on_a_context(tdcoll.reduce_scatter, whole, op="max"),
            "all_reduce": on_a_context(tdcoll.all_reduce, part, op="max"),
            "all_reduce_": on_a_context(tdcoll.all_reduce_, part, op="max"),
            "all_reduce_ symmetric": on_a_context(
                tdcoll.all_reduce_, shared, op="max", symmetric=True
            ),
        }
        sparse = stack.enter_context(
            tdcoll.SparseContext(max_rows_per_rank=1000, max_row_bytes=256)
        )
        measures["sparse_all_reduce of 1,000 rows"] = partial(sparse_us, clock, sparse)
        row = {"kind": "own calls", "nbytes": HOST_BYTES, "us": rounds(measures)}
    tdcoll.free(buffer)
    tdcoll.free(shared)
    show([row], "host")
    return row


def groups_by_number(numbers: list[int]) -> dict[str, Any]:
    """Return the groups with these numbers, from 1, after making all groups up to the last number.

    They have default options. All of them hold thread blocks at once, so later ones get fewer.
    Collective.
    """
    groups = [dist.new_group(backend="tdcoll") for _ in range(max(numbers))]
    for group in groups:
        for kind in KINDS:
            group_call(kind, HOST_BYTES, group)()  # makes the context
    torch.cuda.synchronize()
    return {f"group {number}": groups[number - 1] for number in numbers}


def groups_by_blocks(blocks: list[int], max_bytes: int) -> dict[str, Any]:
    """Return a group for each number of thread blocks. Collective."""
    groups = {}
    for number in blocks:
        options = Options(max_bytes_per_rank=max_bytes, blocks=number)
        groups[f"{number} blocks"] = dist.new_group(backend="tdcoll", pg_options=options)
    return groups


def _handled_calls(group: Any) -> int:
    """Return how many calls of a group tdcoll has handled itself."""
    return sum(count for (_, by, _), count in group.dispatcher.counts.items() if by == "tdcoll")


def device_rows(
    clock: Clock, kinds: Iterable[str], sizes: list[int], groups: dict[str, Any]
) -> list[dict[str, Any]]:
    """Measure and show calls in graphs, of NCCL and of groups of tdcoll. Collective.

    Rows name the groups whose call tdcoll handles itself.
    """
    rows = []
    for kind in kinds:
        for nbytes in sizes:
            graphs = {"nccl": captured(group_call(kind, nbytes, clock.nccl))}
            handled = []
            for name, group in groups.items():
                before = _handled_calls(group)
                graphs[name] = captured(group_call(kind, nbytes, group))
                if _handled_calls(group) > before:
                    handled.append(name)
            measures: Measures = {
                name: partial(clock.device_us, graph) for name, graph in graphs.items()
            }
            rows.append(
                {"kind": kind, "nbytes": nbytes, "us": rounds(measures), "handled": handled}
            )
            # NCCL's group cannot be destroyed while a graph lives.
            measures.clear()
            graphs.clear()
            show(rows[-1:], "device")
    return rows


def shares(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield for each group the share of rows that tdcoll handles, and the worst ratio to NCCL."""
    for name in rows[0]["us"]:
        if name == "nccl":
            continue
        own: list[float] = []
        others: list[float] = []
        for row in rows:
            ratio = statistics.median(row["us"][name]) / statistics.median(row["us"]["nccl"])
            ratios = own if name in row["handled"] else others
            ratios.append(ratio)
        yield (
            f"{name}: handles {len(own)} of {len(rows)} rows, at most {max(own, default=0.0):.2f} "
            f"of NCCL's time; the others at most {max(others, default=0.0):.2f}"
        )


def table(file: dict[str, Any]) -> str:
    """Return the median times of a file as Markdown.

    They are the host's of tdcoll's own calls, then of torch.distributed's; the device's if there
    are no others. A star is a call that tdcoll handles. Files of older commits have other names for
    two of them.
    """
    if not file["host"]:
        return _device_table(file["device"])
    own, *others = file["host"]
    names = [f"`{name.replace('all_gather_in_place', 'all_gather_')}`" for name in own["us"]]
    own_table = grid(
        [Column("own call", names, "left"), Column("µs", _medians(own["us"].values()))]
    )
    columns = [Column("call", [row["kind"] for row in others], "left")]
    for name in others[0]["us"]:
        heading = name.replace("handed over", "falls back")
        columns.append(Column(heading, _medians(row["us"][name] for row in others)))
    return f"{own_table}\n\n{grid(columns)}"


def _medians(times: Iterable[list[float]]) -> list[str]:
    return [f"{statistics.median(rounds_us):.1f}" for rounds_us in times]


def _device_table(rows: list[dict[str, Any]]) -> str:
    columns = [
        Column("call", [row["kind"] for row in rows], "left"),
        Column("bytes", [str(row["nbytes"]) for row in rows]),
    ]
    for name in rows[0]["us"]:
        medians = _medians(row["us"][name] for row in rows)
        stars = ["*" if name in row["handled"] else "" for row in rows]
        texts = [f"{median}{star}" for median, star in zip(medians, stars, strict=True)]
        columns.append(Column(name, texts))
    return grid(columns)


def run_beside(clock: Clock, file: Path | None) -> None:
    """Measure all-gathers beside matmuls, and write the rows. Collective."""
    began = datetime.now(timezone.utc).isoformat(timespec="seconds")
    measured = [measure_beside(clock, count, nbytes) for count, nbytes in WORK]
    facts = provenance()
    if dist.get_rank() != 0 or file is None:
        return
    world = dist.get_world_size()
    command = f"bash launch.sh --nproc {world} benchmarks/backend_calls.py --beside"
    head = {"benchmark": "beside", "command": command, "started": began, "provenance": facts}
    save(file, head, [row for result in measured for row in beside_rows(result, world)])


def run_calls(
    clock: Clock, sizes: list[int], blocks: list[int], numbers: list[int], file: Path | None
) -> None:
    """Measure calls, and write what was measured. Collective."""
    host = []
    if not numbers:
        host = [own_row(clock), *host_rows(clock, HOST_KINDS)]
    device: list[dict[str, Any]] = []
    explanations: dict[str, Any] = {}
    if sizes:
        groups = groups_by_number(numbers) if numbers else groups_by_blocks(blocks, max(sizes))
        device = device_rows(clock, KINDS, sizes, groups)
        explanations = {name: explain(group) for name, group in groups.items()}
    facts = provenance()
    if dist.get_rank() != 0:
        return
    if device:
        print(*shares(device), sep="\n")
    if file is not None:
        found = {**facts, "host": host, "device": device, "explain": explanations}
        file.write_text(json.dumps(found, indent=1))


@click.command(help=__doc__, context_settings={"show_default": True, "max_content_width": 120})
@click.option(
    "--sizes",
    type=parsing.CommaList(parsing.ByteCount(), least=0),
    default="4K,64K,256K,1M,4M,16M",
    help="sizes of the device times; '' for none",
)
@click.option(
    "--blocks",
    type=parsing.CommaList(click.IntRange(min=1)),
    default="32,64",
    help="numbers of thread blocks",
)
@click.option(
    "--groups",
    type=parsing.CommaList(click.IntRange(min=1), least=0),
    default="",
    help="numbers of groups of a process instead, such as 1,3,10",
)
@click.option("--heap", default="4G", help="symmetric heap of each rank")
@click.option("--json", "file", type=parsing.NewFile(), help="write what was measured there")
@click.option("--beside", is_flag=True, help="measure only all-gathers beside matmuls")
@click.option(
    "--table",
    "old_file",
    type=click.Path(exists=True, path_type=Path),
    help="measure nothing, but print the times of such a file as Markdown",
)
def main(
    sizes: list[int],
    blocks: list[int],
    groups: list[int],
    heap: str,
    file: Path | None,
    beside: bool,
    old_file: Path | None,
) -> None:
    if old_file is not None:
        print(table(json.loads(old_file.read_text())))
        return
    if not torch.cuda.is_available():
        sys.exit("backend_calls.py measures GPUs, and there is none")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("tdcoll", pg_options=Options(heap_bytes=heap))
    clock = Clock(dist.new_group(backend="nccl"))
    if beside:
        run_beside(clock, file)
    else:
        run_calls(clock, sizes, blocks, groups, file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
