# SPDX-License-Identifier: Apache-2.0
"""Run the tests on GPUs, and most of what docs/performance.md shows, on one host, stage by stage.

\b
    python benchmarks/measure.py [--nproc N] [--limit SECONDS] [--dry-run] FOLDER STAGE...

Stages, of which each is a job or a few:

\b
    tests           the GPU tests that do not share GPUs, on all GPUs, many at a time;
                    needs pytest-xdist
    sanitizer       compute-sanitizer over a mixed run
    litmus          litmus tests of the orders of memory
    soak            random sequences of calls, of five seeds for a minute each
    all-reduce, reduce-scatter, all-gather, sparse, rms-norm
                    latency by size, with all peers
    heaps           the dense collectives on NVSHMEM's heap and on PyTorch's, in turns
    blocks          the dense collectives by copy engines, and by the number of thread blocks
    beside          all-gathers beside matmuls
    tune            a tuning table
    calls           host times of the backend, and device times by the number of thread blocks
    training        training steps over the backend and over NCCL
    tutorial        tutorial 05

A job leaves FOLDER/NAME.log, and FOLDER/NAME.json unless it is of tests, sanitizer or tutorial. A
job that takes longer than the limit is ended. A benchmark then leaves the rows that it has, a tune
the table of these sizes, and calls and training nothing. The exit status is 1 if a job has failed.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parents[1]

_REDUCE = "nccl,nccl-symmetric,torch-one-shot,torch-two-shot"
_SCATTER = "nccl,nccl-symmetric,torch-reduce-scatter"
_GATHER = "nccl,nccl-symmetric,torch-symm-cat,fcollect"
_NORM = "nccl,nccl-compiled,tdcoll-torch,tdcoll-compiled"


@dataclass(frozen=True)
class Job:
    """A command.

    Attributes:
        words: the command's words; ``FILE`` stands for the path of its JSON.
        environment: variables besides those of this process.
    """

    name: str
    words: Sequence[str]
    environment: dict[str, str] = field(default_factory=dict)

    def command(self, file: Path) -> list[str]:
        """Return the command that leaves its JSON in a file."""
        return [word.replace("FILE", str(file)) for word in self.words]


def stages(nproc: int) -> dict[str, list[Job]]:
    """Return the jobs of every stage on ``nproc`` GPUs."""
    python = shlex.quote(sys.executable)
    launch = f"bash launch.sh --nproc {nproc}"
    # Bytes of a rank's part, in ten steps from an input of about 1 KB to one of about 256 MB.
    part = max(16, 1024 // nproc // 16 * 16)
    large = (1 << 20) // nproc // 16 * 16
    reduce = "all_reduce -b 1K -e 256M -f 4"
    scatter = f"reduce_scatter -b {part} -e {part << 18} -f 4"
    gather = "all_gather -b 1K -e 64M -f 4"
    dense = "--both --iterations 40 --algorithms"

    def job(name: str, command: str, **environment: str) -> Job:
        return Job(name, shlex.split(command), environment)

    def bench(name: str, options: str, **environment: str) -> Job:
        return job(name, f"{launch} -m tdcoll bench {options} --json FILE", **environment)

    def heap_jobs() -> list[Job]:
        jobs = []
        for turn in (1, 2):
            for sizes in (reduce, scatter, gather):
                for heap in ("nvshmem", "torch"):
                    name = f"{heap}-{_file_name(sizes)}.{turn}"
                    options = f"{sizes} --graph --iterations 30 --algorithms auto --peers="
                    jobs.append(bench(name, options, TDCOLL_HEAP=heap))
        return jobs

    def blocks_jobs() -> list[Job]:
        more = "--blocks 8,16,32,64 --iterations 40 --graph --peers nccl,nccl-zero-cta"
        algorithms = "--algorithms auto,direct,loop,ce"
        calls = [
            f"all_gather -b 1M -e 64M -f 4 {algorithms},in-place,in-place-ce,in-place-loop",
            f"all_reduce -b 1M -e 64M -f 4 --dtype bfloat16 {algorithms}",
            f"reduce_scatter -b {large} -e {large << 6} -f 4 --dtype bfloat16 {algorithms}",
            f"all_to_all -b 1M -e 16M -f 4 {algorithms}",
        ]
        return [bench(f"blocks-{_file_name(call)}", f"{call} {more}") for call in calls]

    def script(name: str, command: str) -> list[Job]:
        return [job(name, f"{launch} {command}")]

    tests = "bash launch.sh tests tests/gpu -k 'not shared' -n 8 --tb=short"
    sanitizer = f"{python} tests/sanitizer/sanitize.py --nproc {nproc} --deadline 150"
    sparse = "sparse_all_reduce --rows 50000 --dims 2048 --distributions uniform,zipf1.05,zipf1.2"
    norm = "all_reduce_rms_norm --rows 1,8,64,512 --hidden 8192 --both --iterations 60"
    tune = "-b 1K -e 64M -f 4 --in-place --chunks 16,64 --warps 8,16 --iterations 20 --warmup 2"
    return {
        "tests": [job("tests", tests)],
        "sanitizer": [job("sanitizer", sanitizer)],
        "litmus": [bench("litmus", "litmus --seconds 5")],
        "soak": [bench(f"soak-{seed}", f"soak --seconds 60 --seed {seed}") for seed in range(5)],
        "all-reduce": [
            bench(
                "all-reduce", f"{reduce} --dtype bfloat16 {dense} auto,in-place --peers {_REDUCE}"
            )
        ],
        "reduce-scatter": [
            bench("reduce-scatter", f"{scatter} --dtype bfloat16 {dense} auto --peers {_SCATTER}")
        ],
        "all-gather": [
            bench(
                "all-gather",
                f"{gather} {dense} auto,in-place --peers {_GATHER}",
                NVSHMEM_DISABLE_NCCL="0",  # fcollect may use NCCL
            )
        ],
        "sparse": [
            bench(
                "sparse",
                f"{sparse} --iterations 8 --algorithms owner,auto --peers published,allgather",
            )
        ],
        "rms-norm": [
            bench(
                "rms-norm",
                f"{norm} --algorithms auto,one_shot,two_shot,composed --peers {_NORM}",
            )
        ],
        "heaps": heap_jobs(),
        "blocks": blocks_jobs(),
        "beside": script("beside", "benchmarks/backend_calls.py --beside --json FILE"),
        "tune": script(
            "tune",
            f"-m tdcoll tune --operation all_reduce,reduce_scatter,all_gather {tune} -o FILE",
        ),
        "calls": script("calls", "benchmarks/backend_calls.py --blocks 32,64,128 --json FILE"),
        "training": script("training", "benchmarks/training.py --json FILE"),
        "tutorial": script("tutorial", "tutorials/05-all-reduce.py"),
    }


def _file_name(options: str) -> str:
    """Return the collective of a benchmark's options, as files name it."""
    return options.split()[0].replace("_", "-")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a job and all that it has started.

    First by an interrupt, so that it may write what it has, then for good.
    """
    for number, seconds in ((signal.SIGINT, 20), (signal.SIGKILL, 20)):
        try:
            os.killpg(process.pid, number)
            process.wait(seconds)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


def run(job: Job, folder: Path, where: str, limit: float) -> int:
    """Run a job, and print how it ended.

    Return its exit status, or 124 if it took longer than ``limit`` seconds.
    """
    name = f"{job.name}-{where}"
    log = folder / f"{name}.log"
    began = time.monotonic()
    with log.open("wb") as out:
        process = subprocess.Popen(
            job.command(folder / f"{name}.json"),
            stdout=out,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env={**os.environ, **job.environment},
            start_new_session=True,
        )
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            status = 124
        finally:
            _end(process)
    print(f"{name}: status {status}, {time.monotonic() - began:.0f} s", flush=True)
    if status:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        print("\n".join(lines[-15:]), flush=True)
    return status


def _gpus() -> Iterator[str]:
    """Yield the names of the GPUs that this process may use."""
    import torch

    for index in range(torch.cuda.device_count()):
        yield torch.cuda.get_device_name(index)


def _print_command(job: Job, file: Path) -> None:
    environment = [f"{name}={value}" for name, value in job.environment.items()]
    print(" ".join([*environment, shlex.join(job.command(file))]))


@click.command(help=__doc__, context_settings={"max_content_width": 100})
@click.option("--nproc", type=int, metavar="N", help="GPUs; default: all")
@click.option(
    "--limit",
    type=float,
    default=540,
    metavar="SECONDS",
    show_default=True,
    help="the most seconds of a job",
)
@click.option("--dry-run", is_flag=True, help="print the commands and run none")
@click.argument("folder", type=click.Path(path_type=Path))
@click.argument(
    "chosen", metavar="STAGE...", nargs=-1, required=True, type=click.Choice(list(stages(1)))
)
def main(
    nproc: int | None,
    limit: float,
    dry_run: bool,
    folder: Path,
    chosen: Sequence[str],
) -> None:
    gpus = list(_gpus())
    if nproc is None:
        nproc = len(gpus)
    if nproc < 1 or (nproc > len(gpus) and not dry_run):
        expected = f"at least 1 and at most the {len(gpus)} GPUs of this host"
        raise click.UsageError(f"--nproc: expected {expected}; got {nproc}")
    # So that the job is ended, too. A shell's background jobs ignore SIGINT, and so would ours.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    gpu = gpus[0].removeprefix("NVIDIA ").split()[0] if gpus else "GPU"
    where = f"{nproc}x{gpu}"
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    failed = False
    of_stages = stages(nproc)
    for stage in chosen:
        for job in of_stages[stage]:
            if dry_run:
                _print_command(job, folder / f"{job.name}-{where}.json")
            elif run(job, folder, where, limit) != 0:
                failed = True
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
