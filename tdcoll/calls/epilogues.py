# SPDX-License-Identifier: Apache-2.0
"""Epilogues on the host: what a caller passes, and what launches take
(:mod:`tdcoll.primitives.epilogue`)."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import torch
import triton.language as tl

from tdcoll.language.jit import typed_fields
from tdcoll.primitives.epilogue import Placement

_VALUES = (torch.Tensor, int, float, tl.constexpr, type(None))
"""Types of the fields of ``extra``."""


def check_epilogue(epilogue: Any, extra: Any) -> None:
    """Raise unless these are an epilogue and its tuple, as :func:`split_extra` returns it.

    Raises:
        TypeError: ``epilogue`` is no function of Triton's, or ``extra`` is no NamedTuple of tensors
            and numbers, or is there without an epilogue.
    """
    if epilogue is not None and not isinstance(getattr(epilogue, "fn", None), FunctionType):
        raise TypeError(f"epilogue must be a function of triton.jit or None; got {epilogue!r}")
    if extra is None:
        return
    if epilogue is None or not hasattr(extra, "_fields"):
        raise TypeError(f"extra must be a NamedTuple for an epilogue, or None; got {extra!r}")
    for name, value in zip(extra._fields, extra, strict=True):
        if not isinstance(value, _VALUES):
            raise TypeError(
                f"extra.{name} must be a tensor, a number, a tl.constexpr or None; got {value!r}"
            )


def split_extra(extra: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return an epilogue's tuple in two parts: the tuple with None in place of its tensors, and the
    tensors by their names, ``extra.FIELD``. Anything else is returned as it is: ranks compare what
    they pass before one of them refuses it.
    """
    if not hasattr(extra, "_fields"):
        return extra, {}
    fields = dict(zip(extra._fields, extra, strict=True))
    found = {name: value for name, value in fields.items() if isinstance(value, torch.Tensor)}
    if found:
        extra = extra._replace(**dict.fromkeys(found))
    return extra, {f"extra.{name}": tensor for name, tensor in found.items()}


def _identity(value: Any) -> Hashable:
    """Return what tells a field's value apart from all others. Numbers count by type and text,
    because 1 == 1.0 == True and 0.0 == -0.0; functions count by themselves, because several may have
    one name. Those that use it keep the value, so an id stays its own."""
    if isinstance(value, tl.constexpr):
        return (tl.constexpr, _identity(value.value))
    if value is None or isinstance(value, (int, float, str)):
        return (type(value), repr(value))
    return (type(value), id(value))


def identity_of(extra: Any) -> Hashable:
    """Return what tells a tuple without its tensors apart from all others."""
    if not hasattr(extra, "_fields"):
        return _identity(extra)
    return (type(extra), *map(_identity, extra))


def describe_extra(extra: Any) -> str:
    """Return the type and the numbers of a tuple without its tensors, for ranks to compare."""
    if not hasattr(extra, "_fields"):
        return repr(extra) if isinstance(extra, _VALUES) else type(extra).__name__
    fields = []
    for name, value in zip(extra._fields, extra, strict=True):
        plain = getattr(value, "value", value) if isinstance(value, tl.constexpr) else value
        text = repr(plain) if isinstance(plain, (int, float, str)) else describe_epilogue(plain)
        fields.append(f"{name}={'constexpr ' * (plain is not value)}{text}")
    return f"{type(extra).__name__}({', '.join(fields)})"


def types_of(extra: Any, tensors: Iterable[torch.Tensor]) -> tuple[str, ...]:
    """Return the names of the types of an epilogue's tuple and its fields, and the dtypes of its
    tensors."""
    values = (extra, *extra) if hasattr(extra, "_fields") else (extra,)
    names = [type(value).__name__ for value in values]
    return (*names, *(str(getattr(tensor, "dtype", None)) for tensor in tensors))


@functools.cache
def _with_plain_fields(kind: type, fields: tuple[str, ...]) -> type:
    """Return a NamedTuple with the fields of another, of which these are int64."""
    types = {**dict.fromkeys(kind._fields, Any), **typed_fields(kind)}  # type: ignore[attr-defined]
    types |= dict.fromkeys(fields, tl.int64)
    made: type = NamedTuple(kind.__name__, types.items())  # type: ignore[misc]
    return made


def with_plain_numbers(extra: Any) -> Any:
    """Return an epilogue's tuple for launches whose compiled code is the same for all whole
    numbers. By itself Triton makes a constant of a 1, and notes what 16 divides.

    Fields that say their own type stay as they are.
    """
    if extra is None:
        return None
    kind: Any = type(extra)
    own = typed_fields(kind)
    values = zip(extra._fields, extra, strict=True)
    plain = tuple(name for name, value in values if type(value) is int and name not in own)
    return _with_plain_fields(kind, plain)(*extra) if plain else extra


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
    """Return the name of a function of Triton's and a digest of its code, for ranks to compare; of
    anything else its type, or that it is None.

    Compiled, the digest is Triton's own, which has all that the function calls. Interpreted, it
    covers the function alone.
    """
    function = getattr(epilogue, "fn", None)
    if not isinstance(function, FunctionType):
        return "None" if epilogue is None else type(epilogue).__name__
    digest = getattr(epilogue, "cache_key", None)
    if not isinstance(digest, str):
        code = function.__code__
        constants = [one for one in code.co_consts if not isinstance(one, CodeType)]
        text = repr((code.co_code, constants, code.co_names))
        digest = hashlib.sha256(text.encode()).hexdigest()
    return f"{function.__name__} ({digest[:8]})"


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
