# SPDX-License-Identifier: Apache-2.0
"""Index matching on whatever kernels run on here, against torch; on a GPU also in CUDA graphs.

``python -m tests.collectives.index_match.on_device`` prints a line of JSON. It needs one GPU and no job; with
``TRITON_INTERPRET=1`` it takes small sizes, and leaves graphs out.
"""

from __future__ import annotations

import json

import torch

from tdcoll.collectives.index_match import kernels
from tdcoll.collectives.index_match.op import Directory, match_indices
from tdcoll.language import INTERPRETED

from .cases import ask, cleared_and_built, directory_of, pack

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")

# rows, lists, ids per list
CASES = (
    [(40, 3, 12), (4_000, 2, 300)]
    if INTERPRETED
    else [(40, 3, 12), (50_000, 8, 5_000), (5_000_000, 8, 50_000), (5_000_001, 70, 3_000), (1 << 40, 8, 50_000)]
)


def random_lists(num_rows: int, world: int, n: int, seed: int) -> list[torch.Tensor]:
    """Sorted unique ids, of different numbers per list, with the first and the last row in some."""
    generator = torch.Generator().manual_seed(seed)
    lists = [torch.randint(num_rows, (n - q,), generator=generator) for q in range(world)]
    lists[0][:1], lists[-1][:1] = 0, num_rows - 1
    return [torch.unique(ids).to(DEVICE) for ids in lists]


def check(directory: Directory, packed: torch.Tensor, lists: list[torch.Tensor]) -> None:
    """Compare a directory that is built with what torch says: the union, and the places of some of its ids."""
    union = torch.unique(torch.cat(lists))
    status = directory.status.tolist()
    assert status[kernels.UNION.value] == union.numel()
    assert not any(status[word.value] for word in (kernels.BAD_RANGE, kernels.BAD_ORDER, kernels.BAD_SIGNATURE))
    assert torch.equal(directory.union[: union.numel()], union)
    asked = union[torch.randperm(union.numel(), device=DEVICE)[:1000]]
    size = asked.numel()
    found = torch.empty((2, len(lists), size), dtype=torch.int32, device=DEVICE)
    in_union = torch.empty((2, size), dtype=torch.int32, device=DEVICE)
    ask[(1,)](asked, size, directory.index(packed).whole, found, in_union, 1024)
    assert torch.equal(union[in_union[0].long()], asked)
    for q, ids in enumerate(lists):
        assert torch.equal(found[0, q].long(), match_indices(asked, ids))
        assert torch.equal(found[0, q] >= 0, torch.isin(asked, ids))


def matches_torch() -> list[str]:
    """Both methods; on a GPU also captured, over lists that change from replay to replay."""
    done = []
    for num_rows, world, n in CASES:
        for method in ("bitmap", "search") if num_rows < 1 << 32 else ("search",):
            directory = directory_of(method, world, n, num_rows, world * n, DEVICE)
            every = [random_lists(num_rows, world, n, seed) for seed in range(1 if INTERPRETED else 4)]
            packed, *later = [pack([ids.tolist() for ids in lists], n).to(DEVICE) for lists in every]
            cleared_and_built(directory, packed)
            check(directory, packed, every[0])
            if not INTERPRETED:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    cleared_and_built(directory, packed)
                for fresh, lists in zip(later, every[1:], strict=True):
                    packed.copy_(fresh)
                    graph.replay()
                    check(directory, packed, lists)
            done.append(f"{method}: {num_rows} rows, {world} lists")
    return done


if __name__ == "__main__":
    print(json.dumps({"check": "matches_torch", "ok": True, "note": matches_torch()}))
