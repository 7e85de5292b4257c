# SPDX-License-Identifier: Apache-2.0
"""Functions with torch.distributed's signatures: calls on contexts of tdcoll's own, and their ``Work``."""

from __future__ import annotations

from typing import Any

import torch

from tdcoll import arguments, runtime
from tdcoll.collectives._host.call import make
from tdcoll.collectives._host.pool import pooled
from tdcoll.collectives._host.spec import Collective
from tdcoll.work import StreamWork, backend_errors, completed

__all__ = ["drop_in"]


def drop_in(
    spec: Collective,
    output: torch.Tensor,
    input: torch.Tensor,
    op: Any,
    group: runtime.Group,
    async_op: bool,
    names: tuple[str, str],
) -> torch.distributed.Work | None:
    """Make a call of a dense collective as ``torch.distributed`` does, on the current stream.

    Args:
        op: of a reduction; None for others.
        group: a ProcessGroup, a sequence of global ranks, or None for all ranks.
        async_op: return a ``Work``.
        names: the caller's names of input and output, for errors.

    Returns:
        The ``Work`` if asked for, else None.

    Raises:
        BackendTimeout: (``async_op``, in the simulator, where calls are made at once) a wait of the call expired.
        Others: as for :func:`~.call.make`.
    """
    for name, tensor in zip(names, (input, output), strict=True):
        arguments.tensor(name, tensor)
    ctx = pooled(spec, input, group)
    make(
        spec, input.detach(), ctx, output.detach(), "auto", op, names=names
    )  # as stores of a kernel, which autograd does not see
    if not async_op:
        return None
    check = ctx.monitor.raise_if_expired
    if ctx.device.type == "cpu":
        with backend_errors:
            check()
        return completed([output])
    return StreamWork([output], torch.cuda.current_stream(ctx.device), blocks=False, check=check)
