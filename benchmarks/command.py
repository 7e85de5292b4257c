# SPDX-License-Identifier: Apache-2.0
"""``tdcoll bench``: choose the benchmark, and run it."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmarks import registry
from tdcoll.tools.setenv import COMMAND

_USAGE = f"usage: {COMMAND} [--nproc N] -m tdcoll bench BENCHMARK [options]"

_HELP = f"""\
{_USAGE}

{chr(10).join(f"{name:20}  {subject}" for name, subject in registry.SUBJECTS.items())}

example:
  {COMMAND} -m tdcoll bench all_gather --json result.json
  python -m tdcoll report result.json --plot result.png

Each benchmark has a --help of its own. On the simulator they only check results."""


def main(arguments: Sequence[str]) -> int:
    """Run one benchmark; return its exit status."""
    name = arguments[0] if arguments else ""
    if name in registry.SUBJECTS:
        from tdcoll.tools.measure.benchmark import run  # which imports torch: not for a --help

        return run(registry.benchmark(name), arguments[1:])
    if name in ("-h", "--help"):
        print(_HELP)
        return 0
    expected = f"expected {', '.join(registry.SUBJECTS)} or --help, got {name or 'nothing'}"
    print(f"{_USAGE}\nbench: {expected}", file=sys.stderr)
    return 2
