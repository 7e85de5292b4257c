# SPDX-License-Identifier: Apache-2.0
"""``import tdcoll``: names that are imported when they are used; environment variables; the length
of files."""

from __future__ import annotations

import ast
import importlib
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tdcoll
from tdcoll.base import environment, versions

ROOT = Path(__file__).resolve().parent.parent


def for_type_checkers() -> dict[str, str]:
    """The public names that a type checker sees imported, and from which modules."""
    tree = ast.parse((ROOT / "tdcoll/__init__.py").read_text(encoding="utf-8"))
    (guarded,) = [
        n for n in tree.body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"
    ]
    imports = [node for node in guarded.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: node.module or "" for node in imports for alias in node.names}


def test_type_checkers_see_what_there_is() -> None:
    seen = for_type_checkers()
    assert {*seen, "__version__"} == set(tdcoll.__all__)
    for name, module in seen.items():
        assert getattr(importlib.import_module(module), name) is getattr(tdcoll, name)


def test_names_are_listed_and_imported() -> None:
    assert set(tdcoll.__all__) <= set(dir(tdcoll))
    scope: dict[str, Any] = {}
    exec("from tdcoll import *", scope)
    assert {name for name in scope if name != "__builtins__"} == set(tdcoll.__all__)
    assert vars(tdcoll)["all_gather"] is tdcoll.all_gather  # the next use is an ordinary look-up
    fused = tdcoll.fused.all_reduce_rms_norm
    assert vars(tdcoll.fused)["all_reduce_rms_norm"] is fused


def test_other_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="module 'tdcoll' has no attribute 'all_scatter'"):
        _ = tdcoll.all_scatter
    with pytest.raises(ImportError, match="all_scatter"):
        from tdcoll import all_scatter  # noqa: F401


def test_objects_of_its_classes_can_be_pickled() -> None:
    error = pickle.loads(pickle.dumps(tdcoll.HeapExhaustedError("no room")))
    assert (type(error), str(error)) == (tdcoll.HeapExhaustedError, "no room")
    assert pickle.loads(pickle.dumps(tdcoll.all_gather)) is tdcoll.all_gather


EACH_FIRST = """
import os, sys
import torch.distributed, triton.language, triton.runtime.interpreter
for statement in sys.argv[1:]:
    if not (child := os.fork()):
        exec(statement)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        sys.exit(f"{statement!r} does not work in a process that has imported nothing of tdcoll's before")
"""


def test_anything_may_be_the_first() -> None:
    """No order of imports hides in ``import tdcoll``: the language and the simulator, say, import
    each other."""
    modules = [
        *(
            "testing",
            "calls.context",
            "job.memory",
            "job.lifecycle",
            "language.jit",
            "distributed",
            "tools.measure.engine",
        ),
        *("simulator.machine", "simulator.process", "collectives.sparse_all_reduce"),
        "collectives.all_gather.op",
    ]
    attributes = (
        "import tdcoll; tdcoll.runtime.current_or_none, tdcoll.base.errors.TdcollError, tdcoll.language.CMP_GE",
        "import tdcoll; tdcoll.distributed.all_reduce, tdcoll.fused.all_reduce_rms_norm, tdcoll.ops.group_name",
    )
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            EACH_FIRST,
            *attributes,
            *(f"import tdcoll.{name}" for name in modules),
        ],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
    )
    assert done.returncode == 0, done.stderr


def test_importing_it_imports_nothing_else() -> None:
    """Not even where nothing else could be imported."""
    code = "import sys, tdcoll; print(*(n for n in sys.modules if n.startswith(('torch', 'triton', 'tdcoll'))))"
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        check=True,
    )
    assert sorted(done.stdout.split()) == ["tdcoll", "tdcoll_torch"]


# ---------------------------------------------------------------------- torch.distributed knows of it

GROUP = """
import torch.distributed as dist
dist.init_process_group("tdcoll", store=dist.HashStore(), rank=0, world_size=1)
print(dist.group.WORLD.name(), type(dist.group.WORLD).__name__)
dist.destroy_process_group()
"""


def python(code: str, *paths: Path, **surroundings: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a Python that finds tdcoll in ``paths`` only, and no installed entry point
    unless told so."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    environment |= {"PYTHONPATH": os.pathsep.join(map(str, paths)), **surroundings}
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True, text=True, timeout=120, env=environment, cwd="/", check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    "imports", ["import tdcoll, torch.distributed", "import torch.distributed, tdcoll"]
)
def test_importing_it_registers_the_backend(imports: str) -> None:
    done = python(f"{imports}\n{GROUP}", ROOT)
    assert (done.returncode, done.stdout) == (0, "tdcoll TdcollProcessGroup\n"), done.stderr


def test_nothing_else_registers_it() -> None:
    done = python(GROUP, ROOT)
    assert done.returncode
    assert "tdcoll" in done.stderr.splitlines()[-1]


def entry_points() -> dict[str, dict[str, str]]:
    """Return the entry points of pyproject.toml, by group. (``tomllib`` came with Python 3.11.)"""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    found = re.findall(
        r'^\[project\.entry-points\."(.+)"\]\n((?:[\w-]+ *= *".+"\n)+)', text, re.MULTILINE
    )
    return {group: dict(re.findall(r'([\w-]+) *= *"(.+)"', lines)) for group, lines in found}


IMPORTED = "import sys, torch; print(*sorted(n for n in sys.modules if n.startswith(('triton', 'tdcoll'))))"


