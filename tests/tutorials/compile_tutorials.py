# SPDX-License-Identifier: Apache-2.0
"""Compile the tutorials' kernels for a GPU that need not be here, without TRITON_INTERPRET; print their names."""

from __future__ import annotations

import sys
from pathlib import Path

from loading import load

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "compile"))

from compiling import compile_for

notify, gather, reduce = load("01-notify-and-wait"), load("02-all-gather"), load("05-all-reduce")
types = {
    **dict.fromkeys(("slots", "outbox", "received", "arrived", "credits", "signals", "epochs", "monitor"), "*i64"),
    **dict.fromkeys(("source", "inbox", "sums"), "*fp32"),
    "buffer": "*u8",
}
sums = {"BLOCK": 1024, "WIDTH": 8, "WAITS": 1, "RANK_ORDER": True, "ROWS": 2}
for kernel, constants in {
    notify.queue: {"WORDS": notify.WORDS, "SLOTS": notify.SLOTS, **notify.KEPT},
    gather.my_all_gather: {"WIDTH": 8, "COUNTED": True, "WAITS_LAST": True},
    reduce.one_stage: sums,
    reduce.two_stages: sums,
}.items():
    compile_for(kernel, 90, constants, types)
    print(kernel.__name__)
