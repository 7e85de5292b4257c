# SPDX-License-Identifier: Apache-2.0
"""The checks of the language and of the drop-in functions in one job, because starting one on GPUs takes long."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "workers"))

for module in ("language_checks", "stores_and_waits_checks", "words_checks", "drop_ins_checks"):
    importlib.import_module(module)

if __name__ == "__main__":
    importlib.import_module("harness").run()
