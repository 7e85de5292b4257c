# SPDX-License-Identifier: Apache-2.0
"""Sparse gradients by a reducer, beside DDP and without, on every rank of a job."""

from __future__ import annotations

import torch
from backend_job import same
from distributed_training_checks import (
    DDP,
    Model,
    dense_run,
    equal,
    exchanges,
    lookups,
    other_group,
    train,
)
from harness import check, device, everyone, expect, expect_raises, rank, world
from torch import nn

from tdcoll.distributed import SparseGradientReducer


@check
def reducer() -> None:
    """Tables that a rank does not use, that nobody uses, and ranks without rows."""
    batches = [lookups(step, 3) for step in range(4)]
    for table in (0, 1):
        if rank() == table:
            del batches[1][table]
    del batches[2][1]
    batches[3] = {0: batches[3][0]} if rank() == world() - 1 else {}
    model = Model(True, 3)
    if rank() != 0:
        with torch.no_grad():
            model.tables[0].weight.zero_()  # it is rank 0's weights that count
    sums = SparseGradientReducer(model, rows_per_rank=2)
    before = exchanges()
    got = train(DDP(model, find_unused_parameters=True), batches, sums.finish)
    equal(got, dense_run(batches, 3), "reducer")
    expect(
        exchanges() - before <= len(batches) + 2,
        "a call for each step, and two that grow the context at most",
    )
    grads = [table.weight.grad is None for table in model.tables]
    expect(grads == [False, True, True], f"a table that nobody used has no gradient: {grads}")
    sums.close()


@check
def reducer_of_strided_weights() -> None:
    """The weights become rank 0's, and what lies between them stays."""
    whole = torch.full((16, 8), 7.0 + rank(), device=device())
    table = nn.Embedding(16, 4, sparse=True, device=device())
    table.weight = nn.Parameter(whole[:, ::2])
    sums = SparseGradientReducer(table, other_group())
    expect(bool((whole[:, ::2] == 7).all()), f"weights: {whole}")
    expect(bool((whole[:, 1::2] == 7 + rank()).all()), f"between the weights: {whole}")
    sums.close()


@check
def reducer_after_an_interrupt() -> None:
    """Ctrl-C in finish(), before the call is made: no later call waits for it."""
    tables = nn.ModuleList(nn.Embedding(16, 4, sparse=True) for _ in range(2)).to(device())
    sums = SparseGradientReducer(tables)

    def interrupted() -> None:
        raise KeyboardInterrupt

    for broken in (True, False):
        tables[0](torch.tensor([rank()], device=device())).sum().backward()
        if broken:
            sums._sums.queue.drain = interrupted
            expect_raises(KeyboardInterrupt, sums.finish)
            del sums._sums.queue.drain
            expect(sums._pass is None, "a call that was not made is still waited for")
        else:
            sums.finish()
    wanted = torch.zeros(16, 4)
    wanted[: world()] = 1 / world()
    torch.testing.assert_close(tables[0].weight.grad.to_dense().cpu(), wanted)
    sums.close()


@check
def reducer_accumulates_and_scales() -> None:
    wanted = None
    for sparse_tables in (False, True):
        model = Model(sparse_tables, 2)
        model.tables[1].weight = model.tables[0].weight  # shared
        sums = SparseGradientReducer(model) if sparse_tables else None
        ddp = DDP(model)
        scaler = torch.amp.GradScaler(device().type, init_scale=8.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for step in range(2):
            optimizer.zero_grad()
            with ddp.no_sync():
                if sums is None:
                    scaler.scale(ddp(lookups(step, 2)).sum() * world()).backward()
                else:
                    with sums.no_sync():
                        scaler.scale(ddp(lookups(step, 2)).sum() * world()).backward()
            scaler.scale(ddp(lookups(step + 5, 2)).sum() * world()).backward()
            if sums is not None:
                sums.finish()
            scaler.step(optimizer)
            scaler.update()
        got = [parameter.detach().clone() for parameter in model.parameters()]
        if wanted is None:
            wanted = got
        else:
            equal(got, wanted, "accumulated, shared and scaled")
            expect(len(got) == 3, "one shared table")
            found_inf = model.tables[0].weight.grad
            found_inf._values()[0, 0] = float("inf") if rank() == 1 else 1.0
            sums.finish()
            expect(
                not torch.isfinite(model.tables[0].weight.grad._values()).all(),
                "infinity reaches all ranks",
            )


@check
def reducer_with_frozen_tables() -> None:
    """Frozen when the reducer is made, later, on one rank only, and no longer."""
    tables = nn.ModuleList(nn.Embedding(16, 4, sparse=True) for _ in range(3)).to(device())
    frozen = [[everyone(), [], [0]], [[], everyone(), []], [[0], [1], everyone()], [[], [], []]]

    def freeze(step: int) -> None:
        for table, where in zip(tables, frozen[step], strict=True):
            table.weight.requires_grad_(rank() not in where)

    freeze(0)
    sums = SparseGradientReducer(tables)
    for step in range(len(frozen)):
        freeze(step)
        for table in tables:
            table.weight.grad = None
        ids = {r: (torch.arange(5, device=device()) * (r + 1) + step) % 16 for r in everyone()}
        (sum(table(ids[rank()]).sum() for table in tables) * world()).backward()
        sums.finish()
        for table, where in zip(tables, frozen[step], strict=True):
            counts = torch.zeros(16, device=device())
            for r in everyone():
                if r not in where:
                    counts += torch.bincount(ids[r], minlength=16)
            grad = table.weight.grad
            if rank() in where:
                expect(grad is None, f"step {step}: a frozen table has a gradient")
            else:
                same(
                    grad.to_dense(), counts.unsqueeze(1).expand(16, 4).contiguous(), f"step {step}"
                )
    sums.close()


@check
def reducer_says_what_is_wrong() -> None:
    model = Model(True)
    model.tables[0].weight.requires_grad_(False)
    sums = SparseGradientReducer(model)
    model.tables[0].weight.requires_grad_(True)
    expect_raises(
        ValueError,
        lambda: SparseGradientReducer(model),
        "tables.0.weight has a reducer already",
        "close()",
    )
    model(lookups(0)).sum().backward()
    expect_raises(
        RuntimeError,
        lambda: model(lookups(0)).sum().backward(),
        "second backward",
        "tables.0.weight",
    )
    sums.finish()
    with sums.no_sync():
        expect_raises(RuntimeError, sums.finish, "no_sync")
    sums.close()
    expect_raises(ValueError, lambda: SparseGradientReducer(Model(False)), "sparse=True")
    tied = Model(True)
    sums = SparseGradientReducer(tied)
    loss = tied(lookups(0)).sum() + tied.tables[0].weight.sum()
    expect_raises(TypeError, loss.backward, "tables.0.weight", "dense gradient")
    sums.close()
    wrapped = DDP(Model(True, 2))
    for late in (wrapped, wrapped.module, nn.Sequential(wrapped)):
        expect_raises(
            ValueError,
            lambda late=late: SparseGradientReducer(late),
            "DistributedDataParallel has", "tables.0.weight", "tables.1.weight", "reducer of the model first",
        )  # fmt: skip
    model = wrapped.module
    del wrapped, late
    sums = SparseGradientReducer(model)
    kept = DDP(model)
    sums.close()
    again = SparseGradientReducer(model)  # the wrapper leaves them alone already
    again.close()
    del kept
