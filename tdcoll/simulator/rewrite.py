# SPDX-License-Identifier: Apache-2.0
"""The source of kernels, rewritten for the interpreter: truth of tensors, and branches on the thread index.

Python's ``and``, ``or``, ``not`` and chained comparisons ask for the truth of a tensor; Triton computes with it. Here
they behave as in the compiler. If ``if`` or ``while`` tests a tensor, it must be a scalar.

Operations on names that may differ from thread to thread (because they are assigned from ``tid``, or in a branch on
it) go through :mod:`.branches`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

import triton.runtime.interpreter as triton_interpreter

from tdcoll.base.errors import TdcollError

__all__ = ["KernelTransformer"]


def _call(function: str, *arguments: ast.expr) -> ast.Call:
    return ast.Call(ast.Name(f"_tdcoll_{function}", ast.Load()), list(arguments), [])


def _lambda(body: ast.expr) -> ast.Lambda:
    return ast.Lambda(ast.arguments([], [], None, [], [], None, []), body)


def _tuple(names: list[str]) -> str:
    """Return the source of a tuple of these names."""
    return f"({''.join(f'{name}, ' for name in names)})"


def _statements(source: str, node: ast.stmt) -> Any:
    """Return statements that replace ``node``."""
    made = ast.parse(source)
    for inner in ast.walk(made):
        ast.copy_location(inner, node)
    return made.body


class KernelTransformer(triton_interpreter.ASTTransformer):
    """Triton's own rewriting of a function, and ours."""

    def __init__(self) -> None:
        self._function = ""
        self._threaded: set[str] = set()
        """Names that may differ from thread to thread."""
        self._splits = 0

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        values = [_lambda(self.visit(value)) for value in node.values]
        return _call("and" if isinstance(node.op, ast.And) else "or", *values)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        self.generic_visit(node)
        return _call("not", node.operand) if isinstance(node.op, ast.Not) else node

    def visit_IfExp(self, node: ast.IfExp) -> ast.expr:
        return self._asked(node)

    visit_While = visit_IfExp

    def visit_Assert(self, node: ast.Assert) -> Any:
        return self._asked(node, "every")

    def _asked(self, node: Any, how: str = "truth") -> Any:
        """Rewrite a node whose ``test`` needs the truth of a value."""
        self.generic_visit(node)
        node.test = _call(how, node.test)
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self._function, self._threaded, self._splits = node.name, set(), 0
        while not (found := set(self._assigned_by_threads(node.body, within=False))) <= self._threaded:
            self._threaded |= found
        self.generic_visit(node)
        given = {argument.arg for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)}
        unset = "\n".join(f"{name} = _tdcoll_unset" for name in sorted(self._threaded - given))
        node.body = [*_statements(unset, node.body[0]), *node.body]
        return node

    def _assigned_by_threads(self, statements: list[ast.stmt], within: bool) -> Iterator[str]:
        """Yield the names that ``statements`` assign a value which may differ from thread to thread.

        ``within``: they stand in a branch on the thread index.
        """
        for statement in statements:
            if isinstance(statement, (ast.Assign, ast.AugAssign, ast.AnnAssign)):
                if within or (statement.value is not None and self._depends(statement.value)):
                    yield from _bound(statement)
                continue
            inside = within or (isinstance(statement, ast.If) and self._depends(statement.test))
            for part in ("body", "orelse"):
                yield from self._assigned_by_threads(getattr(statement, part, []), inside)

    def _depends(self, node: ast.AST) -> bool:
        """Return whether the value of ``node`` may differ from thread to thread."""
        return _calls_tid(node) or bool(self._names(node))

    def _names(self, *nodes: ast.AST, context: type[ast.expr_context] = ast.expr_context) -> list[str]:
        """Return the names in ``nodes`` that may differ from thread to thread."""
        found = (i for node in nodes for i in ast.walk(node) if isinstance(i, ast.Name) and isinstance(i.ctx, context))
        return sorted({name.id for name in found} & self._threaded)

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id in self._threaded and isinstance(node.ctx, ast.Load):
            return _call("read", ast.Constant(node.id), node)
        return node

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        node.value = self.visit(node.value)
        if not self._threaded.isdisjoint(_bound(node)):
            node.value = _call("assigned", _lambda(node.value))
        return super().visit_Assign(node)

    def visit_If(self, node: ast.If) -> Any:
        """Let a branch on the thread index, and its ``else``, run for one thread after the other."""
        if not self._depends(node.test):
            return self._asked(node)
        self._refuse_leaving(node)
        split, assigned, names = self._new_split(*node.body, *node.orelse)
        made = _statements(
            f"{split} = _tdcoll_split(lambda: 0, {assigned}, {names})\n"
            f"for {names} in {split}.threads(True): pass\n"
            f"for {names} in {split}.threads(False): pass\n"
            f"{names} = {split}.after{names}",
            node,
        )
        made[0].value.args[0].body, node.test = self.visit(node.test), ast.Constant(True)
        self.generic_visit(node)
        made[1].body, made[2].body = node.body, node.orelse
        return [statement for statement in made if getattr(statement, "body", True)]

    def _new_split(self, *nodes: ast.AST) -> tuple[str, int, str]:
        """Return the name of a split, how many names of ``nodes`` are assigned there, and these and then the others."""
        self._splits += 1
        assigned = self._names(*nodes, context=ast.Store)
        others = [name for name in self._names(*nodes) if name not in assigned]
        return f"_tdcoll_split_{self._splits}", len(assigned), _tuple([*assigned, *others])

    def _refuse_leaving(self, node: ast.AST, in_loop: bool = False) -> None:
        """Raise if a branch on the thread index leaves a loop or the kernel, because the other threads would stay."""
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Return) or (isinstance(child, (ast.Break, ast.Continue)) and not in_loop):
                what = type(child).__name__.lower()
                raise self._refused(child, f"`{what}` in a branch on tid() would take the other threads along")
            self._refuse_leaving(child, in_loop or isinstance(child, (ast.For, ast.While)))

    def _refused(self, node: ast.AST, why: str) -> TdcollError:
        return TdcollError(f"{self._function}, line {getattr(node, 'lineno', '?')} from its `def`: {why}")


def _bound(statement: Any) -> list[str]:
    """Return the names that an assignment binds."""
    targets = getattr(statement, "targets", None) or [statement.target]
    nodes = (node for target in targets for node in ast.walk(target))
    return [node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]


def _calls_tid(node: ast.AST) -> bool:
    calls = (inner.func for inner in ast.walk(node) if isinstance(inner, ast.Call))
    return any(getattr(called, "attr", getattr(called, "id", "")) == "tid" for called in calls)
