# SPDX-License-Identifier: Apache-2.0
"""Training by libraries that make their own calls of ``torch.distributed``: ``clients_job.py
lightning``, and others.

Each trains a small model on backend "tdcoll" and compares it with the same steps on all ranks' data
in one process. ``docs/clients.md`` shows these scripts' decisive lines.
"""

from __future__ import annotations

import functools
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from tdcoll.distributed import explain

STEPS, ROWS = 4, 3

RATE = 0.1


def model_of(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 2))


def batch_of(rank: int, step: int) -> torch.Tensor:
    """``-> [ROWS, 5]``: a rank's data in a step."""
    return torch.randn(ROWS, 5, generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(model: Any, batch: torch.Tensor) -> torch.Tensor:
    return (model(batch) ** 2).mean()


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().float().flatten() for parameter in model.parameters()])


def trained_alone(world: int, make: Callable[[Any], torch.optim.Optimizer]) -> torch.Tensor:
    """Return the parameters after the same steps on the data of all ranks, in this process."""
    model = model_of()
    optimizer = make(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, torch.cat([batch_of(rank, step) for rank in range(world)])).backward()
        optimizer.step()
    return flat(model)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, RATE)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, RATE)


def expect_same(model: nn.Module, make: Callable[[Any], torch.optim.Optimizer] = sgd) -> None:
    torch.testing.assert_close(
        flat(model), trained_alone(dist.get_world_size(), make), rtol=1e-4, atol=1e-5
    )


def expect_handled(*kinds: str) -> None:
    """The client's calls of these kinds must have gone to tdcoll."""
    text = explain()
    missing = [kind for kind in kinds if f" {kind} by tdcoll" not in text]
    assert not missing, f"tdcoll has handled no {missing}:\n{text}"


# ---------------------------------------------------------------------- clients


def lightning() -> None:
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import DDPStrategy

    logged = {}

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model_of()

        def training_step(self, batch: torch.Tensor, step: int) -> torch.Tensor:
            loss = loss_of(self.model, batch)
            self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True, batch_size=ROWS)
            self.log(
                "rank",
                float(self.global_rank),
                on_step=False,
                on_epoch=True,
                sync_dist=True,
                batch_size=ROWS,
            )
            return loss

        def on_train_end(self) -> None:
            logged.update(self.trainer.logged_metrics)
            gathered = self.all_gather(torch.tensor([self.global_rank]))
            assert gathered.flatten().tolist() == list(range(self.trainer.world_size))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return sgd(self.model.parameters())

    batches = [batch_of(int(os.environ["RANK"]), step) for step in range(STEPS)]
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=DDPStrategy(process_group_backend="tdcoll"),
        use_distributed_sampler=False,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module()
    trainer.fit(module, DataLoader(batches, batch_size=None))
    expect_same(module.model)
    assert logged["rank"].item() == (trainer.world_size - 1) / 2
    expect_handled("all_reduce")


def accelerate() -> None:
    from accelerate import Accelerator
    from accelerate.utils import gather_object

    # first: on CPUs Accelerate refuses names of backends that it doesn't know
    dist.init_process_group("tdcoll")
    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == dist.get_world_size()
    rank, world = dist.get_rank(), dist.get_world_size()
    rows = [batch_of(r, step) for step in range(STEPS) for r in range(world)]
    model = model_of()
    prepared, optimizer, loader = accelerator.prepare(
        model, sgd(model.parameters()), DataLoader(rows, batch_size=1)
    )
    for (batch,) in loader:
        optimizer.zero_grad()
        accelerator.backward(loss_of(prepared, batch))
        optimizer.step()
    expect_same(model)
    assert accelerator.gather(torch.tensor([rank])).tolist() == list(range(world))
    assert accelerator.gather(torch.empty(0, 3)).shape == (0, 3)
    assert accelerator.gather(accelerator.pad_across_processes(torch.ones(rank + 1, 2))).shape == (
        world * world,
        2,
    )
    assert accelerator.reduce(torch.tensor([rank + 1.0]), "mean").item() == (world + 1) / 2
    assert gather_object([rank]) == list(range(world))
    seen: list[bool] = []
    for flags in accelerator.prepare(
        DataLoader(torch.arange(10 * world + 1) % 3 == 0, batch_size=4)
    ):
        seen += accelerator.gather_for_metrics(flags).tolist()
    assert len(seen) == 10 * world + 1
    expect_handled("all_reduce", "all_gather")
    dist.destroy_process_group()


