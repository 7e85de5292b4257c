# SPDX-License-Identifier: Apache-2.0
"""How much of Triton-distributed's kernels tdcoll.compat serves: run by hand on a fetched copy of its repository.

    python tests/compat/upstream.py PATH [--compile] [FUNCTION...]

Looks at every ``jit`` function in ``python/triton_dist/kernels/nvidia`` that names something of the device libraries.
It *resolves* if every such name is provided. With ``--compile`` those that resolve are compiled for sm_90, each with
types that are guessed from the names of its parameters, several ways; so a failure may be the guess's. Prints a line
for each function, and the sums. Nothing of that repository is kept.
"""

from __future__ import annotations

import argparse
import ast
import collections
import importlib
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import tdcoll.compat
from tdcoll.compat import NotProvidedError

LIBRARIES = "libshmem_device", "libnvshmem_device", "language_extra", "tma_language"


@dataclass
class Function:
    """A function of a file: what it names of the device libraries, and what of that is not provided."""

    file: Path
    name: str
    names: set[str] = field(default_factory=set)
    missing: dict[str, str] = field(default_factory=dict)


def is_jit(decorator: ast.expr) -> bool:
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    return ast.unparse(called) in ("triton.jit", "triton_dist.jit", "jit")


def device_names(tree: ast.Module) -> tuple[dict[str, str], dict[str, str]]:
    """What the file calls the modules of the device libraries, and their functions."""
    modules, functions = {}, {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {a.asname or a.name: a.name for a in node.names if a.name.startswith("triton_dist.language")}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("triton_dist.language"):
            for alias in node.names:
                into = modules if alias.name in LIBRARIES else functions
                into[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return modules, functions


def provided(name: str) -> str | None:
    """Why a name is not provided; None if it is."""
    module, _, attribute = name.rpartition(".")
    try:
        getattr(importlib.import_module(module), attribute)
    except (NotProvidedError, AttributeError) as error:
        return str(error).partition(": ")[2] or str(error)
    return None


def functions_of(file: Path) -> Iterator[Function]:
    """The functions of a file that use the device libraries."""
    tree = ast.parse(file.read_text())
    modules, functions = device_names(tree)
    for node in ast.walk(tree):
        if not (isinstance(node, ast.FunctionDef) and any(map(is_jit, node.decorator_list))):
            continue
        found = Function(file, node.name)
        for inner in ast.walk(node):
            if isinstance(inner, ast.Attribute) and (base := ast.unparse(inner.value)) in modules:
                found.names.add(f"{modules[base]}.{inner.attr}")
            elif isinstance(inner, ast.Name) and inner.id in functions:
                found.names.add(functions[inner.id])
        found.missing = {name: why for name in sorted(found.names) if (why := provided(name))}
        if found.names:
            yield found


# ---------------------------------------------------------------------- compiling


class Absent:
    """Stands for what a file imports and does not get; the compiler says who asked for it."""

    def __init__(self, name: str) -> None:
        self._name = name


def module_of(file: Path, folder: Path) -> ModuleType:
    """The constants and ``jit`` functions of a file, as a module; and what else of it can be imported."""
    tree, kept = ast.parse(file.read_text()), ["import triton", "import triton.language as tl", "import upstream"]
    for node in tree.body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                one = ast.unparse(type(node)(**{**{f: getattr(node, f) for f in node._fields}, "names": [alias]}))
                bound = (alias.asname or alias.name).partition(".")[0]
                absent = f"{bound} = upstream.Absent({bound!r})"
                kept.append(one if "__future__" in one else f"try:\n    {one}\nexcept Exception:\n    {absent}")
        elif isinstance(node, ast.FunctionDef) and node.decorator_list:
            chosen = [d for d in node.decorator_list if is_jit(d) or "constexpr_function" in ast.unparse(d)]
            if chosen or any("core.extern" in ast.unparse(d) for d in node.decorator_list):
                node.decorator_list = chosen or node.decorator_list
                # One that calls NVSHMEM has to be launched by tdcoll's jit; here it is only compiled.
                kept.append(ast.unparse(node))
        elif isinstance(node, ast.Assign) and not any(isinstance(inner, ast.Call) for inner in ast.walk(node.value)):
            text = ast.unparse(node)
            kept.append(f"try:\n    {text}\nexcept Exception:\n    pass")
    path = folder / f"copy_of_{file.stem}.py"
    future = [line for line in kept if "__future__" in line]
    path.write_text("\n\n".join([*future, *(line for line in kept if line not in future)]) + "\n")
    sys.path.insert(0, str(folder))
    return importlib.import_module(path.stem)


POINTER = re.compile(
    r"ptr|buf|tensor|signal|flag|barrier|splits|cumsum|offset$|indices|index$|scale|counter|input|output|workspace|"
    r"_out|out_|lse|symm|recv|send|token|src|dst|dest|weight|ready|ws|bitonic|mask|block_table|lens"
)
CONSTANT = re.compile(r"^[A-Z_0-9]+$")
GUESSES = (("*bf16", "*i64"), ("*fp32", "*i32"), ("*bf16", "*i32"), ("*i32", "*i64"), ("*i8", "*i64"), ("*i64", "*i64"))
"""Types of data and of signals, tried in turn."""


def constant(name: str, attempt: int) -> Any:
    """A value for a compile-time parameter."""
    low = name.lower()
    if "dtype" in low or low.endswith("type"):
        import triton.language as tl

        return tl.bfloat16
    if any(word in low for word in ("world_size", "num_ranks", "nranks", "local_world", "topk", "nnodes", "n_nodes")):
        return 8 if "local" not in low and "node" not in low else (4 if "local" in low else 2)
    if low in ("rank", "local_rank", "node_id", "stage", "mode"):
        return 0
    if any(word in low for word in ("block", "size", "num_", "hidden", "dim", "tile", "elems", "n", "m", "k")):
        return 64
    return (False, True)[attempt % 2]


def compiled(function: Any, attempt: int) -> None:
    """Compile with the types of a guess; raises what the compiler does."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from tdcoll.language.jit import bitcode_path, needs_nvshmem

    data, signals = GUESSES[attempt]
    signature, constants = {}, {}
    for parameter in function.params:
        name = parameter.name
        if parameter.is_constexpr:
            signature[name], constants[name] = "constexpr", constant(name, attempt)
        elif CONSTANT.match(name) and not POINTER.search(name.lower()):
            signature[name] = "i32"
        elif POINTER.search(name.lower()) and not name.startswith(("num_", "n_")):
            is_signal = re.search(r"sig|flag|barrier|ready|counter|lock", name.lower())
            signature[name] = signals if is_signal else data
        else:
            signature[name] = "i32"
    libraries = {"libnvshmem_device": bitcode_path()} if needs_nvshmem(function) else {}
    hints = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(signature) if str(signature[n]).startswith("*")}
    triton.compile(
        ASTSource(function, signature, constants, hints),
        target=GPUTarget("cuda", 90, 32),
        options={"extern_libs": libraries, "num_warps": 8},
    )


def compile_result(found: Function, folder: Path) -> str:
    """``""`` if some guess compiles; else what the compiler said of the last one that got furthest."""
    try:
        function = getattr(module_of(found.file, folder), found.name)
    except Exception as error:
        return f"its file cannot be imported: {type(error).__name__}: {str(error).splitlines()[-1][:120]}"
    said: list[str] = []
    for attempt in range(len(GUESSES)):
        try:
            compiled(function, attempt)
            return ""
        except Exception as error:
            cause: BaseException = error
            while cause.__cause__ is not None:
                cause = cause.__cause__
            lines = [line for line in str(cause).strip().splitlines() if line.strip()] or [type(cause).__name__]
            said.append(f"{type(cause).__name__}: {lines[-1].strip()[:150]}")
    return collections.Counter(said).most_common(1)[0][0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("path", type=Path)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("functions", nargs="*")
    given = parser.parse_args()
    tdcoll.compat.activate()
    files = sorted((given.path / "python/triton_dist/kernels/nvidia").glob("*.py"))
    everything = [found for file in files for found in functions_of(file)]
    wanted = [found for found in everything if not given.functions or found.name in given.functions]
    resolved = [found for found in wanted if not found.missing]
    reasons = collections.Counter(why for found in wanted for why in set(found.missing.values()))
    fine = 0
    with tempfile.TemporaryDirectory() as folder:
        for found in wanted:
            said = "; ".join(f"{name.rpartition('.')[2]}: {why}" for name, why in found.missing.items())
            if not said and given.compile:
                said = compile_result(found, Path(folder))
                fine += not said
            print(f"{found.file.name}: {found.name}: {said or 'right'}", flush=True)
    print(f"{len(wanted)} functions use the device libraries, {len(resolved)} resolve by name")
    if given.compile:
        print(f"{fine} of these compile for sm_90 with guessed types")
    for why, count in reasons.most_common():
        print(f"{count} name something that is not provided: {why}")


if __name__ == "__main__":
    import upstream  # the same module by its name, which the copies import

    upstream.main()
