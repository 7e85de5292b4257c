# SPDX-License-Identifier: Apache-2.0
"""The inner group: gloo for CPU tensors, NCCL (gloo where ranks share GPUs) for CUDA tensors, and what is added."""

from __future__ import annotations

import contextlib
import copy
import itertools
import re
from collections import defaultdict
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, ProcessGroup

from tdcoll.errors import CollectiveTimeout, TdcollError
from tdcoll.runtime.control import wait_for
from tdcoll.runtime.store import ask
from tdcoll.torch_internals import never_compiled

__all__ = ["NamedWork", "RollCall", "add_backends", "beside", "exchange_parts", "gather_into", "scatter_from"]
__all__ += ["sparse_sum_by_gather"]

_ROLL_CALL_S = 5.0


def add_backends(
    groups: tuple[Any, ...],
    store: Any,
    rank: int,
    size: int,
    timeout: timedelta,
    name: str,
    ranks: list[int],
    nccl: Any,
    split: bool,
    share_gpus: bool = False,
) -> dict[str, str]:
    """Make gloo and, where there are GPUs, NCCL, and register them with ``groups``. Collective.

    Args:
        groups: ProcessGroups that get the same backends.
        store, rank, size, timeout: of the group.
        name, ranks: of the group; ``ranks`` is empty for the default group.
        nccl: ``ProcessGroupNCCL.Options`` or None.
        split: whether NCCL may split the default group's communicator, as ``new_group`` does.
        share_gpus: ranks may share GPUs, which NCCL refuses: gloo serves CUDA tensors too.

    Returns:
        The backend's name for each type of device.

    Raises:
        RuntimeError: PyTorch was built without gloo.
    """
    if not dist.is_gloo_available():
        raise RuntimeError('backend "tdcoll" needs gloo for CPU tensors, which this PyTorch was built without')
    kinds = ProcessGroup.BackendType
    gloo = _gloo(dist.PrefixStore("gloo/", store), rank, size, timeout, name, ranks)
    made = {"cpu": (kinds.GLOO, gloo)}
    if torch.cuda.is_available():
        made["cuda"] = made["cpu"]
        if dist.is_nccl_available() and not share_gpus:
            made["cuda"] = kinds.NCCL, _nccl(store, rank, size, timeout, name, ranks, nccl, split)
    default = made.get("cuda", made["cpu"])[0]
    for group in groups:
        group._set_default_backend(default)
        for device, (kind, backend) in made.items():
            group._register_backend(torch.device(device), kind, backend)
    return {device: "nccl" if kind == kinds.NCCL else "gloo" for device, (kind, _) in made.items()}


def _gloo(store: Any, rank: int, size: int, timeout: timedelta, name: str, ranks: list[int]) -> Any:
    def connect() -> Any:
        return dist.ProcessGroupGloo(store, rank, size, timeout=timeout)

    whom = "the group's other ranks, or the store, to connect gloo"
    gloo = ask(connect, rank, "backend tdcoll", timeout.total_seconds(), whom)
    gloo.options.global_ranks_in_group = ranks
    gloo.options.group_name = name
    gloo._set_sequence_number_for_group()
    return gloo


def beside(kind: str, store: Any, rank: int, size: int, timeout: timedelta, name: str, ranks: list[int]) -> Any:
    """Make another inner group, of gloo alone, for the calls of one kind. Collective.

    The store is reached by another connection, since a wait on one keeps other threads from using it.
    """
    store = store.clone() if hasattr(store, "clone") else store
    group: Any = ProcessGroup(store, rank, size)
    gloo = _gloo(dist.PrefixStore(f"gloo for {kind}/", store), rank, size, timeout, name, ranks)
    group._set_default_backend(ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, gloo)
    return group


