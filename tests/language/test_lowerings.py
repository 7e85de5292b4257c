# SPDX-License-Identifier: Apache-2.0
"""The table of the device language, its lowerings, its stubs and Triton-distributed's library have the same functions.

The sources of the latter are read from the wheel on PyPI, which is downloaded and never installed: it would overwrite
triton.
"""

from __future__ import annotations

import ast
import inspect
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest
import triton.language as tl
from kernels_to_launch import HALVES, parameters_of
from processes import python

import tdcoll.language as tdl
from tdcoll.simulator import lowering as simulator
from tdcoll.spec.functions import FUNCTIONS

ROOT = Path(__file__).resolve().parents[2]
STUB = ROOT / "tdcoll/language/__init__.pyi"


def parameters_in_the_table(name: str) -> list[list[Any]]:
    function = FUNCTIONS[name]
    required = len(function.parameters) - len(function.defaults)
    defaults = [None] * required + [repr(default) for default in function.defaults]
    return [[parameter, default] for (parameter, _), default in zip(function.parameters, defaults, strict=True)]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_both_have_the_parameters(compiled: dict[str, Any], name: str) -> None:
    assert parameters_of(getattr(simulator, name)) == compiled["parameters"][name] == parameters_in_the_table(name)
    assert getattr(tdl, name) is getattr(simulator, name)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_each_function_says_what_it_does_and_how_it_is_called(compiled: dict[str, Any], name: str) -> None:
    expected = [FUNCTIONS[name].doc, [parameter for parameter, _ in FUNCTIONS[name].parameters]]
    assert compiled["described"][name] == expected
    function = getattr(tdl, name)
    assert [inspect.getdoc(function), list(inspect.signature(function).parameters)] == expected


def test_nvshmem_lowering_is_the_one_of_a_compiled_process(compiled: dict[str, Any]) -> None:
    assert compiled["not_its_own"] == []


def test_functions_with_a_symbol_are_the_ones_that_need_nvshmem(compiled: dict[str, Any]) -> None:
    """`wait_signal` and the like are PTX; `signal_block` is a Triton function that calls `signal_op`."""
    with_symbol = {name for name, function in FUNCTIONS.items() if function.symbol is not None}
    assert set(compiled["marked"]) == with_symbol
    assert set(compiled["needs"]) == with_symbol | {"signal_block"}


def test_all_names_are_public() -> None:
    assert {*FUNCTIONS, "CMP_GE", "SIGNAL_ADD", "INTERPRETED"} <= set(tdl.__all__)
    assert len(set(tdl.__all__)) == len(tdl.__all__)
    assert all(hasattr(tdl, name) for name in tdl.__all__)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_table_is_complete(name: str) -> None:
    function = FUNCTIONS[name]
    assert function.name == name
    assert len(function.doc) > 15
    if function.symbol is not None:
        assert function.symbol in function.prototype
    for parameter, kind in function.parameters:
        assert kind in ("ptr", "ptr64", "size", "pe", "int", "u64", "value", "constant")
        assert (parameter == "pe") == (kind == "pe")
        assert kind == "ptr64" or parameter not in ("sig_addr", "signals", "monitor", "counter")
    assert f"| `{function.signature}` |" in (ROOT / "docs/functions.md").read_text(encoding="utf-8")


def test_signature_of_a_function_with_defaults() -> None:
    assert FUNCTIONS["st"].signature == "st(ptr, val, scope='gpu', semantic='relaxed')"
    assert FUNCTIONS["fence"].signature == "fence()"


def test_wrong_arguments_name_the_function_when_compiled(compiled: dict[str, Any]) -> None:
    assert "putmem_block: pe must be a scalar, got a block of shape" in compiled["errors"]["block_as_pe"]
    assert "compare must be a CMP_* constant, got 6" in compiled["errors"]["compare"]
    assert "axis must be 0, 1 or 2, got 3" in compiled["errors"]["axis"]
    assert "scope must be one of gpu, sys; got 'cta'" in compiled["errors"]["scope"]
    assert "semantic must be one of relaxed, release; got 'acquire'" in compiled["errors"]["semantic"]
    assert "ld: ptr must point to 32- or 64-bit integers" in compiled["errors"]["pointee"]
    assert "value must be a pointer or an offset, got a descriptor" in compiled["errors"]["descriptor_with_a_token"]
    assert "token must be what wait_token returned, an int32; got int64" in compiled["errors"]["token_of_64_bits"]


