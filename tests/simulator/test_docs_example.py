# SPDX-License-Identifier: Apache-2.0
"""The example in docs/simulator.md is run as it stands there."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "simulator.md"


def test_example_of_the_page(tmp_path, capsys):
    (example,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    file = tmp_path / "ring_example.py"  # a file, because Triton reads the source of kernels
    file.write_text(example, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("ring_example", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.test_ring()
    module.test_ring_needs_its_fence()
    printed = capsys.readouterr().out
    assert re.search(r"seed \d+, weak, .*AssertionError: call \d: \[.*\] should be \d \[raised by pe\d host\]", printed)
    (shown,) = re.findall(r"^seed 0, .*", PAGE.read_text(encoding="utf-8"), re.M)
    number, host = re.search(r"should be (\d) \[raised by (pe\d host)\]", shown).groups()
    assert f"should be {number} [raised by {host}]" in printed
    assert re.search(r"replay\(case, \d+, n_pes=4\), with trace=", printed)
