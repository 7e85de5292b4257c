# SPDX-License-Identifier: Apache-2.0
"""The all-gather kernels with one protection switched off: what the simulator must catch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kernel_mutants import Change


@dataclass(frozen=True)
class Mutant:
    """One protection less.

    Attributes:
        name: what is missing.
        changes: to the kernels, or to device functions that they call.
        expect: regular expression that the failure's report must match: what goes wrong, and not just that it does.
        algorithm: whose kernel shows it.
        n_pes: ranks of the job.
        ranks_per_node: as for ``World``.
        calls, first_epoch: as for ``Gathers``.
        world: further arguments of ``World``.
    """

    name: str
    changes: tuple[Change, ...]
    expect: str
    algorithm: str = "1d"
    n_pes: int = 4
    ranks_per_node: int | None = None
    calls: str = "oooo"
    first_epoch: int = 1
    world: tuple[tuple[str, Any], ...] = ()

    @property
    def job(self) -> dict[str, Any]:
        """Arguments of ``World``."""
        return {"n_pes": self.n_pes, "ranks_per_node": self.ranks_per_node, **dict(self.world)}


WRONG = r"AssertionError: rank \d+, call \d+ \([oi]\): \d+ wrong bytes"


def missing(signal: str) -> str:
    """A deadlock in which somebody waits for this array of signals."""
    return rf"[Dd]eadlock[\s\S]*waits for pe\d+\.{signal}\["


def to(where: str, old: str, new: str) -> tuple[Change, ...]:
    """One change."""
    return (Change(where, old, new),)


def at_once(where: str, wait: str) -> tuple[Change, ...]:
    """A wait for the epoch that waits for nothing."""
    return to(where, wait, wait.replace("epoch", "0"))


PUT_LOCAL = "tdl.putmem_signal_block(target, source, nbytes, signal, value, tdl.SIGNAL_SET, pe)"
PUT_REMOTE = "tdl.putmem_signal_nbi_block(staged, staged, nbytes, signal, epoch, tdl.SIGNAL_SET, pe)"
PUT_REMOTE_DATA = "tdl.putmem_nbi_block(staged, staged, nbytes, pe)"
STORE = "tdl.copy_block(target + delta, source, nbytes)"
RELEASE = "release(signal, signal_delta, value)"
MAY_WRITE = "tdl.wait_signal(g.entered + peer, tdl.CMP_GE, epoch, g.monitor, peer, peer)"
FORWARDED = "tdl.wait_signal(signals + origin, tdl.CMP_GE, epoch, g.monitor, origin, index)"
RECEIVED = "tdl.wait_signal(signals + peer, tdl.CMP_GE, epoch, g.monitor, peer, channel * g.world + peer)"
RING_WAIT = "tdl.wait_signal(signals + origin, tdl.CMP_GE, epoch, g.monitor, before, index)"
RING_PUSH = "stores.push(landing, held, size, after_delta, signals + origin, after_signal_delta, epoch)"
ADD = 'tl.atomic_add(control, share.to(tl.int64), sem="relaxed", scope="gpu")'
READ = 'word = tdl.ld(control, "gpu", "relaxed")'
FLAGGED = "tdl.wait_flagged(landed, flag(epoch), mask, g.monitor, origin)"
LOAD_WORDS = (
    "part = landed.to(tl.pointer_type(tl.int32))\n"
    "first = tl.load(part, mask=mask, other=0)\n"
    "second = tl.load(part + 1, mask=mask, other=0)\n"
    "third = tl.load(part + 2, mask=mask, other=0)\n"
)
READ_LATE = (*to("group.begin_epoch", READ, "pass"), *to("group.begin_epoch", ADD, f"{ADD}\n{READ}"))

MUTANTS = [
    # ------------------------------------------------------------------ slots and signals
    Mutant("one slot", to("group.slot", "epoch % 2", "epoch * 0"), WRONG),
    Mutant("one row of signals", to("group.row", "slot(epoch)", "0"), WRONG),
    Mutant(
        "no fence between data and signal",
        # Without the fence that signal_block has.
        to(
            "puts.push",
            PUT_LOCAL,
            "tdl.putmem_block(target, source, nbytes, pe)\ntdl.signal_op(signal, value, tdl.SIGNAL_SET, pe)",
        ),
        WRONG,
    ),
    Mutant(
        "signal before data",
        to(
            "puts.push",
            PUT_LOCAL,
            "tdl.signal_block(signal, value, tdl.SIGNAL_SET, pe)\ntdl.fence()\n"
            "tdl.putmem_block(target, source, nbytes, pe)",
        ),
        WRONG,
    ),
    Mutant(
        "forgotten signal",
        to("puts.push", PUT_LOCAL, "tdl.putmem_block(target, source, nbytes, pe)"),
        missing("signals"),
    ),
    Mutant(
        "signal of the epoch before",
        to("puts.push", PUT_LOCAL, PUT_LOCAL.replace("value", "value - 2")),
        missing("signals"),
    ),
    Mutant("the receiver does not wait", at_once("kernels_puts._receive", RECEIVED), WRONG),
    Mutant(
        "the receiver waits for the first chunk only",
        to("kernels_puts._receive", "row(g, epoch, channel)", "row(g, epoch, 0)"),
        WRONG,
    ),
    Mutant(
        "the second chunk has the signal of the first",
        to("kernels_puts.all_gather_1d", "row(g, epoch, channel)", "row(g, epoch, 0)"),
        missing("signals"),
    ),
    Mutant(
        "receivers before senders",
        to("kernels_puts._task", "inside % per_chunk", "per_chunk - 1 - inside % per_chunk"),
        missing("signals"),
        world=(("resident", 1),),
    ),
    # ------------------------------------------------------------------ the epoch
    Mutant("the epoch is read after it was added to", READ_LATE, WRONG + "|" + missing("signals")),
    Mutant(
        "the epoch is raised by the first program",
        (
            *to("group.begin_epoch", "share = _EPOCH // programs", "share = _EPOCH * (program == 0)"),
            *to("group.begin_epoch", "share = _EPOCH - share * (programs - 1)", "pass"),
        ),
        WRONG + "|" + missing("signals"),
    ),
    Mutant("the epoch is not raised", to("group.begin_epoch", ADD, "pass"), WRONG),
    # ------------------------------------------------------------------ between nodes
    *(
        Mutant(
            f"remote, {algorithm}: signal before data",
            to(
                "puts.push_remote",
                PUT_REMOTE,
                f"tdl.signal_block(signal, epoch, tdl.SIGNAL_SET, pe)\ntdl.fence()\n{PUT_REMOTE_DATA}",
            ),
            WRONG,
            algorithm,
            ranks_per_node=2,
        )
        for algorithm in ("1d", "2d")
    ),
    Mutant(
        "remote: no data",
        to("puts.push_remote", PUT_REMOTE, "tdl.signal_block(signal, epoch, tdl.SIGNAL_SET, pe)"),
        WRONG,
        ranks_per_node=2,
    ),
    Mutant(
        "remote: no signal",
        to("puts.push_remote", PUT_REMOTE, PUT_REMOTE_DATA),
        missing("signals"),
        ranks_per_node=2,
    ),
    Mutant(
        "remote: nothing in the slot to send from",
        to("puts.push_remote", "tdl.copy_block(staged, source, nbytes)", "pass"),
        WRONG,
        ranks_per_node=2,
    ),
    Mutant(
        "2d: the forwarder does not wait",
        at_once("kernels_puts.all_gather_2d", FORWARDED),
        WRONG,
        "2d",
        ranks_per_node=2,
    ),
    Mutant(
        "2d: inside the node the signal goes before the data",
        to("stores.push", f"{STORE}\n{RELEASE}", f"{RELEASE}\n{STORE}"),
        WRONG,
        "2d",
        ranks_per_node=2,
    ),
    Mutant(
        "2d: nobody of the node is told",
        to("stores.push", RELEASE, "pass"),
        missing("signals"),
        "2d",
        ranks_per_node=2,
    ),
    # ------------------------------------------------------------------ in place
    *(
        Mutant(
            f"in place, {algorithm}: a rank is written to before it has entered",
            at_once("stores.may_write", MAY_WRITE),
            WRONG,
            algorithm,
            calls="iiii",
        )
        for algorithm in ("1d", "direct", "ring")
    ),
    Mutant(
        "in place, 2d: a rank of this node is written to before it has entered",
        to("kernels_puts._push_local", "stores.may_write(g, window, peer, epoch)", "1"),
        WRONG,
        "2d",
        ranks_per_node=2,
        calls="iiii",
    ),
    Mutant(
        "in place, 2d: a rank of another node is written to before it has entered",
        to("puts.push_remote", "may_write(g, window, peer, epoch)", "1"),
        WRONG,
        "2d",
        ranks_per_node=2,
        calls="iiii",
    ),
    Mutant(
        "in place: no announcement",
        to("kernels_puts.all_gather_1d", "puts.say_entered(g, routes, epoch)", "pass"),
        missing("ready"),
        calls="iiii",
    ),
    Mutant(
        "in place: no announcement to other nodes",
        to("puts.say_entered", "tl.range(0, routes.n_remote, disable_licm=True)", "tl.range(0, 0)"),
        missing("ready"),
        "2d",
        ranks_per_node=2,
        calls="iiii",
    ),
    Mutant(
        "in place: the receiver waits for the first chunk only",
        to("kernels_puts._receive", "row(g, epoch, channel)", "row(g, epoch, 0)"),
        WRONG,
        calls="iiii",
    ),
    Mutant(
        "in place: the caller's segment is still being read",
        to("puts.push_remote", "tdl.quiet()", "pass"),
        WRONG,
        "2d",
        ranks_per_node=2,
        calls="iiii",
    ),
    # ------------------------------------------------------------------ LL
    Mutant("ll: one slot", to("group.slot", "epoch % 2", "epoch * 0"), missing("flagged"), "ll"),
    Mutant(
        "ll: the flags are not looked at",
        to("ll.receive", f"return {FLAGGED}", f"{LOAD_WORDS}return first, second, third, mask"),
        WRONG,
        "ll",
    ),
    Mutant(
        "ll: the first flag stands for all words",
        to(
            "ll.receive",
            f"return {FLAGGED}",
            f"first, second, third, arrived = {FLAGGED.replace('mask', 'mask & (word == 0)')}\n"
            f"{LOAD_WORDS}return first, second, third, arrived",
        ),
        WRONG,
        "ll",
    ),
    Mutant("ll: a flag of the epoch before", to("ll.send", "flag(epoch)", "flag(epoch - 2)"), missing("flagged"), "ll"),
    *(
        Mutant(
            f"ll: an epoch has the flag of words that were never written, {nodes}",
            to("ll.flag", "tl.maximum(epoch.to(tl.uint32), 1)", "epoch.to(tl.uint32)"),
            WRONG,
            "ll",
            ranks_per_node=per_node,
            first_epoch=(1 << 32) - 1,
        )
        for nodes, per_node in (("one node", None), ("two nodes", 2))
    ),
    Mutant(
        "ll: waits for the rank it sends to",
        to("exchange.kernels_ll.exchange_ll", "(g.rank - step + g.world) % g.world", "to"),
        missing("flagged"),
        "ll",
        world=(("resident", 1),),
    ),
    Mutant(
        "ll: a call of no bytes hears from nobody",
        to("ll.carry", "tl.maximum((nbytes + 11) // 12, 1)", "(nbytes + 11) // 12"),
        missing("flagged"),
        "ll",
        calls="ozozozo",
    ),
    Mutant("ll: the epoch is read after it was added to", READ_LATE, WRONG + "|" + missing("flagged"), "ll"),
    # ------------------------------------------------------------------ LL over nodes
    Mutant(
        "ll, nodes: passed on before it is there",
        at_once(
            "kernels_puts.all_gather_ll_2d",
            "tdl.wait_signal(signal, tdl.CMP_GE, epoch, g.monitor, origin, channel * g.world + origin)",
        ),
        WRONG,
        "ll",
        ranks_per_node=2,
    ),
    Mutant(
        "ll, nodes: one slot between nodes",
        to("kernels_puts.all_gather_ll_2d", "segment(window, g, epoch, origin)", "segment(window, g, 0, origin)")
        + to("kernels_puts.all_gather_ll_2d", "segment(window, g, epoch, g.rank)", "segment(window, g, 0, g.rank)"),
        WRONG,
        "ll",
        ranks_per_node=2,
    ),
    Mutant(
        "ll, nodes: one slot of signals",
        to("group.row", "slot(epoch)", "0"),
        WRONG,
        "ll",
        ranks_per_node=2,
    ),
    Mutant(
        "ll, nodes: what comes from elsewhere is not passed on",
        to(
            "kernels_puts.all_gather_ll_2d",
            "tl.range(0, routes.n_local, disable_licm=True)",
            "tl.range(0, tl.where(task > 0, 0, routes.n_local))",
        ),
        missing("flagged"),
        "ll",
        ranks_per_node=2,
    ),
    Mutant(
        "ll, nodes: those that wait for flags come first",
        to(
            "kernels_puts.all_gather_ll_2d",
            "task = (program - channels) // blocks",
            "task = g.world - 1 - (program - channels) // blocks",
        ),
        missing("flagged"),
        "ll",
        ranks_per_node=2,
        world=(("resident", 1),),
    ),
    # ------------------------------------------------------------------ direct stores
    Mutant("direct: one slot", to("group.segment", "slot(epoch)", "0"), WRONG, "direct"),
    Mutant(
        "direct: the receiver does not wait",
        at_once(
            "exchange.kernels_direct.exchange_direct",
            "tdl.wait_signal(signals + frm, tdl.CMP_GE, epoch, g.monitor, frm, channel * g.world + frm)",
        ),
        WRONG,
        "direct",
    ),
    Mutant(
        "direct: the signal does not order the data",
        to("stores.release", 'tdl.st_release(theirs, value, "sys")', 'tdl.st(theirs, value, "sys")'),
        WRONG,
        "direct",
    ),
    Mutant(
        "direct: the signal orders the data for this GPU only",
        to("stores.release", 'tdl.st_release(theirs, value, "sys")', 'tdl.st_release(theirs, value, "gpu")'),
        WRONG,
        "direct",
    ),
    Mutant("direct: forgotten signal", to("stores.push", RELEASE, "pass"), missing("signals"), "direct"),
    Mutant(
        "direct, in place: nobody says that it has entered",
        to("exchange.kernels_direct.exchange_direct", "stores.say_entered(g, frm_signal_delta, epoch)", "pass"),
        missing("ready"),
        "direct",
        calls="iiii",
    ),
    # ------------------------------------------------------------------ the ring
    Mutant("ring: one slot", to("group.segment", "slot(epoch)", "0"), WRONG, "ring"),
    Mutant("ring: passed on before it is there", at_once("kernels_ring.all_gather_ring", RING_WAIT), WRONG, "ring"),
    Mutant(
        "ring: passed on once the sender's own chunk is there",
        to("kernels_ring.all_gather_ring", RING_WAIT, RING_WAIT.replace("signals + origin", "signals + before")),
        WRONG,
        "ring",
    ),
    Mutant(
        "ring: the first chunk's signal stands for all",
        to("kernels_ring.all_gather_ring", "row(g, epoch, channel)", "row(g, epoch, 0)"),
        WRONG,
        "ring",
    ),
    Mutant(
        "ring: signal before data",
        to("stores.push", f"{STORE}\n{RELEASE}", f"{RELEASE}\n{STORE}"),
        WRONG,
        "ring",
    ),
    Mutant(
        "ring: what is passed on has the sender's signal",
        to("kernels_ring.all_gather_ring", RING_PUSH, RING_PUSH.replace("signals + origin", "signals + g.rank")),
        missing("signals"),
        "ring",
    ),
    Mutant(
        "ring: passed on into the slot of the calls before",
        to(
            "kernels_ring.all_gather_ring",
            RING_PUSH,
            RING_PUSH.replace("landing", "segment(window, g, epoch + 1, origin) + offset"),
        ),
        WRONG,
        "ring",
    ),
    Mutant(
        "ring: those that wait come first",
        to(
            "kernels_ring.all_gather_ring",
            "step = tl.program_id(0) % g.world",
            "step = g.world - 1 - tl.program_id(0) % g.world",
        ),
        missing("signals"),
        "ring",
        calls="oioo",
        world=(("resident", 1),),
    ),
    Mutant(
        "ring, in place: the wrong rank is told of the entry",
        to(
            "kernels_ring.all_gather_ring",
            "stores.say_entered(g, before_signal_delta, epoch)",
            "stores.say_entered(g, after_signal_delta, epoch)",
        ),
        missing("ready"),
        "ring",
        calls="iiii",
    ),
    Mutant(
        "ring, in place: nobody waits for the last hop",
        to(
            "kernels_ring.all_gather_ring",
            RING_WAIT,
            RING_WAIT.replace("epoch", "epoch * (step < g.world - 1)"),
        ),
        WRONG,
        "ring",
        calls="iiii",
    ),
]
