# SPDX-License-Identifier: Apache-2.0
"""Epilogues: functions of the user's between the sum over ranks and the store of the result.

An epilogue is a Triton function that a kernel calls for every block of results, in registers::

    class Residual(NamedTuple):
        address: Any
        stride: tl.int64

    @triton.jit
    def add_residual(sums, rows, columns, inside, extra):
        at = extra.address + rows * extra.stride + columns
        return sums + tl.load(at, mask=inside, other=0.0)

Args of an epilogue: sums: block of results in the accumulator's type (fp32, or fp64 for fp64; of
    integers int32 or int64), not rounded yet; of a mean, divided already. rows, columns: int64
    blocks that broadcast to the shape of ``sums``: indices in this rank's result, whose last
    dimension has the columns and all others the rows. inside: bool, broadcasts likewise: whether
    there is such an element. Loads and stores need it as their mask. extra: what the caller has
    passed for the epilogue: a tuple of pointers and numbers, or None.

It returns a block of that shape, which is rounded to the result's type and stored. It has to work
element by element, because kernels call it for blocks of different shapes, of one dimension or
two.

A kernel of a dense reduction passes a tuple ``(EPILOGUE, placement, extra)`` down to
:func:`result_of`, which is called once for each element of the result, where all ranks' parts have
been added: by every rank in an all-reduce in one shot, otherwise by the rank that sums the element
and sends the result to the others. If a call has no epilogue, all three are None, and the compiled
code is the same as if there were no epilogues."""

from typing import NamedTuple

import triton.language as tl

from tdcoll.language.jit import jit
from tdcoll.primitives.reduce import PROD, finish, rounded


class Placement(NamedTuple):
    """Where the elements of a launch lie in the result of the call, which may take several
    launches.

    Attributes:
        result: Address of the result's first element.
        width: Elements of a row of the result: its last dimension.
        narrow: Whether 32 bits hold every index in the result, which makes divisions faster.
    """

    result: tl.int64
    width: tl.int64
    narrow: tl.constexpr


@jit
def identity(sums, rows, columns, inside, extra):
    """The epilogue that changes nothing."""
    return sums


class Factor(NamedTuple):
    """The tuple of :func:`times_factor`.

    Attributes:
        factor: The number that multiplies sums.
    """

    factor: float


@jit
def times_factor(sums, rows, columns, inside, extra):
    """The epilogue that multiplies sums by a number, in fp32. ``extra`` is a :class:`Factor`."""
    return sums * extra.factor


@jit
def result_of(sum, world, address, index, inside, epilogue, DTYPE: tl.constexpr, OP: tl.constexpr):
    """Return elements of a dense reduction as they are stored: the ``sum`` of all ranks' parts,
    divided if the reduction is a mean, through the epilogue, and rounded.

    Args:
        address: of an element of the result.
        index: block of elements from there.
        inside: bool, like ``index``: whether there is such an element.
        epilogue: see the module.
    """
    total = finish(sum, world, OP)
    if epilogue[0] is None:
        result = rounded(total, DTYPE, OP)
    else:
        # Without names for parts of the tuple, because a name stands for a number at run time.
        first = (address - epilogue[1].result) // (DTYPE.primitive_bitwidth // 8)
        place = first + index
        width = epilogue[1].width
        if epilogue[1].narrow:
            rows = (place.to(tl.int32) // width.to(tl.int32)).to(tl.int64)
        else:
            rows = place // width
        made = epilogue[0](total, rows, place - rows * width, inside, epilogue[2])
        # PROD, because what an epilogue returns may be -0.0, as a product may be.
        result = rounded(made.to(total.dtype), DTYPE, PROD)
    return result
