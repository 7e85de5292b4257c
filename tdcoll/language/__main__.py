# SPDX-License-Identifier: Apache-2.0
"""``python -m tdcoll.language``: the tables of ``docs/language.md``.

With ``--full`` the table of ``docs/functions.md``, with ``--stubs`` what type checkers read: ``language/__init__.pyi``.
"""

import argparse
import sys

from tdcoll.base.output import unless_the_reader_goes
from tdcoll.spec.functions import overview, stubs, table


def main() -> int:
    """Print one of them."""
    parser = argparse.ArgumentParser(prog="python -m tdcoll.language", description="Print the device language.")
    parser.add_argument("--full", action="store_true", help="one table with the full text, for docs/functions.md")
    parser.add_argument("--stubs", action="store_true", help="for type checkers, instead of tables for docs")
    options = parser.parse_args()
    print(stubs() if options.stubs else f"{table() if options.full else overview()}\n", end="")
    return 0


if __name__ == "__main__":
    sys.exit(unless_the_reader_goes(main))
