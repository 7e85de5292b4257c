# SPDX-License-Identifier: Apache-2.0
"""The checks of several scripts in one job, because starting one takes long: `several.py language words`."""

from __future__ import annotations

import importlib
import sys

from harness import run

if __name__ == "__main__":
    for name in sys.argv[1:]:
        importlib.import_module(f"{name}_checks")
    run([])
