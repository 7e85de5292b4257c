# SPDX-License-Identifier: Apache-2.0
"""``python -m tdcoll.language``: the table of the device language, for ``docs/language.md``."""

import sys

from tdcoll.output import unless_the_reader_goes
from tdcoll.spec.functions import table


def main() -> int:
    """Print the table."""
    print(table())
    return 0


if __name__ == "__main__":
    sys.exit(unless_the_reader_goes(main))
