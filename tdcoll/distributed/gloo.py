# SPDX-License-Identifier: Apache-2.0
"""Calls of a process group by gloo, with the meaning that they have with tdcoll's kernels and with
NCCL.

gloo alone moves and reduces fewer dtypes, wants parts of one shape where sizes are enough, has no
lists of parts of different sizes, and averages in the dtype itself. The rest is made of what it
has: bytes in place of numbers that are only moved, one exchange for a list, and
:mod:`~tdcoll.distributed.arithmetic`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from tdcoll.distributed.arithmetic import Arithmetic, arithmetic_of
from tdcoll.distributed.call import Call, write
from tdcoll.distributed.methods import (
    ALL_GATHER,
    ALL_GATHER_SEVERAL,
    ALL_GATHER_SINGLE,
    ALL_REDUCE,
    ALL_TO_ALL,
    REDUCE,
    REDUCE_SCATTER,
    options_like,
)

MOVED = frozenset(
    getattr(torch, name)
    for name in (
        "float64",
        "float32",
        "float16",
        "bfloat16",
        "int64",
        "int32",
        "int8",
        "uint8",
        "bool",
    )
)
"""The dtypes that gloo and NCCL move and that gloo reduces."""

Tensors = Sequence[torch.Tensor]


class Started(NamedTuple):
    """A call that has been started.

    Attributes:
        works: of the fallback backend.
        finish: writes the results, when the works are complete; None if they are written.
        result: the value of the call's work and future.
    """

    works: list[Any]
    finish: Callable[[], None] | None
    result: list[Any]


def start(gloo: Any, call: Call, outs: Tensors, inputs: Tensors) -> Started:
    """Start a call of contiguous tensors, which stand for those of ``call``, on gloo itself.

    Raises:
        TypeError, ValueError: the tensors don't fit each other, or an operation its dtype.
    """
    if call.method.reduces:
        return _start_reduction(gloo, call, outs, inputs)
    if call.method is ALL_GATHER:
        return _start_list(gloo, call, outs, inputs[0])
    if call.method is ALL_TO_ALL:
        return _start_exchange(gloo, call, outs, inputs)
    if not any(tensor.numel() for tensor in [*outs, *inputs]) and call.opts is None:
        # a message of nothing, for which gloo would wait forever
        return Started([], None, call.result)
    sizes = call.method.sizes
    by_rows = any(sizes)
    parts = [_as_moved(tensor, by_rows) for tensor in outs]
    sources = parts if call.method.in_place else [_as_moved(tensor, by_rows) for tensor in inputs]
    pairs = zip(parts, sources, strict=False)
    if call.method in (ALL_GATHER_SINGLE, ALL_GATHER_SEVERAL):
        works = [gloo._allgather_base(part, source, call.opts) for part, source in pairs]
    elif call.method.kind == "all_to_all":
        works = [gloo.alltoall_base(part, source, *sizes, call.opts) for part, source in pairs]
    else:
        works = [call.method.start(gloo, parts, sources, call.opts)]
    return Started(works, None, call.result)


# ---------------------------------------------------------------------- what is only moved


def as_moved(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor, or its bytes if fallback backends don't move its dtype."""
    return tensor if tensor.dtype in MOVED else _as_moved(tensor, False)


def _as_moved(tensor: torch.Tensor, by_rows: bool) -> torch.Tensor:
    """Return a contiguous tensor in one dimension, or in two ``by_rows``; as bytes if gloo doesn't
    move its dtype."""
    tensor = tensor.detach()
    rows = tensor.shape[:1] if by_rows else ()
    flat = tensor.view(*rows, -1) if tensor.numel() else tensor.new_empty((*rows, 0))
    return flat if flat.dtype in MOVED else flat.view(torch.uint8)


