# SPDX-License-Identifier: Apache-2.0
"""What ranks give to calls of dense collectives, and what has to come of it.

Everything follows from the collective's spec: how many segments tensor and result have, and what is
reduced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from tdcoll.base.limits import COLLECTIVES
from tdcoll.calls.collective import spec_of
from tdcoll.calls.spec import Collective
from tdcoll.collectives.reduce_scatter.reference import reduce_parts
from tdcoll.runtime.topology import Topology

SPECS = tuple(map(spec_of, COLLECTIVES))


def values(owner: int, call: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """``[count]``: numbers whose sums show their order, and when an operand is of another rank or
    call."""
    generator = torch.Generator().manual_seed(1 + owner + 1000 * call)
    if dtype.is_floating_point:
        scale = torch.exp2(torch.randint(-4, 5, (count,), generator=generator).double())
        numbers = torch.randn(count, generator=generator, dtype=torch.float64)
        return (numbers * scale).to(dtype)
    limits = torch.iinfo(dtype)
    return torch.randint(limits.min, limits.max, (count,), generator=generator, dtype=dtype)


def pattern(owner: int, call: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """``[count]``: bytes that name rank, call and index; of booleans one bit of that."""
    index = torch.arange(count * dtype.itemsize)
    distinct_bytes = 2 if dtype == torch.bool else 251
    found = (index * 7 + (index >> 8) * 3 + owner * 41 + call * 89) % distinct_bytes
    return found.to(torch.uint8).view(dtype)


def special(owner: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """``[count]``: infinities, NaN, zeros of both signs, subnormal and large numbers; in all pairs
    on two ranks."""
    limits = torch.finfo(dtype)
    numbers = [0.0, -0.0, 1.0, -1.0, limits.max, -limits.max, limits.tiny]
    numbers += [float("inf"), float("nan")]
    numbers.append(-limits.tiny * limits.eps)  # the smallest: half of it is rounded to -0.0
    numbers += [0.0, 0.0, 0.0, -0.0]  # of 8 bits: a word that no sender may send as it is
    index = torch.arange(count)
    chosen = index if owner % 2 == 0 else index // len(numbers)
    return torch.tensor(numbers, dtype=torch.float64).to(dtype)[chosen % len(numbers)]


def reference(
    spec: Collective,
    tensors: Sequence[torch.Tensor],
    topology: Topology,
    op: str = "sum",
    root: int = 0,
    epilogue: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """``world`` times what a rank gives ``->`` what the rank of ``topology`` has to get; both are
    flat."""
    parts = [tensors[root]] if spec.rooted else list(tensors)
    if spec.scatters:
        parts = [tensor.view(topology.world_size, -1)[topology.rank] for tensor in tensors]
    if spec.reduces:
        return reduce_parts(parts, topology.nodes, op, epilogue)
    return torch.cat(parts)


def different(got: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Count the elements whose bits differ; any NaN is the same as any other."""
    shapes = f"{got.dtype} {got.shape}, not {wanted.shape}"
    assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape), shapes
    got = got.reshape(-1)
    wanted = wanted.reshape(-1)
    got_bytes = got.view(torch.uint8).view(-1, got.itemsize)
    wrong = (got_bytes != wanted.view(torch.uint8).view(-1, wanted.itemsize)).any(1)
    if got.dtype.is_floating_point:
        if got.itemsize == 1:  # PyTorch cannot look for NaN in numbers of 8 bits
            got = got.float()
            wanted = wanted.float()
        wrong &= ~(got.isnan() & wanted.isnan())
    return wrong.sum()
