# SPDX-License-Identifier: Apache-2.0
"""Backend "tdcoll" and sparse gradients: jobs beside their checks of ``workers``, and what one rank
shows alone."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checks import WORKERS
from processes import python
from ranks import Wrapped
from tiers import slow_tier
from torch.distributed._functional_collectives import AsyncCollectiveTensor, all_gather_tensor

import tdcoll
from tdcoll import distributed, runtime
from tdcoll.base.limits import COLLECTIVES
from tdcoll.calls.collective import spec_of
from tdcoll.distributed import BackendTimeout, Options, agreement, explain
from tdcoll.distributed.call import Call
from tdcoll.distributed.fallback import add_backends
from tdcoll.distributed.options import HANDLES, KINDS
from tdcoll.distributed.queues import Queue, QueuedCall, TaskWork
from tdcoll.distributed.work import as_backend_error
from tdcoll.job import lifecycle, settings
from tdcoll.spec.constants import RECORD_VALID

Launch = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.mark.slow
def test_pytorchs_own_cases(launch: Launch) -> None:
    done = launch("--simulate", "--nproc", "4", str(WORKERS / "pytorch_cases.py"), timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    *cases, last = (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))
    assert sum(case["outcome"] == "passed" for case in cases) > 90
    assert all(last["handled"][kind] for kind in ("all_gather", "all_reduce", "barrier"))


@pytest.mark.slow
def test_pytorchs_own_case_of_a_timeout(launch: Launch) -> None:
    case = "test_barrier_timeout_full_group$"
    done = launch("--simulate", "--nproc", "4", str(WORKERS / "pytorch_cases.py"), case)
    found, _ = (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))
    assert (done.returncode, found["outcome"]) == (0, "passed"), done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("when", "words"),
    [
        ("sparse", r"BackendTimeout: rank {rank} waited 3 s for peer 1: signal "),
        ("dense", r"BackendTimeout: rank {rank} waited 3 s for peer 1: signal "),
        ("inner", "gloo"),  # whose words depend on how it notices
    ],
)
def test_a_rank_killed_in_training_ends_the_others_waits(
    launch: Launch, when: str, words: str
) -> None:
    # torchrun ends the survivors when it next looks: they must have timed out by then.
    script = str(WORKERS / "killed_rank.py")
    done = launch("--simulate", "--nproc", "3", "--monitor-interval", "25", script, when, "1")
    assert done.returncode != 0
    for survivor in (0, 2):
        said = re.search(
            rf"rank {survivor} after (\d+) s: .*{words.format(rank=survivor)}", done.stderr
        )
        assert said, done.stderr
        assert int(said[1]) <= 15  # of 3; for other processes on the same cores
        # The other survivor may be late as well, because it has noticed later.
        then = rf"rank {survivor} then: BackendTimeout: rank {survivor} waited 3 s for peer (1|{2 - survivor})"
        assert re.search(then, done.stderr), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("script", ["backend_beside.py", "finish_left_out.py"])
def test_jobs_that_end_well(launch: Launch, script: str) -> None:
    """Beside another backend; and where a reducer's finish is left out, whose calls wait for ranks
    that don't come."""
    done = launch("--simulate", "--nproc", "2", str(WORKERS / script))
    assert done.returncode == 0, done.stdout + done.stderr
    assert script != "backend_beside.py" or done.stdout.count("done") == 2


@pytest.mark.slow
def test_many_calls_leave_nothing_behind(launch: Launch) -> None:
    """In memory, open files, threads, and keys of the store. 20,000 calls take 5 minutes on two
    cores."""
    soak = ("--simulate", "--nproc", "2", str(WORKERS / "backend_soak.py"), "2000")
    done = launch(*soak, timeout=300, env={"PYTHONMALLOC": "malloc"})
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["calls"] >= 2000


