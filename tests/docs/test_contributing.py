# SPDX-License-Identifier: Apache-2.0
"""CONTRIBUTING.md names files and concepts that exist, and its counts are right."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
FOLDERS = ("", "tdcoll", "tests", "docs", "tdcoll/primitives", "tdcoll/calls", "tdcoll/simulator")
"""What names of files may be relative to."""

MADE = {"build/site", "dist", ".venv"}
"""What a checkout doesn't have."""

NAMED = sorted(set(re.findall(r"`([\w.-]+(?:/[\w.-]+)*/?)`", TEXT)))
FILES = [name for name in NAMED if re.search(r"(\.(py|md|toml|sh|txt|json)|/)$", name)]
LINKS = sorted(set(re.findall(r"\]\(([^)#:\s]+)(?:#[\w-]+)?\)", TEXT)))
CONCEPTS = re.findall(r"^\| (.*?) \| (.*?) \| .* \|$", TEXT.partition("| concept |")[2], re.M)


def lines_of_code(file: Path) -> int:
    """Lines that are no comment, docstring or blank."""
    text = file.read_text(encoding="utf-8")
    strings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            strings |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return sum(
        bool(line.strip()) and not line.strip().startswith("#") and number not in strings
        for number, line in enumerate(text.splitlines(), 1)
    )


def test_there_are_files_and_links() -> None:
    assert len(FILES) > 20
    assert len(LINKS) > 15


@pytest.mark.parametrize("name", FILES)
def test_a_named_file_exists(name: str) -> None:
    found = [folder for folder in FOLDERS if (ROOT / folder / name).exists()]
    anywhere = any(ROOT.glob(f"t*/**/{name}")) if "/" not in name.rstrip("/") else False
    assert found or anywhere or name.rstrip("/") in MADE


@pytest.mark.parametrize("link", LINKS)
def test_a_link_leads_to_a_file(link: str) -> None:
    assert (ROOT / link).exists()


def test_concepts_are_few_and_are_where_the_table_says() -> None:
    count = 0
    for names, places in CONCEPTS:
        count += len(names.split(", "))
        text = "".join(
            (ROOT / link).read_text(encoding="utf-8")
            for link in re.findall(r"\]\(([^)]*)\)", places)
        )
        for name in re.findall(r"`(\w+)`", names):
            assert re.search(rf"^(class|def) {name}\b", text, re.M), name
    assert count == int(re.findall(r"These (\d+) concepts", TEXT)[0]) <= 24


def test_the_example_is_as_short_as_the_text_says() -> None:
    folder = ROOT / "tdcoll" / "collectives" / "all_to_all"
    code = sum(lines_of_code(file) for file in folder.glob("*.py"))
    (told,) = re.findall(r"is the example: (\d+) lines of code", TEXT)
    assert abs(code - int(told)) <= 10
