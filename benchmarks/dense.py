# SPDX-License-Identifier: Apache-2.0
"""The benchmark of every dense collective: ``bash launch.sh -m tdcoll bench all_gather --help``.

A collective's :class:`~tdcoll.tools.measure.collectives.DenseCall` has the differences between
them.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import click
import torch
import torch.distributed as dist

import tdcoll
from benchmarks import parsing
from benchmarks.dense_baselines import BASELINES, Baseline
from benchmarks.layout import Layout
from tdcoll.base.arguments import format_bytes
from tdcoll.calls.plan import Facts, Plan
from tdcoll.calls.spec import WORLD
from tdcoll.calls.tuning import Entry, Section
from tdcoll.job.cuda import multiprocessors
from tdcoll.primitives.reduce import ACCUMULATORS, TORCH_OPERATIONS
from tdcoll.tools.measure.benchmark import Benchmark
from tdcoll.tools.measure.buffers import Buffers, buffer_workload
from tdcoll.tools.measure.collectives import DENSE_CALLS, DenseCall
from tdcoll.tools.measure.dense import (
    IN_PLACE,
    DenseCalls,
    dense_calls,
    dense_facts,
    dense_heap_bytes,
)
from tdcoll.tools.measure.engine import Variant, Workload, do_nothing
from tdcoll.tools.measure.floor import Floor
from tdcoll.tools.measure.results import Row, number
from tdcoll.tools.tune.command import Tune

SYMMETRIC = "symmetric"
"""The name of all-reduces with ``symmetric=True``, of inputs and results in symmetric memory."""

_OPERATIONS = {name: op for op, name in TORCH_OPERATIONS.items() if name != "prod"}
"""Products of different numbers over many ranks are not exact."""

_DRAWN_ALL_REDUCES = ("torch-one-shot", "torch-two-shot", "trtllm-one-shot", "vllm")
"""Baselines of all-reduces that are drawn, though not all are measured any more."""

_MOVED_DTYPES = [
    "uint8",
    "int8",
    "int16",
    "int32",
    "int64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
]
_REDUCED_DTYPES = [
    str(dtype).removeprefix("torch.") for dtype in ACCUMULATORS if dtype.itemsize > 1
]
"""The other dtypes of one byte are left out, because PyTorch cannot add them."""

_BLOCKS = "numbers of thread blocks: also measure algorithms for which any number works with these"


class CallForm(NamedTuple):
    """What a name of ``--algorithms`` stands for."""

    algorithm: str
    in_place: bool = False
    symmetric: bool = False


def call_form(name: str) -> CallForm:
    """Return the form of a name such as ``"1d"``, ``"in-place"``, ``"in-place-ll"``."""
    if name == SYMMETRIC:
        return CallForm("auto", symmetric=True)
    if name.startswith(IN_PLACE):
        algorithm = name.removeprefix(IN_PLACE).removeprefix("-")
        return CallForm(algorithm or "auto", in_place=True)
    return CallForm(name)


class DenseBenchmark(Benchmark):
    """The benchmark of a dense collective; a size is bytes of a segment.

    Attributes:
        call: the collective.
        op: how it reduces; None if it doesn't.
    """

    call: ClassVar[DenseCall]

    def __init__(self, options: SimpleNamespace) -> None:
        super().__init__(options)
        self.op: str | None = options.op if self.call.spec.reduces else None

    @classmethod
    def baselines(cls) -> dict[str, Baseline]:
        """Return the baselines for this collective."""
        return {
            name: baseline
            for name, baseline in BASELINES.items()
            if baseline.collective in (None, cls.name)
        }

    @classmethod
    def algorithm_names(cls) -> list[str]:
        """Return the names that ``--algorithms`` takes."""
        names = ["auto", *cls.call.spec.names]
        if cls.call.in_place_name:
            names += [IN_PLACE, *(f"{IN_PLACE}-{name}" for name in cls.call.spec.names)]
        if cls.call.is_single_tensor:
            names.append(SYMMETRIC)
        return names

    @classmethod
    def parse(cls, arguments: Sequence[str]) -> SimpleNamespace:
        spec = cls.call.spec
        segments = ["one for each rank" if count == WORLD else "one" for count in spec.segments]
        default = f"auto,{IN_PLACE}" if cls.call.in_place_name else "auto"
        dtypes = _REDUCED_DTYPES if spec.reduces else _MOVED_DTYPES
        reduction = parsing.option(
            "--op", type=click.Choice(list(_OPERATIONS)), default="sum", help="how to reduce"
        )
        parameters = [
            *parsing.size_options("1K", "1M"),
            parsing.dtype_option(dtypes, "float32"),
            *([reduction] if spec.reduces else []),
            parsing.names_option("--algorithms", cls.algorithm_names(), default, "tdcoll's calls"),
            parsing.names_option("--peers", list(cls.baselines()), "nccl", "baselines"),
            parsing.numbers_option("--blocks", "", _BLOCKS),
            *parsing.launch_options("graph"),
            *parsing.common_options(100),
        ]

        def finish(options: SimpleNamespace) -> None:
            options.sizes = parsing.sizes(options, options.dtype.itemsize)
            options.launches = parsing.launches(options, "graph")
            if spec.reduces and options.op == "mean" and not options.dtype.is_floating_point:
                raise click.UsageError(
                    f"--op: a mean is of floating-point numbers; got --dtype {options.dtype}"
                )

        return parsing.parse_benchmark(
            cls.name,
            f"Latency and bus bandwidth of {spec.name.replace('_', '-')}s, checked. Sizes: bytes "
            f"of a segment. Segments of a rank's input: {segments[0]}; of its result: "
            f"{segments[1]}.",
            parameters,
            arguments,
            finish,
        )

    @classmethod
    def heap_bytes(cls, options: SimpleNamespace, world: int) -> int:
        forms = [call_form(name) for name in options.algorithms]
        in_place_heap = cls.call.spec.in_place and any(form.in_place for form in forms)
        symmetric = any(form.symmetric for form in forms)
        in_heap = in_place_heap or symmetric or "fcollect" in options.peers
        return dense_heap_bytes(cls.call, options.sizes, world, buffers_in_heap=in_heap)

    def sizes(self) -> Iterator[int]:
        yield from self.options.sizes

    def facts(self, nbytes: int) -> dict[str, Any]:
        return dense_facts(self.call, nbytes, self.options.dtype, self.op)

    @contextlib.contextmanager
    def variants(self, nbytes: int) -> Iterator[tuple[Sequence[Variant], Callable[[], object]]]:
        options = self.options
        with dense_calls(self.ranks, self.call, nbytes, options.dtype, self.op) as calls:
            variants = []
            for name in options.algorithms:
                form = call_form(name)
                make = partial(
                    calls.workload, form.algorithm, in_place=form.in_place, symmetric=form.symmetric
                )
                facts = self._plan_facts(form, nbytes, calls)
                variants.append(Variant(name, False, make, options.launches, facts))
            for name, blocks in itertools.product(options.algorithms, options.blocks):
                spec = self.call.spec
                if name in spec.names and spec.algorithm(name).works_with_any_grid:
                    make = partial(self._blocks_workload, name, blocks, nbytes, calls)
                    facts = self._sms(blocks)
                    variants.append(
                        Variant(f"{name} {blocks} blocks", False, make, options.launches, facts)
                    )
            for name in options.peers:
                make = partial(self._baseline_workload, name, calls)
                variants.append(Variant(name, True, make, options.launches))
            yield variants, calls.context.check

    def _plan_facts(self, form: CallForm, nbytes: int, calls: DenseCalls) -> dict[str, Any]:
        """Return the multiprocessors of the plan, and the algorithm that "auto" takes, as facts."""
        dtype = self.options.dtype
        input_bytes, result_bytes = self.call.sizes(nbytes, calls.context.world_size)
        tensor_bytes = result_bytes if form.in_place else input_bytes
        explanation = tdcoll.explain(
            self.call.name,
            tensor_bytes // dtype.itemsize,
            dtype=dtype,
            ctx=calls.context,
            in_place=form.in_place,
            symmetric=form.symmetric,
            algorithm=form.algorithm,
        )
        if not explanation.algorithm:
            return {}
        facts: dict[str, Any] = self._sms(explanation.blocks)
        if form.algorithm == "auto":
            facts = {"took": explanation.algorithm, **facts}
        return facts

    def _sms(self, blocks: int) -> dict[str, Any]:
        """Return the multiprocessors that ``blocks`` thread blocks occupy, as a fact.

        The GPU spreads them over as many as it has.
        """
        device = self.ranks.device
        available = multiprocessors(device) if device.type == "cuda" else blocks
        return {"sms": min(blocks, available)}

    def _blocks_workload(self, name: str, blocks: int, nbytes: int, calls: DenseCalls) -> Workload:
        """Return tdcoll's calls by an algorithm with so many thread blocks."""
        dtype = self.options.dtype if self.call.spec.reduces else None
        facts = Facts.of(calls.context, nbytes, dtype)
        section = Section(
            architecture="",
            operation=self.call.name,
            ranks_per_node=facts.topology.ranks_per_node or 0,
            nodes=facts.topology.n_nodes,
            in_place=False,
            entries=(Entry(None, name, blocks=blocks),),
        )
        plan: Plan = self.call.spec.choose(facts, name, [section])
        return calls.workload(plan)

    def _torch_workload(
        self, buffers: Buffers, close: Callable[[], object] = do_nothing, group: Any = None
    ) -> Workload:
        """Return torch.distributed's calls."""
        options: dict[str, Any] = {"op": _OPERATIONS[self.op]} if self.op else {}
        if self.call.spec.rooted:
            options["src"] = 0
        function = partial(getattr(dist, self.call.spec.torch), group=group, **options)
        inputs, results = buffers.inputs, buffers.results

        def call(i: int) -> torch.Tensor:
            function(results[i], inputs[i])
            return results[i]

        def call_in_place(i: int) -> torch.Tensor:
            function(results[i])
            return results[i]

        if self.call.is_single_tensor:
            return buffer_workload(buffers, call_in_place, close, in_place=True)
        return buffer_workload(buffers, call, close)

    def _baseline_workload(self, name: str, calls: DenseCalls) -> Workload:
        """Return a baseline's calls; raise the reason if it can't make or check them."""
        baseline = self.baselines()[name]
        world = self.ranks.topology.world_size
        if self.op == "mean" and world & (world - 1):
            raise ValueError(
                f"rounds a mean over {world} ranks more than once: it cannot be checked to the bit"
            )
        if self.op not in (None, "sum") and baseline.collective is not None:
            raise ValueError(f"has sums only, and --op is {self.op}")
        return baseline.make(calls.buffers, self.ranks.device, self._torch_workload)


