# SPDX-License-Identifier: Apache-2.0
"""Joining and leaving a job: wrong settings, ranks that cannot make one job, and calls outside of
any job."""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import triton.language as tl
from processes import python

import tdcoll
import tdcoll.language as tdl
from tdcoll import runtime
from tdcoll.base import environment
from tdcoll.base.arguments import parse_bytes
from tdcoll.base.errors import TdcollError
from tdcoll.base.limits import COLLECTIVES
from tdcoll.calls.collective import spec_of
from tdcoll.job import admission, lifecycle, settings

INITIALIZE = """
import sys, tdcoll
try:
    tdcoll.initialize()
finally:
    print(*(name for name in sys.modules if name.startswith(("tdcoll.", "triton"))))
"""


def test_neither_gpu_nor_simulator() -> None:
    done = python("-c", INITIALIZE, without=["TRITON_INTERPRET"], CUDA_VISIBLE_DEVICES="")
    assert done.returncode != 0
    # Nor does a first initialize() import what it does not need.
    imported = done.stdout.split()
    assert "tdcoll.language" in imported
    assert [
        name for name in imported if name.startswith(("tdcoll.collectives", "tdcoll.calls.context"))
    ] == []
    assert "TdcollError: no CUDA GPU is visible to PyTorch" in done.stderr
    assert "launch.sh" in done.stderr
    assert "TRITON_INTERPRET=1" in done.stderr


# ---------------------------------------------------------------------- settings


BYTES = {
    "1": 1,
    "67108864": 1 << 26,
    "64M": 1 << 26,
    "64m": 1 << 26,
    "64MB": 1 << 26,
    "64MiB": 1 << 26,
}
BYTES |= {" 2 G ": 1 << 31, "1.5K": 1536, "1T": 1 << 40, "100B": 100}


def test_bytes() -> None:
    assert {text: parse_bytes(text, "X") for text in BYTES} == BYTES


@pytest.mark.parametrize(
    "text", ["", "0", "-1", "M", "1.5.2G", "1e9", "64 MM", "0.1", "many", "1G 2M", "0x10", "²", "٣"]
)
def test_bytes_that_are_none(text: str) -> None:
    with pytest.raises(
        ValueError, match=r"^X must be a positive number of bytes such as"
    ) as raised:
        parse_bytes(text, "X")
    assert repr(text) in str(raised.value)


