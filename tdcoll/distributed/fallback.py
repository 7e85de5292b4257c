# SPDX-License-Identifier: Apache-2.0
"""The fallback backend of a group: gloo for CPU tensors, NCCL (gloo where ranks share GPUs) for
CUDA tensors.

It makes the calls that tdcoll doesn't handle, on contiguous memory.
"""

from __future__ import annotations

import copy
import functools
import inspect
import operator
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup

from tdcoll.base.versions import version_of
from tdcoll.distributed import gloo
from tdcoll.distributed.agreement import device_of_this_rank
from tdcoll.distributed.arithmetic import accumulator, mean_of
from tdcoll.distributed.call import Call, has_no_values
from tdcoll.distributed.fit import Fitted, check_sizes, fit, refuse_shared_elements
from tdcoll.distributed.methods import ALL_TO_ALL_SINGLE, gather_into
from tdcoll.distributed.observers import inside_operator, watched
from tdcoll.distributed.work import FallbackWork, completed
from tdcoll.job import lifecycle
from tdcoll.runtime.store import ask


class Fallback:
    """The fallback backend of one group.

    Attributes:
        group: a process group with gloo and NCCL, without tdcoll's methods.
        block: for each call in a block of coalesced calls, what writes its results at the block's
            end, and its value; None outside of blocks.
    """

    def __init__(self, group: Any, names: dict[str, str]) -> None:
        self.group = group
        self._names = names
        self.block: list[tuple[Callable[[], None], list[Any]]] | None = None

    def name(self, device: torch.device) -> str:
        """Return the name of the backend for a device's tensors."""
        return self._names.get(device.type, device.type)

    def __str__(self) -> str:
        return " and ".join(f"{name} ({device})" for device, name in self._names.items())

    def single(self, call: Call) -> Any:
        """Return ``call(out, input, options)``, which makes calls like this one of contiguous
        tensors without the cost of PyTorch's dispatcher; None if they need more than that."""
        moves = not call.method.reduces
        if self.name(call.device) != "nccl" or (moves and call.inputs[0].dtype not in gloo.MOVED):
            return None
        method = getattr(self.group._get_backend(call.device), call.method.name)
        if call.method.in_place:
            return lambda out, _, opts: method([out], opts)
        if call.method is ALL_TO_ALL_SINGLE:
            return lambda out, tensor, opts: method(out, tensor, [], [], opts)
        return method

    def make(self, call: Call) -> Any:
        """Make a call, inside of PyTorch's operator for it if somebody watches, and return its
        work.

        Backends take a tensor for contiguous memory that begins with its first element. If it
        isn't, they get a copy of it. Results that go through copies are written when somebody has
        waited for the work.

        Raises:
            TypeError, ValueError: the tensors don't fit each other, or the backend.
        """
        make = functools.partial(self._make, call)
        by_operator = self.name(call.device) != "gloo"  # then operators call the backend
        if any(map(has_no_values, call.touched)):  # there is nothing to do
            make = functools.partial(completed, call.result, asynchronous=True)
            by_operator = False
        return inside_operator(self.group, call, make) if watched() and not by_operator else make()

    def copies_to(self, device: torch.device) -> torch.device | None:
        """Return the GPU that gloo copies results to; None where it needn't."""
        return device if device.type == "cuda" and self.name(device) == "gloo" else None

    def _make(self, call: Call) -> Any:
        if call.opts is None and self.copies_to(call.device) is not None:
            raise ValueError(
                f"{call.method.name}: tensor must be on the CPU where ranks share GPUs, since gloo cannot send GPU "
                f"memory; got one on {call.device}. Pass a copy, tensor.cpu(), or run with a GPU for each rank"
            )
        rank = self.group.rank()
        world = self.group.size()
        dense = all(
            tensor.layout is torch.strided and not tensor.is_nested for tensor in call.touched
        )
        if dense:
            refuse_shared_elements(call)
            check_sizes(call, rank, world)
        fitted = fit(call, rank, world)
        if dense and self.name(call.device) == "gloo":
            started = gloo.start(
                self.group._get_backend(call.device), call, fitted.outs, fitted.inputs
            )
        else:
            outs, inputs = _movable(call, fitted)
            work = call.method.start(self.group, outs, inputs, call.opts)
            if all(map(operator.is_, [*outs, *inputs], call.touched)):
                return work  # the backend's own, or None for a synchronous call of NCCL
            started = gloo.Started([] if work is None else [work], None, call.result)

        def finish() -> None:
            if started.finish is not None:
                started.finish()
            fitted.write_back()

        if self.block is not None:
            self.block.append((finish, started.result))
            return next(iter(started.works), None)
        if call.opts is None or call.opts.asyncOp:
            copies_to = self.copies_to(call.device)
            return FallbackWork(started.works, finish, started.result, copies_to)
        for work in started.works:
            work.wait()
        finish()
        return completed(started.result)


