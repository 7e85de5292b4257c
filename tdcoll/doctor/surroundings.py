# SPDX-License-Identifier: Apache-2.0
"""Checks of the environment: bootstrap interface, heap, container, multicast switches, variables. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tdcoll import arguments, environment
from tdcoll.doctor.facts import Facts, Interface, Line, note, ok, problem, size

__all__ = ["SURROUNDINGS_CHECKS", "matching_interfaces"]

INTERNAL_BYTES = 64 << 20
"""What NVSHMEM wants beside the heap, see :mod:`tdcoll.runtime.nvshmem`."""

_LITTLE_SHM_BYTES = 1 << 30
"""What NVIDIA advises containers that run NCCL to have at least."""

_IFNAME = "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME"


def matching_interfaces(value: str, interfaces: Sequence[Interface]) -> list[Interface]:
    """Those that NVSHMEM takes for ``value``: prefixes after commas, ``=`` before exact names, ``^`` for all others."""
    exclude = value.startswith("^")
    value = value[exclude:]
    exact = value.startswith("=")
    words = [word.partition(":")[0] for word in value[exact:].split(",") if word]

    def named(interface: Interface) -> bool:
        return any(interface.name == word if exact else interface.name.startswith(word) for word in words)

    return [interface for interface in interfaces if named(interface) != exclude]


def interface(facts: Facts) -> Line:
    name, value = "bootstrap interface", facts.environment.get(_IFNAME, "")
    if facts.simulated:
        return ok(name, "not used by the simulator")
    if not value:
        if facts.nnodes == 1:
            text = f"{_IFNAME} is not set: NVSHMEM takes the first interface that is up"
            return note(
                name, text, "launch.sh and `source setenv.sh` set lo, with which ranks of one host find each other"
            )
        advice = f"set it to one that the other hosts can reach{_suggestion(facts)}; launch.sh --nnodes does"
        return note(name, f"{_IFNAME} is not set: NVSHMEM takes the first interface that is up", advice)
    found = matching_interfaces(value, facts.interfaces)
    usable = [candidate for candidate in found if candidate.up and candidate.has_address]
    there = ", ".join(candidate.name for candidate in facts.interfaces) or "none"
    if not found:
        advice = f"this host has {there}{_suggestion(facts)}"
        return problem(name, f"{_IFNAME}={value}: there is no such interface", advice)
    if not usable:
        names = ", ".join(candidate.name for candidate in found)
        advice = f"bring it up, or choose another of {there}{_suggestion(facts)}"
        return problem(name, f"{_IFNAME}={value}: {names} is down or has no address", advice)
    if facts.nnodes > 1 and all(candidate.loopback for candidate in usable):
        advice = (
            f"set one that the other hosts can reach{_suggestion(facts)}, or TDCOLL_NNODES before sourcing setenv.sh"
        )
        return problem(name, f"{_IFNAME}={value} is this host alone, and the job has {facts.nnodes} hosts", advice)
    return ok(name, f"{_IFNAME}={value}: {usable[0].name}")


def _suggestion(facts: Facts) -> str:
    if facts.nnodes == 1:
        return "; on one host lo is right"
    return f"; the default route goes over {facts.default_interface}" if facts.default_interface else ""


def heap(facts: Facts) -> Line:
    name, text = "symmetric heap", facts.environment.get("NVSHMEM_SYMMETRIC_SIZE", "")
    try:
        nbytes = environment.heap_bytes(facts.simulated, facts.environment)
    except ValueError:
        return problem(name, f"NVSHMEM_SYMMETRIC_SIZE={text} is not a size", "write 67108864, 64M or 2G, or unset it")
    source = "your NVSHMEM_SYMMETRIC_SIZE" if text else "the default; NVSHMEM_SYMMETRIC_SIZE sets another"
    whose = f"{size(nbytes)} per rank ({source})"
    lower = "lower NVSHMEM_SYMMETRIC_SIZE or initialize(heap_bytes=...)"
    if facts.simulated:
        needed, room = nbytes * facts.nproc, max(facts.shm_free_bytes or 0, facts.tmp_free_bytes)
        if needed > room:
            text = f"{whose}, {size(needed)} for {facts.nproc} ranks; shared memory has {size(room)} free"
            return problem(name, text, lower)
        return ok(name, whose)
    known = {i: gpu.free_bytes for i, gpu in enumerate(facts.gpus) if gpu.free_bytes is not None}
    full = {i: free for i, free in known.items() if free < nbytes + INTERNAL_BYTES}
    if full:
        listing = ", ".join(f"GPU {i} has {size(free)} free" for i, free in full.items())
        return problem(name, f"{whose}; {listing}", f"{lower}, or end what else uses the GPU (nvidia-smi shows it)")
    if not known:
        return ok(name, f"{whose}; how much GPU memory is free is not known")
    return ok(name, f"{whose}; the fullest GPU has {size(min(known.values()))} free")


def shared_memory(facts: Facts) -> Line:
    name, free = "/dev/shm", facts.shm_free_bytes
    if free is None:
        advice = "mount a tmpfs there; in a container: --shm-size=1g"
        if facts.simulated:
            return note(name, "there is none; the simulator uses temporary files", advice)
        return problem(name, "there is none, and NVSHMEM and NCCL use it", advice)
    if not facts.simulated and free < _LITTLE_SHM_BYTES:
        advice = "in a container: --shm-size=1g, or --ipc=host"
        return note(name, f"{size(free)} free, which may be too little for NCCL", advice)
    return ok(name, f"{size(free)} free")


def sockets(facts: Facts) -> list[Line]:
    """NVSHMEM hands memory from rank to rank as file descriptors, over sockets in /tmp named after two processes."""
    if facts.simulated:
        return []
    if not facts.tmp_writable:
        text = "not writable, and NVSHMEM's ranks exchange their memory over sockets there"
        return [problem("/tmp", text, "make it writable; in a container, mount one")]
    if facts.stale_sockets:
        text = f"{len(facts.stale_sockets)} left over from jobs that died, such as {facts.stale_sockets[0]}"
        return [note("/tmp", text, "delete them while no job runs: a rank that gets one of their names fails")]
    return [ok("/tmp", "writable")]


def container(facts: Facts) -> list[Line]:
    if facts.simulated:
        return []
    where = "in a container" if facts.container else "not in a container, as far as can be seen"
    ptrace = "" if facts.ptrace else "; without CAP_SYS_PTRACE, which only some peers in benchmarks ask for"
    advice = (
        "ranks of one host in different containers need --ipc=host, --pid=host and one /tmp" if facts.container else ""
    )
    lines = [Line("ok", "container", where + ptrace, advice)]
    if facts.nnodes > 1 and facts.memlock_bytes is not None:
        text = f"at most {size(facts.memlock_bytes)}, and network cards work on locked memory"
        lines.append(note("locked memory", text, "ulimit -l unlimited; in a container: --ulimit memlock=-1"))
    return lines


def multicast(facts: Facts) -> Line:
    """Only what is set: multicast itself is not touched, since on some hosts that hangs."""
    names = ("NVSHMEM_DISABLE_NVLS", "NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST")
    settings = {name: facts.environment[name] for name in names if facts.environment.get(name)}
    text = ", ".join(f"{name}={value}" for name, value in settings.items()) or "none of its switches is set"
    if facts.simulated or settings.get("NVSHMEM_DISABLE_NVLS", "0").lower() not in ("0", "false", "no", "off", "n"):
        return ok("multicast", text)
    advice = (
        "NVSHMEM tries NVLink multicast, which tdcoll does not need and some hosts cannot set up: if the start hangs, "
        "set NVSHMEM_DISABLE_NVLS=1 (setenv.sh does), NCCL_NVLS_ENABLE=0 and TORCH_SYMM_MEM_DISABLE_MULTICAST=1"
    )
    return note("multicast", text, advice)


def variables(facts: Facts) -> list[Line]:
    """tdcoll's variables that do not exist, and values that it would refuse."""
    lines = []
    name = "variables"
    unknown = environment.unknown(facts.environment)
    for variable in sorted(variable for variable in facts.environment if variable.startswith("TDCOLL_")):
        value = facts.environment[variable]
        if variable in unknown:
            text, meant = f"{variable} is none of tdcoll's and has no effect", unknown[variable]
            lines.append(problem(name, text, f"did you mean {meant}?") if meant else note(name, text, "unset it"))
        elif value and (wanted := _refused(variable, value, facts)):
            lines.append(problem(name, f"{variable}={value}", wanted))
        elif variable == "TDCOLL_SHARE_GPUS" and value not in ("", "0") and not facts.simulated:
            text = f"{variable}={value}: ranks may share GPUs, CUDA tensors have gloo and not NCCL, benchmarks refuse"
            lines.append(note(name, text, "for tests of correctness; unset it for everything else"))
    return lines or [ok(name, "none of tdcoll's is misspelt or out of range")]


