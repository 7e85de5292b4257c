# SPDX-License-Identifier: Apache-2.0
"""Peers of the reductions with stand-ins for their libraries: what they are called with, and that it is checked."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import tdcoll
from tdcoll import runtime
from tdcoll.bench import all_reduce, engine, peers, reduction_peers
from tdcoll.bench.all_reduce import AllReduce
from tdcoll.bench.case import Case
from tdcoll.bench.data import ReducedAlike
from tdcoll.bench.reduce_scatter import ReduceScatter
from tdcoll.testing import World

QUICK = "--iterations 4 --warmup 1 --dtype bfloat16 --algorithms="


def summed(tensor: torch.Tensor) -> torch.Tensor:
    """The sum over the ranks of a World."""
    owner = runtime.current()
    found = owner.control.all_gather(range(owner.world_size), "sum", tensor.double().tolist())
    return torch.tensor(found, dtype=torch.float64).sum(0).to(tensor.dtype)


@pytest.fixture
def measured(clock: Any, on_gpus: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """``measured(case, "options", ranks)``: its rows on ranks that say that they are not simulated."""

    def measure(kind: type[Case], arguments: str, ranks: int = 2) -> list[Any]:
        options = kind.parse([*QUICK.split(), *arguments.split()])
        heap_bytes = kind.heap_bytes(options, ranks) + (4 << 20)
        return on_gpus(lambda pe: kind(options).measure(lambda row: None), ranks, heap_bytes=heap_bytes)[0]

    return measure


# ---------------------------------------------------------------------- torch's symmetric memory


@pytest.fixture
def fake_torch(clock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's operators in a World. Two-shot leaves the sums in its input."""

    def one_shot(given: torch.Tensor, op: str, group: str, result: torch.Tensor) -> None:
        clock.passes(3.0)
        result.copy_(summed(given))

    def two_shot(given: torch.Tensor, op: str, group: str) -> None:
        clock.passes(3.0)
        given.copy_(summed(given))

    def reduce_scatter(given: torch.Tensor, group: str, split_last_dim: bool, result: torch.Tensor) -> None:
        clock.passes(3.0)
        assert (group, split_last_dim) == ("0", False)
        owner = runtime.current()
        result.copy_(summed(given).chunk(owner.world_size)[owner.rank])

    symmetric = SimpleNamespace(
        empty=lambda shape, dtype, device: tdcoll.empty(shape, dtype),
        rendezvous=lambda tensor, group: runtime.current().offset_of(tensor, "a symmetric tensor"),
    )
    world = SimpleNamespace(group=SimpleNamespace(WORLD=SimpleNamespace(group_name="0")))
    monkeypatch.setattr(reduction_peers, "symmetric_memory", lambda device: symmetric)
    for module in (peers, reduction_peers):
        monkeypatch.setattr(module, "dist", world)
    found = {
        "one_shot_all_reduce_out": one_shot,
        "two_shot_all_reduce_": two_shot,
        "reduce_scatter_out": reduce_scatter,
    }
    for name, operator in found.items():
        monkeypatch.setattr(torch.ops.symm_mem, name, operator, raising=False)


@pytest.mark.parametrize(
    ("kind", "names"), [(AllReduce, "torch-one-shot,torch-two-shot"), (ReduceScatter, "torch-reduce-scatter")]
)
def test_torchs_operators(kind: type[Case], names: str, fake_torch: None, measured: Callable[..., list[Any]]) -> None:
    rows = measured(kind, f"-b 64 -e 64 --both --peers {names}")
    found = [(row.algorithm, row.launch, row.check, row.note) for row in rows]
    assert found == [(name, launch, "ok", None) for name in names.split(",") for launch in ("graph", "eager")]
    assert [row.median_us for row in rows] == [pytest.approx(3.0)] * len(rows)


def test_what_is_reduced_in_place_must_be_there_again_before_every_launch(
    fake_torch: None, measured: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AllReduce, "peers_in_place", ())
    rows = measured(AllReduce, "-b 64 -e 64 --both --peers torch-two-shot")
    assert [row.check for row in rows] == ["WRONG"] * 2


