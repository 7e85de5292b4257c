# SPDX-License-Identifier: Apache-2.0
"""Checks of ``matmul_kernels.py``: results of one rank against PyTorch, and two ranks that run
beside each other.

Numbers are whole and small, so sums are exact in fp32 in any order, and results are compared bit by
bit.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from benchmarks.kernels_matmul import Residual, add_residual
from benchmarks.matmul_ranks import Heap, Launch, Report, compile_all, connected
from tdcoll.fused.matmul import launches
from tdcoll.fused.matmul.kernels_all_reduce import matmul_all_reduce
from tdcoll.fused.matmul.kernels_gather import all_gather_matmul
from tdcoll.fused.matmul.kernels_scatter import matmul_reduce_scatter
from tdcoll.fused.matmul.launches import Cut, Operands

SIGNALLED = 1 << 40
FP8 = torch.float8_e4m3fn
HALF_OF_THE_GPU = 66
"""Thread blocks of one of two ranks that share the GPU."""


def whole(*shape: int, dtype: torch.dtype = torch.bfloat16, most: int = 4) -> torch.Tensor:
    """Return whole numbers up to ``most``."""
    return torch.randint(-most, most + 1, shape, device="cuda").to(dtype)


def powers(count: int) -> torch.Tensor:
    """Return scales that are powers of two."""
    return 2.0 ** torch.randint(-2, 3, (count,), device="cuda").float()


class Case(NamedTuple):
    """A matmul to check.

    Attributes:
        rows: of one rank.
        scales: none, ``"tensor"`` or ``"row"``.
    """

    name: str
    cut: Cut
    rows: int
    depth: int
    columns: int
    dtype: torch.dtype = torch.bfloat16
    out: torch.dtype = torch.bfloat16
    depth_first: bool = False
    biased: bool = False
    residual: bool = False
    scales: str = ""
    precision: str = "ieee"


WIDE = Cut(128, 256, 64, 3, 8)
SQUARE = Cut(128, 128, 64, 4, 4)
CASES = [
    Case("bf16", WIDE, 256, 512, 1024),
    Case("bf16 [K, N]", SQUARE, 256, 512, 1024, depth_first=True),
    Case("ragged", SQUARE, 100, 136, 200),
    Case("ragged, odd columns", SQUARE, 77, 72, 131),
    Case("few rows", Cut(64, 128, 128, 4, 4), 5, 512, 1024),
    Case("bias, residual", WIDE, 200, 512, 1032, biased=True, residual=True),
    Case("fp16", SQUARE, 256, 512, 1024, torch.float16, torch.float16),
    Case("fp32", Cut(32, 64, 32, 3, 8), 96, 100, 200, torch.float32, torch.float32),
    Case(
        "tf32",
        Cut(128, 128, 32, 4, 8),
        128,
        256,
        512,
        torch.float32,
        torch.float32,
        precision="tf32",
    ),
    Case(
        "tf32 [K, N]",
        Cut(128, 128, 32, 4, 8),
        128,
        256,
        512,
        torch.float32,
        torch.float32,
        True,
        precision="tf32",
    ),
    Case("fp8, scale", Cut(128, 128, 128, 4, 8), 128, 512, 512, FP8, scales="tensor"),
    Case("fp8, scales of rows", Cut(128, 256, 128, 3, 8), 200, 528, 512, FP8, scales="row"),
    Case("e5m2", Cut(128, 128, 128, 4, 8), 128, 512, 512, torch.float8_e5m2, scales="row"),
]


class Matrices:
    """The tensors of a case on two ranks, of which this process is rank 0."""

    def __init__(self, case: Case, rows: int) -> None:
        """``rows``: of ``x`` on each rank."""
        self.case = case
        self.x = [whole(rows, case.depth).to(case.dtype) for _ in range(2)]
        weight = [whole(case.columns, case.depth).to(case.dtype) for _ in range(2)]
        self.weight = [one.t().contiguous() if case.depth_first else one for one in weight]
        self.bias = whole(case.columns, dtype=case.out) if case.biased else None
        self.x_scale: list[torch.Tensor | None] = [None, None]
        self.weight_scale: list[torch.Tensor | None] = [None, None]
        if case.scales:
            counts = (rows, case.columns) if case.scales == "row" else (1, 1)
            self.x_scale = [powers(counts[0]) for _ in range(2)]
            self.weight_scale = [powers(counts[1]) for _ in range(2)]

    def product(self, x_of: int, weight_of: int) -> torch.Tensor:
        """Return the product of a rank's ``x`` with a rank's weight, in fp32."""
        weight = self.weight[weight_of].float()
        made = self.x[x_of].float() @ (weight if self.case.depth_first else weight.t())
        x_scale, weight_scale = self.x_scale[x_of], self.weight_scale[weight_of]
        if x_scale is not None and weight_scale is not None:
            made = made * x_scale[:, None] * weight_scale[None, :]
        return made

    def finished(self, sums: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """Return the result that belongs to sums over ranks."""
        if self.bias is not None:
            sums = sums + self.bias.float()
        if residual is not None:
            sums = 2.0 * sums + residual.float()
        return sums.to(self.case.out)

    def operands(self, out: torch.Tensor, residual: torch.Tensor | None) -> Operands:
        """Return what rank 0's kernel multiplies."""
        more: dict[str, Any] = {}
        if residual is not None:
            more = {"epilogue": add_residual, "extra": Residual(residual, residual.shape[1])}
        return Operands(
            self.x[0],
            self.weight[0],
            out,
            self.case.depth_first,
            self.bias,
            self.x_scale[0],
            self.weight_scale[0],
            precision=self.case.precision,
            **more,
        )


