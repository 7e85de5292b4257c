# SPDX-License-Identifier: Apache-2.0
"""The functional test from outside: start :mod:`.job` on all ranks of this host, and judge how it ended."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tdcoll.doctor.child import Ended, run
from tdcoll.doctor.facts import Facts, Line, note, ok, problem

__all__ = ["Outcome", "cannot_run", "command", "job_environment", "judge", "read", "start"]

MARK = "tdcoll-job "  # that of :mod:`.job`, whose module is only for its ranks

_NAME = "put, signal, all-gather"
_OF_LAUNCHERS = re.compile(r"(TORCHELASTIC|GROUP|ROLE|LOCAL|MASTER)_\w+|RANK|WORLD_SIZE|SLURM_NODEID")
_EXCEPTION = re.compile(r"^(?:\[[^\]]*\]:)?\s*((?:\w+\.)*\w*(?:Error|Exception|Timeout|Interrupt|Exit)\b: .*)")
_COMPLAINT = re.compile(r"\b(error|fail(ed|ure)?|abort(ed)?|fatal|cannot|segmentation fault)\b", re.IGNORECASE)


@dataclass(frozen=True)
class Outcome:
    """How the job ended.

    Attributes:
        result: what rank 0 reported; None if it did not come to that.
        error: the first error that a rank reported, in words; empty: none.
        stages: the last thing that each rank began.
        reason: why the job as a whole has not ended well; empty if it has.
        timed_out: it was ended because its time was over.
        output: all that it printed.
    """

    result: Mapping[str, Any] | None = None
    error: str = ""
    stages: Mapping[int, str] = field(default_factory=dict)
    reason: str = ""
    timed_out: bool = False
    output: str = ""


def cannot_run(facts: Facts) -> str:
    """Return why there is no point in starting the job, in words; empty if there is."""
    lacking = [name for name in ("torch", "triton", "numpy") if "error" in facts.of(name)]
    if facts.simulated and "error" in facts.of("greenlet"):
        lacking.append("greenlet")
    if lacking:
        return f"{', '.join(lacking)} cannot be imported"
    return "" if facts.simulated or facts.gpus else "PyTorch sees no GPU"


def command(nproc: int, timeout_s: float) -> list[str]:
    """The job under torchrun, on this host alone, on a free port."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(nproc), "--nnodes", "1"]
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--local-addr", "127.0.0.1"]
    return [*torchrun, *meeting, "-m", "--", "tdcoll.doctor.job", str(timeout_s)]


def job_environment(facts: Facts) -> dict[str, str]:
    """The user's environment with the defaults that setenv.sh has for one host."""
    environment = {name: value for name, value in facts.environment.items() if not _OF_LAUNCHERS.fullmatch(name)}

    def first(name: str, folder: str) -> None:
        others = [entry for entry in environment.get(name, "").split(":") if entry and entry != folder]
        environment[name] = ":".join([folder, *others])

    first("PYTHONPATH", str(Path(__file__).resolve().parents[2]))
    defaults = {"PYTHONUNBUFFERED": "1"}
    if facts.simulated:
        defaults |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    else:
        defaults |= {
            "NVSHMEM_DISABLE_NVLS": "1",
            "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME": "lo",
            "NVSHMEM_REMOTE_TRANSPORT": "none",
        }
        if facts.nvshmem_libraries:
            first("LD_LIBRARY_PATH", facts.nvshmem_libraries)
    return {**environment, **{name: value for name, value in defaults.items() if not environment.get(name)}}


def start(facts: Facts, timeout_s: float, job: Sequence[str] | None = None) -> Outcome:
    """Run the job (or another command, in tests) for at most ``timeout_s`` seconds."""
    job = command(facts.nproc, timeout_s) if job is None else job
    return read(run(job, timeout_s, environment=job_environment(facts)))


def read(ended: Ended) -> Outcome:
    """Return what the output of a job says."""
    result, stages, errors = None, {}, []
    others = []
    for line in ended.output.splitlines():
        said = _said(line)
        if said is None:
            others.append(line.strip())
        elif "stage" in said:
            stages[said["rank"]] = said["stage"]
        elif "error" in said:
            errors.append(f"rank {said['rank']}: {said['error']}")
        elif "result" in said:
            result = said["result"]
    error = errors[0] if errors else ""
    if not error and ended.reason:
        # A rank that could not speak for itself: the last line of a traceback, or what a library complained of.
        others = [line for line in others if "SignalException" not in line]  # torchrun's, when it is ended
        exceptions = [match[1] for line in others if (match := _EXCEPTION.match(line))]
        complaints = [line for line in others if _COMPLAINT.search(line)]
        error = next(iter([*exceptions, *complaints]), "")
    return Outcome(result, error, stages, ended.reason, ended.timed_out, ended.output)


def _said(line: str) -> dict[str, Any] | None:
    _, mark, text = line.partition(MARK)  # something without a newline may stand before it
    if not mark:
        return None
    try:
        said = json.loads(text)
    except ValueError:
        return None
    return said if isinstance(said, dict) and "rank" in said else None


def judge(facts: Facts, outcome: Outcome | str) -> Line:
    """The line of the functional test; ``outcome`` is in words where it was not run."""
    if isinstance(outcome, str):
        return note(_NAME, f"not run: {outcome}", "" if outcome.startswith("--no-run") else "see the lines above")
    result = outcome.result
    if result is not None and not outcome.reason:
        kind = "simulated ranks" if result["simulated"] else "ranks"
        what = "all pairs, the ring and the all-gather" if result["puts"] else "the all-gather"
        text = f"{result['world']} {kind}: {what} brought what was sent"
        if not result["puts"]:
            text += "; PyTorch's memory has no puts to test"
        times = (
            ("put and signal", result["hop_us"], "µs per hop"),
            ("all-gather of 1 KiB", result["gather_us"], "µs"),
        )
        if told := ", ".join(f"{one} {took:g} {unit}" for one, took, unit in times if took is not None):
            text += f"; {told}"
        return ok(_NAME, text)
    text = f"{outcome.reason or 'no rank reported a result'}; {_where(outcome.stages) or 'no rank had begun'}"
    if outcome.error:
        text += f"; first error: {outcome.error}"
    return problem(_NAME, text, _advice(facts, outcome))


def _where(stages: Mapping[int, str]) -> str:
    """``rank 0 and 1 in tdcoll.initialize``: who was where last."""
    by_stage: dict[str, list[str]] = {}
    for rank, stage in sorted(stages.items()):
        by_stage.setdefault(stage, []).append(str(rank))
    return ", ".join(f"last in {stage}: rank {', '.join(ranks)}" for stage, ranks in by_stage.items())


def _advice(facts: Facts, outcome: Outcome) -> str:
    advice = (
        "first what the lines above say; docs/errors.md explains tdcoll's errors; --json FILE keeps the job's output"
    )
    if facts.simulated:
        return advice
    if "tdcoll.initialize" in outcome.stages.values():
        return f"{advice}; NVSHMEM_DEBUG=INFO shows how far NVSHMEM comes"
    return f"{advice}; `nvidia-smi topo -p2p r` shows whether GPUs reach each other"
