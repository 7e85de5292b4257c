# SPDX-License-Identifier: Apache-2.0
"""How a call is made: checked and prepared the first time, and found again when it is repeated.

The time of a small call is the host's. A context therefore remembers a :class:`Ready` for each kind of call that it has
made: one look-up finds it by everything that shapes, dtypes and arguments decide, and only the following may have
changed since: the device, layout, contiguity, sign and memory of each tensor (as by :func:`usable`); the overlap of two
tensors (as by :func:`overlap`), which ``place`` looks at; and the context
(:meth:`~tdcoll.calls.preconditions.Preconditions.enter`). Where peers access a tensor, its address is part of what the
call is found by. This fast path raises no errors: any mismatch falls back to the slow path, which says what is wrong.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from importlib import import_module
from typing import Any, NamedTuple

import torch

from tdcoll import runtime
from tdcoll.base import arguments
from tdcoll.base.call_log import MOST, Made, kind_of
from tdcoll.base.errors import NotSymmetricError
from tdcoll.base.torch_internals import never_compiled
from tdcoll.calls.context import CollectiveContext
from tdcoll.calls.launches import Launches, launches_of
from tdcoll.calls.pool import pooled, strided_bytes
from tdcoll.calls.spec import Collective
from tdcoll.primitives.reduce import OPERATIONS, check_dtype, check_operation, operation_name

_STRIDED = torch.strided


# ---------------------------------------------------------------------- preconditions


def usable(tensor: torch.Tensor, device: torch.device) -> bool:
    """Return whether kernels on ``device`` can take the bytes of a tensor as they are."""
    return (
        tensor.device == device
        and tensor.layout is _STRIDED
        and tensor.is_contiguous()
        and not (tensor.is_neg() or tensor.is_conj())
        and (tensor.data_ptr() != 0 or tensor.numel() == 0)
    )


def overlap(tensor: int, nbytes: int, out: int, total: int, allowed: int | None) -> bool:
    """Return whether a tensor of ``nbytes`` and a result of ``total`` bytes, at these addresses, overlap.

    Args:
        allowed: the result may begin this many bytes behind the tensor; None: they must not overlap at all.
    """
    return out < tensor + nbytes and tensor < out + total and out - tensor != allowed


def check_context(ctx: Any) -> None:
    """Raise unless ``ctx`` is a context for dense calls."""
    if not isinstance(ctx, CollectiveContext) or not ctx.dense:
        if isinstance(ctx, CollectiveContext):
            raise TypeError(f"ctx must be a tdcoll.CollectiveContext, got {type(ctx).__name__}")
        arguments.instance("ctx", ctx, CollectiveContext, "a tdcoll.CollectiveContext")


def check_tensor(name: str, tensor: Any, device: torch.device) -> None:
    """Raise unless ``tensor`` is one that kernels on ``device`` can take."""
    arguments.tensor(name, tensor)
    if tensor.is_nested:  # and has no shape
        raise ValueError(f"{name} must be an ordinary tensor; got a nested one")
    if usable(tensor, device):
        return
    if tensor.device != device:
        raise ValueError(f"{name} must be on {device}, where the context is; got {tensor.device}")
    if tensor.is_conj() or tensor.is_neg():
        raise ValueError(f"{name} must hold its values as they are; call resolve_conj() and resolve_neg() first")
    if tensor.layout is _STRIDED and tensor.is_contiguous():  # of a subclass that wraps others, as DTensor does
        raise TypeError(
            f"{name} must be a tensor with memory of its own; got {type(tensor).__name__}. Pass what it holds, such as "
            "to_local() of a DTensor or wait() of an AsyncCollectiveTensor"
        )
    if tensor.layout is not _STRIDED:
        raise ValueError(
            f"{name} must be a dense tensor; got shape {list(tensor.shape)} in {tensor.layout}. For torch.sparse_coo "
            "there is tdcoll.sparse_all_reduce"
        )
    raise ValueError(
        f"{name} must be contiguous; got shape {list(tensor.shape)} with strides {tensor.stride()}. Pass "
        f"{name}.contiguous()"
    )


def _place_of(tensor: Any, ctx: CollectiveContext) -> int | str:
    """Return where a strided tensor begins in the symmetric heap, for ranks to compare; 0 if it has no address."""
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not _STRIDED or not tensor.nbytes:
        return 0
    offset = tensor.data_ptr() - ctx.job.heap.base
    return offset if 0 <= offset < ctx.job.heap.nbytes else "in other memory"


def _check_symmetric(name: str, tensor: torch.Tensor, ctx: CollectiveContext) -> None:
    """Raise unless peers can access a tensor; the ranks promise to pass the same one."""
    if not tensor.nbytes:
        return
    owners = ctx.job.arena.owners_around(ctx.job.offset_of(tensor, name), tensor.nbytes)
    if owners is None or not set(ctx.topology.pes) <= set(owners):
        raise NotSymmetricError(
            f"{name} must be made by tdcoll.empty() over all ranks of the context's group, and not freed; it "
            + ("is not allocated" if owners is None else f"belongs to ranks {list(owners)}")
        )


# ---------------------------------------------------------------------- the fast path


Place = Callable[..., tuple[Any, tuple[Any, ...]] | None]
"""As :attr:`Ready.place`."""


class Ready(NamedTuple):
    """A call that a context has made, as it is made again.

    Attributes:
        made: the kind of call, by which it is noted.
        place: ``(tensors) -> (result, what run takes)``; makes results. None if the tensors don't lie as they must.
        run: launches, given the handle of the stream.
        conjugates: whether to ask for conjugates, which only complex tensors can be.
    """

    made: Made
    place: Place
    run: Callable[..., None]
    conjugates: bool = True


def again(ctx: CollectiveContext, ready: Ready, *tensors: torch.Tensor) -> Any:
    """Make a call like an earlier one and return its result; None if anything has changed: then nothing is done."""
    device = ctx.device
    kind, place, run, conjugates = ready
    for tensor in tensors:  # the questions of `usable`, without the time of a call
        if not (tensor.device == device and tensor.layout is _STRIDED and tensor.is_contiguous()):
            return None
        if tensor.is_neg() or (conjugates and tensor.is_conj()) or (not tensor.data_ptr() and tensor.numel()):
            return None
    placed = place(*tensors)
    if placed is None or (stream := ctx.enter()) is None:
        return None
    result, given = placed
    log = ctx.calls.log  # as by `noted`
    log.append(kind)
    if len(log) >= MOST:
        ctx.calls.forget()
    try:
        run(stream, *given)
    except BaseException as error:
        ctx.fail(kind.operation, error)
        raise
    return result


def make(
    spec: Collective,
    tensor: Any,
    *,
    op: Any = None,
    out: Any = None,
    group: runtime.Group = None,
    ctx: Any = None,
    algorithm: Any = "auto",
    symmetric: Any = False,
    in_place: bool = False,
    names: tuple[str, str] = ("tensor", "out"),
    gradient: bool = False,
) -> torch.Tensor:
    """Make a call of a dense collective, for its public functions, whose arguments come as the caller gave them.

    Args:
        in_place: peers write to the caller's buffer, which is ``tensor``.
        names: the caller's names of ``tensor`` and ``out``, for errors.
        gradient: the result will have one, hence a backward pass; compared in debug mode.
    """
    given = ctx
    if ctx is None:
        arguments.tensor(names[0], tensor)
    elif group is not None:
        raise ValueError(f"{spec.name}: group must be None with ctx, which has a group already; got {group!r}")
    name = op if op is None or (type(op) is str and op in OPERATIONS) else operation_name(op)
    if ctx is None:
        ctx = pooled(spec, tensor, group, op=name, algorithm=algorithm)
    requiring = getattr(tensor, "requires_grad", False) and torch.is_grad_enabled()
    key: Hashable = None
    try:
        if symmetric is False or symmetric is True:
            key = spec.name, algorithm, name, symmetric, in_place, tensor.shape, tensor.dtype
            if out is not None:
                key = key, out.shape, out.dtype
            if symmetric or in_place:  # memory at this address is what it was until some is released
                key = key, (tensor if in_place else out).data_ptr(), ctx.job.arena.releases
        ready = ctx.known.get(key)
    except (AttributeError, RuntimeError, TypeError):  # no tensor, one without a shape, or what can't be a key
        key = ready = None
    if ready is not None and not requiring:
        made = again(ctx, ready, tensor) if out is None else again(ctx, ready, tensor, out)
        if made is not None:
            return made
    check_context(ctx)
    if requiring and out is None and not in_place:
        plain: dict[str, Any] = {"op": op, "ctx": ctx, "algorithm": algorithm, "symmetric": symmetric}
        made = make(spec, tensor.detach(), **plain, names=names, gradient=True)
        return _attached(spec, tensor, made, name, ctx.world_size, group, given)
    return _first(spec, ctx, key, tensor, out, algorithm, op, name, symmetric, in_place, names, gradient, requiring)


def spec_of(name: str) -> Collective:
    """Return the dense collective of this name, see :data:`tdcoll.base.limits.COLLECTIVES`."""
    spec: Collective = import_module(f"tdcoll.collectives.{name}.spec").SPEC
    return spec


# ---------------------------------------------------------------------- gradients


@never_compiled  # a backward pass may begin within a compiled function
class _Attached(torch.autograd.Function):
    """The node of the autograd graph for a result ``made``, which has been computed from ``tensor``.

    ``derivative`` takes the contiguous gradient of ``made`` to that of ``tensor``, of as many elements. The collective
    is not called in here, because in the simulator's ``World`` other ranks would see this rank's grad mode.
    """

    @staticmethod
    def forward(
        node: Any, tensor: torch.Tensor, made: torch.Tensor, derivative: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        node.mark_dirty(made)  # `made` itself is returned, no view of it
        node.shape, node.derivative = tensor.shape, derivative
        return made

    @staticmethod
    def backward(node: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return node.derivative(grad.resolve_conj().resolve_neg().contiguous()).view(node.shape), None, None


def _attached(
    spec: Collective, tensor: torch.Tensor, made: torch.Tensor, op: str | None, world: int, group: Any, ctx: Any
) -> torch.Tensor:
    """Return a result that was ``made`` from ``tensor`` with its gradient, by calls with the caller's group or ctx."""

    def adjoint(spec: Collective, grad: torch.Tensor, op: str | None) -> torch.Tensor:
        return make(spec, grad, op=op, group=group, ctx=ctx)

    back = functools.partial(derivative, spec, op=op, world=world, call=adjoint)
    attached: torch.Tensor = _Attached.apply(tensor, made, back)
    return attached


