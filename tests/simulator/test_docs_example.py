# SPDX-License-Identifier: Apache-2.0
"""The example in docs/simulator.md is run as it stands there."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "simulator.md").read_text(encoding="utf-8")


def test_example_of_the_page(tmp_path, capsys):
    file = tmp_path / "ring_example.py"  # a file, because Triton reads the source of kernels
    (example,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)
    file.write_text(example, encoding="utf-8")
    found = runpy.run_path(str(file))
    found["test_ring"]()
    found["test_ring_needs_its_fence"]()
    printed = capsys.readouterr().out
    assert re.search(r"seed \d+, weak, .*AssertionError: call \d: \[.*\] should be \d \[raised by pe\d host\]", printed)
    (shown,) = re.findall(r"^seed 0, .*(should be \d \[raised by pe\d host\])", PAGE, re.M)
    assert shown in printed
    assert re.search(r"replay\(case, \d+, n_pes=4\), with trace=", printed)