@pytest.mark.slow
def test_a_leak_is_found(launch: Launch) -> None:
    soak = ("--simulate", "--nproc", "2", str(WORKERS / "backend_soak.py"), "800", "leak")
    done = launch(*soak, env={"PYTHONMALLOC": "malloc"})
    assert done.returncode != 0
    assert re.search(r"memory grows by at least \d+ KiB in every 208 calls", done.stderr), (
        done.stderr
    )


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("all_reduce", "pytorch"),
        slow_tier("all_gather", "call"),
        slow_tier("all_gather", "new"),
        slow_tier("list", "call-async"),
        slow_tier("reduce_scatter", "group-async"),
        slow_tier("all_to_all", "pytorch-async"),
        slow_tier("sparse", "call-async"),
        slow_tier("sparse", "group"),
        slow_tier("barrier", "call"),
        slow_tier("fallback", "pytorch"),
        slow_tier("fallback", "call-async"),
    ],
)
def test_a_timeout_that_is_set_late(launch: Launch, kind: str, how: str) -> None:
    """Of the group or of the call, whoever handles it: 1.5 s in place of 60."""
    done = launch("--simulate", "--nproc", "2", str(WORKERS / "late_rank.py"), kind, how)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["error"] == ("RuntimeError" if kind == "fallback" else "BackendTimeout"), found
    assert 1.0 < found["seconds"] < 15, found


ALONE = """
import sys, torch, torch.distributed as dist
import tdcoll.distributed
dist.init_process_group("tdcoll", store=dist.HashStore(), rank=0, world_size=1)
tensor = torch.sparse_coo_tensor([[1, 1]], torch.ones(2, 2), (3, 2))
dist.all_reduce(tensor)
assert tensor.to_dense().tolist() == [[0, 0], [2, 2], [0, 0]]
out = torch.empty(3)
dist.all_gather([out], torch.arange(3.0))
assert out.tolist() == [0, 1, 2]
dist.barrier()
print(tdcoll.distributed.explain())
dist.destroy_process_group()
"""


def test_without_gpu_or_simulator_all_is_the_inner_groups() -> None:
    done = python(
        "-W", "ignore", "-c", ALONE, without=["TRITON_INTERPRET"], CUDA_VISIBLE_DEVICES=""
    )
    assert done.returncode == 0, done.stderr
    for kind in KINDS:
        assert f"  {kind}: fallback backend; no GPU, and not the simulator" in done.stdout
    assert "by tdcoll" not in done.stdout
    # a warning: it is not what was asked for
    assert "gloo (cpu) handles all calls of group" in done.stderr


