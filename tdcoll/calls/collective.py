# SPDX-License-Identifier: Apache-2.0
"""Dense collectives as operations: from a :class:`~tdcoll.calls.spec.Collective` to calls of it."""

from __future__ import annotations

import functools
from collections.abc import Hashable
from importlib import import_module
from typing import Any, NamedTuple

import torch

from tdcoll import runtime
from tdcoll.base import arguments
from tdcoll.base.call_log import record_of
from tdcoll.calls.call_launches import CallLaunches, launches_of
from tdcoll.calls.context import CollectiveContext
from tdcoll.calls.explain import Explanation, explain_call
from tdcoll.calls.gradient import ResultWithGradient, derivative
from tdcoll.calls.implicit import PlannedContext, implicit_context
from tdcoll.calls.launch_spec import KernelOptions
from tdcoll.calls.operation import Bound, Operation, PreparedCall, Request
from tdcoll.calls.plan import Facts
from tdcoll.calls.run import make_call, run
from tdcoll.calls.spec import Collective
from tdcoll.calls.tensors import (
    check_fits,
    check_symmetric,
    check_tensor,
    heap_offset,
    overlap,
    strided_bytes,
)
from tdcoll.primitives.reduce import check_dtype, check_operation, operation_name


class CollectiveOptions(NamedTuple):
    """Options of a dense call, as the caller passed them.

    Attributes:
        op: The reduction; None if the collective doesn't reduce.
        algorithm: A name, ``"auto"`` or a plan.
        symmetric: Whether ``out`` is symmetric memory that peers may write to.
        in_place: Whether the tensor has a segment for each rank, and peers write into it.
        root: The group rank whose tensor goes to all; 0 if the collective isn't rooted.
    """

    op: Any = None
    algorithm: Any = "auto"
    symmetric: Any = False
    in_place: bool = False
    root: Any = 0


