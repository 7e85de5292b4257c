# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E501 (a table has a case per line)
"""The small job: what its ranks do, in a World, and what its starter makes of how it ends."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace

import pytest
import triton.language as tl

import tdcoll
import tdcoll.language as tdl
from tdcoll.doctor import functional, job, kernels
from tdcoll.doctor.child import Ended
from tdcoll.testing import World, explore, first_failure
from tests.doctor.healthy import GPUS, SIMULATOR, environment, found


def case(world: World) -> None:
    reports = []
    world.run(lambda pe: reports.append(job.run(30.0)))
    expected = {"world": world.n_pes, "simulated": True, "puts": world.memory.puts, "hop_us": None, "gather_us": None}
    assert reports == [expected] * world.n_pes


def test_every_rank_is_content_over_seeds():
    for n_pes, seeds in ((1, 1), (2, 4), (3, 6)):
        explore(case, n_pes=n_pes, seeds=seeds)
    explore(case, n_pes=4, seeds=3, ranks_per_node=2)


def test_ranks_of_a_heap_without_puts_are_content():
    case(World(2, puts=False))


@tdcoll.jit
def only_signals(boxes, source, signals, monitor, nbytes):
    me = tdl.my_pe()
    world = tdl.n_pes()
    for pe in tl.range(0, world):
        tdl.signal_block(signals + me, 1, tdl.SIGNAL_SET, pe)
    for pe in tl.range(0, world):
        tdl.wait_signal(signals + pe, tdl.CMP_GE, 1, monitor, pe, pe)


@tdcoll.jit
def into_the_wrong_box(boxes, source, signals, monitor, nbytes):
    me = tdl.my_pe()
    world = tdl.n_pes()
    for pe in tl.range(0, world):
        target = boxes + tl.cast(pe, tl.int64) * nbytes
        tdl.putmem_signal_block(target, source, nbytes, signals + me, 1, tdl.SIGNAL_SET, pe)
    for pe in tl.range(0, world):
        tdl.wait_signal(signals + pe, tdl.CMP_GE, 1, monitor, pe, pe)


@pytest.mark.parametrize("mutant", [only_signals, into_the_wrong_box])
def test_wrong_data_is_seen(monkeypatch, mutant):
    monkeypatch.setattr(kernels, "to_all", mutant)
    failure = first_failure(case, n_pes=2, seeds=1)
    assert failure is not None
    assert "put by rank" in str(failure.error)
    assert "128 words are wrong" in str(failure.error)


def lines(*said: dict) -> str:
    return "".join(f"{job.MARK}{json.dumps(line)}\n" for line in said)


WELL = lines(
    {"rank": 1, "stage": "ring"},
    {"rank": 0, "result": {"world": 2, "simulated": False, "puts": True, "hop_us": 1.9, "gather_us": 9.5}},
)
WITHOUT_PUTS = lines(
    {"rank": 0, "result": {"world": 2, "simulated": False, "puts": False, "hop_us": None, "gather_us": 9.5}}
)


@pytest.mark.parametrize(
    ("ended", "status", "text", "advice"),
    [
        (Ended(0, "noise\n" + WELL), "ok", "2 ranks: all pairs, the ring and the all-gather brought what was sent; put "
         "and signal 1.9 µs per hop, all-gather of 1 KiB 9.5 µs", ""),
        (Ended(0, WITHOUT_PUTS), "ok", "2 ranks: the all-gather brought what was sent; PyTorch's memory has no puts to "
         "test; all-gather of 1 KiB 9.5 µs", ""),
        (Ended(0, ""), "problem", "no rank reported a result", "docs/errors.md"),
        (Ended(None, "torch.SignalException: Process 3 got signal: 15\n", True, "it did not end within 9 s"), "problem",
         "it did not end within 9 s; no rank had begun", "docs/errors.md"),
        (Ended(1, WELL, reason="exit status 1"), "problem", "exit status 1", "docs/errors.md"),
        (Ended(1, lines({"rank": 0, "stage": "tdcoll.initialize"}, {"rank": 1, "stage": "ring"},
                        {"rank": 1, "error": "CollectiveTimeout: rank 1 waited"}, {"rank": 0, "error": "later"}),
               reason="exit status 1"), "problem",
         "first error: rank 1: CollectiveTimeout: rank 1 waited", "NVSHMEM_DEBUG=INFO"),
        (Ended(1, "Traceback (most recent call last):\n  File \"x\"\nImportError: cannot import name 'knobs'\nValueError: 2\n",
               reason="exit status 1"), "problem", "first error: ImportError: cannot import name 'knobs'", ""),
        (Ended(1, "starting\nnvshmem/bootstrap_uid.cpp:41: non-zero status: socket failure\nmore\n", reason="exit status 1"),
         "problem", "first error: nvshmem/bootstrap_uid.cpp:41: non-zero status: socket failure", ""),
        (Ended(None, lines({"rank": 0, "stage": "tdcoll.initialize"}, {"rank": 1, "stage": "tdcoll.initialize"}), True,
               "it did not end within 9 s"), "problem",
         "it did not end within 9 s; last in tdcoll.initialize: rank 0, 1", "NVSHMEM_DEBUG"),
    ],
    ids=["well", "without puts", "nothing", "slow", "after the end", "error of a rank", "traceback", "library", "hangs"],
)  # fmt: skip
def test_how_a_job_ended(ended, status, text, advice):
    line = functional.judge(GPUS, functional.read(ended))
    assert (line.status, line.name) == (status, "put, signal, all-gather")
    assert text in line.text
    assert advice in line.advice
    assert bool(line.advice) == (status == "problem")


def test_a_job_that_hangs_is_ended():
    stub = f"import time; print({lines({'rank': 0, 'stage': 'tdcoll.initialize'})!r}, flush=True); time.sleep(60)"
    begin = time.monotonic()
    outcome = functional.start(SIMULATOR, 0.5, [sys.executable, "-S", "-c", stub])
    assert time.monotonic() - begin < 10
    assert outcome.timed_out
    line = functional.judge(SIMULATOR, outcome)
    assert line.status == "problem"
    assert line.text == "it did not end within 0.5 s; last in tdcoll.initialize: rank 0"


def test_a_job_that_cannot_run_is_not_started():
    assert functional.cannot_run(SIMULATOR) == functional.cannot_run(GPUS) == ""
    broken = replace(SIMULATOR, **found(SIMULATOR, torch={"error": "x"}, greenlet={"missing": True, "error": "y"}))
    assert functional.cannot_run(broken) == "torch, greenlet cannot be imported"
    assert functional.cannot_run(replace(GPUS, gpus=())) == "PyTorch sees no GPU"
    assert functional.judge(broken, "torch cannot be imported").status == "note"


def test_environment_of_the_job_is_that_of_setenv():
    """A value of the user's wins; what an outer job has left does not count."""
    changes = environment(GPUS, RANK="3", MASTER_PORT="1", TORCHELASTIC_RUN_ID="x", LD_LIBRARY_PATH="/cuda",
                          NVSHMEM_DISABLE_NVLS=None, NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME="eth0")  # fmt: skip
    made = functional.job_environment(replace(GPUS, **changes))
    assert not {"RANK", "MASTER_PORT", "TORCHELASTIC_RUN_ID"} & set(made)
    assert made["LD_LIBRARY_PATH"] == f"{GPUS.nvshmem_libraries}:/cuda"
    assert (made["NVSHMEM_DISABLE_NVLS"], made["NVSHMEM_REMOTE_TRANSPORT"]) == ("1", "none")
    assert made["NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME"] == "eth0"
    assert "TRITON_INTERPRET" not in made
    assert functional.job_environment(replace(SIMULATOR, environment={}))["TRITON_INTERPRET"] == "1"
