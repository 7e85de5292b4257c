# SPDX-License-Identifier: Apache-2.0
"""``python -m tdcoll.language``: the table of the device language, for ``docs/language.md``; with ``--stubs`` what type
checkers read, ``tdcoll/language/__init__.pyi``."""

import argparse
import sys

from tdcoll.output import unless_the_reader_goes
from tdcoll.spec.functions import stubs, table


def main() -> int:
    """Print one of them."""
    parser = argparse.ArgumentParser(prog="python -m tdcoll.language", description="Print the device language.")
    parser.add_argument("--stubs", action="store_true", help="for type checkers, instead of the table for docs")
    print(stubs() if parser.parse_args().stubs else f"{table()}\n", end="")
    return 0


if __name__ == "__main__":
    sys.exit(unless_the_reader_goes(main))
