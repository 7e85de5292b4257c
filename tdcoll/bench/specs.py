# SPDX-License-Identifier: Apache-2.0
"""The dense collectives for `bench`, `tune` and `report`, derived from the ``SPEC`` of each."""

from __future__ import annotations

from dataclasses import dataclass

from tdcoll.collectives._host.call import spec_of
from tdcoll.collectives._host.spec import WORLD, Collective
from tdcoll.limits import COLLECTIVES

__all__ = ["SPECS", "Spec"]

_ALIGNMENT = 128
"""Bytes, to a multiple of which an epoch is cut."""


@dataclass(frozen=True)
class Spec:
    """A dense collective. Sizes are bytes of one segment.

    Attributes:
        collective: its ``SPEC``.
    """

    collective: Collective

    @property
    def name(self) -> str:
        """The name of its public function in `tdcoll`: ``(tensor, [op,] *, out, ctx, algorithm)``."""
        return self.collective.name

    @property
    def reduces(self) -> bool:
        """Whether a segment of the result is the reduction of a segment of every rank, or their concatenation."""
        return self.collective.reduces

    @property
    def torch(self) -> str:
        """The name of its function in `torch.distributed`."""
        return self.collective.torch

    @property
    def title(self) -> str:
        """The name as a heading has it: ``"All-gather"``."""
        return self.name.replace("_", "-").capitalize()

    @property
    def one_tensor(self) -> bool:
        """Whether torch.distributed's function is in place, because input and result have one segment each."""
        return self.collective.segments == (1, 1)

    @property
    def in_place(self) -> str | None:
        """The name of its function in place in `tdcoll`, if it has one: ``(tensor, [op,] *, ctx, algorithm)``."""
        return f"{self.name}_" if self.in_heap or self.one_tensor else None

    @property
    def in_heap(self) -> bool:
        """Whether that function takes symmetric memory; tuning tables then have sections for it."""
        return self.collective.in_place

    @property
    def segment_of_each(self) -> tuple[bool, bool]:
        """Whether a rank's input has a segment for each rank, and whether its result has one of each."""
        given, result = (count == WORLD for count in self.collective.segments)
        return given, result

    @property
    def tuned_dtype(self) -> str:
        """The dtype that tables are made with; bytes if the collective doesn't reduce."""
        return "bfloat16" if self.reduces else "uint8"

    def extents(self, nbytes: int, world: int) -> tuple[int, int]:
        """Return the bytes of a rank's input and of its result, for segments of ``nbytes``."""
        given, result = (nbytes * (world if each else 1) for each in self.segment_of_each)
        return given, result

    def sent_bytes(self, nbytes: int, world: int) -> float:
        """Return the lower bound of the bytes that each rank sends and receives, as in nccl-tests' bus bandwidth."""
        return (world - 1) * nbytes * (2 / world if self.one_tensor else 1)

    def context_bytes(self, nbytes: int, world: int) -> int:
        """Return the ``max_bytes_per_rank`` of a context on which a call is one epoch."""
        return self.collective.capacity(-(-nbytes // _ALIGNMENT) * _ALIGNMENT, world)


SPECS = {name: Spec(spec_of(name)) for name in COLLECTIVES}
"""By name."""
