# SPDX-License-Identifier: Apache-2.0
"""Time of a training step on backend "tdcoll" and on "nccl", in turns, and whether the losses are the same.

    python benchmarks/training.py --nproc 2 [--repeats 3] [--workloads fsdp-256,dlrm] [--json FILE] [-- options]

Options after -- are launch.sh's.

Each repeat is a job of its own per backend: nccl, tdcoll, nccl, tdcoll and so on, so that what changes on the machine
with time changes for both. A job runs every workload; its time is the median step. The table has the median of the
jobs and, in brackets, the fastest and the slowest: two backends whose brackets overlap are level. --workloads and
--repeats make it shorter; what torch.compile has compiled, later jobs find in its cache.

Losses of one backend have to be equal from job to job, to the bit; those of both, equal within the dtype's rounding,
and to the bit where tdcoll reduces nothing. Where there is no GPU, "gloo" is the baseline and tdcoll runs in the
simulator: this shows that the script works, and its times say nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

ROOT = Path(__file__).resolve().parents[1]
Step = Callable[[], torch.Tensor]


# ---------------------------------------------------------------------- workloads: a function that makes one step


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def blocks(width: int, number: int = 8) -> nn.Sequential:
    torch.manual_seed(1)
    layers = [
        nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        for _ in range(number)
    ]
    return nn.Sequential(*layers).to(device())


def sequences(width: int, small: bool) -> torch.Tensor:
    torch.manual_seed(2 + dist.get_rank())
    return torch.randn(2 if small else 8, 4 if small else 128, width, device=device())


def trained(model: nn.Module, call: Callable[..., torch.Tensor], batch: torch.Tensor) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = call(batch).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def faster(model: nn.Module, small: bool) -> Any:
    """Compile a model; a small one without Inductor, which needs a C++ compiler on a CPU."""
    return torch.compile(model, backend="aot_eager" if small else "inductor")


def fsdp(width: int, compiled: bool, small: bool) -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device().type, (dist.get_world_size(),))
    model = blocks(width, 2 if small else 8)
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return trained(model, faster(model, small) if compiled else model, sequences(width, small))


def ddp(width: int, compiled: bool, small: bool) -> Step:
    where = [device().index] if device().type == "cuda" else None
    model = nn.parallel.DistributedDataParallel(blocks(width, 2 if small else 8), device_ids=where)
    return trained(model, faster(model, small) if compiled else model, sequences(width, small))


class Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


def tensor_parallel(width: int, compiled: bool, small: bool) -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh(device().type, (dist.get_world_size(),))
    torch.manual_seed(1)
    model = nn.Sequential(*(Mlp(width) for _ in range(2 if small else 8))).to(device())
    for layer in model:
        parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    torch.manual_seed(2)  # all ranks have the same rows
    batch = torch.randn(4 if small else 64, width, device=device())
    return trained(model, faster(model, small) if compiled else model, batch)


class Dlrm(nn.Module):
    """Tables of rows, and a dense part."""

    def __init__(self, rows: int, width: int, tables: int, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum", sparse=sparse) for _ in range(tables))
        self.dense = nn.Sequential(nn.Linear(tables * width, 256), nn.ReLU(), nn.Linear(256, 1))
        for table in self.tables:
            nn.init.normal_(table.weight, std=0.01)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.dense(torch.cat([table(ids[i]) for i, table in enumerate(self.tables)], 1))


def dlrm(width: int, compiled: bool, small: bool) -> Step:
    """Make a step with sparse gradients on tdcoll, and dense ones elsewhere, since NCCL refuses sparse tensors."""
    rows, tables = (1000, 2) if small else (500_000, 4)
    made = Dlrm(rows, width, tables, sparse=dist.get_backend() == "tdcoll").to(device())
    where = [device().index] if device().type == "cuda" else None
    model = nn.parallel.DistributedDataParallel(made, device_ids=where)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(2 + dist.get_rank())
    ids = torch.randint(0, rows, (tables, 8 if small else 2048, 4), device=device())

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = (model(ids) - 1).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def pipeline(width: int, compiled: bool, small: bool) -> Step:
    """Make a step that passes activations on and gradients back: point-to-point calls, for which tdcoll falls back."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1 + rank)
    model = nn.Sequential(*(Mlp(width) for _ in range(2))).to(device())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    first = torch.randn(4 if small else 64, width, device=device())

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        entered = first.clone()
        if rank > 0:
            dist.recv(entered, rank - 1)
        entered.requires_grad_()
        left = model(entered)
        if rank < world - 1:
            dist.send(left.detach(), rank + 1)
            gradient = torch.empty_like(left)
            dist.recv(gradient, rank + 1)
            loss = left.detach().square().mean()
            left.backward(gradient)
        else:
            loss = left.square().mean()
            loss.backward()
        if rank > 0:
            dist.send(entered.grad, rank - 1)
        optimizer.step()
        return loss.detach()

    return step


