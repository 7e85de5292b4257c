# SPDX-License-Identifier: Apache-2.0
"""Sparse gradients over tdcoll beside DistributedDataParallel, or without it: a reducer of its
own."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tdcoll.base import arguments
from tdcoll.base.errors import NotInitializedError
from tdcoll.base.torch_internals import living_ddp, tell_ddp_to_ignore
from tdcoll.distributed.call import contiguous, is_plain, write
from tdcoll.distributed.sparse import SparseAllReduce
from tdcoll.distributed.sparse_pass import Pass, group_of, stream_of, sums_of

_FIRST_ROWS = 1024
"""Rows of a table per rank that a reducer's context begins with."""


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
        group = group_of(group)
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
        self._sums: SparseAllReduce = sums_of(group)
        row_bytes = max(p[:1].numel() * p.element_size() for p in tables)
        self._sums.open(rows_per_rank, row_bytes)
        self._pass: Pass | None = None
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
        table.stream = stream_of(table.gradient)

    def _begin(self) -> Pass:
        """Return the call of this step: tables in the same order on all ranks, whatever order
        gradients come in."""
        self._pass = made = Pass(self._group)
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


_reducers: weakref.WeakSet[SparseGradientReducer] = weakref.WeakSet()
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
