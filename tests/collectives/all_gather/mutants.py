# SPDX-License-Identifier: Apache-2.0
"""The all-gather kernels with one protection switched off: what the simulator must catch.

A mutant is the kernels' own source with one piece replaced, loaded as a module of its own.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from tdcoll.collectives.all_gather import op


@dataclass(frozen=True)
class Mutant:
    """One protection less.

    Attributes:
        name: what is missing.
        pieces: replacements in the source; each must occur.
        algorithm: whose kernel shows it.
        n_pes: ranks of the job.
        ranks_per_node: as for ``World``.
        calls: as for ``Gathers``.
        world: further arguments of ``World``.
        module: whose source it changes.
    """

    name: str
    pieces: tuple[tuple[str, str], ...]
    algorithm: str = "1d"
    n_pes: int = 4
    ranks_per_node: int | None = None
    calls: str = "oooo"
    world: tuple[tuple[str, Any], ...] = ()
    module: str = "kernels"

    def source(self) -> str:
        source = Path(getattr(op, self.module).__file__).read_text()
        for old, new in self.pieces:
            assert old in source, f"mutant {self.name}: the kernels no longer contain {old!r}"
            source = source.replace(old, new)
        return source


PUT_LOCAL = "tdl.putmem_signal_block(target, source, size, signal, epoch, tdl.SIGNAL_SET, pe)"
PUT_REMOTE = "tdl.putmem_signal_nbi_block(staged, staged, size, signal, epoch, tdl.SIGNAL_SET, pe)"

MUTANTS = [
    Mutant("one slot", (("(epoch % 2)", "(epoch * 0)"),)),
    Mutant("one row of signals", (("row = signals + (epoch % 2) * SLOT_SIGNALS", "row = signals"),)),
    Mutant(
        "no fence between data and signal",
        ((PUT_LOCAL, "tdl.putmem_block(target, source, size, pe); tdl.signal_op(signal, epoch, tdl.SIGNAL_SET, pe)"),),
    ),
    Mutant(
        "signal before data",
        (
            (
                PUT_LOCAL,
                "tdl.signal_op(signal, epoch, tdl.SIGNAL_SET, pe); tdl.fence(); "
                "tdl.putmem_block(target, source, size, pe)",
            ),
        ),
    ),
    Mutant("forgotten signal", ((PUT_LOCAL, "tdl.putmem_block(target, source, size, pe)"),)),
    Mutant("signal of the epoch before", ((PUT_LOCAL, PUT_LOCAL.replace("epoch", "epoch - 2")),)),
    Mutant(
        "the receiver does not wait",
        (("if tdl.wait_signal(signals + signal, tdl.CMP_GE, epoch,", "if tdl.wait_signal(signals, tdl.CMP_GE, 0,"),),
    ),
    Mutant(
        "the forwarder does not wait",
        (("tdl.wait_signal(row + origin, tdl.CMP_GE, epoch,", "tdl.wait_signal(row + origin, tdl.CMP_GE, 0,"),),
        "2d",
        4,
        2,
    ),
    Mutant(
        "the second chunk has the signal of the first",
        (("signal = row + channel * WORLD + rank", "signal = row + rank"),),
    ),
    Mutant(
        "in place: a rank is written to before it has entered",
        (("tdl.wait_signal(ready + peer, tdl.CMP_GE, epoch,", "tdl.wait_signal(ready + peer, tdl.CMP_GE, 0,"),),
        calls="iiii",
    ),
    Mutant(
        "in place: the caller's segment is still being read",
        (("tdl.quiet()", "pass"),),
        "2d",
        4,
        2,
        calls="iiii",
    ),
    Mutant(
        "receivers before senders",
        (("task = program // channels\n", "task = 2 * n_local - program // channels\n"),),
        world=(("resident", 1),),
    ),
    Mutant(
        "ll: one slot",
        (("slot = (epoch % 2) * WORLD * words", "slot = (epoch % 2) * 0"),),
        "ll",
        module="kernels_ll",
    ),
    Mutant(
        "ll: a flag of the epoch before is taken",
        (("tdl.wait_flagged(landed, epoch.to(tl.int32)", "tdl.wait_flagged(landed, (epoch - 2).to(tl.int32)"),),
        "ll",
        module="kernels_ll",
    ),
    Mutant(
        "ll: waits for the rank it sends to",
        (("frm = (rank - step + WORLD) % WORLD", "frm = to"),),
        "ll",
        world=(("resident", 1),),
        module="kernels_ll",
    ),
    Mutant(
        "ll: a call of no bytes hears from nobody",
        (("tl.maximum((size + 3) // 4, 1)", "(size + 3) // 4"),),
        "ll",
        calls="ozozozo",
        module="kernels_ll",
    ),
]


@contextmanager
def installed(mutant: Mutant, folder: Path) -> Iterator[ModuleType]:
    """Let all-gather launch the mutant's kernels."""
    name = "all_gather_mutant_" + "".join(c if c.isalnum() else "_" for c in mutant.name)
    path = folder / f"{name}.py"
    path.write_text(mutant.source())
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    real = getattr(op, mutant.module)
    setattr(op, mutant.module, module)
    try:
        yield module
    finally:
        setattr(op, mutant.module, real)
        del sys.modules[name]
