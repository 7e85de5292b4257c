# SPDX-License-Identifier: Apache-2.0
"""The settings of a job, from arguments and environment variables."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass

from tdcoll.base import arguments, environment
from tdcoll.language import INTERPRETED

DEFAULT_TIMEOUT_S = 30.0

_HEAPS = ("auto", "nvshmem", "torch")


def heap_of(heap: str | None = None) -> str:
    """Return ``"nvshmem"`` or ``"torch"``: the heap that is asked for, or the one that ``"auto"``
    means here."""
    name = "heap" if heap is not None else "TDCOLL_HEAP"
    asked = heap if heap is not None else os.environ.get(name) or "auto"
    arguments.instance(name, asked, str, "a string")
    if asked not in _HEAPS:
        raise ValueError(f"{name} must be one of {', '.join(_HEAPS)}; got {asked!r}")
    if asked != "auto":
        return asked
    bindings = importlib.util.find_spec("nvshmem")
    # What tdcoll.compat puts in their place lies in no folder.
    has_nvshmem = bindings is not None and bindings.submodule_search_locations
    return "nvshmem" if INTERPRETED or has_nvshmem else "torch"


def asks_to_share_gpus() -> bool:
    """Return whether ``TDCOLL_SHARE_GPUS`` is set."""
    return os.environ.get("TDCOLL_SHARE_GPUS", "0") not in ("", "0")


@dataclass(frozen=True)
class JobSettings:
    """What ``initialize`` was asked for; must agree over the ranks."""

    heap_bytes: int
    timeout_s: float
    emulate_nodes: int
    share_gpus: bool = False
    heap: str = "nvshmem"

    @classmethod
    def read(
        cls,
        heap_bytes: int | str | None,
        timeout_s: float | None,
        emulate_nodes: int | None = None,
        share_gpus: bool | None = None,
        heap: str | None = None,
    ) -> JobSettings:
        environment.warn_of_unknown()
        env = os.environ
        if heap_bytes is None:
            heap_bytes = environment.heap_bytes(INTERPRETED)
        if timeout_s is None:
            try:
                timeout_s = float(env.get("TDCOLL_TIMEOUT_S", "") or DEFAULT_TIMEOUT_S)
            except ValueError:
                text = env["TDCOLL_TIMEOUT_S"]
                raise ValueError(
                    f"TDCOLL_TIMEOUT_S must be a number of seconds, got {text!r}"
                ) from None
            arguments.seconds("TDCOLL_TIMEOUT_S", timeout_s)
        if emulate_nodes is None:
            text = env.get("TDCOLL_EMULATE_NODES", "") or "1"
            emulate_nodes = arguments.parse_whole(text, "TDCOLL_EMULATE_NODES", 1)
        if share_gpus is None:
            share_gpus = asks_to_share_gpus()
        return cls(
            arguments.byte_count("heap_bytes", heap_bytes),
            arguments.seconds("timeout_s", timeout_s),
            arguments.whole("emulate_nodes", emulate_nodes, 1),
            bool(share_gpus),
            heap_of(heap),
        )
