# SPDX-License-Identifier: Apache-2.0
"""Kernels with one protection switched off, for tests of what must catch that.

A change is bound to a function and to its syntax tree: comments and line breaks in the sources may
change at will, and a parameter that a kernel gets concerns only the changes that name it.
"""

from __future__ import annotations

import ast
import copy
import re
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from tdcoll.base.limits import COLLECTIVES

__all__ = [
    "Argument",
    "Call",
    "Change",
    "Inserted",
    "Moved",
    "Mutant",
    "dropped",
    "installed",
    "missing",
    "no_wait",
]

MODULES = [
    "tdcoll.primitives.epilogue",
    "tdcoll.primitives.group",
    "tdcoll.primitives.stores",
    "tdcoll.primitives.puts",
    "tdcoll.primitives.ll",
    "tdcoll.primitives.lamport",
    "tdcoll.primitives.reduce",
    "tdcoll.primitives.words",
    "tdcoll.primitives.sums",
    "tdcoll.primitives.copies",
    "tdcoll.calls.copies",
    "tdcoll.collectives.exchange.kernels_direct",
    "tdcoll.collectives.exchange.kernels_ll",
    "tdcoll.collectives.exchange.kernels_loop",
    "tdcoll.collectives.all_gather.kernels_ring",
    "tdcoll.collectives.all_gather.kernels_puts",
    "tdcoll.collectives.all_to_all.kernels_puts",
    "tdcoll.collectives.broadcast.kernels",
    "tdcoll.collectives.reduce_scatter.kernels_direct",
    "tdcoll.collectives.reduce_scatter.kernels_loop",
    "tdcoll.collectives.reduce_scatter.kernels_puts",
    "tdcoll.collectives.reduce_scatter.kernels_words",
    "tdcoll.collectives.all_reduce.kernels_words",
    "tdcoll.collectives.all_reduce.kernels_direct",
    "tdcoll.collectives.all_reduce.kernels_loop",
    "tdcoll.collectives.all_reduce.kernels_puts",
    "tdcoll.collectives.all_reduce.kernels_nodes",
    "tdcoll.fused.kernels_rows",
    "tdcoll.fused.kernels",
    "tdcoll.fused.matmul.product",
    "tdcoll.fused.matmul.kernels_gather",
    "tdcoll.fused.matmul.kernels_scatter",
    "tdcoll.fused.matmul.kernels_all_reduce",
    "tdcoll.fused.matmul.copies",
    "tdcoll.collectives.index_match.kernels",
    "tdcoll.collectives.sparse_all_reduce.kernels_tables",
    "tdcoll.collectives.sparse_all_reduce.kernels_lists",
    "tdcoll.collectives.sparse_all_reduce.kernels_values",
    "tdcoll.collectives.sparse_all_reduce.kernels_reduce",
    "tdcoll.collectives.sparse_all_reduce.kernels_nodes",
    "tdcoll.collectives.sparse_all_reduce.kernels_merge",
]
"""Of kernels; each may import those before it."""

HOSTS = [
    f"tdcoll.collectives.{name}.op" for name in (*COLLECTIVES, "sparse_all_reduce", "index_match")
]
HOSTS += ["tdcoll.fused.rms_norm"]
"""They name kernels, and have to be imported before one is replaced."""


def _parsed(text: str) -> list[ast.stmt]:
    return ast.parse(text).body


def _is(node: ast.AST, call: str, of: str) -> bool:
    """Whether a node is a call of this function, with this argument if one is named."""
    if not isinstance(node, ast.Call) or ast.unparse(node.func) != call:
        return False
    return not of or ast.unparse(ast.parse(of, mode="eval")) in map(ast.unparse, node.args)


def _has(node: ast.AST, call: str, of: str = "") -> bool:
    return any(_is(inner, call, of) for inner in ast.walk(node))


def _lists(function: ast.AST) -> Iterator[list[ast.stmt]]:
    """All lists of statements of a function, inner ones first."""
    for node in reversed(list(ast.walk(function))):
        for name in ("orelse", "body"):
            statements = getattr(node, name, None)
            if isinstance(statements, list):
                yield statements


class _Replace(ast.NodeTransformer):
    """Puts expressions in the place of those for which ``new`` returns one."""

    def __init__(self, new: Callable[[ast.expr], ast.expr | None]) -> None:
        self._new = new
        self.found = 0

    def visit(self, node: ast.AST) -> ast.AST:
        new = self._new(node) if isinstance(node, ast.expr) else None
        if new is None:
            return self.generic_visit(node)
        self.found += 1
        return new


def _replaced(function: ast.AST, new: Callable[[ast.expr], ast.expr | None]) -> int:
    replace = _Replace(new)
    replace.visit(function)
    return replace.found


