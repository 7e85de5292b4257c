# SPDX-License-Identifier: Apache-2.0
"""All-gather as a case for `tdcoll.testing.explore`: several calls, results read late, data that name their origin."""

from __future__ import annotations

from collections.abc import Sequence

import torch

import tdcoll
from tdcoll.collectives._host.plan import Plan
from tdcoll.primitives.group import EPOCH_SHIFT
from tdcoll.testing import World

NBYTES = 200
"""Bytes per rank: with 128-byte chunks, two channels, the second one short and no multiple of 16."""


def pattern(owner: int, call: int, nbytes: int) -> torch.Tensor:
    index = torch.arange(nbytes)
    return ((index * 7 + owner * 41 + call * 89) % 251).to(torch.uint8)


class Gathers:
    """Runs ``calls`` on every rank: ``o`` out of place, ``i`` in place, ``z`` of no bytes.

    Args:
        algorithm: of the calls, or a plan; or several, for the calls in turn.
        calls: kinds of calls, in order.
        nbytes: bytes per rank.
        group: ranks that take part; None for all.
        first_epoch: of the first call.
    """

    def __init__(
        self,
        algorithm: str | Plan | Sequence[str],
        calls: str = "oioo",
        nbytes: int = NBYTES,
        group: Sequence[int] | None = None,
        first_epoch: int = 1,
    ) -> None:
        self.algorithms = [algorithm] if isinstance(algorithm, (str, Plan)) else list(algorithm)
        self.calls, self.nbytes, self.group, self.first_epoch = calls, nbytes, group, first_epoch

    def __call__(self, world: World) -> None:
        world.run(self.host)

    def host(self, pe: int) -> None:
        if self.group is not None and pe not in self.group:
            return
        nbytes = self.nbytes
        with tdcoll.CollectiveContext(self.group, max_bytes_per_rank=nbytes) as ctx:
            ctx.control.fill_((self.first_epoch - 1) << EPOCH_SHIFT.value)
            world = ctx.world_size
            buffer = tdcoll.empty(world * nbytes, torch.uint8, group=self.group)
            mine = slice(ctx.rank * nbytes, (ctx.rank + 1) * nbytes)
            for call, kind in enumerate(self.calls):
                algorithm = self.algorithms[call % len(self.algorithms)]
                if kind == "z":
                    tdcoll.all_gather(buffer[:0], ctx, algorithm=algorithm)
                    continue
                data = pattern(ctx.topology.pes[ctx.rank], call, nbytes)
                if kind == "i":
                    buffer[mine] = data
                    got = tdcoll.all_gather_in_place(buffer, ctx, algorithm)
                else:
                    got = tdcoll.all_gather(data, ctx, algorithm=algorithm)
                wanted = torch.cat([pattern(p, call, nbytes) for p in ctx.topology.pes])
                wrong = int((got != wanted).sum())
                assert wrong == 0, f"rank {ctx.rank}, call {call} ({kind}): {wrong} wrong bytes"
            ctx.check()
            tdcoll.free(buffer)
        assert tdcoll.heap_info().used == 0
