# SPDX-License-Identifier: Apache-2.0
"""Sparse gradients over tdcoll for models that DistributedDataParallel wraps: a communication
hook."""

import threading
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tdcoll.base.torch_internals import living_ddp, never_compiled
from tdcoll.distributed.sparse_pass import Pass, group_of, stream_of

_scanning = threading.Lock()
"""Held by the thread that looks for models."""


class _Model:
    """A model that a DistributedDataParallel wraps. ``now``: its backward pass, from the first
    sparse gradient to DDP's last bucket."""

    now: Pass | None = None


_models: "weakref.WeakKeyDictionary[nn.Module, _Model]" = weakref.WeakKeyDictionary()
_by_parameter: dict[int, tuple[Any, Any]] = {}
"""``id -> (parameter, its model)``, as weak references: PyTorch's dictionary of tensors takes
several times as long. There is no model for a wrapper whose last bucket may not be told: then no
call can wait for it."""


def _model_of(parameter: torch.Tensor) -> _Model | None:
    """Return the model that a parameter of a DDP bucket is of, since backward passes of several may
    run at the same time; None if it isn't known, or has no model."""
    for scan in (True, False):
        of, model = _by_parameter.get(id(parameter), (_nothing, _nothing))
        if of() is parameter:
            if model is None:
                return None
            found = model()
            if found is not None:
                return found
        if scan:
            _scan()
    return None


def _nothing() -> None:
    """Stands for a weak reference to what is gone."""


def _scan() -> None:
    """Find the models that are wrapped now, and forget those that are gone."""
    global _by_parameter
    found: dict[int, tuple[Any, Any]] = {}
    with _scanning:
        for wrapper in living_ddp(nn.Module()):
            # In its first pass such a graph calls every bucket the first one, and the others may
            # leave out the last.
            odd = getattr(wrapper, "static_graph", False) or getattr(
                wrapper, "skip_all_reduce_unused_params", False
            )
            model = None if odd else weakref.ref(_models.setdefault(wrapper.module, _Model()))
            found.update(
                (id(one), (weakref.ref(one), model)) for one in wrapper.module.parameters()
            )
        _by_parameter = found


# DDP looks at these annotations themselves: no `from __future__ import annotations` in this file.
@never_compiled
def sparse_hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Communication hook for ``DistributedDataParallel``: sparse gradients by tdcoll, dense ones as
    without a hook.

    ``model.register_comm_hook(None, tdcoll.distributed.sparse_hook)`` after
    ``tdcoll.initialize()``, with any backend. Gradients are averaged. DDP gives every sparse
    gradient a bucket of its own; the hook keeps them until the last bucket of the pass is there,
    and reduces all of them by one call (or a few, if the heap is too small for all). With
    ``static_graph``, ``skip_all_reduce_unused_params`` or a wrapper that is older than the job,
    each has a call of its own. Every rank has to use every sparse table in every backward pass; see
    :class:`SparseGradientReducer` where that does not hold.

    >>> torch.distributed.init_process_group("tdcoll")
    >>> model = torch.nn.parallel.DistributedDataParallel(torch.nn.Embedding(4, 2, sparse=True))
    >>> model.register_comm_hook(None, tdcoll.distributed.sparse_hook)
    >>> model(torch.tensor([1])).sum().backward()

    Args:
        state: the process group of the model, or None for the default one.
        bucket: ``torch.distributed.GradBucket``.

    Returns:
        A future of the averaged gradient.

    Raises:
        NotInitializedError: before ``tdcoll.initialize()``.
    """
    gradient = bucket.buffer()
    parameters = bucket.parameters()
    model = _model_of(parameters[0]) if parameters else None
    if model is not None and bucket.index() == 0:  # those of a pass that was aborted are of no use
        model.now = None
    future: Any
    if gradient.layout != torch.sparse_coo:
        group = group_of(state)
        gradient.div_(group.size())
        work = dist.all_reduce(gradient, group=group, async_op=True)
        future = work.get_future().then(lambda done: done.value()[0])
    else:
        gathered = (model and model.now) or Pass(group_of(state))
        gathered.add(gradient, stream_of(gradient))
        future = gathered.future()
        if model is None:
            gathered.end()
        else:
            model.now = gathered
    if model is not None and bucket.is_last() and model.now is not None:
        ready = model.now
        model.now = None
        ready.end()  # DDP has all gradients, so the wait for the sizes of results holds up nothing
    return future
