# SPDX-License-Identifier: Apache-2.0
"""What compute-sanitizer reports, taken apart, and whose it is.

A report is a paragraph of lines that begin with ``=========``. It has a first line (what happened), frames of the
device (``at NAME+0x... in FILE:LINE``) and frames of the host (``Host Frame: NAME ... in MODULE``), the innermost
first. Whose it is, the first frame of the host says that is in neither the driver nor CUDA's runtime: that module made
the call or launched the kernel. What is in NVSHMEM's or NCCL's libraries is theirs. All else is taken for tdcoll's, and
so is a report without frames. One exception: initcheck does not follow writes to the symmetric heap, neither of peers
nor of this rank. So it is no finding if it takes a copy from there for uninitialized.
"""

from __future__ import annotations

import re
from typing import NamedTuple

__all__ = ["OTHERS", "Report", "Run", "parse"]

_LINE = re.compile(r"^=========(.*)$")
_HOST = re.compile(r"Host Frame:\s*(?P<name>.*)")
_MODULE = re.compile(r"\bin (?P<module>\S+)\s*$")
_DEVICE = re.compile(r"(?:^\s+at|Device Frame:|access at)\s+(?:0x[0-9a-f]+ in )?(?P<name>[A-Za-z_]\w*)")
_SUMMARY = re.compile(r"^ (?:ERROR|RACECHECK) SUMMARY: ")
_NOT_REPORTS = re.compile(
    r"^ (?:COMPUTE-SANITIZER|LEAK SUMMARY|Target application terminated before first instrumented API call"
    r"|No attachable process|This tool is|Program hit sanitizer limits|Saving|Read \d+|Warning: Detected overlapping)"
)

_BELOW = re.compile(r"^(?:libcuda|libcudart|libcuda_driver|libsanitizer|libTreeLauncher|libInterceptor)")
"""Modules that are called by whoever is meant."""

_COPY = re.compile(
    r"^ ?Host API memory access error at host access to (?P<address>0x[0-9a-f]+) .*\n +Uninitialized access"
)

HEAP = "the symmetric heap"
"""The owner of what initcheck says of copies from the heap."""

OTHERS = {"NVSHMEM": re.compile(r"^(?:lib)?nvshmem"), "NCCL": re.compile(r"^libnccl")}
"""Whose libraries are whose, by the name of the file."""


class Report(NamedTuple):
    """One report, as it was written but without ``=========``.

    Attributes:
        owner: ``"tdcoll"``, a key of :data:`OTHERS`, or :data:`HEAP`.
        kernel: the innermost function of the device; empty if there is none.
    """

    text: str
    owner: str
    kernel: str


class Run(NamedTuple):
    """What was written about one process; ``watched``: it used CUDA and came to its end, since there is a summary."""

    reports: tuple[Report, ...]
    watched: bool


def _owner(modules: list[str]) -> str:
    above = [module for module in modules if not _BELOW.match(module)]
    return next((name for name, pattern in OTHERS.items() if above and pattern.match(above[0])), "tdcoll")


def _report(lines: list[str], heap: range) -> Report:
    modules, kernel, host = [], "", False
    copy = _COPY.match("\n".join(lines))
    for line in lines:
        if _HOST.search(line):
            host = True
        elif not kernel and not host and (found := _DEVICE.search(line)):
            kernel = found["name"]
        # The module is on the frame's line, or on the next.
        if host and (found := _MODULE.search(line)):
            modules.append(found["module"].rpartition("/")[2])
    owner = HEAP if copy and int(copy["address"], 16) in heap else _owner(modules)
    return Report("\n".join(line.removeprefix(" ") for line in lines), owner, kernel)


def parse(text: str, heap: range = range(0)) -> Run:
    """Take apart what compute-sanitizer wrote about one process, whose symmetric heap has the addresses ``heap``."""
    reports: list[Report] = []
    paragraph: list[str] = []
    watched = False
    for raw in [*text.splitlines(), "========="]:
        found = _LINE.match(raw.rstrip())
        if not found:
            continue  # the program's own output
        line = found[1]
        watched |= bool(_SUMMARY.match(line))
        if line.strip() and not _SUMMARY.match(line) and not _NOT_REPORTS.match(line):
            # A first line is indented by one; what belongs to it by more. Some tools leave no line between reports.
            if paragraph and not line.startswith("  "):
                reports.append(_report(paragraph, heap))
                paragraph = []
            paragraph.append(line)
        elif paragraph:
            reports.append(_report(paragraph, heap))
            paragraph = []
    return Run(tuple(reports), watched)
