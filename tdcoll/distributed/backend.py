# SPDX-License-Identifier: Apache-2.0
"""The process group of backend ``tdcoll``.

``torch.distributed`` lets Python subclass ``ProcessGroup``, not ``Backend``. What is overridden here is reached from
Python, and from C++ (DDP's reducer, functional collectives) where PyTorch's trampoline has the method; everything else
is ``ProcessGroup``'s own, which finds gloo and NCCL registered with this object.

Which side serves a call is decided from facts that are the same on all ranks: the kind, the device type, the dtype, the
sizes, and what the group has agreed on when it was made. What is only known on one rank (an input that is not
contiguous, one that overlaps the output) never decides; it costs a copy.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    BarrierOptions,
    BroadcastOptions,
    ProcessGroup,
)

import tdcoll
from tdcoll import arguments, runtime
from tdcoll.distributed.inner import (
    NamedWork,
    RollCall,
    add_backends,
    gather_into,
    may_be_a_peers,
    sparse_sum_by_gather,
)
from tdcoll.distributed.options import KINDS, Options
from tdcoll.distributed.served import Gathers, SparseSums, plain
from tdcoll.distributed.work import (
    CompletedWork,
    StreamWork,
    Task,
    TaskWork,
    as_backend_error,
    backend_errors,
    record_stream,
    worker,
)
from tdcoll.errors import CollectiveTimeout, ContextError, TdcollError
from tdcoll.language import INTERPRETED
from tdcoll.language.jit import bitcode_path
from tdcoll.runtime import lifecycle
from tdcoll.runtime.control import StoreControlPlane, generation, keep, require_equal

__all__ = ["TdcollProcessGroup", "create", "explain"]

_log = logging.getLogger("tdcoll")

_UNSET = AllgatherOptions().timeout
"""What a call's options hold when it has no timeout of its own."""

_OPERATIONS = {
    dist.ReduceOp.SUM: "sum",
    dist.ReduceOp.AVG: "mean",
    dist.ReduceOp.MAX: "max",
    dist.ReduceOp.MIN: "min",
    dist.ReduceOp.PRODUCT: "prod",
}


def _operation(op: Any) -> str:
    return next((name for known, name in _OPERATIONS.items() if op == known), str(op))


# ---------------------------------------------------------------------- joining


def _device_of_this_rank() -> torch.device:
    """The GPU for the symmetric heap: the current one where the script has chosen, else the launcher's number."""
    current, local = torch.cuda.current_device(), os.environ.get("LOCAL_RANK", "")
    if current == 0 and local.isdigit():
        index = lifecycle.device_index(int(local), lifecycle.may_share_gpus())
        current = index if index < torch.cuda.device_count() else current
    return torch.device("cuda", current)


def _obstacle() -> str | None:
    """Why tdcoll's kernels cannot run in this process; None if they can, as far as it can be seen alone."""
    if INTERPRETED:
        return None
    if not torch.cuda.is_available():
        return "no GPU, and not the simulator (TRITON_INTERPRET=1 when the process starts)"
    try:
        bitcode_path()
        importlib.import_module("nvshmem.bindings.nvshmem")
    except (ImportError, FileNotFoundError) as error:
        return f"NVSHMEM is not installed ({error})"
    return None


_GATHERED = ("all_gather", "tdcoll", "")
"""As which calls that tdcoll served are counted."""


