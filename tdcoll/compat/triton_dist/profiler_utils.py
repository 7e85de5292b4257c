# SPDX-License-Identifier: Apache-2.0
"""``triton_dist.profiler_utils``: measures the time of a function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tdcoll.compat.triton_dist.utils import sleep_async

__all__ = ["perf_func", "sleep_async"]


def perf_func(func: Callable[[], Any], iters: int, warmup_iters: int) -> tuple[Any, float]:
    """Return the last result of ``func()``, and the milliseconds of a call: by events, over
    ``iters`` calls.

    ``warmup_iters`` calls come first.
    """
    for _ in range(warmup_iters):
        func()
    torch.cuda.synchronize()
    begin = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    output = None
    begin.record()
    for _ in range(iters):
        output = func()
    end.record()
    torch.cuda.synchronize()
    return output, begin.elapsed_time(end) / iters
