# SPDX-License-Identifier: Apache-2.0
"""Index matching: which of W sorted lists hold an id, and at which place."""

from typing import TYPE_CHECKING

from tdcoll.collectives import lazily

if TYPE_CHECKING:
    from tdcoll.collectives.index_match.op import Directory, IndexMatch, match_indices, match_lists

__all__ = ["Directory", "IndexMatch", "match_indices", "match_lists"]

if not TYPE_CHECKING:
    __getattr__ = lazily(__name__, op=__all__)
