# SPDX-License-Identifier: Apache-2.0
"""How dense collectives are called and how many bytes they move, derived from their ``SPEC``."""

from __future__ import annotations

from dataclasses import dataclass

from tdcoll.base.limits import COLLECTIVES
from tdcoll.calls.collective import spec_of
from tdcoll.calls.spec import Collective

_ALIGNMENT = 128
"""An epoch is cut to a multiple of so many bytes."""


@dataclass(frozen=True)
class DenseCall:
    """The calls of a dense collective. Sizes are bytes of one segment.

    Attributes:
        spec: the collective.
    """

    spec: Collective

    @property
    def name(self) -> str:
        """The collective's name, as ``"all_gather"``."""
        return self.spec.name

    @property
    def is_single_tensor(self) -> bool:
        """True if input and result have one segment each: torch.distributed's call is in place."""
        return self.spec.segments == (1, 1)

    @property
    def in_place_name(self) -> str | None:
        """The name of the function in `tdcoll` that works in place; None if there is none.

        It takes ``(tensor, [op,] *, ctx, algorithm)``. If the spec's ``in_place`` is true, the
        tensor is in symmetric memory, and tuning tables have sections for such calls.
        """
        if self.spec.in_place or self.is_single_tensor:
            return f"{self.name}_"
        return None

    @property
    def tuned_dtype(self) -> str:
        """The dtype that tuning tables are made with: bytes if the collective doesn't reduce."""
        return "bfloat16" if self.spec.reduces else "uint8"

    def sizes(self, nbytes: int, world: int) -> tuple[int, int]:
        """Return the bytes of a rank's input and of its result, for segments of ``nbytes``."""
        given = nbytes * world if self.spec.scatters else nbytes
        result = nbytes * world if self.spec.gathers else nbytes
        return given, result

    def sent_bytes(self, nbytes: int, world: int) -> float:
        """Return the lower bound of the bytes that each rank sends and receives.

        nccl-tests' bus bandwidth counts them.
        """
        if self.spec.rooted:
            return nbytes
        if self.is_single_tensor:
            return (world - 1) * nbytes * 2 / world
        return (world - 1) * nbytes

    def context_bytes(self, nbytes: int, world: int) -> int:
        """Return the ``max_bytes_per_rank`` of a context on which a call is one epoch."""
        aligned = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        return self.spec.capacity(aligned, world)


DENSE_CALLS = {name: DenseCall(spec_of(name)) for name in COLLECTIVES}
"""The dense collectives by name."""
