# SPDX-License-Identifier: Apache-2.0
"""Stubs of CUDA's libraries, so that a GPU build of PyTorch can be imported without a GPU and
without their gigabytes.

PyTorch's own libraries name the CUDA libraries that they need (``DT_NEEDED``) and the functions
that they import from each. A stub has the name of a library, and those functions, each of which
returns 1, an error in all of these libraries. Nothing calls them, because CUDA's runtime, which is
small and therefore the real one, finds no device.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

FOLDER = "nvidia/cu13/lib"
"""Where PyTorch's libraries look for CUDA's, in ``site-packages``."""

REAL = ("libcuda.so", "libcudart.so", "libnvshmem_host.so")
"""Libraries without a stub: the driver's, which nothing loads here, and those of small packages."""

_OF_CUDA = re.compile(r"lib(?:cu|nv|nccl)\S*\.so\.\d+")
# Functions that are imported without the library's name as their version, by the first letters of
# their names.
_BY_PREFIX = {"nccl": "libnccl.so", "cuFile": "libcufile.so", "cusparseLt": "libcusparseLt.so"}


def imported(libraries: list[Path]) -> dict[str, set[str]]:
    """Return the functions that ``libraries`` import from each of CUDA's libraries, by its name."""
    command = ["readelf", "--wide", "--dynamic", "--dyn-syms", *map(str, libraries)]
    text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout
    found: dict[str, set[str]] = {
        name: set() for name in re.findall(r"\(NEEDED\).*\[(\S+)\]", text)
    }
    found = {name: functions for name, functions in found.items() if _OF_CUDA.fullmatch(name)}
    by_stem = {name.partition(".so")[0] + ".so": name for name in found}
    for symbol, version in re.findall(r" UND (\w+)(?:@(\S+))?", text):
        if version in found:
            found[version].add(symbol)
        elif not version:
            stems = [stem for prefix, stem in _BY_PREFIX.items() if symbol.startswith(prefix)]
            for stem in stems:
                if stem in by_stem:
                    found[by_stem[stem]].add(symbol)
    return {name: functions for name, functions in found.items() if not name.startswith(REAL)}


def write(site_packages: Path) -> list[str]:
    """Write stubs beside the PyTorch in ``site_packages``, and return their names. Needs a C
    compiler and readelf.

    Raises:
        FileNotFoundError: one of these programs is missing.
        subprocess.CalledProcessError: one of them fails.
    """
    for program in ("cc", "readelf"):
        if shutil.which(program) is None:
            raise FileNotFoundError(f"{program} was not found: install a C compiler and binutils")
    folder = site_packages / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    libraries = sorted((site_packages / "torch").glob("**/*.so*"))
    made = []
    for name, functions in imported(libraries).items():
        if (folder / name).exists():
            continue
        source = "".join(
            f"int {function}(void) {{ return 1; }}\n" for function in sorted(functions)
        )
        versions = folder / f"{name}.map"
        versions.write_text(f"{name} {{ global: *; }};\n")
        command = [
            "cc",
            "-shared",
            "-w",
            "-fno-builtin",
            "-o",
            str(folder / name),
            f"-Wl,-soname,{name}",
        ]
        command += [f"-Wl,--version-script={versions}", "-x", "c", "-"]
        subprocess.run(command, input=source, text=True, check=True, timeout=300)
        versions.unlink()
        made.append(name)
    return made
