# SPDX-License-Identifier: Apache-2.0
"""The process group of backend ``tdcoll``: torch.distributed's calls, and the forms that their arguments come in.

``torch.distributed`` lets Python subclass ``ProcessGroup``, not ``Backend``. What is overridden here is reached from
Python, and from C++ (DDP's reducer, functional collectives) where PyTorch's trampoline has the method; everything else
is ``ProcessGroup``'s own, which finds gloo and NCCL registered with this object.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
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

from tdcoll import arguments, capture, runtime
from tdcoll.collectives._host.drop_in import TORCH_OPERATIONS
from tdcoll.distributed.agreement import Agreement
from tdcoll.distributed.inner import RollCall, add_backends, gather_into, sparse_sum_by_gather
from tdcoll.distributed.options import Options
from tdcoll.distributed.served import SparseSums, plain
from tdcoll.distributed.sides import Sides
from tdcoll.distributed.work import CompletedWork, backend_errors
from tdcoll.runtime import lifecycle
from tdcoll.runtime.control import StoreControlPlane, generation, keep

__all__ = ["TdcollProcessGroup", "create", "explain"]

_UNSET = AllgatherOptions().timeout
"""What a call's options hold when it has no timeout of its own."""

_NO_ROOM = "the symmetric heap has no room for it"


