# SPDX-License-Identifier: Apache-2.0
"""The benchmark of every dense collective: ``bash launch.sh [--nproc N] -m tdcoll bench all_gather --help``.

Their :class:`~tdcoll.tools.bench.specs.Spec` holds the differences between them.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist

import tdcoll
from tdcoll.base.limits import lamport_bytes
from tdcoll.calls.context import CollectiveContext
from tdcoll.calls.launches import facts_of
from tdcoll.calls.spec import WORLD
from tdcoll.calls.tuning import Entry, Section
from tdcoll.job.cuda import multiprocessors
from tdcoll.primitives.reduce import ACCUMULATORS, TORCH_OPERATIONS
from tdcoll.tools.bench import case, choosing, options
from tdcoll.tools.bench.data import Buffers, buffer_bytes
from tdcoll.tools.bench.engine import Subject, Wanted, calls_of, nothing
from tdcoll.tools.bench.peers import PEERS, Peer, Stock, subject_of
from tdcoll.tools.bench.rows import IN_PLACE
from tdcoll.tools.bench.specs import SPECS, Spec

SYMMETRIC = "symmetric"
"""All-reduces with ``symmetric=True``, of inputs and results in symmetric memory."""

_OPERATIONS = {name: op for op, name in TORCH_OPERATIONS.items() if name != "prod"}
"""Products of different numbers over many ranks are not exact."""

_MOVED = ("uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64")
_REDUCED = [str(dtype).removeprefix("torch.") for dtype in ACCUMULATORS if dtype.itemsize > 1]
"""The other dtypes of one byte are left out, because PyTorch cannot add them."""


def _parts(name: str) -> tuple[str, bool, bool]:
    """Return what a name of ``--algorithms`` stands for: the algorithm, and whether in place, and symmetric."""
    in_place = name.startswith(IN_PLACE)
    algorithm = name.removeprefix(IN_PLACE).removeprefix("-") if in_place else name
    return ("auto" if algorithm in ("", SYMMETRIC) else algorithm), in_place, name == SYMMETRIC


class DenseCase(case.Case):
    """The case; a size is bytes of a segment."""

    spec: ClassVar[Spec]

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        self.op: str | None = options.op if self.spec.reduces else None
        self.more = (self.op,) if self.spec.reduces else ()
        """Arguments of tdcoll's functions between tensors and algorithm."""

    @classmethod
    def peers(cls) -> dict[str, Peer]:
        """Return the baselines for this collective."""
        return {name: peer for name, peer in PEERS.items() if peer.of in (None, cls.benchmark)}

    @classmethod
    def parse(cls, arguments: Sequence[str]) -> argparse.Namespace:
        spec, dtype = cls.spec, options.dtype(_REDUCED if cls.spec.reduces else _MOVED)
        in_place, names = [IN_PLACE] if spec.in_place_name else [], spec.names
        chosen = [f"{IN_PLACE}-{name}" for name in names if spec.in_place_name]
        known = ["auto", *names, *in_place, *chosen, *([SYMMETRIC] if spec.one_tensor else [])]
        given, result = ("one for each rank" if count == WORLD else "one" for count in spec.segments)
        parser = options.Parser(
            f"bench {cls.benchmark}",
            f"Latency and bus bandwidth of {spec.name.replace('_', '-')}s, checked. Sizes: bytes of a segment. "
            f"Segments of a rank's input: {given}; of its result: {result}.",
        )
        options.add_sizes(parser, "1K", "1M")
        parser.option("--dtype", dtype, "float32", "NAME", "of the data")
        if spec.reduces:
            parser.add_argument("--op", choices=_OPERATIONS, default="sum", help="how to reduce (default %(default)s)")
        parser.some("--algorithms", known, ",".join(["auto", *in_place]))
        parser.some("--peers", tuple(cls.peers()), "nccl")
        what = "also measure algorithms for which any number of thread blocks works with so many"
        parser.add_argument("--blocks", type=options.each(options.at_least(1)), default=[], metavar="N,M", help=what)
        options.add_launches(parser, "graph")
        options.add_common(parser, 100)
        found = parser.parse_args(arguments)
        found.sizes = options.read_sizes(parser, found, found.dtype.itemsize)
        if spec.reduces and found.op == "mean" and not found.dtype.is_floating_point:
            parser.error(f"--op: a mean is of floating-point numbers; got --dtype {found.dtype}")
        return found

    @classmethod
    def heap_bytes(cls, options: argparse.Namespace, world: int) -> int:
        """Return the bytes of a context, and of buffers in the heap."""
        spec, ways = cls.spec, [_parts(name) for name in options.algorithms]
        room = max(spec.context_bytes(size, world) + 16 for size in options.sizes)
        need = 2 * world * room + 3 * world * min(room, lamport_bytes(world, 1)) + (8 << 20)
        if "fcollect" in options.peers or any(spec.in_place if inside else symmetric for _, inside, symmetric in ways):
            need += max(buffer_bytes(spec, size, world, calls_of(size * world)[1]) for size in options.sizes)
        return need

    def sizes(self) -> Iterator[int]:
        yield from self.options.sizes

    def facts(self, nbytes: int) -> dict[str, Any]:
        dtype = str(self.options.dtype).removeprefix("torch.")
        return {"bytes_per_rank": nbytes, "operation": self.benchmark, "dtype": dtype, "op": self.op}

    @contextlib.contextmanager
    def context(self, nbytes: int) -> Iterator[tuple[CollectiveContext, Stock]]:
        """Make the context and the buffers that the subjects of one size share. Collective."""
        topology, given = self.topology, self.options
        what = self.spec, nbytes, topology.nodes, topology.rank, given.dtype, self.device
        sets = calls_of(nbytes * topology.world_size)[1]
        with CollectiveContext(max_bytes_per_rank=self.spec.context_bytes(nbytes, topology.world_size)) as context:
            stock = Stock(functools.partial(Buffers, *what, sets=sets, op=self.op))
            yield context, stock
            stock.close()

    @contextlib.contextmanager
    def wanted(self, nbytes: int) -> Iterator[tuple[Sequence[Wanted], Callable[[], object]]]:
        given, partial = self.options, functools.partial
        with self.context(nbytes) as (context, stock):
            launches = given.launches
            made = [
                Wanted(name, False, partial(self.subject, *_parts(name), context, stock), launches,
                       self._took(name, nbytes, context))
                for name in given.algorithms
            ]  # fmt: skip
            for name, blocks in itertools.product(given.algorithms, given.blocks):
                if name in self.spec.names and self.spec.algorithm(name).any_blocks:
                    make = partial(self._with_blocks, name, blocks, nbytes, context, stock)
                    made.append(Wanted(f"{name} {blocks} blocks", False, make, launches, self._sms(blocks)))
            made += [Wanted(name, True, partial(self._peer, name, stock), launches) for name in given.peers]
            yield made, context.check

    def _took(self, name: str, nbytes: int, context: CollectiveContext) -> dict[str, Any]:
        """Return the facts of rows that follow from the plan: multiprocessors, and the algorithm that "auto" takes."""
        algorithm, in_place, symmetric = _parts(name)
        given, result = self.spec.sizes(nbytes, context.world_size)
        dtype = self.options.dtype
        n_elements = (result if in_place else given) // dtype.itemsize
        said = tdcoll.explain(
            self.spec.name, n_elements, dtype=dtype, ctx=context, in_place=in_place, symmetric=symmetric,
            algorithm=algorithm,
        )  # fmt: skip
        if not said.algorithm:
            return {}
        return {**({"took": said.algorithm} if algorithm == "auto" else {}), **self._sms(said.blocks)}

    def _sms(self, blocks: int) -> dict[str, int]:
        """Return, as a fact, the multiprocessors that so many thread blocks occupy if the GPU spreads them."""
        here = multiprocessors(self.device) if self.device.type == "cuda" else blocks
        return {"sms": min(blocks, here)}

    def _with_blocks(self, name: str, blocks: int, nbytes: int, context: CollectiveContext, stock: Stock) -> Subject:
        """Return tdcoll's calls by an algorithm with so many thread blocks."""
        facts = facts_of(context, nbytes, self.options.dtype if self.spec.reduces else None)
        kind = ("", self.spec.name, facts.topology.ranks_per_node or 0, facts.topology.n_nodes, False)
        section = Section(*kind, (Entry(None, name, blocks=blocks),))
        return self.subject(self.spec.choose(facts, name, [section]), False, False, context, stock)

    def subject(
        self, algorithm: choosing.Requested, in_place: bool, symmetric: bool, context: CollectiveContext, stock: Stock
    ) -> Subject:
        """Return the subject of tdcoll's calls."""
        spec, how = self.spec, {"ctx": context, "algorithm": algorithm, **({"symmetric": True} if symmetric else {})}
        buffers = stock.in_heap if symmetric or (in_place and spec.in_place) else stock.plain
        inputs, results = buffers.inputs, buffers.results
        if in_place:
            call = getattr(tdcoll, spec.in_place_name or "")
            return subject_of(buffers, lambda i: call(results[i], *self.more, **how), in_place=True)
        call = getattr(tdcoll, spec.name)
        return subject_of(buffers, lambda i: call(inputs[i], *self.more, out=results[i], **how))

    def by_torch(self, buffers: Buffers, close: Callable[[], object] = nothing, group: Any = None) -> Subject:
        """Return the subject of torch.distributed's calls."""
        named = {"group": group, **({"op": _OPERATIONS[self.op]} if self.op else {})}
        function = functools.partial(getattr(dist, self.spec.torch), **named)
        inputs, results, one_tensor = buffers.inputs, buffers.results, self.spec.one_tensor

        def call(i: int) -> torch.Tensor:
            function(results[i]) if one_tensor else function(results[i], inputs[i])
            return results[i]

        return subject_of(buffers, call, close, in_place=one_tensor)

    def _peer(self, name: str, stock: Stock) -> Subject:
        """Return a baseline's calls."""
        peer = self.peers()[name]
        if self.op == "mean" and (world := self.topology.world_size) & (world - 1):
            raise ValueError(f"rounds a mean over {world} ranks more than once: it cannot be checked to the bit")
        if self.op not in (None, "sum") and peer.of is not None:
            raise ValueError(f"has sums only, and --op is {self.op}")
        return peer.make(stock, self.device, self.by_torch)


@functools.cache
def case_of(name: str) -> type[DenseCase]:
    """Return the case of the collective of this name."""
    return type(name, (DenseCase,), {"benchmark": name, "spec": SPECS[name], "__doc__": DenseCase.__doc__})
