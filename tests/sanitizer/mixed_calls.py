# SPDX-License-Identifier: Apache-2.0
"""A short mixed run for ``sanitize.py``: all collectives in turn, by all algorithms, of several sizes; the language.

The sizes are small, since racecheck makes kernels many times slower. On the simulator it runs as well, without a tool.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import triton.language as tl

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "workers"))

import harness
from harness import check, checks_of, device, expect, rank, run, world

import tdcoll
from tdcoll.collectives._host.collective import Collective
from tdcoll.collectives.all_gather.op import ALL_GATHER
from tdcoll.collectives.all_reduce.algorithms import ALL_REDUCE
from tdcoll.collectives.reduce_scatter.algorithms import REDUCE_SCATTER

COUNTS = (0, 1, 33, 1000, 5000)
SEEN: set[str] = set()
LANGUAGE = ("identity", "puts_and_gets", "puts_with_signals", "signals_and_barriers", "fence_orders")


def algorithms(
    of: Collective, ctx: tdcoll.CollectiveContext, nbytes: int, dtype: torch.dtype | None = torch.float32
) -> list[str]:
    """Those that serve segments of so many bytes; ``dtype``: None where they are moved as they are."""
    facts = of.facts(ctx, nbytes, dtype)
    found = [name for name in of.policy.names if of.policy.admits(name, facts)]
    expect(found, f"no algorithm serves {nbytes} bytes")
    SEEN.update(f"{of.name} by {name}" for name in found)
    return found


def mine(call: int, count: int) -> torch.Tensor:
    """``[count]`` whole numbers: their sums are exact in any order."""
    return (torch.arange(count, device=device()) % 97 + call + 100 * rank()).float()


def all_of(call: int, count: int) -> torch.Tensor:
    return torch.stack([mine(call, count) + 100 * (r - rank()) for r in range(world())])


def dense(ctx: tdcoll.CollectiveContext, call: int, count: int) -> None:
    every = all_of(call, count)
    for name in algorithms(ALL_GATHER, ctx, 4 * count, None):
        got = tdcoll.all_gather(mine(call, count), ctx, algorithm=name)
        expect(torch.equal(got, every.flatten()), f"all-gather by {name} of {count}")
    for name in algorithms(ALL_REDUCE, ctx, 4 * count):
        got = tdcoll.all_reduce(mine(call, count), ctx, algorithm=name)
        expect(torch.equal(got, every.sum(0)), f"all-reduce by {name} of {count}")
    whole = all_of(call, count * world()).sum(0).view(world(), count)[rank()]
    for name in algorithms(REDUCE_SCATTER, ctx, 4 * count):
        got = tdcoll.reduce_scatter(mine(call, count * world()), ctx, algorithm=name)
        expect(torch.equal(got, whole), f"reduce-scatter by {name} of {count}")


def sparse(ctx: tdcoll.SparseContext, count: int, algorithm: str) -> None:
    rows = 3 * count + 1
    ids = (torch.arange(count, device=device()) * 2 + rank()) % rows
    values = torch.ones(count, 4, device=device()) * (1 + rank())
    got = tdcoll.sparse_all_reduce(
        torch.sparse_coo_tensor(ids[None], values, (rows, 4), check_invariants=False), ctx, algorithm=algorithm
    )
    wanted = torch.zeros(rows, 4, device=device())
    for r in range(world()):
        wanted.index_add_(0, (ids - rank() + r) % rows, torch.ones_like(values) * (1 + r))
    expect(torch.equal(got.to_dense(), wanted), f"sparse all-reduce by {algorithm} of {count} rows")


@check
def mixed_calls() -> str:
    with (
        tdcoll.CollectiveContext(max_bytes_per_rank=4 * max(COUNTS)) as ctx,
        tdcoll.SparseContext(max_rows_per_rank=200, max_row_bytes=16) as rows,
    ):
        for call, count in enumerate(COUNTS if not harness.simulated() else COUNTS[:3]):
            dense(ctx, call, count)
            for algorithm in ("owner", "gather"):
                sparse(rows, min(count, 200), algorithm)
        ctx.check()
        rows.check()
    return ", ".join(sorted(SEEN))


@check
def language() -> None:
    for name in checks_of("language_checks", *LANGUAGE):
        harness.CHECKS[name]()


@tdcoll.jit
def store_out_of_bounds(address: tl.int64):
    tl.store(address.to(tl.pointer_type(tl.int32)), 1)


@check(gpu_only=True)
def control() -> None:
    """Not part of the run: what memcheck must report."""
    store_out_of_bounds[(1,)](torch.zeros(1, device=device()).data_ptr() + (1 << 42))
    torch.cuda.synchronize()


if __name__ == "__main__":
    run()
