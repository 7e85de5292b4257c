# SPDX-License-Identifier: Apache-2.0
"""A tile of every rank's data, reduced in the order that all dense reductions keep.

The parts of other ranks have landed in the segments of an inbox; a rank's own is in the caller's
tensor. The ranks of a node are taken in rank order, then the nodes in node order
(:mod:`tdcoll.primitives.reduce` has the arithmetic). All functions but :func:`reduce_chunk` work on
the tile whose elements are ``index`` of the chunk at byte ``offset``.
"""

import triton.language as tl

from tdcoll.language.jit import jit
from tdcoll.primitives import elements
from tdcoll.primitives.epilogue import result_of
from tdcoll.primitives.group import segment
from tdcoll.primitives.reduce import accumulate


@jit
def load_part(
    r, own, inbox, g, epoch, offset, index, mask, DTYPE: tl.constexpr, ACC: tl.constexpr, ALIGNED: tl.constexpr
):  # fmt: skip
    """Load rank ``r``'s part, in ``ACC``: from its segment of the inbox, or this rank's from
    ``own``."""
    at = tl.where(r == g.rank, own, segment(inbox, g, epoch, r))
    source = elements.pointer(at + offset, DTYPE, ALIGNED) + index
    return elements.widened(tl.load(source, mask=mask, other=0), DTYPE, ACC)


@jit
def sum_of_node(
    node, own, inbox, g, nodes, epoch, offset, index, mask,
    DTYPE: tl.constexpr, ACC: tl.constexpr, OP: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Reduce the parts of one node's ranks, in rank order."""
    first = tl.load(nodes.begins + node)
    last = tl.load(nodes.begins + node + 1)
    sum = tl.zeros(index.shape, ACC)
    for k in tl.range(first, last):
        r = tl.load(nodes.ranks + k)
        part = load_part(r, own, inbox, g, epoch, offset, index, mask, DTYPE, ACC, ALIGNED)
        sum = accumulate(sum, part, k == first, OP)
    return sum


@jit
def sum_of_ranks(
    own, inbox, g, nodes, epoch, offset, index, mask,
    DTYPE: tl.constexpr, ACC: tl.constexpr, OP: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Reduce the parts of all ranks. ``nodes`` is None if all are on one node; their parts are
    loaded at once."""
    total = tl.zeros(index.shape, ACC)
    if nodes is None:
        for r in tl.static_range(g.world):
            part = load_part(r, own, inbox, g, epoch, offset, index, mask, DTYPE, ACC, ALIGNED)
            total = accumulate(total, part, r == 0, OP)
    else:
        for node in tl.range(0, nodes.n_nodes):
            sum = sum_of_node(
                node, own, inbox, g, nodes, epoch, offset, index, mask, DTYPE, ACC, OP, ALIGNED
            )
            total = accumulate(total, sum, node == 0, OP)
    return total


@jit
def _reduce_tiles(
    worker, workers, own, out, offset, size, inbox, g, nodes, epoch, epilogue,
    DTYPE: tl.constexpr, ACC: tl.constexpr, OP: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    count = elements.count(size, DTYPE, ALIGNED)
    for begin in tl.range(
        tl.cast(worker, tl.int64) * TILE, count, tl.cast(workers, tl.int64) * TILE
    ):
        index = begin + tl.arange(0, TILE)
        mask = index < count
        sum = sum_of_ranks(
            own, inbox, g, nodes, epoch, offset, index, mask, DTYPE, ACC, OP, ALIGNED
        )
        result = result_of(sum, g.world, out + offset, index, mask, epilogue, DTYPE, OP)
        tl.store(elements.pointer(out + offset, DTYPE, ALIGNED) + index, result, mask=mask)


@jit
def reduce_chunk(
    worker, workers, own, out, offset, size, inbox, g, nodes, epoch, aligned, epilogue,
    DTYPE: tl.constexpr, ACC: tl.constexpr, OP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Reduce this worker's tiles, of ``TILE`` elements, of the chunk at ``offset`` to the same
    place in ``out``.

    ``nodes`` is None if all ranks are on one. ``aligned``: all addresses and sizes are multiples of
    16. ``epilogue``: see :mod:`tdcoll.primitives.epilogue`.
    """
    if aligned:
        _reduce_tiles(
            worker,
            workers,
            own,
            out,
            offset,
            size,
            inbox,
            g,
            nodes,
            epoch,
            epilogue,
            DTYPE,
            ACC,
            OP,
            True,
            TILE,
        )
    else:
        _reduce_tiles(
            worker,
            workers,
            own,
            out,
            offset,
            size,
            inbox,
            g,
            nodes,
            epoch,
            epilogue,
            DTYPE,
            ACC,
            OP,
            False,
            TILE,
        )
