# SPDX-License-Identifier: Apache-2.0
"""Reduce-scatter: words that need no signal, direct stores, and puts; one stage."""

from typing import TYPE_CHECKING

from tdcoll.collectives import lazily

if TYPE_CHECKING:
    from tdcoll.collectives.reduce_scatter.op import reduce_scatter, reduce_scatter_tensor

__all__ = ["reduce_scatter", "reduce_scatter_tensor"]

if not TYPE_CHECKING:
    __getattr__ = lazily(__name__, op=__all__)
