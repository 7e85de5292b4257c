# SPDX-License-Identifier: Apache-2.0
"""Where the time and the memory of a start go, from `import tdcoll` to a first all-gather's result.

\b
    bash launch.sh --nproc 1 benchmarks/start_up.py
    bash launch.sh --nproc 2 benchmarks/start_up.py [--json FILE] [--stacks] [--cprofile FILE]

Run it twice: the first run fills Triton's cache. The clock starts in a process that has imported
PyTorch and has its CUDA context (on the simulator: imported PyTorch). A stage that is indented is a
part of the one above it, or, with a thread's name, runs beside it. Programs that are started have a
line of their own. Times are of the slowest rank, and memory is what the GPU has more in use than
before the process had a context: let nothing else run there. Python should keep bytecode, as it
does unless PYTHONDONTWRITEBYTECODE is set. The last lines are NCCL's first all-gather, to compare
with.
"""

from __future__ import annotations

import cProfile
import functools
import itertools
import json
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist

NBYTES = 1 << 16
DEVICE = int(os.environ.get("LOCAL_RANK", "0"))

began = 0.0
rows: list[dict[str, Any]] = []
"""Timed parts: ``name``, ``at_s``, ``took_s``, ``depth``, ``thread``, ``mib``."""

depth = threading.local()


def used_mib() -> float | None:
    """Return the memory in use on this rank's GPU; None if only a context could read it."""
    try:
        return torch.cuda.device_memory_used(DEVICE) / 2**20
    except Exception:  # no GPU, or no pynvml
        return None


def thread_name() -> str:
    """Return the name of this thread, if it isn't the main one."""
    thread = threading.current_thread()
    return "" if thread is threading.main_thread() else thread.name


@contextmanager
def stage(name: str, memory: bool = False) -> Iterator[None]:
    """Time the block. Rows are in the order of their beginnings."""
    level = getattr(depth, "level", 0)
    row: dict[str, Any] = {
        "name": name,
        "at_s": time.perf_counter() - began,
        "depth": level,
        "thread": thread_name(),
    }
    rows.append(row)
    depth.level = level + 1
    try:
        yield
    finally:
        depth.level = level
        row["took_s"] = time.perf_counter() - began - row["at_s"]
        row["mib"] = used_mib() if memory else None


def timed(owner: Any, attribute: str, name: str) -> None:
    """Make a stage of each call of a function, if this version has the function."""
    function = getattr(owner, attribute, None)
    if function is None:
        return

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        with stage(name):
            return function(*arguments, **options)

    setattr(owner, attribute, call)


def watch_programs(stacks: bool) -> None:
    """Add a row for each program that is started."""

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in ("subprocess.Popen", "os.posix_spawn", "os.exec", "os.system") or not began:
            return
        command = arguments[1] if event == "subprocess.Popen" else arguments[0]
        words = [command] if isinstance(command, (str, bytes)) else list(command)
        text = " ".join(os.path.basename(os.fsdecode(word)) for word in words[:3])
        row: dict[str, Any] = {
            "name": f"$ {text}",
            "at_s": time.perf_counter() - began,
            "depth": getattr(depth, "level", 0),
            "thread": thread_name(),
            "took_s": None,
            "mib": None,
        }
        if stacks:
            callers = traceback.extract_stack()[-12:-2]
            row["stack"] = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in callers]
        rows.append(row)

    sys.addaudithook(hook)
    timed(subprocess, "run", "subprocess.run")  # and how long it took; check_output calls it


def meet() -> None:
    """Wait for the other ranks, so that no start includes the wait for a later process."""
    env = os.environ
    if "RANK" not in env:
        return
    store = dist.TCPStore(env["MASTER_ADDR"], int(env["MASTER_PORT"]), is_master=False)
    arrived = store.add("start_up: arrived", 1)
    if arrived == int(env["WORLD_SIZE"]):
        store.set("start_up: begin", "")
    store.wait(["start_up: begin"])


def since_start(name: str, took_s: float | None, mib: float | None = None) -> dict[str, Any]:
    """Return a row that begins when the clock starts."""
    return {"name": name, "at_s": 0.0, "took_s": took_s, "depth": 0, "thread": "", "mib": mib}


