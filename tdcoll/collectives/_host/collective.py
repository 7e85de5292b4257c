# SPDX-License-Identifier: Apache-2.0
"""The host side that collectives share: check, plan, launch.

A call goes the long way the first time: everything is checked, a plan is made and its kernel prepared. The next call
that differs in its addresses alone goes the short way (:meth:`Collective.at_once`), since its time is the host's: what
the shapes decide is found in one look-up, and only what may have changed is checked again, by the same rules. A tensor
that peers reach also has to lie where one has lain before. The short way has no errors of its own. Whatever is not as
it should be goes the long way, which finds out what it is.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Literal, NamedTuple

import torch

from tdcoll import arguments
from tdcoll.collectives._host.algorithm import Algorithm, Launches, Planned
from tdcoll.collectives._host.checks import (
    check_tensor,
    lies_elsewhere_in,
    strided_bytes,
    usable,
)
from tdcoll.collectives._host.plan import MOST_EPOCHS, Facts, Plan, Policy
from tdcoll.collectives._host.reach import Standing, deltas_to, place_of
from tdcoll.context import CollectiveContext
from tdcoll.errors import ContextError
from tdcoll.tuning import HANDED_OVER, Section

__all__ = ["UNCHECKED", "Collective"]

_log = logging.getLogger("tdcoll")


class _HandOver:
    """In the place of launches: torch.distributed's collective, because a tuning table says that it is faster."""

    def __init__(self, collective: Collective, ctx: CollectiveContext, facts: Facts) -> None:
        assert collective.hand_over is not None
        self.plan = Plan(HANDED_OVER, 0, 0, 0)
        self.group, self._by_torch = ctx.tuning.group, collective.hand_over
        key = (collective.name, "handed over")
        if key not in ctx.tables:
            ctx.tables[key] = True
            if ctx.rank == 0:
                _log.info(
                    "%s: the tuning table leaves %d bytes per rank on %s to torch.distributed (%s)",
                    collective.name, facts.nbytes, ctx.topology.describe(), self.group.name(),
                )  # fmt: skip

    def __call__(self, tensor: torch.Tensor, out: torch.Tensor) -> None:
        """Make the call."""
        self._by_torch(tensor, out, self.group)


class _Known(NamedTuple):
    """A kind of call as the short way knows it after the first one: all but where the tensors lie.

    Attributes:
        run: launches such a call, outside of CUDA graphs.
        make: makes the result, where the caller gives none.
        part, whole: bytes of the smaller and of the larger of the two tensors.
        own: where the smaller may lie in the larger, in bytes: as this rank's segment.
        standing: the tensors that peers may reach; None where they reach none.
    """

    run: Callable[[int, int, int], None]
    make: Callable[[], torch.Tensor]
    part: int
    whole: int
    own: int
    standing: Standing | None


UNCHECKED = object()
"""In the place of a wish for :meth:`Collective.at_once`: ``"auto"``, after :meth:`Collective.unchecked`."""