def _movable(call: Call, fitted: Fitted) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the tensors of a call, or their bytes if they are only moved and backends don't move
    their dtype."""
    if call.method.reduces or any(tensor.layout is not torch.strided for tensor in call.touched):
        return fitted.outs, fitted.inputs
    outs = [gloo.as_moved(tensor) for tensor in fitted.outs]
    return outs, outs if call.method.in_place else [
        gloo.as_moved(tensor) for tensor in fitted.inputs
    ]


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
    tell: Callable[[timedelta], None],
    device: torch.device | None,
) -> dict[str, tuple[str, Any]]:
    """Make gloo and, where there are GPUs, NCCL, and register them with ``groups``. Collective.

    Args:
        groups: the last is a plain ``ProcessGroup``, which is bound to a GPU if NCCL is to connect
            at once.
        name, ranks: of the group; ``ranks`` is empty for the default group.
        split: whether NCCL may split the default group's communicator, as ``new_group`` does.
        tell: called with the timeout that somebody sets for a backend, as PyTorch does for that of
            a group.
        device: this rank's GPU, as the caller of ``init_process_group`` has bound it; None:
            tdcoll's.

    Returns:
        The backend's name, and the backend, for each type of device. It tells as long as somebody
        holds it.
    """
    if not dist.is_gloo_available():
        raise RuntimeError(
            'backend "tdcoll" needs gloo for CPU tensors, which this PyTorch was built without'
        )
    kinds = ProcessGroup.BackendType

    def connect() -> Any:
        made = _telling(dist.ProcessGroupGloo, tell)
        return made(dist.PrefixStore("gloo/", store), rank, size, timeout=timeout)

    whom = "the group's other ranks, or the store, to connect gloo"
    gloo = ask(connect, rank, "backend tdcoll", timeout.total_seconds(), whom)
    gloo.options.global_ranks_in_group = ranks
    gloo.options.group_name = name
    _number(gloo)
    made = {"cpu": (kinds.GLOO, gloo)}
    if torch.cuda.is_available():
        made["cuda"] = made["cpu"]
        # NCCL refuses ranks that share one
        if dist.is_nccl_available() and not lifecycle.may_share_gpus():
            backend = _nccl(
                groups[-1], store, rank, size, timeout, name, ranks, nccl, split, tell, device
            )
            made["cuda"] = kinds.NCCL, backend
    default = made.get("cuda", made["cpu"])[0]
    for group in groups:
        group._set_default_backend(default)
        for where, (kind, backend) in made.items():
            group._register_backend(torch.device(where), kind, backend)
    return {
        where: ("nccl" if kind == kinds.NCCL else "gloo", each)
        for where, (kind, each) in made.items()
    }


def _number(backend: Any) -> None:
    """Have a backend number its calls, which it does by itself from PyTorch 2.14 on."""
    if version_of(torch.__version__) < (2, 14):
        backend._set_sequence_number_for_group()


def _telling(kind: Any, tell: Callable[[timedelta], None]) -> Any:
    """Return a class of backends like ``kind`` that tell of a new timeout."""

    class Telling(kind):
        def _set_default_timeout(self, timeout: timedelta) -> None:
            super()._set_default_timeout(timeout)
            tell(timeout)

    Telling.__name__ = Telling.__qualname__ = kind.__name__
    return Telling


def _nccl(
    plain: Any,
    store: Any,
    rank: int,
    size: int,
    timeout: timedelta,
    name: str,
    ranks: list[int],
    nccl_options: Any,
    split: bool,
    tell: Callable[[timedelta], None],
    device: torch.device | None,
) -> Any:
    """Make what backend ``"nccl"`` is in this PyTorch, splitting the default group's communicator
    if torch does.

    PyTorch has several implementations from 2.14 on. From 2.15 on ``"nccl"`` is
    ``ProcessGroupNCCL2``, unless ``TORCH_DIST_USE_NCCL2`` is 0. All of them take
    ``ProcessGroupNCCL.Options``. From 2.14 on PyTorch's function makes it, and it doesn't ``tell``.
    That isn't necessary, because PyTorch sets the timeout of a group for gloo as well.

    Args:
        plain: the group of the fallback backend. It is bound to this rank's GPU if NCCL is to
            connect at once.
        nccl_options: ``ProcessGroupNCCL.Options``, or None.
    """
    c10d: Any = dist.distributed_c10d
    # Ranks outside of a new group split the default group's communicator if it is bound to a
    # device: so must we.
    source = (
        _split_source(c10d._get_default_group())
        if split and ranks and dist.is_initialized()
        else None
    )
    options = (
        copy.deepcopy(nccl_options) if nccl_options is not None else dist.ProcessGroupNCCL.Options()
    )
    options._timeout = timeout
    # split_group passes the options of another group
    if getattr(nccl_options, "split_from", None) is not None:
        options.split_from = None
    store = dist.PrefixStore("nccl/", store)
    creator = _creator_of_nccl()
    if creator is None:
        if source is not None:
            options.split_from = source
            options.split_color = c10d._process_group_color(ranks)
        options.global_ranks_in_group = ranks
        options.group_name = name
        backend = _telling(dist.ProcessGroupNCCL, tell)(store, rank, size, options)
        _number(backend)
        return backend
    if creator is getattr(c10d, "_create_nccl2_process_group", None):
        plain.bound_device_id = device or device_of_this_rank()
    asked = c10d._DistributedBackendOptions()
    asked.store = store
    asked.group_rank = rank
    asked.group_size = size
    asked.timeout = timeout
    asked.group_id = name
    asked.global_ranks_in_group = ranks
    asked.process_group = plain
    if source is not None:
        asked.split_from = source
    return creator(asked, options)


def _creator_of_nccl() -> Any:
    """Return PyTorch's function that makes backend ``"nccl"``; None before 2.14, where it is no
    function."""
    backends: Any = dist.distributed_c10d.Backend
    if not hasattr(backends, "_ensure_backend_registered"):
        return None
    backends._ensure_backend_registered("nccl")
    return backends._plugins["NCCL"].creator_fn


def _split_source(default: Any) -> Any:
    """Return the backend of the default group that PyTorch splits for a new group of backend
    tdcoll; None: it doesn't.

    From 2.15 on, PyTorch only splits a group of the same backend.
    """
    if not default.bound_device_id:
        return None
    find: Any = dist.distributed_c10d._get_split_source
    if len(inspect.signature(find).parameters) == 1:
        return find(default)
    return find(default, "tdcoll")


def sparse_sum_by_gather(group: Any, tensor: torch.Tensor, op: str) -> torch.Tensor:
    """Return the sum or mean of a COO tensor by dense all-gathers, if a group has none of sparse
    tensors.

    Every rank gets all indices and values, padded to the longest, and sums them in the accumulator.
    A mean divides each part, as tdcoll's sparse all-reduce does. The host waits for the number of
    rows.

    Raises:
        TypeError: fallback backends don't move elements of the dtype.
    """
    world = group.size()
    dtype = tensor.dtype
    gloo.refuse_other_dtypes("all_reduce", accumulator(dtype))
    tensor = tensor.detach().to(accumulator(dtype)).coalesce()
    indices = tensor.indices()
    values = tensor.values()
    counts = torch.empty(world, dtype=torch.int64, device=values.device)
    gather_into(group, counts, counts.new_full((1,), indices.shape[1])).wait()
    number = [int(count) for count in counts.tolist()]
    most = max(number)
    own_indices = indices.new_zeros((indices.shape[0], most))
    own_indices[:, : indices.shape[1]] = indices
    own_values = values.new_zeros((most, *values.shape[1:]))
    own_values[: values.shape[0]] = values
    all_indices = indices.new_empty((world * indices.shape[0], most))
    all_values = values.new_empty((world * most, *values.shape[1:]))
    gather_into(group, all_indices, own_indices).wait()
    gather_into(group, all_values, own_values).wait()
    parts = mean_of(all_values, world) if op == "mean" else all_values
    per_rank = zip(all_indices.chunk(world), parts.chunk(world), number, strict=True)
    pieces = [(i[:, :n], v[:n]) for i, v, n in per_rank]
    gathered = torch.sparse_coo_tensor(
        torch.cat([i for i, _ in pieces], 1),
        torch.cat([v for _, v in pieces]),
        tensor.shape,
        check_invariants=False,
    )
    return gathered.coalesce().to(dtype)