@dataclass(frozen=True)
class Change:
    """Something else in the place of an expression, or of statements that follow each other.

    Attributes:
        where: ``"module.function"``, the module with as many of its packages as tell it from
            others; or ``"module.Class.method"``.
        old: what is replaced wherever it stands in that function; it must stand there.
        new: what stands there instead; an expression for an expression.
    """

    where: str
    old: str
    new: str

    def made(self, function: ast.AST) -> int:
        """Change a function; return how often."""
        old = _parsed(self.old)
        new = _parsed(self.new)
        wanted = [ast.dump(node) for node in old]
        one_each = len(old) == len(new) == 1
        if one_each and isinstance(old[0], ast.Expr) and isinstance(new[0], ast.Expr):
            before = ast.dump(old[0].value)
            after = new[0].value
            return _replaced(function, lambda node: after if ast.dump(node) == before else None)
        found = 0
        for statements in _lists(function):
            dumps = [ast.dump(statement) for statement in statements]
            place = 0
            while place < len(dumps):
                if dumps[place : place + len(old)] == wanted:
                    statements[place : place + len(old)] = copy.deepcopy(new)
                    dumps[place : place + len(old)] = [""] * len(new)
                    found += 1
                place += 1
        return found


@dataclass(frozen=True)
class Call:
    """Something else in the place of calls of a function.

    Attributes:
        where: as for :class:`Change`.
        call: the function, as it is called there.
        new: what stands there instead: an expression, or statements for a statement, in which
            ``{0}`` is the first argument, and so on, and ``{call}`` the whole call.
        of: an argument of the calls that are meant; all, if not given.
    """

    where: str
    call: str
    new: str
    of: str = ""

    def made(self, function: ast.AST) -> int:
        """Change a function; return how often."""

        def new(node: ast.Call) -> list[ast.stmt]:
            return _parsed(self.new.format(*map(ast.unparse, node.args), call=ast.unparse(node)))

        if (
            isinstance(_parsed(self.new.format(*["x"] * 9, call="x"))[0], ast.Expr)
            and "\n" not in self.new
        ):
            return _replaced(
                function,
                lambda node: new(node)[0].value if _is(node, self.call, self.of) else None,  # type: ignore
            )
        found = 0
        for statements in _lists(function):
            for place, statement in reversed(list(enumerate(statements))):
                value = getattr(statement, "value", None)
                if value is not None and _is(value, self.call, self.of):
                    statements[place : place + 1] = new(value)
                    found += 1
        return found


def dropped(where: str, call: str, of: str = "") -> Call:
    """Statements that call a function are left out."""
    return Call(where, call, "pass", of)


@dataclass(frozen=True)
class Argument:
    """Another argument in calls of a function.

    Attributes:
        where, call, of: as for :class:`Call`.
        old, new: the argument, and what is passed instead.
    """

    where: str
    call: str
    old: str
    new: str
    of: str = ""

    def made(self, function: ast.AST) -> int:
        """Change a function; return how often."""
        old = ast.dump(ast.parse(self.old, mode="eval").body)
        found = 0
        for node in list(ast.walk(function)):
            if _is(node, self.call, self.of):
                assert isinstance(node, ast.Call)
                for place, argument in enumerate(node.args):
                    if ast.dump(argument) == old:
                        node.args[place] = ast.parse(self.new, mode="eval").body
                        found += 1
        return found


def no_wait(where: str, call: str = "tdl.wait_signal", of: str = "") -> Argument:
    """A wait for the epoch waits for nothing."""
    return Argument(where, call, "epoch", "0", of)


@dataclass(frozen=True)
class Inserted:
    """Statements before, or ``behind``, those that call a function.

    Attributes:
        where, call, of: as for :class:`Call`.
        new: the statements.
        behind: where they stand.
    """

    where: str
    call: str
    new: str
    behind: bool = False
    of: str = ""

    def made(self, function: ast.AST) -> int:
        """Change a function; return how often."""
        found = 0
        for statements in _lists(function):
            for place, statement in reversed(list(enumerate(statements))):
                if not hasattr(statement, "body") and _has(statement, self.call, self.of):
                    at = place + 1 if self.behind else place
                    statements[at:at] = _parsed(self.new)
                    found += 1
        return found


@dataclass(frozen=True)
class Moved:
    """The statement in which a function is called stands behind one in which another is, which used
    to follow it.

    Attributes:
        where: as for :class:`Change`.
        call, behind: the functions.
        instead: what stands where the statement was.
    """

    where: str
    call: str
    behind: str
    instead: str = "pass"

    def made(self, function: ast.AST) -> int:
        """Change a function; return how often."""
        found = 0
        for statements in _lists(function):
            calls = [_has(statement, self.call) for statement in statements]
            others = [_has(statement, self.behind) for statement in statements]
            if any(calls) and any(others):
                old = calls.index(True)
                to = others.index(True)
                if old < to:
                    statement = statements[old]
                    statements[old] = _parsed(self.instead)[0]
                    statements.insert(to + 1, statement)
                    found += 1
        return found


AnyChange = Change | Call | Argument | Inserted | Moved


def _place(where: str) -> tuple[str, list[str]]:
    """Return the module that ``where`` names, and the names of class and function in it."""
    parts = where.split(".")
    inside = 2 if parts[-2][:1].isupper() else 1
    return ".".join(parts[:-inside]), parts[-inside:]


