# SPDX-License-Identifier: Apache-2.0
"""All-gathers of a few calls that check every byte: what the negative controls and their twins run."""

from __future__ import annotations

from collections.abc import Callable

import protocols
import torch

import tdcoll.language as tdl
from tdcoll import runtime
from tdcoll.monitor import WaitMonitor
from tdcoll.testing import World


def segment(rank: int, call: int, nbytes: int) -> torch.Tensor:
    """``-> [nbytes]``: encodes rank, index and call."""
    return ((torch.arange(nbytes) * 7 + rank * 31 + call * 101) % 251).to(torch.uint8)


def check(gathered: torch.Tensor, call: int) -> None:
    """``gathered[rank]`` must be the segment of each rank."""
    for rank, got in enumerate(gathered):
        wanted = segment(rank, call, got.numel())
        wrong = (got != wanted).nonzero().flatten().tolist()
        if wrong:
            raise AssertionError(
                f"call {call}: {len(wrong)} of {got.numel()} bytes of rank {rank} are wrong, first at {wrong[0]}"
            )


def gathering(
    launch: Callable[..., None], *, calls: int = 3, slots: int = 2, signal_slots: int | None = None, nbytes: int = 16
) -> Callable[[World], None]:
    """A case: ``calls`` all-gathers on ``slots`` buffers; ``launch(buffer, signals, nbytes, call, monitor, n)``."""

    def case(world: World) -> None:
        n = world.n_pes

        def host(pe: int) -> None:
            job = runtime.current()
            monitor = WaitMonitor()
            rows = slots if signal_slots is None else signal_slots
            buffers = job.allocate((slots, n, nbytes), torch.uint8, name="buffer")
            signals = job.allocate((rows, n), torch.int64, name="signals")
            for call in range(1, calls + 1):
                buffer = buffers[call % slots]
                buffer[pe] = segment(pe, call, nbytes)
                launch(buffer, signals[call % rows], nbytes, call, monitor.words, n)
                world.pause()  # a host reads its result later
                check(buffer, call)

        world.run(host)

    return case


def gather(how: str, compare: int = tdl.CMP_GE.value, **options: int) -> Callable[[World], None]:
    """Return the case for ``protocols.gather``."""

    def launch(
        buffer: torch.Tensor, signals: torch.Tensor, nbytes: int, call: int, monitor: torch.Tensor, n: int
    ) -> None:
        protocols.gather[(n,)](buffer, signals, nbytes, call, monitor, n, how, compare)

    return gathering(launch, **options)


def broadcast(ack: bool, calls: int = 5, nbytes: int = 16) -> Callable[[World], None]:
    """Return a case: ``calls`` broadcasts through two slots in turn, of which every rank reads every byte."""

    def case(world: World) -> None:
        n = world.n_pes

        def host(pe: int) -> None:
            job, monitor = runtime.current(), WaitMonitor()
            buffers = job.allocate((2, nbytes), torch.uint8, name="buffer")
            arrived = job.allocate((2,), torch.int64, name="arrived")
            taken = job.allocate((n,), torch.int64, name="taken")
            for call in range(1, calls + 1):
                slot, wanted = call % 2, segment(0, call, nbytes)
                if pe == 0:
                    buffers[slot] = wanted
                protocols.broadcast[(1,)](buffers[slot], arrived[slot:], taken, nbytes, call, monitor.words, n, ack)
                monitor.check()
                assert torch.equal(buffers[slot], wanted), f"call {call}: wrong bytes of rank 0"

        world.run(host)

    return case
