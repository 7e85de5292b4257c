# SPDX-License-Identifier: Apache-2.0
"""The process group of backend ``tdcoll``: torch.distributed's calls, and the forms of their arguments.

``torch.distributed`` lets Python subclass ``ProcessGroup``, not ``Backend``. Python calls the methods overridden here,
and C++ (DDP's reducer, functional collectives) calls them if PyTorch's trampoline has the method. Every other method is
``ProcessGroup``'s own, which finds gloo and NCCL registered with this object.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    ProcessGroup,
    ReduceScatterOptions,
)
from torch.distributed.device_mesh import DeviceMesh

from tdcoll import runtime
from tdcoll.base import arguments, capture
from tdcoll.base.forks import refuse_inherited_group
from tdcoll.base.torch_internals import batch_messages_of, never_compiled
from tdcoll.distributed.agreement import Agreement
from tdcoll.distributed.call import Call, plain
from tdcoll.distributed.dispatch import Dispatcher
from tdcoll.distributed.fallback import (
    Fallback,
    Start,
    add_backends,
    exchange_parts,
    gather_into,
    gather_several,
    scatter_from,
    scatter_several,
    sparse_sum_by_gather,
)
from tdcoll.distributed.forked import replaced_in_children, watch
from tdcoll.distributed.options import Options
from tdcoll.distributed.sparse import refuse_wrong
from tdcoll.distributed.work import backend_errors, completed
from tdcoll.primitives.reduce import NAMES_BY_HASH, operation_name
from tdcoll.runtime.control import generation, keep


def _operation(opts: Any) -> str:
    """Return tdcoll's name of the operation in a call's options, or torch's name if tdcoll does not have it."""
    return NAMES_BY_HASH.get(hash(opts.reduceOp)) or str(operation_name(opts.reduceOp))


def create(given: Any, pg_options: Any) -> TdcollProcessGroup:
    """Make a process group of backend ``"tdcoll"``, for ``torch.distributed``. Collective over its ranks.

    Raises:
        RankMismatchError: ranks of the group have been given different options.
        BackendTimeout: a rank of the group did not come, or the store does not answer.
        TdcollError: the store is gone.
        TypeError, ValueError: options that do not exist.
    """
    if torch.cuda.is_available() and dist.is_nccl_available():  # gloo has no batches
        batch_messages_of(TdcollProcessGroup)
    ranks, options = list(given.global_ranks_in_group), Options.of(pg_options)
    if ranks:
        refuse_inherited_group("new_group")
    store = _meeting_place(given.store, ranks)
    with backend_errors, runtime.failing_with_the_store():
        return TdcollProcessGroup(
            store, given.group_rank, given.group_size, ranks, given.timeout, given.group_id, options
        )


def _meeting_place(store: Any, ranks: list[int]) -> Any:
    """``store`` without the prefixes of the group's name and device.

    PyTorch's names are numbers that each process counts, and they differ from rank to rank when init_process_group has
    failed on some of them. The ranks that take part are enough: see :func:`tdcoll.runtime.control.generation`.
    """
    if ranks and isinstance(default := dist.distributed_c10d._get_default_group(), TdcollProcessGroup):
        return default._store
    for _ in ("device", "name"):
        store = store.underlying_store
    return store