@pytest.mark.parametrize("argument", HALVES)
def test_pointer_to_32_bits_where_64_are_wanted(compiled: dict[str, Any], argument: str) -> None:
    error = compiled["errors"][argument]
    assert error.startswith(f"{argument} must point to 64-bit integers (int64 or uint64), got")
    assert "a pointer to int32" in error


def test_addresses_have_no_type_to_be_wrong(compiled: dict[str, Any]) -> None:
    assert compiled["errors"]["whole_addresses"] == "nothing was raised"


KERNEL = """
from typing import Any

import tdcoll
import tdcoll.language as tdl
import triton.language as tl


@tdcoll.jit
def exchange(box: Any, flag: Any, nbytes: int, call: int, monitor: tdcoll.WaitMonitor, BLOCK: tl.constexpr) -> None:
    peer = (tdl.my_pe() + 1) % tdl.n_pes()
    tdl.putmem_signal_block(box, box, nbytes, flag, call, tdl.SIGNAL_SET, peer)
    if tdl.wait_signal(flag, tdl.CMP_GE, call, monitor) != 0:
        there = tdl.remote_ptr(box, peer)
        tl.store(there + tl.arange(0, BLOCK), tdl.ld_acquire(box, "sys"))
    tdl.st_release(flag, call, scope="sys")
    tdl.wait_signal(flag, compare=tdl.CMP_GE, value=call, monitor=monitor, peer=peer, index=2)
"""

WRONG = {
    "tdl.wait_signal(flag, tdl.CMP_GE, call)": 'Missing positional argument "monitor" in call to "wait_signal"',
    "tdl.putmem_signal_blok()": 'Module has no attribute "putmem_signal_blok"',
    'tdl.st_release(flag, call, scope="cta")': 'Argument "scope" to "st_release" has incompatible type',
    "tdl.wait_signal(flag, tdl.CMP_GE, call, monitor, pier=1)": 'Unexpected keyword argument "pier"',
}


def test_the_stubs_are_current() -> None:
    done = python("docs/device_language.py", "--stubs", PYTHONPATH=str(ROOT))
    assert STUB.read_text(encoding="utf-8") == done.stdout, f"run python docs/device_language.py --stubs > {STUB}"


def test_a_kernel_is_checked(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    (tmp_path / "kernel.py").write_text(KERNEL, encoding="utf-8")
    for place, call in enumerate(WRONG):
        (tmp_path / f"wrong_{place}.py").write_text(f"{KERNEL}    {call}\n", encoding="utf-8")
    done = python(
        *("-m", "mypy", "--config-file=", "--follow-imports=skip", "--ignore-missing-imports"),
        *("--disallow-untyped-defs", "--check-untyped-defs", f"--cache-dir={tmp_path / 'cache'}", str(STUB)),
        *map(str, sorted(tmp_path.glob("*.py"))),
        timeout=240,
    )
    lines = [line for line in done.stdout.splitlines() if ": error: " in line]
    found = {Path(line.split(":")[0]).name: line for line in lines}
    assert len(lines) == len(found), done.stdout + done.stderr
    for place, text in enumerate(WRONG.values()):
        assert text in found.pop(f"wrong_{place}.py"), done.stdout
    assert found == {}, done.stdout


RELEASE = "triton-dist==0.0.0"
SHMEM = "triton_dist/language/extra/libshmem_device.py"
CUDA = "triton/language/extra/cuda/language_extra.py"

COMPARED = [name for name, function in FUNCTIONS.items() if function.symbol is not None and not function.types]
"""NVSHMEM's functions, but for those of typed words, which its library does not have."""


def download(folder: Path) -> Path:
    """The wheel, in ``folder``."""
    command = ["-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", RELEASE]
    done = python(*command, "--dest", str(folder))
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