def _residual(case: Case, rows: int) -> torch.Tensor | None:
    return whole(rows, case.columns, dtype=case.out) if case.residual else None


def check_gather(case: Case, whole_tiles: bool) -> tuple[Launch, Callable[[], bool]]:
    """Rank 0 of two, with rank 1's rows and scales in the inbox; and what it sends."""
    made = Matrices(case, case.rows)
    heaps = [Heap(rank, 2, 1 << 20) for rank in range(2)]
    heaps[0].signals.fill_(SIGNALLED)
    group, inbox = connected(heaps)[0]
    out = torch.zeros(2 * case.rows, case.columns, device="cuda", dtype=case.out)
    residual = _residual(case, 2 * case.rows)
    kept = torch.zeros(2 * case.rows, case.depth, device="cuda").to(case.dtype)
    rows = torch.cat([one.view(torch.uint8).view(-1) for one in made.x])
    scales = torch.zeros(0, dtype=torch.uint8, device="cuda")
    if made.x_scale[0] is not None:
        spread = [one.expand(case.rows) for one in made.x_scale if one is not None]
        scales = torch.cat(spread).contiguous().view(torch.uint8)
    heaps[0].inbox[1].view(-1)[: rows.numel() + scales.numel()] = torch.cat([rows, scales])
    operands = made.operands(out, residual)
    plan = launches.gather(
        operands, case.cut, group, inbox,
        workers=40, pushers=5, piece=16 * 200, gathered=kept, keepers=3, whole=whole_tiles,
    )  # fmt: skip
    wanted = made.finished(torch.cat([made.product(rank, 0) for rank in range(2)]), residual)

    def right() -> bool:
        own = made.x[0].view(torch.uint8).view(-1)
        sent = heaps[1].inbox[1].view(-1)
        said = torch.equal(out, wanted) and torch.equal(kept.view(torch.uint8).view(-1), rows)
        said = said and torch.equal(sent[: own.numel()], own)
        if made.x_scale[0] is not None:
            behind = sent[rows.numel() :][: 4 * case.rows]
            said = said and torch.equal(behind, scales[: 4 * case.rows])
        return said and not heaps[0].expired()

    return Launch(all_gather_matmul, case.cut, plan, operands), right


def check_alone(case: Case, kernel: Any) -> tuple[Launch, Callable[[], bool]]:
    """The scatter or the all-reduce of a single rank."""
    made = Matrices(case, case.rows)
    heap = Heap(0, 1, 1 << 20, 1 << 20)
    group, inbox = connected([heap])[0]
    out = torch.zeros(case.rows, case.columns, device="cuda", dtype=case.out)
    residual = _residual(case, case.rows)
    operands = made.operands(out, residual)
    if kernel is matmul_reduce_scatter:
        plan = launches.scatter(operands, case.cut, group, inbox, workers=3)
    else:
        plan = launches.reduce(operands, case.cut, group, heap.device_lamport(), workers=3)
    wanted = made.finished(made.product(0, 0).to(case.out).float(), residual)
    return Launch(
        kernel, case.cut, plan, operands
    ), lambda: torch.equal(out, wanted) and not heap.expired()


def check(report: Report) -> None:
    """Every case with each kernel."""
    plans: list[tuple[str, Launch, Callable[[], bool]]] = []
    for case in CASES:
        plans.append((f"gather, {case.name}", *check_gather(case, False)))
        plans.append((f"gather of whole tiles, {case.name}", *check_gather(case, True)))
        plans.append((f"scatter, {case.name}", *check_alone(case, matmul_reduce_scatter)))
        plans.append((f"reduce, {case.name}", *check_alone(case, matmul_all_reduce)))
    compile_all([launch for _, launch, _ in plans])
    wrong = []
    for name, launch, right in plans:
        try:
            launch()
            torch.cuda.synchronize()
            if not right():
                wrong.append(name)
        except Exception as error:
            wrong.append(f"{name}: {type(error).__name__} {str(error)[-100:]}")
    report.add("checks", cases=len(plans), wrong=wrong)


# ---------------------------------------------------------------------- two ranks beside each other