def deepspeed() -> None:
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiling it takes minutes
    dist.init_process_group("tdcoll")
    for stage in (2, 1, 3):
        model = model_of()
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=adam(model.parameters()),
            dist_init_required=False,
            config={
                "train_micro_batch_size_per_gpu": ROWS,
                "zero_optimization": {"stage": stage},
                "zero_allow_untested_optimizer": True,
            },
        )
        for step in range(STEPS):
            engine.backward(loss_of(engine, batch_of(dist.get_rank(), step)))
            engine.step()
        if stage == 3:
            with deepspeed.zero.GatheredParameters(list(model.parameters())):
                expect_same(model, adam)
        else:
            expect_same(model, adam)
    expect_handled("all_reduce", "all_gather")
    dist.destroy_process_group()


def checkpoint() -> None:
    """FSDP2, and distributed checkpoints of it, synchronous and asynchronous, loaded by other
    shards."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("tdcoll")
    folders: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folders)

    def sharded(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = model_of(seed)
        fully_shard(model)
        return model, adam(model.parameters())

    def full(model: nn.Module) -> torch.Tensor:
        return torch.cat(
            [parameter.full_tensor().detach().flatten() for parameter in model.parameters()]
        )  # type: ignore[operator]

    model, optimizer = sharded(0)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, batch_of(dist.get_rank(), step)).backward()
        optimizer.step()
    wanted = trained_alone(dist.get_world_size(), adam)
    torch.testing.assert_close(full(model), wanted, rtol=1e-4, atol=1e-5)
    for name in ("save", "async_save"):
        weights, moments = get_state_dict(model, optimizer)
        saved = getattr(dcp, name)(
            {"model": weights, "optimizer": moments}, checkpoint_id=f"{folders[0]}/{name}"
        )
        if name == "async_save":
            saved.result()
        other, its_optimizer = sharded(1)
        weights, moments = get_state_dict(other, its_optimizer)
        dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=f"{folders[0]}/{name}")
        set_state_dict(other, its_optimizer, model_state_dict=weights, optim_state_dict=moments)
        torch.testing.assert_close(full(other), wanted, rtol=1e-4, atol=1e-5)
    expect_handled("all_gather", "reduce_scatter")
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folders[0])
    dist.destroy_process_group()


def torchrec() -> None:
    """Embedding tables that torchrec divides over the ranks by tables and columns, or keeps on all
    of them."""
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
    from torchrec.distributed.planner.types import ParameterConstraints

    dist.init_process_group("tdcoll")
    rank, world = dist.get_rank(), dist.get_world_size()
    kinds = ("table_wise", "column_wise", "data_parallel")

    tables = EmbeddingBagCollection(
        device=torch.device("meta"),
        tables=[
            EmbeddingBagConfig(
                name=kind,
                embedding_dim=8,
                num_embeddings=16,
                feature_names=[kind],
                init_fn=functools.partial(nn.init.constant_, val=number),
            )
            for number, kind in enumerate(kinds, 1)
        ],
    )
    lengths = torch.arange(len(kinds) * ROWS) % 4 + rank
    values = torch.arange(int(lengths.sum())) % 16
    sharder: Any = EmbeddingBagCollectionSharder()
    constraints = {
        kind: ParameterConstraints(sharding_types=[kind], min_partition=4) for kind in kinds
    }
    planner = EmbeddingShardingPlanner(topology=Topology(world, "cpu"), constraints=constraints)
    plan = planner.collective_plan(tables, [sharder], dist.group.WORLD)
    model = DistributedModelParallel(
        tables, device=torch.device("cpu"), plan=plan, sharders=[sharder]
    )
    for step in range(STEPS):
        found: Any = model(KeyedJaggedTensor(keys=list(kinds), values=values, lengths=lengths))
        for number, kind in enumerate(kinds, 1):
            if step == 0:  # the backward pass updates the tables
                wanted = lengths[(number - 1) * ROWS :][:ROWS, None] * float(number)
                assert torch.equal(found[kind].detach(), wanted.expand(ROWS, 8)), kind
        found.values().sum().backward()
    dist.destroy_process_group()


CLIENTS: dict[str, Callable[[], None]] = {
    "lightning": lightning,
    "accelerate": accelerate,
    "deepspeed": deepspeed,
    "checkpoint": checkpoint,
    "torchrec": torchrec,
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    CLIENTS[sys.argv[1]]()
    print(f"{sys.argv[1]}: done", flush=True)
