# SPDX-License-Identifier: Apache-2.0
"""The benchmark of all-reduce + residual + RMSNorm: ``bash launch.sh [--nproc N] -m tdcoll bench all_reduce_rms_norm
--help``.

Baselines are an all-reduce (NCCL's or tdcoll's), then torch's addition and norm, eager or fused by Inductor.

The new residual is exact, because inputs are whole numbers. Normalized rows are compared up to rounding.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import tdcoll
from tdcoll.calls.context import CollectiveContext
from tdcoll.calls.launches import facts_of
from tdcoll.fused.op import all_reduce_rms_norm
from tdcoll.fused.policy import ALGORITHMS, NormRows, choose
from tdcoll.language import INTERPRETED
from tdcoll.tools.bench import case, options
from tdcoll.tools.bench.data import Buffers
from tdcoll.tools.bench.engine import Found, Subject, Wanted, calls_of
from tdcoll.tools.bench.peers import require_nccl, subject_of
from tdcoll.tools.bench.specs import SPECS

_EPS = 1e-6
_OFF = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-9, torch.float32: 1e-5}
"""The relative difference from fp32's result that is allowed."""

_PEERS = ("nccl", "nccl-compiled", "tdcoll-torch", "tdcoll-compiled")

Normalized = tuple[torch.Tensor, ...]
"""``(normalized, new residual)``, ``[rows, hidden]`` each."""


def _norm(total: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Normalized:
    new = total + residual
    return torch.nn.functional.rms_norm(new, (new.shape[-1],), weight, _EPS), new


def _subject(
    name: str, peer: bool, buffers: Buffers, residual: torch.Tensor, weight: torch.Tensor, ctx: CollectiveContext
) -> Subject:
    """Return the fused call by an algorithm, or a baseline's calls. If a baseline cannot run, raise the reason."""
    x, totals = ([one.view_as(residual) for one in every] for every in (buffers.inputs, buffers.results))
    norm: Callable[..., Any] = _norm
    if name.endswith("compiled"):
        if INTERPRETED:
            raise RuntimeError("needs GPUs")
        norm = torch.compile(_norm, dynamic=False)

    def chain(i: int) -> Any:
        dist.all_reduce(totals[i])
        return norm(totals[i], residual, weight)

    def errors(number: int, result: Normalized) -> Found:
        out, new = result
        wanted = buffers.expected(number).view_as(new).float() + residual.float()
        normalized = torch.nn.functional.rms_norm(wanted, wanted.shape[1:], weight.float(), _EPS)
        wrong = int((new.float() != wanted).sum())
        off = int(((out.float() - normalized).abs() > _OFF[out.dtype] * normalized.abs() + 1e-6).sum())
        return wrong + off, f"rank {buffers.rank}, call {number}: {wrong} of new, {off} of normalized"

    call: Callable[[int], Any] = chain
    if not peer:
        call = lambda i: all_reduce_rms_norm(x[i], residual, weight, ctx=ctx, eps=_EPS, algorithm=name)  # noqa: E731
    elif name.startswith("tdcoll"):
        call = lambda i: norm(tdcoll.all_reduce(x[i], ctx=ctx), residual, weight)  # noqa: E731
    else:
        require_nccl(residual.device)
    return dataclasses.replace(subject_of(buffers, call, in_place=call is chain), errors=errors)


class AllReduceNorm(case.Case):
    """The case of the benchmark. A size is a number of rows."""

    benchmark = "all_reduce_rms_norm"

    @classmethod
    def parse(cls, arguments: Sequence[str]) -> argparse.Namespace:
        parser = options.Parser("bench all_reduce_rms_norm", "Latency of all-reduce + residual + RMSNorm, checked.")
        counts = options.each(options.at_least(1))
        parser.option("--rows", counts, "1,3" if INTERPRETED else "1,8,64,512", "N,N", "rows")
        parser.option("--hidden", options.at_least(16), 64 if INTERPRETED else 8192, "N", "numbers of a row")
        parser.option("--dtype", options.dtype(("bfloat16", "float16", "float32")), "bfloat16", "NAME", "of the data")
        parser.some("--algorithms", ALGORITHMS, "auto")
        parser.some("--peers", _PEERS, "" if INTERPRETED else "nccl,tdcoll-torch")
        options.add_launches(parser, "graph")
        options.add_common(parser, 100)
        given = parser.parse_args(arguments)
        if given.hidden * given.dtype.itemsize % 16 or given.hidden > 16384:
            parser.error(f"--hidden: expected at most 16384 and a multiple of {16 // given.dtype.itemsize}")
        return given

    @classmethod
    def heap_bytes(cls, options: argparse.Namespace, world: int) -> int:
        most = max(options.rows) * options.hidden * options.dtype.itemsize
        return 2 * world * (cls._capacity(most, world) + 16) + 3 * world * (2 * most + (1 << 20)) + (16 << 20)

    @staticmethod
    def _capacity(nbytes: int, world: int) -> int:
        return 3 * (nbytes // world + 16)

    def sizes(self) -> Iterator[int]:
        yield from self.options.rows

    def facts(self, rows: int) -> dict[str, Any]:
        return {"rows": rows, "hidden": self.options.hidden, "dtype": str(self.options.dtype).removeprefix("torch.")}

    @contextlib.contextmanager
    def wanted(self, rows: int) -> Iterator[tuple[Sequence[Wanted], Callable[[], object]]]:
        given, topology, device = self.options, self.topology, self.device
        world, row = topology.world_size, given.hidden * given.dtype.itemsize
        what = SPECS["all_reduce"], rows * row, topology.nodes, topology.rank, given.dtype, device
        buffers = Buffers(*what, sets=calls_of(rows * row * world)[1], op="sum")
        drawn = torch.Generator().manual_seed(5)
        # Never above 0, because the sums are, and they may be the largest exact numbers.
        residual = -torch.randint(5, (rows, given.hidden), generator=drawn).to(device, given.dtype)
        weight = torch.rand(given.hidden, generator=drawn).to(device, given.dtype)
        room = (rows + 2) * row + 512 * rows  # rows that are not there, and measures
        with CollectiveContext(max_bytes_per_rank=self._capacity(rows * row, world), lamport_bytes=room) as context:
            facts = facts_of(context, 0, given.dtype)
            took = choose(NormRows(rows, given.hidden, given.dtype.itemsize), facts).algorithm
            yield [
                Wanted(name, peer, partial(_subject, name, peer, buffers, residual, weight, context), given.launches,
                       {"took": took} if name == "auto" else {})
                for peer, names in ((False, given.algorithms), (True, given.peers))
                for name in names
            ], context.check  # fmt: skip
