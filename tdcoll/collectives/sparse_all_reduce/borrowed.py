# SPDX-License-Identifier: Apache-2.0
"""Tensors that know until when they may be used: views of symmetric memory, in debug mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map

from tdcoll.errors import ContextError

__all__ = ["lend"]


class _Borrowed(torch.Tensor):
    """A tensor that asks before every operation whether it may still be used.

    It holds the tensor that it stands for, strided or sparse, and hands that to the operation. Results that are views
    of the same memory are borrowed as well; all others are ordinary tensors.
    """

    _inner: torch.Tensor
    _problem: Callable[[], str | None]

    @staticmethod
    def __new__(cls, inner: torch.Tensor, problem: Callable[[], str | None]) -> _Borrowed:
        made: _Borrowed = torch.Tensor._make_wrapper_subclass(
            cls, inner.size(), dtype=inner.dtype, device=inner.device, layout=inner.layout
        )
        made._inner, made._problem = inner, problem
        return made

    def __init__(self, inner: torch.Tensor, problem: Callable[[], str | None]) -> None:
        super().__init__()

    def __repr__(self) -> str:  # type: ignore[override]
        problem = self._problem()
        return f"<a view of symmetric memory: {problem}>" if problem else repr(self._inner)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _use(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _use(func, args, kwargs or {})


def _use(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    lenders: dict[int, Callable[[], str | None]] = {}

    def unwrap(value: Any) -> Any:
        if not isinstance(value, _Borrowed):
            return value
        if (problem := value._problem()) is not None:
            raise ContextError(problem)
        lenders[_memory(value._inner)] = value._problem
        return value._inner

    def wrap(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or isinstance(value, _Borrowed):
            return value
        problem = lenders.get(_memory(value))
        return value if problem is None else _Borrowed(value, problem)

    return tree_map(wrap, func(*tree_map(unwrap, args), **tree_map(unwrap, kwargs)))


def _memory(tensor: torch.Tensor) -> int:
    """Which memory a tensor's values lie in."""
    values = tensor._values() if tensor.layout == torch.sparse_coo else tensor
    return values.untyped_storage().data_ptr() if values.layout == torch.strided else 0


def lend(tensor: torch.Tensor, problem: Callable[[], str | None]) -> torch.Tensor:
    """``tensor``, which raises what ``problem`` says, once it says something, when it is used.

    Raises:
        ContextError: from then on, by any operation on it or on a view of it.
    """
    return _Borrowed(tensor, problem)
