# SPDX-License-Identifier: Apache-2.0
"""The benchmark of all-reduce + residual + RMSNorm: ``bash launch.sh [--nproc N] -m tdcoll bench all_reduce_rms_norm
--help``.

Peers are chains of an all-reduce and torch's kernels, which add and normalize: NCCL's all-reduce, torch's one-shot and
tdcoll's own, each with eager kernels and with one that Inductor makes; and TensorRT-LLM's fused kernel.

Inputs are small whole numbers, so everybody's new residual is exact. The normalized rows are compared with fp32, up
to the rounding of their dtype.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from tdcoll.bench import case, options
from tdcoll.bench.case import Wanted
from tdcoll.bench.dense import calls_of
from tdcoll.bench.engine import Entry, Found, Subject, nothing
from tdcoll.bench.options import names
from tdcoll.bench.peers import require_nccl, symmetric_memory
from tdcoll.bench.reduction_peers import tensorrt_rms_norm
from tdcoll.bench.rows import NormRow
from tdcoll.bench.table import norm_columns
from tdcoll.collectives.all_reduce import all_reduce
from tdcoll.context import CollectiveContext
from tdcoll.fused.op import all_reduce_rms_norm
from tdcoll.fused.policy import ALGORITHMS
from tdcoll.language import INTERPRETED

__all__ = ["AllReduceNorm", "main"]

_EPS = 1e-6
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_OFF = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-9, torch.float32: 1e-5}
"""The relative difference from fp32's result that is allowed."""

_PEERS = ("nccl", "nccl-compiled", "torch-one-shot", "torch-one-shot-compiled", "tdcoll-torch", "tdcoll-compiled")
_TENSORRT = {"trtllm-one-shot": True, "trtllm-two-shot": False}


