# SPDX-License-Identifier: Apache-2.0
"""Finds the facts on this host. Nothing here judges, and nothing fails: what cannot be found out has a default."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import importlib.metadata
import importlib.util
import json
import os
import re
import resource
import socket
import struct
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tdcoll.doctor import probe
from tdcoll.doctor.child import Ended, run
from tdcoll.doctor.facts import Facts, Gpu, Interface, NetworkDevice

__all__ = ["collect", "default_interface", "nvshmem_folders", "parse_gpu_table", "parse_topology", "probe_steps"]

PROBE_TIMEOUT_S = 120.0
_SMI_TIMEOUT_S = 30.0
_SMI_FIELDS = "index,uuid,memory.free,compute_mode,mig.mode.current,driver_version"
_DISTRIBUTIONS = (
    *("torch", "triton", "triton-dist"),
    *(f"{name}-cu{major}" for name in ("nvshmem4py", "nvidia-nvshmem") for major in (12, 13)),
)

Run = Callable[[Sequence[str], float], Ended]


def collect(environment: Mapping[str, str], nproc: int | None, nnodes: int) -> Facts:
    """The facts of this host; ``nproc`` None: a rank per GPU, or two simulated ones. Takes seconds: a child imports."""

    def ask(*command: str) -> Ended:
        return run(command, _SMI_TIMEOUT_S, environment=environment, with_stderr=False)

    table = ask("nvidia-smi", f"--query-gpu={_SMI_FIELDS}", "--format=csv,noheader,nounits")
    rows = [] if table.reason else parse_gpu_table(table.output)
    topology = ask("nvidia-smi", "topo", "-m") if rows else Ended(0, "")
    steps = [step for step in probe.STEPS if step != "memory" or not rows]
    found = probe_steps(steps, lambda command, timeout_s: run(command, timeout_s, environment=environment))
    gpus = _gpus(found, rows)
    seen = found.get("gpus", {})
    links = parse_topology(topology.output)
    index = {gpu.host_index: i for i, gpu in enumerate(gpus) if gpu.host_index is not None}
    folders = nvshmem_folders(environment.get("NVSHMEM_HOME"))
    bitcode = [folder / "libnvshmem_device.bc" for folder in folders]
    interfaces = _interfaces()
    facts = Facts(
        python=sys.version_info[:3],
        probe=found,
        distributions=_distributions(),
        triton_owners=_owners("triton"),
        nvshmem_libraries=next((str(folder) for folder in folders if folder.is_dir()), ""),
        bitcode=next((str(path) for path in bitcode if path.is_file()), ""),
        bitcode_places=tuple(str(folder) for folder in folders),
        environment=dict(environment),
        nvidia_smi=table.reason,
        driver=rows[0]["driver_version"] if rows else "",
        host_gpus=len(rows) or len(glob.glob("/dev/nvidia[0-9]*")) or len(gpus),
        pci_gpus=_pci_gpus(),
        gpus=gpus,
        no_peer_access=frozenset((i, j) for i, j in seen["no_peer_access"]) if "no_peer_access" in seen else None,
        links={(index[i], index[j]): link for (i, j), link in links.items() if i in index and j in index},
        nnodes=nnodes,
        interfaces=interfaces,
        default_interface=default_interface(),
        network_devices=_network_devices(),
        verbs=bool(glob.glob("/dev/infiniband/uverbs*")),
        shm_free_bytes=_room("/dev/shm"),
        tmp_free_bytes=_room(tempfile.gettempdir()) or 0,
        tmp_writable=os.access("/tmp", os.W_OK | os.X_OK),
        stale_sockets=_stale_sockets(),
        container=_container(),
        ptrace=_capability(19),
        memlock_bytes=_memlock(),
    )
    return _with(facts, nproc=nproc or (2 if facts.simulated else max(1, len(gpus))))


def _with(facts: Facts, **changes: Any) -> Facts:
    return Facts(**{**vars(facts), **changes})


# ---------------------------------------------------------------------- the child that imports


def probe_steps(steps: Sequence[str], start: Run, timeout_s: float = PROBE_TIMEOUT_S) -> dict[str, dict[str, Any]]:
    """Return what each step of :mod:`.probe` finds. A step in which the child crashes or hangs costs only itself."""
    found: dict[str, dict[str, Any]] = {}
    left = list(steps)
    while left:
        ended = start([sys.executable, str(Path(probe.__file__).resolve()), *left], timeout_s)
        begun = ""
        for line in ended.output.splitlines():
            if not line.startswith(probe.MARK):
                continue
            said = json.loads(line[len(probe.MARK) :])
            if isinstance(said, dict):
                found |= said
                begun = ""
            else:
                begun = said
        if not begun:  # then it has come to its end, or not even to its first step
            return found | {step: {"error": ended.reason or "no answer"} for step in left if step not in found}
        found[begun] = {"error": ended.reason or "the process ended"}
        left = [step for step in left if step not in found]
    return found


def _gpus(found: Mapping[str, Mapping[str, Any]], rows: Sequence[Mapping[str, str]]) -> tuple[Gpu, ...]:
    """PyTorch's GPUs with what nvidia-smi says of them; UUIDs tell which are the same."""
    by_uuid = {row["uuid"].rpartition("GPU-")[2]: row for row in rows}
    free = found.get("memory", {}).get("free_bytes", [])
    gpus = []
    for i, gpu in enumerate(found.get("gpus", {}).get("gpus", [])):
        row = by_uuid.get(gpu["uuid"].rpartition("GPU-")[2], {})
        mebibytes = row.get("memory.free", "")
        gpus.append(
            Gpu(
                name=gpu["name"],
                capability=tuple(gpu["capability"]),
                total_bytes=gpu["total_bytes"],
                free_bytes=int(mebibytes) << 20 if mebibytes.isdigit() else free[i] if i < len(free) else None,
                compute_mode=row.get("compute_mode", ""),
                # An instance has a UUID of its own, so none of nvidia-smi's rows is it.
                mig="MIG" in gpu["name"] or row.get("mig.mode.current") == "Enabled",
                host_index=int(row["index"]) if row else None,
            )
        )
    return tuple(gpus)


