# SPDX-License-Identifier: Apache-2.0
"""Reductions on one process, for tests: the result that every algorithm must give, to the bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from tdcoll.primitives.reduce import ACCUMULATORS, check_operation

_COMBINE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "mean": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "prod": torch.mul,
}


def reduce_parts(
    parts: Sequence[torch.Tensor],
    nodes: Sequence[int],
    op: str = "sum",
    epilogue: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """``world`` times ``[n, ...] -> [n, ...]``, with the association that dense collectives
    document.

    The accumulator is fp32 for fp8, fp16, bf16 and fp32, and the dtype itself otherwise; integers
    wrap. Parts are combined in rank order inside each node, and the results of the nodes in node
    order. A mean is the sum divided once by ``world``. The result is rounded once; a -0.0 becomes
    +0.0, and what is too large for e4m3fn its largest number.

    Args:
        nodes: the node of each rank, as in :attr:`Topology.nodes`.
        op: ``"sum"``, ``"mean"`` (floating point only), ``"max"``, ``"min"`` (both propagate NaN)
            or ``"prod"``.
        epilogue: what is done with the result before it is rounded.
    """
    dtype = parts[0].dtype
    check_operation(op, dtype)
    combine = _COMBINE[op]
    of_nodes: dict[int, torch.Tensor] = {}
    for node, part in zip(nodes, parts, strict=True):
        part = part.to(ACCUMULATORS[dtype])
        of_nodes[node] = combine(of_nodes[node], part) if node in of_nodes else part
    total, *others = (of_nodes[node] for node in sorted(of_nodes))
    for other in others:
        total = combine(total, other)
    if op == "mean":
        # by a tensor: by a number, a GPU multiplies
        total = total / torch.full_like(total, len(parts))
    if epilogue is not None:
        total = epilogue(total)
    if not dtype.is_floating_point:
        return total.to(dtype, copy=True)
    if dtype == torch.float8_e4m3fn:  # PyTorch before 2.12 makes NaN of larger numbers
        limit = torch.finfo(dtype).max
        total = total.clamp(-limit, limit)
    return (total.to(dtype).to(total.dtype) + 0.0).to(dtype)
