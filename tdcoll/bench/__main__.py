# SPDX-License-Identifier: Apache-2.0
"""``python -m tdcoll.bench``: choose the benchmark, or the report."""

from __future__ import annotations

import sys
from collections.abc import Sequence

_USAGE = """\
usage: bash launch.sh [--nproc N] -m tdcoll.bench all_gather [options]
       python -m tdcoll.bench report FILE.json [...] [options]

all_gather   measures the all-gather against its peers (on the simulator: checks it and counts its messages)
report       Markdown tables and plots of what it wrote with --json

Each has a --help of its own."""


def main(arguments: Sequence[str]) -> int:
    """Run one command; its exit status."""
    name, rest = (arguments[0], arguments[1:]) if arguments else ("", ())
    if name == "all_gather":
        from tdcoll.bench import all_gather

        return all_gather.main(rest)
    if name == "report":
        from tdcoll.bench import report

        return report.main(rest)
    if name in ("-h", "--help"):
        print(_USAGE)
        return 0
    print(f"{_USAGE}\n\nexpected all_gather or report, got {name or 'nothing'}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
