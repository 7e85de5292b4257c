# SPDX-License-Identifier: Apache-2.0
"""The benchmark of matmuls that communicate: ``bash launch.sh -m tdcoll bench matmul --help``.

Baselines are the matmul alone (cuBLAS), the collective alone (NCCL), both in a row, PyTorch's fused
operators, and flashinfer's all-gather + matmul where it is installed. A row of tdcoll's has the
share of the communication that is hidden: of the time that the collective alone takes, the part by
which the call is shorter than both in a row.

Operands are whole numbers, so that products are exact. tdcoll's results are compared exactly with
the sum in rank order, and those of baselines up to rounding.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import click
import torch
import torch.distributed as dist

import tdcoll
from benchmarks import parsing
from benchmarks.dense_baselines import require_nccl
from benchmarks.layout import Bars, Layout
from tdcoll import fused
from tdcoll.calls.context import CollectiveContext
from tdcoll.fused.matmul.policy import ALGORITHMS, CHUNKS, GATHER, NAMES, REDUCE, SCATTER
from tdcoll.language import INTERPRETED
from tdcoll.tools.measure.benchmark import Benchmark
from tdcoll.tools.measure.engine import Errors, Variant, Workload, launch_calls
from tdcoll.tools.measure.results import Row, fact
from tdcoll.tools.measure.timing import LineUp

ALONE, COLLECTIVE, IN_A_ROW, TORCH = "cublas-alone", "nccl-alone", "nccl", "torch-fused"
FLASHINFER = "flashinfer"
BASELINES = (ALONE, COLLECTIVE, IN_A_ROW, TORCH, FLASHINFER)

_ALGORITHMS = ("auto", "fused", "copied", "one_shot", "two_shot", "composed")

_SHAPES = {
    GATHER: "128x8192x3584,512x8192x3584,2048x4096x1792,4096x8192x3584,8192x8192x1280",
    SCATTER: "128x3584x8192,512x3584x8192,2048x1792x4096,4096x3584x8192,8192x1280x8192",
    REDUCE: "8x3584x8192,64x3584x8192,128x3584x8192,256x3584x8192,512x3584x8192",
}
"""Rows of all ranks, depth and columns of one rank's matmul, of the layers of large models."""

_LARGEST = 3
"""Operands are whole numbers up to this, so that products of 8192 are exact in fp32."""


class MatmulSize(NamedTuple):
    """A call: operation, rows of the long matrix, and depth and columns of one rank's matmul."""

    operation: str
    rows: int
    depth: int
    columns: int


class _Shape(click.ParamType):
    """``"512x8192x3584"``: rows, depth and columns."""

    name = "shape"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        parts = value.split("x")
        if len(parts) != 3 or not all(part.isdecimal() and int(part) for part in parts):
            self.fail(f"expected rows x depth x columns such as 512x8192x3584, got {value}")
        return tuple(int(part) for part in parts)


