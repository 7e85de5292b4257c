# SPDX-License-Identifier: Apache-2.0
"""Run Triton-distributed's tutorials on the simulator, without a change: by hand, on a fetched copy of its repository.

    python tests/compat/upstream.py PATH

It takes ten minutes of two cores, prints a line for each of :data:`TUTORIALS`, and exits with status 1 if one fails.
Nothing of that repository is kept.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

TUTORIALS = (
    ("02-intra-node-allgather.py", ("--nproc", "2"), ()),
    ("02-intra-node-allgather.py", ("--nproc", "4"), ()),
    ("03-inter-node-allgather.py", ("--nproc", "2"), ()),
    ("03-inter-node-allgather.py", ("--nproc", "4"), ()),
    ("03-inter-node-allgather.py", ("--nproc", "4", "--emulate-nodes", "2"), ()),
    ("04-deepseek-infer-all2all.py", ("--nproc", "2"), ("-M", "4", "-N", "512", "-G", "8", "--topk", "2")),
    ("05-intra-node-reduce-scatter.py", ("--nproc", "2"), ()),
    ("05-intra-node-reduce-scatter.py", ("--nproc", "4"), ()),
    ("06-inter-node-reduce-scatter.py", ("--nproc", "2"), ()),
    ("06-inter-node-reduce-scatter.py", ("--nproc", "4"), ()),
)
"""Tutorials that run as they are: file, ``launch.sh``'s options, and the tutorial's own."""

ROOT = Path(__file__).resolve().parents[2]


def run_tutorials(folder: Path) -> int:
    """Run :data:`TUTORIALS`, which lie in ``folder``; return how many failed."""
    failed = 0
    for name, options, own in TUTORIALS:
        command = ["bash", str(ROOT / "launch.sh"), "--simulate", *options, "--timeout", "300", "-m", "tdcoll.compat"]
        done = subprocess.run([*command, str(folder / name), *own], capture_output=True, text=True, check=False)
        lines = (done.stdout + done.stderr).strip().splitlines() or [f"status {done.returncode}"]
        failed += done.returncode != 0
        print(f"{name}: {' '.join(options)}: {lines[-1] if done.returncode else 'right'}", flush=True)
    return failed


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("path", type=Path, help="the copy of the repository")
    return int(run_tutorials(parser.parse_args(given).path / "tutorials") > 0)


if __name__ == "__main__":
    sys.exit(main())