class CollectiveOperation(Operation):
    """Calls of one dense collective. Requests have ``(tensor,)`` or ``(tensor, out)``.

    Attributes:
        spec: The collective.
    """

    def __init__(self, spec: Collective) -> None:
        self.spec = spec
        self.name = spec.name

    def label(self, request: Request) -> str:
        return f"{self.name}_" if request.options.in_place else self.name

    def key(self, tensors: tuple[Any, ...], options: Any, ctx: Any) -> Hashable:
        symmetric = options.symmetric
        if symmetric is not False and symmetric is not True:  # 1 == True, and is not valid
            return None
        if type(options.root) is not int:  # True == 1, and is not valid
            return None
        tensor = tensors[0]
        key: Hashable = self.name, options, tensor.shape, tensor.dtype
        if len(tensors) > 1:
            out = tensors[1]
            key = key, out.shape, out.dtype
        if symmetric or options.in_place:
            # Symmetric memory at this address is what it was until some memory is released.
            key = key, tensors[-1].data_ptr(), ctx.job.arena.releases
        return key

    def check_early(self, request: Request) -> None:
        arguments.tensor(_names(request)[0], request.tensors[0])

    def own_context(self, request: Request) -> CollectiveContext:
        options = request.options
        facts: dict[str, Any] = {"algorithm": options.algorithm}
        if self.spec.reduces:
            facts["op"] = operation_name(options.op)
        if self.spec.rooted:
            facts["root"] = options.root
        return implicit_context(self.spec, request.tensors[0], request.group, self.name, facts)

    def check_context(self, ctx: Any) -> None:
        check_dense_context(ctx)

    def agreement(self, request: Request, ctx: Any) -> dict[str, Any]:
        tensors, options, *_ = request
        tensor = tensors[0]
        offset = None
        if options.symmetric or options.in_place:
            offset = heap_offset(_landing_tensor(request), ctx)
        facts = {
            "bytes": strided_bytes(tensor),
            "dtype": getattr(tensor, "dtype", None),
            "algorithm": options.algorithm,
            "offset in the symmetric heap": offset,
            "symmetric": options.symmetric,
            "requires_grad": request.gradient,
        }
        if self.spec.reduces:
            facts["op"] = operation_name(options.op)
            facts["epilogue"] = None
        if self.spec.rooted:
            facts["root"] = options.root
        return facts

    # ------------------------------------------------------------------ checks

    def check(self, request: Request, ctx: Any) -> None:
        tensor = request.tensors[0]
        options = request.options
        names = _names(request)
        check_tensor(names[0], tensor, ctx.device)
        if tensor.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{names[0]} must not require grad where the call writes into a given tensor, which "
                f"would have no gradient; let the call make its result, pass {names[0]}.detach(), "
                "or make the call under torch.no_grad()"
            )
        if self.spec.reduces:
            check_dtype(names[0], tensor)
            check_operation(options.op, tensor.dtype)
        if self.spec.rooted:
            arguments.whole("root", options.root, 0, ctx.world_size - 1)
        self._check_shapes(request, ctx)
        arguments.instance("symmetric", options.symmetric, bool, "a bool")
        if not (options.symmetric or options.in_place):
            return
        landing_tensor = _landing_tensor(request)
        if landing_tensor is None:
            raise ValueError(
                f"{names[1]} must be given with symmetric=True: one that tdcoll.empty() has made"
            )
        check_symmetric(names[0] if options.in_place else names[1], landing_tensor, ctx)

    def _check_shapes(self, request: Request, ctx: Any) -> None:
        """Raise unless the tensor has a result, and ``out``, if it is given, can take the
        result."""
        spec = self.spec
        world = ctx.world_size
        tensor = request.tensors[0]
        tensor_name, out_name = _names(request)
        shapes = spec.results(tensor.shape, world)
        has_segments = not request.options.in_place or (
            tensor.dim() > 0 and tensor.shape[0] % world == 0
        )
        if not shapes or not has_segments:
            raise ValueError(
                f"{tensor_name}'s first dimension must be divisible by the {world} rank(s); got "
                f"shape {list(tensor.shape)}"
            )
        if len(request.tensors) == 1:
            return
        out = request.tensors[1]
        check_fits(out_name, out, ctx.device, [tensor.dtype], shapes)
        self._check_overlap(request, ctx)

    def _check_overlap(self, request: Request, ctx: Any) -> None:
        """Raise if tensor and ``out`` overlap, unless one is this rank's segment of the other."""
        spec = self.spec
        tensor, out = request.tensors
        segment = spec.segment_bytes(tensor.nbytes, ctx.world_size)
        allowed = spec.may_overlap_at(segment, ctx.rank)
        if not overlap(tensor.data_ptr(), tensor.nbytes, out.data_ptr(), out.nbytes, allowed):
            return
        tensor_name, out_name = _names(request)
        part = out_name
        whole = tensor_name
        begin = out.data_ptr() - tensor.data_ptr()
        if spec.gathers:
            part = tensor_name
            whole = out_name
            begin = -begin
        exception = ""
        if not (spec.gathers or spec.scatters):
            exception = f", except to be {whole}"
        elif allowed is not None:
            exception = f", except as {whole}'s own segment at byte {abs(allowed)}"
        raise ValueError(
            f"{part} must not overlap {whole}{exception}; it lies at byte {begin} of {whole}"
        )

    # ------------------------------------------------------------------ plans

    def facts(self, request: Request, ctx: CollectiveContext | PlannedContext) -> Facts:
        """Return the facts on which the call's plan depends, for a call or an explanation of
        one."""
        options = request.options
        tensor = request.tensors[0]
        world = ctx.world_size
        if options.in_place:
            segment = tensor.nbytes // world
        else:
            segment = self.spec.segment_bytes(tensor.nbytes, world)
        landing = self.spec.landing(symmetric=options.symmetric, in_place=options.in_place)
        return Facts.of(ctx, segment, tensor.dtype if self.spec.reduces else None, landing)

    def explain(self, request: Request, ctx: CollectiveContext | PlannedContext) -> Explanation:
        """Explain the call, from the facts and the decision with which it is made."""
        tuning = ctx.tuning
        sections = self.spec.sections(tuning.sections, tuning.name)
        facts = self.facts(request, ctx)
        return explain_call(self.spec, facts, request.options.algorithm, sections, tuning.name)

    def kernel_options(self, dtype: torch.dtype, op: Any, root: int = 0) -> KernelOptions:
        """Return what kernels depend on beside the facts."""
        if not self.spec.reduces:
            return KernelOptions(root=root)
        return KernelOptions(dtype, check_operation(op, dtype))

    def prepare(self, request: Request, ctx: Any) -> PreparedCall:
        tensor = request.tensors[0]
        options = request.options
        return self.prepare_with(
            request, ctx, self.kernel_options(tensor.dtype, options.op, options.root)
        )

    def prepare_with(
        self, request: Request, ctx: Any, kernel_options: KernelOptions
    ) -> PreparedCall:
        """Prepare a call whose kernels have these options."""
        tensor = request.tensors[0]
        options = request.options
        facts = self.facts(request, ctx)
        launches = launches_of(self.spec, ctx, facts, options.algorithm, kernel_options)
        label = self.label(request)
        if facts.in_place:
            if len(request.tensors) == 1:
                return _IntoTensor(label, tensor, ctx, launches, facts.nbytes)
            return _IntoSymmetricOut(label, tensor, ctx, launches, facts.nbytes)
        if len(request.tensors) == 1:
            return _IntoNewResult(label, tensor, ctx, launches, self.spec)
        return _IntoOut(label, tensor, ctx, launches, self.spec, facts.nbytes)

    # ------------------------------------------------------------------ gradients

    def wants_gradient(self, request: Request) -> bool:
        requires = getattr(request.tensors[0], "requires_grad", False)
        writes_into_given = len(request.tensors) > 1 or request.options.in_place
        return requires and not writes_into_given and torch.is_grad_enabled()

    def with_gradient(self, request: Request) -> torch.Tensor:
        tensor = request.tensors[0]
        plain = request._replace(tensors=(tensor.detach(),), gradient=True)
        _, made = make_call(self, plain)
        result: torch.Tensor = ResultWithGradient.apply(tensor, made, self, request)
        return result

    def backward(self, request: Request, grad: torch.Tensor) -> torch.Tensor:
        """Return the gradient of a request's tensor, given that of its result."""

        def call_adjoint(name: str, grad: torch.Tensor, op: str | None) -> torch.Tensor:
            made: torch.Tensor = run(
                operation_of(name), (grad,), CollectiveOptions(op), request.group, request.ctx
            )
            return made

        if request.ctx is None:
            job = runtime.current()
            topology = job.topology(job.ranks_of(request.group))
        else:
            topology = request.ctx.topology
        adjoint = spec_of(self.spec.adjoint)
        return derivative(self.spec, adjoint, grad, request.options, topology, call_adjoint)


