# SPDX-License-Identifier: Apache-2.0
"""Facts: what programs say is read rightly, a child that dies costs one step, and what is known twice is the same."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tdcoll.doctor import collect, functional, job, probe, surroundings
from tdcoll.doctor.child import Ended, run
from tdcoll.doctor.facts import Interface, size, version
from tdcoll.language.jit import bitcode_path
from tdcoll.runtime import nvshmem

ROOT = Path(__file__).resolve().parents[2]

TABLE = """\
0, GPU-6f1c, 143156, Default, Disabled, 580.159.04
1, GPU-77aa, 100, Exclusive_Process, [N/A], 580.159.04
"""

TOPOLOGY = (
    "\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tNV18\tSYS\tPIX\t0-63\t0\t\tN/A\n"
    "GPU1\tNV18\t X \tPHB\tSYS\t0-63\t0\t\tN/A\n"
    "GPU2\tSYS\tPHB\t X \tSYS\t0-63\t0\t\tN/A\n"
    "NIC0\tPIX\tSYS\tSYS\t X \n\n"
    "Legend:\n\n  X    = Self\n  NV#  = Connection traversing a bonded set of # NVLinks\n\n"
    "NIC Legend:\n\n  NIC0: mlx5_0\n"
)


def test_nvidia_smi_is_read():
    first, second = collect.parse_gpu_table(TABLE)
    assert (first["uuid"], first["memory.free"], first["driver_version"]) == ("GPU-6f1c", "143156", "580.159.04")
    assert (second["index"], second["compute_mode"], second["mig.mode.current"]) == ("1", "Exclusive_Process", "[N/A]")
    assert collect.parse_gpu_table("NVIDIA-SMI has failed because ...\n") == []
    expected = {(0, 1): "NV18", (0, 2): "SYS", (1, 2): "PHB"}
    assert collect.parse_topology(TOPOLOGY) == {**expected, **{(j, i): kind for (i, j), kind in expected.items()}}
    assert collect.parse_topology("") == {}


def test_gpus_are_matched_by_their_uuid():
    """CUDA_VISIBLE_DEVICES=1,0: PyTorch's order is another than nvidia-smi's."""
    card = {"name": "NVIDIA H200", "capability": [9, 0], "total_bytes": 1 << 37}
    seen = {"gpus": {"gpus": [{**card, "uuid": "77aa"}, {**card, "uuid": "6f1c"}, {**card, "uuid": "GPU-77aa"}]}}
    gpus = collect._gpus(seen, collect.parse_gpu_table(TABLE))
    assert [gpu.host_index for gpu in gpus] == [1, 0, 1]
    assert [gpu.free_bytes for gpu in gpus] == [100 << 20, 143156 << 20, 100 << 20]
    (alone,) = collect._gpus({"gpus": {"gpus": [{**card, "uuid": ""}]}, "memory": {"free_bytes": [7]}}, [])
    assert (alone.host_index, alone.free_bytes) == (None, 7)


def test_a_step_in_which_the_child_dies_costs_only_itself():
    """numpy is found, torch crashes, triton hangs, the rest is found."""
    began = []

    def start(command, timeout_s):
        steps = command[2:]
        began.append(steps)
        said = ""
        for step in steps:
            said += f'library noise\n{probe.MARK}"{step}"\n'
            if step == "torch":
                return Ended(-11, said, reason="signal SIGSEGV ended it")
            if step == "triton":
                return Ended(None, said, True, "it did not end within 5 s")
            said += f'{probe.MARK}{{"{step}": {{"version": "1.0"}}}}\n'
        return Ended(0, said)

    found = collect.probe_steps(["numpy", "torch", "triton", "greenlet", "gpus"], start, 5)
    fine = {"version": "1.0"}
    assert found == {
        "numpy": fine,
        "torch": {"error": "signal SIGSEGV ended it"},
        "triton": {"error": "it did not end within 5 s"},
        "greenlet": fine,
        "gpus": fine,
    }
    assert [steps[0] for steps in began] == ["numpy", "triton", "greenlet"]


def test_a_child_that_does_not_start_is_an_error_of_every_step():
    reason = {"error": "there is no such program"}
    found = collect.probe_steps(["numpy", "torch"], lambda *_: Ended(None, "", reason=reason["error"]))
    assert found == {"numpy": reason, "torch": reason}


def test_the_child_itself(tmp_path):
    """A package that is missing, one that raises and one that is there; the child's own folder does not count."""
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "__init__.py").write_text("__version__ = '3.4.0'\n")
    (tmp_path / "numpy.py").write_text("raise OSError('libopenblas.so: no such file\\nand more')\n")
    environment = {"PYTHONPATH": str(tmp_path)}
    found = collect.probe_steps(
        ["greenlet", "numpy", "triton"],
        lambda command, timeout_s: run([command[0], "-S", *command[1:]], timeout_s, environment=environment),
    )
    assert found["greenlet"]["missing"]
    assert found["numpy"] == {"error": "OSError: libopenblas.so: no such file"}
    assert (found["triton"]["version"], found["triton"]["distributed"]) == ("3.4.0", False)
    assert found["triton"]["compiler"].startswith("ModuleNotFoundError: No module named 'triton._C'")


@pytest.mark.parametrize(
    ("value", "names"),
    [
        ("lo", ["lo"]),
        ("eth", ["eth0", "eth1"]),
        ("=eth", []),
        ("=eth1,lo", ["lo", "eth1"]),
        ("^eth,docker", ["lo"]),
        ("^=eth0", ["lo", "eth1", "docker0"]),
        ("eth1:4711", ["eth1"]),
        ("ib0", []),
    ],
)
def test_interfaces_are_chosen_as_nvshmem_does(value, names):
    there = [Interface(name) for name in ("lo", "eth0", "eth1", "docker0")]
    assert [found.name for found in surroundings.matching_interfaces(value, there)] == names


def test_sizes_and_versions_in_words():
    assert [size(n) for n in (12, 64 << 10, 64 << 20, 3 << 29, 139 << 30)] == [
        "12 bytes", "64 KiB", "64 MiB", "1.5 GiB", "139 GiB",
    ]  # fmt: skip
    assert [version(text) for text in ("3.7.1+cpu", "13.0", "13", "", None)] == [
        (3, 7),
        (13, 0),
        (13, 0),
        (0, 0),
        (0, 0),
    ]


def test_what_is_known_twice_is_the_same():
    """The doctor cannot import tdcoll's modules, which need what may be missing."""
    assert surroundings.INTERNAL_BYTES == nvshmem._INTERNAL_BYTES
    assert functional.MARK == job.MARK
    places = collect.nvshmem_folders(None)
    assert bitcode_path() in [str(place / "libnvshmem_device.bc") for place in places]
    assert collect.nvshmem_folders("/x")[0] == Path("/x/lib")


def test_this_process_needs_only_the_standard_library():
    def python(code: str) -> Ended:
        return run([sys.executable, "-S", "-c", code], 30, environment={"PYTHONPATH": str(ROOT)})

    assert python("import tdcoll.doctor.command, tdcoll.__main__").reason == ""
    assert "No module named" in python("import tdcoll; tdcoll.initialize").output  # there is nothing else here
