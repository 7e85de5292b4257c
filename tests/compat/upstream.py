# SPDX-License-Identifier: Apache-2.0
"""How much of Triton-distributed tdcoll.compat handles: run by hand on a fetched copy of its repository.

    python tests/compat/upstream.py PATH
    python tests/compat/upstream.py PATH --tutorials

The first form looks at every ``jit`` function in ``python/triton_dist/kernels/nvidia`` that names something of the
device libraries. A function *resolves* if every such name is provided. Prints a line for each function, and the sums.

``--tutorials`` runs :data:`TUTORIALS` on the simulator, without a change. That takes ten minutes of two cores. Prints a
line for each, and exits with status 1 if one fails. Nothing of that repository is kept.
"""

from __future__ import annotations

import argparse
import ast
import collections
import importlib
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

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


# ---------------------------------------------------------------------- tutorials


def run_tutorials(folder: Path) -> int:
    """Run :data:`TUTORIALS`, which lie in ``folder``; return how many failed."""
    failed = 0
    for name, options, own in TUTORIALS:
        command = ["bash", str(ROOT / "launch.sh"), "--simulate", *options, "--timeout", "300", "-m", "tdcoll.compat"]
        done = subprocess.run([*command, str(folder / name), *own], capture_output=True, text=True, check=False)
        lines = (done.stdout + done.stderr).strip().splitlines() or [f"status {done.returncode}"]
        failed += done.returncode != 0
        print(f"{name}: {' '.join(options)}: {lines[-1] if done.returncode else 'right'}", flush=True)
    return failed


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("path", type=Path, help="the copy of the repository")
    parser.add_argument("--tutorials", action="store_true", help="run the tutorials that run unchanged, instead")
    options = parser.parse_args(given)
    if options.tutorials:
        return int(run_tutorials(options.path / "tutorials") > 0)
    tdcoll.compat.activate()
    files = sorted((options.path / "python/triton_dist/kernels/nvidia").glob("*.py"))
    every = [found for file in files for found in functions_of(file)]
    for found in every:
        said = "; ".join(f"{name.rpartition('.')[2]}: {why}" for name, why in found.missing.items())
        print(f"{found.file.name}: {found.name}: {said or 'right'}", flush=True)
    resolved = sum(not found.missing for found in every)
    print(f"{len(every)} functions use the device libraries, {resolved} resolve by name")
    for why, count in collections.Counter(why for found in every for why in set(found.missing.values())).most_common():
        print(f"{count} name something that is not provided: {why}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
