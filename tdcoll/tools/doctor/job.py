# SPDX-License-Identifier: Apache-2.0
"""A small job on this host: the doctor starts it, and its ranks run ``-m tdcoll.tools.doctor.job
SECONDS``.

The ranks join, make a symmetric heap, and gather numbers that encode their rank and place: once
with puts and signals between all pairs (if the heap has puts), and once with the algorithm that
``"auto"`` chooses. Each rank prints lines of JSON about its stage, so that the doctor can say where
a rank hangs.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from typing import Any

from tdcoll.base import child
from tdcoll.base.child import Ended
from tdcoll.tools.doctor.checks import Line, note, ok, problem
from tdcoll.tools.doctor.facts import MachineFacts

_NAME = "small job"
_MARK = "tdcoll-doctor "
"""Begins the lines that the doctor reads."""

_ADVICE = "first see the lines above, then docs/errors.md and the end of the job's output"
_JOINING = (
    "; NVSHMEM_DEBUG=INFO shows how far NVSHMEM comes, and NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME has to name an "
    "interface of this host"
)

_WORDS = 128

# ---------------------------------------------------------------------- the doctor's side


def cannot_run(facts: MachineFacts) -> str:
    """Return why it is useless to start the job, in words; empty if it isn't."""
    needed = ("torch", "triton", "numpy", *(["greenlet"] if facts.simulated else []))
    lacking = [name for name in needed if "error" in facts.found[name]]
    if lacking:
        return f"{', '.join(lacking)} cannot be imported"
    return "" if facts.simulated or facts.gpus else "PyTorch sees no GPU"


def start(facts: MachineFacts, timeout_s: float, module: str = __name__) -> Ended:
    """Run the job for at most ``timeout_s`` seconds, with the environment that launch.sh would give
    it.

    tdcoll.tools.torchrun runs the ranks, because they die with it when it is killed.
    """
    torchrun = [
        sys.executable,
        "-m",
        "tdcoll.tools.torchrun",
        "--nproc-per-node",
        str(facts.nproc),
        "--nnodes",
        "1",
    ]
    rendezvous = [
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        "localhost:0",
        "--local-addr",
        "127.0.0.1",
    ]
    command = [*torchrun, *rendezvous, "-m", "--", module, str(timeout_s)]
    return child.run(command, timeout_s, facts.launched)


def judge(facts: MachineFacts, ended: Ended | str) -> Line:
    """Return the line about the job; a string says why it wasn't started."""
    if isinstance(ended, str):
        return note(_NAME, f"not run: {ended}")
    result = ""
    stages = dict[int, str]()
    errors = list[str]()
    deaths = list[str]()
    for line in ended.output.splitlines():
        before, mark, text = line.partition(_MARK)
        if mark:
            said = json.loads(text)
            result = said.get("result", result)
            if "stage" in said:
                stages[said["rank"]] = said["stage"]
            if "error" in said:
                errors.append(f"rank {said['rank']}: {said['error']}")
        elif before.startswith("tdcoll: died"):  # one of tdcoll.tools.torchrun's last lines
            deaths.append(before.removeprefix("tdcoll: "))
    if result and not ended.reason:
        return ok(_NAME, result)
    where = [
        f"last in {stage}: rank {', '.join(str(rank) for rank in sorted(stages) if stages[rank] == stage)}"
        for stage in dict.fromkeys(stages.values())
    ]
    first = [f"first error: {error}" for error in errors[:1]]
    text = "; ".join(
        [
            ended.reason or "no rank reported a result",
            *(where or ["no rank had begun"]),
            *deaths,
            *first,
        ]
    )
    joining = not facts.simulated and "tdcoll.initialize" in stages.values()
    return problem(_NAME, text, _ADVICE + (_JOINING if joining else ""))


# ---------------------------------------------------------------------- the ranks' side


def _say(**what: Any) -> None:
    """Print a line in one piece, because all ranks write to the same file."""
    os.write(
        1, f"{_MARK}{json.dumps({'rank': int(os.environ.get('RANK', '0')), **what})}\n".encode()
    )


def run(timeout_s: float) -> str:
    """Join a job and gather over all its ranks; return what was done, in words. Collective."""
    _say(stage="import tdcoll")
    import torch

    import tdcoll
    from tdcoll import runtime
    from tdcoll.distributed import Options
    from tdcoll.job.settings import JobSettings

    torch.set_num_threads(1)
    _say(stage="values of variables")
    # a job of yours reads them, even if this one has its own deadline
    JobSettings.read(None, None)
    Options()
    _say(stage="tdcoll.initialize")
    tdcoll.initialize(timeout_s=timeout_s)
    owner = runtime.current()
    algorithms = ("1d", "auto") if owner.heap.puts else ("auto",)
    place = torch.arange(_WORDS, device=owner.device)
    source = tdcoll.empty(_WORDS, torch.int64)  # symmetric, as puts to other nodes want it
    source.copy_(owner.rank * 1_000_000 + place)
    with tdcoll.CollectiveContext(max_bytes_per_rank=source.nbytes) as ctx:
        for algorithm in algorithms:
            _say(stage=f"all_gather by {algorithm}")
            gathered = tdcoll.all_gather(source, ctx=ctx, algorithm=algorithm)
            ctx.check()
            for sender, got in enumerate(gathered.view(owner.world_size, _WORDS)):
                wrong = int((got != sender * 1_000_000 + place).sum())
                if wrong:
                    raise AssertionError(
                        f"all_gather by {algorithm}: {wrong} words from rank {sender} are wrong"
                    )
    heap = tdcoll.heap_info().total >> 20
    _say(stage="tdcoll.finalize")
    tdcoll.finalize()
    ranks = f"{owner.world_size} {'simulated ' if owner.simulated else ''}ranks"
    done = f"{ranks}, {heap} MiB of symmetric heap each: all-gather by {' and by '.join(algorithms)} is right"
    return done if owner.heap.puts else f"{done}; PyTorch's memory has no puts to test"


def _main(timeout_s: float) -> None:
    faulthandler.dump_traceback_later(2 * timeout_s, exit=True)  # the doctor has gone
    try:
        result = run(timeout_s / 3)
    except Exception as error:
        first_line = str(error).partition("\n")[0]
        _say(error=f"{type(error).__name__}: {first_line}")
        raise
    if os.environ["RANK"] == "0":
        _say(result=result)


if __name__ == "__main__":
    _main(float(sys.argv[1]))
