# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from tdcoll.collectives._host import plan


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several channels with few bytes, so that simulated runs stay short."""
    monkeypatch.setattr(plan, "TARGET_CHUNK_BYTES", 128)
