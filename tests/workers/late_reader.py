# SPDX-License-Identifier: Apache-2.0
"""The last rank is late in a reduce-scatter by loads. Rank 0 gives up on it and fills its tensor anew, and only then
does the late rank read: it must end with CollectiveTimeout naming rank 0, and not with wrong numbers alone.

`bash launch.sh tests/workers/late_reader.py [unchecked]`. With `unchecked`, readers don't look whether a peer has given
up: then the late rank must get wrong numbers without an error, or the check above shows nothing. Every rank prints one
JSON line.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

import tdcoll

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kernel_mutants import Change, installed

PULL = "reduce_scatter.kernels_pull.reduce_scatter_pull"
OWN = "own = source + tl.cast(g.rank, tl.int64) * source_stride"
STALL = f"""
{OWN}
if (g.rank == g.world - 1) & (epoch == 2):
    while tdl.ld(g.entered + g.rank, "sys", "relaxed") == 0:
        pass
"""
"""Until its own word of ``entered``, which the protocol does not use, is set."""
CHECK = "stores.none_gave_up(g, WAITED)"

COUNT = 1000
TIMEOUT_S = 2.0


def main() -> None:
    tdcoll.initialize()
    rank, world = dist.get_rank(), dist.get_world_size()
    changes = [Change(PULL, OWN, STALL)]
    if "unchecked" in sys.argv[1:]:
        changes.append(Change(PULL, CHECK, "pass"))
    source = tdcoll.empty((world * COUNT,), torch.int32)
    with tempfile.TemporaryDirectory() as folder, installed(changes, Path(folder)):
        ctx = tdcoll.CollectiveContext(max_bytes_per_rank=8 * COUNT, timeout_s=TIMEOUT_S)
        wanted = source.fill_(rank + 1)[:COUNT].clone().fill_(world * (world + 1) // 2)
        first = tdcoll.reduce_scatter(source, ctx=ctx, algorithm="pull", symmetric=True)
        ctx.check()
        assert torch.equal(first, wanted)
        tdcoll.barrier()
        got = tdcoll.reduce_scatter(source, ctx=ctx, algorithm="pull", symmetric=True)
        source.fill_(-1)
        if rank == 0:
            tdcoll.write_on_stream(tdcoll.peer_tensor(ctx.ready, world - 1)[world - 1], 1)
        peer = None
        try:
            ctx.check()
        except tdcoll.CollectiveTimeout as error:
            peer = error.peer
        wrong = int((got != wanted).sum())
    print(json.dumps({"rank": rank, "timeout names": peer, "wrong": wrong}), flush=True)


if __name__ == "__main__":
    main()
