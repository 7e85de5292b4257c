# SPDX-License-Identifier: Apache-2.0
"""The public call without a context."""

from __future__ import annotations

import torch

import tdcoll
from tdcoll.testing import World


def test_tdcolls_own_context_grows() -> None:
    def host(pe: int) -> None:
        for n in (3, 500, 5):
            part = torch.arange(n) + 1000 * pe
            got = tdcoll.all_gather(part)
            assert got.tolist() == [1000 * rank + i for rank in range(2) for i in range(n)]
            out = torch.empty(2, n, dtype=torch.int64)
            assert tdcoll.all_gather(part, out=out) is out
            assert torch.equal(out.view(-1), got)
            tdcoll.all_gather_into_tensor(out, part + 1)  # on the same context
            assert torch.equal(out.view(-1), got + 1)

    World(2, heap_bytes=1 << 20).run(host)
