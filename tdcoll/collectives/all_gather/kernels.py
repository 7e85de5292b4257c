# SPDX-License-Identifier: Apache-2.0
"""All-gather kernels that push, in one dimension and in two.

Data flow, seen from rank r with a segment of ``nbytes`` bytes, cut into ``channels`` chunks of ``chunk`` bytes::

    1D   source --put+signal--> staging[slot, r] on every rank of this node
         source --> own staging --nbi put+signal--> staging[slot, r] on every rank of other nodes
    2D   source --stores--> staging[slot, r] on every rank of this node, then a release of the chunk's signal
         source --> own staging --nbi put+signal--> staging[slot, r] on r's *rail* (same place, other nodes)
         staging[slot, s] --stores--> the same on every rank of this node, for each s on r's rail, and a release
    both staging[slot, s] --copy--> out[s], for every rank s, as soon as its signal is there

In 2D a segment crosses between nodes once per node pair rather than once per rank pair. Where the ranks of a node
cannot store to each other's memory (not ``STORES``), they put + signal, as in 1D.

Signal map: ``signals[slot, channel, s]`` on rank r

- is written (SET to the epoch) by whoever delivers chunk ``channel`` of rank s to r: s itself, or in 2D the rank of
  r's node on s's rail, which forwards it;
- is polled (>= epoch) on r by the program that copies that chunk out, and in 2D on s's rail by those that forward it.

Ordering: put_signal orders a chunk's bytes before its own signal, a release the block's stores before it, and nothing
else is needed, because each chunk has a signal of its own and a forwarder has *acquired* the chunk (``wait_signal``)
before it passes it on. Inter-node puts
are nbi: their source is this rank's own staging segment, which is written next two epochs later, after the receiver
has confirmed by starting the next call (see :mod:`tdcoll.context`). So no quiet at the end.

Order of programs: first all that put to other nodes; then chunk by chunk those that put it inside the node, those that
forward it, and those that receive it. So the chunks of a large message are copied out while later ones are on their
way. A GPU starts programs in grid order, so a launch with fewer resident blocks than programs still makes progress: no
program waits for one that comes after it, on any rank.

In place (``IN_PLACE``): the caller's symmetric buffer takes the role of staging, on both sides, and nothing is copied.
``ready[p] >= epoch`` is waited for before the first write to rank p, see :mod:`tdcoll.context`; one more program, the
first of the grid, tells the others. The caller may overwrite its own segment as soon as the call is over, so the nbi
puts are completed (quiet) before the launch ends. One program per chunk waits for its signals of all ranks. Signals
alternate between the slots here too: a signal word must not be set again before the rank that polls it is done with
the epoch.

Counted (``COUNTED``, in place only): segments have room for ``nbytes`` bytes and carry fewer, as many as the 64-bit
integer at the beginning of each says; chunks are cut at the same places whatever it says, and those past it are
signalled and empty. The count of its own segment is there before the launch; that of another arrives with chunk 0, for
whose signal a 2D forwarder waits first.
"""

import triton.language as tl

import tdcoll.language as tdl
from tdcoll.collectives.protocol import begin_epoch, chunk_bytes, release
from tdcoll.language.jit import jit

__all__ = ["all_gather_1d", "all_gather_2d", "push_remote"]

_INTEGERS = [
    "source",
    "out",
    "staging",
    "nbytes",
    "chunk",
    "capacity",
    "rank",
    "channels",
    "n_local",
    "n_remote",
]


@jit
def _announce(ready, routes, epoch, rank, n_local, n_remote):
    """In place: tell every rank that writes to us that this rank has entered the call."""
    for i in tl.range(0, n_local, disable_licm=True):
        tdl.signal_block(ready + rank, epoch, tdl.SIGNAL_SET, tl.load(routes + n_local + i))
    pes = routes + 2 * n_local + n_remote
    for i in tl.range(0, n_remote, disable_licm=True):
        tdl.signal_block(ready + rank, epoch, tdl.SIGNAL_SET, tl.load(pes + i))


