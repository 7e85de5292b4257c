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

from tdcoll.collectives import protocol
from tdcoll.collectives.all_gather import op


@dataclass(frozen=True)
class Mutant:
    """One protection less.

    Attributes:
        name: what is missing.
        pieces: replacements in the source; each must occur.
        expect: regular expression that the failure's report must match: what goes wrong, and not just that it does.
        algorithm: whose kernel shows it.
        n_pes: ranks of the job.
        ranks_per_node: as for ``World``.
        calls, first_epoch: as for ``Gathers``.
        world: further arguments of ``World``.
        module: whose source it changes: ``"kernels"``, ``"kernels_ll"``, ``"kernels_direct"`` or
            ``"kernels_ring"``.
        protocol: replacements in the source of ``begin_epoch`` and its like, which the module imports.
    """

    name: str
    pieces: tuple[tuple[str, str], ...]
    expect: str
    algorithm: str = "1d"
    n_pes: int = 4
    ranks_per_node: int | None = None
    calls: str = "oooo"
    first_epoch: int = 1
    world: tuple[tuple[str, Any], ...] = ()
    module: str = "kernels"
    protocol: tuple[tuple[str, str], ...] = ()

    @property
    def job(self) -> dict[str, Any]:
        """Arguments of ``World``."""
        return {"n_pes": self.n_pes, "ranks_per_node": self.ranks_per_node, **dict(self.world)}

    def sources(self) -> tuple[str, str]:
        """What the kernels' module and the protocol's become."""
        return (
            self._changed(getattr(op, self.module), self.pieces),
            self._changed(protocol, self.protocol),
        )

    def _changed(self, module: ModuleType, pieces: tuple[tuple[str, str], ...]) -> str:
        assert module.__file__ is not None
        source = Path(module.__file__).read_text()
        for old, new in pieces:
            assert old in source, f"mutant {self.name}: {module.__name__} no longer contains {old!r}"
            source = source.replace(old, new)
        return source


WRONG = r"AssertionError: rank \d+, call \d+ \([oi]\): \d+ wrong bytes"


def missing(signal: str) -> str:
    """A deadlock in which somebody waits for this array of signals."""
    return rf"[Dd]eadlock[\s\S]*waits for pe\d+\.{signal}\["


PUT_LOCAL = "tdl.putmem_signal_block(target, source, size, signal, epoch, tdl.SIGNAL_SET, pe)"
PUT_REMOTE = "tdl.putmem_signal_nbi_block(staged, staged, size, signal, epoch, tdl.SIGNAL_SET, pe)"
STORE_LOCAL = "tdl.copy_block(target + delta, source, size)"
RELEASE_LOCAL = "release(signal, delta, epoch)"
SIGNAL = "tdl.signal_block(signal, epoch, tdl.SIGNAL_SET, pe)"
SIGNAL_OP = "tdl.signal_op(signal, epoch, tdl.SIGNAL_SET, pe)"  # without the fence that signal_block has
MAY_WRITE = "if _may_write(ready, peer, epoch, monitor, IN_PLACE) != 0:\n"
RING_COPY = "tdl.copy_block(landing + after_delta, held, size)"
RING_RELEASE = "release(row + origin, after_delta, epoch)"
ADD = '    tl.atomic_add(control, share.to(tl.int64), sem="relaxed", scope="gpu")\n'
WAIT_FLAGGED = "tdl.wait_flagged(landed, _flag(epoch), mask, monitor, frm)"
LOAD_DATA = (
    "part = landed.to(tl.pointer_type(tl.int32)); first = tl.load(part, mask=mask, other=0); "
    "second = tl.load(part + 1, mask=mask, other=0); third = tl.load(part + 2, mask=mask, other=0)"
)
READ = '    word = tdl.ld(control, "gpu", "relaxed")\n'

