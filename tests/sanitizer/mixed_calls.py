# SPDX-License-Identifier: Apache-2.0
"""A short mixed run for ``sanitize.py``: every collective by every algorithm that one node has; the
language.

Few sizes, all of them small, each twice: a tool makes kernels many times slower, and what starts a
job slower still. On the simulator it runs as well, without a tool.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import triton.language as tl

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "workers"))

from dense_parts import OUT_OF_PLACE, SPECS, data, kind_of, make_call, right, served, wanted
from harness import check, device, expect, rank, run, scaled, simulated, world

import tdcoll
from tdcoll import runtime
from tdcoll.job import lifecycle

COUNTS = (33, 1001, 5000)
"""Numbers of elements: with a tail of a few bytes, with a tail of a block, and without one."""
CALLS = 2
"""Calls of each kind: the second finds memory that the first has used."""
HEAP_BYTES = 16 << 20
BY_A_BLOCK = 2
"""The form of a put or get that all threads of a program make."""


@check
def dense() -> str:
    """Every collective by every algorithm."""
    seen = []
    for spec in SPECS:
        used = set()
        with tdcoll.CollectiveContext(max_bytes_per_rank=16 * max(COUNTS)) as ctx:
            for turn in range(CALLS):
                for count in COUNTS[: scaled(3, 1)]:
                    every = data(spec, turn, count, kind_of(spec))
                    should = wanted(spec, every)
                    for name in served(spec, ctx, count * should.itemsize, should.dtype):
                        out = torch.empty_like(should)
                        got = make_call(spec, OUT_OF_PLACE, every[rank()], out, ctx, name)
                        right(got, should, f"{spec.name} by {name} of {count}")
                        used.add(name)
            ctx.check()
        expect(used, f"no algorithm of {spec.name} was to be had")
        seen.append(f"{spec.name}: {', '.join(sorted(used))}")
    return "; ".join(seen)


def sparse(ctx: tdcoll.SparseContext, count: int, algorithm: str) -> None:
    rows = 3 * count + 1
    ids = (torch.arange(count, device=device()) * 2 + rank()) % rows
    values = torch.ones(count, 4, device=device()) * (1 + rank())
    got = tdcoll.sparse_all_reduce(
        torch.sparse_coo_tensor(ids[None], values, (rows, 4), check_invariants=False),
        ctx=ctx,
        algorithm=algorithm,
    )
    wanted = torch.zeros(rows, 4, device=device())
    for r in range(world()):
        wanted.index_add_(0, (ids - rank() + r) % rows, torch.ones_like(values) * (1 + r))
    expect(torch.equal(got.to_dense(), wanted), f"sparse all-reduce by {algorithm} of {count} rows")


@check
def sparse_all_reduces() -> None:
    with tdcoll.SparseContext(max_rows_per_rank=200, max_row_bytes=16) as ctx:
        for _ in range(CALLS):
            for count in (33, 200):
                for algorithm in ("owner", "gather"):
                    sparse(ctx, count, algorithm)
        ctx.check()


@check
def language() -> None:
    import language_checks  # here, since it adds its own checks to those that run without a name

    language_checks.puts_and_gets((BY_A_BLOCK,))
    language_checks.puts_with_signals((BY_A_BLOCK,))
    language_checks.signals_and_barriers()
    language_checks.fence_orders()


@tdcoll.jit
def store_out_of_bounds(address: tl.int64):
    tl.store(address.to(tl.pointer_type(tl.int32)), 1)


@check(gpu_only=True)
def control() -> None:
    """Not part of the run: what memcheck must report."""
    store_out_of_bounds[(1,)](torch.zeros(1, device=device()).data_ptr() + (1 << 42))
    torch.cuda.synchronize()


def join() -> None:
    """Have as little as possible started under a tool: no NCCL, a small heap."""
    if not simulated():
        torch.cuda.set_device(
            lifecycle.device_index(int(os.environ["LOCAL_RANK"]), lifecycle.may_share_gpus())
        )
    dist.init_process_group("gloo")
    tdcoll.initialize(heap_bytes=HEAP_BYTES)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checks", nargs="*", help="names of checks (default: all)")
    parser.add_argument(
        "--heap", type=Path, help="a file for the first address of this rank's heap, and its bytes"
    )
    options = parser.parse_args()
    join()
    if options.heap is not None:
        heap = runtime.current().heap
        options.heap.write_text(f"{heap.base} {heap.nbytes}\n")
    run(options.checks)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
