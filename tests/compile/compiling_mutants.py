# SPDX-License-Identifier: Apache-2.0
"""Kernels that lack a protection, and what is said of them."""

from __future__ import annotations

import sys
import tempfile
from importlib import import_module
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import triton
import triton.language as tl
from compiling import ORDER, compile_for, direct_ptx, tuples
from compiling_sparse import SPARSE_TYPES
from kernel_mutants import Change, installed

import tdcoll.language as tdl
from tdcoll.language import jit, waits

ABORTED = 'tdl.ld(monitor + tdl.MONITOR_ABORTED, "gpu", "relaxed")'


@triton.jit
def wait_signal_without_its_barrier(signal, compare: tl.constexpr, value, monitor, peer, index):
    return waits._poll(signal, compare, value, monitor, 1, peer, index)


GATHER, PULL, PUTS = (
    ("tdcoll.collectives.exchange.kernels_direct", "exchange_direct"),
    ("tdcoll.collectives.reduce_scatter.kernels_pull", "reduce_scatter_pull"),
    ("tdcoll.collectives.reduce_scatter.kernels_puts", "reduce_scatter_puts"),
)
PART = {"DTYPE": tl.float32, "ACC": tl.float32, "OP": 0, "COUNT": 256, "WAITED": 8}
CHANGED = {  # kernel, change
    "released without a barrier": (GATHER, Change("stores.release", "tdl.syncthreads()", "pass")),
    "released to this GPU only": (GATHER, Change("stores.release", "'sys'", "'gpu'")),
    "epoch read without a barrier": (
        GATHER,
        Change("group.still_alive", f"tdl.block_and({ABORTED} == 0)", f"({ABORTED} == 0).to(tl.int32)"),
    ),
    "read, and released without a barrier": (PULL, Change("stores.release_to_all", "tdl.syncthreads()", "pass")),
    "put without a barrier": (PUTS, Change("puts.put_from_outbox", "tdl.syncthreads()", "pass")),
}


def compile_mutants() -> dict[str, list[str]]:
    """What :mod:`ptx_order` finds in kernels with one protection switched off."""
    found = {}

    def note(name: str, kernel: tuple[str, str] = GATHER, in_place: bool = False) -> None:
        jit._lowering_digest = lambda: name  # what of the lowering changes here is in no file
        changed = getattr(import_module(kernel[0]), kernel[1])
        if kernel == GATHER:
            direct_ptx(changed, 90, in_place)
        else:
            compile_for(changed, 90, PART, tuples(1 if kernel == PULL else 2) | {"nodes": SPARSE_TYPES["nodes"]})
        found[name] = ORDER.pop()["problems"]

    with tempfile.TemporaryDirectory() as folder:
        for name, (kernel, change) in CHANGED.items():
            with installed([change], Path(folder), [kernel[0]] * (kernel != GATHER)):
                note(name, kernel)
        polling, wait_signal = waits._polling, tdl.wait_signal
        for name, order in (("relaxed wait", "relaxed.sys"), ("wait for this GPU only", "acquire.gpu")):
            waits._polling = lambda order=order, **pieces: polling(**pieces).replace("ld.acquire.sys", f"ld.{order}")
            note(name)
        waits._polling = polling
        tdl.wait_signal = wait_signal_without_its_barrier
        note("wait without a barrier")
        note("wait without a barrier, before others", in_place=True)
        tdl.wait_signal = wait_signal
    return found