@jit
def _landing(staging, epoch, capacity, WORLD: tl.constexpr, IN_PLACE: tl.constexpr):
    """Address of rank 0's segment where this epoch's data lands."""
    landing = tl.cast(staging, tl.int64)
    if not IN_PLACE:
        landing += (epoch % 2) * WORLD * capacity
    return landing


@jit
def _may_write(ready, peer, epoch, monitor, IN_PLACE: tl.constexpr):
    """1 when rank ``peer`` lets its memory be written in this epoch; 0 if it did not say so in time."""
    allowed = tl.cast(1, tl.int32)
    if IN_PLACE:
        allowed = tdl.wait_signal(ready + peer, tdl.CMP_GE, epoch, monitor, peer, peer)
    return allowed


@jit
def _push_local(
    peer, pe, deltas, target, source, size, signal, epoch, ready, monitor, IN_PLACE: tl.constexpr, STORES: tl.constexpr
):  # fmt: skip
    """Give a chunk to rank ``peer``, which is on this node."""
    if _may_write(ready, peer, epoch, monitor, IN_PLACE) != 0:
        if STORES:
            delta = tl.load(deltas + peer)
            tdl.copy_block(target + delta, source, size)
            release(signal, delta, epoch)
        else:
            tdl.putmem_signal_block(target, source, size, signal, epoch, tdl.SIGNAL_SET, pe)


@jit
def _n_senders(n_remote, IN_PLACE: tl.constexpr):
    """Programs per channel that put to other nodes: one that stages the chunk once, or in place one per rank."""
    if IN_PLACE:
        n_senders = n_remote
    else:
        n_senders = (n_remote > 0).to(tl.int32)
    return n_senders


@jit
def _task(channels, n_senders, n_pushes, WORLD: tl.constexpr, IN_PLACE: tl.constexpr):
    """``(program, channel, given)``: which chunk this program is for, and what it does with it.

    ``program`` counts from -1, the announcer, in place. ``given`` is negative for senders to other nodes; then come
    ``n_pushes`` that put inside this node; then receivers.
    """
    program = tl.program_id(0)
    per_chunk = n_pushes
    if IN_PLACE:
        program -= 1
        per_chunk += 1
    else:
        per_chunk += WORLD
    inside = program - n_senders * channels
    if inside < 0:
        channel = program % channels
        given = program // channels - n_senders
    else:
        channel = inside // per_chunk
        given = inside % per_chunk
    return program, channel, given


@jit
def push_remote(i, routes, n_remote, staged, source, size, signal, epoch, ready, monitor, IN_PLACE: tl.constexpr):
    """Put a chunk from symmetric memory to the ranks of ``routes``, which are on other nodes; in place to the i-th."""
    if IN_PLACE:
        peer = tl.load(routes + i)
        pe = tl.load(routes + n_remote + i)
        if _may_write(ready, peer, epoch, monitor, IN_PLACE) != 0:
            tdl.putmem_signal_nbi_block(staged, staged, size, signal, epoch, tdl.SIGNAL_SET, pe)
            tdl.quiet()
    else:
        tdl.copy_block(staged, source, size)
        tdl.syncthreads()
        for k in tl.range(0, n_remote, disable_licm=True):
            pe = tl.load(routes + n_remote + k)
            tdl.putmem_signal_nbi_block(staged, staged, size, signal, epoch, tdl.SIGNAL_SET, pe)


@jit
def _used_bytes(segment, nbytes, COUNTED: tl.constexpr):
    """Bytes that the segment at address ``segment`` carries."""
    used = tl.cast(nbytes, tl.int64)
    if COUNTED:
        used = tl.minimum(tl.load(tl.cast(segment, tl.int64).to(tl.pointer_type(tl.int64))), used)
    return used


