# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E501
"""How ``sanitize.py`` runs its jobs, with a script in place of compute-sanitizer, and reads its
reports."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import sanitize
from processes import python

FAKE = f"""#!{sys.executable}
import subprocess, sys
options = sys.argv[1 : sys.argv.index(sys.executable)]
program = sys.argv[len(options) + 1 :]
with open(options[options.index("--log-file") + 1], "w") as log:
    log.write("========= COMPUTE-SANITIZER\\n")
    log.flush()
    status = subprocess.run(program).returncode
    if program[-1] == "control":
        log.write("========= Invalid __global__ write of size 4 bytes\\n=========     at store_out_of_bounds+0x10\\n")
    log.write("========= ERROR SUMMARY: 0 errors\\n")
sys.exit(status)
"""


@pytest.fixture(autouse=True)
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compute-sanitizer that runs its program, and sees a fault in the control alone."""
    script = tmp_path / "bin" / "compute-sanitizer"
    script.parent.mkdir()
    script.write_text(FAKE)
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{script.parent}{os.pathsep}{os.environ['PATH']}")


def test_a_tool_watches_the_rank_alone_and_the_kernels_that_are_not_others(tmp_path: Path) -> None:
    memcheck = sanitize.under("memcheck", "compute-sanitizer", tmp_path, 30000, 2, "language")
    assert memcheck[memcheck.index("--target-processes") + 1] == "application-only"
    assert "--kernel-name-exclude" in memcheck
    # A kernel that is left out writes what initcheck then takes for never written.
    initcheck = sanitize.under("initcheck", "compute-sanitizer", tmp_path, 30000, 2, "language")
    assert "--kernel-name-exclude" not in initcheck


def test_a_rank_becomes_the_command_with_its_own_log_and_ports() -> None:
    done = python(
        str(sanitize.HERE / "sanitize.py"),
        "--become",
        "30000",
        "echo",
        "{rank}.log",
        "{port}",
        RANK="3",
    )
    assert done.stdout.split() == ["3.log", "30030"]


@pytest.mark.slow
def test_whole_on_the_simulator(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert sanitize.main(["--tools", "memcheck", "--deadline", "280"]) == 0, capsys.readouterr().out
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(" ")[0] for line in sorted(lines)] == sorted(
        [*sanitize.CHECKS, "control:", "memcheck:"]
    )
    assert any(
        line.startswith("memcheck: nothing of tdcoll's; nothing of others, in 2 processes")
        for line in lines
    )


START_OF_NVSHMEM = """\
========= COMPUTE-SANITIZER
tdcoll: mode: gpu
========= Program hit CUDA_ERROR_INVALID_VALUE (error 1) due to "invalid argument" on CUDA API call to cuPointerGetAttribute.
=========     Saved host backtrace up to driver entry point at error
=========         Host Frame: [0x4a1b2c]
=========                in /usr/lib/x86_64-linux-gnu/libcuda.so.1
=========         Host Frame: nvshmemi_setup_symmetric_heap() [0x8f3a1]
=========                in /venv/lib/python3.12/site-packages/nvidia/nvshmem/lib/libnvshmem_host.so.3
=========         Host Frame: _PyEval_EvalFrameDefault [0x1d2f0]
=========                in /usr/bin/python3.12
=========
========= ERROR SUMMARY: 1 error
"""

OF_NCCL = """\
========= Program hit cudaErrorPeerAccessAlreadyEnabled (error 704) due to "peer access is already enabled" on CUDA API call to cudaDeviceEnablePeerAccess.
=========     Saved host backtrace up to driver entry point at error
=========     Host Frame: [0x4a1b2c] in libcuda.so.1
=========     Host Frame:ncclTransportP2pSetup [0x6d1e4] in /venv/lib/libnccl.so.2
=========
"""

OUT_OF_BOUNDS = """\
========= Invalid __global__ write of size 16 bytes
=========     at exchange_direct+0x9d0 in /src/tdcoll/primitives/stores.py:42
=========     by thread (31,0,0) in block (3,0,0)
=========     Address 0x7f21c2000010 is out of bounds
=========     and is 1 bytes after the nearest allocation at 0x7f21c0000000 of size 33,554,448 bytes
=========     Saved host backtrace up to driver entry point at kernel launch time
=========         Host Frame: cuLaunchKernelEx [0x2f5a10]
=========                in /usr/lib/x86_64-linux-gnu/libcuda.so.1
=========         Host Frame: ffi_call [0x7b19]
=========                in /usr/lib/x86_64-linux-gnu/libffi.so.8
=========         Host Frame: nvshmem_of_somebody [0x1]
=========                in /venv/lib/libnvshmem_host.so.3
=========
"""

