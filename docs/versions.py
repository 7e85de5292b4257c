# SPDX-License-Identifier: Apache-2.0
"""Write the tables of docs/versions.md from docs/results/versions.json. A test compares.

The results are made by ``tests/versions/matrix.py``.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
PAGE = DOCS / "versions.md"
RESULTS = DOCS / "results" / "versions.json"


def table(heads: list[str], rows: list[list[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def outcome(found: dict[str, Any] | None) -> str:
    """What became of a run of tests, in words."""
    if found is None:
        return "not run"
    passed = f"{found.get('passed', 0):,} passed"
    if not found["failures"]:
        return passed
    return f"{passed}, {len(found['failures'])} failed"


def rows_of(results: dict[str, Any]) -> str:
    """A row for each PyTorch: what was run with it, and what came out."""
    versions = sorted({version for row in results.values() for version in row.get("compile", {})})
    heads = [
        "PyTorch",
        "Triton",
        "NVSHMEM that it brings",
        "first tier",
        *(f"kernels, NVSHMEM {v}" for v in versions),
    ]
    rows = []
    for name in sorted(results):
        row = results[name]
        brought = row.get("resolve", {})
        cells = [row["torch"], row["triton"]]
        cells.append(brought.get("nvidia-nvshmem-cu13", brought.get("error", "not resolved")))
        cells.append(outcome(row.get("tests")))
        cells += [outcome(row.get("compile", {}).get(version)) for version in versions]
        rows.append(cells)
    return table(heads, rows)


def failures_of(results: dict[str, Any]) -> str:
    """A line for each test that failed."""
    lines = []
    for name in sorted(results):
        row = results[name]
        runs = {"first tier": row.get("tests")}
        runs |= {
            f"kernels with NVSHMEM {version}": found
            for version, found in row.get("compile", {}).items()
        }
        for what, found in runs.items():
            lines += [f"- {name}, {what}: `{test}`\n" for test in (found or {}).get("failures", [])]
    return "".join(lines) or "No test failed.\n"


def kernels_of(results: dict[str, Any]) -> str:
    """Registers and spilled bytes of kernels that put, for each Triton and NVSHMEM that were
    run."""
    columns = [
        (f"Triton {results[name]['triton']}, {version}", found["registers and spilled bytes"])
        for name in sorted(results)
        for version, found in sorted(results[name].get("compile", {}).items())
        if found["registers and spilled bytes"]
    ]
    kernels = sorted(
        {kernel for _, needed in columns for kernel in needed if kernel.endswith("sm_90")}
    )
    rows = []
    for kernel in kernels:
        cells = [kernel.partition(", ")[0]]
        cells += [
            ", ".join(map(str, needed[kernel])) if kernel in needed else "" for _, needed in columns
        ]
        rows.append(cells)
    return table(["kernel", *(head for head, _ in columns)], rows)


def arithmetic_of(results: dict[str, Any]) -> str:
    """Whether the kernels of all rows round equally often."""
    rows = [results[name] for name in sorted(results)]
    counted = {row["triton"]: row["arithmetic"] for row in rows if "arithmetic" in row}
    if len(counted) < 2:
        return "Fewer than two versions of Triton were compared.\n"
    first, *others = counted
    lines = [
        f"- {kernel}: {counted[first].get(kernel)} with Triton {first}, {counted[other].get(kernel)} with {other}\n"
        for other in others
        for kernel in sorted({*counted[first], *counted[other]})
        if counted[first].get(kernel) != counted[other].get(kernel)
    ]
    if lines:
        return f"{len(lines)} kernels differ:\n\n" + "".join(lines)
    return f"All {len(counted[first])} kernels agree in Triton {', '.join(counted)}.\n"


def commits_of(results: dict[str, Any]) -> str:
    made = sorted({one for row in results.values() for one in row.get("commits", {}).values()})
    return f"Run at {', '.join(made)}.\n"


PARTS = {
    "rows": rows_of,
    "arithmetic": arithmetic_of,
    "failures": failures_of,
    "kernels": kernels_of,
    "commits": commits_of,
}


def written(text: str, results: dict[str, Any]) -> str:
    """Return the page with the tables of these results between its marks."""
    for name, part in PARTS.items():
        mark = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        made = part(results)
        text, count = mark.subn(lambda match, made=made: match[1] + made + match[2], text)
        if count != 1:
            raise ValueError(f"docs/versions.md has {count} parts {name!r} instead of one")
    return text


if __name__ == "__main__":
    PAGE.write_text(
        written(PAGE.read_text(encoding="utf-8"), json.loads(RESULTS.read_text())), encoding="utf-8"
    )