def derivative(
    spec: Collective,
    grad: torch.Tensor,
    op: Any,
    world: int,
    call: Callable[[Collective, torch.Tensor, str | None], torch.Tensor],
) -> torch.Tensor:
    """Return the gradient of a call's tensor, given that of its result.

    Args:
        call: ``(adjoint, gradient, op) ->`` the result of a call of the adjoint collective.

    Raises:
        ValueError: the reduction has no derivative.
    """
    adjoint = spec_of(spec.adjoint)
    if not spec.reduces:
        op = "sum"
    elif op not in ("sum", "mean"):
        raise ValueError(
            f"op must be 'sum' or 'mean' where a gradient goes back through tdcoll.{spec.name}; got {op!r}. Pass "
            "tensor.detach(), or make the call under torch.no_grad(), if no gradient is wanted"
        )
    if not adjoint.reduces:
        return call(adjoint, grad / world if op == "mean" else grad, None)
    if grad.is_complex():
        return torch.view_as_complex(call(adjoint, torch.view_as_real(grad), op))
    return call(adjoint, grad, op)


# ---------------------------------------------------------------------- the slow path


def _first(
    spec: Collective,
    ctx: CollectiveContext,
    key: Hashable,
    tensor: Any,
    out: Any,
    algorithm: Any,
    op: Any,
    name: Any,
    symmetric: Any,
    in_place: bool,
    names: tuple[str, str],
    gradient: bool,
    refused: bool,
) -> torch.Tensor:
    """Check everything, and make the call; return its result. Calls with this key are then made by :func:`again`."""
    operation = f"{spec.name}_" if in_place else spec.name
    tensors = (tensor,) if out is None else (tensor, out)
    shared = 0 if in_place else 1  # which of them peers access

    def checked() -> tuple[Launches, Ready, tuple[Any, tuple[Any, ...]]]:
        check_tensor(names[0], tensor, ctx.device)
        if refused:
            raise ValueError(
                f"{names[0]} must not require grad where the call writes into a given tensor, which would have no "
                f"gradient; let the call make its result, pass {names[0]}.detach(), or make the call under "
                "torch.no_grad()"
            )
        options = None
        if spec.reduces:
            check_dtype(names[0], tensor)
            options = tensor.dtype, check_operation(op, tensor.dtype)
        _check_result(spec, tensor, out, ctx, names, in_place)
        arguments.instance("symmetric", symmetric, bool, "a bool")
        if symmetric or in_place:
            if shared >= len(tensors):
                raise ValueError(f"{names[1]} must be given with symmetric=True: one that tdcoll.empty() has made")
            _check_symmetric(names[shared], tensors[shared], ctx)
        into = symmetric and spec.in_place and not in_place  # peers write into ``out``, as they do in place
        in_result = in_place or into
        segment = tensor.nbytes // ctx.world_size if in_place else spec.segment_bytes(tensor.nbytes, ctx.world_size)
        how: dict[str, Any] = {"options": options, "in_place": in_result, "symmetric": symmetric and not into}
        launches = launches_of(spec, ctx, segment, algorithm, **how)
        ready = ctx.known.get(key)
        if ready is None:
            run = functools.partial(_bring_and_run, ctx.rank, ctx.world_size, launches.run) if into else launches.run
            if in_result:
                place = _reaching(ctx, segment, launches.in_buffer)
            else:
                place = _making(spec, tensor, ctx) if out is None else _filling(spec, ctx, segment)
            ready = Ready(kind_of(operation, *launches.counts), place, run, tensor.dtype.is_complex)
        placed = ready.place(*tensors)
        assert placed is not None
        return launches, ready, placed

    facts = {
        "bytes": strided_bytes(tensor),
        "dtype": getattr(tensor, "dtype", None),
        "algorithm": algorithm,
        "offset in the symmetric heap": _place_of((*tensors, None)[shared], ctx) if symmetric or in_place else None,
        "symmetric": symmetric,
        "requires_grad": gradient,
        **({"op": name} if spec.reduces else {}),
    }
    with ctx.calling(operation, facts, checked) as (launches, ready, (result, given)):
        launches.wait_for_loads()
        ctx.noted(ready.made)
        ready.run(ctx.current_stream(), *given)
    if key is not None and not ctx.capturing:
        ctx.once(key, lambda: ready)
    return result