@jit
def _receive(
    i, channel, source, out, landing, capacity, nbytes, chunk, signals, epoch, rank, monitor,
    WORLD: tl.constexpr, BLOCK: tl.constexpr, IN_PLACE: tl.constexpr
):  # fmt: skip
    """Copy out the chunk of the i-th rank after this one, or, in place, wait for that chunk of all ranks."""
    if IN_PLACE:
        tdl.wait_signals(signals + channel * WORLD, WORLD, rank, tdl.CMP_GE, epoch, monitor, BLOCK)
    else:
        peer = (rank + i) % WORLD
        offset = tl.cast(channel, tl.int64) * chunk
        size = chunk_bytes(nbytes, chunk, channel)
        target = out + tl.cast(peer, tl.int64) * nbytes + offset
        if peer == rank:
            tdl.copy_block(target, source + offset, size)
        else:
            signal = channel * WORLD + peer
            if tdl.wait_signal(signals + signal, tdl.CMP_GE, epoch, monitor, peer, signal) != 0:
                tdl.copy_block(target, landing + tl.cast(peer, tl.int64) * capacity + offset, size)


@jit(do_not_specialize=_INTEGERS)
def all_gather_1d(
    source, out, staging, signals, ready, control, monitor, routes,
    nbytes, chunk, capacity, rank, channels, n_local, n_remote,
    WORLD: tl.constexpr, BLOCK: tl.constexpr, SLOT_SIGNALS: tl.constexpr, IN_PLACE: tl.constexpr,
    COUNTED: tl.constexpr = False,
):  # fmt: skip
    """``[nbytes] -> [WORLD * nbytes]``: every rank puts its segment to every other.

    Programs: ``channels`` times one remote sender if n_remote > 0, then ``channels`` times (n_local pushes, WORLD
    receivers); in place an announcer first, n_remote remote senders per channel, and one receiver per channel.

    Args (addresses are integers, so that one compilation serves all dtypes and alignments):
        source: this rank's segment, ``nbytes`` bytes. In place: that segment of the buffer.
        out: the result, ``WORLD * nbytes`` bytes, any memory of this GPU. Not used in place.
        staging: two slots of ``WORLD * capacity`` bytes. In place: the symmetric buffer, ``WORLD * nbytes``.
        signals: int64 pointer to two slots of ``SLOT_SIGNALS`` signals, of which ``[channels, WORLD]`` are used.
        ready: int64 pointer to ``WORLD`` signals.
        control, monitor: the context's words.
        routes: int32: n_local group ranks of this node, their PEs, n_remote group ranks elsewhere, their PEs.
        chunk: bytes of a chunk, a multiple of 16.
        capacity: bytes from one rank's segment to the next in a slot. In place: ``nbytes``.
        BLOCK: a power of two of at least WORLD.
    """
    n_senders = _n_senders(n_remote, IN_PLACE)
    program, channel, given = _task(channels, n_senders, n_local, WORLD, IN_PLACE)
    # Read before the epoch is: both take their time.
    mate = tl.minimum(tl.maximum(given, 0), tl.maximum(n_local - 1, 0))
    peer = tl.load(routes + mate)
    pe = tl.load(routes + n_local + mate)
    epoch, alive = begin_epoch(control, monitor)
    if alive == 0:
        return
    if program < 0:
        _announce(ready, routes, epoch, rank, n_local, n_remote)
    else:
        size = chunk_bytes(_used_bytes(source, nbytes, COUNTED), chunk, channel)
        offset = tl.cast(channel, tl.int64) * chunk
        row = signals + (epoch % 2) * SLOT_SIGNALS
        landing = _landing(staging, epoch, capacity, WORLD, IN_PLACE)
        if given < n_local:
            mine = landing + tl.cast(rank, tl.int64) * capacity + offset
            signal = row + channel * WORLD + rank
            if given >= 0:
                _push_local(peer, pe, 0, mine, source + offset, size, signal, epoch, ready, monitor, IN_PLACE, False)
            else:
                elsewhere = routes + 2 * n_local
                push_remote(
                    given + n_senders, elsewhere, n_remote, mine, source + offset, size, signal, epoch, ready, monitor,
                    IN_PLACE
                )  # fmt: skip
        else:
            _receive(
                given - n_local, channel, source, out, landing, capacity, nbytes, chunk,
                row, epoch, rank, monitor, WORLD, BLOCK, IN_PLACE
            )  # fmt: skip


