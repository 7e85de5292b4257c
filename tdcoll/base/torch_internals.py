# SPDX-License-Identifier: Apache-2.0
"""PyTorch's internals that tdcoll needs because no public interface does the same. A test checks
that they exist."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import inspect
import logging
import weakref
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d as c10d
from torch.nn.modules.module import register_module_module_registration_hook
from torch.utils import _python_dispatch as modes

_log = logging.getLogger("tdcoll")

Code = TypeVar("Code", bound="type | Callable[..., Any]")

DDP = nn.parallel.DistributedDataParallel


def _batches() -> bool:
    """Return whether ``batch_isend_irecv`` is as :func:`batch_messages_of` knows it."""
    function: Any = inspect.unwrap(c10d.batch_isend_irecv)
    code = function.__code__
    return (
        code.co_varnames[: code.co_argcount] == ("p2p_op_list",)
        and not code.co_kwonlyargcount
        and not code.co_freevars
        and {"_check_p2p_op_list", "_coalescing_manager", "supports_coalescing"}
        <= set(code.co_names)
        and {"group", "device", "async_ops"}
        <= set(inspect.signature(c10d._coalescing_manager).parameters)
        and "group_peer" in inspect.signature(dist.P2POp).parameters
    )


def batches_subclasses() -> bool:
    """Return whether ``batch_isend_irecv`` makes a batch for subclasses of ``ProcessGroup``, as
    from PyTorch 2.14 on."""
    code: Any = inspect.unwrap(c10d.batch_isend_irecv).__code__
    asks = "supports_coalescing" in (*code.co_names, *code.co_consts)
    return (
        asks
        and {"isinstance", "_coalescing_manager"} <= set(code.co_names)
        and "type" not in code.co_names
    )


def never_compiled(code: Code) -> Code:
    """Keep ``torch.compile`` away from a function, or from a class's methods, and from all their
    callees. Return it.

    C++ calls the backend's methods even while Dynamo is active, for example when DDP broadcasts
    buffers in a compiled model. Dynamo would take each for a part of the model, and it refuses
    process groups. ``torch.compiler.disable`` does the same, but its import takes a second and each
    call half a microsecond.

    If a function that Dynamo compiles calls this one, Dynamo traces it nevertheless: see
    :func:`breaks_graphs`.
    """
    methods = _methods(code) if isinstance(code, type) else {}
    try:
        frames: Any = torch._C._dynamo.eval_frame
        # and what it calls
        skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
    except AttributeError:
        if not isinstance(code, type):
            disabled: Any = torch.compiler.disable(code)
            return disabled
        for name, method in methods.items():
            kind = type(inspect.getattr_static(code, name))
            disabled = torch.compiler.disable(method)
            setattr(code, name, disabled if kind is FunctionType else kind(disabled))
        return code
    for function in methods.values() if isinstance(code, type) else [code]:
        if isinstance(function, FunctionType):
            frames.set_code_exec_strategy(function.__code__, skip)
    return code


def _methods(kind: type) -> dict[str, FunctionType]:
    """Return the functions that a class's own methods, static methods and class methods run, by
    name."""
    found = {name: getattr(value, "__func__", value) for name, value in vars(kind).items()}
    return {name: value for name, value in found.items() if isinstance(value, FunctionType)}


class _BreakReason:
    """Why Dynamo breaks a graph at a function, for its messages.

    Dynamo formats it each time it breaks a graph there, and prints it only if ``TORCH_LOGS`` says
    so. This is therefore the place to warn the user. A log record, unlike ``warnings.warn``, never
    becomes an exception inside Dynamo.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._warned = False

    def __str__(self) -> str:
        if not self._warned:
            self._warned = True
            _log.warning("torch.compile: %s", self._text)
        return self._text


def breaks_graphs(code: Code, name: str, operator: str | None = None) -> Code:
    """Let Dynamo break the graph where compiled code calls a function, or a class's methods. Return
    it.

    The call is then made eagerly, and so are all calls inside it (:func:`never_compiled`). Dynamo
    would otherwise trace the host's side of a collective with tensors that have no memory, fail in
    the middle of it, and leave a context that refuses calls. With ``fullgraph=True`` Dynamo's error
    has the reason. A call outside of compiled code takes no more time, because all this is
    attributes of the function.

    Args:
        name: the function's public name.
        operator: of ``torch.ops.tdcoll``, which does the same and can be traced; None if there is
            none.
    """
    instead = "There is no operator for it that can be traced"
    if operator is not None:
        instead = f"torch.ops.tdcoll.{operator} (after import tdcoll.ops) can be traced, see docs/fused.md#operators"

    def mark(function: Any, called: str) -> None:
        reason = (
            f"{called} is not traced: the graph breaks, and the call is made eagerly. {instead}"
        )
        function._torchdynamo_disable = True
        function._torchdynamo_disable_msg = _BreakReason(reason)

    if not isinstance(code, type):
        kept = never_compiled(code)
        mark(kept, name)
        return kept
    for base in code.__mro__:
        if not base.__module__.startswith("tdcoll."):
            continue
        never_compiled(base)
        for method, function in _methods(base).items():
            public = method in ("__init__", "__enter__", "__exit__") or not method.startswith("_")
            # What is inherited keeps the name of its own class, if that is public, too.
            if public and (base is code or not hasattr(function, "_torchdynamo_disable")):
                mark(function, name if method == "__init__" else f"{name}.{method}")
    return code


