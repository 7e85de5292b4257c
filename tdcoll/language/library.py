# SPDX-License-Identifier: Apache-2.0
"""The part of NVSHMEM's device library that the language calls.

Triton parses the libraries that a kernel links anew for each kernel. NVSHMEM 3.4.5 has one of 31
MB, and reading it takes 4 s of the 4.5 that a kernel takes to compile. The part that the language's
functions need has 0.8 MB. Later versions have their transports inside: of 3.8.0's library of 54 MB,
14 MB are needed, and reading these takes 0.4 s. The part is cut out once, with Triton's own linker,
and kept in Triton's cache as text. The kernels come out the same to the byte.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path

import triton
from triton.runtime.cache import get_cache_manager

from tdcoll.spec.functions import FUNCTIONS, LIBRARY

_log = logging.getLogger("tdcoll")

_INTERNAL = re.compile(r"^define internal ", re.MULTILINE)


def _cut(path: str, symbols: Iterable[str]) -> str:
    """LLVM's text of the functions ``symbols`` of a library of bitcode, and of all that they
    need."""
    from triton._C.libtriton import ir, llvm

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "declarations.mlir"
        # Declared without their arguments: the linker uses only names.
        file.write_text("".join(f"llvm.func @{symbol}()\n" for symbol in symbols))
        context = ir.context()
        ir.load_dialects(context)
        declared = ir.parse_mlir_module(str(file), context)
        llvm.init_targets()
        llvm_context = llvm.context()
        module = llvm.to_module(declared, llvm_context)
        llvm.attach_datalayout(module, "nvptx64-nvidia-cuda", "sm_90", "")
        llvm.link_extern_libs(module, [path])
        text = str(module)
    # Triton makes what it has linked internal, and what is internal can be linked no more.
    text = _INTERNAL.sub("define ", text)
    absent = [
        symbol for symbol in symbols if not re.search(rf"^define .*@{symbol}\(", text, re.MULTILINE)
    ]
    if absent:
        raise ValueError(f"{path} does not define {', '.join(absent)}")
    return text


@functools.cache
def part_for_language(path: str) -> str:
    """Path of the part of NVSHMEM's device library at ``path`` that kernels in the device language
    link.

    Where it cannot be cut out, ``path`` itself, and a warning says why.
    """
    symbols = sorted({symbol for function in FUNCTIONS.values() for symbol in function.symbols})
    digest = hashlib.sha256(Path(path).read_bytes())
    digest.update(repr((symbols, triton.__version__)).encode() + Path(__file__).read_bytes())
    cache = get_cache_manager(digest.hexdigest())
    name = f"{LIBRARY}.ll"
    try:
        return cache.get_file(name) or cache.put(_cut(path, symbols), name, binary=False)
    except Exception as error:  # of a Triton, or a library, that is not known here
        _log.warning("each kernel links all of %s, which takes seconds: %r", path, error)
        return path
