# SPDX-License-Identifier: Apache-2.0
"""All-gather of small messages: every word carries its own flag (LL), inside nodes.

Data flow in one node, seen from rank r::

    source --{data, data, data, flag} words, direct stores--> flagged[slot, r] on every other rank of this node
    flagged[slot, s] --data--> out[s], for every other rank s;  source --> out[r]

A put with a signal crosses NVLink three times: the data, their acknowledgement (the signal may not overtake them),
the signal. Here a 128-bit word, which arrives whole, holds 96 bits of data and the low 32 bits of the epoch, so data
and flag cross together, once, at 4/3 of the bytes. NCCL has two such protocols: LL, whose words are of 64 bits, half of
them flag, and LL128, whose words are the 128 bytes that a warp stores at once.

Flag map: ``flagged[slot, s, i]`` on rank r is written by rank s only, by one 128-bit store per epoch, and polled on r
by one program. The words are used by nothing else, so what is in them is always a flag of this context: of this epoch,
or of an earlier one of the same slot. It is never a later one, because r has then said that it is done with this one:
so flags are compared for equality. (2^32 calls later a flag comes again. A word would have to be skipped by all calls
in between for it to be mistaken.) A word that was never written holds zeros, so 0 is no flag: epochs 2^32 k have flag 1
instead (:func:`_flag`). They are even, and so are all other epochs of their slot with their flags: none of those is 1.

Ordering: none is relied on, except that an aligned 128-bit store (``st.relaxed.sys.b128``, PTX ISA 8.4) is single, as
is the load that polls it. Reuse of a slot is what :mod:`tdcoll.context` says: a rank that has all words of epoch e
knows that everybody has started e. A call of no bytes sends one word all the same.

Order of programs: program i of every rank sends to its i-th successor and then waits for its i-th predecessor, whose
program i sends to it: no program waits for one of another index, so any number of resident blocks makes progress.

Several nodes, all of one size: along *rails* (same place, other nodes) go puts with signals, as in 2D, since between
nodes nobody can store; inside the node, whatever comes from there and what is the rank's own goes on as flagged words::

    source --> own staging --nbi put+signal--> staging[slot, r] on r's rail, in chunks of several programs' words
    source --{data.., flag}--> flagged[slot, r] on every other rank of this node;  source --> out[r]
    staging[slot, s] --{data.., flag}--> flagged[slot, s] there, for each s on r's rail;  staging[slot, s] --> out[s]
    flagged[slot, s] --data--> out[s], for every other rank s

``signals[slot, chunk, s]`` is set to the epoch by s, and polled by the programs whose words that chunk holds;
``flagged[slot, s]`` is written by s, or by the rank of this node on s's rail. Programs: first those that put, then
those that store, then those that wait for flags: none waits for a later one, on any rank.
"""

import triton.language as tl

import tdcoll.language as tdl
from tdcoll.collectives.all_gather.kernels import push_remote
from tdcoll.collectives.protocol import begin_epoch, chunk_bytes
from tdcoll.language.jit import jit

__all__ = ["all_gather_ll", "all_gather_ll_2d"]