def _check_result(
    spec: Collective, tensor: torch.Tensor, out: Any, ctx: CollectiveContext, names: tuple[str, str], in_place: bool
) -> None:
    """Raise unless ``tensor`` has a result, and ``out`` is None or can take it."""
    world, (given, taken) = ctx.world_size, names
    shapes = spec.results(tensor.shape, world)
    if not shapes or (in_place and (not tensor.dim() or tensor.shape[0] % world)):
        sizes = list(tensor.shape)
        raise ValueError(f"{given}'s first dimension must be divisible by the {world} rank(s); got shape {sizes}")
    if out is None:
        return
    check_tensor(taken, out, ctx.device)
    if out.dtype != tensor.dtype or tuple(out.shape) not in map(tuple, shapes):
        allowed = " or ".join(str(list(shape)) for shape in dict.fromkeys(map(tuple, shapes)))
        raise ValueError(f"{taken} must be {tensor.dtype} of shape {allowed}; got {out.dtype} of {list(out.shape)}")
    segment = spec.segment_bytes(tensor.nbytes, world)
    at = spec.may_overlap_at(segment, ctx.rank)
    if overlap(tensor.data_ptr(), tensor.nbytes, out.data_ptr(), out.nbytes, at):
        part, whole, begin = taken, given, out.data_ptr() - tensor.data_ptr()
        if spec.gathers:
            part, whole, begin = given, taken, -begin
        allowed = f", except as {whole}'s own segment at byte {abs(at)}" if at is not None else ""
        if not (spec.gathers or spec.scatters):
            allowed = f", except to be {whole}"
        raise ValueError(f"{part} must not overlap {whole}{allowed}; it lies at byte {begin} of {whole}")