# ---------------------------------------------------------------------- nvidia-smi


def parse_gpu_table(text: str) -> list[dict[str, str]]:
    """Rows of ``nvidia-smi --query-gpu=... --format=csv,noheader,nounits``, by field."""
    names = _SMI_FIELDS.split(",")
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    return [dict(zip(names, row)) for row in rows if len(row) == len(names) and row[0].isdigit()]  # noqa: B905


def parse_topology(text: str) -> dict[tuple[int, int], str]:
    """``nvidia-smi topo -m`` -> the link between GPUs i and j, such as ``NV18``, ``PIX`` or ``SYS``."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).split("\t") for line in text.splitlines()]
    header: list[int] = []
    links: dict[tuple[int, int], str] = {}
    for cells in lines:
        words = [cell.strip() for cell in cells]
        if not header:
            header = [int(word[3:]) for word in words if re.fullmatch(r"GPU\d+", word)]
        elif words and re.fullmatch(r"GPU\d+", words[0]):
            i = int(words[0][3:])
            links |= {(i, j): word for j, word in zip(header, words[1:]) if i != j and word}  # noqa: B905
    return links


def _pci_gpus() -> int:
    """NVIDIA's display controllers on the PCI bus."""
    count = 0
    for folder in glob.glob("/sys/bus/pci/devices/*"):
        with contextlib.suppress(OSError):
            vendor, kind = (Path(folder, name).read_text().strip() for name in ("vendor", "class"))
            count += vendor == "0x10de" and kind.startswith("0x03")
    return count


# ---------------------------------------------------------------------- packages


def _distributions() -> dict[str, str]:
    found = {}
    for name in _DISTRIBUTIONS:
        with contextlib.suppress(Exception):  # also broken metadata
            found[name] = importlib.metadata.version(name)
    return found


def _owners(package: str) -> tuple[str, ...]:
    """Distributions whose list of files has ``package``."""
    with contextlib.suppress(Exception):  # broken metadata, and a Python that has no such function
        return tuple(sorted({name.lower() for name in importlib.metadata.packages_distributions().get(package, ())}))
    return ()


def nvshmem_folders(home: str | None) -> list[Path]:
    """Where NVSHMEM's libraries are looked for: as :func:`tdcoll.language.jit.bitcode_path` does."""
    places = [Path(home) / "lib"] if home else []
    with contextlib.suppress(ImportError, ValueError):
        spec = importlib.util.find_spec("nvidia")
        for folder in (spec.submodule_search_locations or []) if spec else []:
            places.append(Path(folder) / "nvshmem" / "lib")
    return places


# ---------------------------------------------------------------------- network


def _interfaces() -> tuple[Interface, ...]:
    found = []
    v6 = _text("/proc/net/if_inet6").split()
    for _, name in socket.if_nameindex():
        flags = int(_text(f"/sys/class/net/{name}/flags").strip() or "1", 16)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            try:
                fcntl.ioctl(any_socket, 0x8915, struct.pack("256s", name.encode()[:15]))  # SIOCGIFADDR
                has_address = True
            except OSError:
                has_address = name in v6
        found.append(Interface(name, bool(flags & 0x1), has_address, bool(flags & 0x8)))  # IFF_UP, IFF_LOOPBACK
    return tuple(found)


def default_interface() -> str:
    """Return the interface of the default route with the lowest metric, or an empty text if there is no such route."""
    rows = [line.split() for line in _text("/proc/net/route").splitlines()[1:]]
    routes = [(int(row[6]), row[0]) for row in rows if len(row) > 7 and row[1] == row[7] == "00000000"]
    return min(routes)[1] if routes else ""


def _network_devices() -> tuple[NetworkDevice, ...]:
    found = []
    for folder in sorted(glob.glob("/sys/class/infiniband/*")):
        states = [_text(path) for path in glob.glob(f"{folder}/ports/*/state")]
        found.append(NetworkDevice(os.path.basename(folder), any("ACTIVE" in state for state in states)))
    return tuple(found)


# ---------------------------------------------------------------------- the host and its container


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _room(folder: str) -> int | None:
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize


def _stale_sockets() -> tuple[str, ...]:
    """NVSHMEM's sockets, named after two processes, that are bound no more."""
    bound = _text("/proc/net/unix")
    return tuple(path for path in sorted(glob.glob("/tmp/nvshmem-socket-*")) if path not in bound)


def _container() -> bool:
    marks = ("/.dockerenv", "/run/.containerenv", "/.singularity.d")
    return any(os.path.exists(mark) for mark in marks) or "container=" in _text("/proc/1/environ").replace("\0", "\n")


def _capability(number: int) -> bool:
    found = re.search(r"^CapEff:\s*([0-9a-f]+)", _text("/proc/self/status"), re.M)
    return bool(found) and bool(int(found[1], 16) >> number & 1) if found else False


def _memlock() -> int | None:
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return None if limit == resource.RLIM_INFINITY else limit
