# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E501 (a table has a case per line)
"""Each kind of problem gives its line, its advice and the exit status, and changes no other line."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tdcoll.doctor.command import diagnose, exit_status
from tdcoll.doctor.facts import Facts, NetworkDevice
from tests.doctor.healthy import GPUS, HOSTS, SIMULATOR, environment, found, gpu

MISSING = {"missing": True, "error": "No module named ..."}
IFNAME = "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME"


def only(facts: Facts, *names: str) -> dict:
    return {"distributions": {k: v for k, v in facts.distributions.items() if k not in names}}


def also(facts: Facts, **more: str) -> dict:
    return {"distributions": {**facts.distributions, **{k.replace("_", "-"): v for k, v in more.items()}}}


@pytest.mark.parametrize(
    ("facts", "notes"),
    [(GPUS, []), (HOSTS, []), (SIMULATOR, []), (replace(SIMULATOR, **environment(SIMULATOR, TRITON_INTERPRET=None)), ["GPUs"])],
    ids=["gpus", "hosts", "simulator", "no gpu"],
)  # fmt: skip
def test_nothing_is_wrong(facts, notes):
    lines = diagnose(facts)
    assert [line.name for line in lines if line.status != "ok"] == notes
    assert exit_status(lines) == 0
    assert len({line.name for line in lines}) == len(lines)


PROBLEMS = [
    # facts, what is otherwise, the line, its text, its advice
    ("old Python", GPUS, {"python": (3, 9, 7)}, "Python", "3.9.7", "3.10 or newer"),
    ("no torch", SIMULATOR, found(SIMULATOR, torch=MISSING), "torch", "not installed", "pip install 'torch"),
    ("torch crashes", SIMULATOR, found(SIMULATOR, torch={"error": "signal SIGSEGV ended it"}), "torch", "cannot be imported: signal SIGSEGV", "reinstall"),
    ("old torch", GPUS, found(GPUS, torch={"version": "2.9.1", "cuda": "13.0"}), "torch", "2.9.1", "2.10 or newer"),
    ("torch without CUDA", GPUS, found(GPUS, torch={"version": "2.11.0", "cuda": None}), "torch", "without CUDA", "TRITON_INTERPRET=1"),
    ("torch for ROCm", GPUS, found(GPUS, torch={"version": "2.11.0", "cuda": None, "hip": "7.0"}), "torch", "ROCm", "CUDA build"),
    ("no triton", SIMULATOR, found(SIMULATOR, triton=MISSING), "triton", "not installed", "pip install -U torch"),
    ("old triton", GPUS, {**found(GPUS, triton={"version": "3.5.1"}), **also(GPUS, triton="3.5.1")}, "triton", "3.5.1", "3.6 or newer, below 4"),
    ("triton 4", GPUS, {**found(GPUS, triton={"version": "4.0.0"}), **also(GPUS, triton="4.0.0")}, "triton", "4.0.0", "below 4"),
    ("triton overwritten", GPUS, {**found(GPUS, triton={"error": "ImportError: libtriton"}), **also(GPUS, triton_dist="0.0.0"), "triton_owners": ("triton", "triton-dist")}, "triton", "triton-dist 0.0.0 has overwritten", "pip uninstall triton-dist, then pip install --force-reinstall --no-deps triton==3.6.0"),
    ("triton overwritten, name with underscore", GPUS, {**also(GPUS, triton_dist="0.0.0"), "triton_owners": ("triton", "triton_dist")}, "triton", "has overwritten", "pip uninstall triton_dist"),
    ("another triton's files", GPUS, found(GPUS, triton={"version": "3.4.0", "compiler": ""}), "triton", "3.4.0 is what Python finds, and pip has installed 3.6.0", "PYTHONPATH"),
    ("triton without its compiler", GPUS, found(GPUS, triton={"version": None, "compiler": "ImportError: libtriton"}), "triton", "no compiler", "--force-reinstall"),
    ("no Triton-distributed", GPUS, environment(GPUS, TDCOLL_COMPILER="triton_dist"), "triton", "asks for another compiler", "unset TDCOLL_COMPILER"),
    ("no numpy", GPUS, found(GPUS, numpy=MISSING), "numpy", "not installed", "pip install -U numpy"),
    ("no greenlet, simulator", SIMULATOR, found(SIMULATOR, greenlet=MISSING), "greenlet", "not installed", "greenlet>=3"),
    ("no bindings", GPUS, only(GPUS, "nvshmem4py-cu13"), "nvshmem4py", "not installed", ".[cu13]"),
    ("bindings for another CUDA", GPUS, {"distributions": {**only(GPUS, "nvshmem4py-cu13")["distributions"], "nvshmem4py-cu12": "0.4.1"}}, "nvshmem4py", "torch is for CUDA 13.0", "pip uninstall nvshmem4py-cu12"),
    ("two sets of bindings", GPUS, also(GPUS, nvshmem4py_cu12="0.4.1"), "nvshmem4py", "nvshmem4py-cu12 0.4.1, nvshmem4py-cu13", "they share files"),
    ("library for another CUDA", GPUS, {"distributions": {**only(GPUS, "nvidia-nvshmem-cu13")["distributions"], "nvidia-nvshmem-cu12": "3.4.5"}}, "nvidia-nvshmem", "torch is for CUDA 13.0", "pip uninstall nvidia-nvshmem-cu12"),
    ("old NVSHMEM", GPUS, also(GPUS, nvidia_nvshmem_cu13="2.11.0"), "nvidia-nvshmem", "2.11.0", "NVSHMEM 3"),
    ("host library does not load", GPUS, found(GPUS, nvshmem={"error": "DynamicLibNotFoundError: nvshmem_host"}), "NVSHMEM host library", "does not load: Dynamic", ".[cu13]"),
    ("no bitcode", GPUS, {"bitcode": ""}, "NVSHMEM device library", "libnvshmem_device.bc is not in /venv", "NVSHMEM_HOME"),
    ("no driver", GPUS, found(GPUS, driver={"error": "OSError: libcuda.so.1"}), "CUDA driver", "does not answer", "--gpus all"),
    ("old driver", GPUS, found(GPUS, driver={"cuda": [12, 8]}), "CUDA driver", "for up to CUDA 12.8; torch is for CUDA 13.0", "newer driver"),
    ("torch sees no GPU", GPUS, {"gpus": ()}, "GPUs", "PyTorch sees none; this host has 3", "nvidia-smi"),
    ("asking for GPUs hangs", GPUS, {"gpus": (), **found(GPUS, gpus={"error": "it did not end within 120 s"})}, "GPUs", "did not end within 120 s", "driver"),
    ("interpreter switched off without a GPU", SIMULATOR, {**environment(SIMULATOR, TRITON_INTERPRET="0"), **found(SIMULATOR, torch={"version": "2.13.0", "cuda": "13.0"}, nvshmem={}, driver={"cuda": [13, 0]}), "distributions": GPUS.distributions | {"triton": "3.7.1"}, "bitcode": "x"}, "GPUs", "this host has 0", "TRITON_INTERPRET=1"),
    ("old GPU", GPUS, gpu(GPUS, 1, capability=(6, 1)), "GPUs", "need compute capability 7.5", "CUDA_VISIBLE_DEVICES"),
    ("GPU too old for CUDA 13", GPUS, gpu(GPUS, 1, capability=(7, 0)), "GPUs", "need compute capability 7.5", "CUDA_VISIBLE_DEVICES"),
    ("prohibited", GPUS, gpu(GPUS, 0, compute_mode="Prohibited"), "compute mode", "Prohibited", "nvidia-smi -c"),
    ("one pair without peer access", GPUS, {"no_peer_access": frozenset({(2, 0)})}, "links", "between 0 and 2,", "topo -p2p r"),
    ("hosts of a simulator", SIMULATOR, {"nnodes": 2}, "network cards", "2 hosts", "one host"),
    ("transport none", HOSTS, environment(HOSTS, NVSHMEM_REMOTE_TRANSPORT="none"), "network cards", "cannot reach", "unset it"),
    ("no network cards", HOSTS, {"network_devices": ()}, "network cards", "no InfiniBand or RoCE", "/dev/infiniband"),
    ("no active port", HOSTS, {"network_devices": (NetworkDevice("mlx5_0", False),)}, "network cards", "no port of mlx5_0", "ibstat"),
    ("no device files", HOSTS, {"verbs": False}, "network cards", "mlx5_0, without their device files", "--device /dev/infiniband"),
    ("interface does not exist", GPUS, environment(GPUS, **{IFNAME: "eth7"}), "bootstrap interface", "eth7: there is no such", "lo, eth0, docker0; on one host lo is right"),
    ("interface is down", GPUS, environment(GPUS, **{IFNAME: "docker"}), "bootstrap interface", "docker0 is down", "choose another"),
    ("loopback on several hosts", HOSTS, environment(HOSTS, **{IFNAME: "lo"}), "bootstrap interface", "this host alone", "the default route goes over eth0"),
    ("heap is no size", GPUS, environment(GPUS, NVSHMEM_SYMMETRIC_SIZE="1 gig"), "symmetric heap", "is not a size", "64M"),
    ("heap larger than memory", GPUS, environment(GPUS, NVSHMEM_SYMMETRIC_SIZE="200G"), "symmetric heap", "GPU 0 has 150 GiB free", "lower NVSHMEM_SYMMETRIC_SIZE"),
    ("one GPU is full", GPUS, gpu(GPUS, 2, free_bytes=400 << 20), "symmetric heap", "GPU 2 has 400 MiB free", "end what else uses"),
    ("simulated heap larger than memory", SIMULATOR, environment(SIMULATOR, NVSHMEM_SYMMETRIC_SIZE="600M"), "symmetric heap", "1.2 GiB for 2 ranks", "lower"),
    ("no shared memory", GPUS, {"shm_free_bytes": None}, "/dev/shm", "there is none", "--shm-size"),
    ("no /tmp", GPUS, {"tmp_writable": False}, "/tmp", "not writable", "writable"),
    ("misspelt", GPUS, environment(GPUS, TDCOLL_TIMOUT_S="3"), "variables", "TDCOLL_TIMOUT_S is none", "did you mean TDCOLL_TIMEOUT_S?"),
    ("no number", GPUS, environment(GPUS, TDCOLL_TIMEOUT_S="soon"), "variables", "TDCOLL_TIMEOUT_S=soon", "positive number"),
    ("no time", GPUS, environment(GPUS, TDCOLL_TIMEOUT_S="0"), "variables", "TDCOLL_TIMEOUT_S=0", "positive number"),
    ("too many nodes", GPUS, environment(GPUS, TDCOLL_EMULATE_NODES="4"), "variables", "TDCOLL_EMULATE_NODES=4", "from 1 to the number of ranks per host, here 3"),
    ("no digit", GPUS, environment(GPUS, TDCOLL_EMULATE_NODES="²"), "variables", "TDCOLL_EMULATE_NODES=²", "from 1 to the number of ranks per host, here 3"),
    ("too many digits", GPUS, environment(GPUS, TDCOLL_EMULATE_NODES="9" * 5000), "variables", "TDCOLL_EMULATE_NODES=99", "from 1 to the number of ranks per host, here 3"),
    ("heap of too many digits", GPUS, environment(GPUS, NVSHMEM_SYMMETRIC_SIZE="9" * 5000), "symmetric heap", "NVSHMEM_SYMMETRIC_SIZE=99", "write 67108864, 64M or 2G"),
    ("no such heap", GPUS, environment(GPUS, TDCOLL_HEAP="cuda"), "variables", "TDCOLL_HEAP=cuda", "auto, nvshmem or torch"),
    ("PyTorch's heap on hosts", HOSTS, environment(HOSTS, TDCOLL_HEAP="torch"), "variables", "TDCOLL_HEAP=torch", "for one host"),
    ("no NVSHMEM on hosts", HOSTS, found(HOSTS, nvshmem=MISSING), "NVSHMEM host library", "does not load", ".[cu13]"),
    ("no such compiler", GPUS, environment(GPUS, TDCOLL_COMPILER="clang"), "variables", "TDCOLL_COMPILER=clang", "triton or triton_dist"),
    ("compiler and simulator", SIMULATOR, environment(SIMULATOR, TDCOLL_COMPILER="triton_dist"), "variables", "triton_dist", "unset one"),
]  # fmt: skip

NOTES = [
    ("no greenlet, GPUs", GPUS, found(GPUS, greenlet=MISSING), "greenlet", "not installed", "only the simulator"),
    ("NVSHMEM of the system", GPUS, only(GPUS, "nvidia-nvshmem-cu13"), "nvidia-nvshmem", "not installed by pip", ".[cu13]"),
    ("two libraries, simulator", SIMULATOR, also(SIMULATOR, nvidia_nvshmem_cu12="3.4.5", nvidia_nvshmem_cu13="3.4.5"), "nvidia-nvshmem", "cu12 3.4.5", "share files"),
    ("not in LD_LIBRARY_PATH", GPUS, environment(GPUS, LD_LIBRARY_PATH=None), "NVSHMEM host library", "not in LD_LIBRARY_PATH", "source setenv.sh"),
    ("driver of the same major", GPUS, found(GPUS, torch={"version": "2.12.0", "cuda": "13.2"}), "CUDA driver", "for up to CUDA 13.0", "newer driver"),
    ("all hidden", GPUS, {**environment(GPUS, CUDA_VISIBLE_DEVICES=""), "gpus": (), "nproc": 2}, "GPUs", "hides them all", "unset"),
    ("no driver device", SIMULATOR, {**environment(SIMULATOR, TRITON_INTERPRET=None), "pci_gpus": 8}, "GPUs", "8 on the PCI bus", "--gpus all"),
    ("not one that Triton supports", GPUS, {"gpus": tuple(replace(g, capability=(7, 5)) for g in GPUS.gpus)}, "GPUs", "sm_75", "8.0"),
    ("MIG", GPUS, gpu(GPUS, 0, mig=True), "MIG", "cannot reach", "whole GPUs"),
    ("exclusive", GPUS, gpu(GPUS, 0, compute_mode="Exclusive_Process"), "compute mode", "exclusive", "another process"),
    ("no nvidia-smi", GPUS, {"nvidia_smi": "it did not end within 30 s"}, "nvidia-smi", "30 s", "not known"),
    ("one pair over PCIe", GPUS, {"links": {**GPUS.links, (0, 1): "SYS", (1, 0): "SYS"}}, "links", "not NVLink between 0 and 1", "more slowly"),
    ("peer access not known", GPUS, {"no_peer_access": None}, "links", "not known", "GPUs"),
    ("interface not set", GPUS, environment(GPUS, **{IFNAME: None}), "bootstrap interface", "is not set", "setenv.sh"),
    ("interface not set, hosts", HOSTS, environment(HOSTS, **{IFNAME: None}), "bootstrap interface", "is not set", "over eth0"),
    ("little shared memory", GPUS, {"shm_free_bytes": 64 << 20}, "/dev/shm", "64 MiB free", "--shm-size"),
    ("stale sockets", GPUS, {"stale_sockets": ("/tmp/nvshmem-socket-7-8",)}, "/tmp", "1 left over", "delete"),
    ("locked memory", HOSTS, {"memlock_bytes": 65536}, "locked memory", "64 KiB", "--ulimit memlock=-1"),
    ("multicast on", GPUS, environment(GPUS, NVSHMEM_DISABLE_NVLS="0", NCCL_NVLS_ENABLE="1"), "multicast", "NVSHMEM_DISABLE_NVLS=0, NCCL_NVLS_ENABLE=1", "NVSHMEM_DISABLE_NVLS=1"),
    ("multicast not set", GPUS, environment(GPUS, NVSHMEM_DISABLE_NVLS=None), "multicast", "none of its switches", "NVSHMEM_DISABLE_NVLS=1"),
    ("ranks may share GPUs", GPUS, environment(GPUS, TDCOLL_SHARE_GPUS="1"), "variables", "TDCOLL_SHARE_GPUS=1", "tests of correctness"),
    ("somebody's variable", GPUS, environment(GPUS, TDCOLL_XYZ="1"), "variables", "TDCOLL_XYZ", "unset it"),
]  # fmt: skip

# Other lines that the same fact changes; None: it changes the mode, and so all of them.
ALSO_CHANGES = {
    "all hidden": None,
    "interpreter switched off without a GPU": None,
    "torch sees no GPU": ("links", "symmetric heap"),
    "asking for GPUs hangs": ("links", "symmetric heap"),
    "torch without CUDA": ("CUDA driver",),
    "torch for ROCm": ("CUDA driver",),
    "driver of the same major": ("torch",),
}


@pytest.mark.parametrize(
    ("status", "title", "facts", "changes", "name", "text", "advice"),
    [("problem", *case) for case in PROBLEMS] + [("note", *case) for case in NOTES],
    ids=lambda value: value if isinstance(value, str) and len(value) < 45 else "",
)
def test_what_is_wrong_has_its_line(status, title, facts, changes, name, text, advice):
    before, lines = diagnose(facts), diagnose(replace(facts, **changes))
    (line,) = [line for line in lines if line.name == name]
    assert line.status == status
    assert text in line.text
    assert advice in line.advice
    assert exit_status(lines) == (status == "problem")
    others = ALSO_CHANGES.get(title, ())
    if others is not None:
        left = [line for line in lines if line.name != name and line.name not in others]
        assert left == [line for line in before if line.name != name and line.name not in others]


@pytest.mark.parametrize(
    ("facts", "size", "text"),
    [
        (GPUS, None, "384 MiB per rank (the default; NVSHMEM_SYMMETRIC_SIZE sets another); the fullest GPU has 150 GiB free"),
        (GPUS, "2G", "2 GiB per rank (your NVSHMEM_SYMMETRIC_SIZE); the fullest GPU has 150 GiB free"),
        (SIMULATOR, None, "64 MiB per rank (the default; NVSHMEM_SYMMETRIC_SIZE sets another)"),
    ],
)  # fmt: skip
def test_the_heap_and_how_to_change_it(facts, size, text):
    lines = diagnose(replace(facts, **environment(facts, NVSHMEM_SYMMETRIC_SIZE=size)))
    (line,) = [line for line in lines if line.name == "symmetric heap"]
    assert (line.status, line.text) == ("ok", text)


def test_every_line_can_go_wrong():
    """Each check but the one on containers, which only informs, has a case above."""
    names = {line.name for facts in (GPUS, HOSTS, SIMULATOR) for line in diagnose(facts)}
    assert names - {case[3] for case in PROBLEMS + NOTES} == {"container"}
    text = {line.name: line.text for line in diagnose(replace(GPUS, container=True, ptrace=False))}["container"]
    assert text.startswith("in a container; without CAP_SYS_PTRACE")


def test_the_simulator_that_setenv_chose_hides_no_missing_driver():
    chosen = environment(SIMULATOR, TRITON_INTERPRET="1", TDCOLL_SETENV="NVSHMEM_X=2 TRITON_INTERPRET=1")
    wished = environment(SIMULATOR, TRITON_INTERPRET="1", TDCOLL_SETENV="NVSHMEM_X=2")
    for changes, status, text in ((chosen, "note", "8 on the PCI bus"), (wished, "ok", "not used: TRITON_INTERPRET=1")):
        lines = diagnose(replace(SIMULATOR, **changes, pci_gpus=8))
        (line,) = [line for line in lines if line.name == "GPUs"]
        assert (line.status, line.text[: len(text)]) == (status, text)


@pytest.mark.parametrize("hidden", [False, True], ids=["none", "hidden"])
@pytest.mark.parametrize("chosen_by_setenv", [False, True], ids=["plain shell", "setenv.sh"])
def test_where_kernels_run_is_said_for_each_launcher(hidden, chosen_by_setenv):
    """launch.sh chooses the simulator by itself; torchrun only has what the environment says."""
    variables = {"TRITON_INTERPRET": "1", "TDCOLL_SETENV": "TRITON_INTERPRET=1"} if chosen_by_setenv else {}
    if hidden:
        variables["CUDA_VISIBLE_DEVICES"] = ""
    lines = diagnose(replace(SIMULATOR, environment=variables, host_gpus=2 if hidden else 0))
    (line,) = [line for line in lines if line.name == "GPUs"]
    assert line.status == "note"
    if chosen_by_setenv:
        assert line.text.endswith(": kernels run in the simulator")
    else:
        assert line.text.endswith(": launch.sh runs kernels in the simulator, torchrun only with TRITON_INTERPRET=1")


@pytest.mark.parametrize(
    ("visible", "host_gpus", "simulated"),
    [(None, 2, False), (None, 0, True), ("", 2, True), ("1", 2, False), ("2", 2, True), ("-1", 2, True), ("GPU-1", 2, False)],
)  # fmt: skip
def test_mode_is_that_of_setenv(visible, host_gpus, simulated):
    variables = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert Facts(environment=variables, host_gpus=host_gpus).simulated is simulated
    assert Facts(environment={**variables, "TRITON_INTERPRET": "1"}, host_gpus=host_gpus).simulated
    assert not Facts(environment={**variables, "TRITON_INTERPRET": "0"}, host_gpus=host_gpus).simulated
