# SPDX-License-Identifier: Apache-2.0
"""Tensors that autograd knows, and tensors with strides, on backend "tdcoll": as
torch.distributed's users expect."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
from backend_job import SINGLE_SCATTER, by_fallback, data, finish, handled, same, single, sums
from harness import check, device, everyone, expect, expect_raises, rank, shared, world
from torch import nn

import tdcoll
from tdcoll.distributed import Options, explain


@check
def autograd_sees_no_collective() -> None:
    """A result keeps its history and its version, contiguous or not; a parameter may be reduced in
    place."""
    inner = dist.new_group(pg_options=Options(handles="none"))
    warnings.filterwarnings("ignore", message=".*an autograd kernel was not registered.*")
    for group in (inner, dist.group.WORLD):
        for asynchronous in (False, True):
            for make in (lambda x: x.view(2, 3), lambda x: x.view(2, 3).t()):
                leaf = torch.ones(6, device=device(), requires_grad=True)
                x = make(leaf * 2)
                before = x._version, x.grad_fn
                finish(dist.all_reduce(x, group=group, async_op=asynchronous))
                same(
                    x.detach().contiguous(),
                    torch.full_like(x, 2.0 * world()).contiguous(),
                    "the sum",
                )
                # gloo copies CUDA tensors back for autograd to see
                if group is not inner or device().type == "cpu":
                    expect(
                        (x._version, x.grad_fn) == before,
                        f"version and history {x._version} {x.grad_fn}",
                    )
                x.sum().backward()
                expect(leaf.grad.tolist() == 6 * [2.0], f"{group}: {leaf.grad}")
            last = torch.ones(2, 3, 2, 2, device=device()).to(memory_format=torch.channels_last)
            parameter = nn.Parameter(last)
            finish(dist.all_reduce(parameter, group=group, async_op=asynchronous))
            expect(bool((parameter == world()).all()) and parameter.is_leaf, f"{parameter}")
            with torch.inference_mode():
                made = torch.ones(2, 3, device=device()).t()
            finish(dist.all_reduce(made, group=group, async_op=asynchronous))
            expect(bool((made == world()).all()), f"made in inference mode: {made}")
    expect(handled("all_reduce", inner) == 0, explain(inner))
    dist.destroy_process_group(inner)


STRIDED: dict[str, Callable[[int, int], torch.Tensor]] = {
    "columns": lambda rows, columns: torch.zeros(rows, 2 * columns, device=device())[:, ::2],
    "transposed": lambda rows, columns: torch.zeros(columns, rows, device=device()).t(),
    "negative": lambda rows, columns: torch._neg_view(torch.zeros(rows, columns, device=device())),
}
"""Tensors ``[rows, columns]``, none of which is contiguous memory that holds its values."""


@check
def strided_tensors_of_any_size() -> None:
    """Above and below what tdcoll handles: the elements are reduced that the tensor has, and no
    others."""
    group, n = dist.new_group(pg_options=Options(max_bytes_per_rank=256)), world()
    for rows, backend in ((4, "tdcoll"), (40, "fallback")):  # times 3 columns of 4 bytes
        for name, make in STRIDED.items():
            for asynchronous in (False, True, False):
                what = f"{name}, {rows} rows, {backend}, {asynchronous}"
                for futures in (False, True):
                    x = make(rows, 3)
                    x.copy_(data(rank(), 3 * rows).view(rows, 3))
                    finish(dist.all_reduce(x, group=group, async_op=asynchronous), futures)
                    same(
                        x.clone().resolve_neg().contiguous(),
                        sums(3 * rows).view(rows, 3),
                        f"all_reduce {what}",
                    )
                    if name == "columns":
                        expect(
                            not x._base.view(rows, 6)[:, 1::2].any(),
                            f"what lies between is not touched: {what}",
                        )
                    parameter = nn.Parameter(
                        make(rows, 3).copy_(data(rank(), 3 * rows).view(rows, 3))
                    )
                    finish(dist.all_reduce(parameter, group=group, async_op=asynchronous), futures)
                    expect(parameter.is_leaf and parameter._version <= 1, what)
                    x, out = make(rows, 3), nn.Parameter(make(n * rows, 3))
                    x.copy_(data(rank(), 3 * rows).view(rows, 3))
                    finish(single(out, x, group=group, async_op=asynchronous), futures)
                    wanted = torch.cat([data(r, 3 * rows).view(rows, 3) for r in everyone()])
                    same(
                        out.detach().clone().resolve_neg().contiguous(),
                        wanted,
                        f"all_gather {what}",
                    )
                    x, out = make(n * rows, 3), nn.Parameter(make(rows, 3))
                    x.copy_(data(rank(), 3 * n * rows).view(n * rows, 3))
                    # gloo has no such futures
                    none = backend == "fallback" and (device().type == "cpu" or shared())
                    finish(
                        SINGLE_SCATTER(out, x, group=group, async_op=asynchronous),
                        futures and not none,
                    )
                    wanted = sums(3 * n * rows).view(n, rows, 3)[rank()]
                    same(
                        out.detach().clone().resolve_neg().contiguous(),
                        wanted,
                        f"reduce_scatter {what}",
                    )
    for kind in ("all_reduce", "all_gather", "reduce_scatter"):
        # with 3 ranks and more
        crowded = any("other contexts have left" in why for why in by_fallback(kind, group))
        expect(handled(kind, group) > 0 or crowded, explain(group))
        expect(
            any("more than 256 bytes" in why for why in by_fallback(kind, group)), explain(group)
        )
    dist.destroy_process_group(group)


@check
def debug_mode_compares_before_it_decides() -> None:
    """What is wrong on one rank is an error on all of them, before a context is made or another
    backend is asked."""
    os.environ["TDCOLL_DEBUG"] = "1"
    try:
        group = dist.new_group(pg_options=Options(max_bytes_per_rank=400))
        n, last = world(), rank() == world() - 1

        def wrong(make: Callable[[bool], object], mine: str, theirs: str) -> None:
            """A call that is wrong on the last rank, in both ways, and then a right one."""
            for asynchronous in (False, True):

                def call(asynchronous: bool = asynchronous) -> None:
                    finish(make(last, group=group, async_op=asynchronous))

                kind = ValueError if last and mine != theirs else tdcoll.RankMismatchError
                expect_raises(kind, call, mine if last else theirs)
            right = torch.ones(3, device=device())
            dist.all_reduce(right, group=group)
            expect(right.tolist() == 3 * [float(n)], f"{right}")

        def gather(odd: bool, **more: object) -> object:
            return single(torch.empty(4 * n + odd, device=device()), data(rank(), 4), **more)

        def scatter(odd: bool, **more: object) -> object:
            return SINGLE_SCATTER(
                torch.empty(4, device=device()), data(rank(), 4 * n + odd), **more
            )

        def into_a_list(odd: bool, **more: object) -> object:
            return dist.all_gather(
                [torch.empty(4, device=device()) for _ in everyone()], data(rank(), 4 + odd), **more
            )

        def into_a_short_list(odd: bool, **more: object) -> object:
            pieces = [torch.empty(4, device=device()) for _ in range(n - odd)]
            return dist.all_gather(pieces, data(rank(), 4), **more)

        def reduce_more(odd: bool, **more: object) -> object:  # than tdcoll handles
            return dist.all_reduce(data(rank(), 200 if odd else 50), **more)

        def reduce_other(odd: bool, **more: object) -> object:
            return dist.all_reduce(
                data(rank(), 5), dist.ReduceOp.BOR if odd else dist.ReduceOp.SUM, **more
            )

        def another_kind(odd: bool, **more: object) -> object:
            return gather(False, **more) if odd else dist.all_reduce(data(rank(), 4), **more)

        wrong(gather, "elements", f"rank {n - 1} cannot make this call: all_gather: output must be")
        wrong(
            scatter,
            "elements",
            f"rank {n - 1} cannot make this call: reduce_scatter: input must be",
        )
        wrong(
            into_a_list, "as large as", f"rank {n - 1} cannot make this call: all_gather: the input"
        )
        wrong(
            into_a_short_list,
            "one per rank",
            f"rank {n - 1} cannot make this call: all_gather: the list must",
        )
        for call, words in (
            (reduce_more, "bytes"),
            (reduce_other, "op"),
            (another_kind, "the same collective calls"),
        ):
            wrong(call, words, words)
        dist.destroy_process_group(group)
    finally:
        del os.environ["TDCOLL_DEBUG"]
