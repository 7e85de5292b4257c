# SPDX-License-Identifier: Apache-2.0
"""All checks of backend "tdcoll" in one job, because starting one takes long: results, groups,
training."""

from __future__ import annotations

import importlib
import logging

from backend_job import join
from harness import run

PARTS = (
    "order_",
    "",
    "sparse_",
    "forms_",
    "averages_",
    "works_",
    "observers_",
    "tensors_",
    "groups_",
    "training_",
    "reducer_",
)

for part in PARTS:
    importlib.import_module(f"distributed_{part}checks")

if __name__ == "__main__":
    from distributed_groups_checks import Remember, again

    logging.getLogger("tdcoll").addHandler(Remember())
    logging.getLogger("tdcoll").setLevel(logging.INFO)
    join(blocks=16)  # the checks make many groups, and the contexts of all fit the GPU together
    run()
    again()
