# SPDX-License-Identifier: Apache-2.0
"""How every call is made, of any :class:`~tdcoll.calls.operation.Operation`: :func:`run`.

The time of a small call is the host's. A context therefore remembers a
:class:`~tdcoll.calls.operation.PreparedCall` for each kind of call. A repeated call is looked up by
its shapes, dtypes and arguments. Everything else can change between calls, so it is checked again:

- the device, layout, contiguity, sign and memory of each tensor (:func:`repeat_call`);
- where the tensors lie, and whether they require grad (:meth:`.PreparedCall.bind`);
- the context, the stream and the current device (:meth:`.CallChecks.check_fast`).

This fast path raises no errors of its own. If anything has changed, it does nothing, and the slow
path (:func:`make_call`) finds out what.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

from tdcoll import runtime
from tdcoll.base.call_log import MOST_CALLS
from tdcoll.calls.operation import Operation, PreparedCall, Request

_STRIDED = torch.strided


def run(
    operation: Operation,
    tensors: tuple[Any, ...],
    options: Any,
    group: runtime.Group = None,
    ctx: Any = None,
    names: tuple[str, ...] = (),
) -> Any:
    """Make a call and return its result. The arguments come as the caller passed them.

    Args:
        tensors, options, group, ctx, names: See :class:`~tdcoll.calls.operation.Request`.
    """
    known_ctx: Any = None
    prepared: PreparedCall | None = None
    try:
        if ctx is None:
            known_ctx = _own_context_if_made(operation, group)
        elif group is None:
            known_ctx = ctx
        prepared = known_ctx.cache.get(operation.key(tensors, options, known_ctx))
    except (AttributeError, RuntimeError, TypeError, ValueError):
        pass  # The arguments aren't valid, or there is no context yet.
    if prepared is not None:
        result = repeat_call(known_ctx, prepared, tensors)
        if result is not None:
            return result
    _, result = make_call(operation, Request(tensors, options, group, ctx, names))
    return result


def _own_context_if_made(operation: Operation, group: runtime.Group) -> Any:
    """Return tdcoll's own context of a group; None if it has yet to be made, or looked at."""
    job = runtime.current()
    own = job.contexts.get((operation.name, job.ranks_of(group)))
    # Graphs may still use contexts that calls have outgrown, which `own_context` looks at.
    return None if own is None or own.outgrown else own.context


def repeat_call(ctx: Any, prepared: PreparedCall, tensors: tuple[torch.Tensor, ...]) -> Any:
    """Make a call like an earlier one and return its result; None if anything has changed.

    If it returns None, nothing has been launched.
    """
    device = ctx.device
    conjugates = prepared.complex
    for tensor in tensors:  # as `tensors.usable` checks, without the time of a call
        if not (tensor.device == device and tensor.layout is _STRIDED and tensor.is_contiguous()):
            return None
        if tensor.is_neg() or (conjugates and tensor.is_conj()):
            return None
        if not tensor.data_ptr() and tensor.numel():
            return None
    bound = prepared.bind(*tensors)
    if bound is None:
        return None
    stream = ctx.check_fast()
    if stream is None:
        return None
    result, frame = bound
    calls = ctx.calls
    log = calls.log
    log.append(prepared.record)
    if len(log) >= MOST_CALLS:
        calls.forget_older()
    try:
        prepared.launch(stream, *frame)
    except BaseException as error:
        ctx.fail(prepared.label, error)
        raise
    return result


def make_call(
    operation: Operation, request: Request, *, trusted: bool = False
) -> tuple[PreparedCall | None, Any]:
    """Find or make the context, check everything, agree with the other ranks, and make the call.

    The context remembers the call. If a launch fails or is interrupted, the context refuses later
    calls (:meth:`.CallChecks.fail`).

    Args:
        trusted: The caller has checked the tensors, which may have any shapes, and remembers the
            call itself.

    Returns:
        The prepared call for :func:`repeat_call` (None if the result has a gradient), and
        the result.

    Raises:
        ContextError, NotInitializedError, CollectiveTimeout: See :meth:`.CallChecks.overcome`.
        RankMismatchError: (debug) Ranks disagree, or another rank's arguments are wrong.
        TypeError, ValueError, TdcollError: An argument is wrong on this rank.
    """
    ctx = request.ctx
    if ctx is None:
        operation.check_early(request)
        ctx = operation.own_context(request)
    elif request.group is not None:
        raise ValueError(
            f"{operation.name}: group must be None with ctx, which has a group already; got "
            f"{request.group!r}"
        )
    else:
        operation.check_context(ctx)
    if operation.wants_gradient(request):
        return None, operation.with_gradient(request)
    key: Hashable = None
    if not trusted:
        try:
            key = operation.key(request.tensors, request.options, ctx)
            hash(key)
        except (AttributeError, RuntimeError, TypeError, ValueError):
            key = None  # The arguments aren't valid, about which `check` raises.
    label = operation.label(request)
    facts = operation.agreement(request, ctx) if ctx.debug else {}

    # An error on one rank is an error on all ranks that compare the call.
    obstacle = ctx.find_obstacle(label)
    comparing = ctx.compares(label, facts)
    problem: Exception | None = None
    prepared: Any = None
    bound: Any = None
    try:
        ctx.overcome(obstacle, label)
        if not trusted:
            operation.check(request, ctx)
        prepared = ctx.cache.get(key)
        if prepared is None:
            prepared = operation.prepare(request, ctx)
        bound = prepared.bind(*request.tensors)
        assert bound is not None, "the tensors have been checked"
    except Exception as error:
        if not comparing:
            raise
        problem = error
    if comparing:
        ctx.compare(label, facts, problem)

    result, frame = bound
    try:
        if prepared.variant is not None:
            ctx.wait_for_loads(label, prepared.variant)
        ctx.note(prepared.record)
        prepared.launch(ctx.current_stream(), *frame)
    except operation.errors_alike:
        raise
    except BaseException as error:
        ctx.fail(label, error)
        raise
    # Not earlier, because a call about which the ranks disagree is compared again.
    if key is not None:
        ctx.remember(key, prepared)
    return prepared, result
