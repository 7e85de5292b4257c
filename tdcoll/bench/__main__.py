# SPDX-License-Identifier: Apache-2.0
"""``tdcoll bench``: choose the benchmark."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from tdcoll.output import unless_the_reader_goes

BENCHMARKS = {
    "all_gather": "the all-gather against its peers",
    "all_reduce": "the all-reduce, likewise",
    "all_reduce_rms_norm": "all-reduce + residual + RMSNorm, fused and not",
    "reduce_scatter": "the reduce-scatter, likewise",
    "sparse_all_reduce": "the sum of row-sparse tensors against what NCCL and gloo can do",
    "signal": "how long a signal takes, one-way and all-to-all",
}
"""Name of each benchmark, which is also its module's, and what it measures."""

_USAGE = "usage: bash launch.sh [--nproc N] -m tdcoll bench BENCHMARK [options]"

_HELP = f"""\
{_USAGE}

{chr(10).join(f"{name:20}  {what}" for name, what in BENCHMARKS.items())}

example:
  bash launch.sh -m tdcoll bench all_gather --json result.json
  python -m tdcoll report result.json --plot result.png

Each benchmark has a --help of its own. On the simulator they check results and count messages."""


def main(arguments: Sequence[str]) -> int:
    """Run one benchmark; its exit status."""
    name, rest = (arguments[0], arguments[1:]) if arguments else ("", ())
    if name in BENCHMARKS:
        return int(importlib.import_module(f"tdcoll.bench.{name}").main(rest))
    if name in ("-h", "--help"):
        print(_HELP)
        return 0
    print(f"{_USAGE}\nbench: expected {', '.join(BENCHMARKS)} or --help, got {name or 'nothing'}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(unless_the_reader_goes(lambda: main(sys.argv[1:])))
