# SPDX-License-Identifier: Apache-2.0
"""The functional test as every rank runs it, under torchrun: ``-m tdcoll.doctor.job SECONDS``.

It makes puts and signals between all pairs and a ring, where the heap has puts, and an all-gather. Every number says
whose it is and where. Each rank says where it is, in lines of JSON, so that the parent knows where it hung, and ends
itself when twice its time is over.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from typing import Any

MARK = "tdcoll-job "
"""Begins the lines that the parent reads."""

NBYTES = 1024
LAPS_ON_GPUS = 200
LAPS_SIMULATED = 2
CALLS_ON_GPUS = 100
CALLS_SIMULATED = 2


def say(**what: Any) -> None:
    """One line in one piece: all ranks write to the same place."""
    os.write(1, (MARK + json.dumps({"rank": int(os.environ.get("RANK", "0")), **what}) + "\n").encode())


def run(timeout_s: float) -> dict[str, Any]:
    """Test this job; return what rank 0 reports. Collective.

    ``hop_us`` and ``gather_us`` are null in the simulator, and ``hop_us`` also where the heap has no puts.

    Raises:
        AssertionError: a rank got something else than what was sent.
        TdcollError: whatever tdcoll finds wrong.
    """
    say(stage="import tdcoll")
    import torch

    import tdcoll
    from tdcoll import runtime

    torch.set_num_threads(1)
    say(stage="tdcoll.initialize")
    tdcoll.initialize(timeout_s=timeout_s)
    owner = runtime.current()
    device, rank, world = owner.device, owner.rank, owner.world_size
    words = NBYTES // 8
    place = torch.arange(words, dtype=torch.int64, device=device)

    source = tdcoll.empty(words, torch.int64)  # symmetric: a put to another node, also an emulated one, wants it
    source.copy_(rank * 1_000_000 + place)
    # PyTorch's memory has no puts, and kernels that put are refused.
    hop_us = puts_and_ring(source, place) if owner.heap.puts else None

    say(stage="all-gather")
    with tdcoll.CollectiveContext(max_bytes_per_rank=NBYTES) as ctx:
        got = tdcoll.all_gather(source, ctx)
        ctx.check()
        calls = CALLS_SIMULATED if owner.simulated else CALLS_ON_GPUS

        def gather() -> None:
            for _ in range(calls):
                tdcoll.all_gather(source, ctx, got)

        gather_us = timed(gather, calls, owner.simulated)
        ctx.check()
        for sender in range(world):
            wanted = sender * 1_000_000 + place
            expect(got.view(world, words)[sender], wanted, f"rank {rank}, all-gather of rank {sender}")

    say(stage="tdcoll.finalize")
    times = owner.control.all_gather(range(world), "doctor: times", (hop_us, gather_us))
    tdcoll.finalize()
    slowest = [None if owner.simulated or None in of else round(max(of), 2) for of in zip(*times, strict=True)]
    found = {"world": world, "simulated": owner.simulated, "puts": owner.heap.puts}
    return {**found, "hop_us": slowest[0], "gather_us": slowest[1]}


def puts_and_ring(source: Any, place: Any) -> float:
    """Test puts and signals between all pairs, then a ring. Collective.

    Returns:
        Microseconds of a hop of the ring; 0 in the simulator.

    Raises:
        AssertionError: a rank got something else than what was sent.
    """
    import torch

    import tdcoll
    from tdcoll import runtime
    from tdcoll.doctor import kernels

    owner = runtime.current()
    rank, world = owner.rank, owner.world_size
    say(stage="put and signal")
    boxes = tdcoll.zeros((world, len(place)), torch.int64)
    box = tdcoll.zeros(len(place), torch.int64)
    signals = tdcoll.zeros(world + 1, torch.int64)
    monitor = tdcoll.WaitMonitor()
    kernels.to_all[(1,)](boxes.view(torch.uint8), source, signals, monitor.words, NBYTES)
    monitor.check()
    for sender in range(world):
        expect(boxes[sender], sender * 1_000_000 + place, f"rank {rank}, put by rank {sender}")

    say(stage="ring")
    laps = LAPS_SIMULATED if owner.simulated else LAPS_ON_GPUS
    warm_up = 1 if owner.simulated else 10
    last = signals[world:]
    kernels.ring[(1,)](box, source, last, monitor.words, NBYTES, 0, warm_up)

    def ring() -> None:
        kernels.ring[(1,)](box, source, last, monitor.words, NBYTES, warm_up, laps)

    hop_us = timed(ring, laps * world, owner.simulated)
    monitor.check()
    expect(box, (rank - 1) % world * 1_000_000 + place, f"rank {rank}, ring")
    return hop_us


def expect(got: Any, wanted: Any, what: str) -> None:
    """Raise unless two tensors are equal."""
    wrong = (got != wanted).nonzero().flatten()
    if len(wrong):
        i = int(wrong[0])
        raise AssertionError(
            f"{what}: {len(wrong)} of {len(wanted)} words are wrong; word {i} is {int(got[i])} and not {int(wanted[i])}"
        )


def timed(action: Any, times: int, simulated: bool) -> float:
    """Microseconds of each of ``times`` things that ``action`` does on the GPU; 0 in the simulator."""
    if simulated:
        action()
        return 0.0
    import torch

    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    action()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e3 / times


def main(timeout_s: float) -> None:
    # Should the parent be gone: a thread of C code, which a main thread that hangs in a library does not hold up.
    faulthandler.dump_traceback_later(2 * timeout_s, exit=True)
    try:
        report = run(timeout_s / 3)
    except BaseException as error:
        lines = str(error).strip().splitlines()
        say(error=f"{type(error).__name__}: {lines[0] if lines else ''}")
        os._exit(1)  # what the libraries do at an orderly exit may wait for peers
    if int(os.environ.get("RANK", "0")) == 0:
        say(result=report)


if __name__ == "__main__":
    main(float(sys.argv[1]))