@functools.cache
def batch_messages_of(kind: type) -> None:
    """Have ``torch.distributed.batch_isend_irecv`` make a batch for groups of a class, if their
    backend can.

    PyTorch before 2.14 makes one only if a group's type is ``ProcessGroup`` itself. Without it NCCL
    would handle each message separately: if two ranks both sent first, or ranks in a ring, they
    would wait for each other forever. Later versions are left as they are.

    Only its code is replaced, because other modules have imported the function, and
    ``torch.compile`` knows it.
    """
    if batches_subclasses():
        return
    if not _batches():
        _log.warning(
            "PyTorch %s has changed batch_isend_irecv: backend tdcoll sends its messages one by one, so ranks that all "
            "send first may wait for each other",
            torch.__version__,
        )
        return
    function: Any = inspect.unwrap(c10d.batch_isend_irecv)
    code = function.__code__
    names = function.__globals__
    one_by_one: Any = names.setdefault("_tdcoll_one_by_one", FunctionType(code, names))

    def batch(p2p_op_list: list[dist.P2POp]) -> list[Any]:
        c10d._check_p2p_op_list(p2p_op_list)
        group = p2p_op_list[0].group
        device = p2p_op_list[0].tensor.device
        if not isinstance(group, kind) or not group._get_backend(device).supports_coalescing:
            return one_by_one(p2p_op_list)
        with c10d._coalescing_manager(group, device, async_ops=True) as made:
            for op in p2p_op_list:
                peer = "group_dst" if op.op is dist.isend else "group_src"
                op.op(op.tensor, group=group, tag=op.tag, **{peer: op.group_peer})
        return made.works

    def body(p2p_op_list):  # type: ignore[no-untyped-def]
        return _tdcoll_batch(p2p_op_list)  # type: ignore[name-defined]  # noqa: F821

    never_compiled(batch)
    names["_tdcoll_batch"] = batch
    function.__code__ = body.__code__.replace(
        co_filename=code.co_filename, co_firstlineno=code.co_firstlineno, co_name=code.co_name
    )


@contextlib.contextmanager
def below_all_modes(mode: Any) -> Iterator[None]:
    """Let operators inside get to a ``TorchDispatchMode`` when all modes that are active have
    passed them on."""
    above = [modes._pop_mode() for _ in range(torch._C._len_torch_dispatch_stack())]

    def push_again() -> None:
        for each in reversed(above):
            modes._push_mode(each)

    try:
        with mode:
            push_again()
            try:
                yield
            finally:
                for _ in above:
                    modes._pop_mode()
    finally:
        push_again()


def traces() -> bool:
    """Return whether a mode of PyTorch's own is active, which traces operators or has tensors
    without values."""
    return any(
        getattr(mode, "_mode_key", None) is not None
        for mode in modes._get_current_dispatch_mode_stack()
    )


_OBJECT = object.__basicsize__
"""Bytes of a Python object before what pybind11 adds, which begins with the address of the C++
object."""

_WORD = ctypes.sizeof(ctypes.c_size_t)
"""Bytes of a C++ object before its word with two counts, of which the lower half counts its
references."""

# Index i is the word at the address of a pointer plus i words, so these read one at any address
# that is divided by the size of a word. It takes a third of the time of
# ctypes.c_size_t.from_address.
_in_object = ctypes.cast(_OBJECT, ctypes.POINTER(ctypes.c_size_t))
_in_cpp = ctypes.cast(_WORD, ctypes.POINTER(ctypes.c_size_t))


def references(work: dist.Work) -> int:
    """Return how many references C++ has to a ``Work``, among them that of its Python object.

    C++ may keep a work whose Python object has been dropped, for example DDP's reducer under
    ``join()``. It would then call methods of the C++ base class, which wait forever. No interface
    tells, so this reads the count itself, after :func:`counts_references`.
    """
    return _in_cpp[_in_object[id(work) // _WORD] // _WORD] & 0xFFFFFFFF


@functools.cache
def counts_references() -> bool:
    """Return whether :func:`references` counts in this PyTorch."""

    class Probe(dist.Work):
        def __init__(self) -> None:
            super().__init__()

    probe: Any = Probe()
    counts = [references(probe)]
    held = [probe.boxed(), probe.boxed()]
    counts.append(references(probe))
    held.clear()
    counts.append(references(probe))
    if counts != [1, 3, 1]:
        _log.warning(
            "PyTorch %s counts references in another way: backend tdcoll cannot tell whether C++ keeps a Work that "
            "Python has dropped, so DistributedDataParallel.join(divide_by_initial_world_size=False) may wait forever",
            torch.__version__,
        )
    return counts == [1, 3, 1]


def name_groups_anew() -> None:
    """Have PyTorch name the next process group as the first one of a process.

    It names groups by a number that each process counts, and gloo's ranks meet under that name. A
    call of ``init_process_group`` counts even if it fails, perhaps only on some ranks.
    """
    c10d._world.group_count = 0


def tell_ddp_to_ignore(module: nn.Module, names: list[str]) -> None:
    """Tell DistributedDataParallel to ignore these parameters of ``module``, too."""
    known = list(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    DDP._set_params_and_buffers_to_ignore_for_model(module, [*known, *names])


_ddp: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def _see(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
    if isinstance(module, DDP):
        _ddp.add(module)


@functools.cache
def watch_ddp() -> None:
    """Remember the DistributedDataParallel wrappers that are made from now on, for
    :func:`living_ddp`."""
    register_module_module_registration_hook(_see)


def living_ddp(inside: nn.Module) -> list[Any]:
    """Return the DistributedDataParallel wrappers in use: those in ``inside``, and all since
    :func:`watch_ddp`."""
    found = {*_ddp, *(module for module in inside.modules() if isinstance(module, DDP))}
    # without it, making the wrapper has failed
    return [module for module in found if hasattr(module, "reducer")]
