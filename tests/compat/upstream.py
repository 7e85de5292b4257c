# SPDX-License-Identifier: Apache-2.0
"""How much of Triton-distributed tdcoll.compat handles: run by hand on a fetched copy of its repository.

    python tests/compat/upstream.py PATH [--compile] [FUNCTION...]
    python tests/compat/upstream.py PATH --tutorials

The first form looks at every ``jit`` function in ``python/triton_dist/kernels/nvidia`` that names something of the
device libraries, or at those that are given. A function *resolves* if every such name is provided. With ``--compile``
those that resolve are compiled for sm_90. Their types are guessed from the names of their parameters, in several ways,
so a function that fails may still compile with the right ones. Prints a line for each function, and the sums.

``--tutorials`` runs :data:`TUTORIALS` on the simulator, without a change. That takes ten minutes of two cores. Prints a
line for each, and exits with status 1 if one fails. Nothing of that repository is kept.
"""

from __future__ import annotations

import argparse
import ast
import collections
import importlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import tdcoll.compat
from tdcoll.compat import NotProvidedError

TUTORIALS = (
    ("02-intra-node-allgather.py", ("--nproc", "2"), ()),
    ("02-intra-node-allgather.py", ("--nproc", "4"), ()),
    ("03-inter-node-allgather.py", ("--nproc", "2"), ()),
    ("03-inter-node-allgather.py", ("--nproc", "4"), ()),
    ("03-inter-node-allgather.py", ("--nproc", "4", "--emulate-nodes", "2"), ()),
    ("04-deepseek-infer-all2all.py", ("--nproc", "2"), ("-M", "4", "-N", "512", "-G", "8", "--topk", "2")),
    ("05-intra-node-reduce-scatter.py", ("--nproc", "2"), ()),
    ("05-intra-node-reduce-scatter.py", ("--nproc", "4"), ()),
    ("06-inter-node-reduce-scatter.py", ("--nproc", "2"), ()),
    ("06-inter-node-reduce-scatter.py", ("--nproc", "4"), ()),
)
"""Tutorials that run as they are: file, ``launch.sh``'s options, and the tutorial's own."""

ROOT = Path(__file__).resolve().parents[2]
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
    """Return the names that a file has for the modules of the device libraries, and for their functions."""
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
    """Return why a name is not provided, or None if it is."""
    module, _, attribute = name.rpartition(".")
    try:
        getattr(importlib.import_module(module), attribute)
    except (NotProvidedError, AttributeError) as error:
        return str(error).partition(": ")[2] or str(error)
    return None


def functions_of(file: Path) -> Iterator[Function]:
    """Yield the functions of a file that use the device libraries."""
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


def other(parent: str, folder: str, origin: str | None, name: str) -> Any:
    """Return what a file imports and tdcoll.compat does not provide: from another kernel's file, if it is there."""
    file = Path(parent) / f"{(origin or '').rpartition('.')[2]}.py"
    if (origin or "").startswith("triton_dist.kernels.nvidia") and file.is_file():
        return getattr(module_of(file, Path(folder)), name, Absent())
    return Absent()


def module_of(file: Path, folder: Path) -> ModuleType:
    """Return a module of a file's constants and functions, and of those of its imports that there are.

    For each of its ``jit`` functions it also has ``call_NAME``, a kernel that calls it: many of them give back values.
    """
    kept = ["import triton", "import triton.language as tl", "import triton_dist", "import upstream"]
    names = []
    for node in ast.parse(file.read_text()).body:
        text = ast.unparse(node)
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                bound = alias.asname or alias.name
                if isinstance(node, ast.Import):
                    one, origin = ast.unparse(ast.Import([alias])), None
                    instead = f"{bound} = upstream.Absent()" if "." not in bound else "pass"
                else:
                    origin = f"triton_dist.kernels.nvidia.{node.module}" if node.level else node.module
                    one = ast.unparse(ast.ImportFrom(origin, [alias], 0))
                    asked = str(file.parent), str(folder), origin, alias.name
                    instead = f"{bound} = upstream.other{asked!r}"
                kept.append(one if "__future__" in one else f"try:\n    {one}\nexcept Exception:\n    {instead}")
        elif isinstance(node, ast.FunctionDef) and any(map(is_jit, node.decorator_list)):
            node.decorator_list = [ast.parse("triton_dist.jit", mode="eval").body]
            node.returns = None
            kept.append(ast.unparse(node))
            parameters = [*node.args.args, *node.args.kwonlyargs]
            shown = ", ".join(f"{p.arg}: tl.constexpr" if "constexpr" in ast.unparse(p) else p.arg for p in parameters)
            given = ", ".join(f"{p.arg}={p.arg}" for p in parameters)
            kept.append(f"@triton_dist.jit\ndef call_{node.name}({shown}):\n    {node.name}({given})")
            names.append(node.name)
        elif isinstance(node, ast.FunctionDef):
            node.decorator_list = [d for d in node.decorator_list if ast.unparse(d) in EXTERN]
            node.returns, node.args.defaults, node.args.kw_defaults = None, [], [None] * len(node.args.kwonlyargs)
            for parameter in (*node.args.args, *node.args.kwonlyargs):
                parameter.annotation = None
            kept.append(ast.unparse(node).replace("tl.constexpr_function", "triton.constexpr_function"))
        elif isinstance(node, ast.Assign):
            kept.append(f"try:\n    {text}\nexcept Exception:\n    pass")
    path = folder / f"copy_of_{file.stem}.py"
    future = [line for line in kept if "__future__" in line]
    path.write_text("\n\n".join([*future, *(line for line in kept if line not in future)]) + "\n")
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    return importlib.import_module(path.stem)