def _names(request: Request) -> tuple[str, ...]:
    return request.names or ("tensor", "out")


def _landing_tensor(request: Request) -> Any:
    """Return the symmetric tensor that peers write to; None if it is missing."""
    if request.options.in_place:
        return request.tensors[0]
    return request.tensors[1] if len(request.tensors) > 1 else None


def check_dense_context(ctx: Any) -> None:
    """Raise unless ``ctx`` is a context for dense calls."""
    if not isinstance(ctx, CollectiveContext):
        arguments.instance("ctx", ctx, CollectiveContext, "a tdcoll.CollectiveContext")
    if not ctx.dense:
        raise TypeError(f"ctx must be a tdcoll.CollectiveContext, got {type(ctx).__name__}")


def operation_of(name: str) -> CollectiveOperation:
    """Return the operation of a dense collective, see :data:`tdcoll.base.limits.COLLECTIVES`."""
    operation: CollectiveOperation = import_module(f"tdcoll.collectives.{name}.spec").OPERATION
    return operation


def spec_of(name: str) -> Collective:
    """Return the spec of a dense collective, see :data:`tdcoll.base.limits.COLLECTIVES`."""
    return operation_of(name).spec


def call_trusted(
    operation: CollectiveOperation,
    tensor: torch.Tensor,
    out: torch.Tensor,
    ctx: CollectiveContext,
    op: str | None = None,
    root: int = 0,
) -> PreparedCall:
    """Make a call for a caller that has checked both tensors, which may have any shapes.

    Returns:
        The prepared call for :func:`~tdcoll.calls.run.repeat_call`, of tensors of the same
        numbers of elements and dtypes.
    """
    request = Request((tensor, out), CollectiveOptions(op, root=root), ctx=ctx)
    prepared, _ = make_call(operation, request, trusted=True)
    assert prepared is not None, "tensors of trusted calls don't require grad"
    return prepared


# ---------------------------------------------------------------------- prepared calls


class _PreparedCollective(PreparedCall):
    """A dense call. Subclasses differ in the tensor that gets the result."""

    __slots__ = ()

    def __init__(self, label: str, tensor: torch.Tensor, launches: CallLaunches) -> None:
        _, *counts = launches.record
        self.record = record_of(label, *counts)
        self.complex = tensor.dtype.is_complex
        self.launch = launches.run
        self.variant = launches.variant