class _Data:
    """Rows of one size for each call of a launch. Those of a rank follow from its number and the call's."""

    def __init__(self, rows: int, hidden: int, dtype: torch.dtype, job: case.Case) -> None:
        topology = job.topology
        self.world, self.rank = topology.world_size, topology.rank
        self.rows, self.hidden, self.dtype = rows, hidden, dtype
        self.sets = calls_of(rows * hidden * dtype.itemsize, self.world)[1]
        self.device, self.sign = job.device, 1
        self.x = [torch.empty(rows, hidden, dtype=dtype, device=self.device) for _ in range(self.sets)]
        self.residual = self._numbers(-1, 0)
        self.weight = torch.rand(hidden, generator=torch.Generator().manual_seed(5)).to(dtype).to(self.device)
        self.copies: list[list[torch.Tensor]] = []
        parts = [[self._numbers(rank, call) for rank in range(self.world)] for call in range(self.sets)]
        self._own = [of[self.rank] for of in parts]
        self._totals = [torch.stack(of).float().sum(0) for of in parts]

    def _numbers(self, rank: int, call: int) -> torch.Tensor:
        made = torch.Generator().manual_seed(1000 * call + rank + 1)
        return torch.randint(-4, 5, (self.rows, self.hidden), generator=made).to(self.dtype).to(self.device)

    def copy(self, allocate: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
        """Make inputs that are filled anew before each launch, for calls that overwrite them or want their memory."""
        made = [allocate() for _ in range(self.sets)]
        self.copies.append(made)
        return made

    def fill(self, round_: int) -> None:
        """Set the inputs of a round."""
        self.sign = -1 if round_ % 2 else 1
        for own, x in zip(self._own, self.x, strict=True):
            x.copy_(own * self.sign)
        self._refresh()

    def advance(self) -> None:
        """Set the inputs of the next launch."""
        self.sign = -self.sign
        for x in self.x:
            x.neg_()
        self._refresh()

    def _refresh(self) -> None:
        for made in self.copies:
            for copy, x in zip(made, self.x, strict=True):
                copy.copy_(x)

    def errors(self, call: int, result: tuple[torch.Tensor, torch.Tensor]) -> Found:
        """Return how many numbers of ``(normalized, new residual)`` are wrong, and where."""
        out, new = result
        wanted = self._totals[call] * self.sign + self.residual.float()
        normalized = torch.nn.functional.rms_norm(wanted, (self.hidden,), self.weight.float(), _EPS)
        wrong = int((new.float() != wanted).sum())
        off = (out.float() - normalized).abs() > _OFF[self.dtype] * normalized.abs() + 1e-6
        return wrong + int(off.sum()), f"rank {self.rank}, call {call}: {wrong} of new, {int(off.sum())} of normalized"

    def subject(self, call: Callable[[int], Any], close: Callable[[], object] = nothing) -> Subject:
        """Make a subject of these calls."""
        return Subject(
            call, self.errors, inputs=self.sets, begin=self.fill, before=lambda numbers: self.advance(),
            calls=(self.sets - 1, self.sets), data=self, close=close,
        )  # fmt: skip


def _norm(total: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    new = total + residual
    return torch.nn.functional.rms_norm(new, (new.shape[-1],), weight, _EPS), new


class AllReduceNorm(case.Case):
    """The case of the benchmark. A size is a number of rows."""

    benchmark = "all_reduce_rms_norm"
    columns = staticmethod(norm_columns)

    @classmethod
    def parse(cls, arguments: Sequence[str]) -> argparse.Namespace:
        parser = options.Parser(
            prog="bash launch.sh [--nproc N] -m tdcoll bench all_reduce_rms_norm",
            description="Latency of all-reduce + residual + RMSNorm, checked.",
        )
        usual = "1,3" if INTERPRETED else "1,8,64,512"
        parser.option("--rows", options.positive, options.positive(usual), "N,N", f"rows, default {usual}")
        parser.option("--hidden", options.at_least(16), 64 if INTERPRETED else 8192, "N", "numbers of a row")
        parser.add_argument("--dtype", choices=_DTYPES, default="bfloat16", help="default %(default)s")
        what = f"some of {', '.join(ALGORITHMS)} (default: auto)"
        parser.add_argument("--algorithms", type=names(ALGORITHMS), metavar="A,B", default=["auto"], help=what)
        parser.some("--peers", (*_PEERS, *_TENSORRT), "" if INTERPRETED else "nccl,tdcoll-torch")
        options.add_launches(parser, "graph")
        options.add_common(parser, 100)
        given = parser.parse_args(arguments)
        given.dtype = _DTYPES[given.dtype]
        if given.hidden * given.dtype.itemsize % 16 or given.hidden > 16384:
            parser.error(f"--hidden: expected at most 16384 and a multiple of {16 // given.dtype.itemsize}")
        options.check_common(parser, given)
        return given

    @classmethod
    def title(cls, options: argparse.Namespace) -> str:
        return f"rows of {options.hidden} {str(options.dtype).removeprefix('torch.')}"

    @classmethod
    def heap_bytes(cls, options: argparse.Namespace, world: int) -> int:
        most = max(options.rows) * options.hidden * options.dtype.itemsize
        return 2 * world * (cls._capacity(most, world) + 16) + 3 * world * (2 * most + (1 << 20)) + (16 << 20)

    @staticmethod
    def _capacity(nbytes: int, world: int) -> int:
        return 3 * (nbytes // world + 16)

    def sizes(self) -> Iterator[int]:
        yield from self.options.rows

    @contextlib.contextmanager
    def wanted(self, rows: int) -> Iterator[tuple[Sequence[Wanted], Callable[[], object]]]:
        given = self.options
        nbytes = rows * given.hidden * given.dtype.itemsize
        world = self.topology.world_size
        room = nbytes + 2 * given.hidden * given.dtype.itemsize + 512 * rows  # rows that are not there, and measures
        with CollectiveContext(max_bytes_per_rank=self._capacity(nbytes, world), lamport_bytes=room) as context:
            data = _Data(rows, given.hidden, given.dtype, self)
            kinds: list[tuple[str, bool, Callable[..., Subject]]]
            kinds = [(name, False, self._ours) for name in given.algorithms]
            kinds += [(name, True, self._peer) for name in given.peers]
            made = [
                Wanted(name, peer, partial(make, name, data, context), given.launches) for name, peer, make in kinds
            ]
            yield made, context.check

    def _ours(self, algorithm: str, data: _Data, context: CollectiveContext) -> Subject:
        x, residual, weight = data.x, data.residual, data.weight
        return data.subject(lambda i: all_reduce_rms_norm(x[i], residual, weight, context, _EPS, algorithm=algorithm))

    def _peer(self, name: str, data: _Data, context: CollectiveContext) -> Subject:
        """Make the subject of a peer. Raises what keeps it from running."""
        if name in _TENSORRT:
            return data.subject(
                tensorrt_rms_norm(data.x, data.residual, data.weight, _EPS, _TENSORRT[name], self.device)
            )
        norm: Callable[..., Any] = _norm
        if name.endswith("compiled"):
            if INTERPRETED:
                raise RuntimeError("needs GPUs")
            norm = torch.compile(_norm, dynamic=False)
        residual, weight, like = data.residual, data.weight, data.x[0]
        if name.startswith("tdcoll"):
            return data.subject(lambda i: norm(all_reduce(data.x[i], context), residual, weight))
        require_nccl(self.device)
        if name.startswith("nccl"):
            work = data.copy(lambda: torch.empty_like(like))

            def reduce(i: int) -> torch.Tensor:
                dist.all_reduce(work[i])
                return work[i]
        else:
            symmetric, group = symmetric_memory(self.device), dist.group.WORLD.group_name  # type: ignore[union-attr]
            work = data.copy(lambda: symmetric.empty(*like.shape, dtype=like.dtype, device=self.device))
            for one in work:
                symmetric.rendezvous(one, dist.group.WORLD)

            def reduce(i: int) -> torch.Tensor:
                return torch.ops.symm_mem.one_shot_all_reduce(work[i], "sum", group)

        return data.subject(lambda i: norm(reduce(i), residual, weight))

    def row(self, rows: int, entry: Entry, /, **common: Any) -> NormRow:
        options = self.options
        return NormRow(**common, rows=rows, hidden=options.hidden, dtype=str(options.dtype).removeprefix("torch."))


def main(arguments: Sequence[str]) -> int:
    """The command; its exit status: 1 if a result was wrong."""
    return case.run(AllReduceNorm, arguments)
