# SPDX-License-Identifier: Apache-2.0
"""The kernels of matmuls that communicate, without a job, on one GPU: are they right, and what do
they cost?

    python benchmarks/matmul_kernels.py [--json FILE] [--only SECTION,...] [--limit SECONDS]

One rank of two runs on the whole GPU; its peer's memory is local and the peer's signals are set, so
the time of the link and the wait for the peer are missing. All matmuls are of bf16 and in CUDA
graphs; times are medians, us.

Sections::

    predict   bytes, floating-point operations and waves, and the times that follow from them
    pair      two ranks in this process, 66 thread blocks each on two streams, 200 calls with other
              data and skew
    gather    all-gather + matmul: without sending, and by the number of thread blocks that send
    scatter   matmul + reduce-scatter: by slices, stages and lag
    reduce    matmul + all-reduce of few rows, which sends to itself
    checks    dtypes, layouts, scales, ragged sizes, bias and epilogue against PyTorch
    alone     a persistent matmul, with descriptors made by the host and by the kernel
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from benchmarks import matmul_checks
from benchmarks.kernels_matmul import alone
from benchmarks.matmul_ranks import Heap, Launch, Report, compile_all, connected, verdict
from benchmarks.matmul_timing import (
    BF16,
    CUTS,
    GATHERS,
    SCATTERS,
    SIGNALLED,
    SMS,
    Matmul,
    Times,
    best,
    data,
    label,
    timed,
)
from tdcoll.fused.matmul import launches
from tdcoll.fused.matmul.kernels_all_reduce import matmul_all_reduce
from tdcoll.fused.matmul.kernels_gather import all_gather_matmul
from tdcoll.fused.matmul.kernels_scatter import matmul_reduce_scatter
from tdcoll.fused.matmul.launches import Cut

# ---------------------------------------------------------------------- predictions


def predict(report: Report) -> None:
    """Times from first principles, for 2 ranks: 790 TFLOP/s dense, 4.0 TB/s of HBM, 350 GB/s of a
    link's direction."""
    for name, shapes in (("gather", GATHERS), ("scatter", SCATTERS)):
        for rows, depth, columns in shapes:
            flops = 2 * rows * depth * columns
            sent = rows // 2 * (depth if name == "gather" else columns) * 2
            memory = 2 * (rows * depth + depth * columns + rows * columns) + 3 * sent
            waves = {}
            for cut, blocks in CUTS[:1] + CUTS[2:3]:
                tiles = 2 * cut.tiles(rows // 2, columns)
                waves[label(cut, blocks)] = round(tiles / blocks, 2)
            report.add(
                "predict",
                kernel=name,
                shape=(rows, depth, columns),
                compute_us=round(flops / 790e6, 1),
                memory_us=round(memory / 4.0e6, 1),
                link_us=round(sent / 0.35e6, 1),
                waves=waves,
            )


# ---------------------------------------------------------------------- a matmul alone


def time_alone(report: Report) -> None:
    """cuBLAS, and a persistent matmul with descriptors from the host and from the kernel."""
    shapes = GATHERS + SCATTERS
    small = Matmul(shapes[0], shapes[0][0], shapes[0][0])
    run_alone(small, CUTS[0][0], 1, True, warmup=True)
    with ThreadPoolExecutor(14) as pool:
        for cut, _ in CUTS:
            for host in (True, False):
                pool.submit(run_alone, small, cut, 1, host, warmup=True)
    for shape in shapes:
        made = Matmul(shape, shape[0], shape[0])
        wanted, cublas = made.cublas(made.x)
        measured: dict[str, Times] = {"host": [], "kernel": []}
        for cut, most in CUTS:
            blocks = min(most, cut.tiles(shape[0], shape[2]))
            for who, times in measured.items():
                made.out.zero_()
                call = partial(run_alone, made, cut, blocks, who == "host")
                times.append(timed(call, label(cut, blocks), partial(verdict, made.out, wanted)))
        report.add(
            "alone",
            shape=shape,
            cublas=cublas,
            **{who: best(times) for who, times in measured.items()},
        )


def run_alone(made: Matmul, cut: Cut, blocks: int, host: bool, warmup: bool = False) -> None:
    """Launch :func:`alone`, or compile it."""
    arguments = made.operands.arguments(cut, made.shape[0])
    if host:
        left: Any = TensorDescriptor.from_tensor(made.x, [cut.rows, cut.depth])
        right: Any = TensorDescriptor.from_tensor(made.weight, [cut.columns, cut.depth])
    else:
        left = made.x.data_ptr()
        right = made.weight.data_ptr()
    more = {name: arguments[name] for name in ("shape", "weight", "tile")}
    alone.run(
        left, right, made.out, **more, HOST=host, **cut.options, grid=(blocks,), warmup=warmup
    )


# ---------------------------------------------------------------------- one rank of two

PUSHERS = [
    (0, False),
    *((count, False) for count in (4, 8, 16, 32, 64, 128)),
    (8, True),
    (16, True),
    (32, True),
]
"""Thread blocks that send, and whether they have multiprocessors of their own, so that so many
fewer multiply."""


def time_gather(report: Report) -> None:
    """All-gather + matmul of rank 0 of two."""
    capacity = max(rows // 2 * depth * 2 for rows, depth, _ in GATHERS)
    heaps = [Heap(rank, 2, capacity) for rank in range(2)]
    heaps[0].signals.fill_(SIGNALLED)
    group, inbox = connected(heaps)[0]
    plans: list[tuple[Matmul, dict[tuple[int, bool], list[tuple[str, Launch]]]]] = []
    for shape in GATHERS:
        rows, depth, columns = shape
        made = Matmul(shape, rows // 2, rows)
        variants: dict[tuple[int, bool], list[tuple[str, Launch]]] = {form: [] for form in PUSHERS}
        for cut, most in CUTS:
            for (pushers, beside), launched in variants.items():
                workers = min(most - pushers * beside, 2 * cut.tiles(rows // 2, columns))
                share = rows // 2 * depth * 2 // max(1, pushers)
                piece = max(16384, min(1 << 19, share // 1024 * 1024))
                plan = launches.gather(
                    made.operands, cut, group, inbox, workers=workers, pushers=pushers, piece=piece
                )
                launched.append(
                    (label(cut, workers), Launch(all_gather_matmul, cut, plan, made.operands))
                )
        plans.append((made, variants))
    compile_all(
        [
            launch
            for _, variants in plans
            for launched in variants.values()
            for _, launch in launched
        ]
    )
    for made, variants in plans:
        measure_gather(report, heaps, made, variants)


def measure_gather(
    report: Report,
    heaps: list[Heap],
    made: Matmul,
    variants: dict[tuple[int, bool], list[tuple[str, Launch]]],
) -> None:
    """Time a shape by the number of pushers."""
    gathered = torch.cat([made.x, data(*made.x.shape)])
    for slot in range(2):
        heaps[0].inbox[slot].view(-1)[: gathered.nbytes].copy_(gathered.view(torch.uint8).view(-1))
    wanted, cublas = made.cublas(gathered)
    own = made.x.view(torch.uint8).view(-1)

    def check(pushers: int) -> str:
        sent = [heaps[1].inbox[slot].view(-1)[: own.numel()] for slot in range(2)]
        right = not pushers or all(torch.equal(one, own) for one in sent)
        return verdict(made.out, wanted) if right else "WRONG push"

    row = {}
    for (pushers, beside), launched in variants.items():
        times = []
        for what, launch in launched:
            made.out.zero_()
            heaps[1].inbox.zero_()
            times.append(timed(launch, what, partial(check, pushers)))
        row[f"push by {pushers}{' beside' if beside else ''}"] = best(times, 1 if pushers else 3)
    report.add("gather", shape=made.shape, cublas=cublas, **row)


FORMS: list[tuple[int, ...]] = [(1, 1, 1), (2, 1, 1), (2, 1, 0), (2, 1, 2), (2, 1, 99)]
"""Slices, stages and lag."""


def time_scatter(report: Report) -> None:
    """Matmul + reduce-scatter of rank 0 of two."""
    capacity = max(rows // 2 * columns * 2 for rows, _, columns in SCATTERS) + (1 << 20)
    heaps = [Heap(rank, 2, capacity) for rank in range(2)]
    heaps[0].signals.fill_(SIGNALLED)
    group, inbox = connected(heaps)[0]
    plans: list[tuple[Matmul, list[tuple[tuple[int, ...], str, Launch]]]] = []
    for shape in SCATTERS:
        rows, _, columns = shape
        made = Matmul(shape, rows, rows // 2)
        variants = []
        for cut, most in CUTS:
            workers = min(most, 2 * cut.tiles(rows // 2, columns))
            for form in FORMS:
                slices, stages, lag = form
                plan = launches.scatter(
                    made.operands,
                    cut,
                    group,
                    inbox,
                    workers=workers,
                    lag=lag,
                    slices=slices,
                    stages=stages,
                )
                variants.append(
                    (
                        form,
                        label(cut, workers),
                        Launch(matmul_reduce_scatter, cut, plan, made.operands),
                    )
                )
        plans.append((made, variants))
    compile_all([launch for _, variants in plans for *_, launch in variants])
    for made, variants in plans:
        measure_scatter(report, heaps, made, variants)


def measure_scatter(
    report: Report,
    heaps: list[Heap],
    made: Matmul,
    variants: list[tuple[tuple[int, ...], str, Launch]],
) -> None:
    """Time a shape by form."""
    rows = made.out.shape[0]
    theirs = data(*made.out.shape)
    parts, cublas = made.cublas(made.x)
    wanted = (parts[:rows].float() + theirs.float()).to(BF16)

    def check(sent: torch.Tensor) -> str:
        said = [verdict(made.out, wanted)]
        for slot in range(2):
            landed = heaps[1].inbox[slot].view(-1)[: sent.nbytes].view(BF16)
            said.append(verdict(landed, sent.view(-1)))
        return max(said, key=("equal", "near", "WRONG").index)

    by_form: dict[tuple[int, ...], Times] = {form: [] for form in FORMS}
    for form, what, launch in variants:
        came = in_tiles(theirs, launch.cut)
        for slot in range(2):
            heaps[0].inbox[slot].view(-1)[came.nbytes : 2 * came.nbytes].copy_(
                came.view(torch.uint8).view(-1)
            )
        made.out.zero_()
        heaps[1].inbox.zero_()
        by_form[form].append(
            timed(launch, what, partial(check, in_tiles(parts[rows:], launch.cut)))
        )
    row = {f"slices, stages, lag {form}": best(times) for form, times in by_form.items()}
    report.add("scatter", shape=made.shape, cublas=cublas, **row)


def in_tiles(matrix: torch.Tensor, cut: Cut) -> torch.Tensor:
    """Return a matrix as the kernel sends it: tile by tile, in the order in which they are
    numbered."""
    rows, columns = matrix.shape
    down, across = triton.cdiv(rows, cut.rows), triton.cdiv(columns, cut.columns)
    padded = torch.zeros(
        down * cut.rows, across * cut.columns, dtype=matrix.dtype, device=matrix.device
    )
    padded[:rows, :columns] = matrix
    blocks = padded.view(down, cut.rows, across, cut.columns).transpose(1, 2)
    order = []
    for first in range(0, down, cut.group):
        height = min(down - first, cut.group)
        order += [
            (first + down_in, column) for column in range(across) for down_in in range(height)
        ]
    places = torch.tensor(order, device=matrix.device)
    return blocks[places[:, 0], places[:, 1]].contiguous()


REDUCE_CUTS = [
    (Cut(16, 64, 256, 4, 4), SMS),
    (Cut(16, 64, 128, 6, 4), SMS),
    (Cut(16, 32, 256, 5, 4), 2 * SMS),
    (Cut(64, 64, 128, 4, 4), SMS),
    (Cut(64, 64, 128, 6, 4), SMS),
    (Cut(64, 32, 128, 6, 4), SMS),
    (Cut(64, 128, 128, 4, 4), SMS),
    (Cut(128, 64, 128, 4, 4), SMS),
    (Cut(128, 128, 64, 4, 4), SMS),
    (Cut(128, 128, 128, 3, 8), SMS),
]


def time_reduce(report: Report) -> None:
    """Matmul + all-reduce of few rows. Words come back to this rank as if another had sent them."""
    heap = Heap(0, 2, 16, 16 << 20)
    group = heap.group(torch.tensor([0, heap.stride], device="cuda"))
    plans: list[tuple[Matmul, list[tuple[str, Launch]]]] = []
    for rows in (8, 32, 64, 128, 256, 512):
        for depth, columns in ((3584, 8192), (4096, 4096)):
            made = Matmul((rows, depth, columns), rows, rows)
            variants = []
            for cut, most in REDUCE_CUTS:
                if cut.rows <= 2 * max(rows, 32):
                    workers = min(most, cut.tiles(rows, columns))
                    plan = launches.reduce(
                        made.operands, cut, group, heap.device_lamport(), workers=workers
                    )
                    variants.append(
                        (label(cut, workers), Launch(matmul_all_reduce, cut, plan, made.operands))
                    )
            plans.append((made, variants))
    compile_all([launch for _, variants in plans for _, launch in variants])
    for made, variants in plans:
        part, cublas = made.cublas(made.x)
        wanted = (2 * part.float()).to(BF16)
        times = []
        for what, launch in variants:
            made.out.zero_()
            times.append(timed(launch, what, partial(verdict, made.out, wanted)))
        report.add(
            "reduce",
            shape=made.shape,
            cublas=cublas,
            one_shot=best(times, 3),
            expired=heap.expired(),
        )


SECTIONS: dict[str, Callable[[Report], None]] = {
    "predict": predict,
    "pair": matmul_checks.run_pairs,
    "gather": time_gather,
    "scatter": time_scatter,
    "reduce": time_reduce,
    "checks": matmul_checks.check,
    "alone": time_alone,
}


def main() -> None:
    """Run the sections that were asked for."""
    parser = argparse.ArgumentParser(
        description="Check and time the kernels of matmuls that communicate."
    )
    out = os.environ.get("OUT")
    parser.add_argument(
        "--json", type=Path, default=Path(out) / "matmul_kernels.json" if out else None
    )
    parser.add_argument("--only", default=",".join(SECTIONS), help=f"of {','.join(SECTIONS)}")
    parser.add_argument(
        "--limit", type=float, default=290, help="seconds, after which the process ends"
    )
    options = parser.parse_args()
    timer = threading.Timer(options.limit, lambda: os._exit(9))
    timer.daemon = True
    timer.start()
    triton.set_allocator(
        lambda size, align, stream: torch.empty(size, dtype=torch.int8, device="cuda")
    )
    report = Report(options.json)
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    report.add("machine", gpu=name, torch=torch.__version__, triton=triton.__version__)
    for section in options.only.split(","):
        begin = time.time()
        SECTIONS[section](report)
        report.add("time", of=section, seconds=round(time.time() - begin, 1))
    sys.stdout.flush()
    os._exit(0)  # a kernel that hangs would hold up the usual end


if __name__ == "__main__":
    main()
