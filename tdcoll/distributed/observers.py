# SPDX-License-Identifier: Apache-2.0
"""The view that tools have of the calls that tdcoll handles: PyTorch's operators, and hooks of
process groups.

PyTorch makes a collective by an operator such as ``c10d::allreduce_``, which profilers record and
dispatch modes (``CommDebugMode``, for instance) get. tdcoll's calls need none, because it would
cost more than the rest of their host time. If a tool watches, a call is therefore made inside of
the operator, below all modes.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d
from torch.utils._python_dispatch import TorchDispatchMode

from tdcoll.base.torch_internals import below_all_modes, never_compiled, traces
from tdcoll.distributed.call import Call

dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
profiled: Callable[[], bool] = torch._C._autograd._profiler_enabled
registers_works: Callable[[], bool] = c10d._allow_inflight_collective_as_graph_input


def watched() -> bool:
    """Return whether somebody wants to see the operators that this thread calls."""
    return dispatch_modes() > 0 or profiled() or registers_works()


class _InPlaceOfKernel(TorchDispatchMode):
    """Makes a call where the kernel of its operator would."""

    def __init__(self, make: Callable[[], Any]) -> None:
        super().__init__()
        self._make = make
        self.work: Any = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # `never_compiled` does it, without an import that takes seconds

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), named: Any = None
    ) -> Any:
        if function.namespace != "c10d":
            return function(*args, **(named or {}))  # such as the tensor of a barrier
        self.work = self._make()
        boxed = self.work.boxed()
        # Operators return the tensors that they write, which are their first argument, and a work.
        return boxed if len(function._schema.returns) == 1 else (args[0], boxed)


def inside_operator(group: Any, call: Call, make: Callable[[], Any]) -> Any:
    """Make a call by ``make``, inside of PyTorch's operator for it on a process group; return its
    work.

    If a mode doesn't pass the operator on, the call isn't made. While PyTorch traces (``make_fx``,
    ``FakeTensorMode``), it gets the operator as it is.
    """
    operator = call.method.operator or call.method.start
    if traces():
        try:
            return operator(group, call.outs, call.inputs, call.opts)
        except _without_kernels():
            return make()
    outs = [_without_derivative(tensor) for tensor in call.outs]
    inputs = (
        outs if call.method.in_place else [_without_derivative(tensor) for tensor in call.inputs]
    )
    mode = _InPlaceOfKernel(make)
    with below_all_modes(mode):
        work = operator(group, outs, inputs, call.opts)
    return work if mode.work is None else mode.work


def _without_derivative(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that an operator without a derivative takes."""
    return tensor.detach() if tensor.requires_grad else tensor


def _without_kernels() -> tuple[type[BaseException], ...]:
    """Return the errors of operators that PyTorch can't trace."""
    fake: Any = sys.modules.get("torch._subclasses.fake_tensor")
    return (NotImplementedError, *([] if fake is None else [fake.UnsupportedOperatorException]))


# ---------------------------------------------------------------------- hooks of PyTorch 2.14


@dataclass(frozen=True)
class BeforeCall:
    """The argument of a hook before a call, as ``PreHookArgs`` of PyTorch."""

    name: Any
    async_op: bool
    input_tensors: list[torch.Tensor]
    output_tensors: list[torch.Tensor]
    root: int
    op_id: int


@dataclass(frozen=True)
class BehindCall:
    """The argument of a hook behind a call, as ``PostHookArgs`` of PyTorch."""

    name: Any
    async_op: bool
    work: Any
    op_id: int


_HOOK_NAMES: Mapping[str, tuple[str, ...]] = {
    "_allgather_base": ("ALLGATHER_BASE", "ALLGATHER"),
    "_reduce_scatter_base": ("REDUCE_SCATTER_BASE", "REDUCE_SCATTER"),
    "allgather_coalesced": ("ALLGATHER_COALESCED", "ALLGATHER"),
    "allgather_into_tensor_coalesced": ("ALLGATHER_INTO_TENSOR_COALESCED", "ALLGATHER"),
    "allreduce_coalesced": ("ALLREDUCE_COALESCED", "ALLREDUCE"),
    "alltoall_base": ("ALLTOALL_BASE", "ALLTOALL"),
    "recv_anysource": ("RECV",),
    "reduce_scatter_tensor_coalesced": ("REDUCE_SCATTER_TENSOR_COALESCED", "REDUCE_SCATTER"),
}
"""Names of PyTorch's ``HookOpName`` for methods with other names, the newest first."""


def hook_name(method: str) -> Any:
    """Return PyTorch's name of a collective for hooks; a text before PyTorch 2.14."""
    names = _HOOK_NAMES.get(method, (method.upper(),))
    kinds = getattr(c10d, "HookOpName", None)
    return next((getattr(kinds, name) for name in names if hasattr(kinds, name)), names[0])


@dataclass
class Hooks:
    """The hooks of a process group, by the numbers under which they were registered."""

    before: dict[int, Callable[[Any], None]] = field(default_factory=dict)
    behind: dict[int, Callable[[Any], None]] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def around(self, call: Call, make: Callable[[], Any]) -> Any:
        """Make a call between the hooks, and return its work."""
        name = hook_name(call.method.name)
        asynchronous = call.opts is None or bool(call.opts.asyncOp)
        number = next(self._numbers)
        outs = [] if call.method.in_place else list(call.outs)
        root = getattr(call.opts, "rootRank", -1)
        for hook in list(self.before.values()):
            hook(BeforeCall(name, asynchronous, list(call.inputs), outs, root, number))
        work = make()
        for hook in list(self.behind.values()):
            hook(BehindCall(name, asynchronous, work, number))
        return work


for _each in (_InPlaceOfKernel, inside_operator, watched):
    never_compiled(_each)
