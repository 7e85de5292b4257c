# SPDX-License-Identifier: Apache-2.0
"""The checks of one or more scripts in one job, because starting one takes long.

`bash launch.sh tests/workers/checks_job.py language,words [checks]`; all checks of ``*_checks.py``,
or those named.
"""

from __future__ import annotations

import importlib
import sys

from harness import run

if __name__ == "__main__":
    for name in sys.argv[1].split(","):
        importlib.import_module(f"{name}_checks")
    run(sys.argv[2:])
