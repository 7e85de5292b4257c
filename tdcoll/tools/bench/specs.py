# SPDX-License-Identifier: Apache-2.0
"""The dense collectives for `bench`, `tune` and `report`, derived from the ``SPEC`` of each."""

from __future__ import annotations

from tdcoll.base.limits import COLLECTIVES
from tdcoll.calls.collective import spec_of
from tdcoll.calls.spec import Collective

_ALIGNMENT = 128
"""Bytes, to a multiple of which an epoch is cut."""


class Spec(Collective):
    """A dense collective. Sizes are bytes of one segment."""

    @property
    def one_tensor(self) -> bool:
        """True if torch.distributed's function is in place: input and result have one segment each."""
        return self.segments == (1, 1)

    @property
    def in_place_name(self) -> str | None:
        """The name of its function in place in `tdcoll`, if it has one: ``(tensor, [op,] *, ctx, algorithm)``.

        With ``in_place`` that takes symmetric memory, and tuning tables have sections for it.
        """
        return f"{self.name}_" if self.in_place or self.one_tensor else None

    @property
    def tuned_dtype(self) -> str:
        """The dtype that tables are made with; bytes if the collective doesn't reduce."""
        return "bfloat16" if self.reduces else "uint8"

    def sizes(self, nbytes: int, world: int) -> tuple[int, int]:
        """Return the bytes of a rank's input and of its result, for segments of ``nbytes``."""
        return nbytes * (world if self.scatters else 1), nbytes * (world if self.gathers else 1)

    def sent_bytes(self, nbytes: int, world: int) -> float:
        """Return the lower bound of the bytes that each rank sends and receives, as in nccl-tests' bus bandwidth."""
        return (world - 1) * nbytes * (2 / world if self.one_tensor else 1)

    def context_bytes(self, nbytes: int, world: int) -> int:
        """Return the ``max_bytes_per_rank`` of a context on which a call is one epoch."""
        return self.capacity(-(-nbytes // _ALIGNMENT) * _ALIGNMENT, world)


SPECS = {name: Spec(**vars(spec_of(name))) for name in COLLECTIVES}
"""By name."""
