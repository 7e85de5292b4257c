# SPDX-License-Identifier: Apache-2.0
"""Means, and sums of numbers times a factor, on every rank of a job: one arithmetic, whoever makes
a call."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from backend_cases import CASES, REDUCTION, Case, Values, equal
from backend_job import SINGLE_SCATTER
from harness import check, device, everyone, expect, expect_raises, rank, shared, world
from torch.distributed import distributed_c10d as c10d

from tdcoll.distributed import Options
from tdcoll.primitives.reduce import ACCUMULATORS


def scaled_sum(parts: Sequence[torch.Tensor], op: str, factor: float) -> torch.Tensor:
    """Return what a mean, or a sum of products, is: exact, if the parts are such that it has no
    rounding."""
    dtype, n = parts[0].dtype, len(parts)
    if not dtype.is_floating_point:
        # which wraps around
        total = torch.stack([part.to(torch.int64) for part in parts]).sum(0).to(dtype)
        return total.div(n, rounding_mode="trunc")
    total = torch.stack([part.double() for part in parts]).sum(0)
    if op == "AVG":
        # The sum may be beyond the accumulator: that of bf16 is fp32, which has the same range.
        return (total.to(ACCUMULATORS[dtype]).double() / n).to(dtype)
    return (total * factor).to(dtype)


def large(r: int, dtype: torch.dtype, count: int) -> torch.Tensor:
    """Numbers whose sum over the ranks their dtype does not have, but whose mean it has exactly,
    unless the sum is beyond the accumulator, too; or, of integers, small negative ones, whose mean
    is truncated."""
    places = torch.arange(count, device=device())
    if not dtype.is_floating_point:
        negative = 0 if dtype is torch.uint8 else 5
        return (places * (r + 1) % 9 - negative).to(dtype)
    most = torch.finfo(dtype).max if dtype.itemsize < 4 else 1e6
    step = 2.0 ** (torch.tensor(float(most)).log2().floor().item() - 2)
    return ((places % 2 * 2 - 1) * step * 3.0).to(dtype).to(device())


REDUCTIONS = [case for case in CASES if case.reduces]
OF_NUMBERS = [dtype for dtype in ACCUMULATORS if dtype not in (torch.float8_e5m2,)]


@check
def averages_have_one_arithmetic() -> str:
    """Whoever makes a call, of whatever form: a mean doesn't overflow on the way, integers are
    truncated."""
    few = dist.new_group(pg_options=Options(max_bytes_per_rank=0))
    alone = dist.new_group([rank()], use_local_synchronization=True)
    factor = 1 / world()
    operations = {"AVG": dist.ReduceOp.AVG}
    if device().type == "cpu" or not shared():
        operations["PREMUL_SUM"] = dist._make_nccl_premul_sum(factor)
    made: Counter[str] = Counter()
    for (name, op), dtype, case in itertools.product(operations.items(), OF_NUMBERS, REDUCTIONS):
        if name == "PREMUL_SUM" and (not dtype.is_floating_point or dtype.itemsize == 1):
            continue
        for group, ranks in ((dist.group.WORLD, everyone()), (few, everyone()), (alone, [rank()])):
            n, me = len(ranks), dist.get_rank(group)
            if name == "PREMUL_SUM" and n == 1:
                continue
            inputs = {
                r: [
                    large(r, dtype, torch.Size(shape).numel()).view(shape)
                    for shape in case.given(r, n)
                ]
                for r in range(n)
            }
            mine = [tensor.clone() for tensor in inputs[me]]
            outs = (
                mine
                if case.in_place
                else [
                    torch.empty(shape, dtype=dtype, device=device()) for shape in case.taken(me, n)
                ]
            )
            wanted = replaced(case, inputs, me, name, factor)
            with_operation(case, group, outs, mine, op)
            for got, right in zip(outs, wanted, strict=True):
                what = (
                    f"{name} of {dtype}, {case.name}, group of {n}, {'few' if group is few else ''}"
                )
                fits = bool(torch.isfinite(right.float()).all())
                exact = device().type == "cpu" or not dtype.is_floating_point
                if not fits and not exact:
                    continue  # NCCL divides before it adds
                expect(bool(torch.isfinite(got.float()).all()) == fits, f"{what}: {got}")
                if exact and n in (1, 2):
                    expect(equal(got, right), f"{what}: {got}, and not {right}")
                else:
                    torch.testing.assert_close(
                        got.float(), right.float(), rtol=0.07, atol=0.0, msg=what
                    )
            made[f"{name} {dtype}"] += 1
    expect(len(made) >= len(OF_NUMBERS), f"{made}")
    for group in (few, alone):
        dist.destroy_process_group(group)
    return f"{sum(made.values())} calls"


def replaced(case: Case, inputs: Values, r: int, op: str, factor: float) -> list[torch.Tensor]:
    """The outputs of a case whose sums are replaced by means, or by sums of products."""
    REDUCTION.append(lambda parts: scaled_sum(parts, op, factor))
    try:
        return case.wanted(inputs, r)
    finally:
        REDUCTION.pop()


def with_operation(
    case: Case, group: Any, outs: list[torch.Tensor], inputs: list[torch.Tensor], op: Any
) -> None:
    """Make a synchronous call of a case with another operation than the sum."""
    if case.name == "all_reduce":
        dist.all_reduce(outs[0], op, group=group)
    elif case.name == "reduce":
        dist.reduce(outs[0], op=op, group=group, group_dst=0)
    elif case.name == "reduce_scatter_single":
        SINGLE_SCATTER(outs[0], inputs[0], op, group=group)
    elif case.name in ("reduce_scatter", "reduce_scatter, uneven"):
        dist.reduce_scatter(outs[0], inputs, op, group=group)
    elif case.in_place:
        opts = c10d.AllreduceCoalescedOptions()
        opts.reduceOp = op
        group.allreduce_coalesced(outs, opts).wait()
    else:
        opts = c10d.ReduceScatterOptions()
        opts.reduceOp = op
        group.reduce_scatter_single_coalesced(outs, inputs, opts).wait()


@check
def reductions_without_a_meaning() -> None:
    few = dist.new_group(pg_options=Options(max_bytes_per_rank=0))
    for group in (dist.group.WORLD, few):
        truth = torch.tensor([rank() == 0, False], device=device())
        dist.all_reduce(truth, group=group)
        expect(truth.tolist() == [True, False], f"the sum of truth values is their or: {truth}")
        expect(truth.view(torch.uint8).tolist() == [1, 0], "a truth value is 0 or 1")
        whole = torch.ones(3, dtype=torch.int64, device=device())
        premultiplied = dist._make_nccl_premul_sum(2.0)
        for tensor, op in ((truth, dist.ReduceOp.AVG), (whole, premultiplied)):
            if device().type == "cpu":
                expect_raises(
                    TypeError, lambda t=tensor, o=op, g=group: dist.all_reduce(t, o, group=g)
                )
    dist.destroy_process_group(few)
