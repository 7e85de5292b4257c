# SPDX-License-Identifier: Apache-2.0
"""Kernels written for threads: ``if <test on tid>`` becomes a loop over the threads for which it holds.

A program is one thread of control here, so a test on the thread index cannot branch. Instead its body runs
once for each thread that the test selects, one after another, and ``tid(0)`` inside is that thread's index:

- ``if tid(0) < n: ... else: ...``, also with ``and``, ``or``, ``not``, also nested;
- ``t = tid(0)`` (or any expression of it) and later ``if t < n``: the name stands for the expression;
- ``for i in range(tid(0), n, ntid(0))``: runs for every thread.

Not possible: ``tid`` anywhere else (the value would be a different one in each thread), ``while`` on ``tid``,
variables that a branch on ``tid`` assigns and later code reads, and races between threads of one block.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import triton.language as tl
import triton.runtime.interpreter as triton_interpreter

from tdcoll.errors import TdcollError

__all__ = ["LaneTransformer", "lane_globals", "thread_index"]

_SELECTED = "_tdcoll_selected_threads"
_ALL = "_tdcoll_all_threads"
_VECTOR = -2
"""``Task.lane`` while a test is evaluated for all threads at once."""


def thread_index(task: Any, axis: int) -> Any:
    """``tid(axis)`` of the thread that ``task`` runs as."""
    if axis != 0:
        return _int32(np.zeros(1, np.int32))
    if task.lane == _VECTOR:
        return _int32(np.arange(task.threads, dtype=np.int32))
    if task.lane is None:
        raise TdcollError(
            "tid() is different in each thread, and the simulator runs a program as one: use it in the test "
            "of an "
            "`if`, in the range of a `for`, or inside of them"
        )
    return _int32(np.array([task.lane], np.int32))


def _int32(data: np.ndarray[Any, Any]) -> Any:
    kind = tl.int32 if data.size == 1 else tl.block_type(tl.int32, [data.size])
    return tl.tensor(triton_interpreter.TensorHandle(data, tl.int32), kind)


def lane_globals(machine: Callable[[], Any]) -> dict[str, Callable[..., Iterator[int]]]:
    """The functions that rewritten kernels call, by name; ``machine`` gives the machine."""

    def selected(test: Callable[[], Any]) -> Iterator[int]:
        task = machine().program
        outer = task.lane
        if outer is not None:  # inside one thread already: an ordinary branch
            if bool(test()):
                yield outer
            return
        task.lane = _VECTOR
        try:
            chosen = test()
        finally:
            task.lane = None
        data = chosen.handle.data.reshape(-1) if isinstance(chosen, tl.tensor) else np.array([bool(chosen)])
        yield from _each(task, np.flatnonzero(np.broadcast_to(data, (task.threads,))).tolist())

    def everyone() -> Iterator[int]:
        task = machine().program
        if task.lane is not None:
            yield task.lane
        else:
            yield from _each(task, list(range(task.threads)))

    def _each(task: Any, lanes: list[int]) -> Iterator[int]:
        try:
            for lane in lanes:
                task.lane = lane
                yield lane
        finally:
            task.lane = None

    return {_SELECTED: selected, _ALL: everyone}


class _Vectorize(ast.NodeTransformer):
    """``and``, ``or``, ``not`` of a test as ``&``, ``|``, ``== 0``, which work on all threads at once."""

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        self.generic_visit(node)
        operator: ast.operator = ast.BitAnd() if isinstance(node.op, ast.And) else ast.BitOr()
        result = node.values[0]
        for value in node.values[1:]:
            result = ast.BinOp(result, operator, value)
        return result

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        self.generic_visit(node)
        if isinstance(node.op, ast.Not):
            return ast.Compare(node.operand, [ast.Eq()], [ast.Constant(0)])
        return node


def _lambda(body: ast.expr) -> ast.Lambda:
    return ast.Lambda(ast.arguments([], [], None, [], [], None, []), body)


class LaneTransformer(triton_interpreter.ASTTransformer):
    """Triton's own rewriting, and the loops over threads in functions that call ``tid``."""

    def __init__(self) -> None:
        self._thread_names: set[str] = set()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self._thread_names = set()
        while True:
            names = {
                target.id
                for inner in ast.walk(node)
                if isinstance(inner, ast.Assign) and self._depends(inner.value)
                for target in inner.targets
                if isinstance(target, ast.Name)
            }
            if names <= self._thread_names:
                break
            self._thread_names |= names
        stored = [
            inner.id
            for inner in ast.walk(node)
            if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store) and inner.id in self._thread_names
        ]
        for name in self._thread_names:
            if stored.count(name) > 1:
                raise TdcollError(
                    f"{node.name}: {name} depends on tid() and is assigned {stored.count(name)} times; the "
                    "simulator "
                    "supports one assignment"
                )
        return self.generic_visit(node)

    def _depends(self, node: ast.AST) -> bool:
        """Whether the value of ``node`` depends on the thread."""
        for inner in ast.walk(node):
            if isinstance(inner, ast.Call):
                name = getattr(inner.func, "attr", getattr(inner.func, "id", ""))
                if name == "tid":
                    return True
            elif isinstance(inner, ast.Name) and inner.id in self._thread_names:
                return True
        return False

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        if self._depends(node.value) and all(isinstance(target, ast.Name) for target in node.targets):
            node.value = _lambda(self.visit(node.value))  # evaluated at each use, by the thread that uses it
            return node
        return super().visit_Assign(node)

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id in self._thread_names and isinstance(node.ctx, ast.Load):
            return ast.Call(node, [], [])
        return node

    def visit_If(self, node: ast.If) -> Any:
        if not self._depends(node.test):
            return self.generic_visit(node)
        test = _Vectorize().visit(self.visit(node.test))
        branches = [self._loop(test, node.body)]
        if node.orelse:
            opposite = ast.Compare(test, [ast.Eq()], [ast.Constant(0)])
            branches.append(self._loop(opposite, node.orelse))
        return branches

    def _loop(self, test: ast.expr, body: list[ast.stmt]) -> ast.For:
        visited: list[ast.stmt] = []
        for statement in body:
            result = self.visit(statement)
            visited += result if isinstance(result, list) else [result]
        threads = ast.Call(ast.Name(_SELECTED, ast.Load()), [_lambda(test)], [])
        return ast.For(ast.Name("_tdcoll_thread", ast.Store()), threads, visited, [])

    def visit_For(self, node: ast.For) -> Any:
        if not self._depends(node.iter):
            return self.generic_visit(node)
        inner = self.generic_visit(node)
        threads = ast.Call(ast.Name(_ALL, ast.Load()), [], [])
        return ast.For(ast.Name("_tdcoll_thread", ast.Store()), threads, [inner], [])

    def visit_While(self, node: ast.While) -> ast.AST:
        if self._depends(node.test):
            raise TdcollError("`while` on tid() is not supported in the simulator: use `if` or `for`")
        return self.generic_visit(node)