RACE = """\
========= Error: Race reported between Write access at reduce+0x70 in /src/tdcoll/collectives/kernels_reduce.py:90
=========     and Read access at reduce+0x120 in /src/tdcoll/collectives/kernels_reduce.py:99 [252 hazards]
=========     Saved host backtrace up to driver entry point at kernel launch time
=========         Host Frame: launch [0x19a0]
=========                in /home/user/.triton/cache/ABC/__triton_launcher.so
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""

BARRIER = """\
========= Barrier error detected. Divergent thread(s) in block.
=========     at 0x1f0 in merge
=========     by thread (5,0,0) in block (0,0,0)
========= Uninitialized __global__ memory read of size 4 bytes
=========     at nvshmemi_init_array_kernel+0x50
=========     by thread (0,0,0) in block (0,0,0)
=========     Saved host backtrace up to driver entry point at kernel launch time
=========         Host Frame: [0x1] in /usr/lib/libcuda.so.1
=========         Host Frame: nvshmemi_init [0x2] in /venv/lib/libnvshmem_host.so.3
========= ERROR SUMMARY: 2 errors
"""


COPY = """\
========= Host API memory access error at host access to 0x9027c81ec0 of size 1,056 bytes
=========     Uninitialized access to 0x9027c81ee0 on access by cudaMemcpy source
=========     Saved host backtrace up to driver entry point at error
=========         Host Frame: cudaMemcpyAsync [0x70eec] in libcudart.so.13
=========         Host Frame: at::native::copy_device_to_device(at::TensorIterator&, bool, bool) [0x17ab117] in libtorch_cuda.so
========= ERROR SUMMARY: 1 error
"""


@pytest.mark.parametrize(
    ("text", "found", "watched"),
    [
        (START_OF_NVSHMEM, [("NVSHMEM", "", "Program hit CUDA_ERROR_INVALID_VALUE")], True),
        (OF_NCCL, [("NCCL", "", "Program hit cudaErrorPeerAccessAlreadyEnabled")], False),
        (
            OUT_OF_BOUNDS,
            [("tdcoll", "exchange_direct", "Invalid __global__ write of size 16 bytes")],
            False,
        ),
        (RACE, [("tdcoll", "reduce", "Error: Race reported between Write access at reduce")], True),
        (
            BARRIER,
            [
                ("tdcoll", "merge", "Barrier error detected. Divergent thread(s) in block."),
                ("NVSHMEM", "nvshmemi_init_array_kernel", "Uninitialized __global__ memory read"),
            ],
            True,
        ),
        ("========= COMPUTE-SANITIZER\nhello\n========= ERROR SUMMARY: 0 errors\n", [], True),
        ("========= Target application terminated before first instrumented API call\n", [], False),
        (
            "========= Something that no version has said so far\n",
            [("tdcoll", "", "Something that no version")],
            False,
        ),
    ],
    ids=[
        "nvshmem",
        "nccl",
        "write",
        "race",
        "barrier and initcheck",
        "nothing",
        "not watched",
        "unknown",
    ],
)
def test_whose_a_report_is(text: str, found: list[tuple[str, str, str]], watched: bool) -> None:
    run = sanitize.parse(text)
    assert run.watched == watched
    assert [(report.owner, report.kernel) for report in run.reports] == [
        (owner, kernel) for owner, kernel, _ in found
    ]
    for report, (_, _, what) in zip(run.reports, found, strict=True):
        assert report.text.startswith(what)


@pytest.mark.parametrize(
    ("text", "heap", "ok", "summary"),
    [
        (COPY, None, False, "initcheck: 1 of tdcoll's"),
        (COPY, 0x9027000000, True, "initcheck: nothing of tdcoll's; 1 of the symmetric heap's"),
        (COPY, 0x9028000000, False, "initcheck: 1 of tdcoll's"),
        (COPY.replace("Uninitialized", "Invalid"), 0x9027000000, False, "initcheck: 1 of tdcoll's"),
    ],
    ids=["a heap that is not known", "in the heap", "elsewhere", "another error"],
)
def test_copies_from_the_symmetric_heap_are_no_finding(
    tmp_path: Path, text: str, heap: int | None, ok: bool, summary: str
) -> None:
    (tmp_path / "0.log").write_text(text)
    if heap is not None:
        (tmp_path / "0.heap").write_text(f"{heap} {16 << 20}")
    verdict = sanitize.judge("initcheck", tmp_path, ranks=1, status=0)
    assert verdict.ok == ok
    assert verdict.line.startswith(summary)


@pytest.mark.parametrize(
    ("logs", "status", "ok", "summary"),
    [
        (
            [START_OF_NVSHMEM] * 2,
            0,
            True,
            "memcheck: nothing of tdcoll's; 2 of NVSHMEM's, in 2 processes",
        ),
        (
            [START_OF_NVSHMEM, RACE],
            0,
            False,
            "memcheck: 1 of tdcoll's, 1 of NVSHMEM's, in 2 processes",
        ),
        ([START_OF_NVSHMEM], 0, False, "memcheck: watched 1 process, not 2"),
        ([START_OF_NVSHMEM] * 2, 1, False, "memcheck: the job ended with 1"),
    ],
    ids=["clean", "one of tdcoll's", "a rank that was not watched", "a job that failed"],
)
def test_the_verdict(tmp_path: Path, logs: list[str], status: int, ok: bool, summary: str) -> None:
    for number, text in enumerate(logs):
        (tmp_path / f"{number}.log").write_text(text)
    verdict = sanitize.judge("memcheck", tmp_path, ranks=2, status=status)
    assert verdict.ok == ok
    assert verdict.line.startswith(summary)


def test_the_control_must_be_reported(tmp_path: Path) -> None:
    (tmp_path / "1.log").write_text(START_OF_NVSHMEM)
    assert not sanitize.judge_control(tmp_path).ok
    (tmp_path / "2.log").write_text(OUT_OF_BOUNDS.replace("exchange_direct", "store_out_of_bounds"))
    assert sanitize.judge_control(tmp_path).ok
