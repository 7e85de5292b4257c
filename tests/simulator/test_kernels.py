# SPDX-License-Identifier: Apache-2.0
"""How kernels are rewritten: branches of threads, in several threads; and shortcuts in Triton."""

from __future__ import annotations

import gc
import inspect
import itertools
import linecache
import operator
import runpy
import sys
import textwrap
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
import triton.runtime.interpreter as triton_interpreter
from cases import launch, zeros

import tdcoll.language as tdl
from tdcoll.base.errors import TdcollError
from tdcoll.language.jit import jit
from tdcoll.simulator import shortcuts
from tdcoll.testing import World

# ---------------------------------------------------------------------- threads


@jit
def names(out):
    if tdl.tid(0) < 3:
        tl.atomic_add(out, 1)
    else:
        tl.atomic_add(out + 1, 1)
    if not (tdl.tid(0) < 3 or tdl.tid(0) > 5):
        tl.atomic_add(out + 2, 1)
    t = tdl.tid(0)
    t = t // 32
    if t == 1:
        tl.atomic_add(out + 3, 1)
    x = tdl.tid(0)
    x += 1
    x = x * 2
    if x < 9:
        tl.atomic_add(out + 4, x)
    if t == 0 and not (x > 4):
        tl.atomic_add(out + 5, 1)
    half = _half(tdl.tid(0))
    if half == 3:
        tl.atomic_add(out + 6, tdl.tid(0))
    offset = 0
    later = tdl.tid(0) + offset
    offset = 50
    if later == 3:
        tl.store(out + 7, later + offset)


@jit
def _half(value):
    if value.dtype == tl.int32:
        value = value // 2
    return value


@jit
def loops(out, n):
    if tdl.tid(0) < n:
        for k in range(tdl.tid(0), n, tdl.ntid(0)):
            if tdl.tid(0) < 6:
                tl.atomic_add(out + (tdl.tid(0) == 5).to(tl.int32), k)
            else:
                tl.atomic_add(out + 3, 1)
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
def sometimes_of_threads(out, n):
    """A name that has one value for all threads on some paths."""
    if n > 0:
        place = tdl.tid(0)
    else:
        place = n
    if place == 0:
        tl.atomic_add(out, 1)
    place = 1
    tl.store(out + place, 7)


@pytest.mark.parametrize(
    ("kernel", "arguments", "expected"),
    [
        (names, [], [3, 61, 3, 32, 2 + 4 + 6 + 8, 2, 6 + 7, 53]),
        (loops, [100], [sum(2 * i + 64 for i in range(5)), 5 + 69, 1, 100 - 12]),
        (loaded, [torch.eye(64, dtype=torch.int32)[33] * 7], [33, 8, 1, 63, 5, 5]),
        (sometimes_of_threads, [4], [1, 7]),
        (sometimes_of_threads, [0], [1, 7]),
    ],
)
def test_what_threads_compute(kernel, arguments, expected):
    out = zeros(len(expected))
    launch(kernel, out, *arguments)
    assert out.tolist() == expected


TRUTH, BLOCK = (
    ": Triton has it for booleans and pointers only",
    r"a block of shape \[8\] is neither true nor false",
)
LEAVING, BEFORE = (
    r"in a branch on tid\(\) would take the other threads along",
    r"assign y before the branch on tid\(\)",
)
ONE_VALUE = (
    "is different in each thread, and the simulator runs a program as one: use it in the test"
)