def start(on_gpu: bool) -> Callable[[], None]:
    """Start, in stages; return a function that finishes the job."""
    with stage("import tdcoll"):
        import tdcoll

        initialize = tdcoll.initialize
    if on_gpu:
        with stage("import tdcoll.job.nvshmem"):
            from tdcoll.job import nvshmem

        timed(nvshmem, "_bindings", "import NVSHMEM's bindings")
        timed(nvshmem.NvshmemHeap, "_join", "start NVSHMEM")
        warm_up = sys.modules.get("tdcoll.language.warm_up")
        timed(warm_up, "compile_nothing", "warm up Triton")
    timed(dist, "init_process_group", "init_process_group")
    with stage("tdcoll.initialize()", memory=True):
        initialize()
    with stage("CollectiveContext", memory=True):
        ctx = tdcoll.CollectiveContext(max_bytes_per_rank=NBYTES)
    data = torch.full((NBYTES // 4,), dist.get_rank(), dtype=torch.int32, device=tdcoll.device())
    for name in ("first all_gather", "second all_gather"):
        with stage(name, memory=True):
            result = tdcoll.all_gather(data, ctx=ctx)
            ctx.check()
        if name.startswith("first"):
            rows.append(since_start("IN ALL", time.perf_counter() - began))
    ranks = torch.arange(dist.get_world_size(), device=data.device, dtype=torch.int32)
    expected = ranks.repeat_interleave(len(data))
    assert torch.equal(result, expected), "the all-gather brought something else"
    if on_gpu and "nccl" in dist.get_backend_config():
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        for name in ("NCCL: first all_gather", "NCCL: second all_gather"):
            with stage(name, memory=True):
                gather(result, data)
                torch.cuda.synchronize()

    def finish() -> None:
        ctx.close()
        tdcoll.finalize()

    return finish


def table(ranks: list[list[dict[str, Any]]], before: float | None) -> str:
    """Return rank 0's rows, with the longest time of any rank for a row of the same name.

    Args:
        ranks: the rows of each rank.
        before: memory in use before the process had a context, in MiB.
    """
    longest: dict[str, float] = {}
    for row in itertools.chain.from_iterable(ranks):
        if row["took_s"] is not None:
            longest[row["name"]] = max(longest.get(row["name"], 0.0), row["took_s"])
    lines = [f"{'stage':56} {'begins, s':>10} {'takes, s':>10} {'GPU, MiB':>10}"]
    for row in ranks[0]:
        name = "  " * row["depth"] + row["name"]
        if row["thread"]:
            name += f" [{row['thread']}]"
        took = f"{longest[row['name']]:.3f}" if row["took_s"] is not None else ""
        memory = ""
        if row["mib"] is not None and before is not None:
            memory = f"{row['mib'] - before:.0f}"
        lines.append(f"{name[:56]:56} {row['at_s']:>10.3f} {took:>10} {memory:>10}".rstrip())
        lines += [f"{'':8}{line}" for line in row.get("stack", [])]
    return "\n".join(lines)


def show(owner: Any, ranks: list[list[dict[str, Any]]], before: float | None) -> None:
    """Print the versions and the table."""
    nccl = os.environ.get("NVSHMEM_DISABLE_NCCL", "not set")
    heap = f"heap {owner.heap.nbytes >> 20} MiB, NVSHMEM_DISABLE_NCCL={nccl}"
    triton = sys.modules["triton"].__version__
    python = sys.version.split()[0]
    versions = f"torch {torch.__version__}, triton {triton}, Python {python}"
    print(f"{owner.world_size} rank(s), {heap}, {versions}")
    kept = "not kept" if sys.dont_write_bytecode else "kept"
    print(f"bytecode is {kept}; tdcoll of {sys.modules['tdcoll'].__file__}")
    print(table(ranks, before), flush=True)


@click.command(help=__doc__, context_settings={"max_content_width": 100})
@click.option(
    "--json", "file", type=click.Path(path_type=Path), help="write the rows there as well"
)
@click.option("--stacks", is_flag=True, help="print who starts each program")
@click.option(
    "--cprofile",
    type=click.Path(path_type=Path),
    help="write rank 0's profile, for pstats; slows everything down",
)
def main(file: Path | None, stacks: bool, cprofile: Path | None) -> None:
    global began
    on_gpu = torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET", "0") in ("", "0")
    before = None
    if on_gpu:
        before = used_mib()
        torch.cuda.set_device(DEVICE)
        torch.zeros(1, device="cuda")
        torch.cuda.synchronize()
    watch_programs(stacks)
    profile = None
    if cprofile is not None and os.environ.get("RANK", "0") == "0":
        profile = cProfile.Profile()
    meet()
    began = time.perf_counter()
    if on_gpu:
        rows.append(since_start("(a CUDA context)", None, used_mib()))
    if profile is not None:
        profile.enable()
    finish = start(on_gpu)
    if profile is not None:
        profile.disable()
        profile.dump_stats(str(cprofile))
    from tdcoll import runtime

    owner = runtime.current()
    ranks = owner.control.all_gather(range(owner.world_size), "rows", rows)
    if owner.rank == 0:
        show(owner, ranks, before)
        if file is not None:
            nccl = os.environ.get("NVSHMEM_DISABLE_NCCL", "not set")
            found = {"ranks": ranks, "before_mib": before, "NVSHMEM_DISABLE_NCCL": nccl}
            file.write_text(json.dumps(found, indent=1), encoding="utf-8")
    finish()


if __name__ == "__main__":
    main()
