# SPDX-License-Identifier: Apache-2.0
"""Results of backend "tdcoll", as torch.distributed's users call it, and who handles them, on every
rank of a job."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable
from backend_job import (
    SINGLE_SCATTER,
    by_fallback,
    data,
    finish,
    handled,
    same,
    single,
)
from harness import check, device, everyone, expect, expect_raises, rank, shared, world

from tdcoll.collectives.sparse_all_reduce.rows import DTYPES as REDUCED
from tdcoll.distributed import Options, explain
from tdcoll.primitives.reduce import OPERATIONS_OF, TORCH_OPERATIONS

DTYPES = [
    torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool,
    torch.complex64, torch.float8_e4m3fn,
]  # fmt: skip


# ---------------------------------------------------------------------- all-gather


@check
def gathers_into_one_tensor() -> None:
    before = handled("all_gather")
    for call, dtype in enumerate(DTYPES):
        wanted = torch.cat([data(r, 10, dtype, call) for r in everyone()])
        out = torch.empty(world() * 10, dtype=dtype, device=device())
        single(out, data(rank(), 10, dtype, call))
        same(out, wanted, f"{dtype}")
        stacked = torch.empty(world(), 5, 2, dtype=dtype, device=device())
        finish(single(stacked, data(rank(), 10, dtype, call).view(5, 2), async_op=True))
        same(stacked.view(-1), wanted, f"stacked, async, {dtype}")
    own = torch.zeros(world() * 4, device=device())
    own[rank() * 4 : rank() * 4 + 4] = data(rank(), 4)
    single(own, own[rank() * 4 : rank() * 4 + 4])
    same(own, torch.cat([data(r, 4) for r in everyone()]), "own segment of the output")
    room = torch.zeros(world() * 4, device=device())
    room[2:6] = data(rank(), 4)
    single(room, room[2:6])
    same(room, torch.cat([data(r, 4) for r in everyone()]), "input elsewhere in the output")
    empty = torch.empty(0, device=device())
    single(torch.empty(0, device=device()), empty)
    expect_raises(
        ValueError, lambda: single(torch.empty(5, device=device()), data(rank(), 4)), "elements"
    )
    expect(handled("all_gather") - before == 2 * len(DTYPES) + 3, explain())


@check
def gathers_lists() -> None:
    before = handled("all_gather")
    for asynchronous in (False, True):
        pieces = [torch.nn.Parameter(torch.empty(3, 2, device=device()).t()) for _ in everyone()]
        finish(dist.all_gather(pieces, data(rank(), 6).view(2, 3), async_op=asynchronous))
        for r in everyone():
            same(pieces[r].detach().contiguous(), data(r, 6).view(2, 3), f"piece {r}")
        uneven = [torch.empty(3 * r, dtype=torch.int64, device=device()) for r in everyone()]
        finish(
            dist.all_gather(uneven, data(rank(), 3 * rank(), torch.int64), async_op=asynchronous)
        )
        for r in everyone():
            same(uneven[r], data(r, 3 * r, torch.int64), f"uneven piece {r}")
    expect(handled("all_gather") - before == 4, explain())
    wrong = [torch.empty(4, device=device()) for _ in everyone()]
    expect_raises(ValueError, lambda: dist.all_gather(wrong, data(rank(), 3)), "as large as")


@check
def broadcasts() -> None:
    """From every root, whose fast paths differ."""
    before = handled("broadcast")
    for call, dtype in enumerate(DTYPES):
        for asynchronous in (False, True, False):
            for root in everyone():
                x = data(rank(), 10, dtype, call)
                finish(dist.broadcast(x, root, async_op=asynchronous))
                same(x, data(root, 10, dtype, call), f"{dtype} of {root}")
    pair = torch.stack([data(rank(), 6), data(rank(), 6)], 1)
    dist.broadcast(pair[:, 0], world() - 1)
    same(pair[:, 0].contiguous(), data(world() - 1, 6), "strided")
    same(pair[:, 1].contiguous(), data(rank(), 6), "beside it")
    expect(handled("broadcast") - before == 3 * len(DTYPES) * world() + 1, explain())
    group = dist.group.WORLD
    expect_raises(ValueError, lambda: group.broadcast(data(rank(), 2), world()), "root must be")


@check
def exchanges_parts() -> None:
    """tdcoll handles all-to-alls of equal parts; those with sizes, which may differ between ranks,
    fall back."""
    before, n = handled("all_to_all"), 6
    for call, dtype in enumerate(DTYPES):
        given = data(rank(), world() * n, dtype, call)
        wanted = torch.cat(
            [data(r, world() * n, dtype, call).view(world(), n)[rank()] for r in everyone()]
        )
        for asynchronous in (False, True, False):
            out = torch.empty_like(given)
            finish(dist.all_to_all_single(out, given, async_op=asynchronous))
            same(out, wanted, f"{dtype}")
    strided, out = (
        torch.stack([given, given], 1)[:, 0],
        torch.empty(world() * n, 2, dtype=dtype, device=device())[:, 1],
    )
    dist.all_to_all_single(out, strided)
    same(out.contiguous(), wanted, "strided")
    dist.all_to_all_single(given, given)
    same(given, wanted, "into its own input")
    expect(handled("all_to_all") - before == 3 * len(DTYPES) + 2, explain())
    short = torch.empty(1, device=device())
    expect_raises(
        ValueError, lambda: dist.all_to_all_single(short, data(rank(), 2 * world())), "elements"
    )
    expect_raises(
        ValueError,
        lambda: dist.all_to_all_single(*2 * [data(rank(), 2 * world() + 1)]),
        "parts of one size",
    )
    if shared() and device().type == "cuda":  # gloo takes none of CUDA memory
        return
    sizes = [1 + (rank() + r) % 2 for r in everyone()]
    given = torch.cat(
        [torch.full((size,), 10.0 * rank() + r, device=device()) for r, size in enumerate(sizes)]
    )
    out = torch.empty(sum(sizes), device=device())
    dist.all_to_all_single(out, given, sizes, sizes)
    same(
        out,
        torch.cat(
            [torch.full((s,), 10.0 * r + rank(), device=device()) for r, s in enumerate(sizes)]
        ),
        "sizes",
    )


@check
def functional_collectives_and_compile() -> None:
    before = handled("all_gather")
    wanted = torch.cat([data(r, 4) for r in everyone()])
    same(
        functional.all_gather_tensor(data(rank(), 4), 0, dist.group.WORLD).wait(),
        wanted,
        "functional",
    )
    group = dist.group.WORLD

    @torch.compile(backend="aot_eager", fullgraph=True)
    def doubled(tensor: torch.Tensor) -> torch.Tensor:
        return functional.all_gather_tensor(tensor * 2, 0, group) + 1

    same(doubled(data(rank(), 4)), wanted * 2 + 1, "compiled")
    expect(handled("all_gather") - before == 2, explain())


@check
def derivatives() -> None:
    """Of PyTorch's functions on the backend, gathering and scattering are each other's derivative,
    summing its own."""
    group, n, me = dist.group.WORLD, world(), rank()
    pulls = [data(r, 4 * n, call=7) for r in everyone()]
    firsts = [pull[:4] for pull in pulls]
    calls = (
        (
            lambda x: functional.all_gather_tensor_autograd(x, 0, group),
            4,
            sum(pulls)[4 * me : 4 * me + 4],
        ),
        (
            lambda x: functional.reduce_scatter_tensor_autograd(x, "sum", 0, group),
            4 * n,
            torch.cat(firsts),
        ),
        (lambda x: differentiable.all_reduce(x, group=group), 4, sum(firsts)),
    )
    before = {kind: handled(kind) for kind in ("all_gather", "reduce_scatter", "all_reduce")}
    for i, (call, numel, wanted) in enumerate(calls):
        x = data(me, numel).requires_grad_()
        made = call(x)
        (made * pulls[me][: made.numel()]).sum().backward()
        same(x.grad, wanted, f"derivative {i}")
    for kind, count in before.items():  # forwards and backwards
        expect(handled(kind) - count == 2, f"{kind}: {explain()}")


# ---------------------------------------------------------------------- dense reductions

OPERATIONS = {
    "SUM": sum,
    "AVG": lambda parts: sum(parts) / len(parts),
    "MAX": lambda parts: torch.stack(parts).amax(0),
    "MIN": lambda parts: torch.stack(parts).amin(0),
    "PRODUCT": lambda parts: torch.stack(parts).prod(0),
}


def reduced(name: str, parts: list[torch.Tensor]) -> torch.Tensor:
    """Return the reduction of small integers: exact whatever the order, but for the mean's one
    rounding."""
    wide = [part.double() if part.is_floating_point() else part for part in parts]
    return OPERATIONS[name](wide).to(parts[0].dtype)


def close(got: torch.Tensor, wanted: torch.Tensor, name: str, what: str) -> None:
    if name == "AVG":  # rounded to fp32 in between
        torch.testing.assert_close(got, wanted, msg=f"{what}: {got} {wanted}")
    else:
        same(got, wanted, what)


@check
def reduces() -> None:
    """Every dtype and operation; in time, in place and beside; what is a part of the other
    tensor."""
    before = handled("all_reduce"), handled("reduce_scatter")
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
                other = SINGLE_SCATTER(
                    out, parts[rank()].view(world(), 2, 2), op, async_op=asynchronous
                )
                if asynchronous:
                    work.wait(), other.wait()
                    expect(
                        work.result()[0] is tensor and work.get_future().wait()[0] is tensor,
                        "result and future",
                    )
                close(tensor, wanted, name, f"all_reduce {dtype} {name}")
                close(
                    out.view(-1),
                    wanted.view(world(), 4)[rank()],
                    name,
                    f"reduce_scatter {dtype} {name}",
                )
                calls += 1
    parts = [data(r, 6 * world()) for r in everyone()]
    whole = parts[rank()].clone()
    SINGLE_SCATTER(whole[6 * rank() : 6 * rank() + 6], whole)
    same(
        whole[6 * rank() : 6 * rank() + 6],
        sum(parts)[6 * rank() : 6 * rank() + 6],
        "own part of the input",
    )
    whole = parts[rank()].clone()
    SINGLE_SCATTER(whole[3:9], whole)
    same(whole[3:9], sum(parts)[6 * rank() : 6 * rank() + 6], "elsewhere in the input")
    dist.all_reduce(torch.empty(0, device=device()))
    expect(handled("all_reduce") - before[0] == calls + 1, explain())
    expect(handled("reduce_scatter") - before[1] == calls + 2, explain())
    expect_raises(
        ValueError,
        lambda: SINGLE_SCATTER(torch.empty(5, device=device()), parts[rank()]),
        "elements",
    )
    wanted = sum(parts).view(world(), 6)[rank()]
    pieces, out = list(parts[rank()].view(world(), 6)), torch.empty(6, device=device())
    # gloo's came with that name
    if device().type == "cuda" or hasattr(dist.group.WORLD, "reduce_scatter_single"):
        dist.reduce_scatter(out, pieces)
        same(out, wanted, "of a list: the fallback backend")


@check
def reduces_several_together() -> None:
    """Coalesced forms, of tensors that fit one launch together, of such that do not, and functional
    ones."""
    manager = dist.distributed_c10d._coalescing_manager
    # few enough bytes for the backend, with any number of ranks
    for sizes in ((3, 5, 8), (1, 140_000 // world())):
        before = handled("all_reduce"), handled("reduce_scatter"), handled("all_gather")
        parts = [[data(r, n * world(), call=n) for n in sizes] for r in everyone()]
        sums = [sum(parts[r][i] for r in everyone()) for i in range(len(sizes))]
        for asynchronous in (False, True):
            tensors = [torch.nn.Parameter(part.clone()) for part in parts[rank()]]
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
                same(tensors[i].detach(), sums[i], f"all_reduce {i} of {sizes}")
                same(outs[i], sums[i].view(world(), n)[rank()], f"reduce_scatter {i} of {sizes}")
                same(
                    gathered[i],
                    torch.cat([parts[r][i][:n] for r in everyone()]),
                    f"all_gather {i} of {sizes}",
                )
        now = handled("all_reduce"), handled("reduce_scatter"), handled("all_gather")
        expect([b - a for a, b in zip(before, now, strict=True)] == [2, 2, 2], explain())
    mixed = [data(rank(), 4), data(rank(), 4, torch.int32)]
    dist.group.WORLD.allreduce_coalesced(mixed[:1]).wait()
    same(mixed[0], sum(data(r, 4) for r in everyone()), "one tensor")
    before = handled("all_reduce"), handled("reduce_scatter")
    total = functional.all_reduce(data(rank(), 4), "sum", dist.group.WORLD)
    same(total.wait(), sum(data(r, 4) for r in everyone()), "functional all_reduce")
    part = functional.reduce_scatter_tensor(data(rank(), 2 * world()), "sum", 0, dist.group.WORLD)
    same(
        part.wait(),
        sum(data(r, 2 * world()) for r in everyone()).view(world(), 2)[rank()],
        "functional reduce_scatter",
    )
    expect(
        (handled("all_reduce") - before[0], handled("reduce_scatter") - before[1]) == (1, 1),
        explain(),
    )


@check
def reductions_that_are_handed_over() -> None:
    """The fallback backend has calls that are too large, or of other dtypes and operations, and
    explain says why."""
    group = dist.new_group(pg_options=Options(max_bytes_per_rank=64))
    dist.all_reduce(data(rank(), 16), group=group)
    large, out = data(rank(), 17 * world()), torch.empty(17, device=device())
    dist.all_reduce(large, group=group)
    same(large, sum(data(r, 17 * world()) for r in everyone()), "large")
    SINGLE_SCATTER(out, data(rank(), 17 * world()), group=group)
    expect(
        (handled("all_reduce", group), handled("reduce_scatter", group)) == (1, 0), explain(group)
    )
    for kind in ("all_reduce", "reduce_scatter"):
        expect(by_fallback(kind, group) == {"more than 64 bytes per rank": 1}, explain(group))
    small = torch.ones(3, dtype=torch.uint8, device=device())
    dist.all_reduce(small, group=group)
    expect(small.tolist() == 3 * [world()], "uint8")
    ints = torch.full((3,), 1 << rank(), dtype=torch.int32, device=device())
    if device().type == "cpu":  # NCCL has none
        dist.all_reduce(ints, dist.ReduceOp.BOR, group=group)
        expect(ints.tolist() == 3 * [(1 << world()) - 1], "bitwise or")
        expect(
            "RedOpType.BOR of torch.int32 is not among tdcoll's reductions"
            in by_fallback("all_reduce", group),
            explain(group),
        )
    expect(
        "sum of torch.uint8 is not among tdcoll's reductions" in by_fallback("all_reduce", group),
        explain(group),
    )
    dist.destroy_process_group(group)


# ---------------------------------------------------------------------- tensors of other kinds


@check
def tensors_of_other_kinds() -> None:
    """Results of functional collectives that nobody has waited for, rows without elements."""
    wanted = torch.cat([data(r, 4) for r in everyone()])
    for _ in range(2):  # the second synchronous call goes the short way
        pending = functional.all_gather_tensor(data(rank(), 4), 0, dist.group.WORLD)
        out = torch.empty(world() ** 2 * 4, device=device())
        single(out, pending)
        same(out, wanted.repeat(world()), "of a pending result")
    empty = torch.sparse_coo_tensor(
        [[rank(), 0]], torch.empty(2, 0, device=device()), (world(), 0)
    ).to(device())
    dist.all_reduce(empty)
    expect(
        empty.indices().tolist() == [list(everyone())], f"rows without elements: {empty.indices()}"
    )