@jit
def _load_words(source, index, nbytes):
    """32-bit words ``index`` of ``nbytes`` bytes at ``source``, zeros past the end; all zeros unless both are multiples
    of 4. Without a branch, so that nobody waits for it before the data is needed."""
    mask = (index < nbytes // 4) & ((source | nbytes) % 4 == 0)
    return tl.load(source.to(tl.pointer_type(tl.int32)) + index, mask=mask, other=0)


@jit
def _load_bytes(source, index, nbytes):
    """:func:`_load_words` for any alignment and number of bytes."""
    words = tl.zeros_like(index)
    pointer = source.to(tl.pointer_type(tl.uint8))
    for byte in tl.static_range(4):
        place = index * 4 + byte
        words |= tl.load(pointer + place, mask=place < nbytes, other=0).to(tl.int32) << (8 * byte)
    return words


@jit
def _store_words(out, index, nbytes, words, mask):
    """Words ``index``, where ``mask`` is true, to ``nbytes`` bytes at ``out``, any alignment; none past the end."""
    if (out | nbytes) % 4 == 0:
        tl.store(out.to(tl.pointer_type(tl.int32)) + index, words, mask=mask & (index < nbytes // 4))
    else:
        pointer = out.to(tl.pointer_type(tl.uint8))
        for byte in tl.static_range(4):
            place = index * 4 + byte
            tl.store(pointer + place, ((words >> (8 * byte)) & 0xFF).to(tl.uint8), mask=mask & (place < nbytes))


@jit
def _load_data(source, word, nbytes):
    """What the 128-bit words ``word`` carry, three 32-bit words each, where all is aligned: see :func:`_repair`."""
    first = _load_words(source, 3 * word, nbytes)
    second = _load_words(source, 3 * word + 1, nbytes)
    third = _load_words(source, 3 * word + 2, nbytes)
    return first, second, third


@jit
def _repair(source, word, nbytes, first, second, third):
    """What :func:`_load_data` gave, loaded anew if that was not aligned."""
    if (source | nbytes) % 4 != 0:
        first = _load_bytes(source, 3 * word, nbytes)
        second = _load_bytes(source, 3 * word + 1, nbytes)
        third = _load_bytes(source, 3 * word + 2, nbytes)
    return first, second, third


@jit
def _store_data(out, word, nbytes, first, second, third, mask):
    """The inverse of :func:`_load_data`, for any alignment, where ``mask`` is true."""
    _store_words(out, 3 * word, nbytes, first, mask)
    _store_words(out, 3 * word + 1, nbytes, second, mask)
    _store_words(out, 3 * word + 2, nbytes, third, mask)


@jit
def _carry(word, nbytes):
    """Which of the 128-bit words carry something. One does in a call of no bytes: every call hears from every peer."""
    return word < tl.maximum((nbytes + 11) // 12, 1)


@jit
def _flag(epoch):
    """The flag of an epoch: its low 32 bits, or 1 where they are 0."""
    return tl.maximum(epoch.to(tl.uint32), 1).to(tl.int32)


@jit(do_not_specialize=["source", "out", "flagged", "nbytes", "words", "rank", "chunks"])
def all_gather_ll(
    source, out, flagged, peers, control, monitor, nbytes, words, rank, chunks,
    WORLD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``[nbytes] -> [WORLD * nbytes]`` inside one node. Programs: ``WORLD * chunks``.

    Args (addresses are integers, so that one compilation serves all dtypes and alignments):
        source, out: as for ``all_gather_1d``.
        flagged: this rank's two slots of ``WORLD * words`` 128-bit words.
        peers: int64, address of each rank's ``flagged``.
        words: words from one rank's segment to the next; at least ``ceil(nbytes / 12)`` and 1.
        chunks: programs per peer, of ``BLOCK`` words each.
    """
    chunk = tl.program_id(0) % chunks
    step = tl.program_id(0) // chunks
    to = (rank + step) % WORLD
    frm = (rank - step + WORLD) % WORLD
    theirs = tl.load(peers + to)
    size = tl.cast(nbytes, tl.int32)
    index = chunk * BLOCK + tl.arange(0, BLOCK)
    first, second, third = _load_data(tl.cast(source, tl.int64), index, size)
    epoch, alive = begin_epoch(control, monitor)
    if alive == 0:
        return
    first, second, third = _repair(tl.cast(source, tl.int64), index, size, first, second, third)
    target = tl.cast(out, tl.int64)
    mask = _carry(index, size)
    if step == 0:
        own = target + tl.cast(rank, tl.int64) * nbytes
        if own != source:  # not in place
            _store_data(own, index, size, first, second, third, mask)
    else:
        slot = (epoch % 2) * WORLD * words
        sent = theirs + 16 * (slot + rank * words + index)
        tdl.store_flagged(sent, first, second, third, _flag(epoch), mask)
        landed = tl.cast(flagged, tl.int64) + 16 * (slot + frm * words + index)
        first, second, third, arrived = tdl.wait_flagged(landed, _flag(epoch), mask, monitor, frm)
        _store_data(target + tl.cast(frm, tl.int64) * nbytes, index, size, first, second, third, arrived != 0)


@jit(
    do_not_specialize=[
        *("source", "out", "staging", "nbytes", "words", "capacity", "chunk", "rank", "channels", "blocks"),
        *("n_local", "n_remote"),
    ]
)
def all_gather_ll_2d(
    source, out, staging, flagged, peers, signals, control, monitor, routes,
    nbytes, words, capacity, chunk, rank, channels, blocks, n_local, n_remote,
    WORLD: tl.constexpr, BLOCK: tl.constexpr, SLOT_SIGNALS: tl.constexpr,
):  # fmt: skip
    """``[nbytes] -> [WORLD * nbytes]`` over several nodes of ``n_local + 1`` ranks each.

    Programs: ``channels`` that put to the rail; then ``blocks`` times (1 for the own segment, n_remote for those of the
    rail, WORLD - 1 - n_remote receivers).

    Args: those of :func:`all_gather_ll` and of ``all_gather_2d``, except
        peers: those of this node count.
        routes: as for ``all_gather_2d``; after it the group ranks whose words come flagged.
        chunk: bytes of a put between nodes, a multiple of ``12 * BLOCK``; there are ``channels``.
        blocks: programs for each segment, of ``BLOCK`` words each.
    """
    program = tl.program_id(0)
    block = (program - channels) % blocks
    task = (program - channels) // blocks
    epoch, alive = begin_epoch(control, monitor)
    if alive == 0:
        return
    size = tl.cast(nbytes, tl.int32)
    landing = tl.cast(staging, tl.int64) + (epoch % 2) * WORLD * capacity
    row = signals + (epoch % 2) * SLOT_SIGNALS
    slot = (epoch % 2) * WORLD * words
    elsewhere = routes + 2 * n_local
    if program < channels:
        offset = tl.cast(program, tl.int64) * chunk
        staged = landing + tl.cast(rank, tl.int64) * capacity + offset
        signal = row + program * WORLD + rank
        part = chunk_bytes(nbytes, chunk, program)
        push_remote(0, elsewhere, n_remote, staged, source + offset, part, signal, epoch, signals, monitor, False)
    else:
        index = block * BLOCK + tl.arange(0, BLOCK)
        mask = _carry(index, size)
        target = tl.cast(out, tl.int64)
        if task <= n_remote:
            origin = tl.cast(rank, tl.int32)
            at = tl.cast(source, tl.int64)
            arrived = tl.cast(1, tl.int32)
            if task > 0:
                origin = tl.load(elsewhere + task - 1)
                at = landing + tl.cast(origin, tl.int64) * capacity
                signal = block * BLOCK * 12 // chunk * WORLD + origin
                arrived = tdl.wait_signal(row + signal, tdl.CMP_GE, epoch, monitor, origin, signal)
            if arrived != 0:
                first, second, third = _load_data(at, index, size)
                first, second, third = _repair(at, index, size, first, second, third)
                for k in tl.range(0, n_local, disable_licm=True):
                    sent = tl.load(peers + tl.load(routes + k)) + 16 * (slot + origin * words + index)
                    tdl.store_flagged(sent, first, second, third, _flag(epoch), mask)
                target += tl.cast(origin, tl.int64) * nbytes
                if target != at:  # not the own segment in place
                    _store_data(target, index, size, first, second, third, mask)
        else:
            origin = tl.load(elsewhere + n_remote + task - 1)
            landed = tl.cast(flagged, tl.int64) + 16 * (slot + origin * words + index)
            first, second, third, there = tdl.wait_flagged(landed, _flag(epoch), mask, monitor, origin)
            target += tl.cast(origin, tl.int64) * nbytes
            _store_data(target, index, size, first, second, third, there != 0)
