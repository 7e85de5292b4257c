# SPDX-License-Identifier: Apache-2.0
"""The table's file of the commands that tune."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import triton

import tdcoll
from tdcoll.calls.tuning import Section, Table
from tdcoll.calls.tuning.source import architectures
from tdcoll.tools.measure.provenance import command_line
from tdcoll.tools.measure.results import write_whole
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