class _Facts:
    """What the ranks of a group have agreed on when it was made.

    Attributes:
        kinds: served by tdcoll's kernels.
        reason: why that is not all that was asked for; or None.
        owns_job: whether this group has joined the job, and leaves it.
    """

    def __init__(self, control: StoreControlPlane, size: int, kinds: tuple[str, ...], agreed: dict[str, Any]) -> None:
        self._control, self._everyone = control, range(size)
        self.kinds, self.owns_job = kinds, False
        self.reason: str | None = None
        answers = control.all_gather(self._everyone, "backend tdcoll", (agreed, self._local_obstacle(size)))
        require_equal([given for given, _ in answers], self._everyone, "the options of backend tdcoll")
        self._give_up([obstacle for _, obstacle in answers])

    def _local_obstacle(self, size: int) -> str | None:
        if not self.kinds:
            return "told to serve nothing"
        job = runtime.current_or_none()
        if job is not None:
            return None
        if dist.is_initialized() and size < dist.get_world_size():
            return "tdcoll was not initialised when this group of some of the ranks was made (tdcoll.initialize())"
        return _obstacle()

    def _give_up(self, obstacles: list[str | None]) -> None:
        """If there is any obstacle, serve nothing and say so; the same on all ranks."""
        found = {rank: obstacle for rank, obstacle in enumerate(obstacles) if obstacle is not None}
        if found:
            rank, obstacle = next(iter(found.items()))
            everywhere = len(set(found.values())) == 1 and len(found) == len(obstacles)
            self.kinds = ()
            self.reason = obstacle if everywhere else f"rank {rank}: {obstacle}"

    def join(self, store: Any, rank: int, size: int, heap_bytes: int | str | None, timeout_s: float | None) -> None:
        """Initialise tdcoll for the ranks of the default group, if nobody has. Collective."""
        if not self.kinds or runtime.current_or_none() is not None:
            return
        obstacle = None
        try:
            if INTERPRETED:
                lifecycle.join(store, rank, size, heap_bytes=heap_bytes, timeout_s=timeout_s)
            else:
                with torch.cuda.device(_device_of_this_rank()):
                    lifecycle.join(store, rank, size, heap_bytes=heap_bytes, timeout_s=timeout_s)
            self.owns_job = True
        except TdcollError as error:
            obstacle = str(error)
        self._give_up(self._control.all_gather(self._everyone, "joined", obstacle))
        if self.owns_job and not self.kinds:  # some have joined and others could not
            self.owns_job, runtime.current().failed = False, True
            tdcoll.finalize()  # forgets the job, and waits for nobody


def create(given: Any, pg_options: Any) -> TdcollProcessGroup:
    """What ``torch.distributed`` calls for backend ``"tdcoll"``. Collective over the ranks of the new group.

    Args:
        given: ``_DistributedBackendOptions``: store, ranks, timeout, name.
        pg_options: see :meth:`Options.of`.

    Raises:
        RankMismatchError: ranks of the group have been given different options.
        BackendTimeout: a rank of the group did not come.
        TypeError, ValueError: options that do not exist.
    """
    ranks, options = list(given.global_ranks_in_group), Options.of(pg_options)
    store = _meeting_place(given.store, ranks)
    with backend_errors:
        return TdcollProcessGroup(
            store, given.group_rank, given.group_size, ranks, given.timeout, given.group_id, options
        )


def _meeting_place(store: Any, ranks: list[int]) -> Any:
    """``store`` without the prefixes of the group's name and device.

    PyTorch's names are numbers that each process counts, and they differ from rank to rank once init_process_group has
    failed on some of them. Who takes part says enough: see :func:`tdcoll.runtime.control.generation`.
    """
    if ranks and isinstance(default := dist.distributed_c10d._get_default_group(), TdcollProcessGroup):
        return default._store
    for _ in ("device", "name"):
        store = store.underlying_store
    return store


# ---------------------------------------------------------------------- the group