@dataclass(frozen=True)
class MatmulCalls:
    """The calls of one size, with what they share.

    Attributes:
        inputs: for each number of a call, ``x`` of this rank.
        weight: this rank's.
        expected: for each number of a call, the exact result.
    """

    size: MatmulSize
    inputs: Sequence[torch.Tensor]
    weight: torch.Tensor
    expected: Sequence[torch.Tensor]
    context: CollectiveContext
    world: int

    def ours(self, algorithm: str) -> Workload:
        """Return tdcoll's calls by an algorithm."""
        function = getattr(fused, self.size.operation)

        def call(i: int) -> Any:
            return function(self.inputs[i], self.weight, ctx=self.context, algorithm=algorithm)

        return self._workload(call, tolerance=0.0)

    def baseline(self, name: str) -> Workload:
        """Return the calls of a baseline; raise the reason if it can't run."""
        if name == ALONE:
            return self._alone()
        if name == FLASHINFER:
            return self._flashinfer()
        require_nccl(self.weight.device)
        if name == TORCH:
            return self._torch()
        operation = self.size.operation
        x = self.inputs[0]
        turned = self.weight.t()
        gathered = x.new_empty(self.size.rows, self.size.depth)
        product = x.new_empty(self.size.rows, self.size.columns)
        scattered = x.new_empty(self.size.rows // self.world, self.size.columns)
        with_matmul = name == IN_A_ROW

        def gather(i: int) -> torch.Tensor:
            dist.all_gather_into_tensor(gathered, self.inputs[i])
            return torch.mm(gathered, turned) if with_matmul else gathered

        def scatter(i: int) -> torch.Tensor:
            made = torch.mm(self.inputs[i], turned) if with_matmul else product
            dist.reduce_scatter_tensor(scattered, made)
            return scattered.clone() if with_matmul else scattered

        def reduce(i: int) -> torch.Tensor:
            made = torch.mm(self.inputs[i], turned) if with_matmul else product
            dist.all_reduce(made)
            return made

        calls = {GATHER: gather, SCATTER: scatter, REDUCE: reduce}
        tolerance = 2.0**-6 if with_matmul else None
        return self._workload(calls[operation], tolerance=tolerance)

    def _alone(self) -> Workload:
        """Return the matmul of all rows, without communication."""
        turned = self.weight.t()
        inputs = self.inputs
        if self.size.operation == GATHER:
            inputs = [x.repeat(self.world, 1) for x in inputs]
        return self._workload(lambda i: torch.mm(inputs[i], turned), tolerance=None)

    def _torch(self) -> Workload:
        """Return the calls of PyTorch's fused operators."""
        from torch.distributed._symmetric_memory import enable_symm_mem_for_group

        if self.size.operation == REDUCE:
            raise RuntimeError("PyTorch has no matmul + all-reduce")
        group = dist.group.WORLD
        assert group is not None
        enable_symm_mem_for_group(group.group_name)
        turned = self.weight.t()
        symmetric = torch.ops.symm_mem

        def gather(i: int) -> Any:
            _, (made,) = symmetric.fused_all_gather_matmul(
                self.inputs[i], [turned], 0, group.group_name
            )
            return made

        def scatter(i: int) -> Any:
            return symmetric.fused_matmul_reduce_scatter(
                self.inputs[i], turned, "sum", 0, group.group_name
            )

        call = gather if self.size.operation == GATHER else scatter
        return self._workload(call, tolerance=2.0**-6)

    def _flashinfer(self) -> Workload:
        """Return the calls of flashinfer's all-gather + matmul, which takes ``[depth, columns]``."""
        if self.size.operation != GATHER:
            raise RuntimeError("of these calls flashinfer has only the all-gather + matmul")
        if importlib.util.find_spec("flashinfer") is None:
            raise RuntimeError("flashinfer isn't installed")
        require_nccl(self.weight.device)
        communication: Any = importlib.import_module("flashinfer.comm")
        symmetric: Any = importlib.import_module("torch.distributed._symmetric_memory")
        weight = self.weight.t().contiguous()
        inputs = []
        for x in self.inputs:
            copy = symmetric.empty(*x.shape, dtype=x.dtype, device=x.device)
            inputs.append(copy.copy_(x))
        group = dist.group.WORLD

        def gather(i: int) -> Any:
            return communication.all_gather_matmul(inputs[i], weight, group)

        return self._workload(gather, tolerance=2.0**-6)

    def _workload(self, call: Callable[[int], Any], *, tolerance: float | None) -> Workload:
        """Return a workload.

        Args:
            tolerance: Relative; None if the result isn't that of the whole call.
        """

        def errors(number: int, result: torch.Tensor) -> Errors:
            if tolerance is None:
                return 0, ""
            expected = self.expected[number].float()
            allowed = tolerance * expected.abs() + (tolerance and 1.0)
            wrong = int(((result.float() - expected).abs() > allowed).sum())
            return wrong, f"call {number}: {wrong} of {expected.numel()} elements"

        count = len(self.inputs)
        return Workload(call=call, errors=errors, n_inputs=count, launch_calls=(count - 1, count))


class MatmulBenchmark(Benchmark):
    """The benchmark."""

    name = "matmul"
    columns = Layout(
        title="Matmul with communication",
        size={
            "call": fact("{operation}"),
            "rows": fact("{rows:,}"),
            "depth": fact("{depth:,}"),
            "columns": fact("{columns:,}"),
        },
        shown=("auto", ALONE, COLLECTIVE, IN_A_ROW, TORCH),
        about=fact("{operation} of {dtype}"),
        bars=Bars(
            unit=ALONE,
            unit_name="cuBLAS alone",
            names={
                "auto": "tdcoll",
                TORCH: "PyTorch's fused operators",
                IN_A_ROW: "cuBLAS and NCCL in a row",
            },
            panel=fact("{operation}"),
            size=fact("{rows:,} rows\n{depth:,} deep\n{columns:,} columns"),
        ),
    )

    @classmethod
    def parse(cls, arguments: Sequence[str]) -> SimpleNamespace:
        simulated = "8x32x48,36x48x32"
        parameters = [
            parsing.names_option("--operations", NAMES, ",".join(NAMES), "operations"),
            parsing.option(
                "--shapes",
                type=parsing.CommaList(_Shape(), least=0),
                default=simulated if INTERPRETED else "",
                metavar="MxKxN,...",
                help="rows of all ranks, depth and columns of one rank; '': those of large models",
            ),
            parsing.dtype_option(["bfloat16", "float16", "float32"], "bfloat16"),
            parsing.names_option("--algorithms", _ALGORITHMS, "auto", "tdcoll's calls"),
            parsing.names_option(
                "--peers", BASELINES, ALONE if INTERPRETED else ",".join(BASELINES), "baselines"
            ),
            *parsing.launch_options("graph"),
            *parsing.common_options(60),
        ]

        def finish(options: SimpleNamespace) -> None:
            options.launches = parsing.launches(options, "graph")
            options.sizes = []
            for operation in options.operations:
                shapes = options.shapes or [
                    _Shape().convert(text, None, None) for text in _SHAPES[operation].split(",")
                ]
                options.sizes += [MatmulSize(operation, *shape) for shape in shapes]

        return parsing.parse_benchmark(
            cls.name, "Latency of matmuls that communicate, checked.", parameters, arguments, finish
        )

    @classmethod
    def heap_bytes(cls, options: SimpleNamespace, world: int) -> int:
        most = max(cls._capacity(size, options.dtype.itemsize, world) for size in options.sizes)
        lamport = 3 * world * cls._lamport_bytes(options.dtype.itemsize)
        return 2 * world * most + lamport + (64 << 20)

    @staticmethod
    def _capacity(size: MatmulSize, itemsize: int, world: int) -> int:
        """Return the ``max_bytes_per_rank`` of a size: a shard, or parts in whole tiles."""
        rows = -(-size.rows // world)
        if size.operation == GATHER:
            return rows * (size.depth * itemsize + 4)
        return -(-rows // 256) * 256 * -(-size.columns // 256) * 256 * itemsize

    @staticmethod
    def _lamport_bytes(itemsize: int) -> int:
        return 256 * 8192 * itemsize

    def sizes(self) -> Iterator[MatmulSize]:
        yield from self.options.sizes

    def facts(self, size: MatmulSize) -> dict[str, Any]:
        dtype = str(self.options.dtype).removeprefix("torch.")
        return {**size._asdict(), "dtype": dtype}

    @contextlib.contextmanager
    def variants(
        self, size: MatmulSize
    ) -> Iterator[tuple[Sequence[Variant], Callable[[], object]]]:
        options = self.options
        itemsize = options.dtype.itemsize
        world = self.ranks.topology.world_size
        with CollectiveContext(
            max_bytes_per_rank=self._capacity(size, itemsize, world),
            lamport_bytes=self._lamport_bytes(itemsize) if size.operation == REDUCE else 0,
            chunks=CHUNKS,
        ) as context:
            calls = self._calls(size, context)
            said = tdcoll.explain(size.operation, calls.inputs[0], weight=calls.weight, ctx=context)
            variants = []
            for name in options.algorithms:
                if name in ("auto", *ALGORITHMS[size.operation]):
                    facts = {"took": said.algorithm} if name == "auto" else {}
                    make = partial(calls.ours, name)
                    variants.append(Variant(name, False, make, options.launches, facts))
            for name in options.peers:
                make = partial(calls.baseline, name)
                # flashinfer allocates symmetric memory in each call, which no graph can hold.
                launches = ["eager"] if name == FLASHINFER else options.launches
                variants.append(Variant(name, True, make, launches))
            yield variants, context.check

    def measure_size(self, size: MatmulSize, line_up: LineUp | None) -> list[Row]:
        """Return the rows of one size; those of tdcoll have the share of hidden communication."""
        rows = super().measure_size(size, line_up)
        times = {(row.algorithm, row.launch): row.median_us for row in rows}
        for row in rows:
            alone = times.get((ALONE, row.launch))
            collective = times.get((COLLECTIVE, row.launch))
            if row.peer or not row.median_us or not alone or not collective:
                continue
            row.facts["hidden"] = round((alone + collective - row.median_us) / collective, 2)
            row.note = row.note or f"hides {row.facts['hidden']:.0%} of the communication"
        return rows

    def _calls(self, size: MatmulSize, context: CollectiveContext) -> MatmulCalls:
        """Return the calls of a size, with data that is the same in every job."""
        dtype = self.options.dtype
        device = self.ranks.device
        topology = self.ranks.topology
        world = topology.world_size
        rows = size.rows
        if size.operation == GATHER:
            rows //= world
        _, sets = launch_calls(size.rows * size.columns * dtype.itemsize)

        def whole(key: int, *shape: int) -> torch.Tensor:
            made = torch.Generator().manual_seed(key)
            return torch.randint(-_LARGEST, _LARGEST + 1, shape, generator=made).to(device, dtype)

        weights = [whole(10_000 + rank, size.columns, size.depth) for rank in range(world)]
        inputs = []
        expected = []
        for number in range(sets):
            every = [whole(100 * number + rank, rows, size.depth) for rank in range(world)]
            inputs.append(every[topology.rank])
            expected.append(_expected(size, every, weights, topology.rank))
        return MatmulCalls(size, inputs, weights[topology.rank], expected, context, world)


def _expected(
    size: MatmulSize, every: Sequence[torch.Tensor], weights: Sequence[torch.Tensor], rank: int
) -> torch.Tensor:
    """Return the exact result of a call: parts are rounded, and summed in rank order in fp32."""
    dtype = weights[0].dtype
    if size.operation == GATHER:
        return (torch.cat(list(every)).float() @ weights[rank].float().t()).to(dtype)
    total = torch.zeros(every[0].shape[0], size.columns, device=every[0].device)
    for x, weight in zip(every, weights, strict=True):
        total += (x.float() @ weight.float().t()).to(dtype).float()
    if size.operation == SCATTER:
        total = total.chunk(len(weights))[rank]
    return total.to(dtype)
