# SPDX-License-Identifier: Apache-2.0
"""The source of kernels, rewritten for the interpreter: truth of tensors, and branches on the thread index.

Python's ``and``, ``or``, ``not`` and chained comparisons ask for the truth of a tensor; Triton computes with it. Here
they do as the compiler does: every tensor is evaluated, and only compile-time values cut an expression short. What does
ask for the truth of a tensor (``if``, ``while``) wants a scalar.

Names that may differ from thread to thread are found (those assigned from ``tid``, or where a branch or loop on it
leads), and what is done with them goes through :mod:`.lanes`.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import triton.runtime.interpreter as triton_interpreter

from tdcoll.errors import TdcollError

__all__ = ["ALL", "AND", "ASSIGN", "EVERY", "NOT", "OR", "READ", "SPLIT", "TRUTH", "UNSET", "KernelTransformer"]

AND, OR, NOT = "_tdcoll_and", "_tdcoll_or", "_tdcoll_not"
TRUTH, EVERY = "_tdcoll_truth", "_tdcoll_every"
READ, ASSIGN, SPLIT, ALL, UNSET = (
    "_tdcoll_read",
    "_tdcoll_assign",
    "_tdcoll_split",
    "_tdcoll_all",
    "_tdcoll_unset",
)

_ELEMENTWISE = frozenset(["tid", "ntid", "program_id", "num_programs", "cast", "to", "minimum", "maximum", "where"])
"""Calls that do the same to the values of all threads at once as to each of them."""
_ELEMENTWISE_NODES = (
    ast.Attribute,
    ast.BinOp,
    ast.BoolOp,
    ast.Compare,
    ast.Constant,
    ast.Name,
    ast.UnaryOp,
    ast.expr_context,
    ast.operator,
    ast.unaryop,
    ast.boolop,
    ast.cmpop,
)
_CHAINS = hasattr(triton_interpreter.ASTTransformer, "visit_Compare")
"""Whether this Triton has comparisons such as ``a < b < c`` (3.9 and later)."""


def _call(function: str, *arguments: ast.expr) -> ast.Call:
    return ast.Call(ast.Name(function, ast.Load()), list(arguments), [])


def _lambda(body: ast.expr) -> ast.Lambda:
    return ast.Lambda(ast.arguments([], [], None, [], [], None, []), body)


def _names(target: ast.expr) -> list[str]:
    """Names that an assignment to ``target`` binds."""
    return [node.id for node in ast.walk(target) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]


def _called(call: ast.Call) -> str:
    return getattr(call.func, "attr", getattr(call.func, "id", ""))


def _values(names: Iterable[str]) -> ast.Lambda:
    return _lambda(ast.Tuple([ast.Name(name, ast.Load()) for name in names], ast.Load()))


class KernelTransformer(triton_interpreter.ASTTransformer):
    """Triton's own rewriting of a function, and ours."""

    def __init__(self) -> None:
        self._function = ""
        self._threaded: set[str] = set()
        """Names that may differ from thread to thread."""
        self._tests = 0

    # ------------------------------------------------------------------ truth

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        values = [_lambda(self.visit(value)) for value in node.values]
        return _call(AND if isinstance(node.op, ast.And) else OR, *values)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        self.generic_visit(node)
        return _call(NOT, node.operand) if isinstance(node.op, ast.Not) else node

    def visit_IfExp(self, node: ast.IfExp) -> ast.expr:
        return self._asked(node)

    def visit_Assert(self, node: ast.Assert) -> Any:
        return self._asked(node, EVERY)

    def _asked(self, node: Any, how: str = TRUTH) -> Any:
        """A node with a ``test``, the truth of which is asked for."""
        self.generic_visit(node)
        node.test = _call(how, node.test)
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        if len(node.ops) > 1 and not _CHAINS:
            raise self._refused(node, "Triton has no chained comparisons before 3.9: write `(a < b) & (b < c)`")
        return super().visit_Compare(node) if _CHAINS else self.generic_visit(node)

    # ------------------------------------------------------------------ threads

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self._function, self._threaded, self._tests = node.name, set(), 0
        while True:
            found = set(self._assigned_by_threads(node.body, within=False))
            if found <= self._threaded:
                break
            self._threaded |= found
        self.generic_visit(node)
        arguments = {argument.arg for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)}
        unset = [
            ast.Assign([ast.Name(name, ast.Store())], ast.Name(UNSET, ast.Load()))
            for name in sorted(self._threaded - arguments)
        ]
        node.body = [*unset, *node.body]
        return node

    def _assigned_by_threads(self, statements: list[ast.stmt], within: bool) -> Iterator[str]:
        """Names that ``statements`` assign a value which may differ from thread to thread.

        ``within``: they stand in a branch or loop on the thread index.
        """
        for statement in statements:
            if isinstance(statement, (ast.Assign, ast.AugAssign, ast.AnnAssign)):
                targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
                if within or (statement.value is not None and self._depends(statement.value)):
                    for target in targets:
                        yield from _names(target)
                continue
            inside = within
            if isinstance(statement, (ast.If, ast.While)):
                inside = within or self._depends(statement.test)
            elif isinstance(statement, ast.For):
                inside = within or self._depends(statement.iter)
            for field in ("body", "orelse"):
                yield from self._assigned_by_threads(getattr(statement, field, []), inside)

    def _depends(self, node: ast.AST) -> bool:
        """Return whether the value of ``node`` may differ from thread to thread."""
        return self._calls_tid(node) or any(True for _ in self._threaded_names(node))

    def _calls_tid(self, node: ast.AST) -> bool:
        return any(isinstance(inner, ast.Call) and _called(inner) == "tid" for inner in ast.walk(node))

    def _threaded_names(self, node: ast.AST) -> Iterator[str]:
        return (i.id for i in ast.walk(node) if isinstance(i, ast.Name) and i.id in self._threaded)

    def _described(self, node: ast.expr) -> list[ast.expr]:
        """An expression as :mod:`.lanes` wants it: to evaluate; whether it calls ``tid``; the values of names that may
        differ; and those of all other names if it does the same to the values of all threads at once, else None."""
        elementwise = all(
            isinstance(inner, _ELEMENTWISE_NODES) or (isinstance(inner, ast.Call) and _called(inner) in _ELEMENTWISE)
            for inner in ast.walk(node)
        )
        used = dict.fromkeys(inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name))
        others = [name for name in used if name not in self._threaded]
        described: list[ast.expr] = [
            ast.Constant(self._calls_tid(node)),
            _values(name for name in used if name in self._threaded),
            _values(others) if elementwise else ast.Constant(None),
        ]
        return [_lambda(self.visit(node)), *described]

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id in self._threaded and isinstance(node.ctx, ast.Load):
            return _call(READ, ast.Constant(node.id), node)
        return node

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        if len(node.targets) > 1:
            raise self._refused(node, "Triton has no assignment to several targets: write one after the other")
        (target,) = node.targets
        names = _names(target)
        if any(name in self._threaded for name in names):
            before: list[ast.expr] = [ast.Name(name, ast.Load()) for name in names]
            several = isinstance(target, ast.Tuple)
            old = ast.Tuple(before, ast.Load()) if several else before[0]
            node.value = _call(ASSIGN, ast.Constant(several), old, *self._described(node.value))
            return node
        node.value = ast.Call(
            ast.Attribute(ast.Name("interpreter_semantic", ast.Load()), "to_tensor", ast.Load()),
            [self.visit(node.value), ast.Constant(False)],
            [],
        )
        return node

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        if not (isinstance(node.target, ast.Name) and node.target.id in self._threaded):
            return self.generic_visit(node)
        value = ast.BinOp(ast.Name(node.target.id, ast.Load()), node.op, node.value)
        return self.visit_Assign(ast.copy_location(ast.Assign([node.target], value), node))

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is None or not (isinstance(node.target, ast.Name) and node.target.id in self._threaded):
            return self.generic_visit(node)
        return self.visit_Assign(ast.copy_location(ast.Assign([node.target], node.value), node))

    def visit_NamedExpr(self, node: ast.NamedExpr) -> ast.AST:
        if node.target.id in self._threaded or self._depends(node.value):
            raise self._refused(node, f"`{node.target.id} := ...` depends on tid(): assign it before")
        return self.generic_visit(node)

    def visit_If(self, node: ast.If) -> Any:
        if not self._depends(node.test):
            return self._asked(node)
        self._refuse_leaving(node)
        name = f"_tdcoll_test_{self._tests}"
        self._tests += 1
        result: list[ast.stmt] = [ast.Assign([ast.Name(name, ast.Store())], _call(SPLIT, *self._described(node.test)))]
        for branch, statements in (("where_true", node.body), ("where_false", node.orelse)):
            if statements:
                threads = ast.Attribute(ast.Name(name, ast.Load()), branch, ast.Load())
                result.append(_for_each(ast.Call(threads, [], []), self._visited(statements)))
        return result

    def visit_For(self, node: ast.For) -> Any:
        for name in _names(node.target):
            if name in self._threaded:
                raise self._refused(node, f"{name} depends on tid(): give the loop's variable another name")
        return self._loop(node, node.iter, self.generic_visit)

    def visit_While(self, node: ast.While) -> Any:
        return self._loop(node, node.test, self._asked)

    def _loop(self, node: Any, decides: ast.expr, visit: Callable[[Any], Any]) -> Any:
        """Every thread runs a loop on the thread index by itself."""
        if not self._depends(decides):
            return visit(node)
        names = list(dict.fromkeys(self._threaded_names(decides)))
        threads = _call(ALL, ast.Constant(self._calls_tid(decides)), _values(names))
        for inner in ast.walk(node):
            if isinstance(inner, ast.Return):
                raise self._refused(inner, "`return` in a loop on tid() would end the other threads as well")
        return _for_each(threads, [visit(node)])

    def _visited(self, statements: list[ast.stmt]) -> list[ast.stmt]:
        visited: list[ast.stmt] = []
        for statement in statements:
            result = self.visit(statement)
            visited += result if isinstance(result, list) else [result]
        return visited

    def _refuse_leaving(self, branch: ast.If) -> None:
        """The other threads stay when one leaves a loop or the kernel from a branch on the thread index."""

        def look(node: ast.AST, in_loop: bool) -> None:
            if isinstance(node, ast.Return) or (isinstance(node, (ast.Break, ast.Continue)) and not in_loop):
                what = type(node).__name__.lower()
                raise self._refused(node, f"`{what}` in a branch on tid() would take the other threads along")
            for child in ast.iter_child_nodes(node):
                look(child, in_loop or isinstance(node, (ast.For, ast.While)))

        look(branch, False)

    def _refused(self, node: ast.AST, why: str) -> TdcollError:
        return TdcollError(f"{self._function}, line {getattr(node, 'lineno', '?')} from its `def`: {why}")


def _for_each(threads: ast.expr, body: list[ast.stmt]) -> ast.For:
    return ast.For(ast.Name("_tdcoll_thread", ast.Store()), threads, body, [])
