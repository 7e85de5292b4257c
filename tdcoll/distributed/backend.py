# SPDX-License-Identifier: Apache-2.0
"""The process group of backend ``tdcoll``: torch.distributed's calls, and the forms of their
arguments.

``torch.distributed`` lets Python subclass ``ProcessGroup``, not ``Backend``. Python calls the
methods overridden here, and C++ (DDP's reducer, functional collectives) calls them if PyTorch's
trampoline has the method. Every other method is ``ProcessGroup``'s own, which finds gloo and NCCL
registered with this object.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    BarrierOptions,
    ProcessGroup,
    ReduceScatterOptions,
)

from tdcoll import runtime
from tdcoll.base import capture
from tdcoll.base.forks import refuse_inherited_group
from tdcoll.base.torch_internals import batch_messages_of, never_compiled
from tdcoll.distributed import methods
from tdcoll.distributed.agreement import Agreement
from tdcoll.distributed.call import Call, plain
from tdcoll.distributed.dispatch import Dispatcher
from tdcoll.distributed.fallback import Fallback, add_backends
from tdcoll.distributed.forked import replaced_in_children, watch
from tdcoll.distributed.methods import Method
from tdcoll.distributed.options import Options
from tdcoll.distributed.sparse import SPARSE_ALL_REDUCE, refuse_wrong
from tdcoll.distributed.work import FallbackWork, backend_errors
from tdcoll.runtime.control import generation, keep


def create(group_options: Any, pg_options: Any) -> TdcollProcessGroup:
    """Make a process group of backend ``"tdcoll"``, for ``torch.distributed``. Collective over its
    ranks.

    Raises:
        RankMismatchError: ranks of the group have been given different options.
        BackendTimeout: a rank of the group did not come, or the store does not answer.
        TdcollError: the store is gone.
        TypeError, ValueError: options that do not exist.
    """
    if torch.cuda.is_available() and dist.is_nccl_available():  # gloo has no batches
        batch_messages_of(TdcollProcessGroup)
    ranks = list(group_options.global_ranks_in_group)
    options = Options.of(pg_options)
    if ranks:
        refuse_inherited_group("new_group")
    store = _meeting_place(group_options.store, ranks)
    # none before PyTorch 2.14
    device = getattr(getattr(group_options, "process_group", None), "bound_device_id", None)
    with backend_errors, runtime.failing_with_the_store():
        return TdcollProcessGroup(
            store,
            group_options.group_rank,
            group_options.group_size,
            ranks,
            group_options.timeout,
            group_options.group_id,
            options,
            device=device,
        )


def _meeting_place(store: Any, ranks: list[int]) -> Any:
    """``store`` without the prefixes of the group's name and device.

    PyTorch's names are numbers that each process counts, and they differ from rank to rank when
    init_process_group has failed on some of them. The ranks that take part are enough: see
    :func:`tdcoll.runtime.control.generation`.
    """
    if ranks:
        default = dist.distributed_c10d._get_default_group()
        if isinstance(default, TdcollProcessGroup):
            return default._store
    for _ in ("device", "name"):
        store = store.underlying_store
    return store


class TdcollProcessGroup(ProcessGroup):
    """A process group that handles some calls with tdcoll's kernels and falls back to gloo and NCCL
    for the rest.

    Made by ``init_process_group("tdcoll")`` and ``new_group``; :func:`tdcoll.distributed.explain`
    describes it.

    Args:
        store: where its ranks meet; the group takes a part of it.
        rank, size: in the group.
        ranks: global ranks in the order of the group; empty for the default group.
        timeout: of the group; also the deadline of waits in kernels.
        name: of the group.
        options: which calls to handle.
        split: whether NCCL may split the default group's communicator, in which all of its ranks
            take part.
        device: the GPU that ``init_process_group`` has bound the group to, if PyTorch says so here.
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
        device: torch.device | None = None,
    ) -> None:
        make: Any = super().__init__  # with a store it makes an object that Python cannot subclass
        make(rank, size)
        watch(self)
        self._members = tuple(ranks) or tuple(range(size))
        self._rank = rank
        self._size = size
        if not ranks:
            keep(store)
        members = self._members
        store = generation(store, members[rank], members, "backend tdcoll", timeout.total_seconds())
        self._store = store
        self._timeout = timeout
        self._options = options
        self._ranks = ranks
        plain = self._plain = ProcessGroup(store, rank, size)
        """gloo and NCCL, without the methods overridden here."""
        more = options.nccl, split, self._take_timeout, device
        self._backends = add_backends((self, plain), store, rank, size, timeout, name, ranks, *more)
        agreed = Agreement(store, rank, members, options, timeout, name, default=not ranks)
        names = {device: backend for device, (backend, _) in self._backends.items()}
        self.dispatcher = Dispatcher(agreed, Fallback(plain, names))

    # ------------------------------------------------------------------ queries of torch.distributed

    def getBackendName(self) -> str:
        return "tdcoll"

    def get_group_store(self) -> Any:
        return self._store

    def _get_backend(self, device: Any) -> Any:
        device = torch.device(device)
        # While it makes the default group, init_process_group(device_id=...) only requests the
        # backend of that device and connects it. Take note of the device, because split_group and
        # new_group need it.
        if (
            device.type == "cuda"
            and device.index is not None
            and not self._ranks
            and not dist.is_initialized()
        ):
            self.bound_device_id = device
        return super()._get_backend(torch.device(device.type))

    def set_timeout(self, timeout: timedelta) -> None:
        """Change the deadline of later calls, of tdcoll's as well as the fallback backend's."""
        super().set_timeout(timeout)
        self._take_timeout(timeout)

    def _take_timeout(self, timeout: timedelta) -> None:
        """Change the deadline of what tdcoll handles, and of groups that are split off."""
        self._timeout = timeout
        self.dispatcher.set_timeout(timeout)

    # Hooks of PyTorch 2.14. C++ calls those of a group from the operators of its own calls, which
    # tdcoll doesn't make.

    def register_pre_hook(self, hook_id: int, hook: Callable[[Any], None]) -> None:
        """Call ``hook`` before each call of the group; see
        :class:`~tdcoll.distributed.observers.BeforeCall`."""
        self.dispatcher.hook(self.dispatcher.hooks.before, hook_id, hook)

    def unregister_pre_hook(self, hook_id: int) -> None:
        self.dispatcher.hook(self.dispatcher.hooks.before, hook_id, None)

    def register_post_hook(self, hook_id: int, hook: Callable[[Any], None]) -> None:
        """Call ``hook`` behind each call of the group; see
        :class:`~tdcoll.distributed.observers.BehindCall`."""
        self.dispatcher.hook(self.dispatcher.hooks.behind, hook_id, hook)

    def unregister_post_hook(self, hook_id: int) -> None:
        self.dispatcher.hook(self.dispatcher.hooks.behind, hook_id, None)

    def split_group(
        self,
        new_ranks: list[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> TdcollProcessGroup | None:
        """Return a group of ``new_ranks`` (ranks of this group), with its own communicators; None
        if not in it."""
        if self._rank not in new_ranks:
            return None
        name = group_name if group_name is not None else "-".join(map(str, new_ranks))
        members = [self._members[rank] for rank in new_ranks]
        options = self._options if opts is None else Options.of(opts)
        # NCCL's, which torch.distributed.split_group always passes
        if not isinstance(opts, Options):
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

    @property
    def supports_coalescing(self) -> bool:
        """Whether the fallback backend of this rank's device launches several calls as one."""
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return bool(self._plain._get_backend(device).supports_coalescing)

    def start_coalescing(self, device: torch.device) -> None:
        self._plain._start_coalescing(device)
        # what is issued until the end belongs to the fallback backend's one launch
        self.dispatcher.coalescing = True
        self.dispatcher.fallback.block = []

    def end_coalescing(self, device: torch.device) -> Any:
        fallback = self.dispatcher.fallback
        calls = fallback.block
        fallback.block = None
        try:
            work = self._plain._end_coalescing(device)
        finally:
            self.dispatcher.coalescing = False
        if not calls:
            return work

        def finish() -> None:
            for write, _ in calls:
                write()

        values = [value for _, result in calls for value in result]
        works = [] if work is None else [work]
        return FallbackWork(works, finish, values, fallback.copies_to(device))

    # PyTorch's Python code calls these, and its C++ code those without underscores, from 2.15 on.
    _start_coalescing: Any = start_coalescing
    _end_coalescing: Any = end_coalescing

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
        return self.dispatcher.call_one(methods.ALL_GATHER_SINGLE, output, input, None, opts)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Any:
        """``[n_i, ...] -> [world * n_i, ...]`` for every i."""
        if len(outputs) == len(inputs) == 1:
            return self.all_gather_single(outputs[0], inputs[0], opts)
        return self._call(methods.ALL_GATHER_SEVERAL, outputs, inputs, (opts,))

    allgather_into_tensor_coalesced: Any = all_gather_single_coalesced

    def allgather(self, output_tensors: Any, input_tensors: Any, *args: Any, **named: Any) -> Any:  # type: ignore[override]
        """``[n_rank, ...] of every rank -> a list of all of them``; of one input."""
        if isinstance(input_tensors, torch.Tensor):
            output_tensors = [output_tensors]
            input_tensors = [input_tensors]
        if len(input_tensors) == len(output_tensors) == 1:
            return self._call(methods.ALL_GATHER, output_tensors[0], input_tensors, args, named)
        return self._lists(output_tensors, input_tensors, False, args, named)

    def allgather_coalesced(
        self, output_lists: Any, input_list: Any, *args: Any, **named: Any
    ) -> Any:
        return self._lists(output_lists, input_list, True, args, named)

    def _lists(self, outputs: Any, inputs: Any, coalesced: bool, args: Any, named: Any) -> Any:
        """Gather several tensors into lists, by the fallback backend."""
        method = methods.all_gather_lists([len(pieces) for pieces in outputs], coalesced)
        return self._call(
            method, [piece for pieces in outputs for piece in pieces], inputs, args, named
        )

    # ------------------------------------------------------------------ reductions

    def allreduce(  # type: ignore[override]
        self, tensors: Any, opts: Any = None, timeout: timedelta | None = None, *, op: Any = None
    ) -> Any:
        """Reduce each element over the ranks, in place. A sparse COO tensor becomes coalesced."""
        if type(tensors) is not list:  # asking whether it is a tensor takes much longer
            tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        if type(opts) is not AllreduceOptions:
            opts = methods.ALL_REDUCE.options_of((opts if op is None else op, timeout))
        if len(tensors) != 1:
            return self._call(methods.ALL_REDUCE_SEVERAL, tensors, tensors, (opts,))
        tensor = tensors[0]
        if type(tensor) is not torch.Tensor:
            tensor = plain(tensor)
        if tensor.is_sparse:
            return self._sparse(tensor, methods.reduction_of(opts), opts)
        return self.dispatcher.call_one(
            methods.ALL_REDUCE, tensor, tensor, methods.reduction_of(opts), opts
        )

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        """Reduce each element of several dense tensors over the ranks, in place."""
        if len(tensors) == 1 and tensors[0].layout == torch.strided:
            return self.allreduce(tensors, opts)
        return self._call(methods.ALL_REDUCE_SEVERAL, tensors, tensors, (opts,))

    def _sparse(self, tensor: torch.Tensor, op: str, opts: Any) -> Any:
        refuse_wrong(tensor, op)
        capture.refuse(
            tensor.device, "sparse all_reduce",
            "the size of the result must be known on the host, which a CUDA graph cannot wait for; use "
            "tdcoll.sparse_all_reduce_padded",
        )  # fmt: skip
        return self.dispatcher.call(
            Call([tensor], [tensor], op, method=SPARSE_ALL_REDUCE, opts=opts)
        )

    def reduce_scatter_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None
    ) -> Any:
        """``[world * n, ...] -> [n, ...]``: this rank's part of the reduction."""
        opts = ReduceScatterOptions() if opts is None else opts
        return self.dispatcher.call_one(
            methods.REDUCE_SCATTER_SINGLE, output, input, methods.reduction_of(opts), opts
        )

    _reduce_scatter_base: Any = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Any:
        """``[world * n_i, ...] -> [n_i, ...]`` for every i."""
        if len(outputs) == len(inputs) == 1:
            return self.reduce_scatter_single(outputs[0], inputs[0], opts)
        return self._call(methods.REDUCE_SCATTER_SEVERAL, outputs, inputs, (opts,))

    reduce_scatter_tensor_coalesced: Any = reduce_scatter_single_coalesced

    def reduce_scatter(  # type: ignore[override]
        self, output_tensors: Any, input_tensors: Any, *args: Any, **named: Any
    ) -> Any:
        """``a list with [n_rank, ...] for every rank -> [n_rank, ...]``, reduced."""
        output_tensors, input_tensors = _in_lists(output_tensors, input_tensors)
        return self._call(methods.REDUCE_SCATTER, output_tensors, input_tensors, args, named)

    def reduce(self, tensors: Any, *args: Any, **named: Any) -> Any:  # type: ignore[override]
        """Reduce each element over the ranks, to one of them."""
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        return self._call(methods.REDUCE, tensors, tensors, args, named)

    # ------------------------------------------------------------------ all-to-all

    def all_to_all_single(  # type: ignore[override]
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Any,
        input_split_sizes: Any,
        *args: Any,
        **named: Any,
    ) -> Any:
        """``[world * n, ...] -> [world * n, ...]``. Falls back if there are split sizes, because
        ranks' may differ."""
        opts = methods.ALL_TO_ALL_SINGLE.options_of(args, named)
        if not output_split_sizes and not input_split_sizes:
            return self.dispatcher.call_one(methods.ALL_TO_ALL_SINGLE, output, input, None, opts)
        method = methods.all_to_all_single(output_split_sizes or (), input_split_sizes or ())
        call = Call([plain(output)], [plain(input)], method=method, opts=opts)
        return self.dispatcher.call(call, refused="split sizes")

    alltoall_base: Any = all_to_all_single

    def alltoall(self, output_tensor: Any, input_tensor: Any, *args: Any, **named: Any) -> Any:  # type: ignore[override]
        """``a list with [n, ...] for every rank -> a list with [m, ...] of every rank``."""
        return self._call(methods.ALL_TO_ALL, output_tensor, input_tensor, args, named)

    # ------------------------------------------------------------------ one rank with the others

    def broadcast(self, tensors: Any, *args: Any, **named: Any) -> Any:  # type: ignore[override]
        """Give all ranks the values of one of them."""
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        opts = methods.BROADCAST.options_of(args, named)
        if len(tensors) != 1:
            return self._call(methods.BROADCAST, tensors, tensors, (opts,))
        tensor = tensors[0]
        return self.dispatcher.call_one(
            methods.BROADCAST, tensor, tensor, None, opts, root=opts.rootRank
        )

    def gather(self, output_tensors: Any, input_tensors: Any, *args: Any, **named: Any) -> Any:  # type: ignore[override]
        """``[n, ...] of every rank -> a list of all of them``, on one rank."""
        input_tensors, output_tensors = _in_lists(input_tensors, output_tensors)
        return self._call(methods.GATHER, output_tensors, input_tensors, args, named)

    def gather_single(self, output: Any, input: torch.Tensor, *args: Any, **named: Any) -> Any:
        """``[n, ...] of every rank -> [world * n, ...]``, on one rank; PyTorch has it from 2.14
        on."""
        opts = methods.GATHER.options_of(args, named)
        pieces: Any = []
        if opts.rootRank == self._rank:
            stacked = output.shape == (self._size, *input.shape)
            pieces = (
                output.unbind() if stacked else output.split(max(1, output.shape[0] // self._size))
            )
        return self._call(methods.GATHER, pieces, [input], (opts,))

    gather_into_tensor = gather_single

    def scatter(self, output_tensors: Any, input_tensors: Any, *args: Any, **named: Any) -> Any:  # type: ignore[override]
        """``a list with [n, ...] for every rank``, of one rank, ``-> [n, ...]``."""
        output_tensors, input_tensors = _in_lists(output_tensors, input_tensors)
        return self._call(methods.SCATTER, output_tensors, input_tensors, args, named)

    def send(self, tensors: list[torch.Tensor], dstRank: int, tag: int) -> Any:
        return self._call(methods.message("send", dstRank, tag), [], tensors)

    def recv(self, tensors: list[torch.Tensor], srcRank: int, tag: int) -> Any:
        return self._call(methods.message("recv", srcRank, tag), tensors, [])

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int) -> Any:
        return self._call(methods.message("recv_anysource", tag), tensors, [])

    recvAnysource = recv_anysource  # as C++ calls it

    def _call(
        self, method: Method, outs: Any, inputs: Any, args: Any = (), named: Any = None
    ) -> Any:
        """Make a call of several tensors, of none, or of a method that tdcoll never handles."""
        opts = None if method.options is None else method.options_of(args, named)
        outs = [plain(out) for out in outs]
        inputs = outs if method.in_place else [plain(tensor) for tensor in inputs]
        op = methods.reduction_of(opts) if method.reduces else None
        return self.dispatcher.call(Call(outs, inputs, op, method=method, opts=opts))

    # ------------------------------------------------------------------ barrier

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> Any:  # type: ignore[override]
        """Wait for all ranks, and for the work on their current streams."""
        timeout = opts if isinstance(opts, timedelta) else timeout
        if not isinstance(opts, BarrierOptions):
            opts = BarrierOptions()
        if timeout is not None:
            opts.timeout = timeout
        where = getattr(opts, "device", None) or torch.device("cpu")
        return self.dispatcher.call(Call([], [], method=methods.BARRIER, opts=opts, device=where))


def _in_lists(one: Any, pieces: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return a tensor and a list of pieces, as two lists, of either form in which PyTorch takes
    them."""
    if isinstance(one, torch.Tensor):
        return [one], list(pieces)
    return list(one), list(pieces[0]) if pieces else []


never_compiled(TdcollProcessGroup)
replaced_in_children(TdcollProcessGroup)