EXTERN = "core.extern", "tl.core.extern", "core.builtin", "tl.constexpr_function", "triton.constexpr_function"

SCOPES = "", "_warp", "_block"
ADDRESSES = {  # which arguments of a call are addresses of data, and which of signals
    **dict.fromkeys(("load", "store", "make_tensor_descriptor", "make_block_ptr", "multiple_of"), ((0,), ())),
    **dict.fromkeys(
        ("atomic_add", "atomic_cas", "ld", "st", "ld_acquire", "wait", "wait_eq", "ld_b32", "st_b32"), ((), (0,))
    ),
    **dict.fromkeys(("unsafe_barrier_on_this_grid", "barrier_on_this_grid"), ((), (0,))),
    **dict.fromkeys(("barrier_all_intra_node_non_atomic", "barrier_all_intra_node_non_atomic_block"), ((), (3,))),
    "barrier_all_intra_node_atomic_cas_block": ((), (3,)),
    **dict.fromkeys(("notify", "signal_op", "signal_wait_until"), ((), (0,))),
    **dict.fromkeys(("remote_ptr", "symm_at", "consume_token", "cast"), ((0,), ())),
    **dict.fromkeys(("load_v4_u32", "load_v4_b32", "load_v2_b64", "st_v4_b32", "st_v4_u32", "st_v2_u32"), ((0,), ())),
    **{
        f"{op}{m}{s}": ((0, 1), ())
        for op in ("putmem", "getmem")
        for m in ("", "_nbi")
        for s in ("", "_warp", "_block")
    },
    **{f"putmem_signal{m}{s}": ((0, 1), (3,)) for m in ("", "_nbi") for s in ("", "_warp", "_block")},
}


def _base(node: ast.expr) -> str | None:
    """Return the name that an address is computed from, which is the leftmost one."""
    while isinstance(node, (ast.BinOp, ast.Call, ast.Subscript, ast.Attribute)):
        if isinstance(node, ast.BinOp):
            node = node.left
        elif isinstance(node, ast.Call):
            inside = isinstance(node.func, ast.Attribute) and node.func.attr == "to"
            if not inside and not node.args:
                return None
            node = node.func.value if inside and isinstance(node.func, ast.Attribute) else node.args[0]
        else:
            node = node.value
    return node.id if isinstance(node, ast.Name) else None


def addresses_of(module: ModuleType, function: Any, depth: int = 3) -> tuple[set[str], set[str]]:
    """Return the parameters of a ``jit`` function that are addresses: of data, and of signals."""
    tree = ast.parse(function.src)
    data: set[str] = set()
    signals: set[str] = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = getattr(node.func, "attr", getattr(node.func, "id", ""))
        places = ADDRESSES.get(called, ((), ()))
        inner = getattr(module, called, None)
        for into, which in ((data, places[0]), (signals, places[1])):
            into.update(base for place in which if place < len(node.args) and (base := _base(node.args[place])))
        if depth and hasattr(inner, "arg_names") and inner is not function:
            for into, found in zip((data, signals), addresses_of(module, inner, depth - 1), strict=True):
                given = {
                    **dict(zip(inner.arg_names, node.args, strict=False)),
                    **{k.arg: k.value for k in node.keywords},
                }
                into.update(base for name in found if name in given and (base := _base(given[name])))
    assigned = [n for n in ast.walk(tree) if isinstance(n, ast.Assign) and isinstance(n.targets[0], ast.Name)]
    for _ in range(4):  # through names that are assigned
        for node in assigned:
            base = _base(node.value)
            if base is not None:
                data.update({base} if node.targets[0].id in data else ())
                signals.update({base} if node.targets[0].id in signals else ())
    for name in function.arg_names:  # those that are only handed on
        if name.endswith("ptr") and name not in data | signals:
            (signals if re.search("sig|flag|barrier|counter|ready", name) else data).add(name)
    return data & set(function.arg_names) - signals, signals & set(function.arg_names)


INDICES = re.compile(r"split|cumsum|offset|ind|count|num|lens|block_table|token_|expert|scatter|gather|topk|map")
GUESSES = [(d, i, s) for s in ("*i64", "*i32") for d in ("*bf16", "*fp32", "*i32", "*i8") for i in ("*i32", "*i64")]
"""Types of data, of indices and of signals, tried in turn."""


