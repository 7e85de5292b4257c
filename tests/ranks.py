# SPDX-License-Identifier: Apache-2.0
"""Tests that every rank of a simulated job runs, and a tensor that calls refuse."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from tdcoll.testing import World

__all__ = ["Wrapped", "on_ranks", "on_streams"]

Test = Callable[..., None]


def on_ranks(n_pes: int, **world: Any) -> Callable[[Test], Test]:
    """Run a test on each rank of a ``World``. Its first parameter is the rank; the others are
    pytest's."""

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


class Wrapped(torch.Tensor):
    """A tensor without memory of its own, as DTensor is."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapped:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, given: Any = (), named: Any = None
    ) -> Any:
        raise NotImplementedError(function)
