# SPDX-License-Identifier: Apache-2.0
"""``python -m tdcoll.language [--full]``: the tables of ``docs/language.md``, or the one of ``docs/functions.md``."""

import sys

from tdcoll.output import unless_the_reader_goes
from tdcoll.spec.functions import overview, table


def main() -> int:
    """Print the tables."""
    print(table() if "--full" in sys.argv[1:] else overview())
    return 0


if __name__ == "__main__":
    sys.exit(unless_the_reader_goes(main))
