# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of dense collectives share this. A subclass of :class:`Dense` says what one has of its own."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist

import tdcoll
from tdcoll.bench import options as said
from tdcoll.bench.arithmetic import calls_per_launch, message_sizes
from tdcoll.bench.case import Case, Wanted
from tdcoll.bench.data import Buffers
from tdcoll.bench.engine import CALLS, Entry, Subject
from tdcoll.bench.options import names
from tdcoll.bench.peers import FCOLLECT, ByTorch, MakeBuffers, subject_of, torch_call
from tdcoll.bench.rows import Row
from tdcoll.bench.table import all_gather_columns
from tdcoll.collectives._host.collective import Collective
from tdcoll.collectives._host.plan import Facts, Plan, Policy
from tdcoll.context import CollectiveContext
from tdcoll.language import INTERPRETED
from tdcoll.limits import flagged_bytes, lamport_bytes
from tdcoll.primitives.reduce import ACCUMULATORS, TORCH_OPERATIONS
from tdcoll.runtime.topology import Topology

__all__ = [
    "BACKEND",
    "IN_PLACE",
    "SYMMETRIC",
    "Dense",
    "Reduction",
    "add_sizes",
    "calls_of",
    "plan_of",
    "read_sizes",
    "sets_of",
]

IN_PLACE = "in-place"
BACKEND = "backend"
SYMMETRIC = "symmetric"
"""Reductions with ``symmetric=True``, of inputs and results in symmetric memory."""


def calls_of(nbytes: int, world: int) -> tuple[int, int]:
    """Calls timed together, an even and an odd number; each has an input and a result of its own."""
    return CALLS if INTERPRETED else calls_per_launch(nbytes, world)


def sets_of(options: argparse.Namespace, nbytes: int, world: int) -> int:
    """Inputs and results that the calls of a launch take in turn: ``--buffers``, or one of its own for each call."""
    calls = calls_of(nbytes, world)[1]
    return min(options.buffers or calls, calls)


def plan_of(policy: Policy, name: str, nbytes: int, topology: Topology, itemsize: int = 1) -> Plan:
    """Return what ``name``, an algorithm or ``"in-place"``, is for a call on GPUs of one kind.

    Raises:
        ValueError: such a call cannot have it.
    """
    ll_bytes = flagged_bytes(topology.world_size, topology.n_nodes)
    lamport = lamport_bytes(topology.world_size, topology.n_nodes) if itemsize < 8 else 0
    in_place = name == IN_PLACE
    facts = Facts(
        nbytes, topology, ll_bytes=ll_bytes, stores=True, lamport_bytes=lamport, itemsize=itemsize, in_place=in_place
    )
    return policy.choose(facts, "auto" if in_place else name)


def add_sizes(parser: argparse.ArgumentParser, begin: str, end: str) -> None:
    """The options that say which sizes."""
    for name, usual, what in (
        ("begin", begin, "first size"),
        ("end", end, "last size, such as 64M"),
        ("factor", "4", "from one size to the next"),
    ):
        parser.add_argument(f"-{name[0]}", f"--{name}", default=usual, help=f"{what} (default %(default)s)")


def read_sizes(parser: argparse.ArgumentParser, given: argparse.Namespace, itemsize: int) -> list[int]:
    """The sizes in bytes; a wrong one ends the process with status 2."""
    try:
        return message_sizes(given.begin, given.end, given.factor, itemsize)
    except ValueError as error:
        parser.error(str(error))


