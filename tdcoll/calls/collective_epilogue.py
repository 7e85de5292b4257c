# SPDX-License-Identifier: Apache-2.0
"""Dense reductions with an epilogue, as operations: :class:`EpilogueOperation`."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch

from tdcoll import runtime
from tdcoll.base import arguments
from tdcoll.base.limits import MAX_BLOCKS
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
    with_plain_numbers,
)
from tdcoll.calls.operation import Bound, Operation, PreparedCall, Request
from tdcoll.calls.result_dtype import WIDE, CastCall, check_out_dtype
from tdcoll.calls.run import run
from tdcoll.calls.tensors import check_fits, check_readable, tensors_overlap
from tdcoll.primitives.epilogue import identity


class EpilogueOptions(NamedTuple):
    """Options of a dense reduction with an epilogue.

    Attributes:
        plain: Of the reduction.
        n_tensors: The first tensors of the request, which are the reduction's: 1, or 2 with
            ``out``. The others are the epilogue's.
        epilogue: As the caller passed it.
        extra: The epilogue's tuple, in which None stands for tensors.
        fields: Names of these tensors, ``extra.FIELD``.
        out_dtype: Of the result, as the caller passed it; None: the tensor's.
    """

    plain: CollectiveOptions
    n_tensors: int
    epilogue: Any
    extra: Any = None
    fields: tuple[str, ...] = ()
    out_dtype: Any = None


class EpilogueOperation(Operation):
    """Calls of a dense reduction with an epilogue, on the same contexts, by the same plans and with
    the same kernels as those without.

    If the result has another dtype than the tensor, the reduction is one of fp32
    (:mod:`tdcoll.calls.result_dtype`).
    """

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
        function = (id(options.epilogue), options.out_dtype)
        return (plain, *function, identity_of(extra), options.fields, *read)

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
        if options.out_dtype is not None:
            described = f"{described}, out_dtype {options.out_dtype}"
        # One fact, because the ranks that have no epilogue have one, too.
        facts["epilogue"] = described
        return facts

    def check(self, request: Request, ctx: Any) -> None:
        options: EpilogueOptions = request.options
        check_epilogue(options.epilogue, options.extra)
        plain = _plain(request)
        what = "an epilogue"
        if options.epilogue is None:
            what = "out_dtype"
        own_names = request.names or ("tensor", "out")
        names = (*own_names[: options.n_tensors], *options.fields)
        for name, tensor in zip(names, request.tensors, strict=True):
            if torch.is_grad_enabled() and getattr(tensor, "requires_grad", False):
                raise ValueError(
                    f"{name} must not require grad, since a call with {what} has no "
                    f"derivative; pass {name}.detach(), or make the call under torch.no_grad()"
                )
        if _casts(request):
            self._check_cast(request, ctx)
        else:
            self._reduction.check(plain, ctx)
        for name, tensor in zip(names, request.tensors, strict=True):
            if name not in options.fields:
                continue
            check_readable(name, tensor, ctx.device)
            if options.n_tensors == 2 and tensors_overlap(plain.tensors[1], tensor):
                raise ValueError(
                    f"{own_names[1]} must not overlap {name}, which is read while "
                    f"{own_names[1]} is written"
                )

    def _check_cast(self, request: Request, ctx: Any) -> None:
        """Raise unless the reduction can be made with a result of ``out_dtype``."""
        options: EpilogueOptions = request.options
        names = request.names or ("tensor", "out")
        alone = _plain(request)._replace(tensors=request.tensors[:1])
        without_out = options.plain._replace(symmetric=False)
        self._reduction.check(alone._replace(options=without_out), ctx)
        tensor = request.tensors[0]
        symmetric = options.plain.symmetric
        arguments.instance("symmetric", symmetric, bool, "a bool")
        check_out_dtype(names[0], tensor, options.out_dtype, symmetric)
        if options.n_tensors == 2:
            out = request.tensors[1]
            shapes = self._reduction.spec.results(tensor.shape, ctx.world_size)
            check_fits(names[1], out, ctx.device, [options.out_dtype], shapes)
            if tensors_overlap(out, tensor):
                raise ValueError(f"{names[1]} must not overlap {names[0]} with out_dtype")

    def prepare(self, request: Request, ctx: Any) -> PreparedCall:
        options: EpilogueOptions = request.options
        plain = _plain(request)
        tensor = plain.tensors[0]
        shape = self._reduction.spec.results(tensor.shape, ctx.world_size)[0]
        extra_tensors = request.tensors[options.n_tensors :]
        extra = join_extra(options.extra, dict(zip(options.fields, extra_tensors, strict=True)))
        if ctx.max_blocks != MAX_BLOCKS:  # where a kernel for a new number can't be loaded at once
            extra = with_plain_numbers(extra)
        epilogue = Epilogue(
            identity if options.epilogue is None else options.epilogue,
            extra,
            options.fields,
            types_of(options.extra, extra_tensors),
            (identity_of(options.extra), *map(is_aligned, extra_tensors)),
            width=max(1, _width(shape)),
            narrow=torch.Size(shape).numel() < 1 << 31,
        )
        casts = _casts(request)
        dtype = tensor.dtype
        n_tensors = options.n_tensors
        if casts:
            dtype = WIDE
            wide = [torch.empty(tensor.shape, dtype=WIDE, device="meta")]
            if options.out_dtype is WIDE:
                wide.append(torch.empty(shape, dtype=WIDE, device="meta"))
            plain = plain._replace(tensors=tuple(wide))
            n_tensors = len(wide)
        kernel_options = self._reduction.kernel_options(dtype, options.plain.op)
        kernel_options = kernel_options._replace(epilogue=epilogue)
        reduction = self._reduction.prepare_with(plain, ctx, kernel_options)
        prepared = _WithEpilogue(reduction, n_tensors)
        if not casts:
            return prepared
        return CastCall(
            ctx, self.name, prepared, tensor, options.out_dtype, options.n_tensors, shape
        )


def _plain(request: Request) -> Request:
    """Return the request of the reduction alone."""
    options: EpilogueOptions = request.options
    tensors = request.tensors[: options.n_tensors]
    return request._replace(tensors=tensors, options=options.plain)


def _casts(request: Request) -> bool:
    """Return whether the result has another dtype than the tensor."""
    out_dtype = request.options.out_dtype
    return out_dtype is not None and out_dtype != getattr(request.tensors[0], "dtype", None)


def _width(shape: Sequence[int]) -> int:
    """Return the elements of a row of a tensor: its last dimension."""
    return shape[-1] if shape else 1


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
        if self._n_tensors == 2 and any(tensors_overlap(result, tensor) for tensor in read):
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
    out_dtype: Any = None,
) -> torch.Tensor:
    """Make a call with an epilogue, and return its result.

    Args:
        tensors, options, group, ctx, names: Of the reduction, as for :func:`~.run.run`.
        epilogue, extra, out_dtype: As the caller passed them.
    """
    extra, read = split_extra(extra)
    more = EpilogueOptions(options, len(tensors), epilogue, extra, tuple(read), out_dtype)
    result: torch.Tensor = run(operation, (*tensors, *read.values()), more, group, ctx, names)
    return result
