# SPDX-License-Identifier: Apache-2.0
"""The sparse all-reduce benchmark: ``bash launch.sh -m tdcoll bench sparse_all_reduce --help``.

tdcoll and the baselines start from the same sparse tensors and end with the sum over the ranks, of
which every number is checked after every timed call. The baselines are made of torch.distributed's
collectives: over NCCL on GPUs, over gloo on the simulator, which is enough to check them.

Calls that return a sparse tensor are timed one at a time and from an idle GPU, because the host has
to know the size. tdcoll's padded form, which needs no host, is timed in CUDA graph replays.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import click
import torch
import torch.distributed as dist

import tdcoll
from benchmarks import parsing
from benchmarks.layout import Layout, launch_name
from benchmarks.sparse_data import INPUTS, RowSample, SparseData, sparse_tensor
from tdcoll.collectives.sparse_all_reduce.policy import ALGORITHMS, choose
from tdcoll.language import INTERPRETED
from tdcoll.tools.measure.benchmark import Benchmark
from tdcoll.tools.measure.engine import Errors, Variant, Workload, launch_calls
from tdcoll.tools.measure.floor import FLOORS, Floor
from tdcoll.tools.measure.results import Row, fact, label, number

_DTYPES = ("float16", "bfloat16", "float32", "float64")

_GBPS = FLOORS["NVIDIA H200"].gbps
"""The rate at which a GPU could send, for the lower bound."""

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""``(out, tensor)``; newer PyTorch has renamed it."""


def _exchange_counts(rows: torch.Tensor) -> int:
    """Exchange the ranks' numbers of rows, as every caller must, and wait for it.

    Return the number of ranks.
    """
    counts = torch.empty(dist.get_world_size(), dtype=torch.int64, device=rows.device)
    own = torch.full((1,), rows.numel(), dtype=torch.int64, device=rows.device)
    _all_gather(counts, own)
    return len(counts.tolist())


def all_reduce_union(tensor: torch.Tensor) -> torch.Tensor:
    """Reduce by the published method, in which rank 0 makes the union.

    Row numbers go to rank 0. It removes duplicates, and sends the union's size and then the union
    to all ranks. Each rank finds its rows in the union, copies them into ``[U, dim]`` zeros, and
    all-reduces these.
    """
    rows = tensor.indices()[0]
    values = tensor.values()
    world = _exchange_counts(rows)
    is_first = dist.get_rank() == 0
    lists = [torch.empty_like(rows) for _ in range(world)] if is_first else None
    dist.gather(rows, lists)
    union = torch.unique(torch.cat(lists)) if lists else rows
    size = torch.full((1,), union.numel(), dtype=torch.int64, device=rows.device)
    dist.broadcast(size, 0)
    if not is_first:
        union = rows.new_empty(int(size))
    dist.broadcast(union, 0)
    total = values.new_zeros((union.numel(), *values.shape[1:]))
    total[torch.searchsorted(union, rows)] = values
    dist.all_reduce(total)
    return sparse_tensor(union, total, tensor.shape)


def all_gather_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Send all row numbers and all rows to all ranks; each rank sums them itself."""
    rows = tensor.indices()[0]
    values = tensor.values()
    all_rows = rows.new_empty(rows.numel() * _exchange_counts(rows))
    _all_gather(all_rows, rows)
    all_values = values.new_empty((all_rows.numel(), *values.shape[1:]))
    _all_gather(all_values, values)
    union, places = torch.unique(all_rows, return_inverse=True)
    total = values.new_zeros((union.numel(), *values.shape[1:]))
    total.index_add_(0, places, all_values)
    return sparse_tensor(union, total, tensor.shape)


BASELINES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "published": all_reduce_union,
    "allgather": all_gather_rows,
}
"""The call of each baseline."""


class Distribution(click.ParamType):
    """A distribution of row numbers: ``"uniform"``, or ``"zipf1.2"`` with Zipf's exponent."""

    name = "distribution"

    def convert(self, value: Any, param: Any, ctx: Any) -> str:
        if not re.fullmatch(r"uniform|zipf\d+(\.\d+)?", value):
            self.fail(
                f"expected uniform or zipf with an exponent, such as zipf1.2; got {value!r}",
                param,
                ctx,
            )
        return str(value)