@pytest.mark.parametrize(("share_gpus", "name"), [(True, "gloo"), (False, "nccl")])
def test_inner_backends_on_gpus(monkeypatch, share_gpus: bool, name: str) -> None:
    """NCCL refuses two ranks on one GPU, so where ranks may share GPUs there is none."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr("tdcoll.distributed.fallback._nccl", lambda *_: "made")
    registered = {}

    class Group:
        def _set_default_backend(self, kind) -> None:
            registered["default"] = str(kind).rpartition(".")[2]

        def _register_backend(self, device, kind, made) -> None:
            registered[device.type] = str(kind).rpartition(".")[2]

    monkeypatch.setattr(lifecycle, "may_share_gpus", lambda: share_gpus)
    found = add_backends(
        (Group(),), dist.HashStore(), 0, 1, timedelta(seconds=5), "0", [], None, False, print, None
    )
    assert {device: backend for device, (backend, _) in found.items()} == {
        "cpu": "gloo",
        "cuda": name,
    }
    assert registered == {"default": name.upper(), "cpu": "GLOO", "cuda": name.upper()}


@pytest.mark.parametrize(
    ("current", "local_rank", "share", "device"),
    [(0, "3", "1", 1), (0, "2", "1", 0), (0, "1", "0", 1), (0, "3", "0", 0), (1, "2", "1", 1)],
)
def test_device_of_a_rank(
    monkeypatch, current: int, local_rank: str, share: str, device: int
) -> None:
    monkeypatch.setattr(lifecycle, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    monkeypatch.setenv("TDCOLL_SHARE_GPUS", share)
    assert agreement.device_of_this_rank() == torch.device("cuda", device)


def test_a_heap_of_pytorchs_needs_no_nvshmem(monkeypatch) -> None:
    for module in (agreement, settings):
        monkeypatch.setattr(module, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(agreement, "bitcode_path", lambda: "libnvshmem_device.bc")
    monkeypatch.setitem(sys.modules, "nvshmem.bindings.nvshmem", None)
    for heap, obstacle in (("nvshmem", "NVSHMEM is not installed"), ("torch", None)):
        monkeypatch.setenv("TDCOLL_HEAP", heap)
        found = agreement._obstacle(1)
        assert found == obstacle or (obstacle and obstacle in str(found))


@pytest.fixture
def alone():
    """A default group of this process only."""

    def start(**more: object) -> object:
        dist.init_process_group("tdcoll", store=dist.HashStore(), rank=0, world_size=1, **more)
        return dist.group.WORLD

    yield start
    if dist.is_initialized():
        dist.destroy_process_group()
    assert runtime.current_or_none() is None


def test_one_rank(alone) -> None:
    group = alone(timeout=timedelta(seconds=20), pg_options=Options(heap_bytes=8 << 20))
    assert runtime.current().timeout_s == 20
    assert tdcoll.heap_info().total == 8 << 20
    tensor = torch.sparse_coo_tensor([[1, 1]], torch.ones(2, 2), (3, 2))
    dist.all_reduce(tensor)
    assert tensor.to_dense().tolist() == [[0, 0], [2, 2], [0, 0]]
    out = torch.empty(3)
    dist.all_gather([out], torch.arange(3.0))
    assert "1 sparse_all_reduce by tdcoll" in explain(group)
    assert "1 all_gather by gloo (one rank)" in explain()
    tdcoll.finalize()
    dist.all_reduce(tensor)
    assert "1 sparse_all_reduce by gloo (tdcoll.finalize() was called)" in explain()
    assert "  sparse_all_reduce: fallback backend; tdcoll.finalize() was called" in explain()


def test_an_expired_wait_that_nobody_heard_of_is_raised_at_the_end(alone) -> None:
    group: Any = alone()
    dist.all_reduce(torch.sparse_coo_tensor([[1, 1]], torch.ones(2, 2), (3, 2)))
    monitor = group.dispatcher.handlers["sparse_all_reduce"].context.monitor
    monitor._host[RECORD_VALID.value] = 1  # as a kernel does whose wait expires
    with pytest.raises(BackendTimeout, match=r"^rank 0 waited \d+ s for peer"):
        dist.destroy_process_group()


def test_deadline_of_waits_is_the_groups_or_the_variables(alone, monkeypatch) -> None:
    monkeypatch.setenv("TDCOLL_TIMEOUT_S", "7")
    alone()
    assert runtime.current().timeout_s == 7


def test_serves_by_the_environment(alone, monkeypatch) -> None:
    monkeypatch.setenv(HANDLES, "barrier, all_gather")
    group = alone()
    monkeypatch.delenv(HANDLES)  # it counts when the group is made
    assert (
        "  sparse_all_reduce: fallback backend; configured kinds: barrier, all_gather"
        in explain(group)
    )
    assert "  all_gather: fallback backend; one rank" in explain(group)
    options = Options(handles="barrier"), type("OfNCCL", (), {"__module__": "torch.distributed"})()
    for given, handles in (
        (None, "barrier, all_gather"),
        (options[0], "barrier"),
        (options[1], "barrier, all_gather"),
    ):
        split = group.split_group([0], opts=given, group_name=f"split with {given}")
        assert split.dispatcher.agreed.options.handles == handles
        assert split.dispatcher.agreed.options.nccl is (given if given is options[1] else None)
    with pytest.raises(TypeError, match=r"pg_options must be .* got dict"):
        group.split_group([0], opts={"handles": "all"}, group_name="wrong")


def test_nothing_is_joined_for_nothing(alone, monkeypatch) -> None:
    monkeypatch.setenv(HANDLES, "none")
    alone()
    assert runtime.current_or_none() is None
    assert "configured to handle nothing" in explain()


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("all", KINDS),
        ("none", ()),
        ("barrier,all_gather", ("all_gather", "barrier")),
        ("ALL_GATHER", ("all_gather",)),
    ],
)
def test_kinds(text: str, kinds: tuple[str, ...], monkeypatch) -> None:
    assert Options(handles=text).kinds == kinds
    monkeypatch.setenv(HANDLES, text)
    assert Options().kinds == kinds
    assert Options(handles="none").kinds == ()


def test_options_out_of_range() -> None:
    for wrong in ("", "everything", "all,none", "all_gather,scatter"):
        with pytest.raises(ValueError, match="handles must be"):
            Options(handles=wrong)
    with pytest.raises(ValueError, match="max_bytes_per_rank"):
        Options(max_bytes_per_rank=-1)
    with pytest.raises(TypeError, match="handles must be a str or None, got list"):
        Options(handles=["all_gather"])  # type: ignore[arg-type]
    for wrong in (0, -1):
        with pytest.raises(ValueError, match="blocks must be"):
            Options(blocks=wrong)
    with pytest.raises(TypeError, match="pg_options"):
        Options.of({"handles": "all"})
    with pytest.raises(ValueError, match="process group"):
        explain()


def test_no_call_goes_on_to_c_plus_plus_with_the_gil_held() -> None:
    """Every method that PyTorch's trampoline looks for is a Python function here: see
    `_pass_on`."""
    folder = Path(torch.__file__).parent / "include/torch/csrc/distributed/c10d"
    (header,) = folder.glob("**/PyProcessGroup.hpp")  # in py/ from PyTorch 2.15 on
    text = header.read_text(encoding="utf-8").partition("using ProcessGroup::ProcessGroup;")[2]
    looked_for = set(re.findall(r"c10::intrusive_ptr<Work> (\w+)\(", text))
    assert {"allreduce", "broadcast", "send", "recv", "reduce_scatter"} <= looked_for
    looked_for.discard("reconfigure")  # which sends nothing: it raises
    if "endCoalescing" in looked_for:
        looked_for.remove("endCoalescing")
        looked_for.add("end_coalescing")
    group = distributed.TdcollProcessGroup
    held = {name for name in looked_for if not inspect.isfunction(getattr(group, name))}
    assert held == set()


def test_sizes_that_are_served() -> None:
    """Those of each collective's spec, if nothing is said."""
    for name in COLLECTIVES:
        assert spec_of(name).backend_limit(2) == spec_of(name).backend_limits.two_ranks
        assert spec_of(name).backend_limit(4) == (1 if "reduce" in name else 4) << 20


