# SPDX-License-Identifier: Apache-2.0
"""All-to-all with parts of one size: LL, direct stores, and puts between nodes."""

from typing import TYPE_CHECKING

from tdcoll.collectives import lazily

if TYPE_CHECKING:
    from tdcoll.collectives.all_to_all.op import all_to_all, all_to_all_single

__all__ = ["all_to_all", "all_to_all_single"]

if not TYPE_CHECKING:
    __getattr__ = lazily(__name__, op=__all__)