MUTANTS = [
    # ------------------------------------------------------------------ slots and signals
    Mutant("one slot", (("(epoch % 2)", "(epoch * 0)"),), WRONG),
    Mutant("one row of signals", (("row = signals + (epoch % 2) * SLOT_SIGNALS", "row = signals"),), WRONG),
    Mutant(
        "no fence between data and signal",
        ((PUT_LOCAL, f"tdl.putmem_block(target, source, size, pe); {SIGNAL_OP}"),),
        WRONG,
    ),
    Mutant(
        "signal before data",
        ((PUT_LOCAL, f"{SIGNAL}; tdl.fence(); tdl.putmem_block(target, source, size, pe)"),),
        WRONG,
    ),
    Mutant("forgotten signal", ((PUT_LOCAL, "tdl.putmem_block(target, source, size, pe)"),), missing("signals")),
    Mutant("signal of the epoch before", ((PUT_LOCAL, PUT_LOCAL.replace("epoch", "epoch - 2")),), missing("signals")),
    Mutant(
        "the receiver does not wait",
        (("if tdl.wait_signal(signals + signal, tdl.CMP_GE, epoch,", "if tdl.wait_signal(signals, tdl.CMP_GE, 0,"),),
        WRONG,
    ),
    Mutant(
        "the receiver waits for the first chunk only",
        (("            signal = channel * WORLD + peer\n", "            signal = peer\n"),),
        WRONG,
    ),
    Mutant(
        "the second chunk has the signal of the first",
        (("signal = row + channel * WORLD + rank", "signal = row + rank"),),
        missing("signals"),
    ),
    Mutant(
        "receivers before senders",
        (("given = inside % per_chunk\n", "given = per_chunk - 1 - inside % per_chunk\n"),),
        missing("signals"),
        world=(("resident", 1),),
    ),
    # ------------------------------------------------------------------ the epoch
    Mutant(
        "the epoch is read after it was added to",
        (),
        WRONG + "|" + missing("signals"),
        protocol=((READ, ""), (ADD, ADD + READ)),
    ),
    Mutant(
        "the epoch is raised by the first program",
        (),
        WRONG + "|" + missing("signals"),
        protocol=(
            ("share = _EPOCH // programs", "share = _EPOCH * (program == 0)"),
            ("    if program == programs - 1:\n        share = _EPOCH - share * (programs - 1)\n", ""),
        ),
    ),
    Mutant(
        "the epoch is not raised",
        (),
        WRONG,
        protocol=((ADD, ""),),
    ),
    # ------------------------------------------------------------------ between nodes
    Mutant(
        "remote: signal before data",
        ((PUT_REMOTE, f"{SIGNAL}; tdl.fence(); tdl.putmem_nbi_block(staged, staged, size, pe)"),),
        WRONG,
        ranks_per_node=2,
    ),
    Mutant("remote: no data", ((PUT_REMOTE, SIGNAL),), WRONG, ranks_per_node=2),
    Mutant(
        "remote: no signal",
        ((PUT_REMOTE, "tdl.putmem_nbi_block(staged, staged, size, pe)"),),
        missing("signals"),
        ranks_per_node=2,
    ),
    Mutant(
        "remote: nothing in the slot to send from",
        (("        tdl.copy_block(staged, source, size)\n", ""),),
        WRONG,
        ranks_per_node=2,
    ),
    Mutant(
        "2d, remote: signal before data",
        ((PUT_REMOTE, f"{SIGNAL}; tdl.fence(); tdl.putmem_nbi_block(staged, staged, size, pe)"),),
        WRONG,
        "2d",
        ranks_per_node=2,
    ),
    Mutant(
        "2d: the forwarder does not wait",
        (("tdl.wait_signal(row + origin, tdl.CMP_GE, epoch,", "tdl.wait_signal(row + origin, tdl.CMP_GE, 0,"),),
        WRONG,
        "2d",
        ranks_per_node=2,
    ),
    Mutant(
        "2d: inside the node the signal goes before the data",
        ((f"{STORE_LOCAL}\n            {RELEASE_LOCAL}", f"{RELEASE_LOCAL}\n            {STORE_LOCAL}"),),
        WRONG,
        "2d",
        ranks_per_node=2,
    ),
    Mutant(
        "2d: nobody of the node is told",
        ((RELEASE_LOCAL, "pass"),),
        missing("signals"),
        "2d",
        ranks_per_node=2,
    ),
    # ------------------------------------------------------------------ in place
    Mutant(
        "in place: a rank is written to before it has entered",
        (("tdl.wait_signal(ready + peer, tdl.CMP_GE, epoch,", "tdl.wait_signal(ready + peer, tdl.CMP_GE, 0,"),),
        WRONG,
        calls="iiii",
    ),
    Mutant(
        "in place, 2d: a rank of this node is written to before it has entered",
        ((f"    {MAY_WRITE}        if STORES:", "    if True:\n        if STORES:"),),
        WRONG,
        "2d",
        ranks_per_node=2,
        calls="iiii",
    ),
    Mutant(
        "in place, 2d: a rank of another node is written to before it has entered",
        ((f"        {MAY_WRITE}            {PUT_REMOTE}", f"        if True:\n            {PUT_REMOTE}"),),
        WRONG,
        "2d",
        ranks_per_node=2,
        calls="iiii",
    ),
    Mutant(
        "in place: no announcement",
        (("        _announce(ready, routes, epoch, rank, n_local, n_remote)\n", "        pass\n"),),
        missing("ready"),
        calls="iiii",
    ),
    Mutant(
        "in place: no announcement to other nodes",
        (
            (
                "    for i in tl.range(0, n_remote, disable_licm=True):\n        tdl.signal",
                "    for i in tl.range(0, 0):\n        tdl.signal",
            ),
        ),
        missing("ready"),
        "2d",
        ranks_per_node=2,
        calls="iiii",
    ),
    Mutant(
        "in place: the receiver waits for the first chunk only",
        (("tdl.wait_signals(signals + channel * WORLD, WORLD,", "tdl.wait_signals(signals, WORLD,"),),
        WRONG,
        calls="iiii",
    ),
    Mutant(
        "in place: the caller's segment is still being read",
        (("tdl.quiet()", "pass"),),
        WRONG,
        "2d",
        ranks_per_node=2,
        calls="iiii",
    ),
    # ------------------------------------------------------------------ LL
    Mutant(
        "ll: one slot",
        (("slot = (epoch % 2) * WORLD * words", "slot = (epoch % 2) * 0"),),
        missing("flagged"),
        "ll",
        module="kernels_ll",
    ),
    Mutant(
        "ll: the flags are not looked at",
        ((f"first, second, third, arrived = {WAIT_FLAGGED}", f"{LOAD_DATA}; arrived = mask"),),
        WRONG,
        "ll",
        module="kernels_ll",
    ),
    Mutant(
        "ll: the first flag stands for all words",
        ((WAIT_FLAGGED, WAIT_FLAGGED.replace("mask", "mask & (index == 0)") + f"; {LOAD_DATA}"),),
        WRONG,
        "ll",
        module="kernels_ll",
    ),
    Mutant(
        "ll: a flag of the epoch before",
        (
            (
                "third, _flag(epoch), mask)\n        landed",
                "third, _flag(epoch - 2), mask)\n        landed",
            ),
        ),
        missing("flagged"),
        "ll",
        module="kernels_ll",
    ),
    *(
        Mutant(
            f"ll: an epoch has the flag of words that were never written, {nodes}",
            (("tl.maximum(epoch.to(tl.uint32), 1)", "epoch.to(tl.uint32)"),),
            WRONG,
            "ll",
            ranks_per_node=per_node,
            first_epoch=(1 << 32) - 1,
            module="kernels_ll",
        )
        for nodes, per_node in (("one node", None), ("two nodes", 2))
    ),
    Mutant(
        "ll: waits for the rank it sends to",
        (("frm = (rank - step + WORLD) % WORLD", "frm = to"),),
        missing("flagged"),
        "ll",
        world=(("resident", 1),),
        module="kernels_ll",
    ),
    Mutant(
        "ll: a call of no bytes hears from nobody",
        (("tl.maximum((nbytes + 11) // 12, 1)", "(nbytes + 11) // 12"),),
        missing("flagged"),
        "ll",
        calls="ozozozo",
        module="kernels_ll",
    ),
    Mutant(
        "ll: the epoch is read after it was added to",
        (),
        WRONG + "|" + missing("flagged"),
        "ll",
        module="kernels_ll",
        protocol=((READ, ""), (ADD, ADD + READ)),
    ),
    # ------------------------------------------------------------------ LL over nodes
    Mutant(
        "ll, nodes: passed on before it is there",
        (("tdl.wait_signal(row + signal, tdl.CMP_GE, epoch,", "tdl.wait_signal(row + signal, tdl.CMP_GE, 0,"),),
        WRONG,
        "ll",
        ranks_per_node=2,
        module="kernels_ll",
    ),
    Mutant(
        "ll, nodes: one slot between nodes",
        (("tl.cast(staging, tl.int64) + (epoch % 2) * WORLD * capacity", "tl.cast(staging, tl.int64)"),),
        WRONG,
        "ll",
        ranks_per_node=2,
        module="kernels_ll",
    ),
    Mutant(
        "ll, nodes: one slot of signals",
        (("row = signals + (epoch % 2) * SLOT_SIGNALS", "row = signals"),),
        WRONG,
        "ll",
        ranks_per_node=2,
        module="kernels_ll",
    ),
    Mutant(
        "ll, nodes: what comes from elsewhere is not passed on",
        (("for k in tl.range(0, n_local, disable_licm=True)", "for k in tl.range(0, tl.where(task > 0, 0, n_local))"),),
        missing("flagged"),
        "ll",
        ranks_per_node=2,
        module="kernels_ll",
    ),
    Mutant(
        "ll, nodes: those that wait for flags come first",
        (("task = (program - channels) // blocks", "task = WORLD - 1 - (program - channels) // blocks"),),
        missing("flagged"),
        "ll",
        ranks_per_node=2,
        world=(("resident", 1),),
        module="kernels_ll",
    ),
    # ------------------------------------------------------------------ direct stores
    Mutant(
        "direct: one slot",
        (("landing += (epoch % 2) * WORLD * capacity", "landing += (epoch % 2) * 0"),),
        WRONG,
        "direct",
        module="kernels_direct",
    ),
    Mutant(
        "direct: the receiver does not wait",
        (("tdl.wait_signal(row + frm, tdl.CMP_GE, epoch,", "tdl.wait_signal(row + frm, tdl.CMP_GE, 0,"),),
        WRONG,
        "direct",
        module="kernels_direct",
    ),
    Mutant(
        "direct: the signal does not order the data",
        (),
        WRONG,
        "direct",
        module="kernels_direct",
        protocol=(('tdl.st_release(theirs, epoch, "sys")', 'tdl.st(theirs, epoch, "sys")'),),
    ),
    Mutant(
        "direct: the signal orders the data for this GPU only",
        (),
        WRONG,
        "direct",
        module="kernels_direct",
        protocol=(('tdl.st_release(theirs, epoch, "sys")', 'tdl.st_release(theirs, epoch, "gpu")'),),
    ),
    Mutant(
        "direct: forgotten signal",
        (("            release(row + rank, to_delta, epoch)\n", ""),),
        missing("signals"),
        "direct",
        module="kernels_direct",
    ),
    Mutant(
        "direct, in place: a rank is written to before it has entered",
        (("tdl.wait_signal(ready + to, tdl.CMP_GE, epoch,", "tdl.wait_signal(ready + to, tdl.CMP_GE, 0,"),),
        WRONG,
        "direct",
        calls="iiii",
        module="kernels_direct",
    ),
    Mutant(
        "direct, in place: nobody says that it has entered",
        (("release(ready + rank, frm_delta, epoch)", "pass"),),
        missing("ready"),
        "direct",
        calls="iiii",
        module="kernels_direct",
    ),
    # ------------------------------------------------------------------ the ring
    Mutant(
        "ring: one slot",
        (("landing += (epoch % 2) * WORLD * capacity", "landing += (epoch % 2) * 0"),),
        WRONG,
        "ring",
        module="kernels_ring",
    ),
    Mutant(
        "ring: passed on before it is there",
        (("tdl.wait_signal(row + origin, tdl.CMP_GE, epoch,", "tdl.wait_signal(row + origin, tdl.CMP_GE, 0,"),),
        WRONG,
        "ring",
        module="kernels_ring",
    ),
    Mutant(
        "ring: passed on once the sender's own chunk is there",
        (("tdl.wait_signal(row + origin, tdl.CMP_GE, epoch,", "tdl.wait_signal(row + before, tdl.CMP_GE, epoch,"),),
        WRONG,
        "ring",
        module="kernels_ring",
    ),
    Mutant(
        "ring: the first chunk's signal stands for all",
        (("* SLOT_SIGNALS + channel * WORLD", "* SLOT_SIGNALS"),),
        WRONG,
        "ring",
        module="kernels_ring",
    ),
    Mutant(
        "ring: signal before data",
        ((f"{RING_COPY}\n{16 * ' '}{RING_RELEASE}", f"{RING_RELEASE}\n{16 * ' '}{RING_COPY}"),),
        WRONG,
        "ring",
        module="kernels_ring",
    ),
    Mutant(
        "ring: what is passed on has the sender's signal",
        ((RING_RELEASE, RING_RELEASE.replace("row + origin", "row + rank")),),
        missing("signals"),
        "ring",
        module="kernels_ring",
    ),
    Mutant(
        "ring: passed on into the slot of the calls before",
        ((RING_COPY, RING_COPY.replace("landing", "landing + (1 - 2 * (epoch % 2)) * WORLD * capacity")),),
        WRONG,
        "ring",
        module="kernels_ring",
    ),
    Mutant(
        "ring: those that wait come first",
        (("step = tl.program_id(0) % WORLD", "step = WORLD - 1 - tl.program_id(0) % WORLD"),),
        missing("signals"),
        "ring",
        calls="oioo",
        world=(("resident", 1),),
        module="kernels_ring",
    ),
    Mutant(
        "ring, in place: a rank is written to before it has entered",
        (("tdl.wait_signal(ready + after, tdl.CMP_GE, epoch,", "tdl.wait_signal(ready + after, tdl.CMP_GE, 0,"),),
        WRONG,
        "ring",
        calls="iiii",
        module="kernels_ring",
    ),
    Mutant(
        "ring, in place: the wrong rank is told of the entry",
        (("release(ready + rank, before_delta, epoch)", "release(ready + rank, after_delta, epoch)"),),
        missing("ready"),
        "ring",
        calls="iiii",
        module="kernels_ring",
    ),
    Mutant(
        "ring, in place: nobody waits for the last hop",
        (("tdl.CMP_GE, epoch, monitor, before", "tdl.CMP_GE, epoch * (step < WORLD - 1), monitor, before"),),
        WRONG,
        "ring",
        calls="iiii",
        module="kernels_ring",
    ),
]


def _load(name: str, folder: Path, source: str) -> ModuleType:
    path = folder / f"{name}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@contextmanager
def installed(mutant: Mutant, folder: Path) -> Iterator[ModuleType]:
    """Let all-gather launch the mutant's kernels."""
    name = "all_gather_mutant_" + "".join(c if c.isalnum() else "_" for c in mutant.name)
    kernels, shared = mutant.sources()
    if mutant.protocol:
        old = f"from {protocol.__name__} import"
        assert old in kernels
        kernels = kernels.replace(old, f"from {name}_protocol import")
    real = getattr(op, mutant.module)
    try:
        if mutant.protocol:
            _load(f"{name}_protocol", folder, shared)
        module = _load(name, folder, kernels)
        setattr(op, mutant.module, module)
        yield module
    finally:
        setattr(op, mutant.module, real)
        sys.modules.pop(name, None)
        sys.modules.pop(f"{name}_protocol", None)
