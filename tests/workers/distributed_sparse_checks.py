# SPDX-License-Identifier: Apache-2.0
"""Sparse all-reduces of backend "tdcoll", as torch.distributed's users call them, on every rank of a
job."""

from __future__ import annotations

import torch
import torch.distributed as dist
from backend_job import (
    by_fallback,
    dense_sum,
    handled,
    same,
    sparse,
)
from distributed_checks import DTYPES
from harness import check, device, everyone, expect, expect_raises, rank, world

from tdcoll.collectives.sparse_all_reduce.rows import DTYPES as REDUCED
from tdcoll.distributed import Options, explain


@check
def sparse_sums() -> None:
    before = handled("sparse_all_reduce")
    tensor = sparse(rank())
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    expect(tensor.is_coalesced(), "the result is coalesced")
    same(tensor.to_dense(), dense_sum(), "async")
    expect(
        work.result()[0] is tensor and work.get_future().wait()[0] is tensor,
        "result and future are the tensor",
    )
    mean = sparse(rank())
    mean._values().mul_(world())
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    expect(torch.allclose(mean.to_dense(), dense_sum()), f"average: {mean}")
    nothing = torch.sparse_coo_tensor(
        torch.empty(1, 0), torch.empty(0, 3), (20, 3), device=device()
    )
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
    expect(by_fallback("sparse_all_reduce")["2 sparse dimensions"] == 1, explain())
    expect(handled("sparse_all_reduce") - before == 4, explain())
    expect_raises(RuntimeError, lambda: dist.all_reduce(sparse(rank()), dist.ReduceOp.MAX))
    expect(any("max" in why for why in by_fallback("sparse_all_reduce")), explain())


def densified(tensor: torch.Tensor) -> torch.Tensor:
    """The dense tensor of a sparse one, also of a dtype for which PyTorch has none."""
    if tensor.dtype.itemsize == 1 and tensor.is_floating_point():
        return tensor.float().to_dense().to(tensor.dtype)
    return tensor.to_dense()


@check
def sparse_dtypes_and_operations() -> str:
    """Every one of them gives what the dense tensors give, in the same dtype, or raises: nothing in
    between."""
    operations = {
        **{
            name: getattr(dist.ReduceOp, name)
            for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
        },
        "PREMUL_SUM": dist._make_nccl_premul_sum(2.0),
    }
    kinds = [*DTYPES, torch.int8, torch.int16, torch.complex128]
    plain = dist.new_group(backend="tdcoll", pg_options=Options(handles="none"))
    computed = []
    for dtype in kinds:
        for name, op in operations.items():
            for group in (dist.group.WORLD, plain):
                try:
                    wanted = densified(sparse(rank(), dtype))
                    dist.all_reduce(wanted, op, group=group)
                except (RuntimeError, TypeError, ValueError):
                    wanted = None
                tensor = sparse(rank(), dtype)
                try:
                    dist.all_reduce(tensor, op, group=group)
                except (RuntimeError, TypeError, ValueError) as error:
                    expect(
                        name != "SUM" or dtype not in REDUCED or group is plain,
                        f"{dtype} {name}: {error}",
                    )
                    continue
                expect(wanted is not None, f"{dtype} {name}: only the sparse tensor can be reduced")
                got = densified(tensor)
                eight_bits = dtype.itemsize == 1 and dtype.is_floating_point
                if name == "AVG" or eight_bits:  # divided before or after, and rounded in between
                    steps = {"rtol": 0.13, "atol": 0.0} if eight_bits else {}
                    torch.testing.assert_close(
                        got.float(), wanted.float(), msg=f"{dtype} {name}: {got}", **steps
                    )
                else:
                    same(got, wanted, f"{dtype} {name}")
                computed.append(f"{name} {dtype}")
    expect(
        {f"SUM {dtype}" for dtype in REDUCED} <= set(computed), f"too few are computed: {computed}"
    )
    complex_ = sparse(rank(), torch.complex64)
    expect_raises(
        TypeError, lambda: dist.all_reduce(complex_), "complex and sparse", "view_as_real"
    )
    with torch.inference_mode():
        expect_raises(
            TypeError,
            lambda: dist.all_reduce(sparse(rank(), torch.complex64)),
            "complex and sparse",
        )
    real = torch.view_as_real(complex_).clone()
    dist.all_reduce(real)
    wanted = sum(sparse(r, torch.complex64).to_dense() for r in everyone())
    same(torch.view_as_complex(real).to_dense(), wanted, "as the message says")
    square = torch.sparse_coo_tensor([[0, 1], [1, 2]], torch.ones(2, device=device()), (3, 3))
    turned = square.t()
    dist.all_reduce(turned)
    same(turned.to_dense(), world() * square.to_dense().t(), "a view of a real tensor")
    whole = sparse(rank(), torch.int64)
    expect_raises(
        TypeError,
        lambda: dist.all_reduce(whole, dist.ReduceOp.AVG),
        "AVG",
        "floating-point",
        "torch.int64",
    )
    same(whole.to_dense(), sparse(rank(), torch.int64).to_dense(), "what was refused is as it was")
    dist.destroy_process_group(plain)
    return f"{len(computed)} of {2 * len(kinds) * len(operations)} are computed"
