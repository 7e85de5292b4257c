# SPDX-License-Identifier: Apache-2.0
"""Time of a training step on backend "tdcoll" and on "nccl", in turns in one job, and their losses.

\b
    bash launch.sh --nproc 2 benchmarks/training.py
    bash launch.sh --nproc 2 benchmarks/training.py --workloads fsdp-256,dlrm-4x500k --steps 30

Every workload is made once per backend, on a group of its own, with the same weights and the same
data. The two then take turns: a step of one, a step of the other, and the next pair the other way
round. Separate jobs differ by 20 percent for reasons that have nothing to do with a backend; the
two steps of a pair share the process, the clocks of the GPU and the host's caches. A step counts
from a barrier until the slowest rank's GPU is idle.

The ratio is the median over the pairs, with its quartiles in brackets. The column "alone" has the
step without communication, for workloads that make sense without it. Workloads ``fsdp-symmetric-*``
have FSDP2's buffers in symmetric memory (``tdcoll.distributed.fsdp``), and their names have width,
layers and tokens; where PyTorch has NCCL's symmetric memory for FSDP2, a third step has that.
Losses of the two backends must be equal within the dtype's rounding, since they add in different
orders; those of one backend, trained again, must be equal to the bit. Where there is no GPU, "gloo"
is the baseline and tdcoll runs in the simulator with tiny models: this shows that the script works,
and its times say nothing.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import tdcoll
import tdcoll.distributed
from benchmarks import parsing, training_fsdp
from benchmarks.training_fsdp import Group, Mlp, Step, device, faster

# ---------------------------------------------------------------------- workloads


def blocks(width: int, number: int = 8) -> nn.Sequential:
    torch.manual_seed(1)
    layers = [
        nn.TransformerEncoderLayer(
            width, 8, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        for _ in range(number)
    ]
    return nn.Sequential(*layers).to(device())


def sequences(width: int, small: bool) -> torch.Tensor:
    torch.manual_seed(2 + dist.get_rank())
    shape = (2, 4, width) if small else (8, 128, width)
    return torch.randn(shape, device=device())


def trained(model: nn.Module, call: Callable[..., torch.Tensor], batch: torch.Tensor) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = call(batch).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def mesh_of(group: dist.ProcessGroup) -> DeviceMesh:
    return DeviceMesh.from_group(group, device().type)


def parallel(model: nn.Module, group: Group) -> nn.Module:
    """Wrap a model in DDP, unless the step goes without communication."""
    if group is None:
        return model
    where = [device().index] if device().type == "cuda" else None
    return nn.parallel.DistributedDataParallel(model, where, process_group=group)


def fsdp(group: dist.ProcessGroup, width: int, compiled: bool, small: bool) -> Step:
    from torch.distributed.fsdp import fully_shard

    mesh = mesh_of(group)
    model = blocks(width, 2 if small else 8)
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return trained(model, faster(model, small) if compiled else model, sequences(width, small))


def ddp(group: Group, width: int, compiled: bool, small: bool) -> Step:
    model = parallel(blocks(width, 2 if small else 8), group)
    return trained(model, faster(model, small) if compiled else model, sequences(width, small))


def tensor_parallel(group: dist.ProcessGroup, width: int, compiled: bool, small: bool) -> Step:
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = mesh_of(group)
    torch.manual_seed(1)
    model = nn.Sequential(*(Mlp(width) for _ in range(2 if small else 8))).to(device())
    for layer in model:
        parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    torch.manual_seed(2)  # all ranks have the same rows
    batch = torch.randn(4 if small else 64, width, device=device())
    return trained(model, faster(model, small) if compiled else model, batch)


class Dlrm(nn.Module):
    """Tables of rows, and a dense part."""

    def __init__(self, tables: int, rows: int, width: int, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(rows, width, mode="sum", sparse=sparse) for _ in range(tables)
        )
        self.dense = nn.Sequential(nn.Linear(tables * width, 256), nn.ReLU(), nn.Linear(256, 1))
        for table in self.tables:
            torch.nn.init.normal_(table.get_parameter("weight"), std=0.01)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        embedded = torch.cat([table(ids[i]) for i, table in enumerate(self.tables)], 1)
        out: torch.Tensor = self.dense(embedded)
        return out


def dlrm(group: Group, tables: int, rows: int, width: int, bag: int, small: bool) -> Step:
    """Make a step with sparse gradients, except on NCCL and gloo: NCCL refuses sparse tensors."""
    sparse = group is None or dist.get_backend(group) == "tdcoll"
    if small:
        tables, rows, width = 2, 1000, 16
    model: Any = parallel(Dlrm(tables, rows, width, sparse).to(device()), group)
    if sparse and group is not None:
        model.register_comm_hook(group, tdcoll.distributed.sparse_hook)  # one call for all tables
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(2 + dist.get_rank())
    ids = torch.randint(0, rows, (tables, 8 if small else 2048, bag), device=device())

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = (model(ids) - 1).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def pipeline(group: dist.ProcessGroup, width: int, compiled: bool, small: bool) -> Step:
    """Make a step of point-to-point calls, for which tdcoll falls back.

    It passes activations on, and gradients back.
    """
    rank = dist.get_rank()
    world = dist.get_world_size()
    torch.manual_seed(1 + rank)
    model = nn.Sequential(*(Mlp(width) for _ in range(2))).to(device())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    first = torch.randn(4 if small else 64, width, device=device())

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        entered = first.clone()
        if rank > 0:
            dist.recv(entered, rank - 1, group)
        entered.requires_grad_()
        left = model(entered)
        if rank < world - 1:
            dist.send(left.detach(), rank + 1, group)
            gradient = torch.empty_like(left)
            dist.recv(gradient, rank + 1, group)
            loss = left.detach().square().mean()
            left.backward(gradient)
        else:
            loss = left.square().mean()
            loss.backward()
        if rank > 0:
            assert entered.grad is not None
            dist.send(entered.grad, rank - 1, group)
        optimizer.step()
        return loss.detach()

    return step


def _dense(make: Callable[..., Step], width: int, compiled: bool = False) -> Callable[..., Step]:
    return lambda group, small: make(group, 16 if small else width, compiled, small)


def _sparse(tables: int, rows: int, width: int, bag: int) -> Callable[..., Step]:
    return lambda group, small: dlrm(group, tables, rows, width, bag, small)


WORKLOADS: dict[str, Callable[..., Step]] = {
    "fsdp-256": _dense(fsdp, 256),
    "fsdp-1024": _dense(fsdp, 1024),
    "fsdp-2048": _dense(fsdp, 2048),
    "fsdp-256-compiled": _dense(fsdp, 256, True),
    "ddp-256": _dense(ddp, 256),
    "ddp-1024": _dense(ddp, 1024),
    "ddp-256-compiled": _dense(ddp, 256, True),
    "tensor-parallel-256": _dense(tensor_parallel, 256),
    "tensor-parallel-256-compiled": _dense(tensor_parallel, 256, True),
    "dlrm-26x100k": _sparse(26, 100_000, 64, 1),
    "dlrm-4x500k": _sparse(4, 500_000, 64, 4),
    "dlrm-8x1m": _sparse(8, 1_000_000, 128, 10),
    "pipeline-256": _dense(pipeline, 256),
    **training_fsdp.WORKLOADS,
}
ALONE = ("ddp", "dlrm", "fsdp-symmetric")
"""Beginnings of the names of workloads that can go without communication."""


# ---------------------------------------------------------------------- in turns


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def in_turns(
    compared: dict[str, Step],
    warm_up: int,
    steps: int,
) -> dict[str, dict[str, list[float]]]:
    """Return what was measured of each of the compared steps, by name.

    It is ``ms``, the milliseconds of each timed step on the slowest rank, and ``losses``, of all
    steps on this rank.
    """
    milliseconds: dict[str, list[float]] = {name: [] for name in compared}
    losses: dict[str, list[torch.Tensor]] = {name: [] for name in compared}
    for number in range(warm_up + steps):
        for name in sorted(compared, reverse=bool(number % 2)):
            dist.barrier()
            synchronize()
            began = time.perf_counter()
            losses[name].append(compared[name]())
            synchronize()
            milliseconds[name].append(1e3 * (time.perf_counter() - began))
    own = torch.tensor([milliseconds[name][warm_up:] for name in compared], device=device())
    dist.all_reduce(own, dist.ReduceOp.MAX)
    return {
        name: {"ms": slowest, "losses": [float(loss) for loss in losses[name]]}
        for name, slowest in zip(compared, own.tolist(), strict=True)
    }


def compare(ours: dict[str, list[float]], baseline: dict[str, list[float]]) -> dict[str, float]:
    """Return a row's facts: medians, the ratio's quartiles, the losses' greatest difference."""
    ratios = [a / b for a, b in zip(ours["ms"], baseline["ms"], strict=True)]
    if len(ratios) == 1:
        lower = ratio = upper = ratios[0]
    else:
        lower, ratio, upper = statistics.quantiles(ratios, n=4)
    pairs = zip(ours["losses"], baseline["losses"], strict=True)
    return {
        "tdcoll_ms": statistics.median(ours["ms"]),
        "baseline_ms": statistics.median(baseline["ms"]),
        "ratio": ratio,
        "ratio_lower_quartile": lower,
        "ratio_upper_quartile": upper,
        "losses_differ_by": max(abs(a - b) / max(abs(b), 1e-30) for a, b in pairs),
    }


