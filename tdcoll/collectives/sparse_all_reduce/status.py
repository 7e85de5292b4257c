# SPDX-License-Identifier: Apache-2.0
"""The verdict of all ranks' lists on a call, on the host. Every rank has the same lists and raises the same error."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tdcoll.collectives.index_match import kernels as match
from tdcoll.errors import RankMismatchError

__all__ = ["Status"]


@dataclass(frozen=True)
class Status:
    """The words of a directory's status, by their names in ``index_match/kernels.py``."""

    words: list[int]

    def __getitem__(self, word: Any) -> int:
        return self.words[word.value]

    def raise_if_wrong(self, operation: str, rank: int, num_rows: int) -> None:
        """Raise, on group rank ``rank``, if ranks disagree or indices are not as they should be."""
        if self[match.BAD_SIGNATURE]:
            raise RankMismatchError(
                f"{operation}: ranks pass different shapes, dtypes, operations or algorithms (rank "
                f"{self[match.BAD_SIGNATURE] - 1} differs from rank {rank}); TDCOLL_DEBUG=1 says which"
            )
        if self[match.BAD_ORDER]:
            raise ValueError(
                f"{operation}: indices of rank {self[match.BAD_ORDER] - 1} are said to be coalesced, and are not "
                "ascending or not different"
            )
        if self[match.BAD_RANGE]:
            raise ValueError(
                f"{operation}: indices of rank {self[match.BAD_RANGE] - 1} must be in 0..{num_rows - 1}, the rows of "
                "the tensor"
            )
