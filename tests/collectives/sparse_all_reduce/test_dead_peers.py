# SPDX-License-Identifier: Apache-2.0
"""What a context does once a peer is gone."""

from __future__ import annotations

import pytest

import tdcoll
from tdcoll.testing import World

from .calls import ROWS, everywhere, make, mine, reduce_and_compare


@pytest.mark.parametrize("algorithm", ["owner", "gather"])
@pytest.mark.parametrize("padded", [False, True])
def test_failed_context_refuses_every_call_and_closes_alone(algorithm: str, padded: bool) -> None:
    world = World(3, seed=4, weak=True, on_timeout="expire")

    def host(pe: int) -> tdcoll.CollectiveTimeout:
        ctx = make(timeout_s=5)
        for call in range(2):
            reduce_and_compare(ctx, call, algorithm=algorithm)
        ctx.check()
        tdcoll.barrier()  # the others are done with these calls, too
        if pe == 1:
            world.kill(1)

        def call_it() -> None:
            part = mine(pe)
            if padded:
                tdcoll.sparse_all_reduce_padded(part._indices()[0], part._values(), ROWS, ctx=ctx, algorithm=algorithm)
                ctx.check()
            else:
                tdcoll.sparse_all_reduce(part, ctx=ctx, algorithm=algorithm)

        with pytest.raises(tdcoll.CollectiveTimeout) as raised:
            call_it()
        with pytest.raises(tdcoll.CollectiveTimeout) as again:
            call_it()
        assert str(again.value) == str(raised.value)
        used = tdcoll.heap_info().used
        ctx.close()  # without the others
        assert ctx.closed
        assert tdcoll.heap_info().used == used, "a message may still come: the memory stays taken"
        with pytest.raises(tdcoll.ContextError, match="closed"):
            call_it()
        return raised.value

    first, dead, last = world.run(host)
    assert dead is None
    for rank, error in ((0, first), (2, last)):
        assert error is not None
        assert (error.rank, error.peer, error.timeout_s) == (rank, 1, 5.0)


def test_a_peer_that_stays_away_is_named() -> None:
    """Also in the middle of a group whose ranks are not the PEs."""

    def host(pe: int) -> None:
        if pe == 0:
            return
        ctx = make(group=[3, 1, 2], timeout_s=2)
        reduce_and_compare(ctx)
        if pe == 1:
            return
        with pytest.raises(tdcoll.CollectiveTimeout, match="waited 2 s for peer 1"):
            tdcoll.sparse_all_reduce(mine(ctx.rank), ctx=ctx)

    everywhere(host, 4, on_timeout="expire")