def test_every_kind_of_call_is_explained(alone) -> None:
    """A service that does not describe itself cannot be made."""
    group = alone()
    text = explain(group)
    for kind in KINDS:
        by = (
            "tdcoll; sum and mean" if kind == "sparse_all_reduce" else "fallback backend; one rank$"
        )
        assert re.search(rf"^  {kind}: {by}", text, re.MULTILINE), text
    group.dispatcher.ranks = (0, 1)  # type: ignore[attr-defined]
    for kind in KINDS:
        by, limits = group.dispatcher.handled_by(kind)  # type: ignore[attr-defined]
        assert (by, limits != "") == ("tdcoll", True), kind


def test_kinds_without_blocks_are_explained(alone, monkeypatch) -> None:
    group: Any = alone()
    group.dispatcher.ranks = (0, 1)

    def none_left(*given: Any) -> int:
        raise tdcoll.ContextError("no thread blocks left")

    monkeypatch.setattr("tdcoll.calls.budget.Budget.take", none_left)
    sparse = torch.sparse_coo_tensor([[1]], torch.ones(1, 2), (3, 2))
    for kind, handler in group.dispatcher.handlers.items():
        tensor = sparse if kind == "sparse_all_reduce" else torch.ones(4)
        assert handler.prepare(Call([tensor], [tensor], "sum")) == "no thread blocks left"
        assert group.dispatcher.handled_by(kind) == ("fallback backend", "no thread blocks left")


