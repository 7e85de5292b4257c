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

Args of an epilogue: sums: block of results in the accumulator's type (fp32, or fp64 for fp64), not
    rounded yet. rows, columns: int64 blocks that broadcast to the shape of ``sums``: indices in
    this rank's result. inside: bool, broadcasts likewise: whether there is such an element. Loads
    and stores need it as their mask. extra: what the caller has passed for the epilogue: a tuple of
    pointers and numbers, or None.

It returns a block of that shape, which is rounded to the result's type and stored. It has to work
element by element, because kernels call it for blocks of different shapes, of one dimension or
two."""

from tdcoll.language.jit import jit


@jit
def identity(sums, rows, columns, inside, extra):
    """The epilogue that changes nothing."""
    return sums
