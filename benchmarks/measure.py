# SPDX-License-Identifier: Apache-2.0
"""Run the tests on GPUs, and most of what docs/performance.md shows, on one host, in stages that can be had one by one.

    python benchmarks/measure.py [--nproc N] [--limit SECONDS] [--dry-run] FOLDER STAGE...

Stages, of which each is a job or a few:

    tests           the GPU tests that do not share GPUs, on all GPUs, many at a time; needs pytest-xdist
    sanitizer       compute-sanitizer over a mixed run
    all-reduce, reduce-scatter, all-gather, sparse, rms-norm
                    latency by size, with all peers
    marks           one buffer replayed in CUDA graphs: for figures of others that were taken so
    heaps           the dense collectives on NVSHMEM's heap and on PyTorch's, in turns
    blocks          the dense collectives by copy engines, and by the number of thread blocks
    beside          all-gathers beside matmuls
    tune            a tuning table
    calls           host times of the backend, and device times by the number of thread blocks
    training        training steps over the backend and over NCCL
    tutorial        tutorial 05

A job leaves FOLDER/NAME.log, and FOLDER/NAME.json unless it is of tests, sanitizer or tutorial. A job that takes longer
than the limit is ended. A benchmark then leaves the rows that it has, and a tune goes on from them when it is started
again; calls and training leave nothing. The exit status is 1 if a job has failed.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

_REDUCE = "nccl,nccl-symmetric,torch-one-shot,torch-two-shot,trtllm-one-shot"
_SCATTER = "nccl,nccl-symmetric,torch-reduce-scatter"
_GATHER = "nccl,nccl-symmetric,torch-symm-cat,fcollect"
_NORM = "nccl,nccl-compiled,tdcoll-torch,tdcoll-compiled,trtllm-one-shot"


@dataclass(frozen=True)
class Job:
    """A command. ``FILE`` in it stands for where its JSON goes."""

    name: str
    words: Sequence[str]
    environment: dict[str, str] = field(default_factory=dict)

    def command(self, file: Path) -> list[str]:
        """Return the command that leaves its JSON in a file."""
        return [word.replace("FILE", str(file)) for word in self.words]


def stages(nproc: int) -> dict[str, list[Job]]:
    """Return the jobs of every stage on ``nproc`` GPUs."""
    python, launch = shlex.quote(sys.executable), f"bash launch.sh --nproc {nproc}"
    # Bytes of a rank's part, in ten steps from an input of about 1 KB to one of about 256 MB.
    part = max(16, 1024 // nproc // 16 * 16)
    large = (1 << 20) // nproc // 16 * 16
    reduce, gather = "all_reduce -b 1K -e 256M -f 4", "all_gather -b 1K -e 64M -f 4"
    scatter = f"reduce_scatter -b {part} -e {part << 18} -f 4"
    usual, marks = "--both --iterations 40", "--graph --buffers 1 --iterations 60"

    def job(name: str, command: str, **environment: str) -> Job:
        return Job(name, shlex.split(command), environment)

    def bench(name: str, options: str, **environment: str) -> Job:
        return job(name, f"{launch} -m tdcoll bench {options} --json FILE", **environment)

    def dense(name: str, how: str, gather_peers: str) -> list[Job]:
        return [
            bench(f"{name}all-reduce", f"{reduce} --dtype bfloat16 {how} --algorithms auto,in-place --peers {_REDUCE}"),
            bench(f"{name}reduce-scatter", f"{scatter} --dtype bfloat16 {how} --algorithms auto --peers {_SCATTER}"),
            bench(f"{name}all-gather", f"{gather} {how} --algorithms auto,in-place --peers {gather_peers}"),
        ]

    all_reduce, reduce_scatter, all_gather = dense("", usual, _GATHER)
    sparse = "sparse_all_reduce --rows 50000 --dims 2048 --distributions uniform,zipf1.05,zipf1.2 --iterations 8"
    norm = "all_reduce_rms_norm --rows 1,8,64,512 --hidden 8192 --both --iterations 60"
    loops = "--iterations 40 --algorithms auto,direct,loop,ce"
    tune = "-b 1K -e 64M -f 4 --in-place --chunks 16,64 --warps 8,16 --iterations 20 --warmup 2"
    return {
        "tests": [job("tests", "bash launch.sh tests tests/gpu -k 'not shared' -n 8 --tb=short")],
        "sanitizer": [job("sanitizer", f"{python} tests/sanitizer/sanitize.py --nproc {nproc} --deadline 150")],
        "all-reduce": [all_reduce],
        "reduce-scatter": [reduce_scatter],
        "all-gather": [all_gather],
        "sparse": [bench("sparse", f"{sparse} --algorithms owner,auto --peers published,allgather")],
        "rms-norm": [bench("rms-norm", f"{norm} --algorithms auto,one_shot,two_shot,composed --peers {_NORM}")],
        "marks": dense("marks-", marks, "nccl,nccl-symmetric"),
        "heaps": [
            bench(
                f"{heap}-{sizes.split()[0].replace('_', '-')}.{turn}",
                f"{sizes} --graph --iterations 30 --algorithms auto --peers=",
                TDCOLL_HEAP=heap,
            )
            for turn in (1, 2)
            for sizes in (reduce, scatter, gather)
            for heap in ("nvshmem", "torch")
        ],
        "blocks": [
            bench(
                f"blocks-{sizes.split()[0].replace('_', '-')}",
                f"{sizes} --blocks 8,16,32,64 {few} --graph --peers nccl,nccl-zero-cta",
            )
            for sizes, few in (
                ("all_gather -b 1M -e 64M -f 4", f"{loops},in-place,in-place-ce,in-place-loop"),
                ("all_reduce -b 1M -e 64M -f 4 --dtype bfloat16", loops),
                (f"reduce_scatter -b {large} -e {large << 6} -f 4 --dtype bfloat16", loops),
                ("all_to_all -b 1M -e 16M -f 4", loops),
            )
        ],
        "beside": [job("beside", f"{launch} benchmarks/backend_calls.py --beside --json FILE")],
        "tune": [
            job("tune", f"{launch} -m tdcoll tune --operation all_reduce,reduce_scatter,all_gather {tune} -o FILE")
        ],
        "calls": [job("calls", f"{launch} benchmarks/backend_calls.py --blocks 32,64,128 --json FILE")],
        "training": [job("training", f"{launch} benchmarks/training.py --json FILE")],
        "tutorial": [job("tutorial", f"{launch} tutorials/05-all-reduce.py")],
    }


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a job and all that it has started: by an interrupt, so that it may write what it has, then for good."""
    for number, seconds in ((signal.SIGINT, 20), (signal.SIGKILL, 20)):
        try:
            os.killpg(process.pid, number)
            process.wait(seconds)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