@jit(do_not_specialize=_INTEGERS)
def all_gather_2d(
    source, out, staging, signals, ready, control, monitor, routes, deltas,
    nbytes, chunk, capacity, rank, channels, n_local, n_remote,
    WORLD: tl.constexpr, BLOCK: tl.constexpr, SLOT_SIGNALS: tl.constexpr, IN_PLACE: tl.constexpr,
    COUNTED: tl.constexpr = False, STORES: tl.constexpr = False,
):  # fmt: skip
    """``[nbytes] -> [WORLD * nbytes]``: between nodes along rails, then forwarded inside each node.

    Programs: ``channels`` times one rail sender if n_remote > 0, then ``channels`` times (n_local pushes, n_remote *
    n_local forwarders, WORLD receivers); in place an announcer first, n_remote rail senders per channel, and one
    receiver per channel. Every node has ``n_local + 1`` ranks.

    Args: those of :func:`all_gather_1d`, except
        routes: names as remote ranks only this rank's rail: one per other node.
        deltas: int64 ``[WORLD]``: from an address in this rank's symmetric memory to the same in each of its node's.
        STORES: whether they can be stored to.
    """
    n_senders = _n_senders(n_remote, IN_PLACE)
    n_forwards = n_remote * n_local
    program, channel, given = _task(channels, n_senders, n_local + n_forwards, WORLD, IN_PLACE)
    # Read before the epoch is: both take their time.
    mate = tl.maximum(given, 0) % tl.maximum(n_local, 1)
    peer = tl.load(routes + mate)
    pe = tl.load(routes + n_local + mate)
    epoch, alive = begin_epoch(control, monitor)
    if alive == 0:
        return
    if program < 0:
        _announce(ready, routes, epoch, rank, n_local, n_remote)
    else:
        size = chunk_bytes(_used_bytes(source, nbytes, COUNTED), chunk, channel)
        offset = tl.cast(channel, tl.int64) * chunk
        row = signals + (epoch % 2) * SLOT_SIGNALS + channel * WORLD
        landing = _landing(staging, epoch, capacity, WORLD, IN_PLACE)
        elsewhere = routes + 2 * n_local
        if given < 0:
            mine = landing + tl.cast(rank, tl.int64) * capacity + offset
            push_remote(
                given + n_senders, elsewhere, n_remote, mine, source + offset, size, row + rank, epoch, ready, monitor,
                IN_PLACE
            )  # fmt: skip
        elif given < n_local + n_forwards:
            # Its own segment, and those of its rail, as they arrive.
            origin = rank
            chunk_at = source + offset
            arrived = tl.cast(1, tl.int32)
            if given >= n_local:
                origin = tl.load(elsewhere + given // n_local - 1)
                segment = landing + tl.cast(origin, tl.int64) * capacity
                chunk_at = segment + offset
                index = channel * WORLD + origin
                if COUNTED:
                    first = row - channel * WORLD + origin
                    arrived = tdl.wait_signal(first, tdl.CMP_GE, epoch, monitor, origin, origin)
                if arrived != 0:
                    arrived = tdl.wait_signal(row + origin, tdl.CMP_GE, epoch, monitor, origin, index)
                if arrived != 0:
                    size = chunk_bytes(_used_bytes(segment, nbytes, COUNTED), chunk, channel)
            if arrived != 0:
                target = landing + tl.cast(origin, tl.int64) * capacity + offset
                _push_local(
                    peer, pe, deltas, target, chunk_at, size, row + origin, epoch, ready, monitor, IN_PLACE, STORES
                )  # fmt: skip
        else:
            _receive(
                given - n_local - n_forwards, channel, source, out, landing, capacity, nbytes, chunk,
                row - channel * WORLD, epoch, rank, monitor, WORLD, BLOCK, IN_PLACE
            )  # fmt: skip
