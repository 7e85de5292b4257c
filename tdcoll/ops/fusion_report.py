# SPDX-License-Identifier: Apache-2.0
"""The patterns that :func:`tdcoll.ops.fuse` has replaced in a graph, and those that it has left, with
the reason."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from torch import fx

_log = logging.getLogger("tdcoll")


class LeftAsItIs(Exception):
    """A pattern was seen that can't be replaced. The message is the reason."""


class FusionReport:
    """Counts the patterns of one graph.

    Attributes:
        fused: Number of patterns, by the operator that replaces them.
        left: ``(pattern, name of its last node, reason)`` of each pattern that was seen and left.
    """

    def __init__(self) -> None:
        self.fused: Counter[str] = Counter()
        self.left: list[tuple[str, str, str]] = []

    @contextmanager
    def looking_for(self, pattern: str, node: fx.Node) -> Iterator[None]:
        """Note the pattern as left if the block raises :class:`LeftAsItIs`."""
        try:
            yield
        except LeftAsItIs as reason:
            self.left.append((pattern, node.name, str(reason)))

    def log(self) -> None:
        """Log a line if there is something to say."""
        if not self.fused and not self.left:
            return
        fused = ", ".join(f"{count} x {name}" for name, count in sorted(self.fused.items()))
        left = "".join(
            f"; left {pattern} at {node}: {reason}" for pattern, node, reason in self.left
        )
        _log.info("tdcoll.ops: fused %s%s", fused or "nothing", left)
