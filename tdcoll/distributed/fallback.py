# SPDX-License-Identifier: Apache-2.0
"""Calls of the fallback backend, gloo or NCCL, which are given contiguous memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from tdcoll.distributed.call import Call, plain_memory
from tdcoll.torch_internals import never_compiled
from tdcoll.work import Work, completed

__all__ = ["Fallback", "Make"]

Make = Callable[[Any, Call], Any]
"""Starts a call on a process group, which is given, as is the call, whose tensors are contiguous. Returns its work."""


class Fallback:
    """The fallback backend of one group.

    Args:
        group: a process group without what tdcoll overrides.
        names: of the backend for each type of device.
        beside: makes another such group of the same ranks, for CPU tensors and one kind of call. Collective.
    """

    def __init__(self, group: Any, names: dict[str, str], beside: Callable[[str], Any] = lambda kind: None) -> None:
        self.group, self._names, self._make_beside = group, names, beside
        self._beside: dict[str, Any] = {}

    def name(self, device: torch.device) -> str:
        """Return the name of the backend for a device's tensors."""
        return self._names.get(device.type, device.type)

    def __str__(self) -> str:
        return " and ".join(f"{name} ({device})" for device, name in self._names.items())

    def make(self, call: Call, asynchronous: bool, make: Make, beside: str | None = None) -> Any:
        """Make a call and return its work.

        gloo and NCCL take a tensor for contiguous memory that begins with its first element. If it has strides, they
        get a copy of it.

        Args:
            beside: make it by a group of its own for this kind of call. Its calls have an order of their own.
        """
        group, taken = self.group, plain_memory(call)
        if beside is not None:
            if beside not in self._beside:
                self._beside[beside] = self._make_beside(beside)
            group = self._beside[beside]
        work = make(group, taken)
        if taken is call:
            return work
        if asynchronous:
            return _CopiedWork(work, taken, call)
        work.wait()
        taken.copy_to(call)
        return completed(call.results)


@never_compiled
class _CopiedWork(Work):
    """The work of a call of the inner group on copies, which copies back what it has written.

    Args:
        work: of the inner group.
        made: the call that the inner group has been given.
        asked: the call that the user has made.
    """

    def __init__(self, work: Any, made: Call, asked: Call) -> None:
        super().__init__()
        self.tensors = asked.results
        self._work, self._made, self._asked = work, made, asked
        self._copying = threading.Lock()
        self._copied = False
        try:
            self._future: Any = work.get_future().then(self._copy_back)
        except RuntimeError:  # gloo has no futures of reduce-scatters
            self._future = None

    def _copy_back(self, done: Any = None) -> list[torch.Tensor]:
        """Copy what the inner group has written, once; raise what it has raised, if ``done`` is its future."""
        if done is not None:
            done.value()
        with self._copying:
            if not self._copied:
                self._made.copy_to(self._asked)
                self._copied = True
        return self.result()

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._work.wait(timeout) if timeout else self._work.wait()
        if self._future is None:
            self._copy_back()
        else:
            self._future.wait()
        return True

    def is_completed(self) -> bool:
        return bool(self._work.is_completed() and (self._future is None or self._future.done()))

    def exception(self) -> Any:
        return self._work.exception()

    def get_future(self) -> Any:
        return self._work.get_future() if self._future is None else self._future