def test_tensors_that_wrap_others(alone) -> None:
    """Those without memory are refused, as by gloo; results of functional collectives are waited
    for."""
    alone()
    tensor, wrapper = torch.arange(3.0), Wrapped(torch.ones(3))
    for call in (
        lambda: dist.all_reduce(wrapper),
        lambda: dist.all_gather_into_tensor(tensor, wrapper),
        lambda: dist.all_to_all_single(wrapper, tensor, [3], [3]),
        lambda: distributed.all_reduce(wrapper),
    ):
        with pytest.raises(
            NotImplementedError, match=r"memory of its own; got Wrapped, .* DTensor"
        ):
            call()
    for reduce in (dist.all_reduce, distributed.all_reduce):
        gathered = all_gather_tensor(tensor, 0, dist.group.WORLD)
        assert isinstance(gathered, AsyncCollectiveTensor)
        reduce(gathered)
        assert gathered.completed
        assert gathered.tolist() == [0, 1, 2]
    dist.all_reduce(torch.nn.Parameter(tensor, requires_grad=False))


def test_split_sizes_are_a_reason_to_fall_back(alone) -> None:
    group = alone()
    given, out = torch.arange(6.0).view(2, 3).T, torch.empty(2, 3).T
    dist.all_to_all_single(out, given, [3], [3])
    work = dist.all_to_all_single(again := torch.empty(3, 2), given, [3], [3], async_op=True)
    assert work.wait()
    assert out.tolist() == again.tolist() == given.tolist()
    assert "2 all_to_all by gloo (split sizes)" in explain(group)


def test_a_coalescing_block_that_cannot_begin_or_end(alone) -> None:
    group: Any = alone()
    with pytest.raises(RuntimeError, match="startCoalescing"):  # gloo has no blocks
        group._start_coalescing(torch.device("cpu"))
    assert not group.dispatcher.coalescing
    group.dispatcher.coalescing = True
    with pytest.raises(RuntimeError, match="endCoalescing"):
        group._end_coalescing(torch.device("cpu"))
    assert not group.dispatcher.coalescing


def test_the_backend_is_registered() -> None:
    assert dist.Backend("tdcoll") == "tdcoll"
    assert dist.Backend.backend_capability["tdcoll"] == ["cpu", "cuda"]
    assert dist.Backend.default_device_backend_map["cuda"] == "nccl"  # nothing is taken over
    assert set(distributed.__all__) <= set(dir(distributed))


def test_errors_of_a_queue_reach_those_who_wait() -> None:
    """In the order of the tasks, as errors, also for C++, to which a *set* exception would be a
    value."""

    def fail() -> list[torch.Tensor]:
        raise tdcoll.CollectiveTimeout(
            rank=0, peer=3, signal=1, epoch=2, expected=2, seen=0, timeout_s=1
        )

    queue, calls = Queue(None), [QueuedCall(make) for make in (fail, lambda: [torch.ones(1)])]  # type: ignore[arg-type]
    bad, good = map(TaskWork, calls)
    for call in calls:
        queue.submit(call)
    queue.drain()
    assert good.is_completed()
    assert good.wait()
    assert good.is_success()
    with pytest.raises(BackendTimeout, match="peer 3") as caught:
        bad.wait()
    assert isinstance(caught.value, dist.DistBackendError)
    assert isinstance(caught.value, tdcoll.CollectiveTimeout)
    assert caught.value.peer == 3
    assert not bad.is_success()
    assert bad.exception() is caught.value
    assert as_backend_error(caught.value) is caught.value
    with pytest.raises(RuntimeError, match=r"BackendTimeout.*peer 3"):
        bad.get_future().then(lambda done: done.value()).wait()