class Collective:
    """The host side of one collective.

    Args:
        policy: its algorithms and which of them a call takes. Its operation is the collective's name.
        algorithms: how each is launched.
        shapes: ``(shape of a tensor, ranks) ->`` shapes that the result may have; the first is made. There are
            none if the tensor's first extent must be divisible by the number of ranks and is not.
        layout: ``"gather"``: the result is the larger of the two tensors, and has a segment for each rank;
            ``"scatter"``: the caller's is and has; ``"same"``: both are one segment.
        room: bytes of each segment that one epoch of an algorithm by chunks takes; a larger call is several epochs.
            None: there is no limit but the context's capacity, over which a call is refused. Of an
            algorithm by words the rule says how much an epoch takes.
        hand_over: does a call by ``torch.distributed``, given tensor, result and group.
    """

    def __init__(
        self,
        policy: Policy,
        algorithms: Mapping[str, Algorithm],
        *,
        shapes: Callable[[torch.Size, int], tuple[torch.Size, ...]],
        layout: Literal["gather", "scatter", "same"],
        room: Callable[[CollectiveContext, Facts, str], int] | None = None,
        hand_over: Callable[[torch.Tensor, torch.Tensor, Any], None] | None = None,
    ) -> None:
        assert set(algorithms) == set(policy.names)
        assert policy.hand_over == (hand_over is not None)
        self.name, self.policy, self._algorithms, self._shapes = policy.operation, policy, algorithms, shapes
        self._layout, self._room, self.hand_over = layout, room, hand_over
        self._short = f"{self.name}, the short way"

    # ------------------------------------------------------------------ the short way

    def at_once(
        self, tensor: Any, ctx: CollectiveContext, out: Any, wish: Hashable, symmetric: Any = False
    ) -> torch.Tensor | None:
        """Make a call like one that was made before, with as little on the host as will do.

        Everything that the long way checks is checked here or follows from the shapes and dtypes, which were found
        right then.

        Args:
            wish: what was remembered for such calls besides shapes and dtypes: the algorithm, and the collective's own.
            symmetric: as for a call, not checked yet.

        Returns:
            The result; None if anything is not as it should be, or not known yet, which the long way finds out and
            says.
        """
        if not isinstance(tensor, torch.Tensor) or not (out is None or isinstance(out, torch.Tensor)):
            return None
        if symmetric is not False and symmetric is not True:
            return None
        try:
            if out is None:
                known = ctx.known((self._short, tensor.shape, tensor.dtype, wish, symmetric))
            else:
                known = ctx.known((self._short, tensor.shape, out.shape, tensor.dtype, out.dtype, wish, symmetric))
        except (RuntimeError, TypeError):  # a shape or a wish that cannot be a key
            return None
        device = ctx.device
        if known is None or not usable(tensor, device) or not (out is None or usable(out, device)):
            return None
        run, make, part, whole, own, standing = known
        source = tensor.data_ptr()
        if standing is not None:
            shared = tensor if self._layout == "scatter" else out
            if shared is None or not standing.holds(shared):
                return None
        if out is None:
            out = make()
            result = out.data_ptr()
        else:
            result = out.data_ptr()
            if self._layout == "gather":
                if lies_elsewhere_in(source, part, result, whole, own):
                    return None
            elif lies_elsewhere_in(result, part, source, whole, own):
                return None
        if (stream := ctx.enter()) is None:
            return None
        try:
            run(stream, source, result)
        except BaseException as error:
            ctx.fail(self.name, error)
            raise
        return out

    def _remember(
        self,
        tensor: torch.Tensor,
        ctx: CollectiveContext,
        out: torch.Tensor | None,
        wish: Hashable,
        launch: Any,
        symmetric: bool = False,
    ) -> None:
        """Let the next call with such tensors, which have been found right, be made by :meth:`at_once`."""
        dtype = tensor.dtype
        nested = tensor.is_nested or (out is not None and out.is_nested)  # those have no shape
        if isinstance(launch, _HandOver) or ctx.capturing or nested:
            return
        part = self._segment(tensor, ctx.world_size)
        segments, place = (1, 0) if self._layout == "same" else (ctx.world_size, ctx.rank)
        shape = self._shapes(tensor.shape, ctx.world_size)[0]
        # Extents one by one take half the time of a tuple. A scalar has none, and is made of the tuple.
        make = functools.partial(torch.empty, *(shape or [()]), dtype=dtype, device=ctx.device)
        standing = Standing(ctx) if symmetric else None
        made = _Known(launch.run, make, part, segments * part, place * part, standing)
        key = (
            (self._short, tensor.shape, dtype, wish, symmetric)
            if out is None
            else (self._short, tensor.shape, out.shape, dtype, out.dtype, wish, symmetric)
        )
        known: _Known = ctx.once(key, lambda: made)
        shared = tensor if self._layout == "scatter" else out
        if known.standing is not None and shared is not None:
            known.standing.add(shared)

    # ------------------------------------------------------------------ the long way

    def __call__(
        self,
        tensor: Any,
        ctx: CollectiveContext,
        out: Any,
        algorithm: Any,
        *,
        wish: Hashable,
        options: Callable[[], Hashable] = lambda: None,
        agree: Mapping[str, Any] = {},
        names: tuple[str, str] = ("tensor", "out"),
        symmetric: bool = False,
    ) -> torch.Tensor:
        """Make a call.

        Args:
            tensor, out, algorithm: the caller's, not checked yet; ``out`` is None where the call makes it.
            wish: as for :meth:`at_once`.
            options: checks the collective's own arguments; what the kernel depends on besides bytes.
            agree: those arguments, by name, for debug mode.
            names: the caller's names of ``tensor`` and ``out``, for errors.
            symmetric: peers may read the caller's tensor of a ``"scatter"``, and write the result of others: it lies at
                the same place in the symmetric heap of all ranks.

        Raises:
            ContextError, CollectiveTimeout, RankMismatchError, TypeError, ValueError: as its public function says.
        """
        nbytes = strided_bytes(tensor)
        given = out
        shared = tensor if self._layout == "scatter" else out

        def prepare() -> tuple[Launches | _HandOver, torch.Tensor]:
            check_tensor(names[0], tensor, ctx.device)
            wanted = options()
            self._check_out(tensor, given, ctx, names)
            arguments.instance("symmetric", symmetric, bool, "a bool")
            more: dict[str, Any] = {"symmetric": symmetric}
            if symmetric:
                if shared is None:
                    raise ValueError(f"{names[1]} must be given with symmetric=True: one that tdcoll.empty() has made")
                more["deltas"] = deltas_to(names[self._layout != "scatter"], shared, ctx)
            segment = self._segment(tensor, ctx.world_size)
            dtype = None if wanted is None else tensor.dtype  # bytes are moved as they are
            launch = self.launches(ctx, segment, algorithm, options=wanted, dtype=dtype, **more)
            if given is not None:
                return launch, given
            shape = self._shapes(tensor.shape, ctx.world_size)[0]
            return launch, torch.empty(shape, dtype=tensor.dtype, device=tensor.device)

        facts = {
            "dtype": getattr(tensor, "dtype", None),
            "algorithm": algorithm,
            "offset in the symmetric heap": place_of(shared, ctx) if symmetric else None,
            **agree,
        }
        if self._room is not None:
            facts["bytes"] = nbytes
        with ctx.calling(self.name, 0 if self._room is not None else nbytes, facts, prepare) as (launch, made):
            launch(tensor, made)
        self._remember(tensor, ctx, given, wish, launch, symmetric)
        return made

    def unchecked(
        self,
        tensor: torch.Tensor,
        ctx: CollectiveContext,
        out: torch.Tensor,
        op: str | None = None,
    ) -> None:
        """Make a call for callers that have checked both tensors themselves, which may be of any shapes.

        The next call like it may be ``at_once(tensor, ctx, out, UNCHECKED)``, with ``(UNCHECKED, op)`` for a reduction.

        Args:
            op: the name of a reduction's operation.
        """
        nbytes, dtype = self._segment(tensor, ctx.world_size), tensor.dtype
        agree = {"dtype": dtype, "algorithm": "auto", **({} if op is None else {"op": op, "bytes": nbytes})}
        options, kind = (None, None) if op is None else ((dtype, op), dtype)
        with ctx.calling(
            self.name,
            nbytes if self._room is None else 0,
            agree,
            lambda: self.launches(ctx, nbytes, "auto", options=options, dtype=kind),
        ) as launch:
            launch(tensor, out)
        self._remember(tensor, ctx, out, UNCHECKED if op is None else (UNCHECKED, op), launch)

    def overlap(self, tensor: torch.Tensor, out: torch.Tensor, ctx: CollectiveContext) -> bool:
        """Return whether the tensors overlap other than as a call in place may."""
        small, large = (tensor, out) if self._layout == "gather" else (out, tensor)
        own = 0 if self._layout == "same" else ctx.rank * small.nbytes
        return lies_elsewhere_in(small.data_ptr(), small.nbytes, large.data_ptr(), large.nbytes, own)

    def _segment(self, tensor: torch.Tensor, world: int) -> int:
        """Bytes of a segment."""
        return tensor.nbytes // world if self._layout == "scatter" else tensor.nbytes

    def _check_out(self, tensor: torch.Tensor, out: Any, ctx: CollectiveContext, names: tuple[str, str]) -> None:
        """Raise unless ``tensor`` has a result, and ``out`` is None or can take it."""
        world, (given, taken) = ctx.world_size, names
        shapes = self._shapes(tensor.shape, world)
        if not shapes:
            extents = list(tensor.shape)
            raise ValueError(f"{given}'s first extent must be divisible by the {world} rank(s); got shape {extents}")
        if out is None:
            return
        check_tensor(taken, out, ctx.device)
        if out.dtype != tensor.dtype or out.shape not in shapes:
            allowed = " or ".join(str(list(shape)) for shape in dict.fromkeys(shapes))
            raise ValueError(f"{taken} must be {tensor.dtype} of shape {allowed}; got {out.dtype} of {list(out.shape)}")
        gathers = self._layout == "gather"
        part, whole = (given, taken) if gathers else (taken, given)
        small, large = (tensor, out) if gathers else (out, tensor)
        if self.overlap(tensor, out, ctx):
            begin, first = small.data_ptr(), large.data_ptr()
            own = f"as {whole}'s own segment at byte {ctx.rank * small.nbytes}"
            allowed = f"to be {whole}" if self._layout == "same" else own
            raise ValueError(
                f"{part} must not overlap {whole}, except {allowed}; it lies at byte {begin - first} of {whole}"
            )

    # ------------------------------------------------------------------ plans and launches

    def facts(self, ctx: CollectiveContext, nbytes: int, dtype: torch.dtype | None = None, **more: Any) -> Facts:
        """Facts of a call on a context, of ``nbytes`` per segment; of elements that are reduced, with their dtype."""
        announced = dtype is not None and dtype.is_floating_point and dtype.itemsize <= 4
        return Facts(
            nbytes,
            ctx.topology,
            ll_bytes=ctx.ll_bytes,
            stores=ctx.stores,
            puts=ctx.job.heap.puts,
            lamport_bytes=ctx.lamport_bytes if announced else 0,
            itemsize=1 if dtype is None else dtype.itemsize,
            channels=ctx.channels,
            max_programs=ctx.max_programs,
            hand_over=ctx.tuning.group is not None and self.policy.hand_over,
            simulated=ctx.job.simulated,
            **more,
        )

    def launches(
        self,
        ctx: CollectiveContext,
        nbytes: int,
        algorithm: Any,
        *,
        options: Hashable = None,
        dtype: torch.dtype | None = None,
        in_place: bool = False,
        symmetric: bool = False,
        deltas: torch.Tensor | None = None,
    ) -> Any:
        """Return what launches such calls. It is made once.

        Args:
            in_place: peers write to the caller's buffer.
            deltas: from addresses in the caller's memory to the same places on each rank, by :func:`~.reach.deltas_to`.
        """
        if not isinstance(algorithm, (str, Plan)):
            arguments.instance("algorithm", algorithm, (str, Plan), "a str or a Plan")
        shape: tuple[Hashable, ...] = (self.name, nbytes, algorithm, options, in_place, symmetric)
        elsewhere = deltas is not None and deltas is not ctx.device_group.deltas
        if elsewhere:
            shape += (id(deltas),)  # the context keeps it

        def make() -> Any:
            facts = self.facts(ctx, nbytes, dtype, in_place=in_place, symmetric=symmetric)
            if elsewhere:
                facts = dataclasses.replace(facts, puts=False)
            return self.launches_of(ctx, facts, self._plan(facts, algorithm, ctx), options, deltas)

        return ctx.once(shape, make)

    def _sections(self, ctx: CollectiveContext) -> tuple[Section, ...]:
        """Return the sections of the context's tuning table for this operation."""
        tuning = ctx.tuning
        found: tuple[Section, ...] = ctx.once(
            (self.name, "sections"), lambda: self.policy.sections(tuning.sections, tuning.name)
        )
        return found

    def _plan(self, facts: Facts, algorithm: str | Plan, ctx: CollectiveContext) -> Plan:
        """The plan of a call, or of the first epoch of a larger one, whose algorithm is that of the whole."""
        choose, sections = self.policy.choose, self._sections(ctx)
        plan = choose(facts, algorithm, sections)
        if plan.algorithm == HANDED_OVER or len(epochs := self._epochs(ctx, facts, plan)) == 1:
            return plan
        if isinstance(algorithm, Plan):
            raise ValueError(
                f"algorithm must be a name and no Plan for a call of several epochs: {facts.nbytes} bytes per rank are "
                f"{len(epochs)} epochs of at most {epochs[0]} bytes on this context"
            )
        return choose(dataclasses.replace(facts, nbytes=epochs[0]), plan.algorithm, sections)

    def _epochs(self, ctx: CollectiveContext, facts: Facts, plan: Plan) -> list[int]:
        """Bytes of a segment in each epoch of a call."""
        rule, nbytes = self.policy.rules[plan.algorithm], facts.nbytes
        if rule.words:
            room = rule.epoch(facts)
        elif self._room is None:
            return [nbytes]
        else:
            room = self._room(ctx, facts, plan.algorithm)
        if nbytes > MOST_EPOCHS * room:
            raise ContextError(
                f"{self.name}: {nbytes} bytes would take more than {MOST_EPOCHS} epochs of {room} bytes. "
                f"Make the context with max_bytes_per_rank={nbytes // MOST_EPOCHS * 4 + 128} or more"
            )
        n = max(1, -(-nbytes // max(1, room)))
        return [*(n - 1) * [room], nbytes - (n - 1) * room]

    def launches_of(
        self, ctx: CollectiveContext, facts: Facts, plan: Plan, options: Hashable, deltas: torch.Tensor | None = None
    ) -> Any:
        """Return what launches calls by a plan that was made for these facts; ``deltas`` as for :meth:`launches`."""
        deltas = ctx.device_group.deltas if deltas is None else deltas
        if plan.algorithm == HANDED_OVER:
            return _HandOver(self, ctx, facts)
        calls: list[Planned] = []
        for nbytes in self._epochs(ctx, facts, plan):
            part = dataclasses.replace(facts, nbytes=nbytes)
            if calls and nbytes != calls[0].facts.nbytes:  # the last, which may be shorter
                plan = self.policy.choose(part, plan.algorithm, self._sections(ctx))
            rule = self.policy.rules[plan.algorithm]
            width = rule.extent(part).width if rule.words else 0
            calls.append(Planned(ctx, part, plan, options, facts.nbytes, width, deltas))
        made = Launches(self.name, self._algorithms[plan.algorithm], calls)
        made.prepare()
        return made
