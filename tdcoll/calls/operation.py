# SPDX-License-Identifier: Apache-2.0
"""Everything that tdcoll launches, in the terms of :func:`tdcoll.calls.run.run`, which makes every
call.

An :class:`Operation` is a dense collective, a fused operator or a sparse all-reduce. A
:class:`Request` is a call as its caller asked for it. A :class:`PreparedCall` is what a context
remembers of a kind of call, so that it can be repeated.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from tdcoll.base.call_log import CallRecord

if TYPE_CHECKING:
    from tdcoll import runtime
    from tdcoll.calls.context import CollectiveContext


class Request(NamedTuple):
    """A call as its caller asked for it. Nothing of it has been checked.

    Attributes:
        tensors: The caller's tensors, in the order of :meth:`PreparedCall.bind`. Tensors that the
            caller left out at the end are missing.
        options: All other arguments that decide how the call is made: a NamedTuple of the
            operation's, which is hashable if the arguments are valid.
        group: The ranks, if ``ctx`` is None.
        ctx: The caller's context. None: tdcoll's own context of the group.
        names: The caller's names of the tensors, for messages; empty: the usual ones.
        gradient: The result will have a gradient, hence a backward pass.
    """

    tensors: tuple[Any, ...]
    options: Any
    group: runtime.Group = None
    ctx: Any = None
    names: tuple[str, ...] = ()
    gradient: bool = False


Bound = tuple[Any, tuple[Any, ...]]
"""The tensors of one call, bound to a prepared call: the result, which the caller gets, and the
*frame*, the arguments of the call's steps: addresses, and tensors for steps of the host."""


class PreparedCall(ABC):
    """A kind of call that a context can make: compiled kernels, and whatever they need.

    Attributes:
        record: The kind of call, as the context notes it; the operation's name if its epochs are
            unknown.
        complex: Whether the tensors are complex, so that they may be conjugate views.
        launch: ``(stream, *frame) -> None``: launches the steps, given the handle of the stream.
        variant: All that the compiled kernels depend on, the same on all ranks; None: nothing is
            loaded.
    """

    __slots__ = ("complex", "launch", "record", "variant")
    record: CallRecord | str
    complex: bool
    launch: Callable[..., None]
    variant: Hashable

    @property
    def label(self) -> str:
        """The name of the call in messages."""
        return self.record if isinstance(self.record, str) else self.record.operation

    @abstractmethod
    def bind(self, *tensors: Any) -> Bound | None:
        """Bind the tensors of a call, and make its result.

        The tensors have the shapes and dtypes of the first such call, and kernels can take their
        bytes as they are. Returns None if they don't lie as they must.
        """


class Operation(ABC):
    """Something that tdcoll launches.

    :func:`~tdcoll.calls.run.run` takes each request through the methods below, in their order.

    Attributes:
        name: The name of the public function. tdcoll's own contexts are found by it.
        errors_alike: Errors of a launch that all ranks raise together, after the same launches.
            Other errors make the context unusable.
    """

    name: str
    errors_alike: ClassVar[tuple[type[BaseException], ...]] = ()

    def label(self, request: Request) -> str:
        """Return the name of the call in messages."""
        return self.name

    @abstractmethod
    def key(self, tensors: tuple[Any, ...], options: Any, ctx: Any) -> Hashable:
        """Return what decides a call except what :func:`~.run.repeat_call` checks again.

        Calls with the same key have the same prepared call. None: calls aren't remembered. It may
        raise AttributeError, RuntimeError or TypeError for arguments that aren't valid.
        """

    def check_early(self, request: Request) -> None:
        """Raise for arguments that are wrong on any context, before tdcoll makes one."""
        return

    @abstractmethod
    def own_context(self, request: Request) -> CollectiveContext:
        """Return tdcoll's own context for a request. Collective when it is made or grows."""

    @abstractmethod
    def check_context(self, ctx: Any) -> None:
        """Raise unless ``ctx`` is a context for calls of this operation."""

    @abstractmethod
    def agreement(self, request: Request, ctx: Any) -> dict[str, Any]:
        """Return what must be the same on all ranks, by name, for debug mode."""

    @abstractmethod
    def check(self, request: Request, ctx: Any) -> None:
        """Raise unless this rank can make the call. Local."""

    @abstractmethod
    def prepare(self, request: Request, ctx: Any) -> PreparedCall:
        """Plan the call and compile its kernels, if the context doesn't have them. Local.

        The plan depends only on facts that are the same on all ranks, so all ranks prepare the same
        call.
        """

    # ------------------------------------------------------------------ gradients

    def wants_gradient(self, request: Request) -> bool:
        """Return whether the result gets a gradient, by :meth:`with_gradient`."""
        return False

    def with_gradient(self, request: Request) -> Any:
        """Make the call of a request that wants a gradient; return its result with one."""
        raise TypeError(
            f"{self.name} has no derivative; pass detached tensors, or call it under torch.no_grad()"
        )
