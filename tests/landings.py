# SPDX-License-Identifier: Apache-2.0
"""Facts of calls, by the arguments that public functions have for where data lands."""

from __future__ import annotations

from typing import Any

import torch

from tdcoll.calls.plan import Facts, Landing
from tdcoll.runtime.topology import Topology


def landing_of(in_place: bool = False, symmetric: bool = False) -> Landing:
    """Return where data lands in calls in place, or with a symmetric result."""
    if in_place:
        return Landing.CALLER_BUFFER
    return Landing.PEER_RESULT if symmetric else Landing.INBOX


def make_facts(
    nbytes: int,
    topology: Topology,
    *sizes: Any,
    in_place: bool = False,
    symmetric: bool = False,
    **more: Any,
) -> Facts:
    """Return facts, with the positional arguments of :class:`Facts`."""
    return Facts(nbytes, topology, *sizes, landing=landing_of(in_place, symmetric), **more)


def facts_on(
    ctx: Any,
    nbytes: int,
    dtype: torch.dtype | None = None,
    *,
    in_place: bool = False,
    symmetric: bool = False,
) -> Facts:
    """Return the facts of a call on a context."""
    return Facts.of(ctx, nbytes, dtype, landing_of(in_place, symmetric))
