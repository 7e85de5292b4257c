# SPDX-License-Identifier: Apache-2.0
"""``tdcoll bench``: choose the benchmark."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Sequence

from tdcoll.base.limits import COLLECTIVES
from tdcoll.tools.setenv import COMMAND

_OTHERS = {
    "all_reduce_rms_norm": ("AllReduceNorm", "all-reduce + residual + RMSNorm, fused and not"),
    "sparse_all_reduce": ("SparseCase", "the sum of row-sparse tensors against what NCCL can do"),
    "signal": ("Signalling", "how long a signal takes"),
}
"""Module, class and subject of each benchmark that doesn't measure a dense collective."""

BENCHMARKS = {
    **{name: f"{name.replace('_', '-')}s against their peers" for name in COLLECTIVES},
    **{name: what for name, (_, what) in _OTHERS.items()},
}
"""The name of each benchmark, and its subject."""

_USAGE = f"usage: {COMMAND} [--nproc N] -m tdcoll bench BENCHMARK [options]"

_HELP = f"""\
{_USAGE}

{chr(10).join(f"{name:20}  {what}" for name, what in BENCHMARKS.items())}

example:
  {COMMAND} -m tdcoll bench all_gather --json result.json
  python -m tdcoll report result.json --plot result.png

Each benchmark has a --help of its own. On the simulator they only check results."""


def main(arguments: Sequence[str]) -> int:
    """Run one benchmark; return its exit status."""
    name, rest = (arguments[0], arguments[1:]) if arguments else ("", ())
    if name in BENCHMARKS:
        dense = name in COLLECTIVES
        kind = pkgutil.resolve_name(f"tdcoll.tools.bench.{'dense:case_of' if dense else f'{name}:{_OTHERS[name][0]}'}")
        return int(importlib.import_module("tdcoll.tools.bench.case").run(kind(name) if dense else kind, rest))
    if name in ("-h", "--help"):
        print(_HELP)
        return 0
    print(f"{_USAGE}\nbench: expected {', '.join(BENCHMARKS)} or --help, got {name or 'nothing'}", file=sys.stderr)
    return 2
