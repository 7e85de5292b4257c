# SPDX-License-Identifier: Apache-2.0
"""The collectives and messages of ``torch.distributed`` as data: shapes, the results, and the
call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from backend_job import SINGLE_SCATTER, single
from torch.distributed import distributed_c10d as c10d

Shape = tuple[int, ...]
Shapes = Callable[[int, int], list[Shape]]
Values = dict[int, list[torch.Tensor]]


@dataclass(frozen=True)
class Case:
    """A collective or a message.

    Attributes:
        given, taken: ``(rank, world) ->`` the shapes of its inputs and its outputs on a rank.
        wanted: ``(inputs of all ranks, rank) ->`` the outputs.
        call: ``(group, outs, inputs, asynchronous) ->`` the work.
        kind: of call, if tdcoll may handle it.
        in_place: whether the inputs are the outputs.
        reduces: whether it adds, so that the dtype must be one of numbers.
    """

    name: str
    given: Shapes
    taken: Shapes
    wanted: Callable[[Values, int], list[torch.Tensor]]
    call: Callable[[Any, list[torch.Tensor], list[torch.Tensor], bool], Any]
    kind: str | None = None
    in_place: bool = False
    reduces: bool = False


def one(*shape: int) -> Shapes:
    return lambda r, n: [shape]


def plus(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum, in a dtype that has one."""
    dtype = parts[0].dtype
    wide = dtype if dtype.is_complex else torch.float64 if dtype.is_floating_point else torch.int64
    return torch.stack([part.to(wide) for part in parts]).sum(0).to(dtype)


def gathered(values: Values, place: int = 0) -> torch.Tensor:
    return torch.cat([values[r][place] for r in sorted(values)])