def _functions(tree: ast.Module, names: Sequence[str]) -> Iterator[ast.FunctionDef]:
    """The functions of this name, or those of a class; of the simulator's and the GPU's, the
    simulator's first."""
    *classes, name = names
    for node in tree.body:
        inner = node.body + node.orelse if isinstance(node, ast.If) else [node]
        if classes:
            inner = node.body if isinstance(node, ast.ClassDef) and node.name == classes[0] else []
        yield from (
            each for each in inner if isinstance(each, ast.FunctionDef) and each.name == name
        )


def _changed(module: ModuleType, changes: Sequence[AnyChange]) -> str:
    """The source of ``module`` with ``changes``."""
    tree = ast.parse(Path(str(module.__file__)).read_text())
    for change in changes:
        functions = list(_functions(tree, _place(change.where)[1]))
        assert functions, f"{change.where} is no function"
        assert change.made(functions[0]), f"{change.where} does not hold what {change} is about"
    return ast.unparse(ast.fix_missing_locations(tree))


def _uses(module: ModuleType, others: Iterable[ModuleType]) -> bool:
    """Whether a module has imported one of the others, or something out of it."""
    names = {other.__name__ for other in others}
    # of kernels, the function
    found = [getattr(each, "fn", each) for each in vars(module).values()]
    return any(
        getattr(each, "__module__", "") in names or getattr(each, "__name__", "") in names
        for each in found
    )


def _owners() -> list[ModuleType]:
    """The modules that may name kernels: the package's, and those of tests."""
    return [
        loaded
        for key, loaded in sys.modules.items()
        if key.partition(".")[0] in ("tdcoll", "collectives", "primitives")
    ]


@contextmanager
def installed(
    changes: Sequence[AnyChange], folder: Path, more: Sequence[str] = ()
) -> Iterator[None]:
    """Changed copies of the modules of kernels, and of those that import them, in the place of all
    of them.

    Args:
        folder: for the sources.
        more: names of further modules that may be changed; each may import those before it, and all
            the usual ones.
    """
    for name in HOSTS:
        import_module(name)
    modules = [import_module(name) for name in (*MODULES, *more)]
    names = [module.__name__ for module in modules]
    named: dict[str, list[AnyChange]] = {name: [] for name in names}
    for change in changes:
        wanted, _ = _place(change.where)
        meant = [name for name in names if f".{name}".endswith(f".{wanted}")]
        assert len(meant) == 1, f"{wanted} is not one of {names}, but {meant}"
        named[meant[0]].append(change)
    undo = []
    copies: dict[ModuleType, ModuleType] = {}

    def put(owner: object, name: str, value: object) -> None:
        undo.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    try:
        for module in modules:
            name = module.__name__
            if not (named[name] or _uses(module, copies.values())):
                continue
            path = folder / f"{name}.py"
            path.write_text(_changed(module, named[name]))
            made = ModuleType(name)
            made.__file__ = str(path)
            copies[made] = module
            undo.append((sys.modules, name, module))
            sys.modules[name] = made
            exec(compile(path.read_text(), str(path), "exec"), vars(made))
            for owner in _owners():
                for attribute, value in list(vars(owner).items()):
                    if value is module:
                        put(owner, attribute, made)
        yield
    finally:
        for owner, name, value in reversed(undo):
            if isinstance(owner, dict):
                owner[name] = value
            else:
                setattr(owner, name, value)
        for owner in _owners():
            for name, value in list(vars(owner).items()):  # of modules first imported meanwhile
                if isinstance(value, ModuleType) and value in copies:
                    setattr(owner, name, copies[value])


def missing(signal: str) -> str:
    """A deadlock in which somebody waits for a word of this memory."""
    return rf"[Dd]eadlock[\s\S]*waits for pe\d+\.{signal}\["


@dataclass(frozen=True)
class Mutant:
    """Kernels with one protection less.

    Attributes:
        name: what is missing.
        changes: to kernels, or to device functions that they call.
        expect: regular expression that the failure's report must match: what goes wrong, and not
            just that it does.
        case: what shows it, for :func:`tdcoll.testing.explore`.
        world: arguments of ``World``.
        seeds: how many are tried.
        any_seed: others may fail in another way, which depends on who gets ahead of whom.
    """

    name: str
    changes: tuple[AnyChange, ...]
    expect: str
    case: Callable[[Any], object]
    world: Mapping[str, Any] = field(default_factory=dict)
    seeds: int = 100
    any_seed: bool = False

    def __str__(self) -> str:
        return self.name

    @property
    def where(self) -> Hashable:
        """Where it is seen: real kernels must pass there."""
        return str(self.case), str(self.world)

    def is_caught(self, folder: Path) -> None:
        """Raise AssertionError unless some seed fails, and as it should: with wrong results or
        without an end, and not only by a race."""
        from tdcoll.testing import first_failure

        otherwise = "nothing was noticed"
        with installed(self.changes, folder):
            for seed in range(self.seeds):
                failure = first_failure(self.case, seeds=[seed], races=False, **self.world)
                if failure is not None:
                    if re.search(self.expect, failure.report):
                        return
                    otherwise = failure.report
                    if not self.any_seed:
                        break
        raise AssertionError(f"{self.name} does not fail as it should: {otherwise}")
