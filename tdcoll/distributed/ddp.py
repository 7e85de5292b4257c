# SPDX-License-Identifier: Apache-2.0
"""Sparse gradients over tdcoll for training code that keeps its process group: a DDP hook and a
reducer of its own."""

import contextlib
import gc
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tdcoll import runtime
from tdcoll.base import arguments
from tdcoll.base.errors import NotInitializedError
from tdcoll.base.torch_internals import living_ddp, never_compiled, tell_ddp_to_ignore
from tdcoll.distributed.call import Call, contiguous, is_plain, write
from tdcoll.distributed.fallback import sparse_sum_by_gather
from tdcoll.distributed.handlers import GroupInfo
from tdcoll.distributed.options import Options
from tdcoll.distributed.queues import Queue, QueuedCall, TaskWork
from tdcoll.distributed.sparse import SparseAllReduce
from tdcoll.distributed.work import backend_errors, current_stream, record_streams

_log = logging.getLogger("tdcoll")

_FIRST_ROWS = 1024
"""Rows of a table per rank that a reducer's context begins with."""

_making = threading.Lock()
"""Held by the thread that looks for the object of a group, because two of one group would need two
contexts."""


def _group(requested: Any) -> Any:
    group = dist.group.WORLD if requested is None else requested
    if group is None:
        raise ValueError(
            "there is no default process group; call init_process_group first, or pass a group"
        )
    return group


def _sums(group: Any) -> SparseAllReduce:
    """Return the object that reduces a group's sparse gradients. The job keeps it."""
    owner = runtime.current()
    key = ("tdcoll.distributed", owner.ranks_of(group))
    with _making:
        found: SparseAllReduce | None = owner.contexts.get(key)
        if found is None:
            queue = Queue(owner.control.part("sparse gradients of " + "-".join(map(str, key[1]))))
            found = SparseAllReduce(GroupInfo(owner, key[1], owner.timeout_s, Options()), queue)
            if owner.device.type == "cuda":
                queue.stream = torch.cuda.Stream(owner.device)
            owner.contexts[key] = found
    return found


