# SPDX-License-Identifier: Apache-2.0
"""The collectives of PyTorch's ``ProcessGroup`` as data: how each is started, and its options.

A call of any of them is a :class:`~tdcoll.distributed.call.Call`, a list of tensors that are
written, another of tensors that are read, and an object with options. Everything else stands once
for all collectives: copies of tensors that a receiver cannot take, the form of results, deadlines,
and the view that tools have of a call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ProcessGroup,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)

from tdcoll.primitives.reduce import NAMES_BY_HASH, operation_name

Tensors = Sequence[torch.Tensor]

Start = Callable[[Any, Tensors, Tensors, Any], Any]
"""``(group, outs, inputs, options) -> work``: start a call on a process group."""

UNSET_TIMEOUT: timedelta = AllreduceOptions().timeout
"""The timeout in options that ask for that of the group."""

_FIELDS = ("reduceOp", "rootRank", "rootTensor", "device_ids", "device", "asyncOp", "timeout")


@dataclass(frozen=True, eq=False)
class Method:
    """A collective, or a message, of PyTorch's ``ProcessGroup``.

    Attributes:
        name: of the method, and of PyTorch's operator ``c10d::NAME_``.
        start: starts such a call.
        options: class of its options; None for messages, which have none.
        fields: names of the options that a caller may pass one by one, in this order.
        kind: the kind of call that tdcoll's kernels may handle; None if they never do.
        in_place: whether the tensors that are written are also those that are read.
        reduces: whether elements are combined; if not, they are only moved.
        fills: whether all elements of a written tensor are replaced. Otherwise a copy that stands
            for the tensor begins with its values.
        sizes: of the parts of an all-to-all of one tensor, in rows of dimension 0, of the output
            and the input; empty if all have one size.
        operator: calls PyTorch's operator, if ``start`` calls others.
    """

    name: str
    start: Start
    options: Any = None
    fields: tuple[str, ...] = ("timeout",)
    kind: str | None = None
    in_place: bool = False
    reduces: bool = False
    fills: bool = True
    sizes: tuple[list[int], list[int]] = ([], [])
    operator: Start | None = None

    def options_of(self, args: Sequence[Any], named: Mapping[str, Any] | None = None) -> Any:
        """Return the options of a call, which the caller passes as an object, one by one or not."""
        named = named or {}
        first = named.get("opts", args[0] if args else None)
        if type(first) is self.options:
            return first
        if hasattr(first, "asyncOp"):  # of another collective
            return options_like(first, self.options)
        made = self.options()
        spelled = {"op": "reduceOp", "root": "rootRank"}
        passed = dict(zip(self.fields, args, strict=False))
        passed.update((spelled.get(name, name), value) for name, value in named.items())
        for name, value in passed.items():
            if value is not None:
                setattr(made, name, value)
        return made


def reduction_of(opts: Any) -> str:
    """Return tdcoll's name of the operation in a call's options, or torch's name if tdcoll does not
    have it."""
    return NAMES_BY_HASH.get(hash(opts.reduceOp)) or str(operation_name(opts.reduceOp))


def options_like(template: Any, kind: Any = None, **changed: Any) -> Any:
    """Return options of class ``kind``, or of the same class, with ``template``'s values or others."""
    made = (type(template) if kind is None else kind)()
    for name in _FIELDS:
        if name in changed:
            setattr(made, name, changed[name])
        elif hasattr(made, name) and hasattr(template, name):
            value = getattr(template, name)
            if value is not None:
                setattr(made, name, value)
    return made


def _newest(*names: str) -> Any:
    """Return ``ProcessGroup``'s method, whose name differs between versions of PyTorch."""
    return next(filter(None, (getattr(ProcessGroup, name, None) for name in names)))


gather_into = _newest("all_gather_single", "_allgather_base")
_gather_several = _newest("all_gather_single_coalesced", "allgather_into_tensor_coalesced")
_scatter_from = _newest("reduce_scatter_single", "_reduce_scatter_base")
_scatter_several = _newest("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced")
exchange_parts = _newest("all_to_all_single", "alltoall_base")


# ---------------------------------------------------------------------- handled by tdcoll's kernels

