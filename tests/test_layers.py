# SPDX-License-Identifier: Apache-2.0
"""Imports point one way, along the table :data:`LAYERS`, without circles; policies need neither
torch nor triton."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from tdcoll.base import limits

ROOT = Path(__file__).resolve().parent.parent

COLLECTIVES = (*limits.COLLECTIVES, "index_match")

LAYERS: tuple[tuple[str, ...], ...] = (
    ("base",),
    ("spec",),
    ("runtime",),
    ("simulator",),
    ("language",),
    ("job",),
    ("primitives",),
    ("calls",),
    ("collectives",),
    ("collectives.exchange",),
    tuple(f"collectives.{name}" for name in COLLECTIVES),
    ("collectives.sparse_all_reduce",),
    ("fused",),
    ("explanation",),
    ("ops",),
    ("",),  # the package itself, which gives out the public names of all the above
    ("distributed",),
    ("testing", "compat"),
    ("tools",),
    ("__main__",),
)
"""Parts of the package, the lowest first. A module belongs to the longest name that it begins with.
It may import its own part and those of lower rows, but no other part of its row."""

FACES = {
    ("collectives.sparse_all_reduce", f"collectives.{name}")
    for name in COLLECTIVES
    if name != "index_match"
}
"""Of the second, the first may import the ``spec``, which has what other collectives use, and no
other module."""


def modules(root: Path) -> dict[str, str]:
    """The source of each module below ``root``, by the module's name."""
    found = {}
    for path in sorted((root / "tdcoll").rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text(
            encoding="utf-8"
        )
    return found


SOURCES = modules(ROOT)


def imports(source: str, known: Mapping[str, str]) -> set[str]:
    """The modules of ``known`` that ``source`` imports, at once, in functions or for type checkers,
    or names in a string, as ``importlib`` may be given it."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in known else str(node.module) for name in names}
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and node.value != "tdcoll"
        ):
            found.add(node.value)
    return found & known.keys()


IMPORTS = {name: imports(source, SOURCES) for name, source in SOURCES.items()}


def part_of(module: str) -> str:
    """The name in :data:`LAYERS` that a module belongs to."""
    name = module.removeprefix("tdcoll").removeprefix(".")
    parts = [part for row in LAYERS for part in row if part and f"{name}.".startswith(f"{part}.")]
    if not parts and name:
        raise LookupError(f"{module} is in no row of LAYERS")
    return max(parts, key=len, default="")


HEIGHT = {part: height for height, row in enumerate(LAYERS) for part in row}


def allowed(module: str, target: str) -> bool:
    """Whether ``module`` may import ``target``."""
    its, other = part_of(module), part_of(target)
    if (its, other) in FACES:
        return target == f"tdcoll.{other}.spec"
    return its == other or HEIGHT[other] < HEIGHT[its]


def test_imports_point_one_way() -> None:
    edges = {
        (module, target)
        for module, found in IMPORTS.items()
        for target in found
        if target != module
    }
    assert len(SOURCES) > 90
    assert len(edges) > 400
    assert {edge for edge in edges if not allowed(*edge)} == set()


def circle(found: Mapping[str, set[str]]) -> set[str]:
    """Modules that import each other in a circle, or none.

    Importing a module imports the packages around it first, so these count, but for those already
    around. The package itself does not: it gives out the names of all.
    """

    def around(module: str) -> set[str]:
        parts = module.split(".")
        return {".".join(parts[:end]) for end in range(1, len(parts))} & found.keys()

    graph = {
        module: {name for target in targets for name in {target} | around(target)}
        - {module, "tdcoll"}
        - around(module)
        for module, targets in found.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return set(error.args[1])
    return set()


def test_there_are_no_circles() -> None:
    assert circle(IMPORTS) == set()
    found = {
        "tdcoll": {"tdcoll.a"},
        "tdcoll.a": {"tdcoll.b.c"},
        "tdcoll.b": set(),
        "tdcoll.b.c": {"tdcoll"},
    }
    assert circle(found) == set()
    # the package around
    assert circle(found | {"tdcoll.b": {"tdcoll.a"}}) == {"tdcoll.a", "tdcoll.b"}


ALONE = """
import importlib, os, sys
for name in sys.argv[1:]:
    if not (child := os.fork()):
        importlib.import_module(name)
        print(name, *{module.partition(".")[0] for module in sys.modules} & {"torch", "triton"}, flush=True)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        sys.exit(f"{name} cannot be imported")
"""


def test_policies_import_nothing_of_the_gpu() -> None:
    """Nor does anything that they import, the packages around them included."""
    light = [name for name in SOURCES if name.endswith(".policy") and ".simulator." not in name]
    assert len(light) >= 4
    light += [
        name
        for name in ("tdcoll.calls.plan", "tdcoll.calls.words", "tdcoll.calls.tuning")
        if name in SOURCES
    ]
    light += [
        "tdcoll.base.arguments",
        "tdcoll.base.environment",
        "tdcoll.base.errors",
        "tdcoll.base.limits",
    ]
    done = subprocess.run(
        [sys.executable, "-c", ALONE, *light],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = [line.split() for line in done.stdout.splitlines()]
    assert [name for name, *_ in found] == light
    assert {name for name, *heavy in found if heavy} == set()


def test_what_an_import_is() -> None:
    known = dict.fromkeys(
        ["tdcoll", "tdcoll.errors", "tdcoll.runtime", "tdcoll.runtime.heap", "tdcoll.bench"], ""
    )
    cases: list[tuple[str, set[str]]] = [
        ("import tdcoll, os", {"tdcoll"}),
        ("def f():\n import tdcoll.errors", {"tdcoll.errors"}),
        ("from tdcoll import errors, empty", {"tdcoll.errors", "tdcoll"}),
        (
            "if x:\n from tdcoll.runtime import heap, Runtime",
            {"tdcoll.runtime.heap", "tdcoll.runtime"},
        ),
        ("if TYPE_CHECKING:\n import tdcoll.bench", {"tdcoll.bench"}),
        ("def name():\n return 'tdcoll.bench'\nimport_module(name(), 'tdcoll')", {"tdcoll.bench"}),
    ]
    for source, found in cases:
        assert imports(source, known) == found, source


def test_what_is_allowed() -> None:
    both = "tdcoll.collectives.all_gather.op", "tdcoll.collectives.reduce_scatter.op"
    cases = [
        ("tdcoll.base.errors", "tdcoll.calls.context", False),
        (*both, False),
        (*reversed(both), False),
        ("tdcoll.collectives.sparse_all_reduce.op", "tdcoll.collectives.all_gather.spec", True),
        (
            "tdcoll.collectives.sparse_all_reduce.op",
            "tdcoll.collectives.all_gather.kernels_ring",
            False,
        ),
        ("tdcoll.job.memory", "tdcoll", False),
        ("tdcoll.distributed.ddp", "tdcoll", True),
    ]
    for module, target, fine in cases:
        assert allowed(module, target) is fine, (module, target)
