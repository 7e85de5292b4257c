# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E501 (a table has a case per line)
"""Every kind of problem gets its line, with advice, and changes no other line."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tdcoll.tools.doctor.checks import diagnose
from tests.doctor.healthy import GPUS, MISSING, NO_GPU, ONE_HOST, SIMULATOR, environment, found

IFNAME = "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME"
H200 = GPUS.gpus[0]


def gpus(**changes) -> dict:
    return found(GPUS, gpus={**GPUS.found["gpus"], **changes})


def installed(**versions: str) -> dict:
    return {
        "distributions": {name.replace("_", "-"): version for name, version in versions.items()}
    }


FAULTS = [
    # status, facts, what is different, the line, its text, its advice
    ("problem", GPUS, {"python": (3, 9, 7)}, "Python", "3.9.7", "3.10 or newer"),
    ("problem", SIMULATOR, found(SIMULATOR, torch=MISSING), "torch", "not installed", "pip install -U 'torch"),
    ("problem", GPUS, found(GPUS, torch={"version": "2.9.1", "cuda": "13.0"}), "torch", "2.9.1", "2.10 or newer"),
    ("problem", GPUS, found(GPUS, torch={"version": "2.11.0", "cuda": None}), "torch", "without CUDA", "TRITON_INTERPRET=1"),
    ("problem", SIMULATOR, {**found(SIMULATOR, triton={"version": "3.5.1"}), **installed(triton="3.5.1")}, "triton", "3.5.1", "3.6 or newer, below 4"),
    ("problem", SIMULATOR, {**found(SIMULATOR, triton={"version": "4.0.0"}), **installed(triton="4.0.0")}, "triton", "4.0.0", "below 4"),
    ("problem", SIMULATOR, installed(triton="3.6.0", triton_dist="0.0.1"), "triton", "triton-dist 0.0.1 has overwritten", "pip uninstall triton-dist, then pip install --force-reinstall --no-deps triton==3.6.0"),
    ("problem", GPUS, found(GPUS, triton={"version": "3.4.0"}), "triton", "Python finds 3.4.0, and pip has installed 3.6.0", "PYTHONPATH"),
    ("problem", GPUS, found(GPUS, triton={"version": "3.6.0", "error": "ImportError: libtriton"}), "triton", "3.6.0 cannot be imported: ImportError: libtriton", "--force-reinstall"),
    ("problem", GPUS, found(GPUS, numpy=MISSING), "numpy", "not installed", "pip install -U numpy"),
    ("problem", SIMULATOR, found(SIMULATOR, greenlet=MISSING), "greenlet", "not installed", "pip install -e '.[sim]'"),
    ("problem", SIMULATOR, {**found(SIMULATOR, triton=MISSING), **installed()}, "triton", "not installed", "--no-deps 'triton>=3.6,<4'"),
    ("note", GPUS, found(GPUS, greenlet=MISSING), "greenlet", "not installed", "the simulator needs it"),
    ("problem", GPUS, installed(triton="3.6.0", nvshmem4py_cu12="0.4.1"), "NVSHMEM", "nvshmem4py-cu12 and torch, for CUDA 13.0", "then pip install -e '.[cu13]'"),
    ("problem", GPUS, installed(triton="3.6.0", nvidia_nvshmem_cu12="3.4.5", nvidia_nvshmem_cu13="3.4.5"), "NVSHMEM", "nvidia-nvshmem-cu12 and torch", "pip uninstall nvidia-nvshmem-cu12 nvidia-nvshmem-cu13"),
    ("problem", GPUS, found(GPUS, nvshmem={"error": "DynamicLibNotFoundError: nvshmem_host"}), "NVSHMEM", "DynamicLibNotFoundError", ".[cu13]"),
    ("problem", GPUS, found(GPUS, **{"device library": {"error": "FileNotFoundError: NVSHMEM's device library in /lib has no file for sm_70"}}), "NVSHMEM", "3.4.5; FileNotFoundError: NVSHMEM's device library in /lib has no file for sm_70", ".[cu13]"),
    ("problem", GPUS, environment(GPUS, NVSHMEM_TMA_POLICY="enable"), "NVSHMEM", "NVSHMEM_TMA_POLICY=enable lets", "unset"),
    ("problem", GPUS, {**found(GPUS, nvshmem=MISSING), **environment(GPUS, TDCOLL_HEAP="nvshmem")}, "NVSHMEM", "nvshmem4py not installed", ".[cu13]"),
    ("note", GPUS, found(GPUS, nvshmem=MISSING), "NVSHMEM", "not installed: PyTorch makes the symmetric heap", ".[cu13]"),
    ("note", GPUS, environment(GPUS, TDCOLL_HEAP="torch"), "NVSHMEM", "TDCOLL_HEAP=torch: PyTorch makes", "several hosts"),
    ("problem", GPUS, found(GPUS, driver={"error": "OSError: libcuda.so.1"}), "CUDA driver", "doesn't answer", "--gpus all"),
    ("problem", GPUS, found(GPUS, driver={"cuda": [12, 8]}), "CUDA driver", "up to 12.8; torch is for CUDA 13.0", "newer driver"),
    ("note", GPUS, found(GPUS, torch={"version": "2.11.0+cu132", "cuda": "13.2"}), "CUDA driver", "up to 13.0", "newer driver"),
    ("problem", GPUS, found(GPUS, gpus=NO_GPU), "GPUs", "PyTorch sees none; nvidia-smi counts 3", "nvidia-smi"),
    ("problem", GPUS, found(GPUS, gpus={"error": "it did not end within 120 s"}), "GPUs", "did not end within 120 s", "driver"),
    ("note", GPUS, gpus(gpus=[H200, {"name": "NVIDIA T4", "capability": [7, 5]}, H200]), "GPUs", "2 × NVIDIA H200 (sm_90), 1 × NVIDIA T4 (sm_75)", "8.0"),
    ("problem", GPUS, gpus(no_peer_access=[[2, 0]]), "peer access", "none between GPUs 0 and 2;", "topo -p2p r"),
    ("note", GPUS, {"environment": {"LD_LIBRARY_PATH": "/cuda"}}, "setenv.sh", "LD_LIBRARY_PATH=/venv/nvshmem/lib, NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME=lo, ", "`source setenv.sh` before torchrun"),
    ("note", GPUS, {"environment": {**ONE_HOST, "TRITON_INTERPRET": "1"}}, "setenv.sh", "sets: no TRITON_INTERPRET", "source"),
    ("problem", GPUS, environment(GPUS, TDCOLL_TIMOUT_S="3"), "variables", "TDCOLL_TIMOUT_S is none", "did you mean TDCOLL_TIMEOUT_S?"),
    ("note", GPUS, environment(GPUS, TDCOLL_XYZ="1"), "variables", "TDCOLL_XYZ", "unset it"),
]  # fmt: skip

ALSO_CHANGES = {
    "PyTorch sees none; nvidia-smi counts 3": ("peer access",),
    "did not end within 120 s": ("peer access",),
    "up to 13.0": ("torch",),
}
"""Other lines that the same fact changes."""


@pytest.mark.parametrize(("status", "facts", "changes", "name", "text", "advice"), FAULTS, ids=[case[4][:40] for case in FAULTS])  # fmt: skip
def test_each_fault_has_its_line(status, facts, changes, name, text, advice):
    before, lines = diagnose(facts), diagnose(replace(facts, **changes))
    (line,) = [line for line in lines if line.name == name]
    assert (line.status, text in line.text, advice in line.advice) == (status, True, True), line
    names = {name, *ALSO_CHANGES.get(text, ())}
    assert [line for line in lines if line.name not in names] == [
        line for line in before if line.name not in names
    ]


def test_each_line_can_go_wrong():
    names = {line.name for facts in (GPUS, SIMULATOR) for line in diagnose(facts)}
    assert names == {case[3] for case in FAULTS}


BY_SETENV = {"TRITON_INTERPRET": "1", "TDCOLL_SETENV": "NVSHMEM_X=2 TRITON_INTERPRET=1"}
OF_A_SHELL = 'launch.sh runs kernels in the simulator; `torchrun script.py` raises "no CUDA GPU is visible" unless TRITON_INTERPRET=1 is set'


@pytest.mark.parametrize(
    ("facts", "changes", "name", "status", "text"),
    [
        # launch.sh chooses the simulator; torchrun has only the shell's environment.
        (SIMULATOR, {"environment": {}}, "GPUs", "note", f"none: {OF_A_SHELL}"),
        (SIMULATOR, {"environment": {"CUDA_VISIBLE_DEVICES": ""}}, "GPUs", "note", f"none with CUDA_VISIBLE_DEVICES=: {OF_A_SHELL}"),
        (SIMULATOR, {"environment": BY_SETENV}, "GPUs", "note", f"none: {OF_A_SHELL}"),
        (SIMULATOR, {"environment": {**BY_SETENV, "TDCOLL_SETENV": "X=2"}}, "GPUs", "ok", "not used: TRITON_INTERPRET=1 asks for the simulator"),
        (GPUS, {}, "variables", "ok", "none of tdcoll's is misspelt"),
        (GPUS, environment(GPUS, NVSHMEM_TMA_POLICY="Disable"), "NVSHMEM", "ok", "nvshmem4py-cu13 0.4.1, nvidia-nvshmem-cu13 3.4.5; /venv/nvshmem/lib/libnvshmem_host.so.3; sm_90: /venv/nvshmem/lib/libnvshmem_device_sm_90.bc"),
        (GPUS, {**environment(GPUS, TDCOLL_COMPILER="triton_dist"), **installed(triton_dist="0.0.1")}, "triton", "ok", "3.6.0"),
    ],
)  # fmt: skip
def test_the_words_of_a_line(facts, changes, name, status, text):
    found = [
        (line.status, line.text)
        for line in diagnose(replace(facts, **changes))
        if line.name == name
    ]
    assert found == [(status, text)]
