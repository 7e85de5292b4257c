# SPDX-License-Identifier: Apache-2.0
"""Reduction of rows over several nodes: inside a node by loads and stores, from node to node by
puts.

No address of another node can be stored to. Each node reduces its own rows first, as
:mod:`~tdcoll.collectives.sparse_all_reduce.kernels_reduce` does but among its ranks only; a row of
several nodes then goes from node to node as a partial sum, and from the last of them to one rank of
every other node, which hands it on inside. From one node to another a row crosses at most once, and
between nodes (nodes that have it - 1) + (nodes - 1) times in all. The order of the nodes of a row
is rotated by its hash, so that all nodes are busy in each of the steps::

    reduce_nodes, step = 0 .. nodes - 1        one launch and one epoch each
        rows of which this node is number ``step`` in the rotated order, and this rank the one that reduces it:
        out[u] (what an earlier node has put there) + the node's parts --> own out[u]
        --put--> out[u] of the rank that reduces it in the next node that has it, or, on the last,
        --stores--> out[u] of this node, --put--> out[u] of one rank of every other node
    forward    that rank --stores--> out[u] of its node                                                   one epoch
    meet_nodes nothing moves                                                                              one epoch

Signal map: ``arrived[slot, 0, p] >= epoch`` on a rank is set by rank p when it has begun that
launch, hence done all that it launched before. Programs of their own send the signals, the first of
the grid, by NVSHMEM to all ranks. Every launch polls those of all ranks before it reads what others
have written, and *meet_nodes* before it ends. Every rank waits for all of them in every epoch, also
where it has nothing to read: only then has everybody got the signal of e when one of e + 2 is sent
to the same word. (A signal of e that arrived after one of e + 2 would take it back.)

Ordering: a put row is complete before its program ends (quiet), and is looked at in a later launch,
after the signal of that one. Stores are ordinary ones; ``signal_block`` of the next launch fences
at system scope. ``out[u]`` of a rank is written at most twice by others in a call: by the partial
sum that comes in, and by the final one, which exists only after the partial sum has been used.
"""

import triton.language as tl

import tdcoll.language as tdl
from tdcoll.collectives.index_match import kernels as match
from tdcoll.collectives.index_match.kernels import find, list_of
from tdcoll.collectives.sparse_all_reduce import kernels_lists as lists
from tdcoll.collectives.sparse_all_reduce.kernels_tables import local, rows_of, source_of
from tdcoll.language.jit import jit
from tdcoll.primitives.group import row, start
from tdcoll.primitives.reduce import accumulate, rounded, share


@jit
def _announce(i, begun, nodes, g, epoch):
    """Tell the rank that comes ``i + 1`` after this one that this rank has begun the launch."""
    pe = tl.load(nodes.pes + (g.rank + 1 + i) % nodes.world)
    tdl.signal_block(begun + g.rank, epoch, tdl.SIGNAL_SET, pe)


@jit
def _steps_of(index, id, begin, step, nodes):
    """``(earlier, following, last)`` for one id, whose nodes come in an order that begins with node
    ``begin``.

    ``earlier``: whether a node before ``step`` in that order has the row. ``following``: the first
    after ``step`` that has it; ``n_nodes`` where none has. ``last``: the last that has it.
    """
    earlier = tl.cast(0, tl.int32)
    following = tl.cast(nodes.n_nodes, tl.int32)
    last = tl.cast(0, tl.int32)
    for q in tl.range(0, nodes.world):
        has = find(id, q, index) >= 0
        number = (tl.load(nodes.of + q) - begin + nodes.n_nodes) % nodes.n_nodes
        earlier = tl.where(has & (number < step), 1, earlier)
        following = tl.where(has & (number > step), tl.minimum(following, number), following)
        last = tl.where(has, tl.maximum(last, number), last)
    return earlier, following, last


@jit
def _entrance(id, node, nodes):
    """The rank of ``node`` that takes the final row for its node when it comes from another."""
    begin = tl.load(nodes.begins + node)
    size = tl.load(nodes.begins + node + 1) - begin
    return tl.load(nodes.ranks + begin + lists.pick(id, size))