# ---------------------------------------------------------------------- where calls are placed


def _reaching(ctx: CollectiveContext, segment: int, in_buffer: bool) -> Place:
    """Place calls whose peers write into the tensor, or an ``out`` that gets a copy of this rank's segment first."""
    own, total = ctx.rank * segment, ctx.world_size * segment
    inbox = ctx.inbox.data_ptr()

    def place(tensor: torch.Tensor, out: torch.Tensor | None = None) -> tuple[Any, tuple[Any, ...]] | None:
        whole = tensor if out is None else out
        base = whole.data_ptr() or inbox  # a tensor of no bytes has no address
        addresses = (base + own, 0, base) if in_buffer else (base + own, base)
        if out is None:
            return whole, addresses
        return None if overlap(tensor.data_ptr(), segment, base, total, own) else (out, (tensor, out, *addresses))

    return place


def _bring_and_run(
    rank: int, world: int, run: Callable[..., None], stream: int, tensor: torch.Tensor, out: torch.Tensor, *given: int
) -> None:
    """Copy this rank's segment to its place in ``out``, on the current stream, if it isn't there; then run."""
    own = out.detach().view(world, tensor.numel())[rank]
    if own.data_ptr() != tensor.data_ptr():
        own.copy_(tensor.detach().view(-1))
    run(stream, *given)


