# SPDX-License-Identifier: Apache-2.0
"""Fill in the tables and draw the pictures of README and docs from docs/results: ``python docs/fill_tables.py``.

A page of the documentation says where a file's tables go::

    <!-- report: all-gather-4xH200 -->         all tables of docs/results/all-gather-4xH200.json
    <!-- /report -->
    <!-- report: all-gather-4xH200 brief -->   one table, of few sizes and columns
    <!-- /report -->
    <!-- report: all-gather-4xH200 losses -->  a list of the sizes at which a baseline is faster
    <!-- /report -->
    ![...](results/all-gather-4xH200.png)      a picture of the same file
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tdcoll.tools.bench import report
from tdcoll.tools.bench import rows as files
from tdcoll.tools.bench.arithmetic import distinct
from tdcoll.tools.bench.plots import plot
from tdcoll.tools.bench.rows import Row


def _result(root: Path, name: str) -> tuple[dict[str, Any], list[Row]]:
    return files.load(root / f"docs/results/{name}.json")


_BLOCK = re.compile(r"^(<!-- report: (\S+)( brief| losses)? -->\n)(.*?)^<!-- /report -->$", re.M | re.S)
_PICTURE = re.compile(r"\]\((?:docs/)?results/([\w.-]+)\.png\)")


def _documents(root: Path) -> dict[Path, str]:
    """Return the pages of a checkout, by path."""
    if not (root / "docs/results").is_dir():
        raise ValueError(f"expected a checkout of tdcoll, with docs/results, got {root}")
    return {page: page.read_text(encoding="utf-8") for page in (root / "README.md", *sorted(root.glob("docs/*.md")))}


def pages(root: Path) -> dict[Path, str]:
    """Return the pages of the checkout ``root`` that have tables, with the tables filled in.

    Raises:
        ValueError: ``root`` is no checkout, a page's markers are wrong, or a file is no result.
        OSError: a file cannot be read.
    """

    def block(found: re.Match[str]) -> str:
        head, rows = _result(root, found[2])
        text = report.losses(head, rows) if found[3] == " losses" else report.markdown(head, rows, brief=bool(found[3]))
        return f"{found[1]}{text}<!-- /report -->"

    made = {}
    for page, text in _documents(root).items():
        markers = text.count("<!-- report:")
        if not markers == text.count("<!-- /report") == len(_BLOCK.findall(text)):
            raise ValueError(
                f"{page}: expected each <!-- report: NAME --> with a <!-- /report --> after it, on lines of their own"
            )
        if markers:
            made[page] = _BLOCK.sub(block, text)
    return made


def pictures(root: Path) -> list[str]:
    """Return the names, as in markers, of the results of which a page shows a picture."""
    return distinct([name for text in _documents(root).values() for name in _PICTURE.findall(text)])


def write(root: Path) -> None:
    """Fill in the tables of all pages, and draw their pictures."""
    for page, text in pages(root).items():
        files.write_whole(page, text)
    for name in pictures(root):
        head, rows = _result(root, name)
        plot(head, rows, root / f"docs/results/{name}.png")


if __name__ == "__main__":
    write(Path(__file__).resolve().parent.parent)
