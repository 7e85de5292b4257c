# SPDX-License-Identifier: Apache-2.0
"""Handlers: for each kind of call and group, an object that makes such calls with tdcoll's kernels.

A :class:`Handler` refuses a call or returns None, prepares it (contexts, which the ranks make
together), runs it, and describes itself. :mod:`tdcoll.distributed.dispatch` does everything that is
the same for all kinds: it picks the implementation and the stream, queues asynchronous calls, and
counts. Dense collectives differ by their specs.

A handler refuses a call only because of facts that are the same on all ranks, in the order of the
calls.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from tdcoll.base import arguments
from tdcoll.calls.budget import Budget
from tdcoll.calls.call_launches import is_prepared
from tdcoll.calls.checks import ComparedKinds, compare, debug_mode
from tdcoll.calls.collective import CollectiveOperation, call_trusted
from tdcoll.calls.context import CollectiveContext
from tdcoll.calls.implicit import ImplicitContext
from tdcoll.calls.operation import PreparedCall
from tdcoll.calls.plan import Facts
from tdcoll.calls.tensors import overlap
from tdcoll.distributed.call import Call, contiguous, write
from tdcoll.distributed.fit import check_sizes, kind_of, refuse_shared_elements
from tdcoll.distributed.gloo import stacked
from tdcoll.distributed.options import Options
from tdcoll.distributed.queues import Queue
from tdcoll.primitives.reduce import OPERATIONS_OF
from tdcoll.runtime import Runtime

PACKED_BYTES = 256 << 10
"""Up to so many bytes, several tensors of one call are packed for one launch, because a copy is
cheaper than one."""


@dataclass
class GroupInfo:
    """The ranks of a process group, and what its handlers share.

    Attributes:
        ranks: global ranks, in the order of the group.
        timeout_s: deadline of waits in the kernels of later contexts, seconds.
        debug: the calls that the ranks compare, as ``TDCOLL_DEBUG`` asks for when the group is
            made.
        rank: this process's, in the group.
    """

    job: Runtime
    ranks: tuple[int, ...]
    timeout_s: float
    options: Options

    def __post_init__(self) -> None:
        self.debug = debug_mode("first" if self.job.simulated else False)
        self.rank = self.ranks.index(self.job.rank)


class Handler(ABC):
    """Makes one kind of call of one group.

    Attributes:
        kind: its name, in options and messages.
        handles_one_rank: whether it handles groups of one rank, too.
        waits: whether a call waits on the host, so that a queue has to make asynchronous ones.
        blocks: whether ``wait()`` of an asynchronous call waits on the host.
        problem: why it has no context and can't get one, the same on all ranks; None if it may have
            one.
        compared: the calls whose arguments the ranks have compared in debug mode of first calls.
    """

    kind: str
    handles_one_rank: ClassVar[bool] = False
    waits: ClassVar[bool] = False
    blocks: ClassVar[bool] = False

    def __init__(self, members: GroupInfo, queue: Queue) -> None:
        self.members = members
        self.queue = queue
        self.problem: str | None = None
        self.compared = ComparedKinds()

    def why_unsupported(self, call: Call) -> str | None:
        """Return why this call cannot be handled, or None if it can, from facts that are the same
        on all ranks."""
        return None

    @abstractmethod
    def prepare(self, call: Call) -> str | None:
        """Prepare the call; return why it cannot be handled, or None, the same on all ranks.
        Collective."""

    def check_call(self, call: Call) -> None:
        """Raise ``TypeError`` or ``ValueError`` unless the call's tensors fit each other, on this
        rank."""
        return  # there may be nothing to check

    def facts(self, call: Call) -> dict[str, Any]:
        """Return the facts that debug mode compares, because some decide who handles the call."""
        return {"op": call.op, "dtypes": [str(tensor.dtype) for tensor in call.inputs]}

    def compare(self, call: Call) -> None:
        """Raise on all ranks if the call is wrong on one of them, or differs. Collective; for debug
        mode.

        Raises:
            RankMismatchError: something differs, or another rank's tensors do not fit each other.
            TypeError, ValueError: those of this rank do not.
        """
        problem: Exception | None = None
        try:
            self.check_call(call)
        except (TypeError, ValueError) as error:
            problem = error
        compare(self.members.job, self.members.ranks, self.kind, self.facts(call), problem)

    def compare_first(self, call: Call) -> None:
        """:meth:`compare`, if no call with such arguments was made before and the ranks are asked
        to compare those."""
        if self.members.debug != "first":
            return
        facts = self.facts(call)
        if self.compared.is_new(self.kind, facts):
            self.compare(call)
            self.compared.add(self.kind, facts)

    def loaded(self, call: Call) -> bool:
        """Return whether nothing has to be compiled or loaded before the call is launched."""
        return True

    @abstractmethod
    def run(self, call: Call) -> list[Any]:
        """Make the call on the current stream, after :meth:`prepare`, under ``torch.no_grad()``;
        return its result."""

    @abstractmethod
    def describe(self) -> str:
        """Return a description of the handled calls, for people."""

    def set_timeout(self, timeout_s: float) -> None:
        """Change the deadline of the waits of later calls."""
        return

    @property
    def used(self) -> CollectiveContext | None:
        """The context of the next call; None as long as there is none."""
        return None

    @contextlib.contextmanager
    def within(self, timeout_s: float | None) -> Iterator[None]:
        """Let the waits of the call inside, which has been prepared, have a deadline of their own;
        None: as others."""
        context = self.used
        if timeout_s is None or context is None:
            yield
            return
        monitor = context.monitor
        stream = None
        before = context.monitor.timeout_s
        if context.device.type == "cuda":
            stream = torch.cuda.current_stream(context.device)
            context.check_fast()  # the stream waits for the last call, which keeps its deadline
        monitor.set_timeout(timeout_s, stream)
        try:
            yield
        finally:
            monitor.set_timeout(before, stream)

    def check(self) -> None:
        """Raise :class:`~tdcoll.CollectiveTimeout` if a wait of finished kernels has expired."""
        return  # it may have no kernels of its own

    def abort(self) -> None:
        """End the waits of its kernels. A process that ends calls this, from any thread."""
        return

    def close(self) -> None:
        """Free its memory. Collective."""
        return


class Dense(Handler):
    """Makes the calls of one dense collective, on a context that grows."""

    def __init__(
        self, members: GroupInfo, queue: Queue, operation: CollectiveOperation, budget: Budget
    ) -> None:
        super().__init__(members, queue)
        self.operation = operation
        self.spec = spec = operation.spec
        self.kind = spec.name
        self._budget = budget
        self._most = spec.backend_limit(len(members.ranks))
        if members.options.max_bytes_per_rank is not None:
            self._most = members.options.max_bytes_per_rank
        self.implicit = ImplicitContext(
            members.job,
            members.ranks,
            self.kind,
            limit=self._inbox(self._most),
            timeout_s=members.timeout_s,
            lamport_bytes=spec.lamport_bytes,
            budget=budget,
            debug=members.debug is True,  # if the ranks compare first calls only, the handler does
        )

    @property
    def limit(self) -> int:
        """The largest segment that it handles, in bytes: by default as the group's thread blocks
        allow."""
        if not self._budget.blocks or self.members.options.max_bytes_per_rank is not None:
            return self._most
        return self.spec.backend_limit(len(self.members.ranks), self._budget.blocks)

    def _inbox(self, segment: int) -> int:
        """Return the bytes per rank that a context needs for a call."""
        return self.spec.inbox(segment, len(self.members.ranks), self.members.job.heap.nbytes)

    def _segments(self, call: Call) -> list[int]:
        """Return the bytes of a segment of each part of the call."""
        if call.listed:
            return [max((piece.nbytes for piece in call.outs), default=0)]
        return [
            self.spec.segment_bytes(tensor.nbytes, len(self.members.ranks))
            for tensor in call.inputs
        ]

    def facts(self, call: Call) -> dict[str, Any]:
        strided = all(
            tensor.layout == torch.strided and not tensor.is_nested for tensor in call.touched
        )
        facts = {**super().facts(call), "bytes": self._segments(call) if strided else "not strided"}
        if self.spec.rooted:
            facts["root"] = call.root
        return facts

    def why_unsupported(self, call: Call) -> str | None:
        if any(tensor.layout != torch.strided for tensor in call.touched):
            return "not strided"
        if self.spec.reduces:
            for tensor in call.inputs:
                if call.op not in OPERATIONS_OF.get(tensor.dtype, ()):
                    return f"{call.op} of {tensor.dtype} is not among tdcoll's reductions"
        return self._too_large(call)

    def _too_large(self, call: Call) -> str | None:
        limit = self.limit
        if max(self._segments(call)) <= limit:
            return None
        few = f", with {self._budget.blocks} thread blocks" if limit < self._most else ""
        return f"more than {limit} bytes per rank{few}"

    def prepare(self, call: Call) -> str | None:
        nbytes = self._inbox(self._packed(call) or max(self._segments(call)))
        if not self.implicit.holds(nbytes):
            self.queue.drain()  # its calls use the context that is replaced
        made = self.implicit.holds(nbytes) or self.implicit.prepare(nbytes, self.facts(call))
        self.problem = None if self.implicit.context is not None else self.implicit.problem
        return self._too_large(call) if made else self.implicit.problem

    def check_call(self, call: Call) -> None:
        refuse_shared_elements(call)
        if self.spec.rooted:
            arguments.whole("root", call.root, 0, len(self.members.ranks) - 1)
        check_sizes(call, self.members.rank, len(self.members.ranks))

    def loaded(self, call: Call) -> bool:
        context = self.implicit.context
        packed = self._packed(call)
        sizes = [packed] if packed else self._segments(call)
        if context is None:
            return False
        options = self.operation.kernel_options(call.inputs[0].dtype, call.op, call.root)
        facts = [Facts.of(context, size, options.dtype) for size in sizes]
        return all(is_prepared(self.spec, context, each, options) for each in facts)

    def _packed(self, call: Call) -> int:
        """Return the bytes of a segment of all tensors of the call if one launch has them all,
        otherwise 0."""
        sizes = self._segments(call)
        total = sum(sizes)
        together = (
            len(sizes) > 1
            and total <= min(PACKED_BYTES, self.limit)
            and len(set(map(kind_of, call.inputs))) == 1
        )
        return total if together else 0

    def run(self, call: Call) -> list[Any]:
        if call.listed:
            return self._run_list(call)
        if self._packed(call):
            self._run_packed(call)
        else:
            for out, tensor in zip(call.outs, call.inputs, strict=True):
                call.prepared = self._launch(out, tensor, call)
        return call.result

    def _run_list(self, call: Call) -> list[Any]:
        """Make an all-gather into a list of tensors of any sizes."""
        (tensor,), pieces = call.inputs, call.outs
        most = max(piece.numel() for piece in pieces)
        own = tensor
        if tensor.numel() != most:
            own = tensor.new_empty(most)
            own[: tensor.numel()] = tensor.reshape(-1)
        out = tensor.new_empty((len(self.members.ranks), most))
        self._launch(out, own, call)
        for piece, row in zip(pieces, out, strict=True):
            write(piece, row[: piece.numel()].view(piece.shape))
        return stacked(call, out)

    def _run_packed(self, call: Call) -> None:
        """Make a call of several tensors with one launch: the segments for a rank follow each
        other."""
        world = len(self.members.ranks)
        spec = self.spec
        rows = (world,) if spec.scatters else ()
        parts = [
            tensor.reshape(*rows, tensor.numel() // (world if rows else 1))
            for tensor in call.inputs
        ]
        given = torch.cat(parts, -1)
        made = given
        if spec.scatters or spec.gathers:
            made = given.new_empty((world, given.shape[-1]) if spec.gathers else given.shape[-1:])
        self._launch(made, given, call)
        sizes = [out.numel() // (world if spec.gathers else 1) for out in call.outs]
        for out, part in zip(call.outs, made.split(sizes, -1), strict=True):
            write(out, part.reshape(out.shape))

    def _launch(self, out: torch.Tensor, tensor: torch.Tensor, call: Call) -> PreparedCall:
        """Launch a call of tensors that fit each other, once or for each epoch, with the copies
        that it takes."""
        context = self.implicit.context
        spec = self.spec
        assert context is not None
        source = contiguous(tensor, True)
        target = contiguous(out, False)
        at = spec.may_overlap_at(
            spec.segment_bytes(source.nbytes, context.world_size), context.rank
        )
        if overlap(source.data_ptr(), source.nbytes, target.data_ptr(), target.nbytes, at):
            source = source.clone()
        prepared = call_trusted(self.operation, source, target, context, call.op, call.root)
        if target is not out:
            write(out, target)
        return prepared

    def describe(self) -> str:
        context = self.implicit.context
        held = (
            "no context yet"
            if context is None
            else f"context of {context.max_bytes_per_rank} bytes per rank, launches of at most "
            f"{context.max_blocks} thread blocks"
        )
        few = f" ({self._most} with more thread blocks)" if self.limit < self._most else ""
        return f"up to {self.limit} bytes per rank{few}, {held}"

    def set_timeout(self, timeout_s: float) -> None:
        self.implicit.set_timeout(timeout_s)

    @property
    def used(self) -> CollectiveContext | None:
        return self.implicit.context

    def check(self) -> None:
        self.implicit.check()

    def abort(self) -> None:
        self.implicit.abort()

    def close(self) -> None:
        self.implicit.close()


class Barrier(Handler):
    """Barriers: all-gathers of no bytes, on the queue and the context of the group's
    all-gathers."""

    kind = "barrier"
    blocks = True

    def __init__(self, members: GroupInfo, gathers: Dense) -> None:
        super().__init__(members, gathers.queue)
        self._gathers = gathers

    def prepare(self, call: Call) -> str | None:
        self.problem = None if self._gathers.implicit.prepare(0) else self._gathers.implicit.problem
        return self.problem

    def run(self, call: Call) -> list[Any]:
        gathers = self._gathers
        context = self._gathers.implicit.context
        assert context is not None
        nothing = torch.empty(0, dtype=torch.uint8, device=context.device)
        call_trusted(gathers.operation, nothing, nothing, context)
        return []

    @property
    def used(self) -> CollectiveContext | None:
        return self._gathers.used

    def describe(self) -> str:
        return f"on the context of {self._gathers.kind}"
