# SPDX-License-Identifier: Apache-2.0
"""Checks of arguments. Each names the argument, what was expected and what came.

A wrong kind of value is a ``TypeError``, a value out of range a ``ValueError``. ``name`` is the
argument as the caller knows it: the name of a parameter, or of an environment variable. This module
imports nothing but the standard library, because the doctor must run when PyTorch is missing, and
policies need not import it.
"""

from __future__ import annotations

import re
from fractions import Fraction
from numbers import Real
from typing import Any

MOST_SECONDS = 1e9
"""The longest deadline. Kernels and stores count nanoseconds in 64 bits; ten times as much would
overflow them."""

_LONGEST_QUOTE = 60
"""Characters of a text that a message shows."""

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def instance(name: str, value: Any, kind: type | tuple[type, ...], expected: str) -> None:
    """Raise unless ``value`` is of this ``kind``, which ``expected`` says in words: "a
    tdcoll.SparseContext"."""
    if not isinstance(value, kind):
        # others may have no better text than their type
        plain = isinstance(value, (str, int, float, bytes))
        raise TypeError(
            f"{name} must be {expected}, got {repr(value) if plain else type(value).__name__}"
        )


def tensor(name: str, value: Any) -> None:
    """Raise unless ``value`` is a tensor."""
    import torch

    instance(name, value, torch.Tensor, "a torch.Tensor")


def whole(name: str, value: Any, least: int, most: int | None = None) -> int:
    """Return ``value``, an int of at least ``least`` and, if ``most`` is given, at most that."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if value < least or (most is not None and value > most):
        expected = f"at least {least}" if most is None else f"{least} to {most}"
        raise ValueError(f"{name} must be {expected}, got {value}")
    return value


def number(name: str, value: Any, least: float, below: float) -> float:
    """Return ``value`` if it is a number of at least ``least`` and less than ``below``; raise
    otherwise."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not least <= value < below:
        raise ValueError(
            f"{name} must be at least {least:g} and less than {below:g}, got {value!r}"
        )
    return value


def seconds(name: str, value: Any) -> float:
    """Return ``value``, a deadline of 0 to :data:`MOST_SECONDS` seconds, without 0, because every
    wait must end."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number of seconds, got {value!r}")
    if not 0 < float(value) <= MOST_SECONDS:  # nor NaN
        raise ValueError(
            f"{name} must be greater than 0 and at most {MOST_SECONDS:.0f} seconds, got {value!r}"
        )
    return float(value)


def _quoted(text: str) -> str:
    """Return ``text`` for a message, cut off if it is long."""
    return repr(text) if len(text) <= _LONGEST_QUOTE else f"{text[:_LONGEST_QUOTE]!r}..."


def decimal(text: str) -> int | None:
    """Return the number that ``text`` writes in the digits 0 to 9, or None if it does not write
    one.

    ``str.isdigit`` also accepts digits that ``int`` refuses, such as "²", and ``int`` refuses
    thousands of digits.
    """
    return int(text) if re.fullmatch("[0-9]{1,18}", text) else None


def parse_whole(text: str, name: str, least: int) -> int:
    """``"08"`` -> 8: the number that ``text`` writes, of at least ``least``. For environment
    variables."""
    number = decimal(text)
    if number is None or number < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, got {_quoted(text)}")
    return number


def parse_bytes(text: str, name: str) -> int:
    """``"64M"`` -> 67108864: NVSHMEM's notation (K, M, G, T are powers of 1024)."""
    number = r"[0-9]{1,30}(?:\.[0-9]{1,30})?"  # int and Fraction refuse thousands of digits
    match = re.fullmatch(rf"\s*({number})\s*([kmgt]?)(?:i?b)?\s*", text, re.IGNORECASE)
    nbytes = 0
    if match is not None:
        nbytes = int(Fraction(match[1]) * _UNITS[match[2].lower()])
    if not 0 < nbytes < 1 << 63:
        raise ValueError(
            f"{name} must be a positive number of bytes such as 67108864, 64M or 2G; got {_quoted(text)}"
        )
    return nbytes


def byte_count(name: str, value: Any) -> int:
    """Return a positive number of bytes, given as an int or as a text for :func:`parse_bytes`."""
    if isinstance(value, str):
        return parse_bytes(value, name)
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, or a text such as '64M' or '2G'; got {value!r}")
    return whole(name, value, 1)


def byte_text(nbytes: int) -> str:
    """``65536`` -> ``"64 KiB"``, ``1000`` -> ``"1000 B"``, ``1500000`` -> ``"1.4 MiB"``."""
    for shift, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if nbytes >> shift:
            whole, rest = divmod(nbytes, 1 << shift)
            return f"{nbytes / (1 << shift):.1f} {unit}" if rest else f"{whole} {unit}"
    return f"{nbytes} B"


def format_bytes(nbytes: int) -> str:
    """4096 -> "4 KB": exact, in the largest unit (powers of 1024) that divides it;
    :func:`parse_bytes` reads it."""
    for shift, unit in ((30, "GB"), (20, "MB"), (10, "KB")):
        if nbytes and nbytes % (1 << shift) == 0:
            return f"{nbytes >> shift} {unit}"
    return f"{nbytes} B"


def shape(name: str, value: Any) -> tuple[int, ...]:
    """Return a shape, given as one size or a sequence of sizes, each an int of at least 0."""
    try:
        if isinstance(value, (bool, str)):
            raise TypeError
        sizes = (value,) if isinstance(value, int) else tuple(value)
        if any(isinstance(size, bool) for size in sizes):
            raise TypeError
        sizes = tuple(size.__index__() for size in sizes)
    except (AttributeError, TypeError):
        raise TypeError(f"{name} must be an int or a sequence of ints, got {value!r}") from None
    if any(size < 0 for size in sizes):
        raise ValueError(f"{name} must have sizes of at least 0, got {list(sizes)}")
    return sizes