REFUSED = [  # the body of a kernel, the error, and what it says
    ("if tl.load(out) and tl.load(out) == 0: pass", TypeError, f"`and` of int32{TRUTH}"),
    ("if not tl.load(out): pass", TypeError, f"`not` of int32{TRUTH}"),
    ("if tl.arange(0, 8) < 4: pass", ValueError, BLOCK),
    ("while tl.load(out + tl.arange(0, 8)) < 4: pass", ValueError, BLOCK),
    ("tl.store(out, 1 if tl.arange(0, 8) < 4 else 2)", ValueError, BLOCK),
    ("t = tdl.tid(0) + 1\ntl.store(out, t)", TdcollError, f"t {ONE_VALUE}"),
    ("tl.store(out + tdl.tid(0), 1)", TdcollError, rf"tid\(\) {ONE_VALUE}"),
    (
        "y = 0\nif tdl.tid(0) == 0: y = 1\ntl.store(out, y)",
        TdcollError,
        f"kernel, line 3 .*: {BEFORE}",
    ),
    ("y = 0\nif tdl.tid(0) == 0:\n  for _ in range(3): y += 1", TdcollError, BEFORE),
    (
        "if tdl.tid(0) == 0: return\ntl.store(out, 1)",
        TdcollError,
        f"kernel, line 2 .*`return` {LEAVING}",
    ),
    ("for i in range(4):\n  if tdl.tid(0) == i: break", TdcollError, f"`break` {LEAVING}"),
    (
        "for i in range(4):\n  if tdl.tid(0) > i:\n    for _ in range(2): continue\n    continue",
        TdcollError,
        f"line 5 .*`continue` {LEAVING}",
    ),
    ("for _ in range(tdl.tid(0), 100, 32): pass", TdcollError, rf"tid\(\) {ONE_VALUE}"),
    ("t = tdl.tid(0)\nwhile t < 9: t += 1", TdcollError, f"t {ONE_VALUE}"),
    ("t = tdl.tid(0)\nt += tl.arange(0, 4)\ntl.store(out, t)", TdcollError, f"t {ONE_VALUE}"),
    ("place = tdl.tid(0) + tl.arange(0, 4)", TdcollError, f"a block {ONE_VALUE}"),
    (
        "x = tl.sum(tl.load(out + tdl.tid(0) * 0 + tl.arange(0, 4)))",
        TdcollError,
        f"a block that is .*{ONE_VALUE}",
    ),
    (
        "x = tdl.putmem_block(out, out, tdl.tid(0), 0)",
        TdcollError,
        f"putmem_block: bytes {ONE_VALUE}",
    ),
]


@pytest.mark.parametrize(("body", "error", "message"), REFUSED)
def test_what_is_refused_says_what_to_write(body, error, message, tmp_path):
    file = tmp_path / "refused.py"  # a file, because Triton reads the source of kernels
    header = "import triton.language as tl\nimport tdcoll.language as tdl\nfrom tdcoll import jit\n\n\n@jit\n"
    file.write_text(f"{header}def kernel(out):\n{textwrap.indent(body, '    ')}\n")
    kernel = runpy.run_path(str(file))["kernel"]
    with pytest.raises(error, match=message):
        launch(kernel, zeros(8))


SOURCE = """
def kernel_{0}(x):
    if x == {0}:
        y = x and not x
        z = y or x
    return x
"""
THREADS, ROUNDS = 8, 10


def function(number: int) -> Any:
    """A function of its own, whose source ``inspect`` finds."""
    source, name = SOURCE.format(number), f"<kernel {number}>"
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    scope: dict[str, Any] = {}
    exec(compile(source, name, "exec"), scope)
    return scope[f"kernel_{number}"]


def collected(phase: str, info: dict[str, int]) -> None:
    sum(range(20))


