# SPDX-License-Identifier: Apache-2.0
"""All-gather: LL, direct stores, ring, 1D push, and 2D push by rails."""

from typing import TYPE_CHECKING

from tdcoll.collectives import lazily

if TYPE_CHECKING:
    from tdcoll.collectives.all_gather.op import all_gather, all_gather_in_place, all_gather_into_tensor
    from tdcoll.collectives.all_gather.spec import counted_launches, exchange_counted

__all__ = ["all_gather", "all_gather_in_place", "all_gather_into_tensor", "counted_launches"]
__all__ += ["exchange_counted"]

if not TYPE_CHECKING:
    __getattr__ = lazily(__name__, op=__all__[:3], spec=__all__[3:])
