# SPDX-License-Identifier: Apache-2.0
"""Index matching on whatever kernels run on here, against torch; on a GPU also in CUDA graphs.

``python -m tests.collectives.index_match.on_device`` prints a line of JSON per check. It needs one GPU and no job;
with ``TRITON_INTERPRET=1`` it takes small sizes, and leaves graphs out.
"""

from __future__ import annotations

import json
import sys

import torch

from tdcoll.collectives.index_match import Directory, IndexMatch, kernels, match_indices, match_lists
from tdcoll.language import INTERPRETED

from .cases import SIGNATURE, pack

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


def methods(num_rows: int) -> tuple[str, ...]:
    return ("bitmap", "search") if num_rows < 1 << 32 else ("search",)


def check_match(match: IndexMatch, lists: list[torch.Tensor], max_union: int) -> None:
    """Compare with what torch says."""
    union = torch.unique(torch.cat(lists))
    known, device = union[:max_union], union.device
    assert match.size.tolist() == [union.numel()]
    assert torch.equal(match.union, torch.nn.functional.pad(known, (0, max_union - known.numel()), value=-1))
    width = max(ids.numel() for ids in lists)
    positions = torch.full((len(lists), width), -1, dtype=torch.int32, device=device)
    contributors = torch.full((max_union, len(lists)), -1, dtype=torch.int32, device=device)
    for q, ids in enumerate(lists):
        place = torch.searchsorted(union, ids.contiguous())
        fits = place < max_union
        positions[q, : ids.numel()] = torch.where(fits, place, -1)
        contributors[place[fits], q] = torch.arange(ids.numel(), dtype=torch.int32, device=device)[fits]
    assert torch.equal(match.positions, positions)
    assert torch.equal(match.contributors, contributors)


def matches_torch() -> list[str]:
    """Every answer for every id, by both methods."""
    done = []
    for num_rows, world, n in CASES:
        lists = random_lists(num_rows, world, n, seed=world)
        union = torch.unique(torch.cat(lists))
        for ids in lists:
            at = torch.searchsorted(ids, union).clamp_(max=ids.numel() - 1)
            assert torch.equal(match_indices(union, ids), torch.where(ids[at] == union, at, -1)), num_rows
        for method in methods(num_rows):
            room = union.numel() + 5
            check_match(match_lists(lists, num_rows, method, room).check(), lists, room)
            done.append(f"{method}: {num_rows} rows, {world} lists, union {union.numel()}")
    return done


def replays_a_graph() -> list[str]:
    """A captured build, replayed over lists that have changed since, an odd and an even number of times."""
    if INTERPRETED:
        return ["no graphs here"]
    done = []
    for num_rows, world, n in CASES[1:3]:
        for method in methods(num_rows):
            directory = Directory(world, n, num_rows, world * n, DEVICE, method)
            lists = pack([ids.tolist() for ids in random_lists(num_rows, world, n, seed=0)], n).to(DEVICE)
            directory.build(lists, SIGNATURE)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                directory.build(lists, SIGNATURE)
            for seed in range(1, 4):
                fresh = random_lists(num_rows, world, n, seed)
                lists.copy_(pack([ids.tolist() for ids in fresh], n))
                graph.replay()
                union = torch.unique(torch.cat(fresh))
                status = directory.status.tolist()
                assert status[kernels.UNION.value] == union.numel()
                assert not any(status[word.value] for word in (kernels.BAD_RANGE, kernels.BAD_ORDER))
                assert torch.equal(directory.union[: union.numel()], union)
            done.append(f"{method}: {num_rows} rows, {world} lists")
    return done


CHECKS = {check.__name__: check for check in (matches_torch, replays_a_graph)}


def main() -> int:
    bad = 0
    for name, check in CHECKS.items():
        try:
            line = {"check": name, "ok": True, "note": check()}
        except AssertionError as error:
            bad, line = 1, {"check": name, "ok": False, "note": str(error)}
        print(json.dumps(line), flush=True)
    return bad


if __name__ == "__main__":
    sys.exit(main())
