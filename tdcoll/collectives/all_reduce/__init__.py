# SPDX-License-Identifier: Apache-2.0
"""All-reduce: one-shot and two-shot by words without signals, two stages by stores, and by puts."""

from typing import TYPE_CHECKING

from tdcoll.collectives import lazily

if TYPE_CHECKING:
    from tdcoll.collectives.all_reduce.op import all_reduce, all_reduce_

__all__ = ["all_reduce", "all_reduce_"]

if not TYPE_CHECKING:
    __getattr__ = lazily(__name__, op=__all__)
