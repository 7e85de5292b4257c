# SPDX-License-Identifier: Apache-2.0
"""Kernels written for threads: names that differ from thread to thread, branches, loops, and what is refused."""

from __future__ import annotations

import pytest
import torch
import triton.language as tl

import tdcoll
import tdcoll.language as tdl
from tdcoll.language.jit import jit
from tdcoll.testing import World


def launch(kernel, *arguments, num_warps=2):
    World(1).run(lambda pe: kernel[(1,)](*arguments, num_warps=num_warps))


@jit
def reassigned(out):
    t = tdl.tid(0)
    t = t // 32
    if t == 1:
        tl.atomic_add(out, 1)
    x = tdl.tid(0)
    x += 1
    x: tl.int32 = x * 2
    if x < 9:
        tl.atomic_add(out + 1, x)
    if t == 0 and not (x > 4):
        tl.atomic_add(out + 2, 1)


@jit
def assigned_in_branches(out):
    y = 0
    base = 100
    if tdl.tid(0) < 4:
        y = tdl.tid(0) * 2
        z = y + base
        tl.atomic_add(out, z)
        if y > 3:
            tl.atomic_add(out + 1, 1)
    else:
        y = y + 1
        if y == 1:
            tl.atomic_add(out + 2, 1)
    y = 7  # the same in all threads again
    tl.store(out + 3, y)


@jit
def loops(out, n):
    i = tdl.tid(0)
    while i < n:
        i += tdl.ntid(0)
        tl.atomic_add(out, i)
    for k in range(tdl.tid(0), n, tdl.ntid(0)):
        total = k * 2
        if tdl.tid(0) == 5:
            tl.atomic_add(out + 1, total)
    last = tdl.tid(0)
    for _ in range(3):  # a loop of the program
        last = last + 100
    if last == 310:
        tl.atomic_add(out + 2, 1)


@jit
def loaded(out, values):
    mine = tl.load(values + tdl.tid(0))
    here, there = tdl.tid(0), mine + 1
    if mine == 7:
        tl.store(out, here)
        tl.store(out + 1, there)
    if tl.load(values + tdl.tid(0)) == 7:
        tl.atomic_add(out + 2, 1)
    else:
        tl.atomic_add(out + 3, 1)
    place = out + 4 + tdl.tid(0) % 2
    if tdl.tid(0) < 10:
        tl.atomic_add(place, 1)


@jit
def later_changes_do_not_count(out):
    offset = 0
    t = tdl.tid(0) + offset
    offset = 50
    if t == 3:
        tl.store(out, t + offset)


@jit
def of_one_value(out, n):
    """Assigned in a branch on the thread, and elsewhere: what all threads have in common needs no thread."""
    where = out
    if tdl.tid(0) < n:
        where = out + 1
        tl.atomic_add(where, 1)
    where = out + 2 + tl.arange(0, 2)
    if n > 0:
        tl.store(where, 5)
    seen = tl.load(where)
    tl.store(where, seen + 1)


@jit
def _half(value):
    if value.dtype == tl.int32:
        value = value // 2
    return value


@jit
def of_helpers(out):
    t = _half(tdl.tid(0))
    if t == 3:
        tl.atomic_add(out, tdl.tid(0))


CASES = [
    (reassigned, (), [32, 2 + 4 + 6 + 8, 2]),
    (assigned_in_branches, (), [100 + 102 + 104 + 106, 2, 60, 7]),
    (loops, (100,), [sum(i + 64 for i in range(64)) + sum(i + 128 for i in range(36)), 2 * (5 + 69), 1]),
    (loaded, ("values",), [33, 8, 1, 63, 5, 5]),
    (later_changes_do_not_count, (), [53]),
    (of_one_value, (4,), [0, 4, 6, 6]),
    (of_one_value, (0,), [0, 0, 1, 1]),
    (of_helpers, (), [6 + 7]),
]


@pytest.mark.parametrize(("kernel", "arguments", "expected"), CASES, ids=lambda value: getattr(value, "__name__", None))
def test_what_threads_compute(kernel, arguments, expected):
    values = torch.zeros(64, dtype=torch.int32)
    values[33] = 7
    out = torch.zeros(len(expected), dtype=torch.int32)
    launch(kernel, out, *(values if argument == "values" else argument for argument in arguments))
    assert out.tolist() == expected


@jit
def read_outside(out):
    t = tdl.tid(0) + 1
    tl.store(out, t)


@jit
def read_after_the_branch(out):
    y = 0
    if tdl.tid(0) == 0:
        y = 1
    tl.store(out, y)


@jit
def read_before_it_has_a_value(out):
    if tdl.tid(0) == 0:
        y = 1
    if y == 1:
        tl.store(out, 1)


@jit
def spinning_together(out):
    done = 0
    while done == 0:
        if tdl.tid(0) == 0:
            done = 1


@jit
def returns(out):
    if tdl.tid(0) == 0:
        return
    tl.store(out, 1)


@jit
def leaves_a_loop(out):
    for i in range(4):
        if tdl.tid(0) == i:
            break


@jit
def skips(out):
    for i in range(4):
        if tdl.tid(0) > i:
            for _ in range(2):
                continue
            continue


@jit
def returns_from_a_loop(out):
    for _ in range(tdl.tid(0), 100, 32):
        return


@jit
def block_of_each_thread(out):
    place = tdl.tid(0) + tl.arange(0, 4)
    if tdl.tid(0) == 0:
        tl.store(out + place, 1)


@jit
def reduced_in_each_thread(out):
    total = tl.sum(tl.load(out + tdl.tid(0) * 0 + tl.arange(0, 4)))
    if tdl.tid(0) == 0:
        tl.store(out, total)


@jit
def scalar_argument(out):
    if tdl.putmem_block(out, out, tdl.tid(0), 0) is None:
        pass


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (read_outside, "t is different in each thread, and the simulator runs a program as one: use it in the test"),
        (read_after_the_branch, r"y has no value here: what a branch or loop on tid\(\) assigns is gone at its end"),
        (read_before_it_has_a_value, "y has no value here"),
        (spinning_together, "done has no value here"),
        (
            returns,
            r"returns, line 3 from its `def`: `return` in a branch or loop on tid\(\) would take",
        ),
        (leaves_a_loop, r"`break` in a branch or loop on tid\(\)"),
        (skips, r"line 6 .*`continue` in a branch or loop on tid\(\)"),
        (returns_from_a_loop, r"line 3 .*`return` in a branch or loop on tid\(\)"),
        (block_of_each_thread, "a block is different in each thread"),
        (reduced_in_each_thread, "a block that is reduced or scanned is different in each thread"),
        (scalar_argument, "putmem_block: bytes is different in each thread"),
    ],
)
def test_what_is_refused_says_what_to_write(kernel, message):
    with pytest.raises(tdcoll.TdcollError, match=message):
        launch(kernel, torch.zeros(4, dtype=torch.int32))
