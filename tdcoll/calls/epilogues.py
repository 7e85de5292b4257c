# SPDX-License-Identifier: Apache-2.0
"""Epilogues on the host: what a caller passes, and what launches take
(:mod:`tdcoll.primitives.epilogue`)."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch
import triton.language as tl

from tdcoll.primitives.epilogue import Placement

_VALUES = (torch.Tensor, int, float, tl.constexpr, type(None))
"""Types of the fields of ``extra``."""


def check_epilogue(epilogue: Any) -> None:
    """Raise unless ``epilogue`` is None or a function of Triton's."""
    if epilogue is not None and not hasattr(epilogue, "fn"):
        raise TypeError(f"epilogue must be a function of triton.jit or None; got {epilogue!r}")


def split_extra(epilogue: Any, extra: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return an epilogue's tuple in two parts: the tuple with None in place of its tensors, and the
    tensors by their names, ``extra.FIELD``.

    Raises:
        TypeError: ``extra`` is given without an epilogue, or is no NamedTuple of tensors and
            numbers.
    """
    if extra is None:
        return None, {}
    if epilogue is None or not hasattr(extra, "_fields"):
        raise TypeError(f"extra must be a NamedTuple for an epilogue, or None; got {extra!r}")
    fields = dict(zip(extra._fields, extra, strict=True))
    for name, value in fields.items():
        if not isinstance(value, _VALUES):
            raise TypeError(
                f"extra.{name} must be a tensor, a number, a tl.constexpr or None; got {value!r}"
            )
    found = {name: value for name, value in fields.items() if isinstance(value, torch.Tensor)}
    if found:
        extra = extra._replace(**dict.fromkeys(found))
    return extra, {f"extra.{name}": tensor for name, tensor in found.items()}


def join_extra(extra: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Return the tuple for which launches are prepared: with small tensors like the caller's, which
    must not be kept alive.

    Args:
        extra, tensors: As :func:`split_extra` returns them. There may be other tensors, too.
    """
    if extra is None:
        return None
    values = []
    for name, value in zip(extra._fields, extra, strict=True):
        tensor = tensors.get(f"extra.{name}")
        if tensor is not None:
            odd = 0 if is_aligned(tensor) else 1
            value = torch.empty(16, dtype=tensor.dtype, device=tensor.device)[odd:]
        values.append(value)
    return type(extra)(*values)


def is_aligned(tensor: torch.Tensor) -> bool:
    """Return whether a tensor begins at a multiple of 16 bytes, on which compiled code depends."""
    return tensor.data_ptr() % 16 == 0


def describe_epilogue(epilogue: Any) -> str:
    """Return an epilogue's name and a digest of its code, for ranks to compare; the text of a value
    if it is no function, because checks have yet to refuse it."""
    if not hasattr(epilogue, "fn"):
        return repr(epilogue)
    code = epilogue.fn.__code__
    constants = [one for one in code.co_consts if not isinstance(one, CodeType)]
    text = repr((code.co_code, constants, code.co_names))
    return f"{epilogue.__name__} ({hashlib.sha256(text.encode()).hexdigest()[:8]})"


@dataclass(frozen=True)
class Epilogue:
    """The epilogue of the launches of a dense reduction.

    Attributes:
        function: The epilogue, or None.
        extra: The tuple that it gets, of :func:`join_extra`.
        tensors: Names of the fields of ``extra`` that each launch brings.
        types: The names of the types of ``extra`` and of its fields, which are the same on all
            ranks.
        values: The type and the numbers of ``extra`` and the alignment of its tensors, which may
            differ between ranks.
        width, narrow: Of :class:`~tdcoll.primitives.epilogue.Placement`.
    """

    function: Any
    extra: Any = field(compare=False)
    tensors: tuple[str, ...]
    types: Hashable
    values: Hashable
    width: int
    narrow: bool

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of kernels, by name."""
        placement = Placement(0, self.width, tl.constexpr(self.narrow))
        return {"EPILOGUE": self.function, "placement": placement, "extra": self.extra}

    @property
    def changing(self) -> tuple[str, ...]:
        """Arguments that each launch brings, after the addresses of source and result: the address
        of the result of the whole call, and tensors."""
        return ("placement.result", *self.tensors)

    @property
    def compiled_form(self) -> Hashable:
        """Everything that compiled code depends on and that is the same on all ranks."""
        return (self.function, self.types, self.narrow)


NO_EPILOGUE = {"EPILOGUE": None, "placement": None, "extra": None}
"""Arguments of kernels without an epilogue, by name."""
