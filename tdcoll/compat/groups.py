# SPDX-License-Identifier: Apache-2.0
"""gloo in the place of NCCL: collectives that are ordered like work on a stream.

A collective of NCCL's is ordered on the GPU, so programs go on without waiting for its ``Work`` on the host. gloo runs
it on a thread of its own, and what the program reads next may be the old data.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

__all__ = ["install"]

_COLLECTIVES = re.compile("_?(all|barrier|broadcast|gather|reduce|scatter)")


def _completed(collective: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(collective)
    def call(*args: Any, **kwargs: Any) -> Any:
        work = collective(*args, **kwargs)
        if work is not None:
            work.wait()
        return work

    return call


@functools.cache
def install() -> None:
    """Let the collectives of all process groups return when they are complete, for the rest of this process.

    Sends and receives are left alone: two ranks that begin with a send would wait for each other.
    """
    for name in filter(_COLLECTIVES.match, dir(dist.ProcessGroup)):
        setattr(dist.ProcessGroup, name, _completed(getattr(dist.ProcessGroup, name)))