def own(whole: torch.Tensor, r: int, n: int) -> torch.Tensor:
    return whole.view(n, whole.shape[0] // n, *whole.shape[1:])[r]


def uneven(r: int) -> int:
    """Rows of rank ``r``: different ones, and none on one rank."""
    return (3, 0, 5, 1, 2, 4, 6, 7)[r]


REDUCTION: list[Callable[[Sequence[torch.Tensor]], torch.Tensor]] = [plus]
"""Its last entry is what cases that reduce do with the parts of all ranks."""


def sums_of(values: Values, place: int) -> torch.Tensor:
    return REDUCTION[-1]([values[r][place] for r in sorted(values)])


def later(method: Callable[..., Any], opts: Any, *given: Any, asynchronous: bool) -> Any:
    """Call a group's method, which has no function in torch.distributed, as its functions do."""
    opts.asyncOp = asynchronous
    work = method(*given, opts)
    if asynchronous:
        return work
    if work is not None:
        work.wait()
    return None


def around(
    group: Any, outs: list[torch.Tensor], inputs: list[torch.Tensor], asynchronous: bool
) -> Any:
    """A message to the next rank and one from the rank before."""
    n, me = dist.get_world_size(group), dist.get_rank(group)
    sent = dist.isend(inputs[0], group=group, group_dst=(me + 1) % n)
    got = dist.irecv(outs[0], group=group, group_src=(me - 1) % n)
    if not asynchronous:
        got.wait()
    sent.wait()
    return got if asynchronous else None


def root_only(group: Any, tensors: list[torch.Tensor]) -> list[torch.Tensor] | None:
    return tensors if dist.get_rank(group) == 0 else None


def at_root(shapes: Shapes) -> Shapes:
    return lambda r, n: shapes(r, n) if r == 0 else []


CASES = [
    Case(
        "all_gather_single", one(3, 2), lambda r, n: [(3 * n, 2)],
        lambda values, r: [gathered(values)],
        lambda g, outs, inputs, a: single(outs[0], inputs[0], group=g, async_op=a), "all_gather",
    ),
    Case(
        "all_gather_single, stacked", one(3, 2), lambda r, n: [(n, 3, 2)],
        lambda values, r: [torch.stack([values[k][0] for k in sorted(values)])],
        lambda g, outs, inputs, a: single(outs[0], inputs[0], group=g, async_op=a), "all_gather",
    ),
    Case(
        "all_gather", one(3, 2), lambda r, n: [(3, 2)] * n,
        lambda values, r: [values[k][0] for k in sorted(values)],
        lambda g, outs, inputs, a: dist.all_gather(outs, inputs[0], group=g, async_op=a), "all_gather",
    ),
    Case(
        "all_gather, uneven", lambda r, n: [(uneven(r), 2)], lambda r, n: [(uneven(k), 2) for k in range(n)],
        lambda values, r: [values[k][0] for k in sorted(values)],
        lambda g, outs, inputs, a: dist.all_gather(outs, inputs[0], group=g, async_op=a), "all_gather",
    ),
    Case(
        "all_gather, several", lambda r, n: [(3, 2), (2, 2)], lambda r, n: [(3 * n, 2), (2 * n, 2)],
        lambda values, r: [gathered(values, 0), gathered(values, 1)],
        lambda g, outs, inputs, a: later(
            g.all_gather_single_coalesced, c10d.AllgatherOptions(), outs, inputs, asynchronous=a
        ), "all_gather",
    ),
    Case(
        "all_gather, several of one", one(3, 2), lambda r, n: [(3 * n, 2)],
        lambda values, r: [gathered(values)],
        lambda g, outs, inputs, a: later(
            g.all_gather_single_coalesced, c10d.AllgatherOptions(), outs, inputs, asynchronous=a
        ), "all_gather",
    ),
    Case(
        "all_reduce", one(3, 2), one(3, 2), lambda values, r: [sums_of(values, 0)],
        lambda g, outs, inputs, a: dist.all_reduce(outs[0], group=g, async_op=a),
        "all_reduce", in_place=True, reduces=True,
    ),
    *(
        Case(
            f"all_reduce, {len(shapes)} together", lambda r, n, s=shapes: list(s), lambda r, n, s=shapes: list(s),
            lambda values, r: [sums_of(values, place) for place in range(len(values[r]))],
            lambda g, outs, inputs, a: later(
                g.allreduce_coalesced, c10d.AllreduceCoalescedOptions(), outs, asynchronous=a
            ), "all_reduce", in_place=True, reduces=True,
        )
        for shapes in ([(3, 2)], [(3, 2), (2, 2)])
    ),
    Case(
        "reduce", one(3, 2), one(3, 2), lambda values, r: [sums_of(values, 0) if r == 0 else values[r][0]],
        lambda g, outs, inputs, a: dist.reduce(outs[0], group=g, group_dst=0, async_op=a),
        in_place=True, reduces=True,
    ),
    Case(
        "reduce_scatter_single", lambda r, n: [(3 * n, 2)], one(3, 2),
        lambda values, r: [own(sums_of(values, 0), r, len(values))],
        lambda g, outs, inputs, a: SINGLE_SCATTER(outs[0], inputs[0], group=g, async_op=a),
        "reduce_scatter", reduces=True,
    ),
    *(
        Case(
            f"reduce_scatter, {len(rows)} together",
            lambda r, n, rows=rows: [(k * n, 2) for k in rows], lambda r, n, rows=rows: [(k, 2) for k in rows],
            lambda values, r: [own(sums_of(values, place), r, len(values)) for place in range(len(values[r]))],
            lambda g, outs, inputs, a: later(
                g.reduce_scatter_single_coalesced, c10d.ReduceScatterOptions(), outs, inputs, asynchronous=a
            ), "reduce_scatter", reduces=True,
        )
        for rows in ([3], [3, 2])
    ),
    Case(
        "reduce_scatter", lambda r, n: [(3, 2)] * n, one(3, 2), lambda values, r: [sums_of(values, r)],
        lambda g, outs, inputs, a: dist.reduce_scatter(outs[0], inputs, group=g, async_op=a), reduces=True,
    ),
    Case(
        "reduce_scatter, uneven", lambda r, n: [(uneven(k), 2) for k in range(n)], lambda r, n: [(uneven(r), 2)],
        lambda values, r: [sums_of(values, r)],
        lambda g, outs, inputs, a: dist.reduce_scatter(outs[0], inputs, group=g, async_op=a), reduces=True,
    ),
    Case(
        "all_to_all_single", lambda r, n: [(3 * n, 2)], lambda r, n: [(3 * n, 2)],
        lambda values, r: [torch.cat([own(values[k][0], r, len(values)) for k in sorted(values)])],
        lambda g, outs, inputs, a: dist.all_to_all_single(outs[0], inputs[0], group=g, async_op=a), "all_to_all",
    ),
    Case(
        "all_to_all_single, uneven",
        lambda r, n: [(sum(uneven(k) for k in range(n)), 2)], lambda r, n: [(n * uneven(r), 2)],
        lambda values, r: [
            torch.cat([values[k][0].split([uneven(i) for i in range(len(values))])[r] for k in sorted(values)])
        ],
        lambda g, outs, inputs, a: dist.all_to_all_single(
            outs[0], inputs[0], [uneven(dist.get_rank(g))] * dist.get_world_size(g),
            [uneven(k) for k in range(dist.get_world_size(g))], group=g, async_op=a,
        ), "all_to_all",
    ),
    Case(
        "all_to_all", lambda r, n: [(3, 2)] * n, lambda r, n: [(3, 2)] * n,
        lambda values, r: [values[k][r] for k in sorted(values)],
        lambda g, outs, inputs, a: dist.all_to_all(outs, inputs, group=g, async_op=a),
    ),
    Case(
        "all_to_all, uneven", lambda r, n: [(uneven(k), 2) for k in range(n)], lambda r, n: [(uneven(r), 2)] * n,
        lambda values, r: [values[k][r] for k in sorted(values)],
        lambda g, outs, inputs, a: dist.all_to_all(outs, inputs, group=g, async_op=a),
    ),
    Case(
        "broadcast", one(3, 2), one(3, 2), lambda values, r: [values[0][0]],
        lambda g, outs, inputs, a: dist.broadcast(outs[0], group=g, group_src=0, async_op=a), "broadcast",
        in_place=True,
    ),
    Case(
        "gather", one(3, 2), at_root(lambda r, n: [(3, 2)] * n),
        lambda values, r: [values[k][0] for k in sorted(values)] if r == 0 else [],
        lambda g, outs, inputs, a: dist.gather(
            inputs[0], root_only(g, outs), group=g, group_dst=0, async_op=a
        ),
    ),
    Case(
        "scatter", at_root(lambda r, n: [(3, 2)] * n), one(3, 2), lambda values, r: [values[0][r]],
        lambda g, outs, inputs, a: dist.scatter(
            outs[0], root_only(g, inputs), group=g, group_src=0, async_op=a
        ),
    ),
    Case(
        "a message around", one(3, 2), one(3, 2), lambda values, r: [values[(r - 1) % len(values)][0]], around,
    ),
]  # fmt: skip


def equal(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether two tensors have the same shape, dtype and bytes."""
    got, wanted = (
        tensor.detach().resolve_neg().resolve_conj().contiguous().cpu() for tensor in (got, wanted)
    )
    return (
        got.shape == wanted.shape
        and got.dtype == wanted.dtype
        and bytes_of(got) == bytes_of(wanted)
    )


def bytes_of(tensor: torch.Tensor) -> list[int]:
    tensor = tensor.detach().cpu()
    return tensor.reshape(-1).view(torch.uint8).tolist() if tensor.numel() else []
