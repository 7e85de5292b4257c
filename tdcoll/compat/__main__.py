# SPDX-License-Identifier: Apache-2.0
"""``python -m tdcoll.compat script.py [arguments...]``: runs a program of Triton-distributed's on
tdcoll."""

from __future__ import annotations

import os
import runpy
import sys

from tdcoll.compat import activate


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit("usage: python -m tdcoll.compat script.py [arguments...]")
    if sys.argv[1] in ("-h", "--help"):
        print(__doc__)
        return
    script = sys.argv[1]
    if not os.path.isfile(script):
        sys.exit(f"tdcoll.compat: expected a script, got {script!r}, which is no file")
    activate()
    sys.argv = sys.argv[1:]
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