ALL_GATHER_SINGLE = Method(
    "_allgather_base",
    lambda group, outs, inputs, opts: gather_into(group, outs[0], inputs[0], opts),
    AllgatherOptions,
    kind="all_gather",
)
ALL_GATHER_SEVERAL = Method(
    "allgather_into_tensor_coalesced",
    lambda group, outs, inputs, opts: _gather_several(group, outs, inputs, opts),
    AllgatherOptions,
    kind="all_gather",
)
ALL_GATHER = Method(
    "allgather",
    lambda group, outs, inputs, opts: group.allgather([outs], inputs, opts),
    AllgatherOptions,
    kind="all_gather",
)
ALL_REDUCE = Method(
    "allreduce",
    lambda group, outs, inputs, opts: group.allreduce(outs, opts),
    AllreduceOptions,
    ("reduceOp", "timeout"),
    kind="all_reduce",
    in_place=True,
    reduces=True,
)
ALL_REDUCE_SEVERAL = Method(
    "allreduce_coalesced",
    lambda group, outs, inputs, opts: group.allreduce_coalesced(outs, opts),
    AllreduceCoalescedOptions,
    ("reduceOp", "timeout"),
    kind="all_reduce",
    in_place=True,
    reduces=True,
)
REDUCE_SCATTER_SINGLE = Method(
    "_reduce_scatter_base",
    lambda group, outs, inputs, opts: _scatter_from(group, outs[0], inputs[0], opts),
    ReduceScatterOptions,
    ("reduceOp", "timeout"),
    kind="reduce_scatter",
    reduces=True,
)
REDUCE_SCATTER_SEVERAL = Method(
    "reduce_scatter_tensor_coalesced",
    lambda group, outs, inputs, opts: _scatter_several(group, outs, inputs, opts),
    ReduceScatterOptions,
    ("reduceOp", "timeout"),
    kind="reduce_scatter",
    reduces=True,
)
BROADCAST = Method(
    "broadcast",
    lambda group, outs, inputs, opts: group.broadcast(outs, opts),
    BroadcastOptions,
    ("rootRank", "timeout"),
    kind="broadcast",
    in_place=True,
)
BARRIER = Method(
    "barrier", lambda group, outs, inputs, opts: group.barrier(opts), BarrierOptions, kind="barrier"
)


def all_to_all_single(output_sizes: Sequence[int], input_sizes: Sequence[int]) -> Method:
    """Return the all-to-all of one tensor with these sizes of parts, which are those of dimension 0
    and may differ; empty for parts of one size."""
    sizes = list(output_sizes), list(input_sizes)
    return Method(
        "alltoall_base",
        lambda group, outs, inputs, opts: exchange_parts(group, outs[0], inputs[0], *sizes, opts),
        AllToAllOptions,
        kind="all_to_all",
        sizes=sizes,
    )


ALL_TO_ALL_SINGLE = all_to_all_single((), ())

# ---------------------------------------------------------------------- of the fallback backend only

REDUCE = Method(
    "reduce",
    lambda group, outs, inputs, opts: group.reduce(outs, opts),
    ReduceOptions,
    ("rootRank", "reduceOp", "timeout"),
    in_place=True,
    reduces=True,
)
GATHER = Method(
    "gather",
    lambda group, outs, inputs, opts: group.gather([outs] if outs else [], inputs, opts),
    GatherOptions,
    ("rootRank", "timeout"),
)
SCATTER = Method(
    "scatter",
    lambda group, outs, inputs, opts: group.scatter(outs, [inputs] if inputs else [], opts),
    ScatterOptions,
    ("rootRank", "timeout"),
)
REDUCE_SCATTER = Method(
    "reduce_scatter",
    lambda group, outs, inputs, opts: group.reduce_scatter(outs, [inputs], opts),
    ReduceScatterOptions,
    ("reduceOp", "timeout"),
    reduces=True,
)
ALL_TO_ALL = Method(
    "alltoall",
    lambda group, outs, inputs, opts: group.alltoall(outs, inputs, opts),
    AllToAllOptions,
)


def all_gather_lists(sizes: Sequence[int], coalesced: bool) -> Method:
    """Return the all-gather of several tensors into several lists, which have these sizes."""

    def start(group: Any, outs: Tensors, inputs: Tensors, opts: Any) -> Any:
        rest = iter(outs)
        lists = [[next(rest) for _ in range(size)] for size in sizes]
        if coalesced:
            return group.allgather_coalesced(lists, inputs, opts)
        return group.allgather(lists, inputs, opts)

    return Method("allgather_coalesced" if coalesced else "allgather", start, AllgatherOptions)


def message(name: str, *where: int) -> Method:
    """Return the message ``send``, ``recv`` or ``recv_anysource``, given its peer and its tag."""

    def start(group: Any, outs: Tensors, inputs: Tensors, opts: Any) -> Any:
        return getattr(group, name)(inputs if name == "send" else outs, *where)

    return Method(name, start, fills=False)
