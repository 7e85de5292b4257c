# SPDX-License-Identifier: Apache-2.0
"""Jobs on GPUs, started by launch.sh as a user starts them.

Where there are fewer GPUs than ranks, the ranks share them: ``-k shared`` chooses these tests, which take minutes each,
and ``-k "not shared"`` leaves them out. Jobs may run beside each other on the same GPUs (``-n 6``): each spends most of
its time on compiling and starting.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).resolve().parent
WORKERS = HERE.parent / "workers"
GPUS = torch.cuda.device_count()
TIMEOUT_S = 280.0
SHARED_TIMEOUT_S = 580.0
SPARSE = "sparse", "sparse_contexts"
DISTRIBUTED = [f"distributed_{part}checks.py" for part in ("order_", "", "tensors_", "groups_", "training_")]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS == 0, reason="needs a GPU"),
    pytest.mark.timeout(SHARED_TIMEOUT_S + 20),  # each job ends before that, and is reported
]

Launch = Callable[..., "subprocess.CompletedProcess[str]"]


def checks_of(*scripts: str) -> set[str]:
    """Names of the checks in some worker scripts."""
    text = "\n".join((WORKERS / script).read_text(encoding="utf-8") for script in scripts)
    return set(re.findall(r"^@check(?:\(.*\))?\ndef (\w+)", text, re.MULTILINE))


def verdicts(done: subprocess.CompletedProcess[str]) -> dict[str, dict[str, object]]:
    """The JSON line of each check; all must be ok, and none skipped."""
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"check"')]
    assert all(line.get("ok") is True for line in lines), lines
    return {line["check"]: line for line in lines}


def needs(gpus: int) -> pytest.MarkDecorator:
    return pytest.mark.skipif(gpus > GPUS, reason=f"needs {gpus} GPUs, found {GPUS}")


def ranks_of(*numbers: int, nodes: int = 1) -> pytest.MarkDecorator:
    """Parametrizes ``ranks``; the ids say which ranks share GPUs and which nodes are uneven."""

    def name(ranks: int) -> str:
        uneven = ["uneven"] if ranks % nodes else []
        return " ".join([str(ranks), *uneven, *(["shared"] if ranks > GPUS else [])])

    return pytest.mark.parametrize("ranks", [pytest.param(n, id=name(n)) for n in numbers])


def run_checks(launch: Launch, ranks: int, script: Path, *options: str) -> subprocess.CompletedProcess[str]:
    if ranks > GPUS:
        # A rank that waits its turn at the GPU, and compiles beside all the others, is no rank that is gone.
        return launch(
            "--share-gpus", "--timeout", "120", "--nproc", str(ranks), *options, str(script), timeout=SHARED_TIMEOUT_S
        )
    return launch("--nproc", str(ranks), *options, str(script), timeout=TIMEOUT_S)


@ranks_of(1, 2, 3, 4, 6, 8)
def test_all_checks(launch: Launch, ranks: int) -> None:
    done = run_checks(launch, ranks, HERE / "all_checks.py")
    names = "language", "stores_and_waits", "words", "drop_ins"
    assert set(verdicts(done)) == checks_of(*(f"{name}_checks.py" for name in names))


@ranks_of(1, 2, 3, 4, 8)
def test_dense_checks(launch: Launch, ranks: int) -> None:
    done = run_checks(launch, ranks, WORKERS / "dense_checks.py")
    assert set(verdicts(done)) == checks_of("dense_checks.py")


@ranks_of(2, 3, 4, 5, 8, nodes=2)
def test_dense_checks_on_emulated_nodes(launch: Launch, ranks: int) -> None:
    done = run_checks(launch, ranks, WORKERS / "dense_checks.py", "--emulate-nodes", "2")
    assert set(verdicts(done)) == checks_of("dense_checks.py")


@ranks_of(4, nodes=2)
def test_drop_ins_checks_on_emulated_nodes(launch: Launch, ranks: int) -> None:
    done = run_checks(launch, ranks, WORKERS / "drop_ins_checks.py", "--emulate-nodes", "2")
    assert set(verdicts(done)) == checks_of("drop_ins_checks.py")


@pytest.mark.parametrize("name", SPARSE)
@ranks_of(1, 2, 3, 4, 6, 8)
def test_sparse_checks(launch: Launch, ranks: int, name: str) -> None:
    script = WORKERS / f"{name}_checks.py"
    assert set(verdicts(run_checks(launch, ranks, script))) == checks_of(script.name)


@pytest.mark.parametrize("name", SPARSE)
@ranks_of(2, 3, 4, 5, 8, nodes=2)
def test_sparse_checks_on_emulated_nodes(launch: Launch, ranks: int, name: str) -> None:
    script = WORKERS / f"{name}_checks.py"
    assert set(verdicts(run_checks(launch, ranks, script, "--emulate-nodes", "2"))) == checks_of(script.name)


@needs(2)
@pytest.mark.parametrize("name", ["dense", "drop_ins", *SPARSE, "fused", "early"])
def test_checks_on_pytorchs_heap(launch: Launch, name: str) -> None:
    """No NVSHMEM: neither started nor linked."""
    script = WORKERS / f"{name}_checks.py"
    done = launch("--nproc", str(min(GPUS, 4)), str(script), timeout=TIMEOUT_S, env={"TDCOLL_HEAP": "torch"})
    assert set(verdicts(done)) == checks_of(script.name)


@needs(2)
@pytest.mark.parametrize("heap", ["nvshmem", "torch"])
@pytest.mark.parametrize("connections", ["8", "1"])
def test_calls_by_copy_engines(launch: Launch, heap: str, connections: str) -> None:
    """Also where all streams share one queue to the GPU, as with Megatron."""
    script, environment = (
        WORKERS / "copies_checks.py",
        {"TDCOLL_HEAP": heap, "CUDA_DEVICE_MAX_CONNECTIONS": connections},
    )
    done = launch("--nproc", str(min(GPUS, 4)), str(script), timeout=TIMEOUT_S, env=environment)
    assert set(verdicts(done)) == checks_of(script.name)


@needs(2)
@pytest.mark.parametrize("heap", ["nvshmem", "torch"])
def test_pytorchs_memory_as_callers_tensors(launch: Launch, heap: str) -> None:
    script = WORKERS / "torch_memory_checks.py"
    done = launch("--nproc", str(min(GPUS, 4)), str(script), timeout=TIMEOUT_S, env={"TDCOLL_HEAP": heap})
    assert set(verdicts(done)) == checks_of(script.name)


@needs(2)
def test_a_stall_is_borne_only_with_all_protections(launch: Launch) -> None:
    """The negative control of all the others: what they look for is there to be seen on these GPUs."""
    done = run_checks(launch, min(GPUS, 4), WORKERS / "stall_checks.py")
    found = verdicts(done)
    assert set(found) == checks_of("stall_checks.py")
    assert all("wrong numbers without the protection" in str(verdict["note"]) for verdict in found.values())


@needs(2)
@pytest.mark.parametrize("checked", [True, False])
def test_a_rank_that_reads_too_late_says_so_only_if_it_looks(launch: Launch, checked: bool) -> None:
    last, options = min(GPUS, 4) - 1, [] if checked else ["unchecked"]
    done = launch("--nproc", str(last + 1), str(WORKERS / "late_reader.py"), *options, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {verdict["rank"]: verdict for verdict in map(json.loads, done.stdout.splitlines())}
    assert found[0]["timeout names"] == last
    assert found[last]["timeout names"] == (0 if checked else None)
    assert found[last]["wrong"] > 0


@ranks_of(1, 2, 4, 8)
def test_early_checks(launch: Launch, ranks: int) -> None:
    done = run_checks(launch, ranks, WORKERS / "early_checks.py")
    assert set(verdicts(done)) == checks_of("early_checks.py")


@ranks_of(1, 2, 4, 8)
def test_fused_checks(launch: Launch, ranks: int) -> None:
    done = run_checks(launch, ranks, WORKERS / "fused_checks.py")
    assert set(verdicts(done)) == checks_of("fused_checks.py")


@ranks_of(4, nodes=2)
def test_fused_checks_on_emulated_nodes(launch: Launch, ranks: int) -> None:
    done = run_checks(launch, ranks, WORKERS / "fused_checks.py", "--emulate-nodes", "2")
    assert set(verdicts(done)) == checks_of("fused_checks.py")


@ranks_of(1, 2, 4, 8)
def test_operators_checks(launch: Launch, ranks: int) -> None:
    done = run_checks(launch, ranks, WORKERS / "operators_checks.py")
    assert set(verdicts(done)) == checks_of("operators_checks.py")


@ranks_of(4, nodes=2)
def test_operators_checks_on_emulated_nodes(launch: Launch, ranks: int) -> None:
    done = run_checks(launch, ranks, WORKERS / "operators_checks.py", "--emulate-nodes", "2")
    assert set(verdicts(done)) == checks_of("operators_checks.py")


@ranks_of(2, 4, 8)
def test_distributed_checks(launch: Launch, ranks: int) -> None:
    done = run_checks(launch, ranks, WORKERS / "distributed_job.py")
    assert set(verdicts(done)) == checks_of(*DISTRIBUTED)


def test_beside_another_backend(launch: Launch) -> None:
    done = launch("--nproc", str(min(GPUS, 4)), str(WORKERS / "backend_beside.py"), timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("done") == min(GPUS, 4)


@needs(2)
def test_distributed_checks_on_pytorchs_heap(launch: Launch) -> None:
    ranks, script = str(min(GPUS, 4)), str(WORKERS / "distributed_job.py")
    done = launch("--nproc", ranks, script, timeout=TIMEOUT_S, env={"TDCOLL_HEAP": "torch"})
    assert set(verdicts(done)) == checks_of(*DISTRIBUTED)


def devices() -> list[str]:
    """What CUDA_VISIBLE_DEVICES calls the GPUs that this process sees."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [str(i) for i in range(GPUS)] if listed is None else listed.replace(" ", "").split(",")[:GPUS]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@needs(2)
