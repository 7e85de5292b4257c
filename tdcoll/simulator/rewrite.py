# SPDX-License-Identifier: Apache-2.0
"""The source of kernels, rewritten for the interpreter: truth of tensors, and branches on the
thread index.

Both call functions of :mod:`.branches`, where the meaning is explained.
"""

from __future__ import annotations

import ast
from typing import Any

import triton.runtime.interpreter as triton_interpreter

from tdcoll.base.errors import TdcollError

_ASSIGNMENTS = (ast.Assign, ast.AugAssign, ast.AnnAssign)


def _call(function: str, *arguments: ast.expr) -> ast.Call:
    return ast.Call(ast.Name(f"_tdcoll_{function}", ast.Load()), list(arguments), [])


def _lambda(body: ast.expr) -> ast.Lambda:
    return ast.Lambda(ast.arguments([], [], None, [], [], None, []), body)


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
        self._function = node.name
        self._threaded = set()
        self._splits = 0
        made = [
            (one, one.value)
            for one in ast.walk(node)
            if isinstance(one, _ASSIGNMENTS) and one.value
        ]
        # A name that depends on the thread makes others depend on it, until there are no more.
        while True:
            found: set[str] = set()
            for one, value in made:
                if self._depends(value):
                    found.update(_bound(one))
            if found <= self._threaded:
                break
            self._threaded |= found
        return self.generic_visit(node)

    def _depends(self, node: ast.AST) -> bool:
        """Return whether the value of ``node`` may differ from thread to thread."""
        return _calls_tid(node) or any(
            isinstance(i, ast.Name) and i.id in self._threaded for i in ast.walk(node)
        )

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
        """Let a branch on the thread index, and its ``else``, run for one thread after the
        other."""
        if not self._depends(node.test):
            return self._asked(node)
        self._refuse_in_branch(node)
        self._splits += 1
        split = f"_tdcoll_split_{self._splits}"
        made = _statements(
            f"{split} = _tdcoll_split(lambda: 0)\n"
            f"for _tdcoll_thread in {split}(True): pass\n"
            f"for _tdcoll_thread in {split}(False): pass",
            node,
        )
        made[0].value.args[0].body = self.visit(node.test)
        node.test = ast.Constant(True)
        self.generic_visit(node)
        made[1].body = node.body
        made[2].body = node.orelse
        return [statement for statement in made if getattr(statement, "body", True)]

    def _refuse_in_branch(self, node: ast.AST, in_loop: bool = False) -> None:
        """Raise if a branch on the thread index leaves a loop or the kernel, because the other
        threads would stay, or assigns a name, which would have the value of one thread
        afterwards."""
        for child in ast.iter_child_nodes(node):
            what = type(child).__name__.lower()
            if isinstance(child, ast.Return) or (
                isinstance(child, (ast.Break, ast.Continue)) and not in_loop
            ):
                raise self._refused(
                    child, f"`{what}` in a branch on tid() would take the other threads along"
                )
            if isinstance(child, _ASSIGNMENTS):
                raise self._refused(child, f"assign {_bound(child)[0]} before the branch on tid()")
            self._refuse_in_branch(child, in_loop or isinstance(child, (ast.For, ast.While)))

    def _refused(self, node: ast.AST, why: str) -> TdcollError:
        return TdcollError(
            f"{self._function}, line {getattr(node, 'lineno', '?')} from its `def`: {why}"
        )


def _bound(statement: Any) -> list[str]:
    """Return the names that an assignment binds."""
    targets = getattr(statement, "targets", None) or [statement.target]
    nodes = (node for target in targets for node in ast.walk(target))
    return [
        node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    ]


def _calls_tid(node: ast.AST) -> bool:
    calls = (inner.func for inner in ast.walk(node) if isinstance(inner, ast.Call))
    return any(getattr(called, "attr", getattr(called, "id", "")) == "tid" for called in calls)
