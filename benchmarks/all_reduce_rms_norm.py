# SPDX-License-Identifier: Apache-2.0
"""The benchmark of all-reduce + residual + RMSNorm: ``bash launch.sh -m tdcoll bench
all_reduce_rms_norm --help``.

Baselines are an all-reduce (NCCL's or tdcoll's), then torch's addition and norm, eager or fused by
Inductor.

The new residual is exact, because inputs are whole numbers. Normalized rows are compared up to
rounding.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import click
import torch
import torch.distributed as dist

import tdcoll
from benchmarks import parsing
from benchmarks.dense_baselines import require_nccl
from benchmarks.layout import Layout, launch_name
from tdcoll.calls.context import CollectiveContext
from tdcoll.calls.plan import Facts
from tdcoll.fused.op import all_reduce_rms_norm
from tdcoll.fused.policy import ALGORITHMS, NormRows, choose
from tdcoll.language import INTERPRETED
from tdcoll.tools.measure.benchmark import Benchmark
from tdcoll.tools.measure.buffers import Buffers, buffer_workload
from tdcoll.tools.measure.collectives import DENSE_CALLS
from tdcoll.tools.measure.engine import Errors, Variant, Workload, launch_calls
from tdcoll.tools.measure.results import fact

_EPS = 1e-6
_TOLERANCES = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-9, torch.float32: 1e-5}
"""The relative difference from fp32's result that is allowed."""

_MAX_HIDDEN = 16384

BASELINES = ("nccl", "nccl-compiled", "tdcoll-torch", "tdcoll-compiled")
"""The all-reduce, and what adds and normalizes."""

Normalized = tuple[torch.Tensor, ...]
"""``(normalized, new residual)``, ``[rows, hidden]`` each."""