def _nccl(
    store: Any, rank: int, size: int, timeout: timedelta, name: str, ranks: list[int], given: Any, split: bool
) -> Any:
    """As ``torch.distributed`` makes it, splitting the default group's communicator where torch does."""
    c10d = dist.distributed_c10d
    options = copy.deepcopy(given) if given is not None else dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    # Ranks outside of a new group split the default group's communicator if it is bound to a device: so must we.
    if split and ranks and dist.is_initialized() and c10d._get_default_group().bound_device_id:
        if source := c10d._get_split_source(c10d._get_default_group()):
            options.split_from = source
            options.split_color = c10d._process_group_color(ranks)
    options.global_ranks_in_group = ranks
    options.group_name = name
    backend = dist.ProcessGroupNCCL(dist.PrefixStore("nccl/", store), rank, size, options)
    backend._set_sequence_number_for_group()
    return backend


_GATHER = "all_gather_single" if hasattr(ProcessGroup, "all_gather_single") else "_allgather_base"
_EXCHANGE = "all_to_all_single" if hasattr(ProcessGroup, "all_to_all_single") else "alltoall_base"
_SCATTER = "reduce_scatter_single" if hasattr(ProcessGroup, "reduce_scatter_single") else "_reduce_scatter_base"


def gather_into(group: Any, out: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Any:
    """``group``'s all-gather into one tensor, under the name that this PyTorch has for it. Its work."""
    return getattr(group, _GATHER)(out, tensor, AllgatherOptions() if opts is None else opts)


def scatter_from(group: Any, out: torch.Tensor, tensor: torch.Tensor, opts: Any) -> Any:
    """Start ``group``'s reduce-scatter of one tensor, under the name that this PyTorch has for it. Return its work."""
    return getattr(group, _SCATTER)(out, tensor, opts)


def exchange_parts(group: Any, out: torch.Tensor, tensor: torch.Tensor, out_splits: Any, splits: Any, opts: Any) -> Any:
    """Start ``group``'s all-to-all of one tensor, under the name that this PyTorch has for it. Return its work."""
    return getattr(group, _EXCHANGE)(out, tensor, out_splits, splits, opts)


def sparse_sum_by_gather(group: Any, tensor: torch.Tensor, op: str) -> torch.Tensor:
    """The sum or mean of a COO tensor by all-gathers of dense ones, for a group that has none of sparse tensors.

    All indices and all values go to all ranks, padded to the most that a rank has; each adds up for itself. Waits for
    the number of rows on the host.
    """
    world = group.size()
    tensor = tensor.detach().coalesce()
    indices, values = tensor.indices(), tensor.values()
    counts = torch.empty(world, dtype=torch.int64, device=values.device)
    gather_into(group, counts, counts.new_full((1,), indices.shape[1])).wait()
    number = [int(count) for count in counts.tolist()]
    most = max(number)
    own_indices = indices.new_zeros((indices.shape[0], most))
    own_indices[:, : indices.shape[1]] = indices
    own_values = values.new_zeros((most, *values.shape[1:]))
    own_values[: values.shape[0]] = values / world if op == "mean" else values
    all_indices = indices.new_empty((world * indices.shape[0], most))
    all_values = values.new_empty((world * most, *values.shape[1:]))
    gather_into(group, all_indices, own_indices).wait()
    gather_into(group, all_values, own_values).wait()
    per_rank = zip(all_indices.chunk(world), all_values.chunk(world), number, strict=True)
    pieces = [(i[:, :n], v[:n]) for i, v, n in per_rank]
    gathered = torch.sparse_coo_tensor(
        torch.cat([i for i, _ in pieces], 1), torch.cat([v for _, v in pieces]), tensor.shape, check_invariants=False
    )
    return gathered.coalesce()


def _is_deadline(error: BaseException) -> bool:
    """Return whether gloo has raised this because a timeout was over. It has no class for that."""
    return "imed out" in str(error)


_OF_A_PEER = re.compile("onnection|imed out|pair closure")
"""In gloo's errors of a peer that is gone or late, now or in an earlier call. The others are the call's own."""


class RollCall:
    """Who is still there, when a call of the inner group has failed.

    gloo says which connection was closed, not which rank it was. Every rank whose call fails answers here, over the
    store; who does not is named. Ranks meet under the name of the call, which is the same on all of them: an answer
    to an earlier call that has failed says nothing of this one.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        self._store, self._rank, self._size = store, rank, size
        # A peer whose connections are open fails, and answers, when the timeout of its own call is over.
        self._seconds = min(_ROLL_CALL_S, 1.5 * timeout.total_seconds())
        self._numbers: defaultdict[str, itertools.count[int]] = defaultdict(itertools.count)

    def next_call(self, operation: str) -> str:
        """Return what names a call of an operation that is about to be made. Each operation has an order of its own."""
        return f"{operation}/{next(self._numbers[operation])}"

    def name(self, operation: str, call: str, error: BaseException) -> BaseException:
        """``error`` of a call as one that names the ranks which do not answer; itself if no other rank caused it."""
        if not _OF_A_PEER.search(str(error)):
            with contextlib.suppress(TdcollError):  # the peers that now wait in vain find this rank's answer
                ask(lambda: self._answer(call), self._rank, operation, self._seconds)
            return error
        try:
            missing = ask(lambda: self._missing(call), self._rank, operation, self._seconds)
        except TdcollError:
            who = "the store does not answer either: the process that serves it, usually rank 0's, may have died"
        else:
            who = (
                f"peer(s) {', '.join(map(str, missing))} did not answer within {self._seconds:g} s and may have died"
                if missing
                else "all ranks are still there and have had an error too"
            )
        when = " when its timeout was over" if _is_deadline(error) else ""
        return dist.DistBackendError(
            f"rank {self._rank}: {operation} failed; {who}. The inner group said{when}: {error}"
        )

    def impatient(self, operation: str, timeout: timedelta, error: BaseException) -> dist.DistBackendError:
        """``error`` as that of a caller who has waited for as long as it wanted, which says nothing of the others."""
        return dist.DistBackendError(
            f"rank {self._rank}: {operation} was not complete when the timeout of {timeout.total_seconds():g} s was "
            f"over. The inner group said: {error}"
        )

    def _answer(self, call: str) -> None:
        self._store.set(f"{call}/{self._rank}", "here")

    def _missing(self, call: str) -> list[int]:
        keys = {rank: f"{call}/{rank}" for rank in range(self._size)}
        self._answer(call)
        try:
            wait_for(self._store, self._rank, "roll call", keys, self._seconds)
        except CollectiveTimeout:
            return [rank for rank, key in keys.items() if not self._store.check([key])]
        return []


@never_compiled
class NamedWork(dist.Work):
    """A work of the inner group whose failure names the ranks that are gone.

    Args:
        work: the inner group's.
        operation: for errors.
        call: its name, of ``roll_call``.
    """

    def __init__(self, work: Any, operation: str, call: str, roll_call: RollCall) -> None:
        super().__init__()
        self._work, self._operation, self._call, self._roll_call = work, operation, call, roll_call

    def wait(self, timeout: timedelta | None = None) -> bool:
        try:
            return bool(self._work.wait(timeout) if timeout else self._work.wait())
        except RuntimeError as error:
            if timeout and _is_deadline(error):
                raise self._roll_call.impatient(self._operation, timeout, error) from error
            self._raise(error)

    def _raise(self, error: BaseException) -> NoReturn:
        named = self._roll_call.name(self._operation, self._call, error)
        if named is error:
            raise error
        raise named from error

    def get_future(self) -> Any:
        def value(done: Any) -> Any:
            try:
                return done.value()
            except RuntimeError as error:
                self._raise(error)

        return self._work.get_future().then(value)

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    def is_success(self) -> bool:
        return bool(self._work.is_success())

    def exception(self) -> Any:
        return self._work.exception()

    def result(self) -> list[torch.Tensor]:
        found: list[torch.Tensor] = self._work.result()
        return found

    def synchronize(self) -> None:
        self._work.synchronize()
