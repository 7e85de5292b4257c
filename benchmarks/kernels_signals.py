# SPDX-License-Identifier: Apache-2.0
"""The kernel of the benchmark of signals.

Signals count up for as long as their memory lives: because ``counter``, in device memory, holds the
last value, a replay of a captured launch continues where the one before ended. Waits are bounded
and compare with >=.
"""

import triton.language as tl

import tdcoll.language as tdl
from tdcoll.language.jit import jit


@jit
def _send(signal, address, value, pe, DIRECT: tl.constexpr):
    """Set ``signal`` of PE ``pe`` to ``value``, by the library or by a store to its ``address``."""
    if DIRECT:
        tdl.st_release(address.to(tl.pointer_type(tl.int64)), value, "sys")
    else:
        tdl.signal_block(signal, value, tdl.SIGNAL_SET, pe)


@jit(do_not_specialize=["rank", "peer", "pe", "first", "rounds"])
def ping_pong(
    signals, addresses, counter, monitor, rank, peer, pe, first, rounds, DIRECT: tl.constexpr
):
    """Send a signal there and back between two ranks, ``rounds`` times; one program on each.

    Args:
        signals: int64, one for each rank: ``signals[r]`` is written by rank r.
        addresses: int64: where ``signals[rank]`` is on each rank, for this rank's stores.
        counter: int64, this GPU's own; ``monitor``: words of the waits' monitor.
        rank, peer, pe: this rank, the other one, and its PE; ``first``: not 0 on the one that
            begins.
        DIRECT: send by stores to the peer's memory.
    """
    before = tl.load(counter)
    address = tl.load(addresses + peer)
    alive = tl.cast(1, tl.int32)
    for i in tl.range(0, rounds):
        value = before + i + 1
        if alive != 0:
            if first != 0:
                _send(signals + rank, address, value, pe, DIRECT)
            alive = tdl.wait_signal(signals + peer, tdl.CMP_GE, value, monitor, peer, peer)
            if first == 0:
                if alive != 0:
                    _send(signals + rank, address, value, pe, DIRECT)
    tl.store(counter, before + rounds)
