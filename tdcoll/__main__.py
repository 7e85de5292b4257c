# SPDX-License-Identifier: Apache-2.0
"""``python -m tdcoll``: commands about tdcoll itself.

``tdcoll/__init__.py`` imports nothing when it is run like this, so that the doctor runs where PyTorch or Triton is
missing or broken.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

_USAGE = """\
usage: python -m tdcoll doctor [options]

doctor   what a job needs, and whether it is here: for when one does not start

It has a --help of its own. Benchmarks: python -m tdcoll.bench --help"""


def main(arguments: Sequence[str]) -> int:
    """Run one command; its exit status."""
    name, rest = (arguments[0], arguments[1:]) if arguments else ("", ())
    if name == "doctor":
        from tdcoll.doctor.command import main as doctor

        return doctor(rest)
    if name in ("-h", "--help"):
        print(_USAGE)
        return 0
    print(f"{_USAGE}\n\nexpected doctor, got {name or 'nothing'}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
