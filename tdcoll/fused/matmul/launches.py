# SPDX-License-Identifier: Apache-2.0
"""From tensors to the grid and the arguments of a kernel's launch, by name. It decides nothing and
checks nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from tdcoll.fused.matmul.kernels_gather import Shards
from tdcoll.fused.matmul.policy import FP8_STEP, Cut
from tdcoll.fused.matmul.product import Scales, Shape, Tile, Weight
from tdcoll.primitives.epilogue import identity
from tdcoll.primitives.group import Group, Inbox
from tdcoll.primitives.lamport import Lamport
from tdcoll.primitives.reduce import triton_dtype

TWO_SLOTS = tl.constexpr(2)
"""Of an inbox of the context's own."""

_PIECES_OF_A_TILE = 128
"""Pieces that the rows of a tile may touch in one shard: one for each thread of the smallest
block."""


def tile_of(cut: Cut) -> Tile:
    """Return the tuple of constants that kernels take."""
    sizes = (cut.rows, cut.columns, cut.depth, cut.group)
    return Tile(*map(tl.constexpr, sizes))


@dataclass(frozen=True)
class Operands:
    """What all three kernels multiply, on one rank.

    Attributes:
        x: ``[rows, depth]``, contiguous.
        weight: ``[columns, depth]``, or ``[depth, columns]`` if ``depth_first``; contiguous.
        out: contiguous.
        bias: ``[columns]`` in the type of ``out``, or None.
        x_scale, weight_scale: fp32, of fp8 operands: ``[1]``, or ``[rows]`` and ``[columns]``; or
            None.
        epilogue: function of :mod:`tdcoll.primitives.epilogue`, which gets ``extra``.
        precision: of fp32 operands, ``"ieee"`` or ``"tf32"``.
    """

    x: torch.Tensor
    weight: torch.Tensor
    out: torch.Tensor
    depth_first: bool = False
    bias: torch.Tensor | None = None
    x_scale: torch.Tensor | None = None
    weight_scale: torch.Tensor | None = None
    epilogue: Callable[..., Any] = identity
    extra: tuple[Any, ...] | None = None
    precision: str = "ieee"

    @property
    def columns(self) -> int:
        """Of the weight and of the result."""
        return self.weight.shape[1 if self.depth_first else 0]

    def arguments(self, cut: Cut, rows: int) -> dict[str, Any]:
        """Return the arguments that all three kernels have; ``rows`` is what ``shape`` counts."""
        assert self.x.dtype.itemsize > 1 or cut.depth == FP8_STEP
        row_bytes = self.columns * self.out.itemsize
        return {
            "source": self.x.data_ptr(),
            "out": self.out.data_ptr(),
            "weight": Weight(
                self.weight.data_ptr(),
                _address(self.bias),
                tl.constexpr(self.depth_first),
                tl.constexpr(self.bias is not None),
            ),
            "scales": Scales(
                _address(self.x_scale),
                _step(self.x_scale),
                _address(self.weight_scale),
                _step(self.weight_scale),
                tl.constexpr(self.x_scale is not None),
            ),
            "shape": Shape(rows, self.columns, self.x.shape[1]),
            "extra": self.extra,
            "tile": tile_of(cut),
            "DTYPE": triton_dtype(self.x.dtype),
            "OUT": triton_dtype(self.out.dtype),
            "PRECISION": self.precision,
            "EPILOGUE": self.epilogue,
            "ALIGNED": self.out.data_ptr() % 16 == 0 and row_bytes % 16 == 0,
        }


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _step(scales: torch.Tensor | None) -> int:
    """Return the elements from one row's scale to the next one's."""
    return 0 if scales is None or scales.numel() == 1 else 1


def gather(
    operands: Operands,
    cut: Cut,
    group: Group,
    inbox: Inbox,
    *,
    workers: int,
    pushers: int = 0,
    piece: int,
    gathered: torch.Tensor | None = None,
    keepers: int = 0,
    whole: bool = False,
    to_self: bool = False,
    shards: Shards | None = None,
    words: int = 8192,
) -> tuple[int, dict[str, Any]]:
    """Return thread blocks and arguments of ``all_gather_matmul``.

    Args:
        workers, pushers, keepers: thread blocks of each kind.
        piece: bytes of a piece, a multiple of 16.
        shards: of a launch for which copy engines send; None: pushers send.
    """
    rows, depth = operands.x.shape
    row_bytes = depth * operands.x.itemsize
    pieces = triton.cdiv(rows * row_bytes, piece)
    assert triton.cdiv(min(rows, cut.rows) * row_bytes, piece) < _PIECES_OF_A_TILE
    more = {
        "gathered": _address(gathered),
        "inbox": inbox,
        "g": group,
        "piece": piece,
        "pieces": pieces,
        "pushers": pushers,
        "keepers": keepers,
        "shards": shards,
        "WHOLE": whole,
        "SELF": to_self or whole,
        "COPIED": shards is not None,
        "WORLD_POW2": _PIECES_OF_A_TILE,
        "WORDS": words,
    }
    return pushers + workers + keepers, operands.arguments(cut, rows) | more


def scatter(
    operands: Operands,
    cut: Cut,
    group: Group,
    inbox: Inbox,
    *,
    workers: int,
    lag: int = 1,
    slices: int = 2,
    stages: int = 2,
) -> tuple[int, dict[str, Any]]:
    """Return thread blocks and arguments of ``matmul_reduce_scatter``."""
    world = group.world.value
    more = {
        "inbox": inbox,
        "g": group,
        "lag": lag,
        "SLICES": slices,
        "STAGES": stages,
        "WORLD_POW2": triton.next_power_of_2(world),
    }
    return workers, operands.arguments(cut, operands.x.shape[0] // world) | more


def reduce(
    operands: Operands,
    cut: Cut,
    group: Group,
    inbox: Lamport,
    *,
    workers: int,
    two_shot: bool = False,
    block: int = 256,
) -> tuple[int, dict[str, Any]]:
    """Return thread blocks and arguments of ``matmul_all_reduce``."""
    more = {"inbox": inbox, "g": group, "TWO_SHOT": two_shot, "BLOCK": block}
    return workers, operands.arguments(cut, operands.x.shape[0]) | more


def local(operands: Operands, cut: Cut, *, workers: int) -> tuple[int, dict[str, Any]]:
    """Return thread blocks and arguments of ``matmul``."""
    return workers, operands.arguments(cut, operands.x.shape[0])


def finish(operands: Operands, rows: int) -> tuple[int, dict[str, Any]]:
    """Return thread blocks and arguments of ``finish``, of which ``source`` is left to the
    launch."""
    height, width = 4, 512
    arguments = operands.arguments(Cut(16, 16, FP8_STEP, 1, 4), rows)
    kept = ("source", "out", "weight", "shape", "extra", "OUT", "EPILOGUE", "ALIGNED")
    blocks = triton.cdiv(rows, height) * triton.cdiv(operands.columns, width)
    return blocks, {name: arguments[name] for name in kept} | {"ROWS": height, "COLUMNS": width}
