# SPDX-License-Identifier: Apache-2.0
"""Peers with stand-ins for their libraries: what they call, on which stream, and that their results are checked."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tdcoll
from tdcoll import runtime
from tdcoll.bench import all_reduce_rms_norm as norm
from tdcoll.bench import dense, peers
from tdcoll.bench.data import Buffers
from tdcoll.bench.dense import case_of
from tdcoll.bench.peers import PEERS, Stock, subject_of
from tdcoll.bench.specs import SPECS
from tdcoll.testing import World

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
GATHER, REDUCE, SCATTER = map(case_of, ("all_gather", "all_reduce", "reduce_scatter"))


def stock_of(nbytes: int, world: int) -> Stock:
    """What the benchmark of the all-gather gives to a peer."""

    def new(**how: Any) -> Buffers:
        what = SPECS["all_gather"], nbytes, [0] * world, runtime.current().rank, torch.uint8, CPU
        return Buffers(*what, sets=2, **how)

    return Stock(new)


def exchanged(what: str, mine: Any) -> list[Any]:
    owner = runtime.current()
    return owner.control.all_gather(range(owner.world_size), what, mine)


def summed(tensor: torch.Tensor) -> torch.Tensor:
    """The sum over the ranks of a World."""
    return torch.tensor(exchanged("sum", tensor.double().tolist())).sum(0).to(tensor.dtype)


def scattered(tensor: torch.Tensor) -> torch.Tensor:
    owner = runtime.current()
    return summed(tensor).chunk(owner.world_size)[owner.rank]


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    return torch.tensor(exchanged("gather", tensor.tolist()), dtype=tensor.dtype).flatten()


@pytest.mark.parametrize("name", [name for name, peer in PEERS.items() if peer.of == "all_gather"])
def test_without_gpus_they_say_why(name: str) -> None:
    with pytest.raises(RuntimeError, match="needs GPUs"):
        PEERS[name].make(stock_of(8, 1), CPU, lambda buffers: None)


@pytest.mark.parametrize("kind", [REDUCE, SCATTER])
def test_peers_that_only_add_say_so(kind: Any, measured: Callable[..., list[Any]]) -> None:
    names = [name for name, peer in PEERS.items() if peer.of == kind.benchmark]
    rows = measured(kind, f"-b 64 -e 64 --op max --algorithms= --peers {','.join(names)}")
    assert [(row.check, row.note) for row in rows] == [("not run", "has sums only, and --op is max")] * len(names)


@pytest.mark.parametrize("kind", [GATHER, REDUCE, SCATTER])
@pytest.mark.parametrize("buffers", ["", " --buffers 1"])
def test_torchs_calls(kind: Any, buffers: str, clock: Any, measured: Any, monkeypatch: Any) -> None:
    """All-reduces are in place: what they reduce has to be in their results again before every launch."""
    how = {"group": None, **({} if kind is GATHER else {"op": torch.distributed.ReduceOp.SUM})}

    def function(result: torch.Tensor, *given: torch.Tensor, **named: Any) -> None:
        clock.passes(3.0)
        assert named == how
        result.copy_({GATHER: gathered, REDUCE: summed, SCATTER: scattered}[kind](*given or (result,)))

    windows: list[object] = []
    register = {"register_mem_pool": lambda pool, symm: windows.append(pool), "deregister_mem_pool": windows.remove}
    monkeypatch.setattr(peers, "require_nccl", lambda device: SimpleNamespace(mem_allocator=None, **register))
    monkeypatch.setattr(torch.cuda, "MemPool", lambda allocator: object())
    monkeypatch.setattr(torch.cuda, "use_mem_pool", contextlib.nullcontext)
    monkeypatch.setattr(peers, "dist", SimpleNamespace(all_reduce=lambda tensor: None))
    monkeypatch.setattr(dense, "dist", SimpleNamespace(**{kind.spec.torch: function}))
    options = f"-b 64 -e 64 --dtype bfloat16 --both --algorithms= --peers nccl,nccl-symmetric{buffers}"
    assert [(row.check, row.note, row.median_us) for row in measured(kind, options)] == [("ok", None, 3.0)] * 4
    assert not windows
    if kind is REDUCE:
        monkeypatch.setattr(dense, "subject_of", lambda *what, in_place: subject_of(*what, in_place=False))
        assert [row.check for row in measured(kind, options)] == ["WRONG"] * 4


@pytest.mark.parametrize("lost", [False, True])
def test_a_chain_on_nccl(lost: bool, measured: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """What it reduces in place has to be there again before every launch."""
    monkeypatch.setattr(norm, "dist", SimpleNamespace(all_reduce=lambda tensor: tensor.copy_(summed(tensor))))
    monkeypatch.setattr(norm, "require_nccl", lambda device: None)
    monkeypatch.setattr(norm, "subject_of", lambda *what, in_place: subject_of(*what, in_place=in_place and not lost))
    (row,) = measured(norm.AllReduceNorm, "--rows 2 --algorithms= --peers nccl")
    assert row.check == ("WRONG" if lost else "ok")


@pytest.fixture
def fake_nvshmem(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """``nvshmem`` with a collective that works in a World; its calls."""
    calls: list[tuple[Any, ...]] = []
    bindings = SimpleNamespace(Team_id=SimpleNamespace(TEAM_WORLD=0))

    def of(width: int) -> Callable[..., None]:
        def fcollect(team: int, dest: int, source: int, count: int, stream: int) -> None:
            calls.append((team, width, count, stream))
            found = b"".join(exchanged("gather", ctypes.string_at(source, width * count)))
            ctypes.memmove(dest, found, len(found))

        return fcollect

    for width in (1, 2, 4, 8):
        setattr(bindings, f"int{8 * width}_fcollect_on_stream", of(width))
    package = SimpleNamespace(bindings=SimpleNamespace(nvshmem=bindings))
    for name, module in (("", package), (".bindings", package.bindings), (".bindings.nvshmem", bindings)):
        monkeypatch.setitem(sys.modules, f"nvshmem{name}", module)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: SimpleNamespace(cuda_stream=77))
    return calls


@pytest.mark.parametrize(("nbytes", "width"), [(1024, 8), (12, 4), (6, 2), (5, 1)])
def test_fcollect(nbytes: int, width: int, fake_nvshmem: list[tuple[Any, ...]]) -> None:
    def host(pe: int) -> None:
        stock = stock_of(nbytes, 3)
        subject = PEERS["fcollect"].make(stock, CUDA, lambda buffers: None)
        for tensor in (*stock.in_heap.inputs, *stock.in_heap.results):
            runtime.current().offset_of(tensor, "a buffer")  # symmetric
        subject.begin(5)
        for _ in range(2):
            subject.before(range(subject.inputs))
            exchanged("turn", None)
            results = [subject.call(i) for i in range(subject.inputs)]
            assert [subject.errors(i, result) for i, result in enumerate(results)] == [(0, "")] * subject.inputs
        stock.close()
        assert tdcoll.heap_info().used == 0

    World(3).run(host)
    assert set(fake_nvshmem) == {(0, width, nbytes // width, 77)}
    assert len(fake_nvshmem) == 3 * 2 * 2


@pytest.mark.parametrize("given", ["nccl,fcollect", "nccl"])
@pytest.mark.parametrize("wanted", ["", "1"])
def test_nvshmem_keeps_its_nccl_for_fcollect(given: str, wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """When NVSHMEM starts, which is in ``case.run``; the variables of that moment are in the file."""
    monkeypatch.setenv("NVSHMEM_DISABLE_NCCL", wanted)
    seen: list[str] = []
    monkeypatch.setattr(dense, "INTERPRETED", False)
    monkeypatch.setattr(dense.case, "run", lambda *_: seen.append(os.environ["NVSHMEM_DISABLE_NCCL"]) or 0)
    assert dense.main("all_gather", ["-b", "1K", "-e", "1K", "--peers", given]) == 0
    assert seen == [wanted or ("0" if "fcollect" in given else "")]


@pytest.fixture
def fake_torch(clock: Any, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """torch's symmetric memory and its operators in a World. Two-shot leaves the sums in its input."""
    found = SimpleNamespace(busy=False, barriers=0)

    def rendezvous(tensor: torch.Tensor, group: Any) -> Any:
        runtime.current().offset_of(tensor, "a symmetric tensor")
        addresses = exchanged("addresses", tensor.data_ptr())

        def get_buffer(rank: int, shape: Any, dtype: torch.dtype) -> torch.Tensor:
            theirs = (ctypes.c_char * (int(shape[0]) * dtype.itemsize)).from_address(addresses[rank])
            return torch.frombuffer(theirs, dtype=dtype)

        def barrier(channel: int) -> None:
            clock.passes(1.5)
            found.barriers += 1
            exchanged("barrier", None)

        return SimpleNamespace(get_buffer=get_buffer, barrier=barrier)

    def result_of(make: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
        def operator(given: torch.Tensor, *rest: Any) -> torch.Tensor:
            clock.passes(3.0)
            assert [text for text in rest if isinstance(text, str)] in (["sum", "0"], ["0"])
            out = rest[-1] if isinstance(rest[-1], torch.Tensor) else given
            return out.copy_(make(given))

        return operator

    def low_contention(tensor: torch.Tensor, group: str) -> torch.Tensor:
        clock.passes(3.0)
        return gathered(tensor)

    def wait_tensor(tensor: torch.Tensor) -> torch.Tensor:
        found.busy = False
        return tensor

    @contextlib.contextmanager
    def on(given: Any) -> Iterator[None]:
        found.busy = True
        yield

    symmetric = SimpleNamespace(
        empty=lambda nbytes, dtype, device: tdcoll.empty(nbytes, dtype),
        rendezvous=rendezvous,
        _get_backend_stream=lambda: SimpleNamespace(query=lambda: not found.busy),
    )
    monkeypatch.setattr(peers, "importlib", SimpleNamespace(import_module=lambda name: symmetric))
    monkeypatch.setattr(peers, "require_nccl", lambda device: None)
    monkeypatch.setattr(peers, "dist", SimpleNamespace(group=SimpleNamespace(WORLD=SimpleNamespace(group_name="0"))))
    for name, operator in {
        "_low_contention_all_gather": low_contention,
        "one_shot_all_reduce_out": result_of(summed),
        "two_shot_all_reduce_": result_of(summed),
        "reduce_scatter_out": result_of(scattered),
    }.items():
        monkeypatch.setattr(torch.ops.symm_mem, name, operator, raising=False)
    monkeypatch.setattr(torch.ops._c10d_functional, "wait_tensor", wait_tensor, raising=False)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(peers, "pause", lambda us: None)
    return found


@pytest.mark.parametrize("kind", [GATHER, REDUCE, SCATTER])
def test_torchs_operators(kind: Any, fake_torch: Any, measured: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [name for name, peer in PEERS.items() if peer.of == kind.benchmark and name.startswith("torch-")]
    options = f"-b 64 -e 64 --dtype bfloat16 --both --algorithms= --peers {','.join(names)}"
    rows = measured(kind, options)
    found = [(row.algorithm, row.launch, row.check, row.note) for row in rows]
    assert found == [(name, launch, "ok", None) for name in names for launch in ("graph", "eager")]
    assert [row.median_us for row in rows] == [pytest.approx(3.0)] * len(rows)
    assert bool(fake_torch.barriers) == (kind is GATHER)
    # What is reduced in place must be there again before every launch.
    monkeypatch.setattr(peers, "subject_of", lambda *what, **how: subject_of(*what))
    wrong = [row.algorithm for row in measured(kind, options) if row.check == "WRONG"]
    assert wrong == (["torch-two-shot"] * 2 if kind is REDUCE else [])


@pytest.mark.usefixtures("fake_torch")
def test_a_stream_that_is_not_waited_for_cannot_be_timed(measured: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops._c10d_functional, "wait_tensor", lambda tensor: tensor)
    (row,) = measured(GATHER, "-b 64 -e 64 --algorithms= --peers torch-symm")
    assert row.check == "not run"
    assert "goes on when the stream that it is timed on is through" in row.note


@pytest.fixture
def flashinfer(clock: Any, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """``flashinfer.comm`` in a World: its all-reduces, and the memory that was made for them."""
    found = SimpleNamespace(fusions=[], made=[])

    def memory(*what: Any, **named: Any) -> Any:
        found.made.append((*what[1:], named["use_fp32_lamport"]))
        return [], torch.zeros(1, dtype=torch.int64)

    def fusion(*, allreduce_in: Any, allreduce_out: Any, **named: Any) -> None:
        clock.passes(2.0)
        found.fusions.append({**named, "shape": tuple(allreduce_in.shape)})
        allreduce_out.copy_(summed(allreduce_in))

    comm = SimpleNamespace(
        AllReduceFusionPattern=SimpleNamespace(kAllReduce=0),
        trtllm_ar=SimpleNamespace(get_trtllm_comm_module=lambda: None),
        trtllm_create_ipc_workspace_for_all_reduce_fusion=memory,
        trtllm_allreduce_fusion=fusion,
    )
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(comm=comm))
    monkeypatch.setitem(sys.modules, "flashinfer.comm", comm)
    monkeypatch.setattr(peers, "require_nccl", lambda device: None)
    world = SimpleNamespace(group=SimpleNamespace(WORLD=None), barrier=lambda: None)
    monkeypatch.setattr(peers, "dist", world)
    peers._tensorrt_memory.cache_clear()
    return found


OURS_NOT = "--algorithms= --peers trtllm-one-shot"


def test_tensorrts_all_reduce(flashinfer: Any, measured: Callable[..., list[Any]]) -> None:
    rows = measured(REDUCE, f"-b 32K -e 32K --dtype bfloat16 --both {OURS_NOT}")
    assert [(row.launch, row.check, row.note) for row in rows] == [(how, "ok", None) for how in ("graph", "eager")]
    said = {
        (call["use_oneshot"], call["shape"], call["token_num"], call["hidden_dim"], call["launch_with_pdl"])
        for call in flashinfer.fusions
    }
    assert said == {(True, (2, 8192), 2, 8192, True)}
    # Once for all sizes; it is of as many ranks as there are, and has room for 16 MB.
    assert set(flashinfer.made) == {(2, 1024, 8192, False)}


@pytest.mark.parametrize(
    ("options", "ranks", "note"),
    [
        ("-b 64 -e 64 --dtype int32", 2, "takes float16, bfloat16 and float32, not torch.int32"),
        ("-b 24 -e 24", 2, "takes multiples of 16 bytes, and at most 16 MB"),
        ("-b 32M -e 32M --buffers 1", 2, "takes multiples of 16 bytes, and at most 16 MB"),
        ("-b 48K -e 48K --dtype float32", 2, "takes rows of 8192 numbers"),
        ("-b 64 -e 64", 3, "is for 2, 4 or 8 ranks of one node, not 3 rank(s) on 1 node(s) (3)"),
    ],
)
def test_what_tensorrts_does_not_take(options: str, ranks: int, note: str, flashinfer: Any, measured: Any) -> None:
    (row,) = measured(REDUCE, f"{options} {OURS_NOT}", ranks)
    assert (row.check, row.note) == ("not run", note)


def test_where_one_rank_has_no_flashinfer_none_goes_on(flashinfer: Any, measured: Any, monkeypatch: Any) -> None:
    def load() -> None:
        if runtime.current().rank == 1:
            raise OSError("no kernels")

    monkeypatch.setattr(sys.modules["flashinfer.comm"].trtllm_ar, "get_trtllm_comm_module", load)
    (row,) = measured(REDUCE, f"-b 64 -e 64 {OURS_NOT}")
    assert (row.check, row.note) == ("not run", "needs flashinfer: rank 1: OSError: no kernels")