def _norm(total: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Normalized:
    new = total + residual
    return torch.nn.functional.rms_norm(new, (new.shape[-1],), weight, _EPS), new


@dataclasses.dataclass(frozen=True)
class NormCalls:
    """The calls of one number of rows, with what they share.

    Attributes:
        buffers: the inputs, and totals of all-reduces.
        residual: ``[rows, hidden]``.
        weight: ``[hidden]``.
        context: the context of tdcoll's calls.
    """

    buffers: Buffers
    residual: torch.Tensor
    weight: torch.Tensor
    context: CollectiveContext

    def _rows(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [tensor.view_as(self.residual) for tensor in tensors]

    def fused(self, algorithm: str) -> Workload:
        """Return the fused calls by an algorithm."""
        inputs = self._rows(self.buffers.inputs)
        residual, weight, ctx = self.residual, self.weight, self.context

        def call(i: int) -> Any:
            return all_reduce_rms_norm(
                inputs[i], residual, weight, ctx=ctx, eps=_EPS, algorithm=algorithm
            )

        return self._workload(call)

    def baseline(self, name: str) -> Workload:
        """Return the calls of a baseline; raise the reason if it can't run."""
        residual, weight, ctx = self.residual, self.weight, self.context
        norm: Callable[..., Any] = _norm
        if name.endswith("compiled"):
            if INTERPRETED:
                raise RuntimeError("needs GPUs")
            norm = torch.compile(_norm, dynamic=False)
        if name.startswith("tdcoll"):
            inputs = self._rows(self.buffers.inputs)
            return self._workload(
                lambda i: norm(tdcoll.all_reduce(inputs[i], ctx=ctx), residual, weight)
            )
        require_nccl(residual.device)
        totals = self._rows(self.buffers.results)

        def call(i: int) -> Any:
            dist.all_reduce(totals[i])
            return norm(totals[i], residual, weight)

        return self._workload(call, in_place=True)

    def _workload(self, call: Callable[[int], Any], *, in_place: bool = False) -> Workload:
        workload = buffer_workload(self.buffers, call, in_place=in_place)
        return dataclasses.replace(workload, errors=self._errors)

    def _errors(self, number: int, result: Normalized) -> Errors:
        normalized, new = result
        residual = self.residual.float()
        expected_new = self.buffers.expected(number).view_as(new).float() + residual
        expected = torch.nn.functional.rms_norm(
            expected_new, expected_new.shape[1:], self.weight.float(), _EPS
        )
        wrong_new = int((new.float() != expected_new).sum())
        tolerance = _TOLERANCES[normalized.dtype] * expected.abs() + 1e-6
        wrong_normalized = int(((normalized.float() - expected).abs() > tolerance).sum())
        text = f"{wrong_new} of new, {wrong_normalized} of normalized"
        return wrong_new + wrong_normalized, f"rank {self.buffers.rank}, call {number}: {text}"


class NormBenchmark(Benchmark):
    """The benchmark. A size is a number of rows."""

    name = "all_reduce_rms_norm"
    columns = Layout(
        title="All-reduce + residual + RMSNorm",
        size={"rows": fact("{rows:,}")},
        shown=(
            "auto",
            "nccl",
            "nccl-compiled",
            "torch-one-shot-compiled",
            "tdcoll-torch",
            "trtllm-one-shot",
            "trtllm-two-shot",
        ),
        about=fact("rows of {hidden:,} {dtype}"),
        x=lambda row: row.facts["rows"],
        panel=lambda row: ("", f"rows of {row.facts['hidden']:,}, {launch_name(row)}"),
    )

    @classmethod
    def parse(cls, arguments: Sequence[str]) -> SimpleNamespace:
        parameters = [
            parsing.numbers_option(
                "--rows", "1,3" if INTERPRETED else "1,8,64,512", "numbers of rows"
            ),
            parsing.option(
                "--hidden",
                type=click.IntRange(min=16, max=_MAX_HIDDEN),
                default=64 if INTERPRETED else 8192,
                metavar="N",
                help="elements of a row",
            ),
            parsing.dtype_option(["bfloat16", "float16", "float32"], "bfloat16"),
            parsing.names_option("--algorithms", ALGORITHMS, "auto", "fused calls"),
            parsing.names_option(
                "--peers", BASELINES, "" if INTERPRETED else "nccl,tdcoll-torch", "baselines"
            ),
            *parsing.launch_options("graph"),
            *parsing.common_options(100),
        ]

        def finish(options: SimpleNamespace) -> None:
            options.launches = parsing.launches(options, "graph")
            if options.hidden * options.dtype.itemsize % 16:
                multiple = 16 // options.dtype.itemsize
                raise click.UsageError(
                    f"--hidden: expected a multiple of {multiple}, got {options.hidden}"
                )

        return parsing.parse_benchmark(
            cls.name,
            "Latency of all-reduce + residual + RMSNorm, checked.",
            parameters,
            arguments,
            finish,
        )

    @classmethod
    def heap_bytes(cls, options: SimpleNamespace, world: int) -> int:
        largest = max(options.rows) * options.hidden * options.dtype.itemsize
        slots = 2 * world * (cls._capacity(largest, world) + 16)
        lamport = 3 * world * (2 * largest + (1 << 20))
        return slots + lamport + (16 << 20)

    @staticmethod
    def _capacity(nbytes: int, world: int) -> int:
        """Return the ``max_bytes_per_rank`` of a context for rows of ``nbytes`` bytes together."""
        return 3 * (nbytes // world + 16)

    def sizes(self) -> Iterator[int]:
        yield from self.options.rows

    def facts(self, rows: int) -> dict[str, Any]:
        dtype = str(self.options.dtype).removeprefix("torch.")
        return {"rows": rows, "hidden": self.options.hidden, "dtype": dtype}

    @contextlib.contextmanager
    def variants(self, rows: int) -> Iterator[tuple[Sequence[Variant], Callable[[], object]]]:
        options = self.options
        row_bytes = options.hidden * options.dtype.itemsize
        nbytes = rows * row_bytes
        # Rows that aren't there, and measures.
        lamport_bytes = (rows + 2) * row_bytes + 512 * rows
        capacity = self._capacity(nbytes, self.ranks.topology.world_size)
        with CollectiveContext(max_bytes_per_rank=capacity, lamport_bytes=lamport_bytes) as context:
            calls = self._calls(rows, context)
            norm_rows = NormRows(rows, options.hidden, options.dtype.itemsize)
            took = choose(norm_rows, Facts.of(context, 0, options.dtype)).algorithm
            variants = []
            for name in options.algorithms:
                facts = {"took": took} if name == "auto" else {}
                make = partial(calls.fused, name)
                variants.append(Variant(name, False, make, options.launches, facts))
            for name in options.peers:
                make = partial(calls.baseline, name)
                variants.append(Variant(name, True, make, options.launches))
            yield variants, context.check

    def _calls(self, rows: int, context: CollectiveContext) -> NormCalls:
        """Return the calls of so many rows, with data that is the same in every job."""
        options = self.options
        topology = self.ranks.topology
        device = self.ranks.device
        nbytes = rows * options.hidden * options.dtype.itemsize
        buffers = Buffers(
            DENSE_CALLS["all_reduce"],
            nbytes,
            topology.nodes,
            topology.rank,
            options.dtype,
            device,
            sets=launch_calls(nbytes * topology.world_size)[1],
            op="sum",
        )
        generator = torch.Generator().manual_seed(5)
        # Never above 0, because the sums are, and they may be the largest exact numbers.
        residual = -torch.randint(5, (rows, options.hidden), generator=generator)
        weight = torch.rand(options.hidden, generator=generator)
        return NormCalls(
            buffers,
            residual.to(device, options.dtype),
            weight.to(device, options.dtype),
            context,
        )
