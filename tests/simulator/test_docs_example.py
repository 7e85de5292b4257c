# SPDX-License-Identifier: Apache-2.0
"""The examples in docs/simulator.md are run as they stand there."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import torch

import tdcoll.calls.streams
from tdcoll.testing import World

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "simulator.md").read_text(encoding="utf-8")
EXAMPLE, STREAMS = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)


def test_example_of_the_page(tmp_path, capsys):
    file = tmp_path / "ring_example.py"  # a file, because Triton reads the source of kernels
    file.write_text(EXAMPLE, encoding="utf-8")
    found = runpy.run_path(str(file))
    found["test_ring"]()
    found["test_ring_needs_its_fence"]()
    printed = capsys.readouterr().out
    assert re.search(r"seed \d+, weak, .*AssertionError: call \d: \[.*\] should be \[\d\] \[raised by", printed)
    (shown,) = re.findall(r"^seed 0, .*(should be \[\d\] \[raised by pe\d host\])", PAGE, re.M)
    assert shown in printed
    assert re.search(r"replay\(case, \d+, n_pes=4\), with trace=", printed)


def test_streams_of_the_page():
    world = World(2, seed=2, weak=True)

    def host(pe):
        names = {name: torch.full((8,), 7 + pe) for name in ("data", "one")}
        names |= {name: tdcoll.zeros(8, torch.int64) for name in ("inbox", "stamp")}
        exec(STREAMS, {**vars(tdcoll.calls.streams), **names, "world": world, "peer": 1 - pe})
        tdcoll.barrier()
        assert names["inbox"].tolist() == names["stamp"].tolist() == [8 - pe] * 8

    world.run(host)