class Dense(Case):
    """A collective of dense tensors.

    Attributes:
        host: its host side.
        about: what is measured, and of what sizes are: for ``--help``.
        dtypes: that it knows, by name; ``tuned_dtype``: the one that tables are made with.
        peers: what makes each.
        in_place: whether it has calls in place; ``in_heap``: and these are in symmetric memory.
        more: calls of its own that ``--algorithms`` may name.
        data: buffers that fit its calls.
    """

    columns = staticmethod(all_gather_columns)
    host: ClassVar[Collective]
    about: ClassVar[str]
    dtypes: ClassVar[Mapping[str, torch.dtype]]
    tuned_dtype: ClassVar[torch.dtype]
    peers: ClassVar[Mapping[str, Callable[..., Subject]]]
    in_place: ClassVar[bool] = False
    in_heap: ClassVar[bool] = False
    more: ClassVar[Sequence[str]] = ()
    data: ClassVar[type[Buffers]] = Buffers

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        several = self.topology.n_nodes > 1 and "2d" in self.host.policy.names
        default = ["auto", "1d", *(["2d"] if several else []), *([IN_PLACE] if self.in_place else [])]
        self.algorithms = default if options.algorithms is None else options.algorithms
        self.storage: torch.Tensor | None = None
        if IN_PLACE in self.algorithms and self.in_heap:
            world = self.topology.world_size
            need = max(self.data.storage_bytes(size, world, sets_of(options, size, world)) for size in options.sizes)
            self.storage = tdcoll.empty((need,), torch.uint8)

    def close(self) -> None:
        if self.storage is not None:
            tdcoll.free(self.storage)

    # -- what a collective has of its own

    @abstractmethod
    def ours(
        self, algorithm: str | Plan, context: CollectiveContext, buffers: Buffers
    ) -> Callable[[int], torch.Tensor]:
        """The call with these buffers, by its number."""

    def ours_in_place(
        self, algorithm: str | Plan, context: CollectiveContext, buffers: Buffers
    ) -> Callable[[int], torch.Tensor]:
        """The call in place, if it has one."""
        raise ValueError(f"{self.benchmark} has no calls in place")

    @property
    @abstractmethod
    def by_torch(self) -> ByTorch:
        """The call of torch.distributed."""

    @property
    def op(self) -> str | None:
        """How it reduces; None: it does not."""
        return None

    def buffers(self, nbytes: int, *rest: Any, **named: Any) -> Buffers:
        """Of one launch; see :class:`~tdcoll.bench.data.Buffers`."""
        world, dtype = self.topology.world_size, self.options.dtype
        sets, calls = sets_of(self.options, nbytes, world), calls_of(nbytes, world)[1]
        return self.data(nbytes, world, self.topology.rank, sets, dtype, self.device, *rest, calls=calls, **named)

    def inside(self, nbytes: int, make: MakeBuffers) -> Buffers:
        """Of one launch of calls in place."""
        return make(None) if self.storage is None else self.buffers(nbytes, self.storage)

    @classmethod
    def context_bytes(cls, nbytes: int) -> int:
        """``max_bytes_per_rank`` of a context for calls of one epoch."""
        return nbytes

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        """Options of its own."""

    @classmethod
    def check_options(cls, parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
        """End with status 2 where they do not fit."""

    # -- the command line

    @classmethod
    def parse(cls, arguments: Sequence[str]) -> argparse.Namespace:
        known = [*cls.host.policy.algorithms, *([IN_PLACE] if cls.in_place else []), *cls.more, BACKEND]
        usual = "auto, 1d" + (", in-place" if cls.in_place else "")
        usual += ", and on several nodes 2d" if "2d" in known else ""
        parser = said.Parser(
            prog=f"bash launch.sh [--nproc N] -m tdcoll bench {cls.benchmark}",
            description=f"Latency and bus bandwidth of {cls.about}.",
        )
        add_sizes(parser, "1K", "1M")
        parser.add_argument("--dtype", choices=cls.dtypes, default="float32", help="default %(default)s")
        cls.add_options(parser)
        what = f"some of {', '.join(known)} (default: {usual})"
        parser.add_argument("--algorithms", type=names(known), metavar="A,B", help=what)
        parser.some("--peers", tuple(cls.peers), "nccl")
        parser.add_argument(
            "--buffers",
            type=said.at_least(1),
            metavar="N",
            help="inputs and results that the calls of a launch take in turn (default: one of its own for each call; "
            "with 1, one buffer is replayed, which reads lower than real use)",
        )
        said.add_launches(parser, "graph")
        said.add_common(parser, 100)
        given = parser.parse_args(arguments)
        given.dtype = cls.dtypes[given.dtype]
        given.sizes = read_sizes(parser, given, given.dtype.itemsize)
        said.check_common(parser, given)
        cls.check_options(parser, given)
        return given

    @classmethod
    def title(cls, options: argparse.Namespace) -> str:
        return str(options.dtype).removeprefix("torch.")

    @classmethod
    def heap_bytes(cls, options: argparse.Namespace, world: int) -> int:
        """A context's slots and what it has besides, and buffers for calls in place and of NVSHMEM.

        Of the heap the backend takes a quarter at most.
        """
        sizes, algorithms = options.sizes, options.algorithms
        staged = max(2 * world * (cls.context_bytes(size) + 16) for size in sizes)
        in_heap = cls.in_heap and (algorithms is None or IN_PLACE in algorithms)
        announced = max(3 * world * min(cls.context_bytes(size) + 16, lamport_bytes(world, 1)) for size in sizes)
        need = staged + announced + (8 << 20)
        if in_heap:
            need += max(cls.data.storage_bytes(size, world, sets_of(options, size, world)) for size in sizes)
        if (FCOLLECT in options.peers and not INTERPRETED) or SYMMETRIC in (algorithms or ()):
            need += max(cls.data.whole_bytes(size, world, sets_of(options, size, world)) for size in sizes)
        if algorithms is not None and BACKEND in algorithms:
            need += 4 * (staged + (4 << 20))
        return need

    # -- what is measured

    def sizes(self) -> Iterator[int]:
        yield from self.options.sizes

    @contextlib.contextmanager
    def wanted(self, nbytes: int) -> Iterator[tuple[Sequence[Wanted], Callable[[], object]]]:
        with CollectiveContext(max_bytes_per_rank=self.context_bytes(nbytes)) as context:
            yield self.subjects(nbytes, context), context.check

    def subjects(self, nbytes: int, context: CollectiveContext) -> list[Wanted]:
        """Everything that is asked for."""
        plain = self.sharing(nbytes)

        def ours(name: str) -> Subject:
            if name == BACKEND:
                return self.backend(nbytes, plain(None))
            if name == SYMMETRIC:
                return self.symmetric(context, plain)
            # The simulator decides by what calls cost there; what it counts is for GPUs.
            algorithm: str | Plan = "auto" if name == IN_PLACE else name
            if self.owner.simulated:
                dtype = self.options.dtype if self.op else None
                facts = self.host.facts(context, nbytes, dtype, in_place=name == IN_PLACE)
                algorithm = self.host.policy.choose(dataclasses.replace(facts, simulated=False), algorithm)
            inside = name == IN_PLACE
            buffers = self.inside(nbytes, plain) if inside else plain(None)
            return self.subject(algorithm, context, buffers, inside)

        launches = self.options.launches
        made = [Wanted(name, False, partial(ours, name), launches) for name in self.algorithms]
        return made + [Wanted(name, True, partial(self.peer, name, plain), launches) for name in self.options.peers]

    def symmetric(self, context: CollectiveContext, make: MakeBuffers) -> Subject:
        """Make the subject of calls with ``symmetric=True``, where there are any."""
        raise ValueError(f"{self.benchmark} has no calls with symmetric=True")

    def peer(self, name: str, make: MakeBuffers) -> Subject:
        """A peer's call. Raises what keeps it from running."""
        return self.peers[name](make, self.device, self.by_torch)

    def sharing(self, nbytes: int) -> MakeBuffers:
        """Return what makes buffers; ordinary ones are the same for all subjects."""
        shared: list[Buffers] = []

        def plain(allocate: Callable[[int], torch.Tensor] | None, separate: bool = False) -> Buffers:
            if allocate is not None:
                return self.buffers(nbytes, allocate=allocate, separate=separate)
            if not shared:
                shared.append(self.buffers(nbytes))
            return shared[0]

        return plain

    def subject(self, algorithm: str | Plan, context: CollectiveContext, buffers: Buffers, in_place: bool) -> Subject:
        """tdcoll's call."""
        return subject_of(buffers, (self.ours_in_place if in_place else self.ours)(algorithm, context, buffers))

    def backend(self, nbytes: int, buffers: Buffers) -> Subject:
        """The call of ``torch.distributed`` on a process group with backend ``"tdcoll"``.

        Raises:
            ValueError: tdcoll's kernels do not serve the group.
        """
        from tdcoll.distributed import Options, explain  # registers the backend

        options = Options(serves=self.benchmark, max_bytes_per_rank=max(1, self.context_bytes(nbytes)))
        group = dist.new_group(backend="tdcoll", pg_options=options)
        if f"{self.benchmark}: tdcoll" not in (explained := explain(group)):
            dist.destroy_process_group(group)
            raise ValueError(f"not served by tdcoll: {explained}")

        call = torch_call(buffers, self.by_torch, group=group)
        return subject_of(buffers, call, lambda: dist.destroy_process_group(group))

    def row(self, nbytes: int, entry: Entry, /, **common: Any) -> Row:
        dtype = str(self.options.dtype).removeprefix("torch.")
        kind = {"operation": self.benchmark, "dtype": dtype, "op": self.op, "buffers": self.options.buffers}
        return Row(**common, bytes_per_rank=nbytes, **kind)


_OPERATIONS = {name: op for op, name in TORCH_OPERATIONS.items() if name != "prod"}
"""Products of different numbers over many ranks are not exact."""


class Reduction(Dense):
    """A collective that reduces.

    Attributes:
        sums: peers that can do nothing else.
    """

    sums: ClassVar[Sequence[str]] = ()
    # PyTorch adds none of the others of one byte, and there are no sums of them.
    dtypes: ClassVar = {str(dtype).removeprefix("torch."): dtype for dtype in ACCUMULATORS if dtype.itemsize > 1}
    tuned_dtype = torch.bfloat16
    more = (SYMMETRIC,)

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--op", choices=_OPERATIONS, default="sum", help="how to reduce (default %(default)s)")

    @classmethod
    def check_options(cls, parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
        if given.op == "mean" and not given.dtype.is_floating_point:
            parser.error(f"--op: a mean is of floating-point numbers; got --dtype {given.dtype}")

    @classmethod
    def title(cls, options: argparse.Namespace) -> str:
        return f"{super().title(options)}, {options.op}"

    @property
    def op(self) -> str:
        return str(self.options.op)

    def buffers(self, nbytes: int, *rest: Any, **named: Any) -> Buffers:
        return super().buffers(nbytes, *rest, op=self.op, nodes=self.topology.nodes, **named)

    def symmetric(self, context: CollectiveContext, make: MakeBuffers) -> Subject:
        made: list[torch.Tensor] = []

        def allocate(nbytes: int) -> torch.Tensor:
            made.append(tdcoll.empty((nbytes,), torch.uint8))
            return made[-1]

        def close() -> None:
            for tensor in made:
                tdcoll.free(tensor)

        buffers = make(allocate)
        return subject_of(buffers, self.ours("auto", context, buffers, symmetric=True), close)

    @abstractmethod
    def ours(
        self, algorithm: str | Plan, context: CollectiveContext, buffers: Buffers, symmetric: bool = False
    ) -> Callable[[int], torch.Tensor]:
        """Return the call with these buffers, by its number; ``symmetric``: they are in symmetric memory."""

    @property
    def torch_operation(self) -> Any:
        """``--op`` as torch.distributed has it."""
        return _OPERATIONS[self.op]

    def peer(self, name: str, make: MakeBuffers) -> Subject:
        if self.op == "mean" and (world := self.topology.world_size) & (world - 1):
            raise ValueError(f"rounds a mean over {world} ranks more than once: it cannot be checked to the bit")
        if self.op != "sum" and name in self.sums:
            raise ValueError(f"has sums only, and --op is {self.op}")
        return super().peer(name, make)
