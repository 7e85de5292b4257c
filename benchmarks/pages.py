# SPDX-License-Identifier: Apache-2.0
"""Tables and pictures of results in the documentation.

A page says where a file's tables go::

    <!-- report: all-gather-4xH200 -->         all tables of docs/results/all-gather-4xH200.json
    <!-- /report -->
    <!-- report: all-gather-4xH200 brief -->   one table, of few sizes and columns
    <!-- /report -->
    <!-- report: all-gather-4xH200,all-reduce-4xH200 losses -->    the sizes at which a baseline
    <!-- /report -->                                               is faster, of one or more files
    <!-- report: all-gather-4xH200,all-reduce-4xH200 standing -->  a line for each of their tables
    <!-- /report -->
    ![...](results/all-gather-4xH200.png)      a picture of the same file

``tdcoll report --write`` fills them in.
"""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks import tables
from benchmarks.plots import plot
from benchmarks.registry import load_result
from tdcoll.tools.measure.results import write_whole

_OF_ONE_FILE = {"": tables.markdown, " brief": tables.brief_markdown}
_OF_SEVERAL = {" losses": tables.losses, " standing": tables.standing}
"""What a marker's last word requests."""

_BLOCK = re.compile(
    r"^(<!-- report: (\S+)( brief| losses| standing)? -->\n)(.*?)^<!-- /report -->$", re.M | re.S
)
_PICTURE = re.compile(r"\]\((?:docs/)?results/((?:[\w.-]+/)*[\w.-]+)\.png\)")


def _documents(root: Path) -> dict[Path, str]:
    """Return the pages of a checkout, by path."""
    if not (root / "docs/results").is_dir():
        raise ValueError(f"--write: expected a checkout of tdcoll, with docs/results, got {root}")
    paths = [root / "README.md", *sorted(root.glob("docs/*.md"))]
    return {path: path.read_text(encoding="utf-8") for path in paths}


def pages(root: Path) -> dict[Path, str]:
    """Return the pages of the checkout ``root`` that have tables, with the tables filled in.

    Raises:
        ValueError: ``root`` is no checkout, a page's markers are wrong, or a file is no result.
        OSError: a file cannot be read.
    """

    def block(found: re.Match[str]) -> str:
        marker, name, kind = found[1], found[2], found[3] or ""
        if kind in _OF_SEVERAL:
            files = [root / f"docs/results/{each}.json" for each in name.split(",")]
            made = _OF_SEVERAL[kind]([load_result(file) for file in files])
        else:
            made = _OF_ONE_FILE[kind](*load_result(root / f"docs/results/{name}.json"))
        return f"{marker}{made}<!-- /report -->"

    filled = {}
    for page, text in _documents(root).items():
        begins = text.count("<!-- report:")
        ends = text.count("<!-- /report")
        if not begins == ends == len(_BLOCK.findall(text)):
            raise ValueError(
                f"{page}: expected each <!-- report: NAME --> with a <!-- /report --> after it, on "
                "lines of their own"
            )
        if begins:
            filled[page] = _BLOCK.sub(block, text)
    return filled


def pictures(root: Path) -> list[str]:
    """Return the names, as in markers, of the results of which a page shows a picture."""
    names = []
    for text in _documents(root).values():
        names += _PICTURE.findall(text)
    return list(dict.fromkeys(names))


def write(root: Path) -> None:
    """Write the tables and pictures of a checkout's pages from its ``docs/results``.

    Raises:
        ValueError, OSError: as for :func:`pages`.
    """
    for page, text in pages(root).items():
        write_whole(page, text)
    results = root / "docs/results"
    for name in pictures(root):
        head, rows = load_result(results / f"{name}.json")
        plot(head, rows, results / f"{name}.png")
