# SPDX-License-Identifier: Apache-2.0
"""Dense reductions with an epilogue, as operations: :class:`EpilogueOperation`."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch

from tdcoll import runtime
from tdcoll.calls.collective import CollectiveOperation, CollectiveOptions
from tdcoll.calls.context import CollectiveContext
from tdcoll.calls.epilogues import (
    Epilogue,
    check_epilogue,
    describe_epilogue,
    describe_extra,
    identity_of,
    is_aligned,
    join_extra,
    split_extra,
    types_of,
)
from tdcoll.calls.operation import Bound, Operation, PreparedCall, Request
from tdcoll.calls.run import run
from tdcoll.calls.tensors import check_readable, overlap


class EpilogueOptions(NamedTuple):
    """Options of a dense reduction with an epilogue.

    Attributes:
        plain: Of the reduction.
        n_tensors: The first tensors of the request, which are the reduction's: 1, or 2 with
            ``out``. The others are the epilogue's.
        epilogue: As the caller passed it.
        extra: The epilogue's tuple, in which None stands for tensors.
        fields: Names of these tensors, ``extra.FIELD``.
    """

    plain: CollectiveOptions
    n_tensors: int
    epilogue: Any
    extra: Any = None
    fields: tuple[str, ...] = ()


class EpilogueOperation(Operation):
    """Calls of a dense reduction with an epilogue, on the same contexts, by the same plans and with
    the same kernels as those without."""

    def __init__(self, reduction: CollectiveOperation) -> None:
        self.name = reduction.name
        self._reduction = reduction

    def label(self, request: Request) -> str:
        return self._reduction.label(_plain(request))

    def key(self, tensors: tuple[Any, ...], options: EpilogueOptions, ctx: Any) -> Hashable:
        plain = self._reduction.key(tensors[: options.n_tensors], options.plain, ctx)
        if plain is None:
            return None
        extra = options.extra
        read = [(tensor.dtype, is_aligned(tensor)) for tensor in tensors[options.n_tensors :]]
        # Hashing a Triton function is slow. The prepared call keeps it, so its id stays its own.
        return (plain, id(options.epilogue), identity_of(extra), options.fields, *read)

    def check_early(self, request: Request) -> None:
        self._reduction.check_early(_plain(request))

    def own_context(self, request: Request) -> CollectiveContext:
        return self._reduction.own_context(_plain(request))

    def check_context(self, ctx: Any) -> None:
        self._reduction.check_context(ctx)

    def agreement(self, request: Request, ctx: Any) -> dict[str, Any]:
        options: EpilogueOptions = request.options
        facts = self._reduction.agreement(_plain(request), ctx)
        tensor = request.tensors[0]
        is_nested = getattr(tensor, "is_nested", False)  # and has no shape
        width = _width(() if is_nested else getattr(tensor, "shape", ()))
        described = f"{describe_epilogue(options.epilogue)} for rows of {width}"
        if options.extra is not None:
            types = types_of(options.extra, request.tensors[options.n_tensors :])
            described = f"{described}, extra of {', '.join(types)}"
            if not self._reduction.spec.scatters:  # the result is the same on all ranks
                described = f"{described}: {describe_extra(options.extra)}"
        # One fact, because the ranks that have no epilogue have one, too.
        facts["epilogue"] = described
        return facts

    def check(self, request: Request, ctx: Any) -> None:
        options: EpilogueOptions = request.options
        check_epilogue(options.epilogue, options.extra)
        plain = _plain(request)
        own_names = request.names or ("tensor", "out")
        names = (*own_names[: options.n_tensors], *options.fields)
        for name, tensor in zip(names, request.tensors, strict=True):
            if torch.is_grad_enabled() and getattr(tensor, "requires_grad", False):
                raise ValueError(
                    f"{name} must not require grad, since a call with an epilogue has no "
                    f"derivative; pass {name}.detach(), or make the call under torch.no_grad()"
                )
        self._reduction.check(plain, ctx)
        for name, tensor in zip(names, request.tensors, strict=True):
            if name not in options.fields:
                continue
            check_readable(name, tensor, ctx.device)
            if options.n_tensors == 2 and _overlap(plain.tensors[1], tensor):
                raise ValueError(
                    f"{own_names[1]} must not overlap {name}, which is read while "
                    f"{own_names[1]} is written"
                )

    def prepare(self, request: Request, ctx: Any) -> PreparedCall:
        options: EpilogueOptions = request.options
        plain = _plain(request)
        tensor = plain.tensors[0]
        shape = self._reduction.spec.results(tensor.shape, ctx.world_size)[0]
        extra_tensors = request.tensors[options.n_tensors :]
        epilogue = Epilogue(
            options.epilogue,
            join_extra(options.extra, dict(zip(options.fields, extra_tensors, strict=True))),
            options.fields,
            types_of(options.extra, extra_tensors),
            (identity_of(options.extra), *map(is_aligned, extra_tensors)),
            width=max(1, _width(shape)),
            narrow=torch.Size(shape).numel() < 1 << 31,
        )
        kernel_options = self._reduction.kernel_options(tensor.dtype, options.plain.op)
        kernel_options = kernel_options._replace(epilogue=epilogue)
        prepared = self._reduction.prepare_with(plain, ctx, kernel_options)
        return _WithEpilogue(prepared, options.n_tensors)


def _plain(request: Request) -> Request:
    """Return the request of the reduction alone."""
    options: EpilogueOptions = request.options
    tensors = request.tensors[: options.n_tensors]
    return request._replace(tensors=tensors, options=options.plain)


def _width(shape: Sequence[int]) -> int:
    """Return the elements of a row of a tensor: its last dimension."""
    return shape[-1] if shape else 1


def _overlap(out: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Return whether two contiguous tensors share memory."""
    return overlap(out.data_ptr(), out.nbytes, tensor.data_ptr(), tensor.nbytes, None)


class _WithEpilogue(PreparedCall):
    """A prepared reduction whose launches also take the epilogue's arguments."""

    __slots__ = ("_n_tensors", "_reduction")

    def __init__(self, reduction: PreparedCall, n_tensors: int) -> None:
        self._reduction = reduction
        self._n_tensors = n_tensors
        self.record = reduction.record
        self.complex = False
        self.launch = reduction.launch
        self.variant = reduction.variant

    def bind(self, *tensors: Any) -> Bound | None:
        read = tensors[self._n_tensors :]
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in read):
            return None
        bound = self._reduction.bind(*tensors[: self._n_tensors])
        if bound is None:
            return None
        result, (source, out) = bound
        if self._n_tensors == 2 and any(_overlap(result, tensor) for tensor in read):
            return None
        return result, (source, out, out, *read)


def run_with_epilogue(
    operation: EpilogueOperation,
    tensors: tuple[Any, ...],
    options: CollectiveOptions,
    epilogue: Any,
    extra: Any,
    group: runtime.Group,
    ctx: Any,
    names: tuple[str, ...] = (),
) -> torch.Tensor:
    """Make a call with an epilogue, and return its result.

    Args:
        tensors, options, group, ctx, names: Of the reduction, as for :func:`~.run.run`.
        epilogue, extra: As the caller passed them.
    """
    extra, read = split_extra(extra)
    more = EpilogueOptions(options, len(tensors), epilogue, extra, tuple(read))
    result: torch.Tensor = run(operation, (*tensors, *read.values()), more, group, ctx, names)
    return result
