# SPDX-License-Identifier: Apache-2.0
"""Backend "tdcoll" as torch.distributed's users call it, and sparse gradients, on every rank of a job of 3 or more."""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
import time
import types
import unittest
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable
from harness import check, device, expect, expect_raises, rank, run, shared, world
from torch import nn

import tdcoll
from tdcoll import runtime
from tdcoll.collectives.sparse_all_reduce.rows import DTYPES as REDUCED
from tdcoll.distributed import (
    BackendTimeout,
    Options,
    SparseGradientReducer,
    TdcollProcessGroup,
    clip_grad_norm_,
    explain,
    sparse_hook,
)
from tdcoll.distributed.inner import sparse_sum_by_gather
from tdcoll.primitives.reduce import OPERATIONS_OF, TORCH_OPERATIONS
from tdcoll.work import as_backend_error

warnings.simplefilter("ignore")

DDP = nn.parallel.DistributedDataParallel
DTYPES = [
    torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool,
    torch.complex64, torch.float8_e4m3fn,
]  # fmt: skip
LINES: list[str] = []


class Remember(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        LINES.append(record.getMessage())


def served(kind: str, group=None) -> int:
    """Calls of a kind that tdcoll's kernels have served."""
    group = group or dist.group.WORLD
    return sum(count for (k, side, _), count in group._sides.counts.items() if (k, side) == (kind, "tdcoll"))


def by_inner(kind: str, group=None) -> dict[str, int]:
    """Calls of a kind that the inner group has served, by reason."""
    counts = (group or dist.group.WORLD)._sides.counts
    return {why: count for (k, side, why), count in counts.items() if k == kind and side != "tdcoll"}


def data(owner: int, count: int, dtype: torch.dtype = torch.float32, call: int = 0) -> torch.Tensor:
    """``[count]`` of small integers in which owner, position and call show; on this rank's device."""
    numbers = (torch.arange(count, device=device()) * 3 + owner * 7 + call) % (2 if dtype is torch.bool else 13)
    return numbers.to(dtype)


def raw(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().view(-1).view(torch.uint8).tolist() if tensor.numel() else []


def same(got: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    expect(got.shape == wanted.shape and got.dtype == wanted.dtype and raw(got) == raw(wanted), f"{what}: {got}")


def everyone() -> range:
    return range(world())


def single(out: torch.Tensor, tensor: torch.Tensor, **more):
    """torch.distributed's all-gather into one tensor, under the name that this PyTorch has for it."""
    return (getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor)(out, tensor, **more)


# ---------------------------------------------------------------------- all-gather


@check
def gathers_into_one_tensor() -> None:
    before = served("all_gather")
    for call, dtype in enumerate(DTYPES):
        wanted = torch.cat([data(r, 10, dtype, call) for r in everyone()])
        out = torch.empty(world() * 10, dtype=dtype, device=device())
        single(out, data(rank(), 10, dtype, call))
        same(out, wanted, f"{dtype}")
        stacked = torch.empty(world(), 5, 2, dtype=dtype, device=device())
        work = single(stacked, data(rank(), 10, dtype, call).view(5, 2), async_op=True)
        work.wait()
        same(stacked.view(-1), wanted, f"stacked, async, {dtype}")
    own = torch.zeros(world() * 4, device=device())
    own[rank() * 4 : rank() * 4 + 4] = data(rank(), 4)
    single(own, own[rank() * 4 : rank() * 4 + 4])
    same(own, torch.cat([data(r, 4) for r in everyone()]), "own segment of the output")
    room = torch.zeros(world() * 4, device=device())
    room[2:6] = data(rank(), 4)
    single(room, room[2:6])
    same(room, torch.cat([data(r, 4) for r in everyone()]), "input elsewhere in the output")
    strided = data(rank(), 12).view(6, 2)[:, 0]
    out = torch.empty(world() * 6, 2, device=device())[:, 1]
    single(out, strided)
    same(out.contiguous(), torch.cat([data(r, 12).view(6, 2)[:, 0] for r in everyone()]), "strided")
    empty = torch.empty(0, device=device())
    single(torch.empty(0, device=device()), empty)
    expect_raises(ValueError, lambda: single(torch.empty(5, device=device()), data(rank(), 4)), "elements")
    expect(served("all_gather") - before == 2 * len(DTYPES) + 4, explain())


@check
def gathers_lists() -> None:
    before = served("all_gather")
    for asynchronous in (False, True):
        pieces = [torch.empty(2, 3, device=device()) for _ in everyone()]
        work = dist.all_gather(pieces, data(rank(), 6).view(2, 3), async_op=asynchronous)
        if asynchronous:
            work.wait()
        for r in everyone():
            same(pieces[r], data(r, 6).view(2, 3), f"piece {r}")
        uneven = [torch.empty(3 * r, dtype=torch.int64, device=device()) for r in everyone()]
        work = dist.all_gather(uneven, data(rank(), 3 * rank(), torch.int64), async_op=asynchronous)
        if asynchronous:
            work.wait()
        for r in everyone():
            same(uneven[r], data(r, 3 * r, torch.int64), f"uneven piece {r}")
    expect(served("all_gather") - before == 4, explain())
    wrong = [torch.empty(4, device=device()) for _ in everyone()]
    expect_raises(ValueError, lambda: dist.all_gather(wrong, data(rank(), 3)), "as large as")


@check
def gathers_several_at_once() -> None:
    before = served("all_gather")
    outs = [torch.empty(world() * n, device=device()) for n in (3, 5)]
    with dist.distributed_c10d._coalescing_manager(dist.group.WORLD, async_ops=True) as pending:
        for out, n in zip(outs, (3, 5), strict=True):
            single(out, data(rank(), n))
    pending.wait()
    for out, n in zip(outs, (3, 5), strict=True):
        same(out, torch.cat([data(r, n) for r in everyone()]), f"coalesced {n}")
    expect(served("all_gather") - before == 1, explain())


@check
def functional_collectives_and_compile() -> None:
    before = served("all_gather")
    wanted = torch.cat([data(r, 4) for r in everyone()])
    same(functional.all_gather_tensor(data(rank(), 4), 0, dist.group.WORLD).wait(), wanted, "functional")
    group = dist.group.WORLD

    @torch.compile(backend="aot_eager", fullgraph=True)
    def doubled(tensor: torch.Tensor) -> torch.Tensor:
        return functional.all_gather_tensor(tensor * 2, 0, group) + 1

    same(doubled(data(rank(), 4)), wanted * 2 + 1, "compiled")
    expect(served("all_gather") - before == 2, explain())


@check
def derivatives() -> None:
    """Of PyTorch's functions on the backend, gathering and scattering are each other's derivative, summing its own."""
    group, n, me = dist.group.WORLD, world(), rank()
    pulls = [data(r, 4 * n, call=7) for r in everyone()]
    firsts = [pull[:4] for pull in pulls]
    calls = (
        (lambda x: functional.all_gather_tensor_autograd(x, 0, group), 4, sum(pulls)[4 * me : 4 * me + 4]),
        (lambda x: functional.reduce_scatter_tensor_autograd(x, "sum", 0, group), 4 * n, torch.cat(firsts)),
        (lambda x: differentiable.all_reduce(x, group=group), 4, sum(firsts)),
    )
    before = {kind: served(kind) for kind in ("all_gather", "reduce_scatter", "all_reduce")}
    for i, (call, numel, wanted) in enumerate(calls):
        x = data(me, numel).requires_grad_()
        made = call(x)
        (made * pulls[me][: made.numel()]).sum().backward()
        same(x.grad, wanted, f"derivative {i}")
    for kind, count in before.items():  # forwards and backwards
        expect(served(kind) - count == 2, f"{kind}: {explain()}")


@check
def pytorchs_own_cases() -> str:
    """The methods of c10d's test class for all_gather, barrier and sparse all_reduce, on this backend."""
    if importlib.util.find_spec("expecttest") is None:  # a test dependency of PyTorch's, of which nothing is used here
        stub = types.ModuleType("expecttest")
        stub.TestCase = unittest.TestCase
        sys.modules["expecttest"] = stub
    os.environ.setdefault("BACKEND", "gloo" if device().type == "cpu" else "nccl")  # which cases they are
    os.environ.setdefault("TEMP_DIR", "/tmp")
    os.environ.setdefault("INIT_METHOD", "env://")
    try:
        from torch.testing._internal.common_distributed import simple_sparse_reduce_tests
        from torch.testing._internal.common_utils import TestCase
        from torch.testing._internal.distributed.distributed_test import DistributedTest
    except ImportError as error:
        return f"not in this PyTorch: {error}"

    class Cases(DistributedTest._DistTestBase, TestCase):
        rank = rank()

        def _barrier(self, *_args, **_kwargs) -> None:
            dist.barrier()

        def call_dist_op(self, _title, _is_async, op, *args, tensor_shapes=None) -> None:
            op(*args)  # without the profiler

    on = "_cuda" if device().type == "cuda" else ""
    names = [f"test_all_gather{on}", f"test_all_gather{on}_complex"]
    if shared():  # they give each rank a GPU of its own
        names = []
    if not on:
        names += ["test_all_gather_full_group", "test_sparse_all_reduce_sum"]
    before = served("all_gather"), served("sparse_all_reduce")
    for name in names:
        torch.manual_seed(1)  # as its setUp does
        getattr(Cases(name), name)()
    if not on and world() > 2:  # test_all_gather_group, which wants 8 ranks to use 2
        cases = Cases("test_all_gather_group")
        cases._test_all_gather_helper(*cases._init_group_test())
    for inputs, outputs in simple_sparse_reduce_tests(rank(), world()):
        tensor = inputs[0].to(device())
        dist.all_reduce(tensor)
        same(tensor.to_dense(), outputs[0].to(device()).to_dense(), f"sparse case {tensor.shape}")
    gathered, summed = served("all_gather") - before[0], served("sparse_all_reduce") - before[1]
    expect(gathered >= min(2, len(names)) * world(), f"tdcoll served {gathered} all-gathers of PyTorch's cases")
    expect(summed >= 6, f"tdcoll served {summed} sparse all-reduces of PyTorch's cases")
    return f"{len(names)} methods" if names else "without PyTorch's all-gather cases, which want a GPU for each rank"


# ---------------------------------------------------------------------- dense reductions


OPERATIONS = {
    "SUM": sum,
    "AVG": lambda parts: sum(parts) / len(parts),
    "MAX": lambda parts: torch.stack(parts).amax(0),
    "MIN": lambda parts: torch.stack(parts).amin(0),
    "PRODUCT": lambda parts: torch.stack(parts).prod(0),
}
SINGLE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def reduced(name: str, parts: list[torch.Tensor]) -> torch.Tensor:
    """Return the reduction of small integers: exact whatever the order, but for the mean's one rounding."""
    wide = [part.double() if part.is_floating_point() else part for part in parts]
    return OPERATIONS[name](wide).to(parts[0].dtype)


def close(got: torch.Tensor, wanted: torch.Tensor, name: str, what: str) -> None:
    if name == "AVG":  # rounded to fp32 in between
        torch.testing.assert_close(got, wanted, msg=f"{what}: {got} {wanted}")
    else:
        same(got, wanted, what)


@check
def reduces() -> None:
    """Every dtype and operation; in time, in place and beside; what has strides or is a part of the other tensor."""
    before = served("all_reduce"), served("reduce_scatter")
    calls = 0
    for call, dtype in enumerate((*REDUCED, torch.int8, torch.uint8)):
        for name in OPERATIONS:
            if TORCH_OPERATIONS[getattr(dist.ReduceOp, name)] not in OPERATIONS_OF[dtype]:
                continue
            op = getattr(dist.ReduceOp, name)
            parts = [data(r, 4 * world(), dtype, call) for r in everyone()]
            wanted = reduced(name, parts)
            for asynchronous in (False, True, False, True):  # the second of each goes the short way
                tensor, out = parts[rank()].clone(), torch.empty(2, 2, dtype=dtype, device=device())
                work = dist.all_reduce(tensor, op, async_op=asynchronous)
                other = SINGLE_SCATTER(out, parts[rank()].view(world(), 2, 2), op, async_op=asynchronous)
                if asynchronous:
                    work.wait(), other.wait()
                    expect(work.result()[0] is tensor and work.get_future().wait()[0] is tensor, "result and future")
                close(tensor, wanted, name, f"all_reduce {dtype} {name}")
                close(out.view(-1), wanted.view(world(), 4)[rank()], name, f"reduce_scatter {dtype} {name}")
                calls += 1
    parts = [data(r, 6 * world()) for r in everyone()]
    strided = torch.stack([parts[rank()], parts[rank()]], 1)[:, 0]
    dist.all_reduce(strided)
    same(strided.contiguous(), sum(parts), "strided")
    whole = parts[rank()].clone()
    SINGLE_SCATTER(whole[6 * rank() : 6 * rank() + 6], whole)
    same(whole[6 * rank() : 6 * rank() + 6], sum(parts)[6 * rank() : 6 * rank() + 6], "own part of the input")
    whole = parts[rank()].clone()
    SINGLE_SCATTER(whole[3:9], whole)
    same(whole[3:9], sum(parts)[6 * rank() : 6 * rank() + 6], "elsewhere in the input")
    dist.all_reduce(torch.empty(0, device=device()))
    expect(served("all_reduce") - before[0] == calls + 2, explain())
    expect(served("reduce_scatter") - before[1] == calls + 2, explain())
    expect_raises(ValueError, lambda: SINGLE_SCATTER(torch.empty(5, device=device()), parts[rank()]), "elements")
    wanted = sum(parts).view(world(), 6)[rank()]
    pieces, out = list(parts[rank()].view(world(), 6)), torch.empty(6, device=device())
    if device().type == "cuda" or hasattr(dist.group.WORLD, "reduce_scatter_single"):  # gloo's came with that name
        dist.reduce_scatter(out, pieces)
        same(out, wanted, "of a list: the inner group")


@check
def reduces_several_at_once() -> None:
    """Coalesced forms, of tensors that fit one launch together, of such that do not, and functional ones."""
    manager = dist.distributed_c10d._coalescing_manager
    for sizes in ((3, 5, 8), (1, 70000)):
        before = served("all_reduce"), served("reduce_scatter"), served("all_gather")
        parts = [[data(r, n * world(), call=n) for n in sizes] for r in everyone()]
        sums = [sum(parts[r][i] for r in everyone()) for i in range(len(sizes))]
        for asynchronous in (False, True):
            tensors = [part.clone() for part in parts[rank()]]
            outs = [torch.empty(n, device=device()) for n in sizes]
            gathered = [torch.empty(world() * n, device=device()) for n in sizes]
            own = parts[rank()]
            firsts = [tensor[: tensor.numel() // world()] for tensor in own]
            for function, lists in (
                (dist.all_reduce, [tensors]),
                (SINGLE_SCATTER, [outs, own]),
                (single, [gathered, firsts]),
            ):
                with manager(dist.group.WORLD, async_ops=asynchronous) as pending:
                    for tensors_of_one in zip(*lists, strict=True):
                        function(*tensors_of_one)
                if asynchronous:
                    pending.wait()
            for i, n in enumerate(sizes):
                same(tensors[i], sums[i], f"all_reduce {i} of {sizes}")
                same(outs[i], sums[i].view(world(), n)[rank()], f"reduce_scatter {i} of {sizes}")
                same(gathered[i], torch.cat([parts[r][i][:n] for r in everyone()]), f"all_gather {i} of {sizes}")
        now = served("all_reduce"), served("reduce_scatter"), served("all_gather")
        expect([b - a for a, b in zip(before, now, strict=True)] == [2, 2, 2], explain())
    mixed = [data(rank(), 4), data(rank(), 4, torch.int32)]
    dist.group.WORLD.allreduce_coalesced(mixed[:1]).wait()
    same(mixed[0], sum(data(r, 4) for r in everyone()), "one tensor")
    before = served("all_reduce"), served("reduce_scatter")
    total = functional.all_reduce(data(rank(), 4), "sum", dist.group.WORLD)
    same(total.wait(), sum(data(r, 4) for r in everyone()), "functional all_reduce")
    part = functional.reduce_scatter_tensor(data(rank(), 2 * world()), "sum", 0, dist.group.WORLD)
    same(
        part.wait(), sum(data(r, 2 * world()) for r in everyone()).view(world(), 2)[rank()], "functional reduce_scatter"
    )
    expect((served("all_reduce") - before[0], served("reduce_scatter") - before[1]) == (1, 1), explain())


@check
def reductions_that_are_handed_over() -> None:
    """The inner group has calls that are too large, or of other dtypes and operations, and explain says why."""
    group = dist.new_group(pg_options=Options(max_bytes_per_rank=64))
    dist.all_reduce(data(rank(), 16), group=group)
    large, out = data(rank(), 17 * world()), torch.empty(17, device=device())
    dist.all_reduce(large, group=group)
    same(large, sum(data(r, 17 * world()) for r in everyone()), "large")
    SINGLE_SCATTER(out, data(rank(), 17 * world()), group=group)
    expect((served("all_reduce", group), served("reduce_scatter", group)) == (1, 0), explain(group))
    for kind in ("all_reduce", "reduce_scatter"):
        expect(by_inner(kind, group) == {"more than 64 bytes per rank": 1}, explain(group))
    small = torch.ones(3, dtype=torch.uint8, device=device())
    dist.all_reduce(small, group=group)
    expect(small.tolist() == 3 * [world()], "uint8")
    ints = torch.full((3,), 1 << rank(), dtype=torch.int32, device=device())
    if device().type == "cpu":  # NCCL has none
        dist.all_reduce(ints, dist.ReduceOp.BOR, group=group)
        expect(ints.tolist() == 3 * [(1 << world()) - 1], "bitwise or")
        expect(
            "RedOpType.BOR of torch.int32 is not among tdcoll's reductions" in by_inner("all_reduce", group),
            explain(group),
        )
    expect("sum of torch.uint8 is not among tdcoll's reductions" in by_inner("all_reduce", group), explain(group))
    dist.destroy_process_group(group)


@check
def programs_of_all_contexts_fit() -> None:
    """A group for whose contexts nothing is left is served by the inner group; what is closed is free again."""
    job, groups = runtime.current(), []
    before = job.programs_taken
    while not groups or served("all_gather", groups[-1]):
        groups.append(dist.new_group())
        out = torch.empty(world(), device=device())
        single(out, data(rank(), 1), group=groups[-1])
        same(out, torch.cat([data(r, 1) for r in everyone()]), f"group {len(groups)}")
        expect(len(groups) < 100, "there is no end of programs")
    expect(len(groups) > 1, "no group found any")
    expect(any("other contexts have left" in why for why in by_inner("all_gather", groups[-1])), explain(groups[-1]))
    for group in groups:
        dist.destroy_process_group(group)
    expect(job.programs_taken == before, f"{job.programs_taken} are taken, {before} were")


# ---------------------------------------------------------------------- sparse all-reduce


def sparse(owner: int, dtype: torch.dtype = torch.float32, rows: int = 20) -> torch.Tensor:
    """``[rows, 3]``, not coalesced: rows of all ranks, of one, and one twice."""
    indices = torch.tensor([[0, owner + 2, 0, rows - 1 - owner]], device=device())
    return torch.sparse_coo_tensor(indices, data(owner, 12, dtype).view(4, 3), (rows, 3), check_invariants=False)


def dense_sum(**more) -> torch.Tensor:
    return sum(sparse(r, **more).to_dense() for r in everyone())


@check
def sparse_sums() -> None:
    before = served("sparse_all_reduce")
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64):
        tensor = sparse(rank(), dtype)
        dist.all_reduce(tensor)
        expect(tensor.is_coalesced(), "the result is coalesced")
        same(tensor.to_dense(), dense_sum(dtype=dtype), f"{dtype}")
    tensor = sparse(rank())
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    same(tensor.to_dense(), dense_sum(), "async")
    expect(work.result()[0] is tensor and work.get_future().wait()[0] is tensor, "result and future are the tensor")
    mean = sparse(rank())
    mean._values().mul_(world())
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    expect(torch.allclose(mean.to_dense(), dense_sum()), f"average: {mean}")
    nothing = torch.sparse_coo_tensor(torch.empty(1, 0), torch.empty(0, 3), (20, 3), device=device())
    dist.all_reduce(nothing)
    expect(nothing._nnz() == 0, "nobody has rows")
    one = sparse(0) if rank() == 0 else nothing.clone()
    dist.all_reduce(one)
    same(one.to_dense(), sparse(0).to_dense(), "one rank has rows")
    indices = torch.tensor([[rank(), 1], [0, 2]], device=device())
    matrix = torch.sparse_coo_tensor(indices, torch.ones(2, 2, device=device()), (world(), 3, 2))
    wanted = torch.zeros(world(), 3, 2, device=device())
    wanted[:, 0] += 1
    wanted[1, 2] += world()
    dist.all_reduce(matrix)
    same(matrix.to_dense(), wanted, "two sparse dimensions")
    expect(served("sparse_all_reduce") - before == 11, explain())
    expect_raises(RuntimeError, lambda: dist.all_reduce(sparse(rank()), dist.ReduceOp.MAX))
    expect(any("max" in why for why in by_inner("sparse_all_reduce")), explain())


@check
def sparse_dtypes_and_operations() -> str:
    """Every one of them gives what the dense tensors give, in the same dtype, or raises: nothing in between."""
    operations = {
        **{
            name: getattr(dist.ReduceOp, name)
            for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
        },
        "PREMUL_SUM": dist._make_nccl_premul_sum(2.0),
    }
    kinds = [*DTYPES, torch.int8, torch.int16, torch.complex128]
    plain = dist.new_group(backend="tdcoll", pg_options=Options(serves="none"))
    computed = []
    for dtype in kinds:
        for name, op in operations.items():
            for group in (dist.group.WORLD, plain):
                try:
                    wanted = sparse(rank(), dtype).to_dense()
                    dist.all_reduce(wanted, op, group=group)
                except (RuntimeError, TypeError, ValueError):
                    wanted = None
                tensor = sparse(rank(), dtype)
                try:
                    dist.all_reduce(tensor, op, group=group)
                except (RuntimeError, TypeError, ValueError) as error:
                    expect(name != "SUM" or dtype not in REDUCED or group is plain, f"{dtype} {name}: {error}")
                    continue
                expect(wanted is not None, f"{dtype} {name}: only the sparse tensor can be reduced")
                if name == "AVG":  # divided before or after, and rounded in between
                    torch.testing.assert_close(tensor.to_dense(), wanted, msg=f"{dtype} {name}: {tensor.to_dense()}")
                else:
                    same(tensor.to_dense(), wanted, f"{dtype} {name}")
                computed.append(f"{name} {dtype}")
        try:  # how sums are made where the inner group is NCCL
            gathered = sparse_sum_by_gather(plain._plain, sparse(rank(), dtype), "sum")
        except (RuntimeError, TypeError):  # the inner group does not know the dtype
            continue
        wanted = sparse(rank(), dtype).to_dense()
        dist.all_reduce(wanted, group=plain)
        if dtype is torch.bool:  # gloo adds the bytes
            wanted = wanted.view(torch.uint8) != 0
        same(gathered.to_dense(), wanted, f"{dtype} by all-gathers")
    expect({f"SUM {dtype}" for dtype in REDUCED} <= set(computed), f"too few are computed: {computed}")
    complex_ = sparse(rank(), torch.complex64)
    expect_raises(TypeError, lambda: dist.all_reduce(complex_), "complex and sparse", "view_as_real")
    with torch.inference_mode():
        expect_raises(TypeError, lambda: dist.all_reduce(sparse(rank(), torch.complex64)), "complex and sparse")
    real = torch.view_as_real(complex_).clone()
    dist.all_reduce(real)
    wanted = sum(sparse(r, torch.complex64).to_dense() for r in everyone())
    same(torch.view_as_complex(real).to_dense(), wanted, "as the message says")
    square = torch.sparse_coo_tensor([[0, 1], [1, 2]], torch.ones(2, device=device()), (3, 3))
    turned = square.t()
    dist.all_reduce(turned)
    same(turned.to_dense(), world() * square.to_dense().t(), "a view of a real tensor")
    whole = sparse(rank(), torch.int64)
    expect_raises(TypeError, lambda: dist.all_reduce(whole, dist.ReduceOp.AVG), "AVG", "floating-point", "torch.int64")
    same(whole.to_dense(), sparse(rank(), torch.int64).to_dense(), "what was refused is as it was")
    dist.destroy_process_group(plain)
    return f"{len(computed)} of {2 * len(kinds) * len(operations)} are computed"


@check
def growth() -> None:
    """Contexts become as large as is asked for; beyond the limit the inner group serves."""
    group = dist.new_group(pg_options=Options(max_bytes_per_rank=3000))
    for count in (100, 700):
        out = torch.empty(world() * count, device=device())
        single(out, data(rank(), count), group=group)
        same(out, torch.cat([data(r, count) for r in everyone()]), f"{count}")
    out = torch.empty(world() * 800, device=device())
    single(out, data(rank(), 800), group=group)
    same(out, torch.cat([data(r, 800) for r in everyone()]), "800, by the inner group")
    expect((served("all_gather", group), by_inner("all_gather", group)) == (2, {"more than 3000 bytes per rank": 1}),
           explain(group))  # fmt: skip
    for rows, dim in ((10, 1), (600, 1), (600, 5)):
        indices = (torch.arange(rows, device=device()) + rank() * rows)[None]
        tensor = torch.sparse_coo_tensor(indices, data(rank(), rows * dim).view(rows, dim), (5000, dim))
        wanted = torch.zeros(5000, dim, device=device())
        for r in everyone():
            wanted[r * rows : (r + 1) * rows] = data(r, rows * dim).view(rows, dim)
        dist.all_reduce(tensor, group=group)
        same(tensor.to_dense(), wanted, f"{rows} rows of {dim}")
    expect(served("sparse_all_reduce", group) == 3, explain(group))
    dist.destroy_process_group(group)


# ---------------------------------------------------------------------- work, groups


@check
def works() -> None:
    tensor = data(rank(), 3)
    out = torch.empty(world() * 3, device=device())
    if rank() == 0:
        time.sleep(0.3)
    work = single(out, tensor, async_op=True)
    then = work.get_future().then(lambda done: done.value()[0].sum())
    expect(work.wait() is True, "wait returns True")
    wanted = torch.cat([data(r, 3) for r in everyone()])
    same(work.result()[0], wanted, "result")
    same(then.wait(), wanted.sum(), "a future's callback")
    if device().type == "cuda":
        torch.cuda.synchronize()
    expect(work.is_completed() and work.is_success() and work.exception() is None, "complete")

    # Asynchronous: what is issued in between is not held up, or this would never end. (The first message between two
    # ranks is sent before: for that NCCL makes a communicator, which waits for all that the GPU is doing.)
    where = torch.device("cpu") if shared() else device()  # gloo, which then serves CUDA tensors, cannot send them
    peer_out = torch.empty(1, device=where)
    if rank() == 0:
        dist.send(torch.ones(1, device=where), 1)
    elif rank() == 1:
        dist.recv(peer_out, 0)
    if device().type == "cuda":
        torch.cuda.synchronize()
    if rank() == 0:
        work = single(out, tensor, async_op=True)
        dist.send(torch.ones(1, device=where), 1)
        work.wait()
    else:
        if rank() == 1:
            dist.recv(peer_out, 0)
        single(out, tensor)
    same(out, wanted, "around a send")

    if device().type == "cpu":
        if rank() == 0:
            time.sleep(0.5)
        late = dist.barrier(async_op=True)
        if rank() != 0:
            expect(not late.is_completed(), "a barrier before all ranks are there is not complete")
            expect_raises(dist.DistBackendError, lambda: late.wait(timedelta(milliseconds=20)), "0.02 s")
        late.wait()
    expect(issubclass(BackendTimeout, (dist.DistBackendError,)), "a timeout is torch.distributed's error as well")
    kept = ValueError("x")
    expect(as_backend_error(kept) is kept, "other errors stay what they are")


@check
def tensors_of_other_kinds() -> None:
    """Results of functional collectives that nobody has waited for, negative views, rows without elements."""
    wanted = torch.cat([data(r, 4) for r in everyone()])
    for _ in range(2):  # the second synchronous call goes the short way
        pending = functional.all_gather_tensor(data(rank(), 4), 0, dist.group.WORLD)
        out = torch.empty(world() ** 2 * 4, device=device())
        single(out, pending)
        same(out, wanted.repeat(world()), "of a pending result")
        negative = torch._neg_view(torch.zeros(world() * 4, device=device()))
        single(negative, data(rank(), 4))
        same(negative.resolve_neg(), wanted, "into a negative view")
    empty = torch.sparse_coo_tensor([[rank(), 0]], torch.empty(2, 0, device=device()), (world(), 0)).to(device())
    dist.all_reduce(empty)
    expect(empty.indices().tolist() == [list(everyone())], f"rows without elements: {empty.indices()}")


@check
def subgroups() -> str | None:
    last = world() - 1
    pair = dist.new_group([0, last])
    if rank() in (0, last):
        out = torch.empty(8, device=device())
        single(out, data(rank(), 4), group=pair)
        same(out, torch.cat([data(0, 4), data(last, 4)]), "pair")
        tensor = sparse(rank())
        dist.all_reduce(tensor, group=pair)
        same(tensor.to_dense(), sparse(0).to_dense() + sparse(last).to_dense(), "sparse in a pair")
        dist.barrier(pair)
        expect(served("all_gather", pair) == served("barrier", pair) == 1, explain(pair))
        dist.destroy_process_group(pair)
    mixed = dist.new_group(backend=f"cpu:gloo,{device().type}:tdcoll" if device().type == "cuda" else "cpu:tdcoll")
    expect(isinstance(mixed, TdcollProcessGroup), f"{mixed}")
    single(torch.empty(world(), device=device()), data(rank(), 1), group=mixed)
    expect(served("all_gather", mixed) == 1, explain(mixed))
    dist.destroy_process_group(mixed)
    alone = dist.new_group([rank()], use_local_synchronization=True)
    mine = sparse(rank())
    dist.all_reduce(mine, group=alone)
    same(mine.to_dense(), sparse(rank()).to_dense(), "alone")
    reverse = dist.group.WORLD.split_group(list(everyone())[::-1], group_name="reverse")
    gathered = torch.empty(world(), device=device())
    reverse.all_gather_single(gathered, data(rank(), 1)).wait()
    same(gathered, torch.cat([data(r, 1) for r in reversed(everyone())]), "split, in another order")
    expect(dist.group.WORLD.split_group([(rank() + 1) % world()], group_name=f"not {rank()}") is None, "not in it")
    reverse.shutdown()
    if shared():
        return "without DeviceMesh, which deals out the GPUs of a host to as many ranks"

    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh(device().type, (world(),))
    before = served("all_gather")
    whole = DTensor.from_local(data(rank(), 4), mesh, [Shard(0)]).full_tensor()
    same(whole, torch.cat([data(r, 4) for r in everyone()]), "DTensor on a DeviceMesh")
    expect(served("all_gather") > before, "a mesh of all ranks uses the default group")
    return None


@check
def inner_collectives() -> None:
    """Nothing that worked stops working."""
    total = torch.full((3,), float(rank()), device=device())
    dist.all_reduce(total)
    same(total, torch.full((3,), float(sum(everyone())), device=device()), "all_reduce")
    work = dist.all_reduce(total, dist.ReduceOp.MAX, async_op=True)
    work.wait()
    if device().type == "cuda":
        torch.cuda.synchronize()
    expect(work.is_completed(), "complete")
    tensor = data(rank(), 4)
    dist.broadcast(tensor, 1)
    same(tensor, data(1, 4), "broadcast")
    objects: list[object] = [None] * world()
    dist.all_gather_object(objects, {"rank": rank()})
    expect(objects == [{"rank": r} for r in everyone()], f"{objects}")
    pieces = [torch.empty(4, device=device()) for _ in everyone()] if rank() == 0 else None
    dist.gather(data(rank(), 4), pieces)
    if pieces is not None:
        same(pieces[-1], data(world() - 1, 4), "gather")
    dist.reduce(total, 0)
    back = torch.empty(4, device=device())
    dist.scatter(back, [data(r, 4) for r in everyone()] if rank() == 0 else None)
    same(back, data(rank(), 4), "scatter")
    swapped = torch.empty(world(), device=device())
    dist.all_to_all_single(swapped, data(rank(), world()))
    same(swapped, torch.stack([data(r, world())[rank()] for r in everyone()]), "all_to_all_single")
    options = dist.BarrierOptions()  # dist.barrier(timeout=...) of newer PyTorch
    options.timeout = timedelta(seconds=20)
    dist.group.WORLD.barrier(options).wait()
    expect("a timeout of its own" in by_inner("barrier"), explain())
    expect(dist.get_backend() == "tdcoll", dist.get_backend())


@check
def options_and_words() -> None:
    before = len(LINES)
    group = dist.new_group(pg_options=Options(serves="none"))
    out = torch.empty(world() * 2, device=device())
    for _ in range(3):
        single(out, data(rank(), 2), group=group)
        tensor = sparse(rank())
        dist.all_reduce(tensor, group=group)
    same(out, torch.cat([data(r, 2) for r in everyone()]), "inner all_gather")
    same(tensor.to_dense(), dense_sum(), "inner sparse all_reduce")
    mean = sparse(rank())
    dist.all_reduce(mean, dist.ReduceOp.AVG, group=group)
    expect(torch.allclose(mean.to_dense() * world(), dense_sum()), "inner sparse average")
    dist.barrier(group)
    expect(not any(served(kind, group) for kind in ("all_gather", "sparse_all_reduce", "barrier")), explain(group))
    text = explain(group)
    for kind in ("all_gather", "sparse_all_reduce", "barrier"):
        expect(f"  {kind}: inner group; told to serve nothing" in text, text)
    if rank() == 0:
        lines = [line for line in LINES[before:] if f"of group {group.group_name} " in line]
        kinds = 3 if device().type == "cpu" else 1  # what NCCL has itself does not pass tdcoll
        by = [line for line in lines if "is served by gloo" in line or "is served by nccl" in line]
        expect(by == lines and len(lines) == kinds, f"one line per kind that passes tdcoll: {lines}")
    some = dist.new_group(pg_options=Options(serves="barrier"))
    single(out, data(rank(), 2), group=some)
    dist.barrier(some)
    expect((served("all_gather", some), served("barrier", some)) == (0, 1), explain(some))
    expect("  all_gather: inner group; told to serve barrier" in explain(some), explain(some))
    dist.destroy_process_group(some)
    expect("  all_gather: tdcoll" in explain() and "  everything else: inner group" in explain(), explain())
    plain = dist.new_group(backend="gloo")
    expect("tdcoll serves none" in explain(plain), explain(plain))
    expect_raises(
        tdcoll.RankMismatchError,
        lambda: dist.new_group(pg_options=Options(serves="all" if rank() else "none")),
        "they differ in serves (rank 0: (), rank 1: (",
    )
    expect_raises(
        tdcoll.RankMismatchError,
        lambda: dist.new_group(pg_options=Options(heap_bytes=(8 + rank()) << 20)),
        "heap_bytes",
    )
    expect_raises(TypeError, lambda: dist.new_group(pg_options={"serves": "all"}), "pg_options")


# ---------------------------------------------------------------------- DDP


class Model(nn.Module):
    """Tables and a dense layer, of small integers: sums are exact in any order."""

    def __init__(self, sparse_tables: bool, tables: int = 1) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.tables = nn.ModuleList(nn.Embedding(16, 4, sparse=sparse_tables) for _ in range(tables))
        self.dense = nn.Linear(4, 2)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randint(-3, 4, parameter.shape))
        self.to(device())

    def forward(self, lookups: dict[int, torch.Tensor]) -> torch.Tensor:
        rows = [self.tables[table](ids).sum(0) for table, ids in lookups.items()]
        return self.dense(sum(rows, torch.zeros(4, device=device())))


def lookups(step: int, tables: int = 1) -> dict[int, torch.Tensor]:
    ids = (torch.arange(5, device=device()) * (rank() + 1) + step) % 16
    return {table: (ids + table) % 16 for table in range(tables)}


def train(model: nn.Module, batches: list[dict[int, torch.Tensor]], finish=lambda: None) -> list[torch.Tensor]:
    """The weights afterwards; exact in fp32 for a few steps, since world and learning rate are such."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for batch in batches:
        optimizer.zero_grad()
        (model(batch).sum() * world()).backward()
        finish()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def dense_run(batches: list[dict[int, torch.Tensor]], tables: int = 1) -> list[torch.Tensor]:
    return train(DDP(Model(False, tables), find_unused_parameters=True), batches)


def equal(got: list[torch.Tensor], wanted: list[torch.Tensor], what: str) -> None:
    for one, other in zip(got, wanted, strict=True):
        same(one, other, what)


@check
def ddp_with_the_backend() -> None:
    batches = [lookups(step, 2) for step in range(3)]
    before = served("sparse_all_reduce")
    equal(train(DDP(Model(True, 2)), batches), dense_run(batches, 2), "DDP")
    expect(served("sparse_all_reduce") - before == 6, explain())

    accumulated = []
    for sparse_tables in (True, False):
        model = DDP(Model(sparse_tables))
        with model.no_sync():
            model(lookups(0)).sum().backward()
        model(lookups(1)).sum().backward()
        accumulated.append([parameter.grad.to_dense() for parameter in model.parameters()])
    equal(*accumulated, "no_sync")


@check
def clipped_gradients() -> None:
    """The norm of a model with sparse tables is that of the dense one, with the same bits on all ranks."""
    norms = []
    for sparse_tables in (True, False):
        model = DDP(Model(sparse_tables, 2))
        (model(lookups(0, 2)).sum() * world()).backward()
        norms.append(clip_grad_norm_(model.parameters(), 0.5))
        if sparse_tables:
            grads = [parameter.grad for parameter in model.parameters()]
            expect(sum(grad.is_sparse for grad in grads) == 2, "two tables have sparse gradients")
    torch.testing.assert_close(*norms)
    for grad, parameter in zip(grads, model.parameters(), strict=True):
        torch.testing.assert_close(grad.to_dense(), parameter.grad)
    everywhere = torch.empty(world(), device=device())
    single(everywhere, norms[0].view(1))
    same(everywhere, norms[0].expand(world()).contiguous(), "on all ranks")


@check
def ddp_hook_with_another_backend() -> None:
    group = dist.new_group(backend="gloo" if device().type == "cpu" or shared() else "cpu:gloo,cuda:nccl")
    batches = [lookups(step, 2) for step in range(3)]
    model = DDP(Model(True, 2), process_group=group)
    model.register_comm_hook(group, sparse_hook)
    equal(train(model, batches), dense_run(batches, 2), "sparse_hook")
    context = runtime.current().contexts["tdcoll.distributed", tuple(everyone())].context
    expect(context.calls == 6, f"{context.calls} calls were tdcoll's")


@check
def reducer() -> None:
    """Tables that a rank does not use, that nobody uses, and ranks without rows."""
    batches = [lookups(step, 3) for step in range(4)]
    for table in (0, 1):
        if rank() == table:
            del batches[1][table]
    del batches[2][1]
    batches[3] = {0: batches[3][0]} if rank() == world() - 1 else {}
    model = Model(True, 3)
    if rank() != 0:
        with torch.no_grad():
            model.tables[0].weight.zero_()  # it is rank 0's weights that count
    sums = SparseGradientReducer(model, rows_per_rank=2)
    got = train(DDP(model, find_unused_parameters=True), batches, sums.finish)
    equal(got, dense_run(batches, 3), "reducer")
    grads = [table.weight.grad is None for table in model.tables]
    expect(grads == [False, True, True], f"a table that nobody used has no gradient: {grads}")
    sums.close()


@check
def reducer_accumulates_and_scales() -> None:
    wanted = None
    for sparse_tables in (False, True):
        model = Model(sparse_tables, 2)
        model.tables[1].weight = model.tables[0].weight  # shared
        sums = SparseGradientReducer(model) if sparse_tables else None
        ddp = DDP(model)
        scaler = torch.amp.GradScaler(device().type, init_scale=8.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for step in range(2):
            optimizer.zero_grad()
            with ddp.no_sync():
                if sums is None:
                    scaler.scale(ddp(lookups(step, 2)).sum() * world()).backward()
                else:
                    with sums.no_sync():
                        scaler.scale(ddp(lookups(step, 2)).sum() * world()).backward()
            scaler.scale(ddp(lookups(step + 5, 2)).sum() * world()).backward()
            if sums is not None:
                sums.finish()
            scaler.step(optimizer)
            scaler.update()
        got = [parameter.detach().clone() for parameter in model.parameters()]
        if wanted is None:
            wanted = got
        else:
            equal(got, wanted, "accumulated, shared and scaled")
            expect(len(got) == 3, "one shared table")
            found_inf = model.tables[0].weight.grad
            found_inf._values()[0, 0] = float("inf") if rank() == 1 else 1.0
            sums.finish()
            expect(not torch.isfinite(model.tables[0].weight.grad._values()).all(), "infinity reaches all ranks")


@check
def reducer_with_frozen_tables() -> None:
    """Frozen when the reducer is made, later, on one rank only, and no longer."""
    tables = nn.ModuleList(nn.Embedding(16, 4, sparse=True) for _ in range(3)).to(device())
    frozen = [[everyone(), [], [0]], [[], everyone(), []], [[0], [1], everyone()], [[], [], []]]

    def freeze(step: int) -> None:
        for table, where in zip(tables, frozen[step], strict=True):
            table.weight.requires_grad_(rank() not in where)

    freeze(0)
    sums = SparseGradientReducer(tables)
    for step in range(len(frozen)):
        freeze(step)
        for table in tables:
            table.weight.grad = None
        ids = {r: (torch.arange(5, device=device()) * (r + 1) + step) % 16 for r in everyone()}
        (sum(table(ids[rank()]).sum() for table in tables) * world()).backward()
        sums.finish()
        for table, where in zip(tables, frozen[step], strict=True):
            counts = torch.zeros(16, device=device())
            for r in everyone():
                if r not in where:
                    counts += torch.bincount(ids[r], minlength=16)
            grad = table.weight.grad
            if rank() in where:
                expect(grad is None, f"step {step}: a frozen table has a gradient")
            else:
                same(grad.to_dense(), counts.unsqueeze(1).expand(16, 4).contiguous(), f"step {step}")
    sums.close()


@check
def reducer_says_what_is_wrong() -> None:
    model = Model(True)
    model.tables[0].weight.requires_grad_(False)
    sums = SparseGradientReducer(model)
    model.tables[0].weight.requires_grad_(True)
    expect_raises(ValueError, lambda: SparseGradientReducer(model), "tables.0.weight has a reducer already", "close()")
    model(lookups(0)).sum().backward()
    expect_raises(RuntimeError, lambda: model(lookups(0)).sum().backward(), "second backward", "tables.0.weight")
    sums.finish()
    with sums.no_sync():
        expect_raises(RuntimeError, sums.finish, "no_sync")
    sums.close()
    expect_raises(ValueError, lambda: SparseGradientReducer(Model(False)), "sparse=True")
    tied = Model(True)
    sums = SparseGradientReducer(tied)
    loss = tied(lookups(0)).sum() + tied.tables[0].weight.sum()
    expect_raises(TypeError, loss.backward, "tables.0.weight", "dense gradient")
    sums.close()
    wrapped = DDP(Model(True, 2))
    for late in (wrapped, wrapped.module, nn.Sequential(wrapped)):
        expect_raises(
            ValueError,
            lambda late=late: SparseGradientReducer(late),
            "DistributedDataParallel has", "tables.0.weight", "tables.1.weight", "reducer of the model first",
        )  # fmt: skip
    model = wrapped.module
    del wrapped, late
    sums = SparseGradientReducer(model)
    kept = DDP(model)
    sums.close()
    again = SparseGradientReducer(model)  # the wrapper leaves them alone already
    again.close()
    del kept


# ---------------------------------------------------------------------- GPUs


def sums(owners: range, count: int, call: int) -> torch.Tensor:
    return sum(data(r, count, call=call) for r in owners)


@check(gpu_only=True)
def streams() -> None:
    """A call waits for the current stream, and wait() makes the current stream wait for it."""
    side = torch.cuda.Stream()
    n = 1 << 16
    before = [served(kind) for kind in ("all_gather", "all_reduce", "reduce_scatter")]
    for stream in (torch.cuda.current_stream(), side):
        with torch.cuda.stream(stream):
            for asynchronous in (False, True, True):  # the second asynchronous one goes the short way
                tensor = torch.zeros(n, device=device())
                out, part = torch.empty(world() * n, device=device()), torch.empty(n, device=device())
                whole = torch.zeros(world() * n, device=device())
                torch.cuda._sleep(20_000_000)
                tensor.fill_(rank() + 1)
                whole.fill_(rank() + 1)
                works = [
                    single(out, tensor, async_op=asynchronous),
                    SINGLE_SCATTER(part, whole, async_op=asynchronous),
                    dist.all_reduce(whole, async_op=asynchronous) if not asynchronous else None,
                ]
                if asynchronous:
                    works[1].wait()
                    works[2] = dist.all_reduce(whole, async_op=True)
                    works[0].wait(), works[2].wait()
                total = sum(r + 1 for r in everyone())
                expect(int(out.double().sum()) == total * n, f"all_gather, {asynchronous}")
                expect(bool((part == total).all()), f"reduce_scatter, {asynchronous}")
                expect(bool((whole == total).all()), f"all_reduce, {asynchronous}")
    torch.cuda.synchronize()
    now = [served(kind) for kind in ("all_gather", "all_reduce", "reduce_scatter")]
    expect([b - a for a, b in zip(before, now, strict=True)] == [6, 6, 6], explain())


@check(gpu_only=True)
def kinds_at_once() -> None:
    """All-gathers on one stream and reduce-scatters on another, which ranks begin in different orders, beside
    matmuls that fill the GPU: they end, and are right."""
    n, calls = 1 << 18, 40
    gathering, scattering = torch.cuda.Stream(), torch.cuda.Stream()
    own = [data(rank(), n, call=call) for call in range(2)]
    whole = [data(rank(), world() * n, call=call) for call in range(2)]
    outs = [torch.empty(world() * n, device=device()) for _ in range(2)]
    parts = [torch.empty(n, device=device()) for _ in range(2)]
    matrix = torch.randn(2048, 2048, device=device())
    single(outs[0], own[0])  # first calls make contexts, in one order
    SINGLE_SCATTER(parts[0], whole[0])
    matrix = (matrix @ matrix).clamp(-1, 1)  # CUDA may load a kernel only when the GPU is idle: not among the calls
    torch.cuda.synchronize()
    for call in range(calls):

        def gather(call: int = call) -> None:
            with torch.cuda.stream(gathering):
                single(outs[call % 2], own[call % 2])

        def scatter(call: int = call) -> None:
            with torch.cuda.stream(scattering):
                SINGLE_SCATTER(parts[call % 2], whole[call % 2])

        for make in (gather, scatter) if (rank() + call) % 2 else (scatter, gather):
            make()
            matrix = (matrix @ matrix).clamp(-1, 1)
    torch.cuda.synchronize()
    for call in range(2):
        same(outs[call], torch.cat([data(r, n, call=call) for r in everyone()]), f"gathered {call}")
        same(parts[call], sums(everyone(), world() * n, call).view(world(), n)[rank()], f"scattered {call}")


@check(gpu_only=True)
def works_that_nobody_waits_for() -> None:
    """Their tensors are not used anew before the call has read them."""
    wanted = sum(r + 1 for r in everyone())
    results = []
    for _ in range(20):
        tensor = torch.full((1 << 20,), float(rank() + 1), device=device())
        work = dist.all_reduce(tensor, async_op=True)
        results.append((work.get_future(), tensor))
        gone = torch.full((1 << 20,), float(rank() + 1), device=device())
        dist.all_reduce(gone, async_op=True)
        del work, gone
        torch.full((1 << 20,), -5.0, device=device())  # would take its memory
    for future, tensor in results:
        future.wait()
        expect(bool((tensor == wanted).all()), f"{tensor[:4]}")


@check(gpu_only=True)
def graphs() -> None:
    tensor, out = torch.empty(256, device=device()), torch.empty(world() * 256, device=device())
    whole, part = torch.empty(world() * 256, device=device()), torch.empty(256, device=device())
    reduced_ = torch.empty(256, device=device())

    def calls() -> None:
        single(out, tensor)
        SINGLE_SCATTER(part, whole)
        reduced_.copy_(tensor)
        dist.all_reduce(reduced_)

    tensor.zero_(), whole.zero_()
    calls()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            calls()
    for call in range(5):
        tensor.copy_(data(rank(), 256, call=call))
        whole.copy_(data(rank(), world() * 256, call=call))
        graph.replay()
        same(out, torch.cat([data(r, 256, call=call) for r in everyone()]), f"replay {call}")
        same(part, sums(everyone(), world() * 256, call).view(world(), 256)[rank()], f"scattered, replay {call}")
        same(reduced_, sums(everyone(), 256, call), f"reduced, replay {call}")


def again() -> None:
    """Everything can be left, and joined once more."""
    dist.destroy_process_group()
    dist.init_process_group("tdcoll", timeout=timedelta(seconds=60), pg_options=Options(heap_bytes=32 << 20))
    out = torch.empty(world(), device=device())
    single(out, data(rank(), 1))
    same(out, torch.cat([data(r, 1) for r in everyone()]), "after joining again")
    expect(tdcoll.heap_info().total == 32 << 20, "heap_bytes")
    dist.destroy_process_group()
    expect(not tdcoll.is_initialized(), "destroy_process_group leaves the job")


if __name__ == "__main__":
    logging.getLogger("tdcoll").addHandler(Remember())
    logging.getLogger("tdcoll").setLevel(logging.INFO)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group("tdcoll", timeout=timedelta(seconds=60))
    run()
    again()