@pytest.mark.parametrize(
    "sees", ["only its own devices", "its own devices first"], ids=lambda sees: sees + (" shared" if GPUS < 4 else "")
)
def test_two_agents_on_one_host_are_two_nodes(launch: Launch, sees: str) -> None:
    per_node = GPUS // 2
    half = max(2, per_node)  # ranks: with one each there is nothing that 2D could pass on
    sharing = ("--share-gpus",) if half > per_node else ()
    all_devices = devices()[: 2 * per_node]
    rendezvous = f"127.0.0.1:{free_port()}"

    def agent(node_rank: int) -> subprocess.CompletedProcess[str]:
        mine = all_devices[node_rank * per_node : (node_rank + 1) * per_node]
        others = [] if sees == "only its own devices" else [d for d in all_devices if d not in mine]
        options = ("--nproc", str(half), "--nnodes", "2", "--node-rank", str(node_rank), "--rdzv", rendezvous)
        visible = {"CUDA_VISIBLE_DEVICES": ",".join(mine + others)}
        return launch(*sharing, *options, str(HERE / "two_nodes.py"), timeout=TIMEOUT_S, env=visible)

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(agent, (0, 1))
    assert second.returncode == 0, second.stdout + second.stderr
    found = verdicts(first)
    assert found["takes_the_paths_between_nodes"]["note"] == f"{2 * half} rank(s) on 2 node(s) ({half} + {half})"
    assert {"dense_checks.sizes", "dense_checks.graphs", "drop_ins_checks.the_pool_and_the_drop_ins"} <= set(found)