def _size_text(row: Row) -> str:
    return format_bytes(row.facts["bytes_per_rank"])


def _data_text(row: Row) -> str:
    """Return how the data were reduced."""
    op = row.facts.get("op")
    return f"{op} of {row.facts['dtype']}" if op else ""


def _floor_text(row: Row, floor: Floor | None) -> str:
    if floor is None:
        return ""
    return (
        f"The floor is a launch ({floor.launch_us:g} µs) and a hop ({floor.hop_us:.3g} µs), or "
        f"what a rank sends at {floor.rate(row.ranks):g} GB/s, whichever takes longer."
    )


def _layout(call: DenseCall) -> Layout:
    """Return the layout of the rows of a collective."""

    def sent_bytes(row: Row) -> float:
        return call.sent_bytes(row.facts["bytes_per_rank"], row.ranks)

    def bandwidth(row: Row) -> str:
        return number(row.median_us and sent_bytes(row) / row.median_us / 1e3, 1)

    def floor_us(row: Row, floor: Floor | None) -> float | None:
        return None if floor is None else floor.us(sent_bytes(row), row.ranks)

    return Layout(
        title=call.name.replace("_", "-").capitalize(),
        size={"bytes per rank": _size_text},
        derived={"bus GB/s": bandwidth, "SMs": lambda row: str(row.facts.get("sms", "-"))},
        shown=("auto", IN_PLACE, "nccl", "nccl-symmetric"),
        drawn=("auto", "nccl", "nccl-symmetric", *_DRAWN_ALL_REDUCES),
        about=_data_text,
        floor=floor_us,
        floor_text=_floor_text,
        x=lambda row: row.facts["bytes_per_rank"],
        x_text=format_bytes,
    )


TUNE_LAYOUT = Layout(title="Candidates of a tuning table", size=Tune.columns.size)
"""The layout of the rows of `tdcoll tune --json`."""


@functools.cache
def dense_benchmark(name: str) -> type[DenseBenchmark]:
    """Return the benchmark of the collective ``name``."""
    call = DENSE_CALLS[name]
    members = {
        "__doc__": DenseBenchmark.__doc__,
        "name": name,
        "call": call,
        "columns": _layout(call),
    }
    return type(name, (DenseBenchmark,), members)
