# SPDX-License-Identifier: Apache-2.0
"""Tuning tables: the fastest algorithms of each machine. This package is pure; :mod:`.source` is
not."""

from tdcoll.calls.tuning.table import SIMULATOR, WARPS, Entry, Section, Table, shipped

__all__ = ["SIMULATOR", "WARPS", "Entry", "Section", "Table", "shipped"]
