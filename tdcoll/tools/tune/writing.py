# SPDX-License-Identifier: Apache-2.0
"""The table's file of the commands that tune."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton

import tdcoll
from tdcoll.calls.tuning import Section, Table
from tdcoll.calls.tuning.source import architectures
from tdcoll.tools.measure.benchmark import Show
from tdcoll.tools.measure.provenance import command_line
from tdcoll.tools.measure.results import Row, write_whole
from tdcoll.tools.options import JobParser


def read_output(parser: JobParser, output: Path) -> None:
    """End the process with status 2 if the file exists and is no table."""
    try:
        if output.exists():
            Table.load(output)
    except ValueError as error:
        parser.error(f"-o: {error}")


def source_of(name: str, arguments: Sequence[str], owner: Any) -> str:
    """Return the ``source`` of sections: date, versions and command.

    Args:
        owner: The runtime of the job.
    """
    today = datetime.now(timezone.utc).date().isoformat()
    versions = ", ".join(
        [
            f"tdcoll {tdcoll.__version__}",
            f"PyTorch {torch.__version__}",
            f"Triton {triton.__version__}",
        ]
    )
    return (
        f"{today}, {versions}: {command_line(name, arguments, owner.world_size, owner.simulated)}"
    )


def saving(
    show: Show,
    output: Path,
    ranks: Any,
    sections: Callable[[Sequence[Row], str], Sequence[Section]],
) -> Show:
    """Return what shows rows, and then puts the sections of all rows so far into the table. Only
    rank 0 writes, and none in the simulator.

    Args:
        ranks: Of the measurement.
        sections: From rows and the name of the GPU.
    """
    rows: list[Row] = []
    owner = ranks.owner

    def show_and_save(found: Sequence[Row]) -> None:
        show(found)
        rows.extend(found)
        if owner.rank == 0 and not owner.simulated:
            save_sections(output, ranks.device, partial(sections, rows))

    return show_and_save


def save_sections(
    output: Path, device: torch.device, sections: Callable[[str], Sequence[Section]]
) -> None:
    """Put sections into the table, instead of those of the same kinds.

    Args:
        sections: From the name of the GPU.
    """
    table = Table.load(output) if output.exists() else Table(())
    table = table.with_sections(sections(architectures(device)[0]))
    write_whole(output, table.text())
