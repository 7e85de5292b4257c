# SPDX-License-Identifier: Apache-2.0
"""Every collective and message of ``torch.distributed`` with every form of tensors, on every rank
of a job.

A form is a layout, a dtype or a size. Whoever handles a call (tdcoll, the fallback backend, a group
of one rank), and however it is made (synchronous or not, by wait, poll or future, alone or
coalesced), it writes the elements that its outputs have and no others, reads its inputs and leaves
them as they are, and its work has a value of one form.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from backend_cases import CASES, Case, Shape, Values, bytes_of, equal
from backend_job import SINGLE_SCATTER, by_fallback, handled, single
from harness import check, device, everyone, expect, expect_raises, rank, shared, world
from torch import nn
from torch.distributed import distributed_c10d as c10d

from tdcoll.distributed import Options, explain

SENTINEL = 99
"""In memory that no call may touch, and in outputs before the call."""

# ---------------------------------------------------------------------- forms


@dataclass(frozen=True)
class Form:
    """A form of tensors. ``make(shape, dtype) ->`` the memory, and the tensor in it;
    ``inputs_only``: no output's."""

    name: str
    make: Callable[[Shape, torch.dtype], tuple[torch.Tensor, torch.Tensor]]
    dtype: torch.dtype = torch.float32
    inputs_only: bool = False
    empty: bool = False