@jit
def _bytes_of(elements, like):
    """Bytes of so many elements of the type that ``like`` points to, as int64."""
    return tl.cast(elements, tl.int64) * (like.dtype.element_ty.primitive_bitwidth // 8)


@jit
def _hand_on(out, offset, row_bytes, nodes, g):
    """This rank's ``out[offset:offset + row_bytes]`` to all others of its node. After a block
    barrier."""
    begin = tl.load(nodes.begins + nodes.node)
    size = tl.load(nodes.begins + nodes.node + 1) - begin
    for i in tl.range(0, size):
        mate = tl.load(nodes.ranks + begin + i)
        if mate != g.rank:
            tdl.copy_block(out + tl.load(g.deltas + mate) + offset, out + offset, row_bytes)


@jit(do_not_specialize_on_alignment=lists.ANY_ALIGNMENT)
def reduce_nodes(
    source, order, begins, index, memory, tables, nodes, g, step: tl.int32, row_elements,
    REPEATED: tl.constexpr, OP: tl.constexpr, ACC: tl.constexpr, WIDE: tl.constexpr, WORLD_POW2: tl.constexpr,
):  # fmt: skip
    """One step: see the module's docstring. Thread blocks: ``world - 1`` that announce, and any
    number that work.

    Args: those of ``kernels_reduce.reduce``, and ``step``: which of the nodes of a row, in its
    order, adds its parts.
    """
    program = tl.program_id(0)
    epoch, alive = start(g)
    if alive == 0:
        return
    begun = row(g, epoch, 0)
    if program < nodes.world - 1:
        _announce(program, begun, nodes, g, epoch)
    elif (
        tdl.wait_signals(begun, nodes.world, g.rank, tdl.CMP_GE, epoch, g.monitor, WORLD_POW2) != 0
    ):
        worker = program - (nodes.world - 1)
        workers = tl.num_programs(0) - (nodes.world - 1)
        n_nodes = nodes.n_nodes
        stride = _bytes_of(row_elements, source)
        out = memory.out
        n_single = tl.load(memory.counters + lists.SINGLE)
        n_mine = n_single + tl.load(memory.counters + lists.CONTESTED)
        mates_begin = tl.load(nodes.begins + nodes.node)
        mates_end = tl.load(nodes.begins + nodes.node + 1)
        for k in tl.range(worker, n_mine, workers):
            item = tl.where(
                k < n_single, tl.cast(k, tl.int64), tl.cast(index.capacity, tl.int64) + k - n_single
            )
            mine = tl.load(memory.work + item).to(tl.int64)
            id = tl.load(list_of(index, g.rank) + lists.HEADER + mine)
            first = lists.turn(local(id, tables), n_nodes)
            if (nodes.node - first + n_nodes) % n_nodes == step:
                earlier, following, _ = _steps_of(index, id, first, step, nodes)
                at = tl.load(memory.targets + mine).to(tl.int64)
                result = rows_of(out, source) + at * row_elements
                here, width = source_of(source, id, tables, row_elements)
                for column in tl.range(0, width, WIDE):
                    columns = column + tl.arange(0, WIDE)
                    inside = columns < width
                    sum = tl.zeros([WIDE], ACC)
                    seen = tl.cast(0, tl.int32)
                    for m in tl.range(mates_begin, mates_end):
                        q = tl.load(nodes.ranks + m)
                        position = find(id, q, index).to(tl.int64)
                        if position >= 0:
                            address = (
                                rows_of(memory.stage + tl.load(g.deltas + q), source)
                                + position * row_elements
                            )
                            if q == g.rank:
                                if REPEATED:
                                    begin = tl.load(begins + mine)
                                    if tl.load(begins + mine + 1) - begin == 1:
                                        address = here + tl.load(order + begin) * width
                                else:
                                    address = here + mine * width
                            part = share(
                                tl.load(address + columns, mask=inside, other=0),
                                nodes.world,
                                ACC,
                                OP,
                            )
                            sum = accumulate(sum, part, seen == 0, OP)
                            seen += 1
                    if earlier != 0:
                        before = tl.load(result + columns, mask=inside, other=0).to(ACC)
                        sum = accumulate(before, sum, False, OP)
                    tl.store(
                        result + columns, rounded(sum, source.dtype.element_ty, OP), mask=inside
                    )
                tdl.syncthreads()
                offset = at * stride
                row_bytes = _bytes_of(width, source)
                if following < n_nodes:
                    after, _ = lists.owner_in(id, (first + following) % n_nodes, index, nodes)
                    tdl.putmem_nbi_block(
                        out + offset, out + offset, row_bytes, tl.load(nodes.pes + after)
                    )
                else:
                    for other in tl.range(1, n_nodes):
                        entrance = _entrance(id, (nodes.node + other) % n_nodes, nodes)
                        tdl.putmem_nbi_block(
                            out + offset, out + offset, row_bytes, tl.load(nodes.pes + entrance)
                        )
                    _hand_on(out, offset, row_bytes, nodes, g)
        tdl.quiet()


# Triton 3.6 fails to coalesce the accesses of this kernel where row_elements is the constant 1, as
# it makes of any 1.
reduce_nodes_of_single = jit(
    do_not_specialize=["row_elements"], do_not_specialize_on_alignment=lists.ANY_ALIGNMENT
)(reduce_nodes.fn)
""":func:`reduce_nodes` for rows of one element."""


# Triton 3.6 fails to coalesce its accesses for the constant 1, too
@jit(do_not_specialize=["row_elements"])
def forward(like, index, memory, tables, nodes, g, row_elements, WORLD_POW2: tl.constexpr):
    """Final rows that came to this rank from another node, to the others of its own.

    Thread blocks: ``world - 1`` that announce, and any number that work.
    """
    program = tl.program_id(0)
    epoch, alive = start(g)
    if alive == 0:
        return
    begun = row(g, epoch, 0)
    if program < nodes.world - 1:
        _announce(program, begun, nodes, g, epoch)
    elif (
        tdl.wait_signals(begun, nodes.world, g.rank, tdl.CMP_GE, epoch, g.monitor, WORLD_POW2) != 0
    ):
        out = memory.out
        size = tl.load(index.status + match.UNION)
        if lists.valid(index) == 0:
            size = tl.cast(0, tl.int64)
        for k in tl.range(
            program - (nodes.world - 1), size, tl.num_programs(0) - (nodes.world - 1)
        ):
            id = tl.load(index.union + k)
            first = lists.turn(local(id, tables), nodes.n_nodes)
            _, _, last = _steps_of(index, id, first, 0, nodes)
            if ((first + last) % nodes.n_nodes != nodes.node) & (
                _entrance(id, nodes.node, nodes) == g.rank
            ):
                _source, width = source_of(like, id, tables, row_elements)
                _hand_on(out, k * _bytes_of(row_elements, like), _bytes_of(width, like), nodes, g)


@jit
def meet_nodes(nodes, g, WORLD_POW2: tl.constexpr):
    """All ranks are done with what they launched before. Thread blocks: ``world``."""
    program = tl.program_id(0)
    epoch, alive = start(g)
    if alive == 0:
        return
    begun = row(g, epoch, 0)
    if program < nodes.world - 1:
        _announce(program, begun, nodes, g, epoch)
    else:
        tdl.wait_signals(begun, nodes.world, g.rank, tdl.CMP_GE, epoch, g.monitor, WORLD_POW2)
