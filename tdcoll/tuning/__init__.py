# SPDX-License-Identifier: Apache-2.0
"""Tuning tables: which algorithm was the fastest on which machine. This package is pure; :mod:`.agreement` is not."""

from tdcoll.tuning.table import HANDED_OVER, OPERATIONS, SIMULATOR, WARPS, Entry, Section, Table, shipped

__all__ = ["HANDED_OVER", "OPERATIONS", "SIMULATOR", "WARPS", "Entry", "Section", "Table", "shipped"]