def run(
    name: str,
    groups: dict[str, dist.ProcessGroup],
    *,
    warm_up: int,
    steps: int,
    small: bool,
) -> dict[str, Any]:
    """Measure a workload, and return its row."""
    # PyTorch's attention for fp32 otherwise adds in any order where heads are wide, so that losses
    # don't repeat. Compiled models are narrow, and their losses repeat.
    attends = name.startswith(("fsdp", "ddp"))
    torch.use_deterministic_algorithms(attends and not name.endswith("compiled"))
    make = WORKLOADS[name]
    compared: dict[str, Step] = {backend: make(group, small) for backend, group in groups.items()}
    if name.startswith(ALONE):
        compared["alone"] = make(None, small)
    if name in training_fsdp.WORKLOADS and training_fsdp.has_nccl_memory():
        compared["nccl memory"] = make(groups["baseline"], small, nccl_memory=True)
    found = in_turns(compared, warm_up, steps)
    del compared
    training_fsdp.close()
    repeat = {}
    for backend, group in groups.items():
        step = make(group, small)
        losses = found[backend]["losses"][: warm_up + 1]
        repeat[backend] = [float(step()) for _ in losses] == losses
        del step
        training_fsdp.close()
    torch._dynamo.reset()
    gc.collect()  # DDP and FSDP have circles, and the next workload needs the memory
    row: dict[str, Any] = {"workload": name, **compare(found["tdcoll"], found["baseline"])}
    row["losses_repeat"] = repeat
    for other in ("alone", "nccl memory"):
        if other in found:
            row[f"{other.replace(' ', '_')}_ms"] = statistics.median(found[other]["ms"])
    return {**row, "steps": found}


