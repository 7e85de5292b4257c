# SPDX-License-Identifier: Apache-2.0
"""Kernels with one protection switched off, for tests of what must catch that.

A change is bound to a function and to its syntax tree: comments and line breaks in the sources may change at will.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType

__all__ = ["Change", "installed"]

_MODULES = [  # each may import those before it
    "tdcoll.primitives.group",
    "tdcoll.primitives.stores",
    "tdcoll.primitives.puts",
    "tdcoll.primitives.ll",
    "tdcoll.primitives.lamport",
    "tdcoll.primitives.reduce",
    "tdcoll.primitives.words",
    "tdcoll.primitives.sums",
    "tdcoll.collectives.exchange.kernels_direct",
    "tdcoll.collectives.exchange.kernels_ll",
    "tdcoll.collectives.all_gather.kernels_ring",
    "tdcoll.collectives.all_gather.kernels_puts",
    "tdcoll.collectives.sparse_all_reduce.kernels_lists",
    "tdcoll.collectives.sparse_all_reduce.kernels_values",
    "tdcoll.collectives.sparse_all_reduce.kernels_reduce",
    "tdcoll.collectives.sparse_all_reduce.kernels_nodes",
    "tdcoll.collectives.sparse_all_reduce.kernels_merge",
]


@dataclass(frozen=True)
class Change:
    """Something else in the place of an expression, or of statements that follow each other.

    Attributes:
        where: ``"module.function"``, the module with as many of its packages as tell it from others.
        old: what is replaced wherever it stands in that function; it must stand there.
        new: what stands there instead; an expression for an expression.
    """

    where: str
    old: str
    new: str


class _Replace(ast.NodeTransformer):
    def __init__(self, change: Change) -> None:
        old, new = ast.parse(change.old).body, ast.parse(change.new).body
        self._expression = len(old) == len(new) == 1 and isinstance(old[0], ast.Expr) and isinstance(new[0], ast.Expr)
        self._old, self._new, self.found = [ast.dump(node) for node in old], new, 0
        if self._expression:
            self._old, self._new = [ast.dump(old[0].value)], [new[0].value]  # type: ignore[attr-defined]

    def visit(self, node: ast.AST) -> ast.AST:
        if self._expression and isinstance(node, ast.expr) and ast.dump(node) == self._old[0]:
            self.found += 1
            return self._new[0]
        self.generic_visit(node)
        if not self._expression:
            for field in ("body", "orelse"):
                if isinstance(statements := getattr(node, field, None), list):
                    setattr(node, field, self._without(statements))
        return node

    def _without(self, statements: list[ast.stmt]) -> list[ast.stmt]:
        dumps, kept, length = [ast.dump(statement) for statement in statements], [], len(self._old)
        place = 0
        while place < len(statements):
            if dumps[place : place + length] == self._old:
                self.found += 1
                kept += self._new
                place += length
            else:
                kept.append(statements[place])
                place += 1
        return kept


def _changed(module: ModuleType, changes: Sequence[Change]) -> str:
    """The source of ``module`` with ``changes``."""
    tree = ast.parse(Path(str(module.__file__)).read_text())
    for change in changes:
        name = change.where.rpartition(".")[2]
        functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
        assert functions, f"{module.__name__} has no function {name}"
        replace = _Replace(change)
        replace.visit(functions[0])
        assert replace.found, f"{change.where} no longer holds {change.old!r}"
    return ast.unparse(ast.fix_missing_locations(tree))


@contextmanager
def installed(changes: Sequence[Change], folder: Path, more: Sequence[str] = ()) -> Iterator[None]:
    """Changed copies of the modules of kernels, and of those that import them, in the place of all of them.

    Args:
        folder: for the sources.
        more: names of further modules that may be changed; each may import those before it, and all the usual ones.
    """
    modules = [import_module(name) for name in (*_MODULES, *more)]
    names = [module.__name__ for module in modules]
    named: dict[str, list[Change]] = {name: [] for name in names}
    for change in changes:
        wanted = change.where.rpartition(".")[0]
        meant = [name for name in names if f".{name}".endswith(f".{wanted}")]
        assert len(meant) == 1, f"{wanted} is not one of {names}, but {meant}"
        named[meant[0]].append(change)
    first = min(place for place, name in enumerate(names) if named[name])
    undo = []
    copies: dict[ModuleType, ModuleType] = {}

    def put(owner: object, name: str, value: object) -> None:
        undo.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    try:
        for module in modules[first:]:
            name = module.__name__
            path = folder / f"{name}.py"
            path.write_text(_changed(module, named[name]))
            copy = ModuleType(name)
            copy.__file__ = str(path)
            copies[copy] = module
            undo.append((sys.modules, name, module))
            sys.modules[name] = copy
            exec(compile(path.read_text(), str(path), "exec"), vars(copy))
            for owner in [loaded for key, loaded in sys.modules.items() if key.startswith("tdcoll")]:
                for attribute, value in list(vars(owner).items()):
                    if value is module:
                        put(owner, attribute, copy)
        yield
    finally:
        for owner, name, value in reversed(undo):
            if isinstance(owner, dict):
                owner[name] = value
            else:
                setattr(owner, name, value)
        for owner in [loaded for key, loaded in sys.modules.items() if key.startswith("tdcoll")]:
            for name, value in list(vars(owner).items()):  # of modules first imported meanwhile
                if isinstance(value, ModuleType) and value in copies:
                    setattr(owner, name, copies[value])