class _IntoNewResult(_PreparedCollective):
    """Each call makes its result."""

    __slots__ = ("_new_result", "_of_same_shape")

    def __init__(
        self,
        label: str,
        tensor: torch.Tensor,
        ctx: CollectiveContext,
        launches: CallLaunches,
        spec: Collective,
    ) -> None:
        super().__init__(label, tensor, launches)
        shape = spec.results(tensor.shape, ctx.world_size)[0]
        # empty_like takes half the time of empty.
        self._of_same_shape = shape == tensor.shape
        # Sizes one by one take half the time of a tuple. A scalar has none, and is made of the
        # tuple.
        sizes = shape or [()]
        self._new_result = functools.partial(
            torch.empty, *sizes, dtype=tensor.dtype, device=ctx.device
        )

    def bind(self, tensor: torch.Tensor) -> Bound | None:
        if tensor.requires_grad and torch.is_grad_enabled():
            return None
        if self._of_same_shape and type(tensor) is torch.Tensor:
            result = torch.empty_like(tensor)
        else:
            result = self._new_result()
        return result, (tensor.data_ptr(), result.data_ptr())


class _IntoOut(_PreparedCollective):
    """The caller passes ``out``, in any memory, and peers don't write there unless it is
    symmetric."""

    __slots__ = ("_may_overlap_at", "_out_bytes", "_tensor_bytes")

    def __init__(
        self,
        label: str,
        tensor: torch.Tensor,
        ctx: CollectiveContext,
        launches: CallLaunches,
        spec: Collective,
        segment: int,
    ) -> None:
        super().__init__(label, tensor, launches)
        self._tensor_bytes = segment * ctx.world_size if spec.scatters else segment
        self._out_bytes = segment * ctx.world_size if spec.gathers else segment
        self._may_overlap_at = spec.may_overlap_at(segment, ctx.rank)

    def bind(self, tensor: torch.Tensor, out: torch.Tensor) -> Bound | None:
        if tensor.requires_grad and torch.is_grad_enabled():
            return None
        source = tensor.data_ptr()
        target = out.data_ptr()
        # As `tensors.overlap` checks, without the time of a call.
        apart = target >= source + self._tensor_bytes or source >= target + self._out_bytes
        if not apart and target - source != self._may_overlap_at:
            return None
        return out, (source, target)


class _IntoTensor(_PreparedCollective):
    """Peers write into the tensor, where this rank's segment lies already."""

    __slots__ = ("_empty_address", "_frame_has_buffer", "_own_offset")

    def __init__(
        self,
        label: str,
        tensor: torch.Tensor,
        ctx: CollectiveContext,
        launches: CallLaunches,
        segment: int,
    ) -> None:
        super().__init__(label, tensor, launches)
        self._own_offset = ctx.rank * segment
        self._frame_has_buffer = launches.lands_in_caller_buffer
        self._empty_address = ctx.inbox.data_ptr()

    def frame(self, whole: torch.Tensor) -> tuple[int, ...]:
        """Return the addresses that the launches take, of a tensor with a segment for each rank."""
        base = whole.data_ptr() or self._empty_address  # a tensor of no bytes has no address
        if self._frame_has_buffer:
            return base + self._own_offset, 0, base
        return base + self._own_offset, base

    def bind(self, tensor: torch.Tensor) -> Bound | None:
        if tensor.requires_grad and torch.is_grad_enabled():
            return None
        return tensor, self.frame(tensor)


class _IntoSymmetricOut(_IntoTensor):
    """Peers write into ``out``, which gets a copy of this rank's segment first."""

    __slots__ = ("_launch_in_place", "_rank", "_segment", "_world_size")

    def __init__(
        self,
        label: str,
        tensor: torch.Tensor,
        ctx: CollectiveContext,
        launches: CallLaunches,
        segment: int,
    ) -> None:
        super().__init__(label, tensor, ctx, launches, segment)
        self._rank = ctx.rank
        self._world_size = ctx.world_size
        self._segment = segment
        self._launch_in_place = launches.run
        self.launch = self._copy_own_segment_then_launch

    def bind(self, tensor: torch.Tensor, out: torch.Tensor) -> Bound | None:  # type: ignore[override]
        if tensor.requires_grad and torch.is_grad_enabled():
            return None
        base = out.data_ptr() or self._empty_address
        total = self._world_size * self._segment
        if overlap(tensor.data_ptr(), self._segment, base, total, self._own_offset):
            return None
        return out, (tensor, out, *self.frame(out))

    def _copy_own_segment_then_launch(
        self, stream: int, tensor: torch.Tensor, out: torch.Tensor, *frame: int
    ) -> None:
        own = out.detach().view(self._world_size, tensor.numel())[self._rank]
        if own.data_ptr() != tensor.data_ptr():
            own.copy_(tensor.detach().view(-1))
        self._launch_in_place(stream, *frame)
