# SPDX-License-Identifier: Apache-2.0
"""Imports point one way, along the table :data:`LAYERS`, without circles; policies need neither torch nor triton."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from tdcoll import limits

ROOT = Path(__file__).resolve().parent.parent

COLLECTIVES = (*limits.COLLECTIVES, "index_match")

LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors", "limits"),
    ("arguments", "calls", "capture", "child", "hang", "output", "ranges", "torch_internals"),
    ("work",),
    ("environment",),
    ("spec",),
    ("runtime.topology"),
    ("runtime",),
    ("sizes",),
    ("runtime.simulator",),
    ("language",),
    # What joins a job: it starts the transport and, in the meantime, the compiler.
    ("runtime.last_words",),
    ("runtime.nvshmem", "runtime.torch_memory", "runtime.simulator.process", "runtime.simulator.world"),
    ("runtime.lifecycle",),
    ("monitor", "memory", "streams"),
    ("primitives",),
    ("tuning",),
    ("preconditions",),
    ("context",),
    ("collectives", "collectives._host"),
    ("collectives.exchange",),
    tuple(f"collectives.{name}" for name in COLLECTIVES),
    ("collectives.sparse_all_reduce",),
    ("fused",),
    ("explanation", "footprint"),
    ("ops",),
    ("",),  # the package itself, which gives out the public names of all the above
    ("distributed",),
    ("torchrun",),
    ("setenv",),
    ("bench", "testing", "doctor", "compat"),
    ("launch",),
    ("__main__",),
)
"""Parts of the package, the lowest first. A module belongs to the longest name that it begins with. It may import its
own part and those of lower rows, but no other part of its row."""

FACES = {("collectives.sparse_all_reduce", f"collectives.{name}") for name in COLLECTIVES if name != "index_match"}
"""Of the second, the first may import the ``spec``, which has what other collectives use, and no other module."""


def modules(root: Path) -> dict[str, str]:
    """The source of each module below ``root``, by the module's name."""
    found = {}
    for path in sorted((root / "tdcoll").rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text(encoding="utf-8")
    return found


SOURCES = modules(ROOT)


def imports(source: str, known: Mapping[str, str]) -> set[tuple[str, bool]]:
    """The modules of ``known`` that ``source`` imports, and for each whether that is when it is imported itself.

    A string that is a submodule's name counts, as ``importlib`` may be given it: at once, if outside of functions
    ``import_module`` is called. What does not count: imports for type checkers, and ``import tdcoll`` inside of a
    function, which takes a public name when it is called.
    """
    nodes = list(walk(ast.parse(source), False))
    loads = any(isinstance(n, ast.Call) and "import_module" in ast.unparse(n.func) for n, inside in nodes if not inside)

    def found() -> Iterator[tuple[str, bool]]:
        for node, inside in nodes:
            taken = inside and isinstance(node, ast.Import)
            yield from ((name, not inside) for name in named(node, known) if not (taken and name == "tdcoll"))
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value != "tdcoll":
                yield node.value, loads

    return {(name, at_once) for name, at_once in found() if name in known}


def named(node: ast.AST, known: Mapping[str, str]) -> Iterator[str]:
    """The modules that an import statement names."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert not node.level, "imports are absolute"
        for alias in node.names:
            name = f"{node.module}.{alias.name}"
            yield name if name in known else node.module or ""


def walk(node: ast.AST, inside: bool) -> Iterator[tuple[ast.AST, bool]]:
    """All nodes but those for type checkers, and whether each is inside of a function."""
    yield node, inside
    inside = inside or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
    if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
        children: Iterable[ast.AST] = node.orelse
    else:
        children = ast.iter_child_nodes(node)
    for child in children:
        yield from walk(child, inside)


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
    edges = {(module, target) for module, found in IMPORTS.items() for target, _ in found if target != module}
    assert len(SOURCES) > 90
    assert len(edges) > 400
    assert {edge for edge in edges if not allowed(*edge)} == set()


def circle(graph: Mapping[str, set[str]]) -> set[str]:
    """The nodes of a circle, or none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return set(error.args[1])
    return set()


def around(module: str) -> set[str]:
    """The packages that a module lies in."""
    parts = module.split(".")
    return {name for end in range(1, len(parts)) if (name := ".".join(parts[:end])) in SOURCES}


def test_there_are_no_circles() -> None:
    """Importing a module imports the packages around it first, so these count, but for those already around."""
    graph = {
        module: {name for target, at_once in found if at_once for name in {target} | around(target)}
        - {module}
        - around(module)
        for module, found in IMPORTS.items()
    }
    assert circle(graph) == set()


def looped(sources: Mapping[str, str]) -> set[str]:
    """Files that name each other in a loop of import statements, those in functions and for type checkers included.

    The package itself does not count: it gives out the names of all.
    """
    return circle(
        {
            module: {name for node in ast.walk(ast.parse(source)) for name in named(node, sources) if name in sources}
            - {module, "tdcoll"}
            for module, source in sources.items()
        }
    )


def test_no_files_import_each_other_in_a_loop() -> None:
    assert looped(SOURCES) == set()
    late = "def f():\n from tdcoll.bench import b"
    files = {"tdcoll": "import tdcoll.bench.a", "tdcoll.bench.a": late, "tdcoll.bench.b": "import tdcoll"}
    assert looped(files) == set()
    for back in ("import tdcoll.bench.a", "if TYPE_CHECKING:\n from tdcoll.bench import a"):
        closed = {**files, "tdcoll.bench.b": back}
        assert looped(closed | {"tdcoll.bench.c": "import tdcoll.bench.a"}) == {"tdcoll.bench.a", "tdcoll.bench.b"}


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
    light += [name for name in ("tdcoll.collectives._host.plan", "tdcoll.tuning") if name in SOURCES]
    light += ["tdcoll.arguments", "tdcoll.environment", "tdcoll.errors", "tdcoll.limits"]
    done = subprocess.run(
        [sys.executable, "-c", ALONE, *light], capture_output=True, text=True, timeout=120, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    found = [line.split() for line in done.stdout.splitlines()]
    assert [name for name, *_ in found] == light
    assert {name for name, *heavy in found if heavy} == set()


def test_what_an_import_is() -> None:
    known = dict.fromkeys(["tdcoll", "tdcoll.errors", "tdcoll.runtime", "tdcoll.runtime.heap", "tdcoll.bench"], "")
    cases: list[tuple[str, set[tuple[str, bool]]]] = [
        ("import tdcoll, os", {("tdcoll", True)}),
        ("def f():\n import tdcoll", set()),
        ("def f():\n import tdcoll.errors", {("tdcoll.errors", False)}),
        ("from tdcoll import errors, empty", {("tdcoll.errors", True), ("tdcoll", True)}),
        ("if x:\n from tdcoll.runtime import heap, Runtime", {("tdcoll.runtime.heap", True), ("tdcoll.runtime", True)}),
        ("if TYPE_CHECKING:\n import tdcoll.bench\nelse:\n import tdcoll.errors", {("tdcoll.errors", True)}),
        ("class A:\n def f(self):\n  from tdcoll.bench import x", {("tdcoll.bench", False)}),
        ("def name():\n return 'tdcoll.bench'\nimport_module(name())", {("tdcoll.bench", True)}),
        ("MODULE = 'tdcoll.bench'\ndef f():\n importlib.import_module(MODULE)", {("tdcoll.bench", False)}),
    ]
    for source, found in cases:
        assert imports(source, known) == found, source


def test_what_is_allowed() -> None:
    both = "tdcoll.collectives.all_gather.op", "tdcoll.collectives.reduce_scatter.op"
    cases = [
        ("tdcoll.context", "tdcoll.errors", True),
        ("tdcoll.errors", "tdcoll.context", False),
        ("tdcoll.runtime", "tdcoll.runtime.lifecycle", False),
        (*both, False),
        (*reversed(both), False),
        ("tdcoll.collectives._host.launch", "tdcoll.collectives.index_match", False),
        ("tdcoll.collectives.sparse_all_reduce.op", "tdcoll.collectives.index_match.kernels", True),
        ("tdcoll.collectives.sparse_all_reduce.op", "tdcoll.collectives.all_gather.spec", True),
        ("tdcoll.collectives.sparse_all_reduce.op", "tdcoll.collectives.all_gather.kernels_ring", False),
        ("tdcoll.collectives.exchange.kernels_ll", "tdcoll.collectives.all_gather", False),
        ("tdcoll.memory", "tdcoll", False),
        ("tdcoll.distributed.ddp", "tdcoll", True),
        ("tdcoll.testing", "tdcoll.bench.engine", False),
    ]
    for module, target, fine in cases:
        assert allowed(module, target) is fine, (module, target)
