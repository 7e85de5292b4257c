# SPDX-License-Identifier: Apache-2.0
"""Hooks into Triton's interpreter, so that kernels run as programs of a simulated machine.

While a machine is installed:

- launches go to the machine, which runs the programs as tasks (:mod:`.launcher`);
- operations of kernels are shown to the machine (:mod:`.builder`);
- Triton's language is patched once, not at every launch and at every call of a nested function;
  functions of ``libdevice``, which the interpreter takes for empty ones, raise an error;
- kernels are rewritten (:mod:`.rewrite`): tensors in ``and``, ``or``, ``not``, and branches on
  ``tid``.

Everything is put back by :meth:`Installed.remove`, also after errors.
"""

from __future__ import annotations

import threading
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
import triton
import triton.language as tl
import triton.runtime.interpreter as triton_interpreter
from triton.language.extra import libdevice

from tdcoll.base.errors import TdcollError
from tdcoll.simulator import branches
from tdcoll.simulator.branches import of_threads, one_value
from tdcoll.simulator.builder import MachineBuilder, is_narrow_handle, moved_from, numpy_dtype
from tdcoll.simulator.launcher import MachineLauncher
from tdcoll.simulator.machine import Machine, put
from tdcoll.simulator.rewrite import KernelTransformer
from tdcoll.simulator.shortcuts import shortcuts

_rewritten: dict[Any, Any] = {}  # kernels rewritten with KernelTransformer


def _called_directly(
    owner: Any, name: str, member: Callable[..., Any], builder: Any, scope: Any
) -> None:
    """Let kernels call a function of Triton's language without Triton's two wrappers around it."""
    function = getattr(member, "__wrapped__", member)

    def call(*args: Any, **named: Any) -> Any:
        named["_semantic"] = triton_interpreter.interpreter_semantic
        return function(*args, **named)

    scope.set_attr(owner, name, call)


def _reducing(original: Callable[..., Any], element_by_element: str) -> Callable[..., Any]:
    """Return a reduction or scan that leaves bf16 to the combining function, because numpy cannot
    add it."""

    def apply_impl(self: Any, input: Any) -> Any:
        if any(map(of_threads, input)):
            raise one_value("a block that is reduced or scanned")
        if any(is_narrow_handle(value.handle) for value in input):
            return getattr(self, element_by_element)(input)
        return original(self, input)

    return apply_impl


def _materializing(original: Callable[..., Any]) -> Callable[..., Any]:
    """Let pointers of a block pointer or a descriptor have the origin of its base."""

    def materialize_pointers(self: Any, *args: Any) -> Any:
        pointers, mask = original(self, *args)
        return moved_from(self.base, pointers), mask

    return materialize_pointers


def _one_at_a_time(original: Callable[..., Any]) -> Callable[..., Any]:
    """Let threads rewrite functions in turn: ``ast.parse`` in several at once raises SystemError in
    Python 3.11."""
    lock = threading.Lock()

    def rewrite(self: Any) -> Any:
        if self.fn in self.rewritten_fn:
            return self.rewritten_fn[self.fn]
        with lock:
            return original(self)

    return rewrite


def _refuse(name: str, *args: Any, **named: Any) -> None:
    raise TdcollError(
        f"libdevice.{name}: the simulator has no functions of CUDA's library; write it with those of triton.language"
    )


def _refused(*args: Any, _refuse: Callable[..., None], **named: Any) -> None:
    _refuse(*args, **named)


def _without_libdevice() -> Iterator[tuple[Any, str, Any]]:
    """Yield function, attribute and value: functions get other code, because programs also import
    them by name."""
    for name, stub in vars(libdevice).items():
        if isinstance(stub, types.FunctionType):
            yield stub, "__code__", _refused.__code__
            yield stub, "__kwdefaults__", {"_refuse": partial(_refuse, name)}


class Installed:
    """The hooks, from construction until :meth:`remove`."""

    def __init__(self, wanted: Machine) -> None:
        if not triton.knobs.runtime.interpret:
            raise TdcollError(
                "the simulator needs TRITON_INTERPRET=1 in the environment before triton is first imported"
            )
        put(wanted)
        module = triton_interpreter
        stock = triton_interpreter._patch_attr
        module._patch_attr = _called_directly
        try:
            self._scope = scope = module._patch_lang(
                types.SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
            )
        finally:
            module._patch_attr = stock
        # triton 3.6 with numpy >= 2.4: int() of a one-element array fails, and with it
        # range(runtime value)
        scope.set_attr(tl.tensor, "__index__", lambda tensor: int(tensor.handle.data.item()))
        for owner, name, function in chain(
            shortcuts(check_overflow=wanted.check_overflow), _without_libdevice()
        ):
            scope.set_attr(owner, name, function)
        nothing = module._LangPatchScope()
        scope.set_attr(module, "GridExecutor", MachineLauncher)
        scope.set_attr(module, "_patch_lang", lambda fn: nothing)
        scope.set_attr(module, "_get_np_dtype", numpy_dtype)
        remember = wanted.bounds.remember
        address = torch.Tensor.data_ptr
        scope.set_attr(torch.Tensor, "data_ptr", lambda tensor: remember(tensor, address(tensor)))
        scope.set_attr(module.TensorHandle, "origin", None)
        for handle in ("BlockPointerHandle", "TensorDescHandle"):
            owner = getattr(module, handle, None)
            if owner:  # triton 3.9 has no block pointers
                scope.set_attr(
                    owner, "materialize_pointers", _materializing(owner.materialize_pointers)
                )
        for owner, generic in (
            (module.ReduceOps, "generic_reduce"),
            (module.ScanOps, "generic_scan"),
        ):
            scope.set_attr(owner, "apply_impl", _reducing(owner.apply_impl, generic))
        # Each function gets a transformer of its own, which has state: threads may launch kernels
        # at the same time.
        fresh = types.SimpleNamespace(visit=lambda tree: KernelTransformer().visit(tree))
        scope.set_attr(module.FunctionRewriter, "ast_transformer", fresh)
        scope.set_attr(module.InterpretedFunction, "rewritten_fn", _rewritten)
        scope.set_attr(
            module.InterpretedFunction,
            "rewrite",
            _one_at_a_time(module.InterpretedFunction.rewrite),
        )
        call = lambda function, *args, **named: function.rewrite()(*args, **named)  # noqa: E731  lets errors through
        scope.set_attr(module.InterpretedFunction, "__call__", call)
        for name, value in branches.FUNCTIONS.items():
            scope.set_attr(module, f"_tdcoll_{name}", value)
        # By default Triton's interpreter computes every int32 result in int64 too, and does nothing
        # with it.
        check = wanted.check_overflow
        options = replace(module.interpreter_builder.options, sanitize_overflow=check, debug=check)
        scope.set_attr(module.interpreter_builder, "options", options)
        scope.set_attr(module.interpreter_builder, "__class__", MachineBuilder)
        self.installed = True

    def remove(self) -> None:
        """Put everything back. Idempotent."""
        if self.installed:
            put(None)
            self._scope.restore()
            self.installed = False