@needs(2)
def test_killed_rank_is_named_and_the_job_ends(launch: Launch) -> None:
    ranks, victim = min(GPUS, 4), 1
    # The agent looks at its workers so seldom that the others have given up by themselves before it ends them.
    options = ("--nproc", str(ranks), "--timeout", "5", "--monitor-interval", "60")
    done = launch(*options, str(WORKERS / "killed_rank.py"), str(victim), timeout=TIMEOUT_S)
    assert done.returncode != 0
    for survivor in set(range(ranks)) - {victim}:
        assert f"CollectiveTimeout: rank {survivor} waited 5 s for peer {victim}:" in done.stderr
    died, noticed = done.stderr.splitlines()[-2:]
    survivors = ", ".join(str(rank) for rank in range(ranks) if rank != victim)
    assert died == f"tdcoll: died: rank {victim} (SIGKILL)"
    assert noticed.startswith(f"tdcoll: only noticed: rank{'s' if ranks > 2 else ''} {survivors} (CollectiveTimeout: ")


@needs(2)
def test_killed_rank_is_named_when_torchrun_is_first(launch: Launch) -> None:
    ranks, victim = min(GPUS, 4), 1
    done = launch("--nproc", str(ranks), str(WORKERS / "killed_rank.py"), str(victim), timeout=TIMEOUT_S)
    assert done.returncode != 0
    lines = [line for line in done.stderr.splitlines() if line.startswith("tdcoll: ")]
    assert f"tdcoll: died: rank {victim} (SIGKILL)" in lines
    assert not [line for line in lines if line.startswith("tdcoll: failed")]


def test_where_the_time_of_a_start_goes(launch: Launch, tmp_path: Path) -> None:
    """What Triton does once per process is not left to the first call, and NVSHMEM makes no communicator of NCCL's."""
    ranks, file = min(GPUS, 2), tmp_path / "start.json"
    for _ in range(2):  # the first run fills Triton's cache
        done = launch(
            "--nproc",
            str(ranks),
            str(HERE.parents[1] / "benchmarks" / "start_up.py"),
            "--json",
            str(file),
            timeout=TIMEOUT_S,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(file.read_text())
    assert report["NVSHMEM_DISABLE_NCCL"] == "1"
    for rows in report["ranks"]:
        (first,) = [row for row in rows if row["name"] == "first all_gather"]
        programs = [row for row in rows if row["name"].startswith("$ ")]
        assert [row for row in programs if "ptxas" in row["name"]], "the warm-up asks for its version"
        late = [row for row in programs if first["at_s"] <= row["at_s"] <= first["at_s"] + first["took_s"]]
        assert late == [], done.stdout