def line(row: dict[str, Any]) -> str:
    """Return a row's line on the terminal."""
    alone = f"{row['alone_ms']:9.3f}" if "alone_ms" in row else " " * 9
    spread = f"[{row['ratio_lower_quartile']:.3f}, {row['ratio_upper_quartile']:.3f}]"
    text = (
        f"{row['workload']:36s} {row['baseline_ms']:9.3f} {row['tdcoll_ms']:9.3f} {alone}  "
        f"{row['ratio']:.3f} {spread} {row['losses_differ_by']:.1e}"
    )
    if "nccl_memory_ms" in row:
        text += f", NCCL's symmetric memory {row['nccl_memory_ms']:.3f}"
    if not row["losses_repeat"]["tdcoll"]:
        text += ", DIFFER WHEN REPEATED"
    return text


def _options(workloads: list[str]) -> tdcoll.distributed.Options:
    """Return options with a heap for the largest workload."""
    symmetric = training_fsdp.WORKLOADS.keys() & set(workloads)
    large = torch.cuda.is_available() and symmetric
    return tdcoll.distributed.Options(heap_bytes=training_fsdp.HEAP_BYTES if large else None)


@click.command(help=__doc__, context_settings={"show_default": True, "max_content_width": 100})
@click.option(
    "--workloads",
    type=parsing.CommaList(click.Choice(list(WORKLOADS))),
    default=",".join(WORKLOADS),
    metavar="A,B",
    help="names of workloads",
)
@click.option("--warm-up", type=click.IntRange(min=0), default=5, help="steps that are not timed")
@click.option("--steps", type=click.IntRange(min=1), default=30, help="timed steps")
@click.option("--small", is_flag=True, help="tiny models, as in the simulator")
@click.option("--json", "file", type=parsing.NewFile(), help="write what was measured there")
def main(workloads: list[str], warm_up: int, steps: int, small: bool, file: Path | None) -> None:
    on_gpus = torch.cuda.is_available()
    if on_gpus:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.set_num_threads(1)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for deterministic algorithms
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    backend = "nccl" if on_gpus else "gloo"
    dist.init_process_group(backend)
    groups = {
        "baseline": dist.new_group(backend=backend),
        "tdcoll": dist.new_group(backend="tdcoll", pg_options=_options(workloads)),
    }
    is_first = dist.get_rank() == 0
    rows = []
    if is_first:
        headings = f"{'ms per step':36s} {backend:>9s} {'tdcoll':>9s} {'alone':>9s}"
        print(f"{headings}  ratio                losses differ by")
    for name in workloads:
        row = run(name, groups, warm_up=warm_up, steps=steps, small=small or not on_gpus)
        rows.append(row)
        if is_first:
            print(line(row), flush=True)
    if is_first and file is not None:
        facts = {
            "command": sys.argv,
            "baseline": backend,
            "gpu": torch.cuda.get_device_name() if on_gpus else None,
            "ranks": dist.get_world_size(),
            "torch": torch.__version__,
            "commit": os.environ.get("TDCOLL_COMMIT"),
            "explain": tdcoll.distributed.explain(groups["tdcoll"]),
        }
        file.write_text(json.dumps({**facts, "rows": rows}, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
