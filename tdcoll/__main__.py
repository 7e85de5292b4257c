# SPDX-License-Identifier: Apache-2.0
"""``tdcoll`` and ``python -m tdcoll``: the commands.

Only the requested command is imported, so that the doctor runs where PyTorch or Triton is missing
or broken.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from tdcoll import __version__
from tdcoll.base.output import unless_the_reader_goes

_COMMANDS = {
    "run": (
        "tdcoll.tools.launch",
        "start a script or module as a job, one process per GPU, or on the simulator",
    ),
    "doctor": (
        "tdcoll.tools.doctor.command",
        "what a job needs, and whether it is here: for when one does not start",
    ),
    "hang": (
        "tdcoll.base.hang",
        "what ranks on this host wait for, and for whom: for a job that stands still",
    ),
    "bench": ("benchmarks.command", "measure the collectives against their peers, on this machine"),
    "tune": (
        "tdcoll.tools.tune.command",
        "measure which algorithm is the fastest at which size; write a table of it",
    ),
    "report": ("benchmarks.report", "tables and pictures of what bench wrote"),
}

_IN_CHECKOUT = ("bench", "report")
"""Commands that need a checkout, because a wheel doesn't contain the folder ``benchmarks``."""

_NEEDED = ("torch", "triton", "numpy")

_EXTRAS = {"click": "bench", "matplotlib": "bench", "pandas": "bench", "tabulate": "bench"}
"""The extra that installs a package which only some commands need."""

_USAGE = f"usage: python -m tdcoll {{{','.join(_COMMANDS)}}} [options]"

_HELP = f"""\
{_USAGE}

{chr(10).join(f"{name:8}  {what}" for name, (_, what) in _COMMANDS.items())}

bench and tune are jobs: `run` starts them, as does launch.sh in a checkout. bench and report are in the folder
benchmarks of a checkout only. Where tdcoll is installed, `tdcoll` is the same as `python -m tdcoll`.

example:
  python -m tdcoll doctor
  python -m tdcoll run --nproc 2 train.py
  python -m tdcoll run -m tdcoll tune -o table.json

Each command has a --help of its own.
  -h, --help  this text
  --version   tdcoll's version"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; its exit status. None: the arguments of this process."""
    return unless_the_reader_goes(lambda: _run(sys.argv[1:] if arguments is None else arguments))


def _run(arguments: Sequence[str]) -> int:
    name, *rest = arguments or ("",)
    if name in _COMMANDS:
        if name in _IN_CHECKOUT and not _add_checkout_to_path(name):
            return 2
        try:
            return int(importlib.import_module(_COMMANDS[name][0]).main(rest))
        except ModuleNotFoundError as error:
            missing = (error.name or "").partition(".")[0]
            if missing not in _NEEDED and missing not in _EXTRAS:
                raise
            print(_advice(name, missing), file=sys.stderr)
            return 2
    if name in ("-h", "--help", "--version"):
        print(f"tdcoll {__version__}" if name == "--version" else _HELP)
        return 0
    print(
        f"{_USAGE}\ntdcoll: expected {', '.join(_COMMANDS)} or --help, got {name or 'nothing'}",
        file=sys.stderr,
    )
    return 2


def _add_checkout_to_path(name: str) -> bool:
    """Make the checkout the first place for imports, because other projects have a folder
    ``benchmarks`` too.

    Return False, after printing why the command ``name`` isn't here, if this is an installed
    package.
    """
    from tdcoll.tools.setenv import IN_CHECKOUT, ROOT

    if IN_CHECKOUT:
        sys.path.insert(0, str(ROOT))
        return True
    text = (
        f"tdcoll {name}: expected a checkout of tdcoll, which has this command in its folder benchmarks; got the "
        f"package installed in {ROOT}. Take the source of version {__version__}, and in its root run `bash launch.sh "
        f"-m tdcoll {name} --help`"
    )
    print(text, file=sys.stderr)
    return False


def _advice(name: str, missing: str) -> str:
    """Return what to do if the command ``name`` needs the package ``missing``."""
    from tdcoll.tools.setenv import IN_CHECKOUT

    text = f"tdcoll {name}: needs {missing}, which {sys.executable} lacks; "
    if missing in _EXTRAS:
        extra = _EXTRAS[missing]
        return f"{text}the extra '{extra}' has it: pip install -e '.[{extra}]' in the checkout"
    if IN_CHECKOUT:
        text += "`source setenv.sh` finds a Python that has it, and "
    return f"{text}`python -m tdcoll doctor` says more"


if __name__ == "__main__":
    sys.exit(main())
