# SPDX-License-Identifier: Apache-2.0
"""``tdcoll`` and ``python -m tdcoll``: the commands.

Only the requested command is imported, so that the doctor runs where PyTorch or Triton is missing or broken.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from tdcoll import __version__
from tdcoll.base.output import unless_the_reader_goes

_COMMANDS = {
    "run": ("tdcoll.tools.launch", "start a script or module as a job, one process per GPU, or on the simulator"),
    "doctor": ("tdcoll.tools.doctor.command", "what a job needs, and whether it is here: for when one does not start"),
    "hang": ("tdcoll.base.hang", "what ranks on this host wait for, and for whom: for a job that stands still"),
    "bench": ("tdcoll.tools.bench.command", "measure the collectives against their peers, on this machine"),
    "tune": ("tdcoll.tools.bench.tune", "measure which algorithm is the fastest at which size; write a table of it"),
    "report": ("tdcoll.tools.bench.report", "tables and pictures of what bench wrote"),
}

_NEEDED = ("torch", "triton", "numpy")

_USAGE = f"usage: python -m tdcoll {{{','.join(_COMMANDS)}}} [options]"

_HELP = f"""\
{_USAGE}

{chr(10).join(f"{name:8}  {what}" for name, (_, what) in _COMMANDS.items())}

bench and tune are jobs: `run` starts them, as does launch.sh in a checkout. Where tdcoll is installed,
`tdcoll` is the same as `python -m tdcoll`.

example:
  python -m tdcoll doctor
  python -m tdcoll run -m tdcoll bench all_gather --json result.json
  python -m tdcoll report result.json

Each command has a --help of its own.
  -h, --help  this text
  --version   tdcoll's version"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; its exit status. None: the arguments of this process."""
    return unless_the_reader_goes(lambda: _run(sys.argv[1:] if arguments is None else arguments))


def _run(arguments: Sequence[str]) -> int:
    name, *rest = arguments or ("",)
    if name in _COMMANDS:
        try:
            return int(importlib.import_module(_COMMANDS[name][0]).main(rest))
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] not in _NEEDED:
                raise
            from tdcoll.tools.setenv import IN_CHECKOUT

            finds = "`source setenv.sh` finds a Python that has it, and " * IN_CHECKOUT
            text = f"tdcoll {name}: needs {error.name}, which {sys.executable} lacks; {finds}"
            print(f"{text}`python -m tdcoll doctor` says more", file=sys.stderr)
            return 2
    if name in ("-h", "--help", "--version"):
        print(f"tdcoll {__version__}" if name == "--version" else _HELP)
        return 0
    print(f"{_USAGE}\ntdcoll: expected {', '.join(_COMMANDS)} or --help, got {name or 'nothing'}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
