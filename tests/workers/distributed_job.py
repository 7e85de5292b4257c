# SPDX-License-Identifier: Apache-2.0
"""All checks of backend "tdcoll" in one job, because starting one takes long: results, groups, training."""

from __future__ import annotations

import importlib
import logging

from backend_job import join
from harness import run

for module in ("distributed_checks", "distributed_tensors_checks", "distributed_groups_checks", "distributed_training_checks"):
    importlib.import_module(module)

if __name__ == "__main__":
    from distributed_groups_checks import Remember, again

    logging.getLogger("tdcoll").addHandler(Remember())
    logging.getLogger("tdcoll").setLevel(logging.INFO)
    join()
    run()
    again()
