# SPDX-License-Identifier: Apache-2.0
"""Counters of tiles on this GPU: who is the last to contribute to a tile, and which tiles are ready.

For kernels whose programs hand pieces of work to each other by the thousand, such as those of a matmul whose tiles are
sent while others are computed. There are two ways for a program to hear from others of its GPU::

    contributors  --arrive(tile)-->   the last of them goes on with all that they have stored; nobody waits
    one program   --publish(tile)-->  any number of programs go on that wait_tile(tile)

**The last one.** Each contributor of a tile adds 1 to its count, and the one that makes it complete is told so. It also
sets the count back to 0: nobody else touches it any more in this call, so the next one, which may have other tiles and
other numbers of contributors, begins with zeros. Nothing comes from the host, so a CUDA graph may be replayed at will.

**Ready.** ``ready[tile]`` is the last epoch in which the tile was published. It is never set back: an earlier call's
value is too small, and a wait for at least the epoch is right also where a later call has published the tile again.

Ordering. :func:`arrive` is a release and an acquire at GPU scope: the stores of all contributors, threads and programs
alike, come before what the last one does. If that is a release at system scope, as in
:func:`tdcoll.primitives.stores.release`, a peer sees the stores of all of them. :func:`publish` releases and
:func:`wait_tile` acquires.

Order of programs is the kernel's matter: who waits for a tile must come after those that make it.
"""

from typing import Any, NamedTuple

import triton.language as tl

import tdcoll.language as tdl
from tdcoll.language.jit import jit

__all__ = ["Tiles", "arrive", "publish", "wait_tile"]


class Tiles(NamedTuple):
    """Counters as kernels see them: ``ctx.device_tiles``.

    Attributes:
        counts: int32 ``[tiles]``: how many have arrived in this call; 0 between calls.
        ready: int64 ``[tiles]``: the last epoch that has published the tile. :func:`wait_tile` is a ``wait_signal`` on
            it; loops that Triton is to pipeline take ``wait_token`` instead.
    """

    counts: Any
    ready: Any


@jit
def arrive(tiles, tile, arrivals):
    """1 for the last of the ``arrivals`` programs of a tile in this call, else 0; the same in all threads.

    ``arrivals`` must be the same in all of them, and each calls once. What a program has stored before it calls, the
    last one sees.
    """
    tdl.syncthreads()
    before = tl.atomic_add(tiles.counts + tile, 1, sem="acq_rel", scope="gpu")
    last = tdl.block_and(before == arrivals - 1)
    if last != 0:
        tl.store(tiles.counts + tile, 0)
    return last


@jit
def publish(tiles, tile, epoch):
    """Let programs go on that wait for a tile in this call: the block's stores so far come before."""
    tdl.syncthreads()
    if tdl.tid(0) == 0:
        tdl.st_release(tiles.ready + tile, epoch, "gpu")


@jit
def wait_tile(g, tiles, tile, epoch):
    """1 once a tile has been published in this call; 0 if the deadline has passed before. Names this rank as the peer
    and the tile as the signal."""
    return tdl.wait_signal(tiles.ready + tile, tdl.CMP_GE, epoch, g.monitor, g.rank, tile)