@pytest.mark.parametrize(("kind", "name"), [(AllReduce, "torch-two-shot"), (ReduceScatter, "torch-reduce-scatter")])
def test_peers_that_only_add_say_so(kind: type[Case], name: str, measured: Callable[..., list[Any]]) -> None:
    (row,) = measured(kind, f"-b 64 -e 64 --op max --peers {name}")
    assert (row.check, row.note) == ("not run", "has sums only, and --op is max")


# ---------------------------------------------------------------------- one buffer, in place


@pytest.mark.parametrize("op", ["sum", "mean", "max"])
def test_one_buffer_is_reduced_again_and_again(
    op: str, clock: Any, measured: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The result of a launch of k calls is the sum times the number of ranks to the (k - 1)st."""
    given: set[int] = set()

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(tensor: torch.Tensor, *rest: Any) -> Any:
            clock.passes(2.0)
            if runtime.current().rank == 0:
                given.add(tensor.data_ptr())
            return function(tensor, *rest)

        return call

    for name in ("all_reduce", "all_reduce_"):
        monkeypatch.setattr(all_reduce, name, timed(getattr(all_reduce, name)))
    options = f"-b 64 -e 64 --both --peers= --buffers 1 --op {op} --algorithms auto,in-place --iterations 3 --warmup 1"
    rows = measured(AllReduce, options)
    assert [(row.algorithm, row.check, row.buffers) for row in rows] == [
        (name, "ok", 1) for name in ("auto", "in-place") for _ in range(2)
    ]
    assert len(given) == 2, "an input out of place, and a buffer in place"
    if op == "sum":
        monkeypatch.setattr(AllReduce, "growth", lambda self, buffers: 1)
        assert [row.check for row in measured(AllReduce, options)] == ["ok", "ok", "WRONG", "WRONG"]


@pytest.mark.parametrize(
    ("dtype", "world", "calls", "op"),
    [("float32", 3, 3, "sum"), ("int32", 2, 3, "sum"), ("float16", 2, 21, "sum"), ("float32", 2, 200, "sum")],
)
def test_sums_that_are_not_exact_are_refused(dtype: str, world: int, calls: int, op: str) -> None:
    case = AllReduce.__new__(AllReduce)
    case.options = AllReduce.parse(["--dtype", dtype, "--op", op])
    buffers: Any = SimpleNamespace(world=world, sets=1, calls=calls)
    with pytest.raises(ValueError, match=f"adds up its own results with --buffers 1, which of torch.{dtype} over"):
        case.growth(buffers)
    buffers.sets = calls
    assert case.growth(buffers) == 1


@pytest.mark.parametrize("one_buffer", [True, False])
def test_sums_of_sums_are_exact_though_every_addition_is_rounded(one_buffer: bool) -> None:
    """With as small numbers as one buffer has; those of buffers that rotate are too large."""
    world, calls = 8, 21
    fields: dict[str, Any] = {"nodes": [0] * world, "calls": calls if one_buffer else None}
    cpu = torch.device("cpu")
    ranks = [ReducedAlike(1 << 12, world, rank, 1, torch.bfloat16, cpu, **fields) for rank in range(world)]
    for buffers in ranks:
        buffers.fill(31)  # the largest numbers

    def added(parts: list[torch.Tensor]) -> torch.Tensor:
        result = parts[0].clone()
        for part in parts[1:]:
            result += part
        return result

    found = added([buffers.inputs[0] for buffers in ranks])
    for _ in range(calls - 1):
        found = added([found] * world)
    assert (ranks[0].errors(0, found / world ** (calls - 1))[0] == 0) == one_buffer


# ---------------------------------------------------------------------- flashinfer


class FakeFlashinfer:
    """``flashinfer.comm`` in a World, with CUDA graphs that are captured by a call and replayed by another."""

    def __init__(self, clock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = clock
        self.capturing: set[int] = set()
        self.replaying: set[int] = set()
        self.captured: dict[int, list[int]] = {}
        self.registered: set[tuple[int, int]] = set()
        self.fusions: list[dict[str, Any]] = []
        self.made: list[tuple[Any, ...]] = []
        comm: Any = ModuleType("flashinfer.comm")
        comm.AllReduceFusionPattern = SimpleNamespace(kAllReduce=0)
        comm.trtllm_ar = SimpleNamespace(get_trtllm_comm_module=lambda: None)
        comm.create_shared_buffer = lambda size, group: [size + 1000 * rank for rank in range(8)]
        for name in dir(self):
            if name.startswith(("trtllm_", "vllm_")):
                setattr(comm, name, getattr(self, name))
        package: Any = ModuleType("flashinfer")
        package.comm = comm
        monkeypatch.setitem(sys.modules, "flashinfer", package)
        monkeypatch.setitem(sys.modules, "flashinfer.comm", comm)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.rank in self.capturing)
        monkeypatch.setattr(engine, "capture", self.capture)

    @property
    def rank(self) -> int:
        return runtime.current().rank

    def capture(self, call: Callable[[int], object], calls: int) -> Any:
        def run(how: set[int]) -> None:
            how.add(self.rank)
            for position in range(calls):
                call(position)
            how.remove(self.rank)

        run(self.capturing)
        return engine.Launch(lambda: run(self.replaying), calls)

    def trtllm_create_ipc_workspace_for_all_reduce_fusion(self, *what: Any, **named: Any) -> Any:
        self.made.append((*what[1:], named["use_fp32_lamport"]))
        return [], torch.zeros(1, dtype=torch.int64)

    def trtllm_allreduce_fusion(self, *, allreduce_in: Any, allreduce_out: Any, **named: Any) -> None:
        self.clock.passes(2.0)
        self.fusions.append({**named, "shape": tuple(allreduce_in.shape)})
        allreduce_out.copy_(summed(allreduce_in))

    def vllm_meta_size(self) -> int:
        return 64

    def vllm_init_custom_ar(self, signals: list[int], known: torch.Tensor, rank: int, full_nvlink: bool) -> int:
        assert signals[0] == 64 + (8 << 20)
        self.captured[rank] = []
        return 7

    def vllm_register_buffer(self, kernel: int, addresses: list[int]) -> None:
        assert addresses[1] == (8 << 20) + 1000

    def vllm_all_reduce(self, kernel: int, given: Any, result: Any, copy: int, room: int, blocks: int) -> None:
        self.clock.passes(2.0)
        rank = self.rank
        if rank in self.capturing:
            self.captured[rank].append(given.data_ptr())
        if rank in self.capturing or rank in self.replaying:
            # A kernel that does not know where the other inputs are reads something else.
            right = rank in self.capturing or (rank, given.data_ptr()) in self.registered
        else:
            assert (copy, room) == ((8 << 20) + 1000 * rank, 8 << 20)
            right = True
        result.copy_(summed(given) if right else given)

    def vllm_get_graph_buffer_ipc_meta(self, kernel: int) -> tuple[list[int], list[int]]:
        return [self.rank], self.captured[self.rank]

    def vllm_register_graph_buffers(self, kernel: int, handles: list[list[int]], offsets: list[list[int]]) -> None:
        assert handles == [[rank] for rank in range(len(offsets))]
        self.registered |= {(self.rank, address) for address in offsets[self.rank]}

    def vllm_dispose(self, kernel: int) -> None:
        del self.captured[self.rank]


@pytest.fixture
def flashinfer(clock: Any, monkeypatch: pytest.MonkeyPatch) -> FakeFlashinfer:
    monkeypatch.setattr(reduction_peers, "require_nccl", lambda device: None)
    world = SimpleNamespace(group=SimpleNamespace(WORLD=None), barrier=lambda: None)
    monkeypatch.setattr(reduction_peers, "dist", world)
    for memory in (reduction_peers._tensorrt_memory, reduction_peers._vllm_memory):
        memory.cache_clear()
    return FakeFlashinfer(clock, monkeypatch)


def test_flashinfers_all_reduces(flashinfer: FakeFlashinfer, measured: Callable[..., list[Any]]) -> None:
    names = "trtllm-one-shot,trtllm-two-shot,vllm"
    rows = measured(AllReduce, f"-b 64K -e 64K --both --peers {names}")
    found = [(row.algorithm, row.launch, row.check, row.note) for row in rows]
    assert found == [(name, launch, "ok", None) for name in names.split(",") for launch in ("graph", "eager")]
    said = {
        (call["use_oneshot"], call["shape"], call["token_num"], call["hidden_dim"], call["launch_with_pdl"])
        for call in flashinfer.fusions
    }
    assert said == {(one, (4, 8192), 4, 8192, True) for one in (True, False)}
    # Once for all sizes; it is of as many ranks as there are, and has room for 16 MB.
    assert set(flashinfer.made) == {(2, 1024, 8192, False)}
    assert not flashinfer.captured, "given back"


def test_a_graphs_inputs_must_be_made_known(
    flashinfer: FakeFlashinfer, measured: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flashinfer, "vllm_register_graph_buffers", lambda *_: None)
    sys.modules["flashinfer.comm"].vllm_register_graph_buffers = lambda *_: None  # type: ignore[attr-defined]
    rows = measured(AllReduce, "-b 64 -e 64 --both --peers vllm")
    assert [(row.launch, row.check) for row in rows] == [("graph", "WRONG"), ("eager", "ok")]


@pytest.mark.parametrize(
    ("options", "ranks", "notes"),
    [
        ("-b 64 -e 64 --op max", 2, {"has sums only, and --op is max"}),
        ("-b 64 -e 64 --dtype int32", 2, {"takes float16, bfloat16 and float32, not torch.int32"}),
        (
            "-b 24 -e 24",
            2,
            {"takes multiples of 16 bytes, and at most 16 MB", "takes multiples of 16 bytes, and at most 8 MB"},
        ),
        ("-b 32M -e 32M --buffers 1", 2, {f"takes multiples of 16 bytes, and at most {n} MB" for n in (8, 16)}),
        (
            "-b 64 -e 64",
            3,
            {f"is for {n} ranks of one node, not 3 rank(s) on 1 node(s) (3)" for n in ("2, 4, 8", "2, 4, 6, 8")},
        ),
    ],
)
def test_what_flashinfers_do_not_take(
    options: str, ranks: int, notes: set[str], flashinfer: FakeFlashinfer, measured: Callable[..., list[Any]]
) -> None:
    rows = measured(AllReduce, f"{options} --peers trtllm-one-shot,trtllm-two-shot,vllm", ranks)
    assert len(rows) == 3
    assert {row.check for row in rows} == {"not run"}
    assert {row.note for row in rows} == notes


def test_sizes_that_are_not_whole_rows(flashinfer: FakeFlashinfer, measured: Callable[..., list[Any]]) -> None:
    rows = measured(AllReduce, "-b 24K -e 24K --peers trtllm-one-shot")
    rows += measured(AllReduce, "-b 32K -e 32K --peers trtllm-two-shot")
    assert [row.note for row in rows] == [
        "takes rows of 8192 numbers",
        "takes more rows of 8192 numbers than there are ranks",
    ]


def test_where_one_rank_has_no_flashinfer_none_goes_on(
    flashinfer: FakeFlashinfer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load() -> None:
        if runtime.current().rank == 1:
            raise ImportError("No module named 'flashinfer'")

    sys.modules["flashinfer.comm"].trtllm_ar.get_trtllm_comm_module = load  # type: ignore[attr-defined]

    def host(pe: int) -> str:
        with pytest.raises(RuntimeError) as raised:
            reduction_peers.FLASHINFER["trtllm-one-shot"](lambda allocate: None, torch.device("cpu"))
        return str(raised.value)

    assert World(2).run(host) == [
        "needs flashinfer: rank 1: ImportError: No module named 'flashinfer'",
        "needs flashinfer: ImportError: No module named 'flashinfer'",
    ]


@pytest.mark.parametrize("name", [*reduction_peers.FLASHINFER, "torch-one-shot", "torch-two-shot"])
def test_without_gpus_they_say_why(name: str) -> None:
    with pytest.raises(RuntimeError, match="needs GPUs"):
        AllReduce.peers[name](lambda allocate: None, torch.device("cpu"), None)
