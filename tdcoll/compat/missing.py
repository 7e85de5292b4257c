# SPDX-License-Identifier: Apache-2.0
"""The names of Triton-distributed's that are not provided, and why: errors say it, and the documentation lists it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["ATTRIBUTES", "MODULES", "NotProvidedError", "attributes_of"]

MULTICAST = "tdcoll never uses NVLink multicast"
TEAMS = "tdcoll's groups are host-side: a kernel gets the PE of each rank of its group"
COLLECTIVES = "NVSHMEM's collectives have no deadline: use tdcoll's, or puts and signals"
BITCODE = "NVSHMEM's internal interface needs a bitcode library that NVIDIA's wheel does not hold"
COMPILER = "it needs operations that Triton-distributed's compiler adds"
WITH = "stock Triton's `with` cannot bind two names: write `thread = tid(0)` instead"
OTHER_GPUS = "it is for other vendors' GPUs"
NOT_WRITTEN = "tdcoll has no counterpart of it"
AOT = "it compiles ahead of time by Triton-distributed's own tool"

_SCOPES = ("", "_warp", "_block")

SHMEM = {
    "remote_mc_ptr": MULTICAST,
    **dict.fromkeys(("team_my_pe", "team_n_pes", "team_translate_pe", "team_sync_block", "team_sync_warp"), TEAMS),
    **dict.fromkeys(("barrier", "barrier_block", "barrier_warp", "sync"), TEAMS),
    **{f"{base}{s}": COLLECTIVES for base in ("broadcast", "broadcastmem", "fcollect", "fcollectmem") for s in _SCOPES},
    **{
        f"{base}{mode}{s}": BITCODE
        for base in ("putmem_rma", "putmem_signal_rma")
        for mode in ("", "_nbi")
        for s in _SCOPES
    },
    "ulong_put_signal": "use putmem_signal, which counts bytes",
    "uint64_wait_until_equals": "use signal_wait_until with NVSHMEM_CMP_EQ",
    **dict.fromkeys(("set_rocshmem_ctx", "quiet_pe", "barrier_all_vec"), OTHER_GPUS),
    **{
        f"{base}_{s}": OTHER_GPUS
        for base in (
            "barrier_all",
            "getmem",
            "getmem_nbi",
            "putmem",
            "putmem_nbi",
            "putmem_signal",
            "putmem_signal_nbi",
        )
        for s in ("wave", "wg")
    },
}

EXTRA = {
    **dict.fromkeys(("multimem_st_b64", "multimem_st_b32", "multimem_st_v2", "multimem_st_v4"), MULTICAST),
    **dict.fromkeys(("multimem_st_p_b32", "multimem_ld_reduce_p_v4", "multimem_ld_reduce_v4"), MULTICAST),
    **dict.fromkeys(("ld_vector", "st_vector", "pack", "unpack"), "its vectors of a thread belong to simt_exec_region"),
    "tma_sync": "tdcoll orders nothing by bulk copies",
    "arrive_inc_asm": "use arrive_inc",
}

LANGUAGE = {
    "simt_exec_region": WITH,
    **dict.fromkeys(("vector", "make_vector", "zeros_vector", "ld_vector", "st_vector"), EXTRA["ld_vector"]),
    **dict.fromkeys(("extract", "insert", "extern_call"), COMPILER),
    **dict.fromkeys(
        ("allocate_smem", "smem_index", "smem_load", "smem_store", "smem_get_ptr", "smem_dealloc"), COMPILER
    ),
    **dict.fromkeys(("SharedMemoryDesc", "get_smem_shared_address_u32", "SMEM_GENERIC_POINTER_ADDR_SPACE"), COMPILER),
    "tma": COMPILER,
}

COMMON_OPS = {
    **dict.fromkeys(("load_envreg", "load_grid_ws_abi_address"), "the driver's word of a cooperative grid is its own"),
    "cooperative_barrier_on_this_grid": "use barrier_on_this_grid with a counter, or tdl.grid_barrier",
    "bisect_left_kernel": NOT_WRITTEN,
    "bisect_left_kernel_aligned": NOT_WRITTEN,
    "bisect_right_kernel": NOT_WRITTEN,
    "bisect_right_kernel_aligned": NOT_WRITTEN,
}

UTILS = {
    **dict.fromkeys(("init_rocshmem_by_torch_process_group", "init_mori_by_torch_process_group"), OTHER_GPUS),
    **dict.fromkeys(("mori_shmem_create_tensor", "mori_shmem_free_tensor_sync", "HIP_CHECK", "MACA_CHECK"), OTHER_GPUS),
    **dict.fromkeys(("rocshmem_barrier_all_on_stream", "mori_shmem_barrier_all_on_stream"), OTHER_GPUS),
    **dict.fromkeys(("LazyTensor", "LazyTensorSpec", "LazyAllocator", "NVSHMEMLazyAllocator"), NOT_WRITTEN),
    **dict.fromkeys(("get_underlying_tensor", "nvshmem_free_lazy_tensor"), NOT_WRITTEN),
    **dict.fromkeys(("triton_dist_key", "get_nvshmem_hash", "get_shmem_hash", "get_shmem_version"), AOT),
}

PROFILER = {
    **dict.fromkeys(("group_profile", "get_torch_prof_ctx", "AutoExportProfiler"), "use torch.profiler"),
    **dict.fromkeys(("perf_func_with_l2_reset", "benchmark_latency_memory"), "use perf_func"),
}

REDUCE_SCATTER = dict.fromkeys(
    ("reduce_scatter_ring_push_1d_intra_node_ce", "reduce_scatter_ring_push_1d_intra_node_sm"),
    "use tdcoll.reduce_scatter",
)

ALL_GATHER_GEMM = {"ag_gemm": NOT_WRITTEN, "gemm": NOT_WRITTEN, "gemm_persistent": NOT_WRITTEN}

ATTRIBUTES: dict[str, Mapping[str, str]] = {
    "triton_dist": {"tune": NOT_WRITTEN, "autotuner": NOT_WRITTEN},
    "triton_dist.language": LANGUAGE,
    "triton_dist.language.extra.libshmem_device": SHMEM,
    "triton_dist.language.extra.language_extra": EXTRA,
    "triton_dist.utils": UTILS,
    "triton_dist.profiler_utils": PROFILER,
    "triton_dist.kernels.nvidia.common_ops": COMMON_OPS,
    "triton_dist.kernels.nvidia.reduce_scatter": REDUCE_SCATTER,
    "triton_dist.kernels.nvidia.allgather_gemm": ALL_GATHER_GEMM,
}
"""Names of a module that are not provided, and why."""

MODULES = {
    "triton_dist.language.tma": COMPILER,
    "triton_dist.language.smem_ops": COMPILER,
    "triton_dist.language.simt_ops": WITH,
    "triton_dist.language.extra.cuda.tma_language": COMPILER,
    "triton_dist.language.extra.hip": OTHER_GPUS,
    "triton_dist.language.extra.maca": OTHER_GPUS,
    "triton_dist.language.extra.ascend": OTHER_GPUS,
    "triton_dist.kernels.amd": OTHER_GPUS,
    "triton_dist.kernels.metax": OTHER_GPUS,
    "triton_dist.kernels": "of its kernels tdcoll.compat has what its tutorials import",
    "triton_dist.layers": NOT_WRITTEN,
    "triton_dist.models": NOT_WRITTEN,
    "triton_dist.mega_triton_kernel": COMPILER,
    "triton_dist.function": NOT_WRITTEN,
    "triton_dist.tools": AOT,
    "triton_dist.tune": NOT_WRITTEN,
    "triton_dist.autotuner": NOT_WRITTEN,
    "triton_dist.benchmark": NOT_WRITTEN,
    "triton_dist.test": "its tests are part of its own repository",
}
"""Modules that are not provided, and why. A module belongs to the longest name that it begins with."""


class NotProvidedError(ImportError):
    """A name of Triton-distributed's that tdcoll.compat does not provide; the message says why."""

    @classmethod
    def of_module(cls, name: str) -> NotProvidedError:
        """Make the error for a module."""
        whole = [known for known in MODULES if f"{name}.".startswith(f"{known}.")]
        reason = MODULES[max(whole, key=len)] if whole else "it is not among the modules that tdcoll knows"
        return cls(f"tdcoll.compat does not provide the module {name}: {reason}", name=name)


def attributes_of(module: str, *also: str) -> Callable[[str], Any]:
    """Make a ``__getattr__`` for ``module`` that says why a name is not there; ``also``: names of these modules."""
    reasons = {name: reason for one in (module, *also) for name, reason in ATTRIBUTES[one].items()}

    def missing(name: str) -> Any:
        if name in reasons:
            raise NotProvidedError(f"tdcoll.compat does not provide {module}.{name}: {reasons[name]}")
        raise AttributeError(f"module {module!r} of tdcoll.compat has no attribute {name!r}")

    return missing