@pytest.mark.parametrize(
    ("variable", "value", "text"),
    [
        ("NVSHMEM_SYMMETRIC_SIZE", "plenty", "must be .*'plenty'"),
        ("NVSHMEM_SYMMETRIC_SIZE", "9" * 5000, "must be .*'9{60}'[.]{3}$"),
        ("NVSHMEM_SYMMETRIC_SIZE", "1." + "9" * 5000, "must be "),
        *(
            ("TDCOLL_TIMEOUT_S", value, f"must be a number of seconds, got '{value}'")
            for value in ("soon", "²")
        ),
        ("TDCOLL_TIMEOUT_S", "0", r"must be greater than 0 .*, got 0\.0"),
        ("TDCOLL_TIMEOUT_S", "-3", r"must be greater than 0 .*, got -3\.0"),
        ("TDCOLL_TIMEOUT_S", "nan", "must be greater than 0 .*, got nan"),
        ("TDCOLL_TIMEOUT_S", "inf", "must be .* at most 1000000000 seconds, got inf"),
        ("TDCOLL_TIMEOUT_S", "9" * 5000, "must be .*, got inf"),
        *(
            (
                "TDCOLL_EMULATE_NODES",
                value,
                f"must be a whole number of at least 1, got '{value[:60]}'",
            )
            for value in ("two", "0", "²", "9" * 5000)
        ),
    ],
    ids=lambda value: ascii(value)[:40],
)
def test_wrong_environment(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, text: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=f"{variable} {text}"):
        tdcoll.initialize()
    assert not tdcoll.is_initialized()
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"heap_bytes": 0}, ValueError, "heap_bytes must be at least 1, got 0"),
        ({"heap_bytes": -5}, ValueError, "heap_bytes must be at least 1, got -5"),
        (
            {"heap_bytes": "plenty"},
            ValueError,
            "heap_bytes must be a positive number of bytes such as .*'plenty'",
        ),
        (
            {"heap_bytes": 1.5},
            TypeError,
            "heap_bytes must be an int, or a text such as '64M' or '2G'; got 1.5",
        ),
        (
            {"timeout_s": 0},
            ValueError,
            "timeout_s must be greater than 0 and at most 1000000000 seconds, got 0",
        ),
        ({"timeout_s": float("nan")}, ValueError, "timeout_s must be greater than 0 .*, got nan"),
        (
            {"timeout_s": float("inf")},
            ValueError,
            "timeout_s must be .* at most 1000000000 seconds, got inf",
        ),
        (
            {"timeout_s": 1e12},
            ValueError,
            "timeout_s must be .* at most 1000000000 seconds, got 1000000000000",
        ),
        ({"timeout_s": "5"}, TypeError, "timeout_s must be a number of seconds, got '5'"),
        ({"emulate_nodes": "two"}, TypeError, "emulate_nodes must be an int, got 'two'"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        tdcoll.initialize(**arguments)
    assert not dist.is_initialized()


def test_a_variable_that_is_misspelt(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in environment.unknown(os.environ):
        monkeypatch.delenv(name)
    monkeypatch.setenv("TDCOLL_TIMOUT_S", "3")
    environment.warn_of_unknown.cache_clear()
    for _ in range(2):
        settings.JobSettings.read(None, None)
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("tdcoll", "WARNING")
    assert (
        "TDCOLL_TIMOUT_S is none of tdcoll's and has no effect: did you mean TDCOLL_TIMEOUT_S?"
        in record.message
    )


def test_the_default_heap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NVSHMEM_SYMMETRIC_SIZE", raising=False)
    for interpreted, nbytes in ((True, 64 << 20), (False, 384 << 20)):
        monkeypatch.setattr(settings, "INTERPRETED", interpreted)
        assert settings.JobSettings.read(None, None).heap_bytes == nbytes
    assert settings.JobSettings.read("2M", 1, 1).heap_bytes == 2 << 20


def test_what_is_documented_fits_into_the_default_heap() -> None:
    """docs/sparse-all-reduce.md, on 8 GPUs; an inbox for the backend's largest calls takes an
    eighth of the heap."""
    heap = environment.DEFAULT_HEAP_BYTES
    documented = {"max_rows_per_rank": 20_000, "max_row_bytes": 4 * 512}
    assert tdcoll.memory_plan({"rows": documented}, world_size=8).total + (8 << 20) < heap
    for spec in map(spec_of, COLLECTIVES):
        assert 0 < 2 * 8 * spec.inbox(spec.backend_limit(8), 8, heap) <= heap // 8


# ---------------------------------------------------------------------- ranks that cannot make one job


def test_ranks_with_other_settings() -> None:
    other = settings.JobSettings(1 << 20, 30.0, 1, share_gpus=True)
    control: Any = SimpleNamespace(
        all_gather=lambda ranks, tag, mine: [mine, (dataclasses.asdict(other), *mine[1:])]
    )
    with pytest.raises(tdcoll.RankMismatchError) as raised:
        lifecycle._join(settings.JobSettings(1 << 21, 30.0, 1), control, None, 0, 2)
    assert str(raised.value) == (
        "the settings of tdcoll.initialize() must be the same on all ranks; they differ in heap_bytes "
        "(rank 0: 2097152, rank 1: 1048576), share_gpus (rank 0: False, rank 1: True)"
    )


def join_beside(monkeypatch: pytest.MonkeyPatch, other: Callable[[Any], Any]) -> str:
    """Join as one of two ranks of which the second gives ``other`` of what the first gives; return
    what the error says."""
    control: Any = SimpleNamespace(all_gather=lambda ranks, tag, mine: [mine, other(mine)])
    monkeypatch.setattr(admission, "kernels_digest", lambda: "0a1b2c3d")
    with pytest.raises(tdcoll.RankMismatchError) as raised:
        lifecycle._join(settings.JobSettings(1 << 21, 30.0, 1), control, None, 0, 2)
    return str(raised.value)


@pytest.mark.parametrize("package", ["tdcoll", "torch", "triton"])
def test_ranks_with_other_versions(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    said = join_beside(monkeypatch, lambda mine: (*mine[:3], mine[3] | {package: "other"}))
    own = admission.software()[package]
    assert said == (
        "the software of tdcoll.initialize() must be the same on all ranks; they differ in "
        f"{package} (rank 0: {own}, rank 1: other)"
    )


def test_a_rank_with_a_version_that_does_not_say_what_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = join_beside(monkeypatch, lambda mine: mine[:3])
    assert "tdcoll (rank 0: 0.1.0, source 0a1b2c3d, rank 1: unknown, an older tdcoll)" in said


def refuse(*ranks: tuple[str, Any], heap: str = "nvshmem", share_gpus: bool = False) -> None:
    """Raise unless ranks on nodes of these names, with these GPUs, can make one job."""
    answers = [(None, *rank) for rank in ranks]
    admission.refuse_impossible(answers, heap, emulate_nodes=1, share_gpus=share_gpus)


A, B = ("here", "GPU 0"), ("here", "GPU 1")


@pytest.mark.parametrize(
    ("variable", "argument", "shares"),
    [
        *((given, None, True) for given in ("1", "yes")),
        *((given, True, True) for given in (None, "0")),
        *((given, None, False) for given in (None, "0", "")),
        ("1", False, False),
    ],
)
def test_ranks_that_may_share_a_gpu(
    monkeypatch: pytest.MonkeyPatch, variable: str | None, argument: bool | None, shares: bool
) -> None:
    if variable is not None:
        monkeypatch.setenv("TDCOLL_SHARE_GPUS", variable)
    assert settings.JobSettings.read(None, None, None, argument).share_gpus == shares
    ranks = (("here", B), ("here", A), ("here", A))
    if shares:
        refuse(*ranks, share_gpus=True)
    else:
        text = r"ranks 1 and 2 use the same GPU.*set_device\(LOCAL_RANK\).*TDCOLL_SHARE_GPUS=1"
        with pytest.raises(tdcoll.RankMismatchError, match=text):
            refuse(*ranks)


def test_hosts_and_nodes_need_puts() -> None:
    refuse(("here", None), ("here", None), heap="torch")
    refuse(("here", A), ("here", B), heap="torch")
    with pytest.raises(TdcollError, match=r"the job has 2 \(here, there\): install tdcoll\[cu12\]"):
        refuse(("here", None), ("there", None), heap="torch")
    # Algorithms on a node of each agent's would need puts.
    with pytest.raises(TdcollError, match=r"2 \(GROUP_RANK=0 on here, GROUP_RANK=1 on here\)"):
        refuse(("GROUP_RANK=0", A), ("GROUP_RANK=1", B), heap="torch")
    with pytest.raises(TdcollError, match="share_gpus needs heap='nvshmem'"):
        refuse(("here", A), ("here", A), heap="torch", share_gpus=True)


@pytest.mark.parametrize(
    "assignment", ["NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME=lo", "NVSHMEM_REMOTE_TRANSPORT=none"]
)
def test_settings_for_one_host_are_refused_on_several(
    monkeypatch: pytest.MonkeyPatch, assignment: str
) -> None:
    for name in ("NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME", "NVSHMEM_REMOTE_TRANSPORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(*assignment.split("="))
    refuse(("GROUP_RANK=0", A), ("GROUP_RANK=1", B))
    with pytest.raises(
        TdcollError, match=rf"{assignment} is for one host, and the job has 2 \(here, there\)"
    ):
        refuse(("b", ("there", "GPU 0")), ("a", A))


# ---------------------------------------------------------------------- GPUs


@pytest.mark.parametrize(
    ("share_gpus", "device", "backend"),
    [(True, 1, "cpu:gloo,cuda:gloo"), (False, 5, "cpu:gloo,cuda:nccl")],
)
def test_device_and_process_group_on_gpus(
    monkeypatch: pytest.MonkeyPatch, share_gpus: bool, device: int, backend: str
) -> None:
    devices: list[int] = []
    backends: list[str] = []
    monkeypatch.setattr(lifecycle, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    monkeypatch.setattr(dist, "init_process_group", lambda name, **_: backends.append(name))
    monkeypatch.setenv("LOCAL_RANK", "5")
    lifecycle._make_process_group(settings.JobSettings(1, 1.0, 1, share_gpus))
    assert (devices, backends) == ([device], [backend])


def test_whether_gpus_may_be_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TDCOLL_SHARE_GPUS", "1")
    assert not lifecycle.may_share_gpus(), "the simulator has none"
    monkeypatch.setattr(lifecycle, "INTERPRETED", False)
    assert lifecycle.may_share_gpus()
    options = settings.JobSettings(heap_bytes=1, timeout_s=1.0, emulate_nodes=1, share_gpus=False)
    monkeypatch.setattr(lifecycle, "_options", options)
    assert not lifecycle.may_share_gpus(), "the job's setting holds"


# ---------------------------------------------------------------------- outside of any job


@tdcoll.jit
def name_the_rank(out):
    tl.store(out, tdl.my_pe())


NEED_NO_JOB = {"finalize", "initialize", "is_initialized", "jit", "match_indices", "__version__"}
NEED_NO_JOB |= {"Table", "Topology", "begin_epoch", "memory_plan"}
NEED_NO_JOB |= {"sparse_all_reduce_padded"}  # it takes a context
NEED_NO_JOB |= {"Explanation", "MemoryPlan", "PaddedRows"}  # calls return them
GIVEN: dict[str, Any] = {
    **dict.fromkeys(("tensor", "dest", "source", "values"), torch.zeros(1)),
    **dict.fromkeys(("indices", "word"), torch.zeros(1).long()),
    **dict.fromkeys(("num_rows", "max_rows_per_rank", "max_bytes_per_rank", "shape", "value"), 1),
    "max_row_bytes": 4,
    "rank": 0,
    "compare": ">=",
    "operation": "all_reduce",
}
"""Arguments by the names of parameters."""

MORE = {"CollectiveContext": ["max_bytes_per_rank"]}
"""Parameters that are needed though they have a default."""


@pytest.mark.parametrize(
    "name",
    [n for n in tdcoll.__all__ if n not in NEED_NO_JOB and not n.endswith(("Error", "Timeout"))],
)
def test_calls_outside_of_a_job(name: str) -> None:
    call = getattr(tdcoll, name)
    needed = [one for one, p in inspect.signature(call).parameters.items() if p.default is p.empty]
    given = {one: GIVEN[one] for one in needed + MORE.get(name, [])}
    if name == "sparse_all_reduce":
        given["tensor"] = torch.zeros(1).to_sparse()
    assert not tdcoll.is_initialized()
    with pytest.raises(tdcoll.NotInitializedError, match=r"call tdcoll\.initialize\(\) first"):
        call(**given)


def test_kernel_outside_of_a_job() -> None:
    text = r"^kernel name_the_rank calls the device language: call tdcoll\.initialize\(\) before launching it"
    with pytest.raises(tdcoll.NotInitializedError, match=text):
        name_the_rank[(1,)](torch.zeros(1, dtype=torch.int32))


def test_finalize_outside_of_a_job_does_nothing() -> None:
    tdcoll.finalize()
    assert runtime.current_or_none() is None