WORKLOADS: dict[str, tuple[Callable[[int, bool, bool], Step], int, bool]] = {
    "fsdp-256": (fsdp, 256, False),
    "fsdp-1024": (fsdp, 1024, False),
    "fsdp-256-compiled": (fsdp, 256, True),
    "ddp-256": (ddp, 256, False),
    "ddp-256-compiled": (ddp, 256, True),
    "tensor-parallel-256": (tensor_parallel, 256, False),
    "tensor-parallel-256-compiled": (tensor_parallel, 256, True),
    "dlrm": (dlrm, 64, False),
    "pipeline-256": (pipeline, 256, False),
}


# ---------------------------------------------------------------------- one job


def measure(step: Step, warm_up: int, steps: int) -> dict[str, Any]:
    """Return the milliseconds of each step, on the slowest rank, and its loss on this one."""
    losses = [step() for _ in range(warm_up)]
    began, ended = [], []
    for _ in range(steps):
        dist.barrier()
        synchronize()
        began.append(time.perf_counter())
        losses.append(step())
        synchronize()
        ended.append(time.perf_counter())
    mine = torch.tensor([1e3 * (b - a) for a, b in zip(began, ended, strict=True)], device=device())
    all_ranks = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(all_ranks, mine)
    slowest = torch.stack(all_ranks).amax(0).tolist()
    return {"ms": slowest, "median_ms": statistics.median(slowest), "losses": [float(loss) for loss in losses]}


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def run_job(backend: str, names: list[str], warm_up: int, steps: int, small: bool, file: str) -> None:
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if backend == "tdcoll":
        import tdcoll.distributed
    torch.set_num_threads(1)
    dist.init_process_group(backend)
    found: dict[str, Any] = {}
    for name in names:
        make, width, compiled = WORKLOADS[name]
        began = time.perf_counter()
        found[name] = measure(make(16 if small else width, compiled, small), warm_up, steps)
        torch._dynamo.reset()
        if dist.get_rank() == 0:
            took = time.perf_counter() - began
            print(f"  {backend:6s} {name:30s} {found[name]['median_ms']:9.3f} ms ({took:.0f} s)", flush=True)
    if dist.get_rank() == 0:
        words = tdcoll.distributed.explain() if backend == "tdcoll" else ""
        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
        facts = {"torch": torch.__version__, "gpu": gpu, "ranks": dist.get_world_size(), "explain": words}
        Path(file).write_text(json.dumps({"backend": backend, "workloads": found, **facts}))
    dist.destroy_process_group()


# ---------------------------------------------------------------------- all of them


