# SPDX-License-Identifier: Apache-2.0
"""Kinds of call that tdcoll serves for ``torch.distributed``: one object for each kind and group.

A :class:`Service` refuses a call or says nothing, prepares it (contexts, which the ranks make together), runs it, and
describes itself. Everything else is the same for all kinds and stands once, in :mod:`tdcoll.distributed.sides`: whom a
refused call goes to, streams, asynchronous calls, counting, words. A new kind is a class which
:mod:`tdcoll.distributed.services` lists. Then options, :func:`tdcoll.distributed.explain` and the end of a group know
it.

A call is refused only from facts that are the same on all ranks, in the order of the calls.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch

from tdcoll.collectives._host.collective import UNCHECKED, Collective
from tdcoll.collectives._host.pool import Pool
from tdcoll.collectives.all_gather import all_gather
from tdcoll.collectives.all_gather.op import ALL_GATHER
from tdcoll.collectives.all_reduce.algorithms import ALL_REDUCE
from tdcoll.collectives.all_reduce.op import inbox_bytes as all_reduce_inbox
from tdcoll.collectives.reduce_scatter.algorithms import REDUCE_SCATTER
from tdcoll.collectives.reduce_scatter.op import inbox_bytes as reduce_scatter_inbox
from tdcoll.distributed.call import Call, check_pieces, write
from tdcoll.distributed.work import Queue
from tdcoll.gate import compare, debugging
from tdcoll.primitives.reduce import OPERATIONS, OPERATIONS_OF
from tdcoll.runtime import Runtime
from tdcoll.runtime.control import ControlPlane

__all__ = ["WISHES", "AllGather", "AllReduce", "Barrier", "Dense", "Lane", "ReduceScatter", "Service", "Setting"]

PACKED_BYTES = 256 << 10
"""Several tensors of one call are packed for one launch up to so many bytes in all: a copy costs less than a launch."""

WISHES: dict[str | None, Any] = {None: UNCHECKED, **{op: (UNCHECKED, op) for op in OPERATIONS}}
"""The key by which the short way knows a call, for each operation; None: bytes are moved as they are."""


class Lane:
    """The queue of the calls that use one context, in the order in which they are issued.

    The calls of other lanes do not wait for them: ranks may issue calls of two lanes in different orders.

    Args:
        control: numbers the exchanges of this lane for themselves.

    Attributes:
        queue: makes asynchronous calls that wait on the host.
        control: as given.
    """

    def __init__(self, control: ControlPlane) -> None:
        self.queue, self.control = Queue(), control


class Setting:
    """The job, the ranks and the limits that the services of a group share.

    Attributes:
        job: the job that the group's ranks have joined.
        ranks: global ranks, in the order of the group.
        timeout_s: deadline of waits in kernels, seconds.
        programs: the most programs of a launch.
        limits: the most bytes of a call, by kind; see ``Options.max_bytes_per_rank``.
        token: names the group, the same on all of its ranks and different from that of every other group.
        debug: whether the ranks compare each call, as ``TDCOLL_DEBUG`` asks for.
        services: the services of the group, by kind.
    """

    def __init__(
        self,
        job: Runtime,
        ranks: Sequence[int],
        *,
        timeout_s: float,
        programs: int,
        limits: dict[str, int],
        token: str = "",
    ) -> None:
        self.job, self.ranks, self.timeout_s = job, tuple(ranks), timeout_s
        self.programs, self.limits, self._token = programs, limits, token
        self.debug = debugging()
        self.services: dict[str, Service] = {}
        self._lanes: dict[str, Lane] = {}

    def lane(self, kind: str) -> Lane:
        """Return the lane of a kind of call. In debug mode, which compares the order of calls, it is one for all."""
        kind = "" if self.debug else kind
        if kind not in self._lanes:
            self._lanes[kind] = Lane(self.job.control.part(f"{self._token}/{kind}"))
        return self._lanes[kind]


class Service(ABC):
    """One kind of call of one group.

    Attributes:
        kind: its name, in options and words.
        alone: whether a group of one rank is served, too.
        waits: whether a call waits on the host, so that an asynchronous one is made by a queue.
        blocks: whether ``wait()`` of an asynchronous call waits on the host.
        lane: what its calls pass, in the order in which they are issued.
        stream: CUDA stream of asynchronous calls; made with the first.
        before: event that the stream waits for before each call.
        events: free events, which works take and give back.
    """

    kind: ClassVar[str]
    alone: ClassVar[bool] = False
    waits: ClassVar[bool] = False
    blocks: ClassVar[bool] = False

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.lane = self._lane()
        self.stream: Any = None
        self.before: Any = None
        self.events: list[Any] = []

    def _lane(self) -> Lane:
        return self.setting.lane(self.kind)

    @abstractmethod
    def refuse(self, call: Call) -> str | None:
        """Return why this call cannot be served, or None if it can, from what is the same on all ranks."""

    @abstractmethod
    def prepare(self, call: Call) -> str | None:
        """Make what the call needs, which is collective; return why it cannot be had, the same everywhere; or None."""

    @abstractmethod
    def check_call(self, call: Call) -> None:
        """Raise unless the call's tensors fit each other.

        Raises:
            TypeError, ValueError: they do not, on this rank.
        """

    def facts(self, call: Call) -> dict[str, Any]:
        """Return what of a call must be the same on all ranks, for debug mode. Some of it decides who serves it."""
        return {"op": call.op, "dtypes": [str(tensor.dtype) for tensor in call.inputs]}

    def compare(self, call: Call) -> None:
        """Raise on all ranks what is wrong with the call on one of them, or differs. Collective; for debug mode.

        Raises:
            RankMismatchError: something differs, or another rank's tensors do not fit each other.
            TypeError, ValueError: those of this rank do not.
        """
        problem: Exception | None = None
        try:
            self.check_call(call)
        except (TypeError, ValueError) as error:
            problem = error
        compare(self.setting.job, self.setting.ranks, self.kind, self.facts(call), problem)

    @abstractmethod
    def run(self, call: Call) -> list[torch.Tensor]:
        """Make the call on the current stream, after :meth:`prepare`, under ``torch.no_grad()``; return its result."""

    @abstractmethod
    def describe(self) -> str:
        """Return what is served, in words for people."""

    @abstractmethod
    def check(self) -> None:
        """Raise the error that finished kernels have left, if any.

        Raises:
            CollectiveTimeout: a wait has expired.
        """

    @abstractmethod
    def give_up(self) -> None:
        """End the waits of its kernels. A process that ends calls this, from any thread."""

    @abstractmethod
    def close(self) -> None:
        """Free what it holds. Collective."""


class Dense(Service):
    """Calls of one dense collective, with a context of their own that grows.

    Attributes:
        collective: its host side.
        pool: the context.
    """

    collective: ClassVar[Collective]

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.limit = setting.limits[self.kind]
        self.pool = Pool(
            setting.job,
            setting.ranks,
            self.kind,
            limit=self.inbox(self.limit),
            timeout_s=setting.timeout_s,
            lamport_bytes=0 if self.collective is ALL_GATHER else None,
            programs=setting.programs,
        )

    @abstractmethod
    def inbox(self, nbytes: int) -> int:
        """Return the bytes per rank that a context needs for a call of ``nbytes``."""

    def sizes(self, call: Call) -> list[int]:
        """Return the bytes of each part of the call, as they are limited."""
        return [tensor.nbytes for tensor in call.inputs]

    def facts(self, call: Call) -> dict[str, Any]:
        strided = all(tensor.layout == torch.strided and not tensor.is_nested for tensor in call.touched)
        return {**super().facts(call), "bytes": self.sizes(call) if strided else "not strided"}

    def refuse(self, call: Call) -> str | None:
        for tensors in (call.inputs, call.outs, call.pieces):
            for tensor in tensors:
                if tensor.layout != torch.strided:
                    return "not strided"
        if max(self.sizes(call)) > self.limit:
            return f"more than {self.limit} bytes per rank"
        return None

    def prepare(self, call: Call) -> str | None:
        sizes = self.sizes(call)
        if not self.pool.prepare(self.inbox(self.packed(call) or max(sizes))):
            return self.pool.problem
        return None

    def packed(self, call: Call) -> int:
        """Return the bytes per rank of all tensors of the call if one launch has them all, else 0."""
        sizes = self.sizes(call)
        total = sum(sizes)
        together = len(sizes) > 1 and total <= min(PACKED_BYTES, self.limit) and len(_kinds(call.inputs)) == 1
        return total if together else 0

    def at_once(self, out: torch.Tensor, tensor: torch.Tensor, op: str | None) -> bool:
        """Make a call like one that was made before, if nothing has to be prepared or copied; return whether it did.

        The tensors may be of any kind: the other way finds and says what is wrong with them.
        """
        context, wish = self.pool.context, WISHES.get(op)
        if context is None or wish is None:
            return False
        return self.collective.at_once(tensor, context, out, wish) is not None

    def run(self, call: Call) -> list[torch.Tensor]:
        if self.packed(call):
            self.run_packed(call)
        else:
            for out, tensor in zip(call.outs, call.inputs, strict=True):
                self.launch(out, tensor, call.op)
        return list(call.outs)

    @abstractmethod
    def run_packed(self, call: Call) -> None:
        """Make a call of several tensors with one launch."""

    def launch(self, out: torch.Tensor, tensor: torch.Tensor, op: str | None) -> None:
        """Launch a call of tensors that fit each other, once or for each epoch, with the copies that it takes."""
        context, collective = self.pool.context, self.collective
        assert context is not None
        usable = out.is_contiguous() and not out.is_conj() and not out.is_neg()
        target = out if usable else torch.empty(out.shape, dtype=out.dtype, device=out.device)
        source = tensor.resolve_conj().resolve_neg().contiguous()
        if collective.overlap(source, target, context):
            source = source.clone()
        collective.unchecked(source, context, target, op)
        if target is not out:
            write(out, target)

    def describe(self) -> str:
        context = self.pool.context
        held = (
            "no context yet"
            if context is None
            else f"context of {context.max_bytes_per_rank} bytes per rank, launches of at most "
            f"{context.max_programs} programs"
        )
        return f"up to {self.limit} bytes per rank, {held}"

    def check(self) -> None:
        self.pool.check()

    def give_up(self) -> None:
        self.pool.give_up()

    def close(self) -> None:
        self.pool.close()


class AllGather(Dense):
    """All-gathers into one tensor, into several, and into a list of tensors of any sizes."""

    kind = "all_gather"
    collective = ALL_GATHER

    def inbox(self, nbytes: int) -> int:
        return nbytes

    def sizes(self, call: Call) -> list[int]:
        if call.pieces:
            return [max(piece.nbytes for piece in call.pieces)]
        return super().sizes(call)

    def check_call(self, call: Call) -> None:
        device, world = call.device, len(self.setting.ranks)
        if not call.outs and call.inputs:  # into a list
            self._check_list(call)
        for out, tensor in zip(call.outs, call.inputs, strict=bool(call.outs)):
            _same_kind("all_gather: output", out, tensor, device, world * tensor.numel())

    def _check_list(self, call: Call) -> None:
        (tensor,), pieces = call.inputs, call.pieces
        check_pieces(call, len(self.setting.ranks))
        own = pieces[self.setting.ranks.index(self.setting.job.rank)]
        if any(_kind(piece) != _kind(tensor) for piece in pieces) or own.numel() != tensor.numel():
            raise ValueError(
                f"all_gather: all tensors must be {tensor.dtype} on {tensor.device}, and the input ({tensor.numel()} "
                f"elements) as large as its own place in the list ({own.numel()})"
            )

    def run(self, call: Call) -> list[torch.Tensor]:
        if not call.pieces:
            return super().run(call)
        (tensor,), pieces, world = call.inputs, call.pieces, len(self.setting.ranks)
        most = max(piece.numel() for piece in pieces)
        own = tensor
        if tensor.numel() != most:
            own = tensor.new_empty(most)
            own[: tensor.numel()] = tensor.reshape(-1)
        out = tensor.new_empty((world, most))
        self.launch(out, own, None)
        for piece, row in zip(pieces, out, strict=True):
            write(piece, row[: piece.numel()].view(piece.shape))
        return list(pieces)

    def run_packed(self, call: Call) -> None:
        sizes = [tensor.numel() for tensor in call.inputs]
        own = torch.cat([tensor.reshape(-1) for tensor in call.inputs])
        out = own.new_empty((len(self.setting.ranks), own.numel()))
        self.launch(out, own, None)
        for target, columns in zip(call.outs, out.split(sizes, 1), strict=True):
            write(target, columns.reshape(target.shape))


class _Reduction(Dense):
    """Checks that reductions share."""

    def refuse(self, call: Call) -> str | None:
        for tensor in call.inputs:
            if call.op not in OPERATIONS_OF.get(tensor.dtype, ()):
                return f"{call.op} of {tensor.dtype} is not among tdcoll's reductions"
        return super().refuse(call)


class AllReduce(_Reduction):
    """Dense all-reduces in place, of one tensor and of several."""

    kind = "all_reduce"
    collective = ALL_REDUCE

    def inbox(self, nbytes: int) -> int:
        return all_reduce_inbox(nbytes, len(self.setting.ranks), self.setting.job.heap.nbytes)

    def check_call(self, call: Call) -> None:
        for tensor in call.inputs:
            _same_kind("all_reduce: tensor", tensor, call.inputs[0], call.device, tensor.numel())

    def run_packed(self, call: Call) -> None:
        flat = torch.cat([tensor.reshape(-1) for tensor in call.inputs])
        self.launch(flat, flat, call.op)
        for out, part in zip(call.outs, flat.split([tensor.numel() for tensor in call.inputs]), strict=True):
            write(out, part.view(out.shape))


class ReduceScatter(_Reduction):
    """Reduce-scatters of one tensor and of several."""

    kind = "reduce_scatter"
    collective = REDUCE_SCATTER

    def inbox(self, nbytes: int) -> int:
        world = len(self.setting.ranks)
        return reduce_scatter_inbox(world * nbytes, world, self.setting.job.heap.nbytes)

    def sizes(self, call: Call) -> list[int]:
        return [tensor.nbytes for tensor in call.outs]

    def check_call(self, call: Call) -> None:
        world = len(self.setting.ranks)
        for out, tensor in zip(call.outs, call.inputs, strict=True):
            _same_kind("reduce_scatter: input", tensor, out, call.device, world * out.numel())

    def run_packed(self, call: Call) -> None:
        world = len(self.setting.ranks)
        parts = torch.cat([tensor.reshape(world, -1) for tensor in call.inputs], 1)
        out = parts.new_empty(parts.shape[1])
        self.launch(out, parts, call.op)
        for target, part in zip(call.outs, out.split([out.numel() for out in call.outs]), strict=True):
            write(target, part.view(target.shape))


class Barrier(Service):
    """Barriers: all-gathers of nothing. They are behind the group's all-gathers, as they are behind everything."""

    kind = "barrier"
    blocks = True

    def _lane(self) -> Lane:
        return self._gathers.lane

    @property
    def _gathers(self) -> AllGather:
        gathers = self.setting.services[AllGather.kind]
        assert isinstance(gathers, AllGather)
        return gathers

    @property
    def _pool(self) -> Pool:
        return self._gathers.pool

    def refuse(self, call: Call) -> str | None:
        return None

    def prepare(self, call: Call) -> str | None:
        return None if self._pool.prepare(0) else self._pool.problem

    def run(self, call: Call) -> list[torch.Tensor]:
        context = self._pool.context
        assert context is not None
        all_gather(torch.empty(0, dtype=torch.uint8, device=context.device), context)
        return []

    def describe(self) -> str:
        return "on the context of all_gather"

    def check(self) -> None:
        """Do nothing: a barrier has nothing of its own."""

    give_up = close = check

    def check_call(self, call: Call) -> None:
        """Do nothing: there is no tensor."""


def _kind(tensor: torch.Tensor) -> tuple[torch.dtype, torch.device]:
    return tensor.dtype, tensor.device


def _kinds(tensors: Iterable[torch.Tensor]) -> set[tuple[torch.dtype, torch.device]]:
    return set(map(_kind, tensors))


def _same_kind(name: str, tensor: torch.Tensor, other: torch.Tensor, device: torch.device, elements: int) -> None:
    """Raise unless ``tensor`` is of the dtype of ``other``, on ``device``, and has so many elements."""
    if _kind(tensor) != (other.dtype, device) or tensor.numel() != elements:
        raise ValueError(
            f"{name} must be {other.dtype} of {elements} elements on {device}; got {tensor.dtype} of {tensor.numel()} "
            f"on {tensor.device}"
        )
