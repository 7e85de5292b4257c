# SPDX-License-Identifier: Apache-2.0
"""Checks of GPUs, of the links between them, and of the network cards between hosts. Pure."""

from __future__ import annotations

from collections import Counter

from tdcoll.doctor.facts import Facts, Line, note, ok, problem, size, version

__all__ = ["DEVICE_CHECKS"]


def gpus(facts: Facts) -> list[Line]:
    name = "GPUs"
    if facts.simulated:
        # setenv.sh sets the variable itself where it finds no GPU: then nobody has asked for the simulator.
        by_itself = "TRITON_INTERPRET=1" in facts.environment.get("TDCOLL_SETENV", "").split()
        if facts.environment.get("TRITON_INTERPRET") and not by_itself:
            return [
                ok(name, f"not used: TRITON_INTERPRET={facts.environment['TRITON_INTERPRET']} asks for the simulator")
            ]
        # setenv.sh, and with it launch.sh, sets the variable; torchrun from a shell that has not sourced it doesn't.
        where = (
            "kernels run in the simulator"
            if by_itself
            else "launch.sh runs kernels in the simulator, torchrun only with TRITON_INTERPRET=1"
        )
        if facts.host_gpus:
            return [note(name, f"CUDA_VISIBLE_DEVICES hides them all: {where}", "unset it")]
        if facts.pci_gpus:
            advice = "install NVIDIA's driver; in a container, start it with the GPUs (docker run --gpus all)"
            return [note(name, f"{facts.pci_gpus} on the PCI bus, and none that a driver offers", advice)]
        return [note(name, f"none: {where}")]
    if not facts.gpus:
        if "error" in (found := facts.of("gpus")):
            text = f"PyTorch cannot ask for them: {found['error']}"
        else:
            text = f"PyTorch sees none; this host has {facts.host_gpus}"
        advice = "see the lines on torch and the driver; `nvidia-smi` has to work. TRITON_INTERPRET=1 is the simulator"
        return [problem(name, text, advice)]
    counts = Counter((gpu.name, gpu.capability, gpu.total_bytes) for gpu in facts.gpus)
    text = ", ".join(
        f"{count} × {kind} (sm_{capability[0]}{capability[1]}, {size(total)})"
        for (kind, capability, total), count in counts.items()
    )
    lines = [ok(name, text)]
    oldest = min(gpu.capability for gpu in facts.gpus)
    # CUDA 13, and with it NVSHMEM's device library for it, has nothing for what is older than 7.5.
    least = (7, 5) if version(facts.of("torch").get("cuda") or "")[0] >= 13 else (7, 0)
    if oldest < least:
        wanted = f"tdcoll's kernels and NVSHMEM's device library need compute capability {least[0]}.{least[1]}"
        advice = "leave these GPUs out with CUDA_VISIBLE_DEVICES"
        lines = [problem(name, f"{text}; {wanted}", advice)]
    elif oldest < (8, 0):
        lines = [note(name, text, "Triton supports compute capability 8.0 and newer")]
    lines += _modes(facts)
    if facts.nvidia_smi:
        lines.append(note("nvidia-smi", facts.nvidia_smi, "free memory and links are not known from it"))
    return lines


def _modes(facts: Facts) -> list[Line]:
    lines = []
    if any(gpu.mig for gpu in facts.gpus):
        text = "MIG is on, and MIG instances cannot reach each other's memory"
        lines.append(note("MIG", text, "one rank works; for more, take whole GPUs"))
    modes = {gpu.compute_mode for gpu in facts.gpus}
    if "Prohibited" in modes:
        lines.append(
            problem("compute mode", "Prohibited: no process may use the GPU", "nvidia-smi -c DEFAULT, as root")
        )
    elif modes & {"Exclusive_Process", "Exclusive_Thread"}:
        text = "exclusive: a GPU takes one process, which is all that tdcoll needs"
        lines.append(note("compute mode", text, "if a start fails as busy, another process holds the GPU"))
    return lines


def links(facts: Facts) -> list[Line]:
    name, count = "links", len(facts.gpus)
    if facts.simulated or count < 2:
        return []
    pairs = [(i, j) for i in range(count) for j in range(i + 1, count)]
    if facts.no_peer_access is None:
        return [note(name, f"not known: {facts.of('gpus').get('error', '')}", "see the line on GPUs")]
    cut = [(i, j) for i, j in pairs if {(i, j), (j, i)} & facts.no_peer_access]
    if cut:
        text = f"no peer-to-peer access between {_listed(cut)}, and tdcoll needs it between all GPUs of a host"
        advice = (
            "see `nvidia-smi topo -p2p r`; PCI access control (ACS) or an IOMMU may forbid it, and some GPUs do not "
            "have it. Choose GPUs that have it with CUDA_VISIBLE_DEVICES"
        )
        return [problem(name, text, advice)]
    kinds = {pair: facts.links.get(pair, "") for pair in pairs}
    slow = {pair: kind for pair, kind in kinds.items() if kind and not kind.startswith("NV")}
    if slow:
        text = f"{_kinds(kinds.values())}: not NVLink between {_listed(list(slow))}"
        return [note(name, text, "works, more slowly; on hosts with several groups of GPUs choose within one")]
    if not all(kinds.values()):
        return [ok(name, f"peer-to-peer access between all {count} GPUs; over what is not known")]
    return [ok(name, f"NVLink between all {count} GPUs ({_kinds(kinds.values())})")]


def _kinds(kinds: object) -> str:
    return ", ".join(sorted({kind for kind in kinds if kind}))  # type: ignore[attr-defined]


def _listed(pairs: list[tuple[int, int]]) -> str:
    shown = ", ".join(f"{i} and {j}" for i, j in pairs[:6])
    return shown + (f" and {len(pairs) - 6} more pairs" if len(pairs) > 6 else "")


def network(facts: Facts) -> list[Line]:
    name = "network cards"
    if facts.nnodes < 2:
        return []
    if facts.simulated:
        return [problem(name, f"{facts.nnodes} hosts asked for", "the simulator runs on one host: see --emulate-nodes")]
    transport = facts.environment.get("NVSHMEM_REMOTE_TRANSPORT", "")
    if transport.lower() == "none":
        text = f"NVSHMEM_REMOTE_TRANSPORT={transport}, with which hosts cannot reach each other"
        return [problem(name, text, "unset it, or set TDCOLL_NNODES before sourcing setenv.sh")]
    active = [device.name for device in facts.network_devices if device.active]
    if not facts.network_devices:
        advice = "between hosts NVSHMEM needs InfiniBand, RoCE or EFA; in a container, give it /dev/infiniband"
        return [problem(name, "no InfiniBand or RoCE device (/sys/class/infiniband is empty)", advice)]
    if not active:
        names = ", ".join(device.name for device in facts.network_devices)
        return [problem(name, f"no port of {names} is active", "see `ibstat`: cable, switch, subnet manager")]
    if not facts.verbs:
        advice = "docker run --device /dev/infiniband, and --cap-add IPC_LOCK"
        return [problem(name, f"{', '.join(active)}, without their device files in /dev/infiniband", advice)]
    return [ok(name, f"{', '.join(active)}; transport: {transport or 'chosen by NVSHMEM'}")]


DEVICE_CHECKS = (gpus, links, network)