def constant(name: str) -> Any:
    """Return a value for a compile-time parameter."""
    import triton.language as tl

    low = name.lower()
    known = {"world_size": 8, "num_ranks": 8, "nranks": 8, "local_world_size": 4, "nnodes": 2, "n_nodes": 2, "topk": 4}
    known |= {
        "rank": 0,
        "local_rank": 0,
        "mode": 0,
        "stage": 0,
        "n_numa_nodes": 2,
        "numa_world_size": 4,
        "local_n": 128,
    }
    if low in known:
        return known[low]
    if "dtype" in low or low.endswith("type"):
        return tl.bfloat16
    if re.search(
        r"^(is|use|has|with|need|enable|do|skip|profil|causal|swizzle|even|a_only)|bias|flag|epilogue|_tma", low
    ):
        return False
    return 64


def compiled(module: ModuleType, name: str, guess: tuple[str, str, str]) -> None:
    """Compile with the types of a guess; raises what the compiler does."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from tdcoll.language.jit import bitcode_path, needs_nvshmem

    function, call = getattr(module, name), getattr(module, f"call_{name}")
    data, signals = addresses_of(module, function)
    signature, constants = {}, {}
    for parameter in call.params:
        one = parameter.name
        if parameter.is_constexpr:
            signature[one], constants[one] = "constexpr", constant(one)
        elif one in signals:
            signature[one] = guess[2]
        elif one in data:
            signature[one] = guess[1] if INDICES.search(one.lower()) else guess[0]
        else:
            signature[one] = "i32"
    libraries = {"libnvshmem_device": bitcode_path()} if needs_nvshmem(call) else {}
    hints = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(signature) if str(signature[n]).startswith("*")}
    triton.compile(
        ASTSource(call, signature, constants, hints),
        target=GPUTarget("cuda", 90, 32),
        options={"extern_libs": libraries, "num_warps": 8},
    )


def compile_result(found: Function, folder: Path) -> str:
    """Return ``""`` if some guess compiles, else what the compiler said most often."""
    try:
        module = module_of(found.file, folder)
    except Exception as error:
        return f"its file cannot be imported: {type(error).__name__}: {str(error).splitlines()[-1][:120]}"
    if not hasattr(module, f"call_{found.name}"):
        return "it is defined inside a function"
    said: list[str] = []
    for guess in GUESSES:
        try:
            compiled(module, found.name, guess)
            return ""
        except Exception as error:
            cause: BaseException = error
            while cause.__cause__ is not None:
                cause = cause.__cause__
            lines = [line for line in str(cause).strip().splitlines() if line.strip(" ^")] or [type(cause).__name__]
            said.append(f"{type(cause).__name__}: {lines[-1].strip()[:150]}")
    return collections.Counter(said).most_common(1)[0][0]


# ---------------------------------------------------------------------- tutorials


def run_tutorials(folder: Path) -> int:
    """Run :data:`TUTORIALS`, which lie in ``folder``; return how many failed."""
    failed = 0
    for name, options, own in TUTORIALS:
        command = ["bash", str(ROOT / "launch.sh"), "--simulate", *options, "--timeout", "300", "--compat"]
        done = subprocess.run([*command, str(folder / name), *own], capture_output=True, text=True, check=False)
        lines = (done.stdout + done.stderr).strip().splitlines() or [f"status {done.returncode}"]
        failed += done.returncode != 0
        print(f"{name}: {' '.join(options)}: {lines[-1] if done.returncode else 'right'}", flush=True)
    return failed


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Return what a command line says; options may stand before, between and behind the names."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("path", type=Path, help="the copy of the repository")
    does = parser.add_mutually_exclusive_group()
    does.add_argument("--compile", action="store_true", help="compile the functions that resolve")
    does.add_argument("--tutorials", action="store_true", help="run the tutorials that run unchanged, instead")
    parser.add_argument("functions", nargs="*", metavar="FUNCTION", help="names; default: all functions")
    return parser.parse_intermixed_args(given)


def main() -> None:
    given = arguments()
    if given.tutorials:
        sys.exit(run_tutorials(given.path / "tutorials") > 0)
    tdcoll.compat.activate()
    files = sorted((given.path / "python/triton_dist/kernels/nvidia").glob("*.py"))
    everything = [found for file in files for found in functions_of(file)]
    if unknown := sorted(set(given.functions) - {found.name for found in everything}):
        sys.exit(f"FUNCTION: expected names of functions that use the device libraries, got {', '.join(unknown)}")
    wanted = [found for found in everything if not given.functions or found.name in given.functions]
    resolved = [found for found in wanted if not found.missing]
    reasons = collections.Counter(why for found in wanted for why in set(found.missing.values()))
    fine = 0
    if given.compile:  # what LLVM says of a wrong guess
        sys.stdout = os.fdopen(os.dup(1), "w")
        for stream in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
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