def _refused(variable: str, value: str, facts: Facts) -> str:
    """Return what ``variable`` has to be, if ``value`` is not that."""
    if variable == "TDCOLL_TIMEOUT_S" and not (re.fullmatch(r"\s*[0-9.]+(e[0-9]+)?\s*", value) and _number(value) > 0):
        return "set a positive number of seconds"
    if variable == "TDCOLL_EMULATE_NODES" and not 1 <= (arguments.decimal(value) or 0) <= facts.nproc:
        return f"set a whole number from 1 to the number of ranks per host, here {facts.nproc}"
    if variable == "TDCOLL_HEAP" and value not in ("auto", "nvshmem", "torch"):
        return "set auto, nvshmem or torch, or unset it"
    if variable == "TDCOLL_HEAP" and value == "torch" and facts.nnodes > 1:
        return "it is for one host: unset it, so that NVSHMEM makes the symmetric heap"
    if variable == "TDCOLL_COMPILER" and value not in ("triton", "triton_dist"):
        return "set triton or triton_dist, or unset it"
    if variable == "TDCOLL_COMPILER" and value == "triton_dist" and facts.simulated:
        return "it compiles kernels, which the simulator does not: unset one of them"
    return ""


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


SURROUNDINGS_CHECKS = (interface, heap, shared_memory, sockets, container, multicast, variables)
