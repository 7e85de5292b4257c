# SPDX-License-Identifier: Apache-2.0
"""Kernels that lack a protection, or wait too late for the launch before them, and what is said of them."""

from __future__ import annotations

import sys
import tempfile
from importlib import import_module
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import triton
import triton.language as tl
from compiling import ORDER, direct_ptx
from kernel_mutants import Change, installed

import tdcoll.language as tdl
from tdcoll.language import jit, waits
from tdcoll.language.jit import jit as tdl_jit
from tdcoll.primitives.group import in_stream_order

ABORTED = 'tdl.ld(monitor + tdl.MONITOR_ABORTED, "gpu", "relaxed")'


@triton.jit
def wait_signal_without_its_barrier(signal, compare: tl.constexpr, value, monitor, peer, index):
    return waits._poll(signal, compare, value, monitor, 1, peer, index)


@tdl_jit
def waits_late(out, BLOCK: tl.constexpr):
    tl.store(out, BLOCK)
    in_stream_order()


@tdl_jit
def _waits_in_a_helper():
    in_stream_order()


@tdl_jit
def waits_elsewhere(out, BLOCK: tl.constexpr):
    _waits_in_a_helper()
    tl.store(out, BLOCK)


def refusals() -> dict[str, str]:
    """What is said of kernels that wait for the launch before them, and not first."""
    said = {}
    for kernel in (waits_late, waits_elsewhere):
        try:
            said[kernel.__name__] = str(kernel.begins_in_stream_order)
        except ValueError as error:
            said[kernel.__name__] = str(error)
    return said


def compile_mutants() -> dict[str, list[str]]:
    """What :mod:`ptx_order` finds in the all-gather by stores with one protection switched off."""
    found = {}

    def note(name: str) -> None:
        jit._lowering_digest = lambda: name  # what of the lowering changes here is in no file
        direct_ptx(import_module("tdcoll.collectives.all_gather.kernels_direct").all_gather_direct, 90, False)
        found[name] = ORDER.pop()["problems"]

    with tempfile.TemporaryDirectory() as folder:
        for name, change in (
            ("released without a barrier", Change("stores.release", "tdl.syncthreads()", "pass")),
            (
                "epoch read without a barrier",
                Change("group.still_alive", f"tdl.block_and({ABORTED} == 0)", f"({ABORTED} == 0).to(tl.int32)"),
            ),
        ):
            with installed([change], Path(folder)):
                note(name)
        polling, wait_signal = waits._polling, tdl.wait_signal
        waits._polling = lambda **pieces: polling(**pieces).replace("ld.acquire.sys", "ld.relaxed.sys")
        note("relaxed wait")
        waits._polling = polling
        tdl.wait_signal = wait_signal_without_its_barrier
        note("wait without a barrier")
        tdl.wait_signal = wait_signal
    return found