def run(job: Job, folder: Path, where: str, limit: float) -> int:
    """Run a job and say how it ended; return its exit status, 124 if it took longer than ``limit`` seconds."""
    name = f"{job.name}-{where}"
    log, began = folder / f"{name}.log", time.monotonic()
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
        print("\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:]), flush=True)
    return status


def _gpus() -> Iterator[str]:
    """Yield the names of the GPUs that this process may use."""
    import torch

    for index in range(torch.cuda.device_count()):
        yield torch.cuda.get_device_name(index)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nproc", type=int, help="GPUs; default: all")
    parser.add_argument("--limit", type=float, default=540, help="the most seconds of a job (default: 540)")
    parser.add_argument("--dry-run", action="store_true", help="print the commands and run none")
    parser.add_argument("folder", type=Path)
    parser.add_argument("stage", nargs="+", choices=list(stages(1)))
    given = parser.parse_args(arguments)
    gpus = list(_gpus())
    nproc = given.nproc if given.nproc is not None else len(gpus)
    if nproc < 1 or (nproc > len(gpus) and not given.dry_run):
        parser.error(f"--nproc: expected at least 1 and at most the {len(gpus)} GPUs of this host; got {nproc}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the job is ended, too
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it, and so would ours
    where = f"{nproc}x{gpus[0].removeprefix('NVIDIA ').split()[0] if gpus else 'GPU'}"
    folder, failed = given.folder.resolve(), False
    folder.mkdir(parents=True, exist_ok=True)
    for job in (job for stage in given.stage for job in stages(nproc)[stage]):
        if given.dry_run:
            environment = [f"{name}={value}" for name, value in job.environment.items()]
            print(" ".join([*environment, shlex.join(job.command(folder / f"{job.name}-{where}.json"))]))
        else:
            failed |= run(job, folder, where, given.limit) != 0
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
