# SPDX-License-Identifier: Apache-2.0
"""Index matching: which of W sorted lists hold an id, and at which place."""

from tdcoll.collectives.index_match.op import Directory, IndexMatch, match_indices, match_lists
from tdcoll.collectives.index_match.policy import choose_method

__all__ = ["Directory", "IndexMatch", "choose_method", "match_indices", "match_lists"]