def test_where_it_is_installed_no_import_is_needed(tmp_path: Path) -> None:
    """And a process that only imports PyTorch imports nothing for it."""
    metadata = tmp_path / "tdcoll-0.1.0.dist-info"  # as pip writes it
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        "Metadata-Version: 2.4\nName: tdcoll\nVersion: 0.1.0\n", encoding="utf-8"
    )
    (group,) = entry_points().items()
    assert group[0] == "torch.backends"
    lines = [f"[{group[0]}]", *(f"{name} = {target}" for name, target in group[1].items())]
    (metadata / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")
    paths, autoload = (ROOT, tmp_path), {"TORCH_DEVICE_BACKEND_AUTOLOAD": "1"}
    done = python(GROUP, *paths, **autoload)
    assert (done.returncode, done.stdout) == (0, "tdcoll TdcollProcessGroup\n"), done.stderr
    alone = {name for name in python(IMPORTED).stdout.split() if not name.startswith("tdcoll")}
    assert set(python(IMPORTED, *paths, **autoload).stdout.split()) == {*alone, "tdcoll_torch"}


def test_what_is_registered_is_packed() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    modules = {
        target.partition(":")[0]
        for targets in entry_points().values()
        for target in targets.values()
    }
    for table in ("wheel]\nonly-include", "sdist]\ninclude"):
        (listed,) = re.findall(
            rf"^\[tool\.hatch\.build\.targets\.{re.escape(table)} = (.*)$", text, re.MULTILINE
        )
        assert {f"{module}.py" for module in modules} <= {
            name.lstrip("/") for name in ast.literal_eval(listed)
        }


# ---------------------------------------------------------------------- environment variables


def test_all_variables_are_known() -> None:
    """Those that tdcoll and its scripts read, and no others."""
    files = [ROOT / "setenv.sh", ROOT / "launch.sh", *(ROOT / "tdcoll").rglob("*.py")]
    sources = [file.read_text(encoding="utf-8") for file in files if file.name != "environment.py"]
    assert {
        name for text in sources for name in re.findall(r"\bTDCOLL_[A-Z]\w*\b", text)
    } == environment.KNOWN


def test_variables_that_are_none_of_tdcolls() -> None:
    given = [
        "PATH",
        "TDCOLL_DEBUG",
        "TDCOLL_SETENV",
        "TDCOLL_TIMOUT_S",
        "TDCOLL_SHARE_GPU",
        "TDCOLL_XYZ",
        "NVSHMEM_X",
    ]
    assert environment.unknown(given) == {
        "TDCOLL_SHARE_GPU": "TDCOLL_SHARE_GPUS",
        "TDCOLL_TIMOUT_S": "TDCOLL_TIMEOUT_S",
        "TDCOLL_XYZ": None,
    }


def test_one_rank_per_host_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in environment.unknown(os.environ):
        monkeypatch.delenv(name)
    monkeypatch.setenv("TDCOLL_XYZ", "1")
    said = {}
    for rank in ("0", "1"):
        monkeypatch.setenv("LOCAL_RANK", rank)
        caplog.clear()
        environment.warn_of_unknown.__wrapped__()
        said[rank] = [record.getMessage() for record in caplog.records]
    (line,) = said["0"]
    assert "TDCOLL_XYZ is none of tdcoll's and has no effect: docs/environment.md" in line
    assert said["1"] == []


def too_long(root: Path) -> list[str]:
    """Return the Python files of more than 510 lines."""
    files = (
        file
        for name in ("tdcoll", "tests", "benchmarks", "tutorials")
        for file in (root / name).rglob("*.py")
    )
    return [
        str(file.relative_to(root))
        for file in files
        if len(file.read_text("utf-8").splitlines()) > 510
    ]


def test_no_file_is_too_long(tmp_path: Path) -> None:
    assert too_long(ROOT) == []
    (tmp_path / "tests" / "docs").mkdir(parents=True)
    for lines in (510, 511):
        (tmp_path / "tests" / "docs" / f"of_{lines}.py").write_text("#\n" * lines)
    assert too_long(tmp_path) == ["tests/docs/of_511.py"]


def names_that_triton_looks_up(source: str) -> set[str]:
    """Annotations in kernels that aren't Triton's: Triton evaluates them when it compiles, and
    finds no other global."""
    annotations = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and any(
            re.fullmatch(r"(\w+\.)?jit(\(.*\))?", ast.unparse(decorator))
            for decorator in node.decorator_list
        ):
            arguments = [*node.args.args, *node.args.kwonlyargs]
            given = [node.returns, *(argument.annotation for argument in arguments)]
            annotations |= {ast.unparse(annotation) for annotation in given if annotation}
    return {name for name in annotations if not name.startswith(("tl.", "triton."))}


def test_kernels_are_annotated_with_nothing_but_tritons_types() -> None:
    assert names_that_triton_looks_up("@jit\ndef f(x: Any, n: tl.int64): pass") == {"Any"}
    assert names_that_triton_looks_up("@tdcoll.jit(a=1)\ndef f(x) -> None: pass") == {"None"}
    files = [
        file
        for folder in ("tdcoll", "benchmarks", "tutorials", "tests")
        for file in (ROOT / folder).rglob("*.py")
    ]
    found = {
        str(file.relative_to(ROOT)): names_that_triton_looks_up(file.read_text("utf-8"))
        for file in files
    }
    assert {file: names for file, names in found.items() if names} == {}


def test_no_two_classes_have_the_same_name() -> None:
    """A reader who meets a name knows where it comes from."""
    trees = [
        ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "tdcoll").rglob("*.py")
    ]
    names = [node.name for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)]
    assert len(names) > 100
    assert {name for name in names if names.count(name) > 1} == set()


def test_its_version_is_the_same_everywhere() -> None:
    declared = re.search(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.M)
    assert declared is not None
    assert declared[1] == versions.TDCOLL == tdcoll.__version__
