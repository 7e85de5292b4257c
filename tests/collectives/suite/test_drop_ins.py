# SPDX-License-Identifier: Apache-2.0
"""Operations of torch in dense calls, and drop-ins of torch's functions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import on_ranks
from torch.distributed import ReduceOp

import tdcoll
import tdcoll.distributed
from tdcoll.primitives.reduce import ALIASES, TORCH_OPERATIONS
from tdcoll.testing import World

from .data import SPECS

REDUCING = [spec for spec in SPECS if spec.reduces]


@pytest.mark.parametrize("op", TORCH_OPERATIONS)
@on_ranks(2)
def test_operations_of_torch_are_the_named_ones(pe: int, op: Any) -> None:
    """The ranks may spell them differently, also where debug mode compares the arguments."""
    name = TORCH_OPERATIONS[op]
    x = torch.tensor([3.0, -2.0, 0.5, 1.0]) * (pe + 1)
    with tdcoll.CollectiveContext(max_bytes_per_rank=256, debug=True) as ctx:
        for spec in REDUCING:
            call = getattr(tdcoll, spec.name)
            wanted = call(x, ctx=ctx, op=name)
            for spelled in (
                op,
                ReduceOp(op),
                *(alias for alias, known in ALIASES.items() if known == name),
            ):
                for _ in "ab":  # the second call takes the fast path
                    assert torch.equal(call(x, ctx=ctx, op=spelled if pe else name), wanted)
        mine = x.clone()
        assert tdcoll.distributed.all_reduce(mine, op if pe else name) is None
        assert torch.equal(mine, tdcoll.all_reduce(x, ctx=ctx, op=name))


@on_ranks(2)
def test_drop_ins_name_their_own_arguments(pe: int) -> None:
    own = tdcoll.distributed
    gather = own.all_gather_into_tensor
    scatter = own.reduce_scatter_tensor
    reduce = own.all_reduce
    exchange = own.all_to_all_single
    x = torch.zeros(2)
    y = torch.zeros(4)
    z = torch.ones(4)
    for kind, message, call, arguments in (
        (TypeError, r"output must be a torch\.Tensor", scatter, (None, x)),
        (ValueError, "input's first dimension must be divisible by the 2", scatter, (x, x[:1])),
        (ValueError, r"output must be torch\.float32 of shape \[1\]", scatter, (x, x)),
        (
            ValueError,
            "output must not overlap input, except as input's own segment",
            scatter,
            (y[1 - pe :][:2], y),
        ),
        (
            ValueError,
            "MAX, MIN, PRODUCT for torch.int32; got AVG",
            scatter,
            (x[:1].int(), x.int(), ReduceOp.AVG),
        ),
        (ValueError, "op must be one of .*got 3", scatter, (x[:1], x, 3)),
        (
            TypeError,
            r"input must be of float16, .*; got torch\.bool",
            scatter,
            (x[:1].bool(), x.bool()),
        ),
        (ValueError, r"output_tensor must be torch\.float32 of shape \[4\]", gather, (x, x)),
        (ValueError, "input_tensor must be contiguous", gather, (x, torch.zeros(4)[::2])),
        (ValueError, "input_tensor must not overlap output_tensor, except as", gather, (y, y[1:3])),
        (TypeError, r"tensor must be a torch\.Tensor", reduce, (3,)),
        (ValueError, "op must be one of sum, mean, max, min, prod; got 'SUM'", reduce, (x, "SUM")),
        (
            ValueError,
            "op must be one of SUM, AVG, MAX, MIN, PRODUCT; got BXOR",
            reduce,
            (x, ReduceOp.BXOR),
        ),
        (
            ValueError,
            r"output_split_sizes must be None or 2 equal sizes, .*; got \[4\]",
            exchange,
            (y, z, [4]),
        ),
        (
            ValueError,
            "input_split_sizes must be None or 2 equal sizes",
            exchange,
            (y, z, [2, 2], [1, 3]),
        ),
        (
            ValueError,
            r"which add up to dimension 0 of input; got \[7, 7\]",
            exchange,
            (y, z, None, [7, 7]),
        ),
    ):
        with pytest.raises(kind, match=message):
            call(*arguments)
    exchange(y, torch.arange(4.0) + 4 * pe, [2, 2], [2, 2])
    assert y.tolist() == [2 * pe, 2 * pe + 1, 4 + 2 * pe, 5 + 2 * pe]


def test_an_asynchronous_drop_in_without_its_peer_says_so() -> None:
    told = {}

    def host(pe: int) -> None:
        x = torch.ones(2)
        tdcoll.distributed.all_reduce(x)
        if pe == 1:
            world.kill(pe)
        with pytest.raises(tdcoll.distributed.BackendTimeout) as raised:
            tdcoll.distributed.all_reduce(x, async_op=True)
        told[pe] = (raised.value.rank, raised.value.peer)

    world = World(2)
    world.run(host)
    assert told == {0: (0, 1)}