def memory(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full(shape, SENTINEL, device=device(), dtype=torch.float32).to(dtype)


def contiguous(shape: Shape, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    whole = memory(*shape, dtype=dtype)
    return whole, whole


def columns(shape: Shape, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    whole = memory(*shape, 2, dtype=dtype)
    return whole, whole[..., 0]


def transposed(shape: Shape, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    whole = memory(*reversed(shape), dtype=dtype)
    return whole, whole.permute(*reversed(range(len(shape))))


def turned_on_odd_ranks(shape: Shape, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return transposed(shape, dtype) if rank() % 2 else contiguous(shape, dtype)


def in_the_middle(shape: Shape, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    whole = memory(shape[0] + 3, *shape[1:], dtype=dtype)
    return whole, whole[1 : 1 + shape[0]]


def negative(shape: Shape, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    whole = memory(*shape, dtype=dtype)
    return whole, torch._neg_view(whole)


def conjugate(shape: Shape, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    whole = memory(*shape, dtype=dtype)
    return whole, whole.conj()


def expanded(shape: Shape, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    whole = memory(shape[0], *(1 for _ in shape[1:]), dtype=dtype)
    return whole, whole.expand(shape)


def parameter(shape: Shape, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    whole = memory(*shape, 2, dtype=dtype)
    return whole, nn.Parameter(whole[..., 1])


FORMS = [
    Form("contiguous", contiguous),
    Form("columns", columns),
    Form("columns of int64", columns, torch.int64),
    Form("transposed", transposed, torch.float16),
    Form("transposed on odd ranks", turned_on_odd_ranks),
    Form("part of a larger tensor", in_the_middle, torch.bfloat16),
    Form("negative view", negative),
    Form("conjugate view", conjugate, torch.complex64),
    Form("expanded", expanded, inputs_only=True),
    Form("strided parameter", parameter),
    Form("of bytes", columns, torch.uint8),
    Form("of fp8", columns, torch.float8_e4m3fn),
    Form("of int16", columns, torch.int16),
    Form("without elements", contiguous, empty=True),
    Form("without elements, strided", columns, torch.int32, empty=True),
]


def shaped(shapes: list[Shape], form: Form) -> list[Shape]:
    return [(0, *shape[1:]) for shape in shapes] if form.empty else shapes


def values_of(case: Case, form: Form, ranks: Sequence[int]) -> Values:
    """The inputs of each rank, small integers in which rank, tensor and place show."""
    n = len(ranks)

    def value(r: int, place: int, shape: Shape) -> torch.Tensor:
        numbers = torch.arange(torch.Size(shape).numel(), device=device()).view(shape)
        numbers = (numbers * 3 + r * 5 + place * 2) % 7
        if form.make is expanded and not case.in_place:
            numbers = numbers[:, :1].expand(shape).contiguous()
        return numbers.float().to(form.dtype)

    return {
        r: [value(r, place, shape) for place, shape in enumerate(shaped(case.given(r, n), form))]
        for r in range(n)
    }


def fill(form: Form, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return memory and a tensor in it that has these values."""
    whole, tensor = form.make(tuple(values.shape), values.dtype)
    with torch.no_grad():
        if form.make is expanded:
            whole.copy_(values[:, :1])
        else:
            tensor.copy_(values)
    return whole, tensor


RESOLVED = ("all_gather, several", "all_gather, several of one", "gather")
"""Cases in which torch.distributed passes complex tensors as they are; elsewhere it refuses
conjugate ones."""


def applies(case: Case, form: Form, ranks: int) -> bool:
    if form.inputs_only and case.in_place:
        return False
    if form.make is conjugate and case.name not in RESOLVED:
        return False
    if form.empty and case.name in ("all_gather_single, stacked", "all_to_all_single, uneven"):
        return False  # whose shapes and sizes are not those of no rows
    if case.reduces and form.dtype in (torch.int16, torch.complex64):
        # NCCL and gloo reduce neither; torch.distributed passes complex tensors as their real views
        return False
    if case.name == "a message around" and ranks == 1:
        return False
    return not unsendable(case)


def unsendable(case: Case) -> bool:
    """Whether only the fallback backend makes this call, and can't: where ranks share GPUs it is
    gloo, which sends no GPU memory."""
    return (
        device().type == "cuda" and shared() and not case.kind and not case.name.startswith("all_")
    )


def finish(work: Any, by: str) -> list[Any] | None:
    """Complete a call in one of the ways that there are, and return its value."""
    if work is None:
        return None
    if by == "future":
        future = work.get_future()
        value = future.wait()
        if device().type == "cuda":
            torch.cuda.synchronize()
        return value
    if by == "poll":
        deadline = time.monotonic() + 20
        while not work.is_completed():
            expect(time.monotonic() < deadline, "not complete in 20 s")
            time.sleep(0.0005)
        expect(work.is_success() and work.exception() is None, f"{work.exception()}")
    work.wait()
    return work.result()


def run(case: Case, form: Form, group: Any, ranks: Sequence[int], how: str) -> None:
    """Make one call, and look at everything that it may have touched."""
    me, n = dist.get_rank(group), len(ranks)
    values = values_of(case, form, ranks)
    what = f"{case.name}, {form.name}, {how}, group of {n}"
    held = [fill(form, value) for value in values[me]]
    inputs = [tensor for _, tensor in held]
    if case.in_place:
        outs, taken = inputs, held
    else:
        plain = Form("contiguous", contiguous, form.dtype) if form.inputs_only else form
        shapes = shaped(case.taken(me, n), form)
        taken = [plain.make(shape, form.dtype) for shape in shapes]
        outs = [tensor for _, tensor in taken]
    before = [bytes_of(whole) for whole, _ in held]
    # What the memory of outputs must be: as it is, with the wanted values where the outputs are.
    expected = []
    for (whole, _), wanted in zip(taken, case.wanted(values, me), strict=True):
        copy = whole.detach().clone()
        again = (
            form.make(tuple(wanted.shape), form.dtype)
            if not form.inputs_only
            else contiguous(tuple(wanted.shape), form.dtype)
        )
        again[0].copy_(copy)
        with torch.no_grad():
            again[1].copy_(wanted)
        expected.append(again)
    value = finish(case.call(group, outs, inputs, how != "synchronous"), how)
    for place, ((whole, tensor), (memory_, wanted)) in enumerate(zip(taken, expected, strict=True)):
        expect(equal(tensor, wanted), f"{what}: output {place} is {tensor}, and not {wanted}")
        expect(
            bytes_of(whole) == bytes_of(memory_),
            f"{what}: memory beside output {place} has changed: {whole}",
        )
    if not case.in_place:
        after = [bytes_of(whole) for whole, _ in held]
        expect(before == after, f"{what}: inputs have changed: {inputs}")
    if value is not None:
        check_value(case, outs, value, what)


def check_value(case: Case, outs: list[torch.Tensor], value: list[Any], what: str) -> None:
    """The form of NCCL's: a list of the outputs; of an all-gather into a list, one value that has
    all parts."""
    if case.name in ("all_gather", "all_gather, uneven"):
        expect(len(value) == 1, f"{what}: {len(value)} values")
        parts = list(value[0])
        expect(
            len(parts) == len(outs) and all(map(equal, parts, outs)),
            f"{what}: the value is {value}",
        )
        return
    if case.name != "a message around":
        expect(len(value) == len(outs), f"{what}: {len(value)} values for {len(outs)} outputs")
        expect(all(map(equal, value, outs)), f"{what}: the value is {value}")


def ways(case: Case) -> Iterator[str]:
    yield from ("synchronous", "wait")
    # gloo's messages are complete when somebody waits, and have no future
    if case.name != "a message around":
        yield from ("poll", "future")


@check
def every_form_of_every_call() -> str:
    """By tdcoll, by the fallback backend, and in a group of one rank."""
    few = dist.new_group(pg_options=Options(max_bytes_per_rank=0))
    alone = dist.new_group([rank()], use_local_synchronization=True)
    before = {
        kind: handled(kind) for kind in ("all_gather", "all_reduce", "reduce_scatter", "all_to_all")
    }
    made: Counter[str] = Counter()
    turn = itertools.count()
    for case, form in itertools.product(CASES, FORMS):
        for group, ranks in ((dist.group.WORLD, everyone()), (few, everyone()), (alone, [rank()])):
            if not applies(case, form, len(ranks)):
                continue
            some = list(ways(case))
            run(case, form, group, ranks, some[next(turn) % len(some)])
            made[case.name] += 1
            made[form.name] += 1
    wanted = [each.name for each in (*CASES, *FORMS) if each in FORMS or not unsendable(each)]
    expect(all(made[name] > 0 for name in wanted), f"some are never made: {made}")
    for kind, count in before.items():
        expect(handled(kind) - count >= len(FORMS) - 3, f"{kind}: {explain()}")
        expect(sum(by_fallback(kind, few).values()) >= len(FORMS) - 5, explain(few))
    for group in (few, alone):
        dist.destroy_process_group(group)
    return f"{sum(made.values()) // 2} calls"


@check
def tensors_that_share_memory() -> None:
    """An input may lie in an output, and the other way round: at the own place of a rank, or
    elsewhere."""
    few = dist.new_group(pg_options=Options(max_bytes_per_rank=0))
    n, me = world(), rank()
    for group in (dist.group.WORLD, few):
        parts = [torch.arange(4.0, device=device()) + 10 * r for r in everyone()]
        for begin in (4 * me, 2):
            room = torch.zeros(4 * n, device=device())
            room[begin : begin + 4] = parts[me]
            single(room, room[begin : begin + 4], group=group)
            expect(equal(room, torch.cat(parts)), f"all_gather from place {begin}: {room}")
            whole = torch.cat([parts[me] + 100 * k for k in everyone()])
            SINGLE_SCATTER(whole[begin : begin + 4], whole, group=group)
            expect(
                equal(whole[begin : begin + 4], sum(parts) + 100 * n * me),
                f"reduce_scatter to {begin}: {whole}",
            )
        whole = torch.cat([parts[me] + 100 * k for k in everyone()])
        dist.all_to_all_single(whole, whole, group=group)
        expect(equal(whole, torch.cat([part + 100 * me for part in parts])), f"all_to_all: {whole}")
        pieces = [torch.zeros(4, device=device()) for _ in everyone()]
        pieces[me].copy_(parts[me])
        dist.all_gather(pieces, pieces[me], group=group)
        expect(all(map(equal, pieces, parts)), f"all_gather of an own piece: {pieces}")
        dist.all_to_all(pieces, pieces, group=group)
        expect(all(equal(piece, parts[me]) for piece in pieces), f"all_to_all of lists: {pieces}")
    dist.destroy_process_group(few)


@check
def tensors_that_are_refused() -> None:
    """Before anything is sent: outputs whose elements share an address, and tensors that don't fit
    each other."""
    few = dist.new_group(pg_options=Options(max_bytes_per_rank=0))
    n = world()
    one, several = torch.zeros(1, device=device()), torch.zeros(9, device=device())
    shared_elements = {
        "expanded": one.expand(4),
        "windows": several.as_strided((3, 4), (2, 1)),
        "crossing strides": several.as_strided((3, 2), (2, 4)),
    }
    separate = torch.zeros(9, device=device()).as_strided((2, 3), (3, 2))
    tensor = torch.ones(4, device=device())
    calls = [
        lambda t, g: dist.all_reduce(t, group=g),
        lambda t, g: dist.broadcast(t, 0, group=g),
        lambda t, g: single(t, torch.zeros(1, device=device()), group=g),
        lambda t, g: dist.scatter(t, [t] * n if rank() == 0 else None, group=g, group_src=0),
    ]
    if not (device().type == "cuda" and shared()):  # then gloo refuses every message of GPU memory
        calls.append(lambda t, g: dist.irecv(t, group=g, group_src=(rank() + 1) % n))
    for group in (dist.group.WORLD, few):
        for name, out in shared_elements.items():
            for call in calls:
                expect_raises(
                    ValueError,
                    lambda c=call, o=out, g=group: c(o, g),
                    "an address for each element",
                )
                expect(not several.any() and not one.any(), f"{name}: refused, and written to")
        separate.fill_(1.0)
        dist.all_reduce(separate, group=group)
        expect(
            bool((separate == n).all()), f"strides that cross, without a shared address: {separate}"
        )
        for words, wrong in {
            "elements": lambda g: single(torch.empty(4 * n + 1, device=device()), tensor, group=g),
            "one per rank": lambda g: dist.all_gather([tensor.clone()] * (n + 1), tensor, group=g),
            "as large as": lambda g: dist.reduce_scatter(
                torch.empty(5, device=device()), [tensor] * n, group=g
            ),
            "one dtype": lambda g: g.reduce_scatter(
                torch.empty(4, device=device()).int(), [tensor] * n
            ),
            "must have": lambda g: dist.all_to_all(
                [tensor.clone()] * (n + 1), [tensor] * n, group=g
            ),
        }.items():
            expect_raises(ValueError, lambda w=wrong, g=group: w(g), words)
    dist.destroy_process_group(few)


@check
def options_in_every_spelling() -> None:
    """As an object, of another collective, one by one, by name, or not at all."""
    few = dist.new_group(pg_options=Options(max_bytes_per_rank=0))
    n, largest, seconds = world(), dist.ReduceOp.MAX, timedelta(seconds=20)
    coalesced = c10d.AllreduceCoalescedOptions()
    coalesced.reduceOp = largest
    for group in (dist.group.WORLD, few):
        for call in (
            lambda g, t: g.allreduce([t], coalesced),
            lambda g, t: g.allreduce(t, largest),
            lambda g, t: g.allreduce([t], op=largest),
            lambda g, t: g.allreduce(t, largest, seconds),
            lambda g, t: g.allreduce_coalesced([t], coalesced),
            lambda g, t: g.allreduce_coalesced([t, t.clone()], coalesced),
        ):
            for kind in (torch.float32, torch.bool):
                tensor = torch.tensor([rank() == n - 1, False], device=device()).to(kind)
                call(group, tensor).wait()
                expect(tensor.tolist() == [True, False], f"{tensor}")
        tensor = torch.full((2,), float(rank()), device=device())
        group.broadcast(tensor.clone(), n - 1).wait()
        group.broadcast(tensor, root=n - 1).wait()
        expect(tensor.tolist() == [n - 1.0] * 2, f"{tensor}")
        if shared() and device().type == "cuda":
            continue
        group.reduce(tensor, 0, largest).wait()
        pieces = [torch.empty(2, device=device()) for _ in everyone()]
        group.gather(pieces if rank() == 0 else [], tensor, 0).wait()
        group.scatter(tensor, pieces if rank() == 0 else [], 0).wait()
        group.reduce_scatter(tensor, [tensor.clone() for _ in everyone()], largest).wait()
        group.allgather(pieces, tensor).wait()
        group.alltoall(pieces, [tensor.clone() for _ in everyone()]).wait()
        expect(all(piece.tolist() == [n - 1.0] * 2 for piece in pieces), f"{pieces}")
    dist.destroy_process_group(few)
