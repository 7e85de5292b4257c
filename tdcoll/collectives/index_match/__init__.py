# SPDX-License-Identifier: Apache-2.0
"""Index matching: which of W sorted lists hold an id, and at which place."""

from typing import TYPE_CHECKING

from tdcoll.collectives import lazily

if TYPE_CHECKING:
    from tdcoll.collectives.index_match.op import Directory, match_indices

__all__ = ["Directory", "match_indices"]

if not TYPE_CHECKING:
    __getattr__ = lazily(__name__, op=__all__)
