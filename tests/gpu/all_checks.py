# SPDX-License-Identifier: Apache-2.0
"""The checks of the language and of the all-gather in one job, because starting one on GPUs takes long."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "workers"))

# The order matters: the all-gather's last check leaves the job as one that has failed.
for module in ("language_checks", "stores_and_waits_checks", "words_checks", "all_gather_checks"):
    importlib.import_module(module)

if __name__ == "__main__":
    importlib.import_module("harness").run()