def _sparse_label(row: Row) -> str:
    """Return ``"tdcoll owner"``, ``"tdcoll owner, padded"``, or ``"tdcoll owner, no copy"``."""
    if row.peer:
        return label(row)
    if row.facts.get("form") == "padded":
        return f"{label(row)}, padded"
    if row.facts.get("copy") is False:
        return f"{label(row)}, no copy"
    return label(row)


def _floor_us(row: Row, _: Floor | None) -> float | None:
    return row.facts["floor_us"] or None


def _floor_text(row: Row, _: Floor | None) -> str:
    if not row.facts["floor_us"]:
        return ""
    rate = row.facts["bytes_per_rank"] / row.facts["floor_us"] / 1e3
    return f"The floor is the least rows that can cross between ranks, at {rate:.3g} GB/s per rank."


def _bandwidth(row: Row) -> str:
    return number(row.median_us and row.facts["bytes_per_rank"] / row.median_us / 1e3, 1)


def _over_floor(row: Row) -> str:
    """Return how many times longer than its lower bound a call took."""
    timed = row.median_us and row.facts["floor_us"]
    return number(row.median_us / row.facts["floor_us"] if timed else None, 2)


def _workload(data: SparseData, call: Callable[[int], object], **settings: Any) -> Workload:
    """Return a workload whose calls take the inputs of ``data`` in turn, each in its next round."""

    def before(numbers: Sequence[int]) -> None:
        for given in dict.fromkeys(numbers):
            data.advance(given)

    defaults = {"errors": data.tensor_errors, "one_at_a_time": True}
    return Workload(call=call, n_inputs=INPUTS, before=before, **{**defaults, **settings})


def baseline_workload(name: str, data: SparseData) -> Workload:
    """Return a baseline's calls."""
    return _workload(data, lambda number: BASELINES[name](data.tensors[number]))


def sparse_workload(
    name: str, data: SparseData, context: tdcoll.SparseContext, *, copy: bool
) -> Workload:
    """Return tdcoll's all-reduces by an algorithm, from sparse tensor to sparse tensor."""

    def call(number: int) -> torch.Tensor:
        return tdcoll.sparse_all_reduce(
            data.tensors[number], ctx=context, algorithm=name, copy=copy
        )

    return _workload(data, call)


def padded_workload(name: str, data: SparseData, context: tdcoll.SparseContext) -> Workload:
    """Return tdcoll's all-reduces by an algorithm, with padded results."""

    def call(number: int) -> Any:
        tensor = data.tensors[number]
        return tdcoll.sparse_all_reduce_padded(
            tensor._indices()[0],
            tensor._values(),
            data.shape[0],
            ctx=context,
            coalesced=True,
            algorithm=name,
        )

    def errors(number: int, result: Any) -> Errors:
        count = int(result.count)
        return data.errors(number, result.indices[:count], result.values[:count])

    result_bytes = data.tensors[0]._values().nbytes * context.world_size
    return _workload(data, call, errors=errors, launch_calls=launch_calls(result_bytes))


