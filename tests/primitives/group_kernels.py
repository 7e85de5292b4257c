# SPDX-License-Identifier: Apache-2.0
"""Kernels whose programs meet, for tests of the functions in which they do."""

import triton.language as tl

import tdcoll.language as tdl
from tdcoll.language.jit import jit
from tdcoll.primitives.group import leaves_last, signal_done, wait_until_done


@jit
def hand_on(mine, word, told, out, monitor, LEAVES: tl.constexpr):
    """Program 0 of PE 0 stores to its memory. Program 1 knows, and tells PE 1, which reads that.

    ``LEAVES``: whichever of the two comes last tells.
    """
    if tdl.my_pe() == 0:
        tells = tl.program_id(0) == 1
        if tl.program_id(0) == 0:
            tl.store(mine, tl.cast(7, tl.int64))
            if not LEAVES:
                signal_done(word)
        elif not LEAVES:
            wait_until_done(word, 1)
        if LEAVES:
            tells = leaves_last(word, 2)
        if tells:
            tdl.st_release(tdl.remote_ptr(told, 1), 1, "sys")
    elif tl.program_id(0) == 0:
        tdl.wait_signal(told, tdl.CMP_GE, 1, monitor, 0, 0)
        tl.store(out, tl.load(tdl.remote_ptr(mine, 0)))
