# SPDX-License-Identifier: Apache-2.0
"""The names of Triton-distributed that are not provided, and the reasons, for errors and the documentation."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

__all__ = ["NotProvidedError", "attributes_of", "missing_import", "missing_module"]

_REASONS = {
    "tdcoll never uses NVLink multicast": "*.multimem_* *.remote_mc_ptr",
    "it is for other vendors' GPUs": (
        "*.hip* *.maca* *.ascend* *.amd* *.metax* *rocshmem* *mori_* *.HIP_* *.MACA_* *.is_hip *.is_maca *.is_ascend "
        "*.quiet_pe *.barrier_all_vec *_wave *_wg"
    ),
    "stock Triton's `with` cannot bind two names: write `thread = tid(0)` instead": "language.simt_*",
    "its vectors of a thread belong to simt_exec_region": "language.*vector language.*.pack language.*.unpack",
    "it needs operations that Triton-distributed's compiler adds": (
        "language.tma* language.extra.cuda.tma_* language.extract language.insert language.extern_call "
        "language.*smem* language.S* mega_triton_kernel*"
    ),
    "tdcoll's groups are host-side: a kernel gets the PE of each rank of its group": (
        "language.*.team_* language.*.barrier language.*.barrier_block language.*.barrier_warp language.*.sync"
    ),
    "NVSHMEM's collectives have no deadline: use tdcoll's, or puts and signals": "language.*.broadcast* *.fcollect*",
    "NVSHMEM's internal interface needs a bitcode library that NVIDIA's wheel does not hold": "language.*_rma*",
    "use putmem_signal, which counts bytes": "*.ulong_put_signal",
    "use signal_wait_until with NVSHMEM_CMP_EQ": "*.uint64_wait_until_equals",
    "tdcoll orders nothing by bulk copies": "*.tma_sync",
    "use atomic_add with release order": "*.red_release *.arrive_inc*",
    "use Triton's": "*.smid *.globaltimer*",
    "the driver's word of a cooperative grid is its own": "*.load_envreg *.load_grid_ws_abi_address",
    "use barrier_on_this_grid with a counter, or tdl.grid_barrier": "*.cooperative_barrier_on_this_grid",
    "use torch or os": (
        "utils.get_*_env utils.with_torch_* utils.is_fp8_dtype utils.*Stream* utils.torch_stream_* utils.get_device_* "
        "utils.barrier_async utils.requires utils.init_seed"
    ),
    "use torch.profiler": "*.group_profile *.get_torch_prof_ctx *.AutoExport*",
    "use perf_func": "*.perf_func_* *.benchmark_*",
    "use tdcoll.reduce_scatter": "*.reduce_scatter_ring_*",
    "it compiles ahead of time by Triton-distributed's own tool": "tools* *_hash *_version *_dist_key",
    "its tests are part of its own repository": "test*",
    "tdcoll has no counterpart of it": (
        "tune* autotuner* layers* models* function* benchmark* *.bisect_* *.ag_gemm *.gemm* *azy* *.get_underlying_*"
    ),
    "of its kernels tdcoll.compat has what its tutorials import": "kernels*",
}
"""Patterns of names below ``triton_dist`` by the reason; the first that matches a name holds for it."""


def _reason(name: str) -> str | None:
    below = name.removeprefix("triton_dist.")
    return next((why for why, said in _REASONS.items() if any(fnmatchcase(below, one) for one in said.split())), None)


class NotProvidedError(Exception):
    """A module or name of Triton-distributed that tdcoll.compat does not provide; the message says why.

    It is also an ``ImportError`` if the name was imported, and an ``AttributeError`` if it was looked up in a module.
    Therefore ``hasattr``, and ``getattr`` with a default, work.
    """


class _ImportNotProvidedError(NotProvidedError, ImportError):
    pass


class _AttributeNotProvidedError(NotProvidedError, AttributeError):
    pass


def missing_module(name: str) -> NotProvidedError:
    """Make the error for a module."""
    reason = _reason(name) or "it is not among the modules that tdcoll knows"
    return _ImportNotProvidedError(f"tdcoll.compat does not provide the module {name}: {reason}", name=name)


def missing_import(name: str) -> NotProvidedError | None:
    """Make the error for ``from module import name``, with both names in one; None if there is no reason to tell."""
    reason = _reason(name)
    return _ImportNotProvidedError(f"tdcoll.compat does not provide {name}: {reason}", name=name) if reason else None


def attributes_of(module: str) -> Callable[[str], Any]:
    """Make a ``__getattr__`` for ``module`` whose error gives the reason if a name is not provided."""

    def missing(name: str) -> Any:
        if not name.endswith("__") and (reason := _reason(f"{module}.{name}")):
            raise _AttributeNotProvidedError(f"tdcoll.compat does not provide {module}.{name}: {reason}")
        raise AttributeError(f"module {module!r} of tdcoll.compat has no attribute {name!r}")

    return missing
