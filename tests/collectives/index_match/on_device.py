# SPDX-License-Identifier: Apache-2.0
"""Index matching on whatever kernels run on here, against torch; on a GPU also in CUDA graphs, and how long it takes.

``python -m tests.collectives.index_match.on_device`` prints a line of JSON per check. It needs one GPU and no job;
with ``TRITON_INTERPRET=1`` it takes small sizes, and leaves graphs and times out.
"""

from __future__ import annotations

import json
import sys

import torch

from tdcoll.collectives.index_match import Directory, kernels, match_indices, match_lists
from tdcoll.language import INTERPRETED

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
HEADER = kernels.HEADER.value

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


def matches_torch() -> list[str]:
    """Every answer for every id, by both methods."""
    done = []
    for num_rows, world, n in CASES:
        lists = random_lists(num_rows, world, n, seed=world)
        union = torch.unique(torch.cat(lists))
        size = union.numel()
        contributors = torch.stack([match_indices(union, ids) for ids in lists], dim=1)
        for q, ids in enumerate(lists):
            at = torch.searchsorted(ids, union).clamp_(max=ids.numel() - 1)
            assert torch.equal(contributors[:, q], torch.where(ids[at] == union, at, -1)), (num_rows, q)
        for method in methods(num_rows):
            match = match_lists(lists, num_rows, method, size + 5).check()
            assert match.size.tolist() == [size]
            assert torch.equal(match.union[:size], union)
            assert torch.equal(match.contributors[:size].long(), contributors)
            assert bool((match.contributors[size:] == -1).all())
            for q, ids in enumerate(lists):
                assert torch.equal(match.positions[q, : ids.numel()].long(), torch.searchsorted(union, ids))
            done.append(f"{method}: {num_rows} rows, {world} lists, union {size}")
    return done


def packed(lists: list[torch.Tensor], capacity: int) -> torch.Tensor:
    result = torch.zeros(len(lists), HEADER + capacity, dtype=torch.int64, device=DEVICE)
    for row, ids in zip(result, lists, strict=True):
        row[1], row[2] = ids.numel(), 7
        row[HEADER : HEADER + ids.numel()] = ids
    return result


def replays_a_graph() -> list[str]:
    """A captured build, replayed over lists that have changed since, an odd and an even number of times."""
    if INTERPRETED:
        return ["no graphs here"]
    done = []
    for num_rows, world, n in CASES[1:3]:
        for method in methods(num_rows):
            directory = Directory(world, n, num_rows, world * n, DEVICE, method)
            lists = packed(random_lists(num_rows, world, n, seed=0), n)
            directory.build(lists, 7)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                directory.build(lists, 7)
            for seed in range(1, 4):
                fresh = random_lists(num_rows, world, n, seed)
                lists.copy_(packed(fresh, n))
                graph.replay()
                union = torch.unique(torch.cat(fresh))
                status = directory.status.tolist()
                assert status[kernels.UNION.value] == union.numel()
                assert not any(status[word.value] for word in (kernels.BAD_RANGE, kernels.BAD_ORDER))
                assert torch.equal(directory.union[: union.numel()], union)
            done.append(f"{method}: {num_rows} rows, {world} lists")
    return done


def takes_us() -> list[str]:
    """GPU microseconds of a build, from a graph of 20 builds; the least of 10 replays."""
    if INTERPRETED:
        return ["no times here"]
    done = []
    for num_rows, world, n in CASES[1:]:
        for method in methods(num_rows):
            directory = Directory(world, n, num_rows, world * n, DEVICE, method)
            lists = packed(random_lists(num_rows, world, n, seed=0), n)
            directory.build(lists, 7)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for _ in range(20):
                    directory.build(lists, 7)
            times = []
            for _ in range(10):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                graph.replay()
                end.record()
                end.synchronize()
                times.append(begin.elapsed_time(end) * 1e3 / 20)
            done.append(f"{method}: {num_rows} rows, {world} lists of {n}: {min(times):.1f} us")
    return done


CHECKS = {check.__name__: check for check in (matches_torch, replays_a_graph, takes_us)}


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
