# SPDX-License-Identifier: Apache-2.0
"""The checks of FSDP2 in symmetric memory, or those named, in one job of backend "tdcoll"."""

from __future__ import annotations

import fsdp_checks
from backend_job import join
from harness import CHECKS, run

if __name__ == "__main__":
    assert CHECKS, fsdp_checks
    join(blocks=16)
    run()
