# SPDX-License-Identifier: Apache-2.0
"""Jobs on GPUs, started by launch.sh as a user starts them.

Where there are fewer GPUs than ranks, the ranks share them: ``-k shared`` chooses these tests,
which take minutes each, and ``-k "not shared"`` leaves them out. Jobs may run beside each other on
the same GPUs (``-n 6``): each spends most of its time on compiling and starting.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from checks import DISTRIBUTED, WORKERS, checks_of, program_of, verdicts

from benchmarks.dense_baselines import BASELINES
from tdcoll.tools.measure.results import load

HERE = Path(__file__).resolve().parent
GPUS = torch.cuda.device_count()
TIMEOUT_S = 480.0
SHARED_TIMEOUT_S = 580.0
SPARSE = "sparse", "sparse_contexts"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS == 0, reason="needs a GPU"),
    pytest.mark.timeout(SHARED_TIMEOUT_S + 20),  # each job ends before that, and is reported
]

Launch = Callable[..., "subprocess.CompletedProcess[str]"]


ALL = "language stores_and_waits words drop_ins"


def assert_well(done: subprocess.CompletedProcess[str], names: str) -> dict[str, dict[str, Any]]:
    """All checks are ok, and none was left out or skipped; return what they said."""
    found = verdicts(done)
    assert all(verdict.get("ok") is True for verdict in found.values()), found
    assert set(found) == set(checks_of(names))
    return found


def needs(gpus: int) -> pytest.MarkDecorator:
    return pytest.mark.skipif(gpus > GPUS, reason=f"needs {gpus} GPUs, found {GPUS}")


def run_checks(launch: Launch, ranks: int, names: str, *options: str) -> dict[str, dict[str, Any]]:
    """Run the checks of these scripts; return what they said."""
    job = "--nproc", str(ranks), *options, *program_of(names)
    if ranks > GPUS:
        # A rank that waits its turn at the GPU, and compiles beside all the others, is no rank that
        # is gone.
        return assert_well(
            launch("--share-gpus", "--timeout", "120", *job, timeout=SHARED_TIMEOUT_S), names
        )
    return assert_well(launch(*job, timeout=TIMEOUT_S), names)


JOBS = [  # scripts, nodes, ranks
    *(((ALL,), 1, (1, 2, 3, 4, 6, 8)), (("drop_ins",), 2, (4,))),
    *((("dense",), 1, (1, 2, 3, 4, 8)), (("dense",), 2, (2, 3, 4, 5, 8))),
    *((SPARSE, 1, (1, 2, 3, 4, 6, 8)), (SPARSE, 2, (2, 3, 4, 5, 8))),
    *((("early", "fused", "operators"), 1, (1, 2, 4, 8)), (("fused", "operators"), 2, (4,))),
    (("dtensor", "fsdp"), 1, (2, 4)),
    *(((DISTRIBUTED,), 1, (2, 4, 8)), (("hang",), 1, (2, 4))),
]


def jobs() -> list[Any]:
    """Return a parameter set for each job; the ids say which ranks share GPUs and which nodes are
    uneven."""
    found = []
    for names, nodes, numbers in JOBS:
        for name, ranks in itertools.product(names, numbers):
            more = (
                [f"{nodes} nodes"] * (nodes > 1)
                + ["uneven"] * (ranks % nodes > 0)
                + ["shared"] * (ranks > GPUS)
            )
            short = {ALL: "all", DISTRIBUTED: "distributed"}.get(name, name)
            found.append(pytest.param(name, ranks, nodes, id=" ".join([short, str(ranks), *more])))
    return found


@pytest.mark.parametrize(("name", "ranks", "nodes"), jobs())
def test_checks(launch: Launch, name: str, ranks: int, nodes: int) -> None:
    run_checks(launch, ranks, name, *(("--emulate-nodes", str(nodes)) if nodes > 1 else ()))


@needs(2)
@pytest.mark.parametrize("name", ["dense", "drop_ins", *SPARSE, "fused", "early", DISTRIBUTED])
def test_checks_on_pytorchs_heap(launch: Launch, name: str) -> None:
    """No NVSHMEM: neither started nor linked."""
    ranks, on_it = str(min(GPUS, 4)), {"TDCOLL_HEAP": "torch"}
    assert_well(launch("--nproc", ranks, *program_of(name), timeout=TIMEOUT_S, env=on_it), name)


@needs(2)
@pytest.mark.parametrize("heap", ["nvshmem", "torch"])
@pytest.mark.parametrize("connections", ["8", "1"])
def test_calls_by_copy_engines(launch: Launch, heap: str, connections: str) -> None:
    """Also where all streams share one queue to the GPU, as with Megatron."""
    ranks, environment = (
        str(min(GPUS, 4)),
        {"TDCOLL_HEAP": heap, "CUDA_DEVICE_MAX_CONNECTIONS": connections},
    )
    assert_well(
        launch("--nproc", ranks, *program_of("copies"), timeout=TIMEOUT_S, env=environment),
        "copies",
    )


@needs(2)
def test_a_stall_is_borne_only_with_all_protections(launch: Launch) -> None:
    """The negative control of all the others: what they look for is there to be seen on these
    GPUs."""
    found = run_checks(launch, min(GPUS, 4), "stall")
    assert all(
        "wrong numbers without the protection" in str(verdict["note"]) for verdict in found.values()
    )


@needs(2)
@pytest.mark.parametrize(
    ("operation", "options"),
    [
        # Sizes that are no multiples of 16 bytes, and such that are.
        *(
            (name, "-b 1032 -e 66048 -f 64 --both")
            for name in ("all_gather", "all_reduce", "reduce_scatter")
        ),
        ("all_reduce_rms_norm", "--rows 2"),
    ],
)
def test_baselines_of_benchmarks_are_right(
    launch: Launch, operation: str, options: str, tmp_path: Path
) -> None:
    """Eagerly and in graphs; or they say what they lack."""
    names = [name for name, one in BASELINES.items() if one.collective in (None, operation)]
    if operation == "all_reduce_rms_norm":
        names = ["nccl", "tdcoll-torch"]
    file, given = (
        tmp_path / "result.json",
        f"{options} --iterations 4 --warmup 1 --peers {','.join(names)}",
    )
    job = ("-m", "tdcoll", "bench", operation, *given.split(), "--json", str(file))
    done = launch("--nproc", "2", *job, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    found = [(row.algorithm, row.check, row.note) for row in load(file)[1] if row.peer]
    assert {name for name, *_ in found} == {*names}
    assert [one for one in found if one[1] == "WRONG" or (one[1] == "not run" and not one[2])] == []
    assert {check for name, check, _ in found if name == "nccl"} == {"ok"}


def test_beside_another_backend(launch: Launch) -> None:
    done = launch(
        "--nproc", str(min(GPUS, 4)), str(WORKERS / "backend_beside.py"), timeout=TIMEOUT_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("done") == min(GPUS, 4)


def devices() -> list[str]:
    """What CUDA_VISIBLE_DEVICES calls the GPUs that this process sees."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    return (
        [str(i) for i in range(GPUS)]
        if listed is None
        else listed.replace(" ", "").split(",")[:GPUS]
    )


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@needs(2)
@pytest.mark.parametrize(
    "sees",
    ["only its own devices", "its own devices first"],
    ids=lambda sees: sees + (" shared" if GPUS < 4 else ""),
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
        options = (
            "--nproc",
            str(half),
            "--nnodes",
            "2",
            "--node-rank",
            str(node_rank),
            "--rdzv",
            rendezvous,
        )
        visible = {"CUDA_VISIBLE_DEVICES": ",".join(mine + others)}
        return launch(
            *sharing, *options, str(HERE / "two_nodes.py"), timeout=TIMEOUT_S, env=visible
        )

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(agent, (0, 1))
    assert second.returncode == 0, second.stdout + second.stderr
    found = verdicts(first)
    assert (
        found["takes_the_paths_between_nodes"]["note"]
        == f"{2 * half} rank(s) on 2 node(s) ({half} + {half})"
    )
    assert {"sizes", "graphs", "the_pool_and_the_drop_ins"} <= set(found)


@needs(2)
def test_killed_rank_is_named_and_the_job_ends(launch: Launch) -> None:
    ranks, victim = min(GPUS, 4), 1
    # The agent looks at its workers so seldom that the others have given up by themselves before it
    # ends them.
    options = ("--nproc", str(ranks), "--timeout", "15", "--monitor-interval", "60")
    done = launch(
        *options, str(WORKERS / "killed_rank.py"), "calls", str(victim), timeout=TIMEOUT_S
    )
    assert done.returncode != 0
    for survivor in set(range(ranks)) - {victim}:
        assert f"CollectiveTimeout: rank {survivor} waited 15 s for peer {victim}:" in done.stderr
    died, noticed = done.stderr.splitlines()[-2:]
    survivors = ", ".join(str(rank) for rank in range(ranks) if rank != victim)
    assert died == f"tdcoll: died: rank {victim} (SIGKILL)"
    assert noticed.startswith(
        f"tdcoll: only noticed: rank{'s' if ranks > 2 else ''} {survivors} (CollectiveTimeout: "
    )


def test_where_the_time_of_a_start_goes(launch: Launch, tmp_path: Path) -> None:
    """What Triton does once per process is not left to the first call, and NVSHMEM makes no
    communicator of NCCL's."""
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
        assert [row for row in programs if "ptxas" in row["name"]], (
            "the warm-up asks for its version"
        )
        late = [
            row
            for row in programs
            if first["at_s"] <= row["at_s"] <= first["at_s"] + first["took_s"]
        ]
        assert late == [], done.stdout


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(("--nproc", "2"), marks=needs(2)),
        pytest.param(("--nproc", "1"), id="one GPU"),
    ],
)
def test_litmus_tests_show_no_weak_outcome_that_is_relied_on(
    launch: Launch, options: tuple[str, ...], tmp_path: Path
) -> None:
    file = tmp_path / "litmus.json"
    words = ["-m", "tdcoll", "bench", "litmus", "--rounds", "20000", "--json", str(file)]
    done = launch(*options, *words, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    _, rows = load(file)
    played = [row for row in rows if row.check == "ok"]
    assert len(played) >= 14
    assert all(row.facts["instances"] > 0 for row in played)


@needs(2)
@pytest.mark.parametrize("seed", [1, 2])
def test_soak(launch: Launch, seed: int, tmp_path: Path) -> None:
    file = tmp_path / "soak.json"
    words = ["-m", "tdcoll", "bench", "soak", "--seconds", "90", "--seed", str(seed)]
    done = launch("--nproc", str(min(GPUS, 4)), *words, "--json", str(file), timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    _, rows = load(file)
    assert rows[0].facts["eager"] > 0
    assert rows[0].facts["replayed"] > 0