def _start_list(gloo: Any, call: Call, outs: Tensors, tensor: torch.Tensor) -> Started:
    """Start an all-gather into a list of tensors of any sizes: of one size, with padding."""
    world = gloo.size()
    most = max(out.numel() for out in outs)
    own = tensor.detach().view(-1)
    if own.numel() != most:
        own = tensor.new_empty(most)
        own[: tensor.numel()] = tensor.detach().view(-1)
    whole = tensor.new_empty(world, most)
    work = gloo._allgather_base(_as_moved(whole, False), _as_moved(own, False), call.opts)

    def finish() -> None:
        for out, row in zip(outs, whole, strict=True):
            write(out, row[: out.numel()].view(out.shape))

    return Started([work], finish, stacked(call, whole))


def stacked(call: Call, whole: torch.Tensor) -> list[Any]:
    """Return the value of an all-gather into a list: as NCCL's one tensor ``[world, ...]``, of
    ``whole``, or, if the parts have different shapes, as one list."""
    shape = call.outs[0].shape
    if all(out.shape == shape for out in call.outs):
        return [whole.view(len(call.outs), *shape)]
    return call.result


def _start_exchange(gloo: Any, call: Call, outs: Tensors, inputs: Tensors) -> Started:
    """Start an all-to-all of lists: of one tensor with sizes, because gloo's lists have parts of
    one shape."""
    sizes = [[tensor.numel() for tensor in tensors] for tensors in (outs, inputs)]
    given = torch.cat([tensor.detach().view(-1) for tensor in inputs])
    made = outs[0].new_empty(sum(sizes[0]))
    work = gloo.alltoall_base(_as_rows(made), _as_rows(given), *sizes, call.opts)

    def finish() -> None:
        for out, part in zip(outs, made.split(sizes[0]), strict=True):
            write(out, part.view(out.shape))

    return Started([work], finish, call.result)


def _as_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in one dimension with an element in each row, as gloo moves it."""
    return _as_moved(tensor.view(-1, 1), True)


# ---------------------------------------------------------------------- reductions


def _start_reduction(gloo: Any, call: Call, outs: Tensors, inputs: Tensors) -> Started:
    """Start a reduction: an all-reduce for each of its tensors, or a reduction to one rank."""
    method = call.method
    world = gloo.size()
    rank = gloo.rank()
    works: list[Any] = []
    back: list[Callable[[], None]] = []
    if method is REDUCE_SCATTER:
        sizes = [tensor.numel() for tensor in inputs]
        begins = [sum(sizes[:rank])]
        inputs = [torch.cat([tensor.detach().view(-1) for tensor in inputs])]
    else:
        begins = [0 if method.in_place else rank * out.numel() for out in outs]
    for out, tensor, begin in zip(outs, inputs, begins, strict=True):
        arithmetic = arithmetic_of(method.name, call.opts.reduceOp, tensor.dtype, world)
        refuse_other_dtypes(method.name, arithmetic.dtype)
        own = tensor.detach().view(-1)
        part = arithmetic.part(own)
        receives = method is not REDUCE or call.opts.rootRank == rank
        if part is own and (not method.in_place or not receives):
            part = own.clone()  # which gloo writes to, and the call doesn't
        kind = REDUCE if method is REDUCE else ALL_REDUCE
        opts = options_like(call.opts, kind.options, reduceOp=arithmetic.op)
        works.append(kind.start(gloo, [part], [part], opts))
        if receives and (part is not own or arithmetic.after is not None):
            back.append(_write_reduction(out, part, begin, arithmetic))

    def finish() -> None:
        for each in back:
            each()

    return Started(works, finish if back else None, call.result)


def _write_reduction(
    out: torch.Tensor, part: torch.Tensor, begin: int, arithmetic: Arithmetic
) -> Callable[[], None]:
    """Return a function that writes the elements of a reduction from ``begin`` on into ``out``."""

    def write_reduction() -> None:
        mine = part[begin : begin + out.numel()].view(out.shape)
        write(out, arithmetic.result(mine, out.dtype))

    return write_reduction


def refuse_other_dtypes(name: str, dtype: torch.dtype) -> None:
    """Raise ``TypeError`` unless the fallback backends can reduce elements of ``dtype``."""
    if dtype not in MOVED:
        allowed = ", ".join(sorted(str(each).removeprefix("torch.") for each in MOVED))
        raise TypeError(
            f"{name}: a tensor that is reduced must be of {allowed} or fp8; got {dtype}"
        )
