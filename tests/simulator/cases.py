# SPDX-License-Identifier: Apache-2.0
"""All-gathers of a few calls that check every byte, and other cases; device code in lambdas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import protocols
import racing
import torch
import triton.language as tl
from exploring import first_failure
from protocols import Steps

import tdcoll
import tdcoll.language as tdl
from tdcoll import runtime
from tdcoll.calls.monitor import WaitMonitor
from tdcoll.language.jit import jit
from tdcoll.testing import World

Case = Callable[[World], None]


def launch(kernel: Any, *arguments: Any) -> None:
    """Launch a kernel of one block in a world of its own."""
    World(1).run(lambda pe: kernel[(1,)](*arguments, num_warps=2))


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.int32)


@jit
def call(arguments, FUNCTION: tl.constexpr):
    FUNCTION(*arguments)


def device(
    function: Callable[..., Any], *arguments: Any, grid: tuple[int, ...] = (1,), **options: Any
) -> None:
    """Launch a kernel that calls ``function`` with these arguments."""
    call[grid](arguments, FUNCTION=function, **options)


def elementwise(
    function: Callable[..., Any], out: torch.Tensor, *inputs: torch.Tensor
) -> torch.Tensor:
    """Launch ``out[i] = function(*inputs[i])``, of one block."""
    n = out.numel()

    def kernel(out, *inputs):
        i = tl.arange(0, n)
        tl.store(out + i, function(*(tl.load(one + i) for one in inputs)))

    device(kernel, out, *inputs)
    return out


def wait_once(signal, value, monitor, result):
    """Device code: peer 7, index 9."""
    tl.store(result, tdl.wait_signal(signal, tdl.CMP_GE, value, monitor, 7, 9))


def add_to_0(word):
    """Device code: to the word of PE 0, in two ways."""
    tdl.signal_block(word, 1, tdl.SIGNAL_ADD, 0)
    tl.atomic_add(tdl.remote_ptr(word, 0), 1)


def on_rows(
    body: Callable[[torch.Tensor, torch.Tensor], Any], n_pes: int = 2, **options: Any
) -> Any:
    """``body(rows, after)`` on PE 0; both int64 ``[8]``, symmetric, ``after`` right behind ``rows``
    and its padding."""

    def host(pe: int) -> Any:
        rows, after = (tdcoll.zeros(8, torch.int64, name=name) for name in ("rows", "after"))
        return body(rows, after) if pe == 0 else None

    return World(n_pes, **options).run(host)[0]


def case(host: Callable[[int, int], None]) -> Case:
    """The case that runs ``host(pe, n_pes)``."""
    return lambda world: world.run(lambda pe: host(pe, world.n_pes))


def expect(case: Case, clean: bool, report: str, **options: Any) -> None:
    """A case must be clean, or fail with ``report``."""
    failure = first_failure(case, **options)
    assert (failure is None) == clean, failure
    assert failure is None or report in failure.report


def segment(rank: int, call: int, nbytes: int) -> torch.Tensor:
    """``-> [nbytes]``: encodes rank, index and call."""
    return ((torch.arange(nbytes) * 7 + rank * 31 + call * 101) % 251).to(torch.uint8)


def check(gathered: torch.Tensor, call: int) -> None:
    """``gathered[rank]`` must be the segment of each rank."""
    for rank, got in enumerate(gathered):
        wrong = (got != segment(rank, call, got.numel())).nonzero().flatten().tolist()
        assert not wrong, (
            f"call {call}: {len(wrong)} of {got.numel()} bytes of rank {rank} are wrong, first {wrong[0]}"
        )


def gathering(
    launch: Callable[..., None],
    *,
    calls: int = 3,
    slots: int = 2,
    signal_slots: int | None = None,
    nbytes: int = 16,
) -> Case:
    """``calls`` all-gathers on ``slots`` buffers; ``launch(buffer, signals, nbytes, call, monitor,
    n)``."""

    def case(world: World) -> None:
        n = world.n_pes

        def host(pe: int) -> None:
            job, monitor = runtime.current(), WaitMonitor()
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


PUT_SIGNAL = Steps(notify="put_signal")
FORGETFUL = Steps("PE 2 forgets PE 0", notify="put_signal")


def gather(steps: Steps = PUT_SIGNAL, compare: int = tdl.CMP_GE.value, **options: int) -> Case:
    """The case for ``protocols.gather``."""

    def launch(buffer: Any, signals: Any, nbytes: int, call: int, monitor: Any, n: int) -> None:
        protocols.gather[(n,)](buffer, signals, nbytes, call, monitor, n, steps, compare)

    return gathering(launch, **options)


def spinning(forget: int) -> Case:
    """Polling loops; one that cannot end if PE 2 is to ``forget`` PE 0."""

    def launch(buffer: Any, signals: Any, nbytes: int, call: int, monitor: Any, n: int) -> None:
        protocols.gather_by_threads[(n,)](buffer, signals, nbytes, call, n, "spin", forget)

    return gathering(launch, calls=2)


def box_case(launch: Callable[..., None], content: int = 0) -> Case:
    """A case that hands a box, its result, a source and a flag to ``launch``. PE 1's result must
    have the first ``content`` numbers."""

    @case
    def run(pe: int, n: int) -> None:
        box = tdcoll.zeros(32, torch.int64, name="box")
        source = tdcoll.zeros(32, torch.int64, name="source")
        flag = tdcoll.zeros(1, torch.int64, name="flag")
        out = torch.zeros(32, dtype=torch.int64)
        tdcoll.barrier()
        launch(box, out, source, flag, tdcoll.WaitMonitor().words)
        tdcoll.barrier()
        assert pe == 0 or torch.equal(out[:content], torch.arange(content)), "the box is not full"

    return run


def handed_over(fault: str) -> Case:
    """PE 1 takes what PE 0 stores in its box."""

    def launch(box: Any, out: Any, source: Any, flag: Any, monitor: Any) -> None:
        racing.hand_over[(1,)](box, out, flag, monitor, fault)

    return box_case(launch, 32)


def put_and_told(fault: str) -> Case:
    """PE 1 takes what PE 0 puts into its box."""

    def launch(box: Any, out: Any, source: Any, flag: Any, monitor: Any) -> None:
        racing.put_and_tell[(1,)](box, out, source, flag, monitor, fault)

    return box_case(launch, 32)


def around(slots: int) -> Case:
    """Pieces go around a ring."""

    @case
    def run(pe: int, n: int) -> None:
        inbox = tdcoll.zeros((slots, 32), torch.int64, name="inbox")
        out = tdcoll.zeros((n - 1, 32), torch.int64, name="out")
        mine = tdcoll.zeros(32, torch.int64, name="mine").fill_(pe)
        arrived = tdcoll.zeros(n, torch.int64, name="arrived")
        tdcoll.barrier()
        racing.ring[(1,)](inbox, out, mine, arrived, tdcoll.WaitMonitor().words, n, slots)
        tdcoll.barrier()
        wanted = [(pe - step) % n for step in range(1, n)]
        assert out[:, 0].tolist() == wanted, "a piece is not the one of its step"

    return run
