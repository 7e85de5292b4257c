# SPDX-License-Identifier: Apache-2.0
"""``rank.py FIRST_PORT PORTS COMMAND...``: becomes that command, with what is this rank's own in it.

``sanitize.py`` has torchrun start this in place of a rank's program, so that a tool watches the rank alone. In the
command ``{python}`` becomes this Python, ``{rank}`` the rank, and ``{port}`` the first of ``PORTS`` ports that are the
rank's: tools beside each other would else ask for the same ones.
"""

from __future__ import annotations

import os
import sys


def main() -> None:
    first, ports, rank = int(sys.argv[1]), int(sys.argv[2]), int(os.environ["RANK"])
    own = {"{python}": sys.executable, "{rank}": str(rank), "{port}": str(first + ports * rank)}
    command = []
    for word in sys.argv[3:]:
        for name, value in own.items():
            word = word.replace(name, value)
        command.append(word)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
