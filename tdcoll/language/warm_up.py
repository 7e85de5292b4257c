# SPDX-License-Identifier: Apache-2.0
"""The work that Triton does once per process before its first kernel, done early and in the
background.

With every kernel in Triton's cache, the first launch of a process still takes half a second. Triton
hashes its own library of 400 MB, and tdcoll NVSHMEM's of 30 MB, to find the part of it that kernels
link. Triton imports the whole of Gluon to know the types of arguments. It runs ``ldconfig``,
``file`` and, twice, ``ptxas --version``. None of this depends on the kernel, and most of it runs
without Python's lock. NVSHMEM takes as long to start, also without the lock, so heaps on GPUs have
both done at the same time. ``benchmarks/start_up.py`` prints where the time of a start goes.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator

import torch
import triton.language as tl
from triton.runtime.jit import MockTensor

import tdcoll.language as tdl
from tdcoll.language.jit import jit

_log = logging.getLogger("tdcoll")


@jit
def _nothing(pointer, CALLS: tl.constexpr):
    """Names a function of NVSHMEM, so that it is compiled with its library, and does not call
    it."""
    if CALLS:
        tl.store(pointer, tdl.my_pe())


@jit
def _nothing_of_nvshmem(pointer, CALLS: tl.constexpr):
    if CALLS:
        tl.store(pointer, tdl.tid(0))


def compile_nothing(nvshmem: bool = True) -> None:
    """Have Triton compile an empty kernel for the current device, with or without NVSHMEM; launches
    nothing."""
    kernel = _nothing if nvshmem else _nothing_of_nvshmem
    kernel.warmup(MockTensor(tl.int32, (1,)), False, grid=(1,))


@contextlib.contextmanager
def warm_up(device: torch.device, nvshmem: bool = True) -> Iterator[None]:
    """:func:`compile_nothing` in a thread of its own while the block runs; leaving the block waits
    for it."""

    def run() -> None:
        try:
            torch.cuda.set_device(device)  # each thread has a current device of its own
            compile_nothing(nvshmem)
        except (
            Exception
        ) as error:  # the first launch will meet it as well, and raise it where it can be caught
            _log.debug("Triton's warm-up failed: %s", error)

    thread = threading.Thread(target=run, name="tdcoll-warm-up", daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join()