class TdcollProcessGroup(ProcessGroup):
    """A process group that serves some calls with tdcoll's kernels and hands the rest to gloo and NCCL.

    Made by ``init_process_group("tdcoll")`` and ``new_group``; see :func:`explain` for what it does.

    Args:
        store: where its ranks meet; the group takes a part of it.
        rank, size: in the group.
        ranks: global ranks in the order of the group; empty for the default group.
        timeout: of the group; also the deadline of waits in kernels.
        name: of the group.
        options: what to serve.
        split: whether NCCL may split the default group's communicator, in which all of its ranks take part.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        ranks: list[int],
        timeout: timedelta,
        name: str,
        options: Options,
        *,
        split: bool = True,
    ) -> None:
        make: Any = super().__init__  # with a store it makes an object that Python cannot subclass
        make(rank, size)
        self._members = tuple(ranks) or tuple(range(size))
        self._rank, self._size = rank, size
        if not ranks:
            keep(store)
        members = self._members
        store = generation(store, members[rank], members, "backend tdcoll", timeout.total_seconds())
        self._store, self._timeout, self._options, self._ranks = store, timeout, options, ranks
        self._own_store = dist.PrefixStore("tdcoll/", store)
        inner = self._plain = ProcessGroup(store, rank, size)
        """gloo and NCCL, without what is overridden here."""
        share_gpus = lifecycle.may_share_gpus()
        made = (self, inner)
        self._names = add_backends(made, store, rank, size, timeout, name, ranks, options.nccl, split, share_gpus)
        self._roll_call = RollCall(dist.PrefixStore("roll-call/", self._own_store), rank, size, timeout)
        control = StoreControlPlane(self._own_store, rank, timeout.total_seconds())
        timeout_s = _deadline(timeout)
        agreed = {
            "serves": options.kinds,
            "max_bytes_per_rank": options.max_bytes_per_rank,
            "heap_bytes": options.heap_bytes,
            "timeout": timeout_s,
            "share_gpus": share_gpus,
        }
        facts = self._facts = _Facts(control, size, options.kinds, agreed)
        if not ranks:
            facts.join(store, rank, size, options.heap_bytes, timeout_s)
        self._job = runtime.current_or_none() if facts.kinds else None
        self._device: torch.device | None = None
        self._on_cpu = False
        self._streams: dict[str, Any] = {}
        self._closed = False
        self._coalescing = False
        self._counts: dict[tuple[str, str, str], int] = {}
        if self._job is not None:
            self._device = self._job.device
            self._on_cpu = self._device.type == "cpu"
            self._wait_s = self._job.timeout_s if timeout_s is None else timeout_s
            self._gathers = Gathers(self._job, self._members, max_bytes=self._room(), timeout_s=self._wait_s)
            self._sums = SparseSums(self._job, self._members, timeout_s=self._wait_s)
        elif options.kinds and rank == 0:
            _log.warning("backend tdcoll: group %s is served by %s alone: %s", name, self._inner_names(), facts.reason)

    def _room(self) -> int:
        """The most bytes per rank of a context: as asked for, and at most a quarter of the heap for its two slots."""
        assert self._job is not None
        return min(self._options.max_bytes_per_rank, self._job.heap.nbytes // (8 * self._size))

    # ------------------------------------------------------------------ what torch.distributed asks

    def getBackendName(self) -> str:
        return "tdcoll"

    def get_group_store(self) -> Any:
        return self._store

    def _get_backend(self, device: Any) -> Any:
        device = torch.device(device)
        # While it makes the default group, init_process_group(device_id=...) asks for the backend of that very device
        # and then connects it, and tells this object nothing else of it; split_group and new_group want to know it.
        if device.type == "cuda" and device.index is not None and not self._ranks and not dist.is_initialized():
            self.bound_device_id = device
        return super()._get_backend(torch.device(device.type))

    def split_group(
        self,
        new_ranks: list[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> TdcollProcessGroup | None:
        """A group of ``new_ranks`` (ranks of this group), with communicators of its own; None if not in it."""
        if self._rank not in new_ranks:
            return None
        name = group_name if group_name is not None else "-".join(map(str, new_ranks))
        members = [self._members[rank] for rank in new_ranks]
        made: Any = TdcollProcessGroup(
            self._store,
            new_ranks.index(self._rank),
            len(new_ranks),
            members,
            timeout or self._timeout,
            name,
            self._options if not isinstance(opts, Options) else opts,
            split=False,
        )
        made._set_group_name(name)
        made._set_group_desc(group_desc or f"{self.group_desc}:split")
        found: TdcollProcessGroup = made
        return found

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalescing = True  # what is issued until the end belongs to the inner group's one launch
        super()._start_coalescing(device)

    def _end_coalescing(self, device: torch.device) -> Any:
        self._coalescing = False
        return super()._end_coalescing(device)

    def shutdown(self) -> None:
        expired = None
        if not self._closed:
            self._closed = True
            worker.drain()
            expired = self._expired()
            self._leave()
        super().shutdown()
        if expired is not None:
            raise expired

    def abort(self) -> None:
        self._closed = True
        job = self._job
        if job is not None and not job.closed and self._facts.owns_job:
            job.failed = True
            tdcoll.finalize()
        super().abort()

    def _expired(self) -> BaseException | None:
        """A wait that has expired and of which nobody has heard; waits for the GPU."""
        job = self._job
        if job is None or job.closed or job.failed:
            return None
        if job.device.type == "cuda":
            torch.cuda.synchronize(job.device)
        try:
            self._check()
        except CollectiveTimeout as error:
            return as_backend_error(error)
        return None

    def _leave(self) -> None:
        """Free what tdcoll holds for this group. Collective; after an error, what is left of it."""
        job = self._job
        if job is None or job.closed:
            return
        try:
            if self._facts.owns_job:
                tdcoll.finalize()  # closes no contexts of ours, and frees all memory; of a failed job it does neither
            elif not job.failed:
                self._gathers.close()
                self._sums.close()
        except (TdcollError, dist.DistError) as error:
            _log.warning("backend tdcoll: rank %d left without the others: %s", self._rank, error)

    # ------------------------------------------------------------------ which side

    def _inner_names(self) -> str:
        return " and ".join(f"{name} ({device})" for device, name in self._names.items())

    def _refusal(self, kind: str, device: torch.device) -> str | None:
        """Why tdcoll does not serve this kind here; None if it does. The same on all ranks."""
        if kind not in self._facts.kinds:
            return self._facts.reason or "told not to serve it"
        job, own = self._job, self._device
        assert job is not None
        assert own is not None
        if device.type != own.type:
            return f"a {device.type.upper()} tensor, and tdcoll's memory is on {own.type.upper()}"
        if device.type == "cuda" and device != own:
            raise ValueError(
                f"{kind}: the tensor is on {device}, and tdcoll has this rank's memory on {own}; call "
                'torch.cuda.set_device(LOCAL_RANK) before init_process_group("tdcoll")'
            )
        if job.closed or self._closed:
            return "tdcoll.finalize() was called" if job.closed else "the group is shut down"
        if self._coalescing:
            return "inside of a coalescing block of the inner group"
        return None

    def _say(self, kind: str, side: str, why: str) -> None:
        """Count a call; log the first of its kind."""
        key = (kind, side, why)
        count = self._counts.get(key, 0)
        self._counts[key] = count + 1
        if count == 0 and self._rank == 0:
            _log.info("backend tdcoll: %s of group %s is served by %s%s", kind, self.group_name, side,
                      f" ({why})" if why else "")  # fmt: skip

    def _to_inner(self, kind: str, device: torch.device, why: str) -> None:
        self._say(kind, self._names.get(device.type, device.type), why)

    def _call_inner(self, operation: str, device: torch.device, call: Callable[[], Any]) -> Any:
        """The inner group's work; on CPUs one whose failure names who is gone."""
        if device.type != "cpu":
            return call()
        try:
            return NamedWork(call(), operation, self._roll_call)
        except RuntimeError as error:
            if isinstance(error, (ValueError, TdcollError)) or not may_be_a_peers(error):
                raise
            raise self._roll_call.name(operation, error) from error

    def _internal_stream(self, of: str) -> Any:
        """The stream of what the main thread launches, and that of the worker's tasks. Not one for both: the order in
        which two threads get to it differs from rank to rank, and calls of two ranks would wait behind each other."""
        if of not in self._streams:
            self._streams[of] = torch.cuda.Stream(self._device)
        return self._streams[of]

    def _check(self) -> None:
        """Raise what finished kernels of this group have left, of any kind of call."""
        self._gathers.check()
        self._sums.check()

    def _serve(
        self,
        make: Callable[[], list[torch.Tensor]],
        touched: list[torch.Tensor],
        *,
        asynchronous: bool,
        waits: bool,
        blocks: bool = False,
    ) -> Any:
        """Make a call with tdcoll, now or by the worker. Its work.

        Args:
            make: makes it on the current stream; its result is the work's.
            touched: tensors that it reads and writes.
            asynchronous: whether the caller goes on before it is complete.
            waits: whether it waits on the host.
            blocks: whether ``wait()`` of its work waits on the host too.
        """
        device = self._device
        assert device is not None

        def call() -> list[torch.Tensor]:
            with self._waiting():
                return make()

        if device.type == "cpu":
            if asynchronous:
                return TaskWork(worker.submit(Task(call, give_up=self._give_up)))
            worker.drain()
            return CompletedWork(call())
        with torch.cuda.device(device):
            if not asynchronous:
                if waits:
                    worker.drain()
                result = call()
                if blocks:
                    torch.cuda.current_stream(device).synchronize()
                    with backend_errors:
                        self._check()
                return CompletedWork(result)
            stream = self._internal_stream("worker" if waits else "main")
            if not torch.cuda.is_current_stream_capturing():
                for tensor in touched:
                    record_stream(tensor, stream)
            if waits:
                return TaskWork(worker.submit(Task(call, stream, give_up=self._give_up)))
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                result = call()
            return StreamWork(result, stream, blocks=blocks, check=self._check, keep=touched)

    def _give_up(self) -> None:
        """End the waits of this group's kernels: the process ends."""
        self._gathers.give_up()
        self._sums.give_up()

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        """Inside, exchanges on the host have this group's deadline, and errors of deadlines are torch.distributed's."""
        assert self._job is not None
        with backend_errors, self._job.within(self._wait_s):
            yield

    def _prepare(self, prepare: Callable[[Any], bool], what: Any) -> bool:
        """``prepare(what)`` of :class:`Gathers` or :class:`SparseSums`."""
        with self._waiting():
            return prepare(what)

    # ------------------------------------------------------------------ all-gather

    def _gather(self, pairs: list[tuple[torch.Tensor, torch.Tensor]], asynchronous: bool) -> Any:
        """All-gather ``input -> out [world * n]`` for every ``(out, input)``; None if the inner group has to."""
        device = pairs[0][1].device
        most = max(tensor.nbytes for _, tensor in pairs)
        why = self._refusal("all_gather", device)
        if why is None and self._size == 1:
            why = "one rank"
        if why is None and any(out.layout != torch.strided or t.layout != torch.strided for out, t in pairs):
            why = "not strided"
        if why is None and not self._prepare(self._gathers.prepare, most):
            why = f"more than {self._gathers.limit} bytes per rank"
        if why is not None:
            self._to_inner("all_gather", device, why)
            return None
        for out, tensor in pairs:
            if out.device != device or out.dtype != tensor.dtype or out.numel() != self._size * tensor.numel():
                raise ValueError(
                    f"all_gather: the output must be {tensor.dtype} of {self._size * tensor.numel()} elements on "
                    f"{device}; got {out.dtype} of {out.numel()} on {out.device}"
                )
        self._say("all_gather", "tdcoll", "")
        gathers = self._gathers

        def make() -> list[torch.Tensor]:
            for out, tensor in pairs:
                gathers(out, tensor)
            if device.type == "cpu":
                gathers.check()
            return [out for out, _ in pairs]

        touched = [tensor for pair in pairs for tensor in pair]
        return self._serve(make, touched, asynchronous=asynchronous, waits=False)

    def _gather_at_once(self, output: torch.Tensor, input: torch.Tensor) -> bool:
        """The short way of a synchronous call like one that was made before: whether it was taken."""
        served, job = self._counts.get(_GATHERED), self._job
        if not served or job is None or job.closed or self._closed or self._coalescing:
            return False
        if self._on_cpu:
            worker.drain()
        with backend_errors:
            if not self._gathers.at_once(output, input):
                return False
            if self._on_cpu:
                self._gathers.check()
        self._counts[_GATHERED] = served + 1
        return True

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Any:
        """``[n, ...] -> [world * n, ...]``."""
        output, input = plain(output), plain(input)
        if opts is not None and not opts.asyncOp and self._gather_at_once(output, input):
            return CompletedWork([output])
        work = self._gather([(output, input)], opts is None or opts.asyncOp)
        if work is not None:
            return work
        return self._call_inner("all_gather", input.device, lambda: gather_into(self._plain, output, input, opts))

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Any:
        """``[n_i, ...] -> [world * n_i, ...]`` for every i."""
        outputs, inputs = [plain(out) for out in outputs], [plain(tensor) for tensor in inputs]
        work = None
        if inputs:
            work = self._gather(list(zip(outputs, inputs, strict=True)), opts is None or opts.asyncOp)
        if work is not None:
            return work
        inner = self._plain
        call = getattr(inner, "all_gather_single_coalesced", None) or inner.allgather_into_tensor_coalesced
        opts = AllgatherOptions() if opts is None else opts
        return self._call_inner("all_gather", _device_of(inputs), lambda: call(outputs, inputs, opts))

    allgather_into_tensor_coalesced: Any = all_gather_single_coalesced

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """``[n_rank, ...] of every rank -> a list of all of them``; of one input."""
        if isinstance(inputs, torch.Tensor):
            outputs, inputs, opts = [outputs], [inputs], None
        outputs, inputs = [[plain(out) for out in pieces] for pieces in outputs], [plain(tensor) for tensor in inputs]
        opts = AllgatherOptions() if opts is None else opts
        work = self._gather_list(outputs[0], inputs[0], opts.asyncOp) if len(inputs) == len(outputs) == 1 else None
        if work is not None:
            return work
        return self._call_inner("all_gather", _device_of(inputs), lambda: self._plain.allgather(outputs, inputs, opts))

    def _gather_list(self, pieces: list[torch.Tensor], tensor: torch.Tensor, asynchronous: bool) -> Any:
        """The list form, of sizes that may differ; every rank knows all of them from its list. None: inner group."""
        if len(pieces) != self._size:
            raise ValueError(f"all_gather: the list must have {self._size} tensors, one per rank; got {len(pieces)}")
        device, dtype = tensor.device, tensor.dtype
        sizes = [piece.numel() for piece in pieces]
        most = max(sizes)
        why = self._refusal("all_gather", device)
        if why is None and self._size == 1:
            why = "one rank"
        if why is None and (tensor.layout != torch.strided or any(piece.layout != torch.strided for piece in pieces)):
            why = "not strided"
        if why is None and not self._prepare(self._gathers.prepare, most * dtype.itemsize):
            why = f"more than {self._gathers.limit} bytes per rank"
        if why is not None:
            self._to_inner("all_gather", device, why)
            return None
        if any(piece.device != device or piece.dtype != dtype for piece in pieces) or (
            sizes[self._rank] != tensor.numel()
        ):
            raise ValueError(
                f"all_gather: all tensors must be {dtype} on {device}, and the input ({tensor.numel()} elements) as "
                f"large as its own place in the list ({sizes[self._rank]})"
            )
        self._say("all_gather", "tdcoll", "")
        gathers, rank, world = self._gathers, self._rank, self._size

        def make() -> list[torch.Tensor]:
            own = tensor
            if sizes[rank] != most:
                own = tensor.new_empty(most)
                own[: sizes[rank]] = tensor.reshape(-1)
            out = tensor.new_empty((world, most))
            gathers(out, own)
            for piece, row, size in zip(pieces, out, sizes, strict=True):
                piece.copy_(row[:size].view(piece.shape))
            if device.type == "cpu":
                gathers.check()
            return pieces

        return self._serve(make, [*pieces, tensor], asynchronous=asynchronous, waits=False)

    # ------------------------------------------------------------------ all-reduce

    def allreduce(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> Any:
        """The inner group's all-reduce; of a sparse COO tensor, tdcoll's."""
        tensors = [plain(tensor) for tensor in ([tensors] if isinstance(tensors, torch.Tensor) else tensors)]
        if not isinstance(opts, AllreduceOptions):
            op, opts = opts, AllreduceOptions()
            if op is not None:
                opts.reduceOp = op
            if timeout is not None:
                opts.timeout = timeout
        if tensors and tensors[0].layout == torch.sparse_coo:
            return self._sparse(tensors, opts)
        return self._call_inner("all_reduce", _device_of(tensors), lambda: self._plain.allreduce(tensors, opts))

    def _sparse(self, tensors: list[torch.Tensor], opts: Any) -> Any:
        tensor, op = tensors[0], _operation(opts.reduceOp)
        device = tensor.device
        SparseSums.refuse_wrong(tensor, op)
        why = self._refusal("sparse_all_reduce", device)
        if why is None:
            why = SparseSums.refusal(tensor, op)
        if why is None and (len(tensors) != 1 or not tensor.sparse_dim()):
            why = "not one tensor with sparse dimensions"
        if why is None and not self._prepare(self._sums.prepare, tensor):
            why = "the symmetric heap has no room for it"
        if why is not None:
            return self._sparse_inner(tensors, op, opts, why)
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise ContextError(
                "sparse all_reduce: the size of the result must be known on the host, which a CUDA graph cannot wait "
                "for; use tdcoll.sparse_all_reduce_padded"
            )
        self._say("sparse_all_reduce", "tdcoll", "")
        with backend_errors:
            self._gathers.check()
        sums = self._sums

        def make() -> list[torch.Tensor]:
            tensor.data = sums(tensor, op)
            return [tensor]

        return self._serve(make, [tensor], asynchronous=opts.asyncOp, waits=True)

    def _sparse_inner(self, tensors: list[torch.Tensor], op: str, opts: Any, why: str) -> Any:
        """gloo sums sparse tensors itself; over NCCL all rows go to all ranks."""
        tensor = tensors[0]
        if self._names.get(tensor.device.type) != "nccl" or op not in ("sum", "mean") or len(tensors) != 1:
            self._to_inner("sparse_all_reduce", tensor.device, why)
            mean = op == "mean" and self._names.get(tensor.device.type) == "gloo"
            if mean:  # gloo has sums alone
                opts.reduceOp = dist.ReduceOp.SUM
                tensor.data = tensor.detach() / self._size
            return self._call_inner("all_reduce", tensor.device, lambda: self._plain.allreduce(tensors, opts))
        self._say("sparse_all_reduce", "nccl", f"all-gathers of rows and indices; {why}")
        tensor.data = sparse_sum_by_gather(self._plain, tensor, op)
        return CompletedWork([tensor])

    # ------------------------------------------------------------------ the rest of what is named on failure

    def broadcast(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> Any:
        if isinstance(tensors, torch.Tensor):
            root, opts, tensors = opts, BroadcastOptions(), [tensors]
            opts.rootRank = root
            if timeout is not None:
                opts.timeout = timeout
        opts = BroadcastOptions() if opts is None else opts
        return self._call_inner("broadcast", _device_of(tensors), lambda: self._plain.broadcast(tensors, opts))

    # ------------------------------------------------------------------ barrier

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> Any:  # type: ignore[override]
        """Wait for all ranks, and for what they have queued on their current streams."""
        timeout = opts if isinstance(opts, timedelta) else timeout
        if not isinstance(opts, BarrierOptions):
            opts = BarrierOptions()
        if timeout is not None:
            opts.timeout = timeout
        device = self._device or torch.device("cpu")
        why = self._refusal("barrier", device)
        if why is None and self._size == 1:
            why = "one rank"
        if why is None and opts.timeout != _UNSET:
            why = "a timeout of its own"
        if why is None and not self._prepare(self._gathers.prepare, 0):
            why = "the symmetric heap has no room for it"
        if why is not None:
            where = getattr(opts, "device", None) or torch.device("cpu")
            self._to_inner("barrier", where, why)
            return self._call_inner("barrier", where, lambda: self._plain.barrier(opts))
        self._say("barrier", "tdcoll", "")
        gathers = self._gathers

        def make() -> list[torch.Tensor]:
            gathers.meet()
            if device.type == "cpu":
                gathers.check()
            return []

        return self._serve(make, [], asynchronous=opts.asyncOp, waits=False, blocks=True)

    # ------------------------------------------------------------------ words

    def describe(self) -> str:
        """See :func:`explain`."""
        facts, options = self._facts, self._options
        lines = [f"process group {self.group_name}: backend tdcoll, rank {self._rank} of {self._size}"]
        if self._job is not None:
            topology = self._job.topology(self._members)
            where = "simulator" if self._job.simulated else str(self._device)
            lines.append(f"  ranks: {topology.describe()}, symmetric memory: {where}")
        lines.append(f"  inner group: {self._inner_names()}")
        for kind in KINDS:
            if kind in facts.kinds:
                detail = {
                    "all_gather": f"up to {self._gathers.limit} bytes per rank, {self._gathers.describe()}",
                    "sparse_all_reduce": f"sum and mean, {self._sums.describe()}",
                    "barrier": "",
                }[kind]
                lines.append(f"  {kind}: tdcoll" + (f"; {detail}" if detail else ""))
            else:
                why = facts.reason or f"told to serve {options.serves or os.environ.get('TDCOLL_BACKEND_SERVES')}"
                lines.append(f"  {kind}: inner group; {why}")
        lines.append("  everything else: inner group")
        for (kind, side, why), count in self._counts.items():
            lines.append(f"  calls so far: {count} {kind} by {side}" + (f" ({why})" if why else ""))
        return "\n".join(lines)


def _device_of(tensors: list[torch.Tensor]) -> torch.device:
    return tensors[0].device if tensors else torch.device("cpu")


def _deadline(timeout: timedelta) -> float | None:
    """Seconds that a kernel waits: the group's timeout if one was given, else ``TDCOLL_TIMEOUT_S`` if that is set."""
    default = dist.distributed_c10d.default_pg_timeout
    if timeout == default and os.environ.get("TDCOLL_TIMEOUT_S"):
        return None
    return min(timeout.total_seconds(), arguments.MOST_SECONDS)


def explain(group: Any = None) -> str:
    """What serves which calls of a process group, and why; with the number of calls so far. Text, for people.

    Args:
        group: a process group; None for the default one.

    Raises:
        TypeError: ``group`` is no process group.
        ValueError: there is no default group, or this process is not in ``group``.
    """
    group = dist.group.WORLD if group is None else group
    if group is None or group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("explain needs a process group that this process is in")
    arguments.instance("group", group, ProcessGroup, "a process group or None")
    if isinstance(group, TdcollProcessGroup):
        return group.describe()
    return f"process group {group.group_name}: backend {dist.get_backend(group)}; tdcoll serves none of its calls"
