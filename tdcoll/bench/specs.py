# SPDX-License-Identifier: Apache-2.0
"""The dense collectives as facts, from which `bench`, `tune` and `report` derive whatever differs between them.

Pure: it imports neither torch nor Triton.
"""

from __future__ import annotations

import pkgutil
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["IN_PLACE", "SPECS", "Spec"]

IN_PLACE = "in-place"
"""The name of calls in place, where ``--algorithms`` takes one and in rows."""

_ALIGNMENT = 128
"""Bytes, to a multiple of which an epoch is cut."""

Segments = Literal[1, "W"]
"""One segment, or one for each of the W ranks."""


@dataclass(frozen=True)
class Spec:
    """A dense collective.

    Attributes:
        name: its public function in `tdcoll`: ``(tensor, context, out, [op,] algorithm)``.
        segments: of a rank's input and of its result. Sizes are bytes of one segment.
        reduces: whether a segment of the result is the reduction of a segment of every rank. Otherwise the result is
            their concatenation.
        torch: its function in `torch.distributed`.
        host: where its host side is, ``"module:name"``.
        in_place: its function in place in `tdcoll`, if it has one: ``(tensor, context, [op,] algorithm)``.
        in_heap: that function takes symmetric memory, and tuning tables have sections for it.
        epoch: segments that a context has to hold so that a call is one epoch on any topology.
    """

    name: str
    segments: tuple[Segments, Segments]
    reduces: bool
    torch: str
    host: str
    in_place: str | None = None
    in_heap: bool = False
    epoch: int = 1

    @property
    def title(self) -> str:
        """The name as a heading has it: ``"All-gather"``."""
        return self.name.replace("_", "-").capitalize()

    @property
    def one_tensor(self) -> bool:
        """Whether the result is as large as the input, in which case torch.distributed's function is in place."""
        return self.segments == (1, 1)

    @property
    def tuned_dtype(self) -> str:
        """The name of the dtype that tables are made with: data that is not reduced is moved as bytes."""
        return "bfloat16" if self.reduces else "uint8"

    def collective(self) -> Any:
        """Import and return the host side."""
        return pkgutil.resolve_name(self.host)

    def extents(self, nbytes: int, world: int) -> tuple[int, int]:
        """Return the bytes of a rank's input and of its result, for segments of ``nbytes``."""
        given, result = (nbytes * (world if count == "W" else 1) for count in self.segments)
        return given, result

    def sent_bytes(self, nbytes: int, world: int) -> float:
        """Return the bytes that each rank at least sends, and receives: those of nccl-tests' bus bandwidth."""
        return (world - 1) * nbytes * (2 / world if self.one_tensor else 1)

    def context_bytes(self, nbytes: int) -> int:
        """Return the ``max_bytes_per_rank`` of a context in which a call is one epoch."""
        return self.epoch * -(-nbytes // _ALIGNMENT) * _ALIGNMENT


SPECS = {
    spec.name: spec
    for spec in (
        Spec(
            name="all_gather",
            segments=(1, "W"),
            reduces=False,
            torch="all_gather_into_tensor",
            host="tdcoll.collectives.all_gather.op:ALL_GATHER",
            in_place="all_gather_in_place",
            in_heap=True,
        ),
        Spec(
            name="all_reduce",
            segments=(1, 1),
            reduces=True,
            torch="all_reduce",
            host="tdcoll.collectives.all_reduce.algorithms:ALL_REDUCE",
            in_place="all_reduce_",
            epoch=3,
        ),
        Spec(
            name="reduce_scatter",
            segments=("W", 1),
            reduces=True,
            torch="reduce_scatter_tensor",
            host="tdcoll.collectives.reduce_scatter.algorithms:REDUCE_SCATTER",
            epoch=2,
        ),
    )
}
"""By name."""