class SparseBenchmark(Benchmark):
    """The benchmark; a size is :class:`SparseData`."""

    name = "sparse_all_reduce"
    columns = Layout(
        title="Sparse all-reduce",
        size={
            "indices": fact("{distribution}"),
            "rows per rank": fact("{rows:,} × {dim}"),
        },
        derived={"GB/s": _bandwidth, "/ floor": _over_floor},
        label=_sparse_label,
        shown=("auto", "dense"),
        about=fact("{num_rows:,} rows of {dtype}"),
        unit="ms",
        scale=1e-3,
        floor=_floor_us,
        floor_text=_floor_text,
        x=lambda row: row.facts["rows"],
        panel=lambda row: (
            row.facts["distribution"],
            f"rows of {row.facts['dim']}, {launch_name(row)}",
        ),
    )

    @classmethod
    def parse(cls, arguments: Sequence[str]) -> SimpleNamespace:
        parameters = [
            parsing.numbers_option(
                "--rows",
                "40" if INTERPRETED else "1000,10000,50000",
                "numbers of rows of each rank",
            ),
            parsing.number_option(
                "--num-rows", 1, 500 if INTERPRETED else 5_000_000, "rows of the whole tensor"
            ),
            parsing.option(
                "--distributions",
                type=parsing.CommaList(Distribution()),
                default="uniform,zipf1.05,zipf1.2",
                metavar="A,B",
                help="how row numbers are drawn: uniform, or zipf and its exponent",
            ),
            parsing.numbers_option(
                "--dims", "8" if INTERPRETED else "64,512,2048", "elements of a row"
            ),
            parsing.dtype_option(_DTYPES, "float32"),
            parsing.names_option("--algorithms", ALGORITHMS, "owner,gather,auto", "tdcoll's calls"),
            parsing.names_option("--peers", list(BASELINES), "published,allgather", "baselines"),
            *parsing.launch_options("both"),
            *parsing.common_options(20, warmup=2),
        ]

        def finish(options: SimpleNamespace) -> None:
            options.launches = parsing.launches(options, "both")
            largest = max(options.rows)
            if largest > options.num_rows:
                raise click.UsageError(
                    f"--rows: {largest} different rows are more than the {options.num_rows} of "
                    "--num-rows"
                )

        return parsing.parse_benchmark(
            cls.name,
            "Time of row-sparse all-reduces from sparse tensor to sparse tensor, checked. On the "
            "simulator: checks, of small sizes.",
            parameters,
            arguments,
            finish,
        )

    @classmethod
    def heap_bytes(cls, options: SimpleNamespace, world: int) -> int:
        """Return the bytes that the largest size and the line-up need."""
        largest = {
            "max_rows_per_rank": max(options.rows),
            "max_row_bytes": max(options.dims) * options.dtype.itemsize,
        }
        plan = tdcoll.memory_plan({"largest": largest}, world_size=world)
        return plan.total + (world << 18) + (1 << 20)

    def sizes(self) -> Iterator[SparseData]:
        options = self.options
        topology = self.ranks.topology
        for distribution in options.distributions:
            for rows in options.rows:
                sample = RowSample(distribution, options.num_rows, rows, topology.world_size)
                for dim in options.dims:
                    yield SparseData(sample, dim, options.dtype, topology.rank, self.ranks.device)

    @contextlib.contextmanager
    def variants(
        self, data: SparseData
    ) -> Iterator[tuple[Sequence[Variant], Callable[[], object]]]:
        options = self.options
        rows = data.sample.rows
        row_bytes = data.shape[1] * data.dtype.itemsize
        with tdcoll.SparseContext(max_rows_per_rank=rows, max_row_bytes=row_bytes) as context:
            took = choose("auto", context.capacities, row_bytes)
            variants = []

            def add(name: str, launch: str, make: Callable[[], Workload], **facts: Any) -> None:
                if launch in options.launches:
                    if name == "auto":
                        facts["took"] = took
                    variants.append(Variant(name, False, make, [launch], facts))

            for name in options.algorithms:
                for copy in (True, False):
                    make = partial(sparse_workload, name, data, context, copy=copy)
                    add(name, "eager", make, form="coo", copy=copy)
                make = partial(padded_workload, name, data, context)
                add(name, "graph", make, form="padded", copy=None)
            for name in options.peers:
                make = partial(baseline_workload, name, data)
                variants.append(Variant(name, True, make, ["eager"]))
            yield variants, context.check

    def facts(self, data: SparseData) -> dict[str, Any]:
        sample = data.sample
        nbytes = data.moved_rows * data.shape[1] * data.dtype.itemsize / sample.world
        return {
            "distribution": sample.distribution,
            "num_rows": sample.num_rows,
            "rows": sample.rows,
            "dim": data.shape[1],
            "dtype": str(data.dtype).removeprefix("torch."),
            "union_rows": data.union_rows,
            "moved_rows": data.moved_rows,
            "bytes_per_rank": nbytes,
            "floor_us": nbytes / _GBPS / 1e3,
        }
