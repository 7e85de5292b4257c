# SPDX-License-Identifier: Apache-2.0
"""Run the tests with each supported pair of PyTorch and Triton, and compile the kernels with each
NVSHMEM.

Needs no GPU, but pip, a C compiler and binutils. For each row it makes an environment without
CUDA's libraries (``stubs.py``). It has pip resolve the row beside tdcoll, counts the operations
that round (``arithmetic.py``), and runs the first tier of tests and both tiers of
``tests/compile``. Wheels of a row take up to 1 GB, its environment 3 GB, and its tests an hour of
two cores. Results are written to a file after each step, so rows and steps can be run one at a
time::

    python tests/versions/matrix.py --list
    python tests/versions/matrix.py --only torch-2.15 --cache ~/wheels
    python docs/versions.py   # puts the results into docs/versions.md
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
import venv
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import stubs  # noqa: E402

from tdcoll.base.versions import TESTED_NVSHMEM, TESTED_TORCH, TESTED_TRITON  # noqa: E402

RESULTS = ROOT / "docs" / "results" / "versions.json"
STEPS = ("resolve", "arithmetic", "tests", "compile")
LIBRARY = "nvidia/nvshmem/lib"
ARCHITECTURES = (90, 100)

# What PyTorch needs to be imported, and the tests besides it, as constraints-cpu.txt pins them.
PURE = ("filelock", "typing-extensions", "sympy", "networkx", "jinja2", "fsspec", "setuptools>=77")
TOOLS = ("numpy", "greenlet", "pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "psutil")
TOOLS += ("click", "matplotlib", "pandas", "tabulate")
OF_RESULTS = "tests/docs/test_versions.py"
"""Compares the page with the results, which a run is about to change."""


@dataclass(frozen=True)
class Row:
    """A PyTorch, the Triton that it pins, and the CUDA runtime of its CUDA version."""

    torch: str
    triton: str
    cuda_runtime: str

    @property
    def name(self) -> str:
        return "torch-" + ".".join(self.torch.split(".")[:2])


CUDA_RUNTIMES = ("13.0.96", "13.0.96", "13.0.96", "13.2.75")
ROWS = {row.name: row for row in map(Row, TESTED_TORCH, TESTED_TRITON, CUDA_RUNTIMES)}


def run(
    command: Sequence[str | Path], timeout_s: float, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a command in the repository's root; its output is kept."""
    environment = os.environ | variables
    return subprocess.run(
        list(map(str, command)),
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def checked(command: Sequence[str | Path], timeout_s: float = 3600.0) -> str:
    done = run(command, timeout_s)
    if done.returncode:
        sys.exit(
            f"{' '.join(map(str, command))} ended with status {done.returncode}:\n{done.stdout}"
        )
    return done.stdout


def wheel(cache: Path, requirement: str) -> Path:
    """Return the path of a wheel, without its dependencies, and download it unless it is in the
    cache."""
    name, _, version = requirement.partition("==")
    pattern = f"{name.replace('-', '_')}-{version}*.whl"
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    for path in sorted(cache.glob(pattern)):
        if "py3-none" in path.name or f"-{tag}-" in path.name:
            return path
    cache.mkdir(parents=True, exist_ok=True)
    say(f"downloading {requirement}")
    checked(
        [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", cache, requirement]
    )
    return next(path for path in sorted(cache.glob(pattern)))


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


# ---------------------------------------------------------------------- environments


def environment(row: Row, cache: Path, folder: Path) -> Path:
    """Return the Python of a row's environment, which is made unless it is complete."""
    python = folder / row.name / "bin" / "python"
    complete = folder / row.name / "complete"
    if complete.exists():
        return python
    say(f"{row.name}: making {folder / row.name}")
    venv.create(folder / row.name, clear=True, symlinks=True, with_pip=True)
    pip: list[str | Path] = [
        python,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
    ]
    torch = wheel(cache, f"torch=={row.torch}")
    wheels = [torch, wheel(cache, f"triton=={row.triton}")]
    site = Path(checked([python, "-c", "import site; print(site.getsitepackages()[0])"]).strip())
    checked([*pip, "--no-deps", *wheels])
    checked([*pip, "-c", ROOT / "constraints-cpu.txt", *TOOLS])
    checked([*pip, *PURE])
    # A CPU build of PyTorch pins no NVSHMEM. tests/compile needs one.
    of_torch = TESTED_NVSHMEM[-1] if "+cpu" in torch.name else nvshmem_of(site)
    checked([*pip, "--no-deps", wheel(cache, f"nvidia-nvshmem-cu13=={of_torch}")])
    if "+cpu" not in torch.name:
        checked([*pip, "--no-deps", f"nvidia-cuda-runtime=={row.cuda_runtime}"])
        stubs.write(site)
    checked([*pip, "--no-deps", "-e", ROOT])
    versions = "import torch, triton; print(torch.__version__, triton.__version__)"
    found = checked([python, "-W", "ignore", "-c", versions]).split()
    wanted = [row.torch, row.triton]
    if [text.partition("+")[0] for text in found[-2:]] != wanted:
        sys.exit(f"{python} has torch and triton {found}, not {wanted}")
    complete.touch()
    return python


def nvshmem_of(site_packages: Path) -> str:
    """Return the version of NVSHMEM that the PyTorch in an environment pins."""
    (metadata,) = site_packages.glob("torch-*.dist-info/METADATA")
    return re.findall(
        r"^Requires-Dist: nvidia-nvshmem-cu\d+==([\d.]+)", metadata.read_text(), re.MULTILINE
    )[0]


def nvshmem(version: str, cache: Path, folder: Path) -> Path:
    """Return a folder for ``NVSHMEM_HOME`` with the device libraries of a version."""
    home = folder / f"nvshmem-{version}"
    if not (home / "lib").is_dir():
        (home / "unpacking").mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(wheel(cache, f"nvidia-nvshmem-cu13=={version}")) as archive:
            for name in archive.namelist():
                if name.startswith(LIBRARY) and name.endswith(".bc"):
                    archive.extract(name, home / "unpacking")
        (home / "unpacking" / LIBRARY).rename(home / "lib")
        shutil.rmtree(home / "unpacking")
    return home


# ---------------------------------------------------------------------- steps


def resolve(row: Row, cuda: str = "13") -> dict[str, Any]:
    """Let pip resolve this PyTorch beside tdcoll and NVSHMEM, and install nothing."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
    done = run([*command, "--report", "-", f"torch=={row.torch}", f".[cu{cuda}]"], 1800.0)
    if done.returncode:
        return {"error": done.stdout.strip().splitlines()[-1]}
    report = json.loads(done.stdout[done.stdout.index("{") : done.stdout.rindex("}") + 1])
    versions = {one["metadata"]["name"]: one["metadata"]["version"] for one in report["install"]}
    wanted = ("torch", "triton", f"nvidia-nvshmem-cu{cuda}", f"nvshmem4py-cu{cuda}")
    return {name: versions[name] for name in wanted}


def pytest(python: Path, arguments: Sequence[str | Path], **variables: str) -> dict[str, Any]:
    """Run tests with a Python, and return the numbers of outcomes, the failed ones, and the
    time."""
    begin = time.monotonic()
    environment = {"PYTHON": str(python), "VIRTUAL_ENV": str(python.parents[1])}
    environment["PATH"] = f"{python.parent}:{os.environ['PATH']}"
    done = run(
        ["bash", "launch.sh", "tests", "-q", *arguments], 4 * 3600.0, **environment, **variables
    )
    lines = done.stdout.splitlines()
    counts = {
        kind: int(number)
        for number, kind in re.findall(r"(\d+) (passed|failed|error|skipped)", lines[-1])
    }
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    if not counts.get("passed"):
        failed.append("the run itself: " + " / ".join(lines[-5:]))
    return {**counts, "failures": failed, "seconds": round(time.monotonic() - begin)}


def arithmetic(python: Path, home: Path) -> dict[str, dict[str, int]]:
    """Return how often each kernel rounds (``arithmetic.py``)."""
    program = ROOT / "tests" / "versions" / "arithmetic.py"
    command = [
        "env",
        "-u",
        "TRITON_INTERPRET",
        f"NVSHMEM_HOME={home}",
        python,
        "-W",
        "ignore",
        program,
        "90",
    ]
    return json.loads(checked(command).splitlines()[-1])


def compile_with(python: Path, home: Path, workers: str, folder: Path) -> dict[str, Any]:
    """Run ``tests/compile`` with an NVSHMEM, and add what the kernels need."""
    base = folder / "pytest"
    tiers = ["-m", "slow or not slow", "-n", workers, f"--basetemp={base}"]
    variables = {"NVSHMEM_HOME": str(home), "TRITON_CACHE_DIR": str(folder / "triton-cache")}
    result = pytest(python, ["tests/compile", *tiers], **variables)
    kernels: dict[str, list[int]] = {}
    for arch in ARCHITECTURES:
        for file in base.parent.glob(f"**/compiled-*-{arch}-registers.json"):
            made = json.loads(file.read_text())
            for kernel in of_both_parts(made):
                if kernel["needs"]:
                    name = (
                        f"{kernel['kernel']}{' in place' * bool(kernel.get('in_place'))}, sm_{arch}"
                    )
                    worst = kernels.get(name, [0, 0])
                    needed = (kernel["registers"], kernel["spilled_bytes"])
                    kernels[name] = [max(a, b) for a, b in zip(worst, needed, strict=True)]
            file.unlink()
    return {**result, "registers and spilled bytes": kernels}


def of_both_parts(made: dict[str, Any]) -> list[dict[str, Any]]:
    """All kernels of a driver's report that say their registers."""
    lists = [value for value in made.values() if isinstance(value, list)]
    return [
        one
        for value in lists
        for one in value
        if isinstance(one, dict) and "registers" in one and "needs" in one
    ]


def commit() -> str:
    text = checked(["git", "describe", "--always", "--dirty", "--abbrev=8"])
    return text.strip()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    home = Path.home() / ".cache" / "tdcoll-versions"
    parser.add_argument(
        "--only",
        action="append",
        choices=ROWS,
        metavar="ROW",
        help="a row; several times for several",
    )
    parser.add_argument(
        "--steps",
        default=",".join(STEPS),
        help=f"some of {', '.join(STEPS)} with commas between them",
    )
    parser.add_argument(
        "--nvshmem", default=",".join(TESTED_NVSHMEM), help="versions to compile with (%(default)s)"
    )
    parser.add_argument(
        "--cache", type=Path, default=home / "wheels", help="folder of wheels (%(default)s)"
    )
    parser.add_argument(
        "--environments", type=Path, default=home, help="folder of environments (%(default)s)"
    )
    parser.add_argument("--workers", default="auto", help="pytest's workers (%(default)s)")
    parser.add_argument(
        "--write",
        type=Path,
        default=RESULTS,
        help="file of results, which is updated (%(default)s)",
    )
    parser.add_argument("--list", action="store_true", help="print the rows and end")
    options = parser.parse_args()
    if options.list:
        for row in ROWS.values():
            print(
                f"{row.name}: PyTorch {row.torch}, Triton {row.triton}; NVSHMEM {', '.join(TESTED_NVSHMEM)}"
            )
        return
    steps = options.steps.split(",")
    if unknown := sorted({*steps} - {*STEPS}):
        parser.error(f"--steps: expected some of {', '.join(STEPS)}, got {', '.join(unknown)}")
    if unknown := sorted({*options.nvshmem.split(",")} - {*TESTED_NVSHMEM}):
        parser.error(
            f"--nvshmem: expected some of {', '.join(TESTED_NVSHMEM)}, got {', '.join(unknown)}"
        )
    results = json.loads(options.write.read_text()) if options.write.exists() else {}

    def note(name: str, **found: Any) -> None:
        row = results.setdefault(name, {})
        row.update({"torch": ROWS[name].torch, "triton": ROWS[name].triton}, **found)
        row.setdefault("commits", {}).update(dict.fromkeys(found, commit()))
        options.write.write_text(json.dumps(results, indent=1) + "\n")

    for name in options.only or list(ROWS):
        row = ROWS[name]
        if "resolve" in steps:
            say(f"{name}: resolving")
            note(name, resolve=resolve(row))
        if steps == ["resolve"]:
            continue
        python = environment(row, options.cache, options.environments)
        if "arithmetic" in steps:
            say(f"{name}: the arithmetic of kernels")
            oldest = nvshmem(TESTED_NVSHMEM[0], options.cache, options.environments)
            note(name, arithmetic=arithmetic(python, oldest))
        if "tests" in steps:
            say(f"{name}: the first tier")
            found = pytest(python, ["-n", options.workers, f"--ignore={OF_RESULTS}"])
            note(name, tests=found)
            say(f"{name}: {found}")
        for version in options.nvshmem.split(",") if "compile" in steps else ():
            say(f"{name}: compiling with NVSHMEM {version}")
            made = nvshmem(version, options.cache, options.environments)
            folder = options.environments / f"{name}-compile"
            folder.mkdir(exist_ok=True)
            found = compile_with(python, made, options.workers, folder)
            shutil.rmtree(folder)
            compiled = {**results.get(name, {}).get("compile", {}), version: found}
            note(name, compile=compiled)
            say(
                f"{name}, NVSHMEM {version}: {found['failures'] or 'passed'} in {found['seconds']} s"
            )


if __name__ == "__main__":
    main()
