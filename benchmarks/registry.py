# SPDX-License-Identifier: Apache-2.0
"""The benchmarks by name, the layouts of results, and files of results.

Only the requested benchmark is imported.
"""

from __future__ import annotations

import pkgutil
from pathlib import Path
from typing import Any, NamedTuple

from tdcoll.base.limits import COLLECTIVES
from tdcoll.tools.measure.results import Row, load


class BenchmarkEntry(NamedTuple):
    """A benchmark: the place of its class, as ``module:class``, and its subject."""

    place: str
    subject: str


_OTHERS = {
    "all_reduce_rms_norm": BenchmarkEntry(
        "benchmarks.all_reduce_rms_norm:NormBenchmark",
        "all-reduce + residual + RMSNorm, fused and not",
    ),
    "litmus": BenchmarkEntry(
        "benchmarks.litmus:Litmus", "litmus tests: orders of memory that protocols rely on"
    ),
    "matmul": BenchmarkEntry(
        "benchmarks.matmul:MatmulBenchmark",
        "matmuls that communicate, the matmul alone, and both in a row",
    ),
    "sparse_all_reduce": BenchmarkEntry(
        "benchmarks.sparse_all_reduce:SparseBenchmark",
        "the sum of row-sparse tensors against what NCCL can do",
    ),
    "signal": BenchmarkEntry("benchmarks.signals:SignalBenchmark", "how long a signal takes"),
    "soak": BenchmarkEntry(
        "benchmarks.soak:Soak", "random sequences of all kinds of calls, with exact results"
    ),
}
"""The benchmarks that don't measure a dense collective. A new benchmark adds a line here."""

SUBJECTS = {
    **{name: f"{name.replace('_', '-')}s against their peers" for name in COLLECTIVES},
    **{name: entry.subject for name, entry in _OTHERS.items()},
}
"""The name of each benchmark, and its subject."""


def benchmark(name: str) -> Any:
    """Return the class of the benchmark ``name``."""
    if name in COLLECTIVES:
        return pkgutil.resolve_name("benchmarks.dense:dense_benchmark")(name)
    return pkgutil.resolve_name(_OTHERS[name].place)


def layout(name: str) -> Any:
    """Return the layout of the rows of the benchmark ``name``; ``ValueError`` if it is unknown.

    Besides the benchmarks, there are the candidates of `tdcoll tune --json`, and the file of
    ``backend_calls.py --beside``.
    """
    if name in SUBJECTS:
        return benchmark(name).columns
    if name == "tune":
        return pkgutil.resolve_name("benchmarks.dense:TUNE_LAYOUT")
    if name == "beside":
        return pkgutil.resolve_name("benchmarks.beside:BESIDE_LAYOUT")
    known = ", ".join([*SUBJECTS, "tune", "beside"])
    raise ValueError(f"benchmark {name} (this version knows {known})")


def load_result(path: Path) -> tuple[dict[str, Any], list[Row]]:
    """Return ``(head, rows)`` of the file of a known benchmark.

    Raises:
        ValueError: it is another file, or its rows lack the facts of their size.
        OSError: it can't be read.
    """
    head, rows = load(path)
    try:
        sizes = layout(head["benchmark"])
        for row in rows:
            sizes.size_of(row)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not the result of a benchmark: {error}") from error
    return head, rows