def _operation(op: Any) -> str:
    return next((name for known, name in TORCH_OPERATIONS.items() if op == known), str(op))


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
        inner = self._plain = ProcessGroup(store, rank, size)
        """gloo and NCCL, without what is overridden here."""
        share_gpus = lifecycle.may_share_gpus()
        names = add_backends((self, inner), store, rank, size, timeout, name, ranks, options.nccl, split, share_gpus)
        timeout_s = _deadline(timeout)
        settings = {
            "serves": options.kinds,
            "max_bytes_per_rank": options.max_bytes_per_rank,
            "heap_bytes": options.heap_bytes,
            "timeout": timeout_s,
            "share_gpus": share_gpus,
        }
        own_store = dist.PrefixStore("tdcoll/", store)
        roll_call = RollCall(dist.PrefixStore("roll-call/", own_store), rank, size, timeout)
        control = StoreControlPlane(own_store, rank, timeout.total_seconds())
        agreed = Agreement(control, size, options.kinds, settings)
        if not ranks:
            agreed.join(store, rank, size, options.heap_bytes, timeout_s)
        self._sides = Sides(
            runtime.current_or_none() if agreed.kinds else None,
            agreed,
            options,
            name=name,
            rank=rank,
            members=members,
            inner=names,
            roll_call=roll_call,
            timeout_s=timeout_s,
        )

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
        self._sides.coalescing = True  # what is issued until the end belongs to the inner group's one launch
        super()._start_coalescing(device)

    def _end_coalescing(self, device: torch.device) -> Any:
        self._sides.coalescing = False
        return super()._end_coalescing(device)

    def shutdown(self) -> None:
        expired = self._sides.close()
        super().shutdown()
        if expired is not None:
            raise expired

    def abort(self) -> None:
        self._sides.abort()
        super().abort()

    # ------------------------------------------------------------------ all-gather

    def _may_gather(self, device: torch.device, nbytes: int, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether tdcoll serves an all-gather of at most ``nbytes`` per rank of these. Counts one that it does not."""
        sides = self._sides
        why = sides.refusal(
            "all_gather",
            device,
            sides.alone,
            lambda: None if all(tensor.layout == torch.strided for tensor in tensors) else "not strided",
            lambda: sides.unprepared(
                sides.gathers.prepare, nbytes, lambda: f"more than {sides.gathers.limit} bytes per rank"
            ),
        )
        if why is not None:
            sides.to_inner("all_gather", device, why)
        return why is None

    def _gather(self, pairs: list[tuple[torch.Tensor, torch.Tensor]], asynchronous: bool) -> Any:
        """All-gather ``input -> out [world * n]`` for every ``(out, input)``; None if the inner group has to."""
        device = pairs[0][1].device
        touched = [tensor for pair in pairs for tensor in pair]
        if not self._may_gather(device, max(tensor.nbytes for _, tensor in pairs), touched):
            return None
        for out, tensor in pairs:
            if out.device != device or out.dtype != tensor.dtype or out.numel() != self._size * tensor.numel():
                raise ValueError(
                    f"all_gather: the output must be {tensor.dtype} of {self._size * tensor.numel()} elements on "
                    f"{device}; got {out.dtype} of {out.numel()} on {out.device}"
                )
        gathers = self._sides.gathers

        def make() -> list[torch.Tensor]:
            for out, tensor in pairs:
                gathers(out, tensor)
            return [out for out, _ in pairs]

        return self._sides.serve("all_gather", make, touched, asynchronous=asynchronous)

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Any:
        """``[n, ...] -> [world * n, ...]``."""
        output, input = plain(output), plain(input)
        if opts is not None and not opts.asyncOp and self._sides.gather_at_once(output, input):
            return CompletedWork([output])
        work = self._gather([(output, input)], opts is None or opts.asyncOp)
        if work is not None:
            return work
        return self._sides.call_inner("all_gather", input.device, lambda: gather_into(self._plain, output, input, opts))

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
        return self._sides.call_inner("all_gather", _device_of(inputs), lambda: call(outputs, inputs, opts))

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
        return self._sides.call_inner(
            "all_gather", _device_of(inputs), lambda: self._plain.allgather(outputs, inputs, opts)
        )

    def _gather_list(self, pieces: list[torch.Tensor], tensor: torch.Tensor, asynchronous: bool) -> Any:
        """The list form, of sizes that may differ; every rank knows all of them from its list. None: inner group."""
        if len(pieces) != self._size:
            raise ValueError(f"all_gather: the list must have {self._size} tensors, one per rank; got {len(pieces)}")
        device, dtype = tensor.device, tensor.dtype
        sizes = [piece.numel() for piece in pieces]
        most = max(sizes)
        if not self._may_gather(device, most * dtype.itemsize, [*pieces, tensor]):
            return None
        if any(piece.device != device or piece.dtype != dtype for piece in pieces) or (
            sizes[self._rank] != tensor.numel()
        ):
            raise ValueError(
                f"all_gather: all tensors must be {dtype} on {device}, and the input ({tensor.numel()} elements) as "
                f"large as its own place in the list ({sizes[self._rank]})"
            )
        gathers, rank, world = self._sides.gathers, self._rank, self._size

        def make() -> list[torch.Tensor]:
            own = tensor
            if sizes[rank] != most:
                own = tensor.new_empty(most)
                own[: sizes[rank]] = tensor.reshape(-1)
            out = tensor.new_empty((world, most))
            gathers(out, own)
            for piece, row, size in zip(pieces, out, sizes, strict=True):
                piece.copy_(row[:size].view(piece.shape))
            return pieces

        return self._sides.serve("all_gather", make, [*pieces, tensor], asynchronous=asynchronous)

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
        return self._sides.call_inner("all_reduce", _device_of(tensors), lambda: self._plain.allreduce(tensors, opts))

    def _sparse(self, tensors: list[torch.Tensor], opts: Any) -> Any:
        tensor, op, sides = tensors[0], _operation(opts.reduceOp), self._sides
        device = tensor.device
        SparseSums.refuse_wrong(tensor, op)
        one = len(tensors) == 1 and tensor.sparse_dim()
        why = sides.refusal(
            "sparse_all_reduce",
            device,
            lambda: SparseSums.refusal(tensor, op),
            lambda: None if one else "not one tensor with sparse dimensions",
            lambda: sides.unprepared(sides.sums.prepare, tensor, lambda: _NO_ROOM),
        )
        if why is not None:
            return self._sparse_inner(tensors, op, opts, why)
        capture.refuse(
            device, "sparse all_reduce",
            "the size of the result must be known on the host, which a CUDA graph cannot wait for; use "
            "tdcoll.sparse_all_reduce_padded",
        )  # fmt: skip
        with backend_errors:
            sides.gathers.check()

        def make() -> list[torch.Tensor]:
            tensor.data = sides.sums(tensor, op)
            return [tensor]

        return sides.serve("sparse_all_reduce", make, [tensor], asynchronous=opts.asyncOp, waits=True)

    def _sparse_inner(self, tensors: list[torch.Tensor], op: str, opts: Any, why: str) -> Any:
        """gloo sums sparse tensors itself; over NCCL all rows go to all ranks."""
        tensor = tensors[0]
        if self._sides.inner_name(tensor.device) != "nccl" or op not in ("sum", "mean") or len(tensors) != 1:
            self._sides.to_inner("sparse_all_reduce", tensor.device, why)
            mean = op == "mean" and self._sides.inner_name(tensor.device) == "gloo"
            if mean:  # gloo has sums alone
                opts.reduceOp = dist.ReduceOp.SUM
                tensor.data = tensor.detach() / self._size
            return self._sides.call_inner("all_reduce", tensor.device, lambda: self._plain.allreduce(tensors, opts))
        self._sides.say("sparse_all_reduce", "nccl", f"all-gathers of rows and indices; {why}")
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
        return self._sides.call_inner("broadcast", _device_of(tensors), lambda: self._plain.broadcast(tensors, opts))

    # ------------------------------------------------------------------ barrier

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> Any:  # type: ignore[override]
        """Wait for all ranks, and for what they have queued on their current streams."""
        timeout = opts if isinstance(opts, timedelta) else timeout
        if not isinstance(opts, BarrierOptions):
            opts = BarrierOptions()
        if timeout is not None:
            opts.timeout = timeout
        sides = self._sides
        device = sides.device or torch.device("cpu")
        why = sides.refusal(
            "barrier",
            device,
            sides.alone,
            lambda: "a timeout of its own" if opts.timeout != _UNSET else None,
            lambda: sides.unprepared(sides.gathers.prepare, 0, lambda: _NO_ROOM),
        )
        if why is not None:
            where = getattr(opts, "device", None) or torch.device("cpu")
            sides.to_inner("barrier", where, why)
            return sides.call_inner("barrier", where, lambda: self._plain.barrier(opts))

        def make() -> list[torch.Tensor]:
            sides.gathers.meet()
            return []

        return sides.serve("barrier", make, [], asynchronous=opts.asyncOp, blocks=True)

    # ------------------------------------------------------------------ words

    def describe(self) -> str:
        """See :func:`explain`."""
        heading = f"process group {self.group_name}: backend tdcoll, rank {self._rank} of {self._size}"
        return "\n".join([heading, *self._sides.describe()])


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