class _Pass:
    """The sparse gradients of one model in one backward pass, which are reduced together.

    A model has dozens of tables, so this does as little as possible for each of them.

    Attributes:
        group: the process group.
        task: the call, if the queue makes it.
    """

    task: QueuedCall | None = None

    def __init__(self, group: Any) -> None:
        self.sums = _sums(group)
        self.group = group
        self._gradients: list[torch.Tensor] = []
        self._streams: dict[int, Any] = {}
        """On a GPU: the streams of gradients."""
        self._futures: list[Any] = []
        """A future of the mean of each gradient, for DDP."""

    def add(self, gradient: torch.Tensor, stream: Any) -> None:
        """Take a sparse gradient, which is behind what ``stream`` has now."""
        self._gradients.append(gradient)
        if stream is not None:
            self._streams[stream.stream_id] = stream

    def future(self) -> Any:
        """Return a future of the mean of the gradient that was added last."""
        future: Any = torch.futures.Future()
        self._futures.append(future)
        return future

    def end(self) -> None:
        """Reduce the gradients, and set their futures.

        The futures know of no streams, which takes the host less time: the current stream is behind
        all results, and at the end of a backward pass PyTorch orders the caller's stream behind
        that one.
        """
        for future, gradient, mean in zip(
            self._futures, self._gradients, self.reduce(), strict=True
        ):
            # DDP copies a result into the gradient, unless it is the gradient itself
            gradient.data = mean
            future.set_result(gradient)

    def submit(self) -> None:
        """Let the queue's thread make the call beside the backward pass. If the process group has
        to make it, :meth:`reduce` does, since the backward pass makes other calls of the group."""
        queue = self.sums.queue
        if self.sums.why_unsupported(Call(self._gradients, self._gradients, "mean")) is None:
            events = [stream.record_event() for stream in self._streams.values()]
            if queue.stream is not None:
                # a reducer may be dropped before it waits
                record_streams(self._gradients, queue.stream)

            def make() -> list[torch.Tensor]:
                for event in events:
                    queue.stream.wait_event(event)
                return self._reduce(self._gradients)

            self.task = QueuedCall(make, queue.stream, abort=self.sums.abort)
            queue.submit(self.task)

    def reduce(self) -> list[torch.Tensor]:
        """Return the mean of each gradient. On a GPU the current stream waits for them, and the
        gradients' streams for what reads these."""
        if self.task is not None:
            stream = self.sums.queue.stream
            others = list(self._streams.values())
        else:
            self.sums.queue.drain()
            stream = _stream_of(self._gradients[0])
            others = [other for other in self._streams.values() if other != stream]
            for other in others:
                stream.wait_stream(other)
        try:
            if self.task is None:
                with backend_errors:
                    return self._reduce(self._gradients)
            TaskWork(self.task).wait()
            return self.task.result
        finally:
            for other in others:
                other.wait_stream(stream)

    def _reduce(self, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the mean of each, on the current stream."""
        call = Call(gradients, gradients, "mean")
        why = self.sums.why_unsupported(call)
        if why is None:
            why = self.sums.prepare(call)
            if why is None:
                return self.sums.reduce(gradients, "mean")
        elif len(gradients) > 1:
            return self._reduce_apart(gradients)
        _log.warning("sparse gradients go through the process group: %s", why)
        return [sparse_sum_by_gather(self.group, gradient, "mean") for gradient in gradients]

    def _reduce_apart(self, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the mean of each, where the refused ones have calls of their own."""
        together: list[int] = []
        means = list(gradients)
        for place, gradient in enumerate(gradients):
            if self.sums.why_unsupported(Call([gradient], [gradient], "mean")) is None:
                together.append(place)
        if len(together) == len(gradients):  # They are refused together only.
            together = []
        if together:
            made = self._reduce([gradients[place] for place in together])
            for place, mean in zip(together, made, strict=True):
                means[place] = mean
        for place in sorted(set(range(len(gradients))) - set(together)):
            (means[place],) = self._reduce([gradients[place]])
        return means


def _stream_of(tensor: torch.Tensor) -> Any:
    """Return the current stream of a tensor's GPU; None without one."""
    return current_stream(tensor.device.index) if tensor.is_cuda else None


class _Model:
    """A model that a DistributedDataParallel wraps. ``now``: its backward pass, from the first
    sparse gradient to DDP's last bucket."""

    now: _Pass | None = None


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
    with _making:
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
        group = _group(state)
        gradient.div_(group.size())
        work = dist.all_reduce(gradient, group=group, async_op=True)
        future = work.get_future().then(lambda done: done.value()[0])
    else:
        gathered = (model and model.now) or _Pass(_group(state))
        gathered.add(gradient, _stream_of(gradient))
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


# ---------------------------------------------------------------------- without DDP


class _Table:
    """One table and what becomes of its gradient in the current step."""

    def __init__(self, name: str, parameter: nn.Parameter) -> None:
        self.name = name
        self.parameter = parameter
        self.hook: Any = None
        self.gradient: Any = None
        """This rank's gradient; None until it is there."""
        self.stream: Any = None
        """On a GPU: the stream of ``gradient``."""

    def watch(self, take: Callable[[Any], None]) -> None:
        """Call ``take`` with this table whenever a backward pass has left a gradient, also if it is
        frozen now."""
        frozen = self.frozen
        self.parameter.requires_grad_()  # PyTorch refuses hooks on what has no gradients
        self.hook = self.parameter.register_post_accumulate_grad_hook(lambda _: take(self))
        self.parameter.requires_grad_(not frozen)

    @property
    def frozen(self) -> bool:
        """Whether this rank brings no gradient of it now, and wants none."""
        return not self.parameter.requires_grad

    def empty(self) -> torch.Tensor:
        """A gradient without rows."""
        like = self.parameter
        return torch.sparse_coo_tensor(
            torch.empty((1, 0), dtype=torch.int64, device=like.device),
            like.detach().new_empty((0, *like.shape[1:])),
            like.shape,
            is_coalesced=True,
            check_invariants=False,
        )


class SparseGradientReducer:
    """Averages the gradients of a module's sparse embedding tables over the ranks, while the
    backward pass runs.

    For users who keep their backend, with ``DistributedDataParallel`` for the rest of the module or
    without::

        tdcoll.initialize()
        reducer = SparseGradientReducer(model)  # before DDP: DDP then leaves the tables alone
        ddp = DistributedDataParallel(model)
        loss(ddp(batch)).backward()
        reducer.finish()                        # before clipping, GradScaler.unscale_ or step, optimizer.step
        optimizer.step()

    One call reduces all that the heap has room for: on a stream of its own as soon as all tables
    have gradients, or in :meth:`finish` if a table was not used. A rank on which a table was not
    used, has no rows or is frozen brings none. A table that no rank has rows of keeps no gradient.
    Tables may be frozen and unfrozen between steps. A table that two modules share is one table.

    The weights are made equal to those of rank 0.

    >>> tdcoll.initialize()
    >>> torch.distributed.is_initialized() or torch.distributed.init_process_group("gloo", rank=0, world_size=1)
    >>> table = torch.nn.Embedding(4, 2, sparse=True)
    >>> reducer = tdcoll.distributed.SparseGradientReducer(table)
    >>> table(torch.tensor([1])).sum().backward()
    >>> reducer.finish()

    Args:
        module: whose ``nn.Embedding`` and ``nn.EmbeddingBag`` with ``sparse=True`` are meant.
        group: the process group; None for the default one.
        rows_per_rank: different rows of all tables that one rank brings, as far as is known; memory
            grows if needed.

    Raises:
        TypeError: ``module`` is no module.
        ValueError: there are no such tables, or another reducer has one of them already, or a
            DistributedDataParallel that is part of the module or was made after
            ``tdcoll.initialize()``.
        NotInitializedError: before ``tdcoll.initialize()``.
        HeapExhaustedError: no room in the symmetric heap.
    """

    def __init__(
        self, module: nn.Module, group: Any = None, *, rows_per_rank: int = _FIRST_ROWS
    ) -> None:
        arguments.instance("module", module, nn.Module, "an nn.Module")
        arguments.whole("rows_per_rank", rows_per_rank, 1)
        group = _group(group)
        tables: dict[nn.Parameter, str] = {}
        for prefix, part in module.named_modules():
            if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.sparse:
                weight: Any = part.weight
                tables.setdefault(weight, f"{prefix}.weight" if prefix else "weight")
        if not tables:
            raise ValueError("module has no nn.Embedding or nn.EmbeddingBag with sparse=True")
        self._tables = [_Table(name, parameter) for parameter, name in reversed(tables.items())]
        _refuse_those_of_ddp(module, tables)
        for other in list(_reducers):
            shared = sorted(
                tables[table.parameter] for table in other._tables if table.parameter in tables
            )
            if shared and not other._sums.members.job.closed:
                raise ValueError(
                    f"SparseGradientReducer: {', '.join(shared)} has a reducer already; close() that one before you "
                    "make another"
                )
            if shared:
                other.close()
        self._group = group
        self._sums: SparseAllReduce = _sums(group)
        row_bytes = max(p[:1].numel() * p.element_size() for p in tables)
        self._sums.open(rows_per_rank, row_bytes)
        self._pass: _Pass | None = None
        """The call of this step; None until there are gradients of all tables."""
        self._synchronising = True
        for table in self._tables:
            table.watch(self._take)
        _reducers.add(self)
        first = dist.get_global_rank(group, 0)
        for parameter in tables:
            # other backends read and write memory from its address on
            weights = contiguous(parameter.detach(), True)
            dist.broadcast(weights, first, group=group)
            if not is_plain(parameter):
                write(parameter, weights)
        parameters = module.named_parameters(remove_duplicate=False)
        tell_ddp_to_ignore(module, [name for name, parameter in parameters if parameter in tables])

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside only accumulate; the next one outside is reduced together with
        them."""
        before = self._synchronising
        self._synchronising = False
        try:
            yield
        finally:
            self._synchronising = before

    def _take(self, table: _Table) -> None:
        """The gradient of a table is there."""
        if not self._synchronising:
            return
        self._refuse_after_the_job()
        if table.gradient is not None:
            raise RuntimeError(
                f"SparseGradientReducer: a second backward pass reached {table.name} before finish(); call finish() "
                "after each, or accumulate in `with reducer.no_sync():`"
            )
        self._hold(table)
        for other in self._tables:
            if other.gradient is None and other.frozen:
                self._hold(other)
        if all(other.gradient is not None for other in self._tables):
            self._begin().submit()  # the backward pass may have more to do than these tables

    def _hold(self, table: _Table) -> None:
        """Take this rank's gradient away from the table, or one without rows if there is none or it
        is frozen."""
        gradient = None if table.frozen else table.parameter.grad
        if gradient is not None and gradient.layout != torch.sparse_coo:
            raise TypeError(
                f"SparseGradientReducer: the gradient of {table.name} is {gradient.layout}: a table that is also used "
                "in another way than by lookups with sparse=True has a dense gradient, which DDP reduces"
            )
        table.gradient = table.empty() if gradient is None else gradient
        if not table.frozen:
            table.parameter.grad = None
        table.stream = _stream_of(table.gradient)

    def _begin(self) -> _Pass:
        """Return the call of this step: tables in the same order on all ranks, whatever order
        gradients come in."""
        self._pass = made = _Pass(self._group)
        for table in self._tables:
            made.add(table.gradient, table.stream)
        return made

    def finish(self) -> None:
        """Wait until every table's ``grad`` is the average over the ranks. Collective, once per
        step.

        On a GPU the current stream waits, and the host only for the sizes of the results.

        Raises:
            RuntimeError: inside of :meth:`no_sync`.
            NotInitializedError: after ``tdcoll.finalize()``.
            CollectiveTimeout: a rank did not take part.
            HeapExhaustedError: there is no room for the rows of one table; on all ranks.
        """
        if not self._synchronising:
            raise RuntimeError("SparseGradientReducer: finish() inside of no_sync()")
        self._refuse_after_the_job()
        for table in self._tables:
            if table.gradient is None:
                self._hold(table)
        try:
            means = (self._pass or self._begin()).reduce()
            for table, mean in zip(self._tables, means, strict=True):
                if not table.frozen:
                    table.parameter.grad = mean if mean._nnz() else None
        finally:
            self._pass = None
            for table in self._tables:
                table.gradient = table.stream = None

    def _refuse_after_the_job(self) -> None:
        if self._sums.members.job.closed:
            raise NotInitializedError(
                "SparseGradientReducer: made before tdcoll.finalize(), which has ended that job; make a new one"
            )

    def close(self) -> None:
        """Take the hooks off: gradients stay this rank's, and tables may have another reducer.
        Local, idempotent."""
        _reducers.discard(self)
        for table in self._tables:
            table.hook.remove()


_reducers: "weakref.WeakSet[SparseGradientReducer]" = weakref.WeakSet()
"""Those that have hooks."""


def _refuse_those_of_ddp(module: nn.Module, tables: dict[nn.Parameter, str]) -> None:
    """Raise if a DistributedDataParallel that is alive reduces one of these tables as well."""
    for collected in (False, True):  # a wrapper that is part of a cycle may wait for that
        if collected:
            gc.collect()
        known = (
            parameter
            for wrapper in living_ddp(module)
            for name, parameter in wrapper.module.named_parameters()
            if name not in wrapper.parameters_to_ignore
        )
        found = sorted({tables[parameter] for parameter in known if parameter in tables})
        if not found:
            return
    raise ValueError(
        f"SparseGradientReducer: a DistributedDataParallel has {', '.join(found)} among its parameters. Make the "
        "reducer of the model first, and then the model's DistributedDataParallel, which leaves those tables "
        "alone: reducer = SparseGradientReducer(model); ddp = DistributedDataParallel(model)"
    )