def jobs(arguments: argparse.Namespace, backends: list[str]) -> Iterator[dict[str, Any]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    with tempfile.TemporaryDirectory() as folder:
        for repeat in range(arguments.repeats):
            for backend in backends:
                file = Path(folder) / f"{backend}-{repeat}.json"
                command = [
                    "bash",
                    str(ROOT / "launch.sh"),
                    "--nproc",
                    str(arguments.nproc),
                    *arguments.launch,
                    __file__,
                ]
                command += ["--backend", backend, "--workloads", arguments.workloads, "--json", str(file)]
                command += ["--warm-up", str(arguments.warm_up), "--steps", str(arguments.steps)]
                print(f"repeat {repeat}, {backend}", flush=True)
                done = subprocess.run(
                    [*command, *(["--small"] if arguments.small else [])],
                    env=environment, timeout=arguments.timeout, capture_output=True, text=True, check=False,
                )  # fmt: skip
                print("".join(line + "\n" for line in done.stdout.splitlines() if line.startswith("  ")), end="")
                if done.returncode != 0:
                    sys.exit(f"the job on {backend} failed:\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}")
                yield json.loads(file.read_text())


def compare(name: str, baseline: list[dict[str, Any]], ours: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a row of the table."""
    row: dict[str, Any] = {"workload": name}
    for side, runs in (("baseline", baseline), ("tdcoll", ours)):
        medians = [run["workloads"][name]["median_ms"] for run in runs]
        row[side] = {"median_ms": statistics.median(medians), "least_ms": min(medians), "most_ms": max(medians)}
        losses = [run["workloads"][name]["losses"] for run in runs]
        row[side]["losses_repeat"] = all(one == losses[0] for one in losses)
    row["ratio"] = row["tdcoll"]["median_ms"] / row["baseline"]["median_ms"]
    pairs = zip(ours[0]["workloads"][name]["losses"], baseline[0]["workloads"][name]["losses"], strict=True)
    row["losses_differ_by"] = max(abs(a - b) / max(abs(b), 1e-30) for a, b in pairs)
    overlap = (
        row["tdcoll"]["least_ms"] <= row["baseline"]["most_ms"]
        and row["baseline"]["least_ms"] <= row["tdcoll"]["most_ms"]
    )
    row["verdict"] = "level" if overlap else "faster" if row["ratio"] < 1 else "slower"
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="names with commas between them")
    parser.add_argument("--warm-up", type=int, default=5, help="steps that are not timed")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--small", action="store_true", help="tiny models, as in the simulator")
    parser.add_argument("--timeout", type=float, default=300, help="seconds of one job")
    parser.add_argument("--json", help="write what was measured there")
    parser.add_argument("--backend", help="run one job: what this script starts")
    parser.add_argument("launch", nargs="*", help="options of launch.sh")
    arguments = parser.parse_args()
    names = arguments.workloads.split(",")
    if unknown := [name for name in names if name not in WORKLOADS]:
        sys.exit(f"--workloads: unknown {', '.join(unknown)}; there are {', '.join(WORKLOADS)}")
    if arguments.backend:
        run_job(arguments.backend, names, arguments.warm_up, arguments.steps, arguments.small, arguments.json)
        return
    on_gpus = torch.cuda.is_available()
    arguments.small = arguments.small or not on_gpus
    backends = ["nccl" if on_gpus else "gloo", "tdcoll"]
    runs = list(jobs(arguments, backends))
    sides = [[run for run in runs if run["backend"] == backend] for backend in backends]
    rows = [compare(name, *sides) for name in names]
    print(f"\n{'ms per step':30s} {backends[0]:>26s} {'tdcoll':>26s}  ratio          losses")
    for row in rows:
        cells = [
            f"{row[side]['median_ms']:8.3f} [{row[side]['least_ms']:.3f}, {row[side]['most_ms']:.3f}]"
            for side in ("baseline", "tdcoll")
        ]
        repeat = "repeat" if row["tdcoll"]["losses_repeat"] else "DIFFER FROM RUN TO RUN"
        same = f"{repeat}; from {backends[0]}'s by {row['losses_differ_by']:.1e}"
        print(f"{row['workload']:30s} {cells[0]:>26s} {cells[1]:>26s}  {row['ratio']:.3f} {row['verdict']:7s} {same}")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps({"command": sys.argv, "rows": rows, "runs": runs}, indent=1))


if __name__ == "__main__":
    main()
