# SPDX-License-Identifier: Apache-2.0
"""NVSHMEM's functions have the names, arguments and constants of Triton-distributed's device library.

Its sources are read from the wheel on PyPI, which is downloaded and never installed: it would overwrite triton.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import triton.language as tl

import tdcoll.language as tdl
from tdcoll.spec.functions import FUNCTIONS

RELEASE = "triton-dist==0.0.0"
SHMEM = "triton_dist/language/extra/libshmem_device.py"
CUDA = "triton/language/extra/cuda/language_extra.py"

COMPARED = [name for name, function in FUNCTIONS.items() if function.symbol is not None and not function.types]
"""NVSHMEM's functions, but for those of typed words, which its library does not have."""


def download(folder: Path) -> Path:
    """The wheel, in ``folder``."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", RELEASE]
    done = subprocess.run([*command, "--dest", str(folder)], capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        pytest.fail(f"pip could not download {RELEASE}. TDCOLL_OFFLINE=1 skips this.\n{done.stderr}", pytrace=False)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="session")
def wheel(request: pytest.FixtureRequest) -> zipfile.ZipFile:
    if os.environ.get("TDCOLL_OFFLINE", "0") not in ("", "0"):
        pytest.skip("TDCOLL_OFFLINE is set")
    kept = request.config.cache.mkdir("triton-dist") / "triton_dist-0.0.0.whl"
    if not kept.exists():
        os.replace(download(request.config.cache.mkdir(f"triton-dist-{os.getpid()}")), kept)
    return zipfile.ZipFile(kept)


def parse(wheel: zipfile.ZipFile, path: str) -> ast.Module:
    return ast.parse(wheel.read(path))


def functions(tree: ast.Module) -> dict[str, list[str]]:
    """Public functions of a module and the names of their arguments, without Triton's own."""
    found = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            found[node.name] = [a.arg for a in arguments if a.arg not in ("_semantic", "_builder")]
    return found


def defaults(tree: ast.Module, name: str) -> list[object]:
    (function,) = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name)
    values = []
    for value in function.args.defaults[:-1]:  # the last is _semantic's
        inner = value.args[0] if isinstance(value, ast.Call) else value  # core.constexpr("gpu")
        values.append(ast.literal_eval(inner))
    return values


@pytest.fixture(scope="session")
def shmem(wheel: zipfile.ZipFile) -> dict[str, list[str]]:
    return functions(parse(wheel, SHMEM))


@pytest.mark.parametrize("name", COMPARED)
def test_arguments_have_the_same_names_in_the_same_order(shmem: dict[str, list[str]], name: str) -> None:
    assert [parameter for parameter, _ in FUNCTIONS[name].parameters] == shmem[name]


def test_constants_have_the_same_values(wheel: zipfile.ZipFile) -> None:
    theirs = {
        target.id: node.value.value
        for node in parse(wheel, SHMEM).body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name) and target.id.startswith(("NVSHMEM_CMP_", "NVSHMEM_SIGNAL_"))
    }
    ours = {
        name: getattr(tdl, name).value
        for name in dir(tdl)
        if name.startswith("NVSHMEM_") and isinstance(getattr(tdl, name), tl.constexpr)
    }
    assert len(theirs) == 8
    assert ours == theirs
    for name, value in ours.items():
        assert getattr(tdl, name.removeprefix("NVSHMEM_")).value == value


@pytest.mark.parametrize("name", ["tid", "ntid", "ld", "ld_acquire", "st"])
def test_threads_loads_and_stores(wheel: zipfile.ZipFile, name: str) -> None:
    tree = parse(wheel, CUDA)
    assert [parameter for parameter, _ in FUNCTIONS[name].parameters] == functions(tree)[name]
    assert list(FUNCTIONS[name].defaults) == defaults(tree, name)


def test_barrier_of_the_block(wheel: zipfile.ZipFile) -> None:
    assert functions(parse(wheel, CUDA))["__syncthreads"] == []
    assert FUNCTIONS["syncthreads"].parameters == ()