class Pair:
    """Two ranks that make the same kind of call on two streams, with other data each time.

    Attributes:
        names: what is run.
        launches: of the two ranks.
        fill: brings new data.
        wanted: the results of both ranks.
    """

    def __init__(
        self, name: str, rows: int, depth: int, columns: int, cut: Cut, two_shot: bool = False
    ) -> None:
        self.name = name
        self.heaps = [Heap(rank, 2, rows * max(depth, columns) * 4, 4 << 20) for rank in range(2)]
        self.x = [whole(rows, depth, most=8) for _ in range(2)]
        self.weight = [whole(columns, depth) for _ in range(2)]
        tall = {"gather": 2 * rows, "scatter": rows // 2, "reduce": rows}[name.split()[0]]
        self.out = [
            torch.zeros(tall, columns, device="cuda", dtype=torch.bfloat16) for _ in range(2)
        ]
        self.launches = []
        for rank, (group, inbox) in enumerate(connected(self.heaps)):
            operands = Operands(self.x[rank], self.weight[rank], self.out[rank])
            if name == "gather":
                plan = launches.gather(
                    operands, cut, group, inbox, workers=HALF_OF_THE_GPU - 8, pushers=8, piece=32768
                )
                kernel = all_gather_matmul
            elif name.startswith("scatter"):
                lag = int(name.split()[1])
                plan = launches.scatter(
                    operands, cut, group, inbox, workers=HALF_OF_THE_GPU, lag=lag
                )
                kernel = matmul_reduce_scatter
            else:
                words = self.heaps[rank].device_lamport()
                plan = launches.reduce(
                    operands, cut, group, words, workers=HALF_OF_THE_GPU, two_shot=two_shot
                )
                kernel = matmul_all_reduce
            self.launches.append(Launch(kernel, cut, plan, operands))

    def fill(self) -> None:
        """Bring new data, and spoil the results."""
        for rank in range(2):
            self.x[rank].copy_(whole(*self.x[rank].shape, most=8))
            self.out[rank].fill_(float("nan"))

    def wanted(self) -> list[torch.Tensor]:
        """Return both ranks' results."""
        if self.name == "gather":
            every = torch.cat(self.x).float()
            return [(every @ weight.float().t()).to(torch.bfloat16) for weight in self.weight]
        parts = [
            (x.float() @ weight.float().t()).to(torch.bfloat16).float()
            for x, weight in zip(self.x, self.weight, strict=True)
        ]
        sums = (parts[0] + parts[1]).to(torch.bfloat16)
        if self.name.startswith("reduce"):
            return [sums, sums]
        return list(sums.chunk(2))

    def run(self, streams: list[Any], late: int, cycles: int) -> None:
        """Make a call on both ranks, of which one begins later."""
        for rank in range(2):
            with torch.cuda.stream(streams[rank]):
                if rank == late:
                    torch.cuda._sleep(cycles)
                self.launches[rank]()


PAIRS = [
    ("gather", 512, 1024, 2048, SQUARE),
    ("gather", 1100, 520, 1032, Cut(64, 128, 128, 4, 4)),
    ("scatter 1", 1024, 1024, 2048, SQUARE),
    ("scatter 0", 2000, 520, 1032, WIDE),
    ("scatter 9", 2304, 512, 4096, SQUARE),
    ("reduce", 64, 1024, 2048, Cut(64, 64, 128, 4, 4)),
    ("reduce", 200, 520, 1032, Cut(64, 64, 128, 4, 4)),
    ("reduce in two shots", 64, 1024, 2048, Cut(64, 64, 128, 4, 4)),
]
CALLS = 200
REPLAYS = 30


def run_pairs(report: Report) -> None:
    """Each pair, call by call with skew, and then in replays of a graph of three calls."""
    pairs = [Pair(*about, two_shot="two" in about[0]) for about in PAIRS]
    compile_all([launch for pair in pairs for launch in pair.launches])
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda._sleep(1)  # loads it
    for pair in pairs:
        for (
            launch
        ) in pair.launches:  # loads the kernel, which would have to wait for one that waits for it
            blocks, arguments = launch.made
            launch.kernel.warmup(**arguments, **launch.cut.options, grid=(blocks,))[blocks, 1, 1]
        wrong = 0
        for _ in range(CALLS):
            pair.fill()
            torch.cuda.synchronize()
            pair.run(streams, random.randrange(3), random.randrange(400_000))
            torch.cuda.synchronize()
            wrong += sum(
                not torch.equal(*both) for both in zip(pair.out, pair.wanted(), strict=True)
            )
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            here = torch.cuda.current_stream()
            streams[1].wait_stream(here)
            for _ in range(3):
                pair.run([here, streams[1]], 2, 0)
            here.wait_stream(streams[1])
        wrong_in_graphs = 0
        for _ in range(REPLAYS):
            pair.fill()
            graph.replay()
            torch.cuda.synchronize()
            wrong_in_graphs += sum(
                not torch.equal(*both) for both in zip(pair.out, pair.wanted(), strict=True)
            )
        expired = any(heap.expired() for heap in pair.heaps)
        made = f"{pair.name} {tuple(pair.x[0].shape)}"
        report.add(
            "pair",
            of=made,
            calls=CALLS,
            wrong=wrong,
            wrong_in_graphs=wrong_in_graphs,
            expired=expired,
        )
