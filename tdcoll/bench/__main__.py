# SPDX-License-Identifier: Apache-2.0
"""``python -m tdcoll.bench``: choose the benchmark, or the report."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

_USAGE = """\
usage: bash launch.sh [--nproc N] -m tdcoll.bench BENCHMARK [options]
       python -m tdcoll.bench report FILE.json [...] [options]

all_gather          the all-gather against its peers
sparse_all_reduce   the sum of row-sparse tensors against what NCCL and gloo can do
index_match         matching lists of row numbers, on one GPU (--nproc 1)
signal              how long a signal takes, one-way and all-to-all
tune                a table of the fastest all-gathers on this machine, for TDCOLL_TUNING
report              Markdown tables and plots of what they wrote with --json

On the simulator the benchmarks check and count. Each has a --help of its own."""

_BENCHMARKS = ("all_gather", "sparse_all_reduce", "index_match", "signal", "tune")


def main(arguments: Sequence[str]) -> int:
    """Run one command; its exit status."""
    name, rest = (arguments[0], arguments[1:]) if arguments else ("", ())
    if name in (*_BENCHMARKS, "report"):
        return int(importlib.import_module(f"tdcoll.bench.{name}").main(rest))
    if name in ("-h", "--help"):
        print(_USAGE)
        return 0
    print(f"{_USAGE}\n\nexpected {', '.join(_BENCHMARKS)} or report, got {name or 'nothing'}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
