# SPDX-License-Identifier: Apache-2.0
"""Count the words that docs/style.md is about: ``python docs/words.py [--list]`` prints counts, or
the sentences.

Looks at pages and tutorials, and at docstrings and comments of the package. Code blocks, tables,
headings and names in backticks don't count.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

OPENINGS = {"What or Which": r"(What|Which|Whoever|Whatever)\b", "So": r"So\b"}
"""Patterns that a sentence shouldn't open with."""

WORDS = {"nobody, whoever, everybody": r"\b(nobody|whoever|everybody)\b"}
"""Patterns that a sentence shouldn't contain."""

CONNECTIVES = r"\b(if|when|because|for example|instead)\b"
"""Words that connect facts."""


def of_page(text: str) -> str:
    """Return the prose of a Markdown page; list items are paragraphs."""
    text = re.sub(r"^ *```.*?^ *```|<!--.*?-->", "\n\n", text, flags=re.M | re.S)
    text = re.sub(r"^(\|.*|#.*|!\[.*)$", "\n", text, flags=re.M)
    text = re.sub(r"!?\[([^]]*)\]\([^)]*\)", r"\1", text)
    return re.sub(r"^ *(?:[-*]|\d+\.) ", "\n", text, flags=re.M)


def of_code(text: str) -> str:
    """Return the docstrings of a Python file, and its comments, of which lines that follow each
    other are one text."""
    parts = []
    for node in ast.walk(ast.parse(text)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            found = re.sub(r"::\n\n(?:(?: +.*)?\n)+", "\n\n", node.value.value + "\n")
            found = re.sub(r"^ *(?:Args|Returns|Raises|Attributes):$", "\n", found, flags=re.M)
            found = re.sub(r"^[=-]{3,}$", "\n", found, flags=re.M)
            parts.append(re.sub(r"^ *(?:[-*] |\d+\. |\w+(?:, \w+)*: )", "\n\n", found, flags=re.M))
    last = -2
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and not re.match(
            r"# (?:SPDX|type:|noqa|%%|-{3,}|fmt:|ruff)", token.string
        ):
            line, comment = token.start[0], token.string.lstrip("# ")
            joined = line == last + 1 and token.line.lstrip().startswith("#")
            if joined and parts:
                parts[-1] += f"\n{comment}"
            else:
                parts.append(comment)
            last = line
    return "\n\n".join(parts)


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of at least four words."""
    for paragraph in re.split(r"\n\s*\n", text):
        flat = re.sub(r"\s+", " ", re.sub(r"``?[^`]*``?", "X", paragraph)).strip()
        for sentence in re.split(r"(?<=[.!?:])[\")*]* (?=[\"(*]*[A-Z])", flat):
            if len(sentence.split()) >= 4:
                yield sentence


def files() -> list[Path]:
    """Return all files whose texts count."""
    pages = [
        *ROOT.glob("*.md"),
        *(page for page in ROOT.glob("docs/**/*.md") if page.name != "functions.md"),
    ]
    code = [*(ROOT / "tutorials").glob("*.py"), *(ROOT / "tdcoll").rglob("*.py")]
    return sorted([*pages, *code])


def found() -> dict[str, list[str]]:
    """Return the sentences of each kind, with their files, and all sentences under ""."""
    kinds: dict[str, list[str]] = {name: [] for name in ("", *OPENINGS, *WORDS, "connectives")}
    for file in files():
        text = file.read_text(encoding="utf-8")
        for sentence in sentences(of_code(text) if file.suffix == ".py" else of_page(text)):
            said = f"{file.relative_to(ROOT)}: {sentence}"
            bare = sentence.lstrip('"(*')
            kinds[""].append(said)
            for name, pattern in OPENINGS.items():
                if re.match(pattern, bare):
                    kinds[name].append(said)
            for name, pattern in WORDS.items():
                if re.search(pattern, sentence, re.I):
                    kinds[name].append(said)
            if re.search(CONNECTIVES, sentence, re.I):
                kinds["connectives"].append(said)
    return kinds


def main() -> None:
    """Print the counts."""
    kinds = found()
    total = len(kinds[""])
    print(
        f"{total} sentences; with if, when, because, for example, instead: {len(kinds['connectives']) / total:.1%}"
    )
    for name in (*OPENINGS, *WORDS):
        print(f"{name}: {len(kinds[name])}")
        if "--list" in sys.argv[1:]:
            print(*(f"  {said}" for said in kinds[name]), sep="\n")


if __name__ == "__main__":
    main()