def _making(spec: Collective, like: torch.Tensor, ctx: CollectiveContext) -> Place:
    """Place calls that make their result, of tensors like this one."""
    # Sizes one by one take half the time of a tuple. A scalar has none, and is made of the tuple.
    sizes = spec.results(like.shape, ctx.world_size)[0] or [()]
    empty = functools.partial(torch.empty, *sizes, dtype=like.dtype, device=ctx.device)

    def place(tensor: torch.Tensor) -> tuple[Any, tuple[Any, ...]] | None:
        made = empty()
        return made, (tensor.data_ptr(), made.data_ptr())

    return place


def _filling(spec: Collective, ctx: CollectiveContext, segment: int) -> Place:
    """Place calls whose result is given."""
    world = ctx.world_size
    nbytes, total = (segment * world if whole else segment for whole in (spec.scatters, spec.gathers))
    at = spec.may_overlap_at(segment, ctx.rank)

    def place(tensor: torch.Tensor, out: torch.Tensor) -> tuple[Any, tuple[Any, ...]] | None:
        source, target = tensor.data_ptr(), out.data_ptr()
        # As by `overlap`, without the time of a call.
        if target < source + nbytes and source < target + total and target - source != at:
            return None
        return out, (source, target)

    return place


def unchecked(
    spec: Collective, tensor: torch.Tensor, ctx: CollectiveContext, out: torch.Tensor, op: str | None = None
) -> Ready:
    """Make a call for a caller that has checked both tensors, which may have any shapes.

    Returns:
        The record with which :func:`again` makes calls, of tensors of the same numbers of elements and dtypes.
    """
    segment = spec.segment_bytes(tensor.nbytes, ctx.world_size)
    options = (tensor.dtype, op) if spec.reduces else None
    facts = {"bytes": tensor.nbytes, "dtype": tensor.dtype, "op": op}
    with ctx.calling(spec.name, facts, lambda: launches_of(spec, ctx, segment, options=options)) as launches:
        place, conjugates = _filling(spec, ctx, segment), tensor.dtype.is_complex
        ready = Ready(kind_of(spec.name, *launches.counts), place, launches.run, conjugates)
        ctx.noted(ready.made)
        launches(tensor.data_ptr(), out.data_ptr())
    return ready
