# SPDX-License-Identifier: Apache-2.0
"""Tests that every rank of a simulated job runs."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from tdcoll.testing import World

__all__ = ["on_ranks", "on_streams"]

Test = Callable[..., None]


def on_ranks(n_pes: int, **world: Any) -> Callable[[Test], Test]:
    """Run a test on each rank of a ``World``. Its first parameter is the rank; the others are pytest's."""

    def decorate(test: Test) -> Test:
        @functools.wraps(test)
        def run(**given: Any) -> None:
            World(n_pes, **world).run(lambda pe: test(pe, **given))

        shape = inspect.signature(test)
        run.__signature__ = shape.replace(parameters=[*shape.parameters.values()][1:])  # type: ignore[attr-defined]
        return run

    return decorate


def on_streams(world: World, *hosts: Callable[[], Any]) -> None:
    """Run these at once on the calling PE, each on a stream of its own, and wait for them."""
    streams = [world.stream() for _ in hosts]
    for stream, host in zip(streams, hosts, strict=True):
        stream.queue(host)
    for stream in streams:
        stream.synchronize()
