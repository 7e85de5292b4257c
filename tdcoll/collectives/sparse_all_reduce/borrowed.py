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

    It holds the tensor that it stands for, strided or sparse, and hands that to the operation. Results whose values
    begin in the memory that was lent, ``_memory``, are borrowed as well; all others are ordinary tensors.
    """

    _inner: torch.Tensor
    _problem: Callable[[], str | None]
    _memory: range

    @staticmethod
    def __new__(cls, inner: torch.Tensor, problem: Callable[[], str | None], memory: range) -> _Borrowed:
        made: _Borrowed = torch.Tensor._make_wrapper_subclass(
            cls, inner.size(), dtype=inner.dtype, device=inner.device, layout=inner.layout
        )
        made._inner, made._problem, made._memory = inner, problem, memory
        return made

    def __init__(self, inner: torch.Tensor, problem: Callable[[], str | None], memory: range) -> None:
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
    lenders: list[_Borrowed] = []

    def unwrap(value: Any) -> Any:
        if not isinstance(value, _Borrowed):
            return value
        if (problem := value._problem()) is not None:
            raise ContextError(problem)
        lenders.append(value)
        return value._inner

    def wrap(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or isinstance(value, _Borrowed):
            return value
        values = _values(value)
        for lender in lenders:
            if values is not None and values.data_ptr() in lender._memory:
                return _Borrowed(value, lender._problem, lender._memory)
        return value

    return tree_map(wrap, func(*tree_map(unwrap, args), **tree_map(unwrap, kwargs)))


def _values(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor itself, or the values of a sparse one, if they are bytes somewhere."""
    values = tensor._values() if tensor.layout == torch.sparse_coo else tensor
    return values if values.layout == torch.strided and values.device.type != "meta" else None


def lend(tensor: torch.Tensor, problem: Callable[[], str | None]) -> torch.Tensor:
    """``tensor``, contiguous or sparse, which raises what ``problem`` says, once it says something, when it is used.

    Raises:
        ContextError: from then on, by any operation on it or on a view of it.
    """
    values = _values(tensor)
    assert values is not None
    return _Borrowed(tensor, problem, range(values.data_ptr(), values.data_ptr() + values.nbytes))