def test_functions_are_rewritten_in_several_threads() -> None:
    wrong: list[str] = []

    def host(pe: int) -> None:
        def rewrite(number: int) -> None:
            for _ in range(ROUNDS):
                try:
                    kernel = function(number)
                    rewritten = triton_interpreter.InterpretedFunction(kernel).rewrite()
                    if rewritten is kernel or rewritten(number) != number:
                        wrong.append(f"{rewritten}")
                except Exception as error:
                    wrong.append(repr(error))

        # What Python code a garbage collection runs lets other threads go on in the middle of an
        # ast.parse.
        interval, threshold = sys.getswitchinterval(), gc.get_threshold()
        sys.setswitchinterval(1e-6)
        gc.set_threshold(20)
        gc.callbacks.append(collected)
        try:
            threads = [
                threading.Thread(target=rewrite, args=(number,)) for number in range(THREADS)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            gc.callbacks.remove(collected)
            gc.set_threshold(*threshold)
            sys.setswitchinterval(interval)

    World(1).run(host)
    assert wrong == []


TYPES = (
    tl.int1,
    tl.int8,
    tl.int32,
    tl.uint32,
    tl.int64,
    tl.uint64,
    tl.bfloat16,
    tl.float32,
    tl.float64,
)
SHAPES = ((), (4,), (4, 1))
PAIRS = (((), ()), ((), (4,)), ((4,), ()), ((4,), (4,)), ((4,), (4, 1)))
NUMBERS = (0, 5, 32, -7, 2**31, 2**63, True, 0.5, -0.0, tl.constexpr(3), tl.constexpr(70))
NAMES = "add sub mul floordiv mod and_ or_ xor lshift rshift lt le gt ge eq ne"
OPERATORS = [getattr(operator, name) for name in NAMES.split()]


def block(values: Any, dtype: Any, shape: tuple[int, ...]) -> Any:
    """A tensor; a scalar for the shape ``()``."""
    data = np.resize(np.array(values), shape or (1,)).astype(
        triton_interpreter._get_np_dtype(dtype)
    )
    kind = tl.block_type(dtype, list(shape)) if shape else dtype
    return tl.tensor(triton_interpreter.TensorHandle(data, dtype), kind)


def outcome(function: Any, *operands: Any) -> tuple[Any, ...]:
    """What comes of it, in a form that compares: type, bits and what the handle says; or the
    error."""
    try:
        result = function(*operands)
    except Exception as error:
        return type(error), str(error)
    data, shape = result.handle.data, getattr(result.type, "shape", ())
    assert [int(size) for size in result.shape] == [int(size) for size in shape]
    kinds = str(result.type), str(result.dtype), str(result.handle.dtype), data.dtype.str
    return *kinds, int(result.numel), data.shape, data.tobytes()


@pytest.fixture
def compare(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """``compare(function, cases)``: in a kernel, for each case of operands, with and without short
    ways."""

    def compare(function: Any, cases: Iterator[tuple[Any, ...]] | list[tuple[Any, ...]]) -> None:
        compared = []

        def host(pe: int) -> None:
            for operands in cases:
                short = outcome(function, *operands)
                with monkeypatch.context() as patch:
                    for owner, name, _ in shortcuts.shortcuts(check_overflow=False):
                        patch.setattr(owner, name, inspect.unwrap(getattr(owner, name)))
                    assert short == outcome(function, *operands), operands
                compared.append(operands)

        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            World(1).run(host)
        assert len(compared) > 50

    return compare


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("compute", OPERATORS, ids=NAMES.split())
def test_operators(compute: Any, dtype: Any, compare: Any) -> None:
    def operands() -> Iterator[tuple[Any, Any]]:
        some = (3, 200, 0, 9) if dtype in (tl.uint32, tl.uint64, tl.int1) else (3, -200, 0, 9)
        for shape in SHAPES[:2]:
            tensor = block(some, dtype, shape)
            yield from ((tensor, number) for number in NUMBERS)
            yield from (
                (number, tensor) for number in NUMBERS if not isinstance(number, tl.constexpr)
            )
        for shape, size in PAIRS:
            yield from (
                (block(some, dtype, shape), block((2, 7, 1, 31), other, size)) for other in TYPES
            )

    compare(compute, operands())


def test_an_operator_takes_the_short_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the test above compares the long way with itself."""

    def refuse(*operands: Any) -> None:
        raise AssertionError("the long way")

    def host(pe: int) -> None:
        monkeypatch.setattr(
            type(triton_interpreter.interpreter_semantic), "binary_op_type_checking_impl", refuse
        )
        one, four, wide = (
            block(3, tl.int32, ()),
            block((1, 2, 3, 4), tl.int32, (4,)),
            block(5, tl.int64, ()),
        )
        for lhs, rhs in itertools.product((one, four, wide), (one, four, wide, 5, tl.constexpr(5))):
            for compute in OPERATORS:
                compute(lhs, rhs)
        with pytest.raises(AssertionError, match="the long way"):
            block(3, tl.int8, ()) + 1

    World(1).run(host)


def test_pointers_and_casts(compare: Any) -> None:
    others = [*NUMBERS, *(block((2, 7, 1, 31), other, size) for other in TYPES for size in SHAPES)]
    address = tl.pointer_type(tl.int32)
    pointers = [block((4096, 8192, 64, 1 << 40), address, shape) for shape in SHAPES]
    compare(operator.add, list(itertools.product(pointers, others)))
    values = [block((3, 200, 0, 9), source, shape) for source in TYPES for shape in SHAPES]
    compare(lambda value, target: value.to(target), list(itertools.product(values, TYPES)))