class TdcollProcessGroup(ProcessGroup):
    """A process group that handles some calls with tdcoll's kernels and falls back to gloo and NCCL for the rest.

    Made by ``init_process_group("tdcoll")`` and ``new_group``; :func:`tdcoll.distributed.explain` describes it.

    Args:
        store: where its ranks meet; the group takes a part of it.
        rank, size: in the group.
        ranks: global ranks in the order of the group; empty for the default group.
        timeout: of the group; also the deadline of waits in kernels.
        name: of the group.
        options: which calls to handle.
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
        watch(self)
        self._members = tuple(ranks) or tuple(range(size))
        self._rank, self._size = rank, size
        if not ranks:
            keep(store)
        members = self._members
        store = generation(store, members[rank], members, "backend tdcoll", timeout.total_seconds())
        self._store, self._timeout, self._options, self._ranks = store, timeout, options, ranks
        plain = self._plain = ProcessGroup(store, rank, size)
        """gloo and NCCL, without the methods overridden here."""
        names = add_backends((self, plain), store, rank, size, timeout, name, ranks, options.nccl, split)
        agreed = Agreement(store, rank, members, options, timeout, name, default=not ranks)
        self.dispatcher = Dispatcher(agreed, Fallback(plain, names))

    # ------------------------------------------------------------------ queries of torch.distributed

    def getBackendName(self) -> str:
        return "tdcoll"

    def get_group_store(self) -> Any:
        return self._store

    def _get_backend(self, device: Any) -> Any:
        device = torch.device(device)
        # While it makes the default group, init_process_group(device_id=...) only requests the backend of that device
        # and connects it. Take note of the device, because split_group and new_group need it.
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
        """Return a group of ``new_ranks`` (ranks of this group), with its own communicators; None if not in it."""
        if self._rank not in new_ranks:
            return None
        name = group_name if group_name is not None else "-".join(map(str, new_ranks))
        members = [self._members[rank] for rank in new_ranks]
        options = self._options if opts is None else Options.of(opts)
        if not isinstance(opts, Options):  # NCCL's, which torch.distributed.split_group always passes
            options = dataclasses.replace(self._options, nccl=options.nccl)
        made: Any = TdcollProcessGroup(
            self._store,
            new_ranks.index(self._rank),
            len(new_ranks),
            members,
            timeout or self._timeout,
            name,
            options,
            split=False,
        )
        made._set_group_name(name)
        made._set_group_desc(group_desc or f"{self.group_desc}:split")
        found: TdcollProcessGroup = made
        return found

    def _start_coalescing(self, device: torch.device) -> None:
        super()._start_coalescing(device)
        self.dispatcher.coalescing = True  # what is issued until the end belongs to the fallback backend's one launch

    def _end_coalescing(self, device: torch.device) -> Any:
        try:
            return super()._end_coalescing(device)
        finally:
            self.dispatcher.coalescing = False

    def shutdown(self) -> None:
        expired = self.dispatcher.close()
        super().shutdown()
        if expired is not None:
            raise expired

    def abort(self) -> None:
        self.dispatcher.abort()
        super().abort()

    # ------------------------------------------------------------------ all-gather

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Any:
        """``[n, ...] -> [world * n, ...]``."""
        opts = AllgatherOptions() if opts is None else opts
        return self.dispatcher.call_one(
            "all_gather", plain(output), plain(input), None, opts,
            lambda group, outs, inputs: gather_into(group, outs[0], inputs[0], opts),
        )  # fmt: skip

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Any:
        """``[n_i, ...] -> [world * n_i, ...]`` for every i."""
        if len(outputs) == len(inputs) == 1:
            return self.all_gather_single(outputs[0], inputs[0], opts)
        outputs, inputs = [plain(out) for out in outputs], [plain(tensor) for tensor in inputs]
        opts = AllgatherOptions() if opts is None else opts
        return self._several(
            "all_gather", Call(outputs, inputs), opts, lambda group, *lists: gather_several(group, *lists, opts)
        )

    allgather_into_tensor_coalesced: Any = all_gather_single_coalesced

    def _several(self, kind: str, call: Call, opts: Any, start: Start) -> Any:
        """Make a call of several tensors, or of none."""
        if not call.inputs:
            return self.dispatcher.fallback.make(call, start)
        return self.dispatcher.call(kind, call, opts.asyncOp, start)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """``[n_rank, ...] of every rank -> a list of all of them``; of one input."""
        if isinstance(inputs, torch.Tensor):
            outputs, inputs, opts = [outputs], [inputs], None
        outputs, inputs = [[plain(out) for out in pieces] for pieces in outputs], [plain(tensor) for tensor in inputs]
        opts = AllgatherOptions() if opts is None else opts
        if len(inputs) != 1 or len(outputs) != 1:
            return self._plain.allgather(outputs, inputs, opts)
        call = Call(outputs[0], inputs, listed=True)
        return self.dispatcher.call(
            "all_gather", call, opts.asyncOp, lambda group, outs, inputs: group.allgather([outs], inputs, opts)
        )

    # ------------------------------------------------------------------ reductions

    def allreduce(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> Any:
        """Reduce each element over the ranks, in place. A sparse COO tensor becomes coalesced."""
        if type(tensors) is not list:  # asking whether it is a tensor takes much longer
            tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        if type(opts) is not AllreduceOptions and not hasattr(opts, "asyncOp"):
            given, opts = opts, AllreduceOptions()
            if given is not None:
                opts.reduceOp = given
            if timeout is not None:
                opts.timeout = timeout
        op, start = _operation(opts), lambda group, outs, _: group.allreduce(outs, opts)
        if len(tensors) != 1:
            tensors = [plain(tensor) for tensor in tensors]
            return self._several("all_reduce", Call(tensors, tensors, op), opts, start)
        tensor = plain(tensors[0])
        if tensor.layout is torch.sparse_coo:
            return self._sparse(tensor, op, opts)
        return self.dispatcher.call_one("all_reduce", tensor, tensor, op, opts, start)

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        """Reduce each element of several dense tensors over the ranks, in place."""
        opts = AllreduceCoalescedOptions() if opts is None else opts
        if len(tensors) == 1 and tensors[0].layout == torch.strided:
            return self.allreduce(tensors, opts)
        tensors = [plain(tensor) for tensor in tensors]
        call = Call(tensors, tensors, _operation(opts))
        return self._several("all_reduce", call, opts, lambda group, outs, _: group.allreduce_coalesced(outs, opts))

    def _sparse(self, tensor: torch.Tensor, op: str, opts: Any) -> Any:
        refuse_wrong(tensor, op)
        capture.refuse(
            tensor.device, "sparse all_reduce",
            "the size of the result must be known on the host, which a CUDA graph cannot wait for; use "
            "tdcoll.sparse_all_reduce_padded",
        )  # fmt: skip

        def start(group: Any, *lists: Any) -> Any:
            """Neither gloo, which has no means, nor NCCL has all of them: all rows go to all ranks."""
            if op not in ("sum", "mean"):
                return group.allreduce([tensor], opts)
            tensor.data = sparse_sum_by_gather(group, tensor, op)
            return completed([tensor])

        call = Call([tensor], [tensor], op)
        return self.dispatcher.call("sparse_all_reduce", call, opts.asyncOp, start)

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Any:
        """``[world * n, ...] -> [n, ...]``: this rank's part of the reduction."""
        opts = ReduceScatterOptions() if opts is None else opts
        return self.dispatcher.call_one(
            "reduce_scatter", plain(output), plain(input), _operation(opts), opts,
            lambda group, outs, inputs: scatter_from(group, outs[0], inputs[0], opts),
        )  # fmt: skip

    _reduce_scatter_base: Any = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Any:
        """``[world * n_i, ...] -> [n_i, ...]`` for every i."""
        opts = ReduceScatterOptions() if opts is None else opts
        if len(outputs) == len(inputs) == 1:
            return self.reduce_scatter_single(outputs[0], inputs[0], opts)
        outputs, inputs = [plain(out) for out in outputs], [plain(tensor) for tensor in inputs]
        call = Call(outputs, inputs, _operation(opts))
        return self._several("reduce_scatter", call, opts, lambda group, *lists: scatter_several(group, *lists, opts))

    reduce_scatter_tensor_coalesced: Any = reduce_scatter_single_coalesced

    # ------------------------------------------------------------------ all-to-all

    def all_to_all_single(
        self, output: torch.Tensor, input: torch.Tensor, output_splits: Any, input_splits: Any, opts: Any = None
    ) -> Any:
        """``[world * n, ...] -> [world * n, ...]``. Falls back if there are split sizes, because ranks' may differ."""
        output, input, opts = plain(output), plain(input), AllToAllOptions() if opts is None else opts
        splits = output_splits or [], input_splits or []

        def start(group: Any, outs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> Any:
            return exchange_parts(group, outs[0], inputs[0], *splits, opts)

        if output_splits or input_splits:
            call = Call([output], [input])
            return self.dispatcher.call("all_to_all", call, opts.asyncOp, start, refused="split sizes")
        return self.dispatcher.call_one("all_to_all", output, input, None, opts, start)

    alltoall_base: Any = all_to_all_single

    # ------------------------------------------------------------------ barrier

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> Any:  # type: ignore[override]
        """Wait for all ranks, and for the work on their current streams."""
        timeout = opts if isinstance(opts, timedelta) else timeout
        if not isinstance(opts, BarrierOptions):
            opts = BarrierOptions()
        if timeout is not None:
            opts.timeout = timeout
        where = getattr(opts, "device", None) or torch.device("cpu")
        refused = None if opts.timeout == BarrierOptions().timeout else "a timeout of its own"
        call = Call([], [], device=where)
        return self.dispatcher.call(
            "barrier", call, opts.asyncOp, lambda group, *_: group.barrier(opts), refused=refused
        )


def _pass_on(name: str, message: bool) -> Callable[..., Any]:
    """Return a method that passes calls on to the plain group; of a ``message``, unless gloo would read GPU addresses.

    It is one line of Python, which is needed because of a deadlock: if a Python class overrides nothing, PyTorch's
    trampoline calls C++ with the GIL held (``PyProcessGroup.hpp``), and waits there for a lock of gloo's or NCCL's. The
    lock's thread needs the GIL when it releases a tensor. Without these methods one call in a hundred thousand never
    ended.
    """

    def pass_on(self: Any, *given: Any, **named: Any) -> Any:
        where = given[0][0].device if message else None
        if where is not None and where.type == "cuda" and self.dispatcher.fallback.name(where) == "gloo":
            raise ValueError(
                f"{name}: tensor must be on the CPU where ranks share GPUs, since gloo cannot send GPU memory; got one "
                f"on {where}. Pass a copy, tensor.cpu(), or run with a GPU for each rank"
            )
        return getattr(self._plain, name)(*given, **named)

    return pass_on


for _name in ("broadcast", "reduce_scatter", "send", "recv", "recv_anysource"):
    setattr(TdcollProcessGroup, _name, _pass_on(_name, message=_name[:4] in ("send", "recv")))
never_compiled(TdcollProcessGroup)
replaced_in_children(TdcollProcessGroup)


def explain(group: Any = None) -> str:
    """Return a text for people: the backend of each kind of call of a process group, the reasons, and numbers of calls.

    >>> torch.distributed.init_process_group("tdcoll")
    >>> print(tdcoll.distributed.explain())

    Args:
        group: a process group, or a ``DeviceMesh`` of one dimension; the default group if None.

    Raises:
        TypeError: ``group`` is neither.
        ValueError: there is no default group, or this process is not in ``group``.
    """
    group = dist.group.WORLD if group is None else group
    if isinstance(group, DeviceMesh):
        group = group.get_group()  # which says what to do if there are several dimensions
    if group is None or group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("explain needs a process group of this process, made by torch.distributed.init_process_group")
    arguments.instance("group", group, dist.ProcessGroup, "a process group, a DeviceMesh or None")
    if isinstance(group, TdcollProcessGroup):
        heading = f"process group {group.group_name}: backend tdcoll, rank {group.rank()} of {group.size()}"
        return "\n".join([heading, *group.dispatcher.describe()])
    return f"process group {group.group_name}: backend {dist.get_backend(group)}; tdcoll handles none of its calls"
