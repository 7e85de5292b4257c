# SPDX-License-Identifier: Apache-2.0
"""What a program of one process does with initialize() and finalize()."""

from __future__ import annotations

import logging
import multiprocessing
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tdcoll
from tdcoll import runtime

LAUNCHERS = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "GROUP_RANK",
    "SLURM_NODEID",
    "MASTER_ADDR",
    "MASTER_PORT",
)
VARIABLES = (
    "NVSHMEM_SYMMETRIC_SIZE",
    "TDCOLL_TIMEOUT_S",
    "TDCOLL_EMULATE_NODES",
    "TDCOLL_SHARE_GPUS",
    "TDCOLL_HEAP",
)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No launcher, no settings, and nothing is left of a job."""
    for name in (*LAUNCHERS, *VARIABLES):
        monkeypatch.delenv(name, raising=False)
    assert not dist.is_initialized()
    yield
    tdcoll.finalize()
    if dist.is_initialized():
        dist.destroy_process_group()


def gather_and_compare() -> None:
    with tdcoll.CollectiveContext(max_bytes_per_rank=64) as ctx:
        data = torch.arange(16, dtype=torch.int32)
        assert torch.equal(tdcoll.all_gather(data, ctx=ctx), data)
        ctx.check()
    out = torch.zeros(16, dtype=torch.int32)
    tdcoll.distributed.all_gather_into_tensor(out, data)
    assert torch.equal(out, data)


def test_without_a_launcher() -> None:
    assert not tdcoll.is_initialized()
    tdcoll.initialize()
    assert tdcoll.is_initialized()
    assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
    assert tdcoll.heap_info().total == 64 << 20
    assert runtime.current().timeout_s == 30.0
    assert tdcoll.topology().describe() == "1 rank(s) on 1 node(s)"
    gather_and_compare()
    job = runtime.current()
    tdcoll.finalize()
    assert not tdcoll.is_initialized()
    assert not dist.is_initialized(), "the process group was tdcoll's own"
    tdcoll.finalize()
    with pytest.raises(tdcoll.NotInitializedError, match="which has ended that job"):
        job.exchange([0], "barrier")


def test_the_size_of_the_heap_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "tdcoll"):
        tdcoll.initialize(heap_bytes=3 << 19)
    text = "symmetric heap: 1.5 MiB on each of 1 ranks, by the simulator; NVSHMEM_SYMMETRIC_SIZE or initialize(heap_b"
    assert [message[: len(text)] for message in caplog.messages] == [text]


@pytest.mark.parametrize("name", ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"])
def test_a_launcher_says_that_there_are_several(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "4")
    with pytest.raises(tdcoll.TdcollError, match=f"{name}=4 says that there are 4 ranks"):
        tdcoll.initialize()
    monkeypatch.setenv(name, "1")
    tdcoll.initialize()


def join_alone(said: Any) -> None:
    """Join as a process of multiprocessing, and send what is logged."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger("tdcoll").addHandler(handler)
    tdcoll.initialize()
    said.put([record.getMessage() for record in records if record.levelname == "WARNING"])
    tdcoll.finalize()


def test_a_process_of_multiprocessing_is_told_that_it_is_alone() -> None:
    spawn = multiprocessing.get_context("spawn")
    said = spawn.Queue()
    worker = spawn.Process(target=join_alone, args=(said,))
    worker.start()
    (message,) = said.get(timeout=120)
    worker.join(60)
    assert "was started by multiprocessing" in message
    assert "its job has one rank" in message


@pytest.mark.parametrize(
    ("values", "arguments", "nbytes", "timeout_s"),
    [
        (("2M", "2.5", "1"), {}, 2 << 20, 2.5),
        (("2M", "2.5", "1"), {"heap_bytes": 4096, "timeout_s": 3}, 4096, 3.0),
        (("", "", ""), {}, 64 << 20, 30.0),  # as good as not set
    ],
)
def test_environment_variables_are_defaults(
    monkeypatch: pytest.MonkeyPatch,
    values: tuple[str, ...],
    arguments: dict,
    nbytes: int,
    timeout_s: float,
) -> None:
    for name, value in zip(VARIABLES, values, strict=False):
        monkeypatch.setenv(name, value)
    tdcoll.initialize(**arguments)
    assert (tdcoll.heap_info().total, runtime.current().timeout_s) == (nbytes, timeout_s)


