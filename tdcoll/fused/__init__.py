# SPDX-License-Identifier: Apache-2.0
"""Collectives fused with the operations behind them: all-reduce + residual + RMSNorm."""

from typing import TYPE_CHECKING

from tdcoll.collectives import lazily

if TYPE_CHECKING:
    from tdcoll.fused.op import all_reduce_rms_norm

__all__ = ["all_reduce_rms_norm"]

if not TYPE_CHECKING:
    __getattr__ = lazily(__name__, op=__all__)