def test_a_second_call() -> None:
    tdcoll.initialize(heap_bytes=8 << 20, timeout_s=7)
    job = runtime.current()
    tdcoll.initialize()
    tdcoll.initialize(heap_bytes=8 << 20)
    tdcoll.initialize(timeout_s=7.0, emulate_nodes=1, share_gpus=False)
    assert runtime.current() is job
    assert tdcoll.WaitMonitor().timeout_s == 7.0
    for asked, text in (
        ({"heap_bytes": 1 << 21}, "heap_bytes=8388608; got 2097152"),
        ({"timeout_s": 8}, r"timeout_s=7\.0; got 8"),
        ({"heap_bytes": 8 << 20, "emulate_nodes": 2}, "emulate_nodes=1; got 2"),
        ({"share_gpus": True}, "share_gpus=False; got True"),
    ):
        with pytest.raises(
            tdcoll.AlreadyInitializedError, match=text + r"\. Call tdcoll\.finalize"
        ):
            tdcoll.initialize(**asked)
    gather_and_compare()


def test_a_job_knows_its_heap() -> None:
    with pytest.raises(
        tdcoll.TdcollError, match="emulate_nodes=2 needs puts, which heap='torch' does not have"
    ):
        tdcoll.initialize(heap="torch", emulate_nodes=2)
    tdcoll.initialize(heap="torch")
    tdcoll.initialize()
    tdcoll.initialize(heap="auto")
    with pytest.raises(tdcoll.AlreadyInitializedError, match="heap=torch; got nvshmem"):
        tdcoll.initialize(heap="nvshmem")


def test_refused_settings_leave_nothing_behind() -> None:
    with pytest.raises(
        ValueError, match=r"emulate_nodes must be between 1 and the 1 rank\(s\) of this host, got 2"
    ):
        tdcoll.initialize(emulate_nodes=2)
    with pytest.raises(tdcoll.HeapExhaustedError, match="NVSHMEM_SYMMETRIC_SIZE"):
        tdcoll.initialize(heap_bytes=1 << 60)
    assert not tdcoll.is_initialized()
    assert not dist.is_initialized()
    tdcoll.initialize()


def test_finalize_closes_contexts_of_the_drop_in_call() -> None:
    tdcoll.initialize()
    tdcoll.distributed.all_gather_into_tensor(torch.zeros(4), torch.ones(4))
    (pool,) = runtime.current().contexts.values()
    context = pool.context
    tdcoll.finalize()
    assert context.closed


def test_failed_job_is_only_forgotten() -> None:
    tdcoll.initialize()
    job = runtime.current()
    job.failed = True
    tdcoll.finalize()
    assert not tdcoll.is_initialized()
    assert dist.is_initialized(), "nothing collective may be tried: a peer may be gone"
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    tdcoll.initialize()
    tdcoll.finalize()
    assert dist.is_initialized(), "the process group is the user's, and not that of the failed job"


def test_the_process_that_serves_the_store_leaves_when_all_do() -> None:
    """A rank or a store that is gone at the very end has nothing to lose."""
    tdcoll.initialize()
    tags: list[str] = []

    def gather(
        ranks: Sequence[int], tag: str, value: object = None, timeout_s: float | None = None
    ) -> list[object]:
        tags.append(tag)
        if tag == "leave":
            raise tdcoll.TdcollError("the store is gone")
        return [value]

    runtime.current().control = SimpleNamespace(all_gather=gather)  # type: ignore[assignment]
    tdcoll.finalize()
    assert tags == ["finalize (all contexts are closed)", "leave"]


def test_nodes_are_named_by_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("SLURM_NODEID", "GROUP_RANK"):  # the later one wins
        monkeypatch.setenv(variable, "3")
        tdcoll.initialize()
        assert runtime.current().node_ids == ((f"{variable}=3", 0),)
        tdcoll.finalize()


def test_beside_the_users_process_group() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    tdcoll.initialize()
    gather_and_compare()
    group = dist.new_group([0])
    assert tdcoll.topology(group).pes == (0,)
    tdcoll.finalize()
    assert dist.is_initialized(), "the process group is the user's"
    assert dist.get_world_size() == 1
    tdcoll.initialize()
    gather_and_compare()
    tdcoll.finalize()
    dist.all_reduce(torch.ones(1))


def test_other_ranks_without_finalize(monkeypatch: pytest.MonkeyPatch) -> None:
    tdcoll.initialize()
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    with pytest.raises(
        tdcoll.AlreadyInitializedError, match=r"rank 0 of 1, but torch\.distributed is now rank 1"
    ):
        tdcoll.initialize()
