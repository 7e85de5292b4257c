# SPDX-License-Identifier: Apache-2.0
"""Hooks into Triton's interpreter, so that kernels run as programs of a simulated machine.

While a machine is installed:

- launches go to the machine, which runs the programs as tasks (:mod:`.launcher`);
- operations of kernels are shown to the machine (:mod:`.builder`);
- Triton's language is patched once, not at every launch and at every call of a nested function, and with it
  ``libdevice`` (:mod:`.libdevice`);
- kernels are rewritten (:mod:`.rewrite`): tensors in ``and``, ``or``, ``not``, and branches on ``tid``.

Everything is put back by :meth:`Installed.remove`, also after errors.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
import triton.runtime.interpreter as triton_interpreter

from tdcoll.errors import TdcollError
from tdcoll.runtime.simulator import current, libdevice
from tdcoll.runtime.simulator.builder import MachineBuilder, StockBuilder, is_narrow_handle, moved_from, numpy_dtype
from tdcoll.runtime.simulator.extents import Extents
from tdcoll.runtime.simulator.lanes import kernel_globals
from tdcoll.runtime.simulator.launcher import MachineLauncher
from tdcoll.runtime.simulator.machine import Machine
from tdcoll.runtime.simulator.rewrite import KernelTransformer
from tdcoll.runtime.simulator.shortcuts import shortcuts

__all__ = ["Installed"]

_rewritten: dict[Any, Any] = {}  # kernels rewritten with KernelTransformer


def _reducing(original: Callable[..., Any], element_by_element: str) -> Callable[..., Any]:
    """A reduction or a scan that leaves bf16 to the function that combines, as numpy cannot add it up."""

    def apply_impl(self: Any, input: Any) -> Any:
        if any(is_narrow_handle(value.handle) for value in input):
            return getattr(self, element_by_element)(input)
        return original(self, input)

    return apply_impl


def _remembering(original: Callable[..., int], extents: Extents) -> Callable[..., int]:
    """``Tensor.data_ptr``, and whose address it was."""

    def data_ptr(self: torch.Tensor) -> int:
        first = original(self)
        extents.remember(self, first)
        return first

    return data_ptr


def _materializing(original: Callable[..., Any]) -> Callable[..., Any]:
    """Pointers of a block pointer or a descriptor have the origin of its base."""

    def materialize_pointers(self: Any, *args: Any) -> Any:
        pointers, mask = original(self, *args)
        return moved_from(self.base, pointers), mask

    return materialize_pointers


class Installed:
    """The hooks, from construction until :meth:`remove`."""

    def __init__(self, wanted: Machine) -> None:
        if not triton.knobs.runtime.interpret:
            raise TdcollError(
                "the simulator needs TRITON_INTERPRET=1 in the environment before triton is first imported"
            )
        if current.machine_or_none() is not None:
            raise TdcollError("a simulated machine is active in this process already; only one can be")
        module = triton_interpreter
        self._language = module._patch_lang(types.SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
        # triton 3.6 with numpy >= 2.4: int() of a one-element array fails, and with it range(runtime value)
        self._language.set_attr(tl.tensor, "__index__", lambda tensor: int(tensor.handle.data.item()))
        for owner, name, function in shortcuts(check_overflow=wanted.check_overflow):
            self._language.set_attr(owner, name, function)
        for owner, name, function in libdevice.replacements():
            self._language.set_attr(owner, name, function)
        self._saved: list[tuple[Any, str, Any]] = []
        self._replace(module, "GridExecutor", MachineLauncher)
        self._replace(module, "_patch_lang", lambda fn: _NOTHING)
        self._replace(module, "_get_np_dtype", numpy_dtype)
        self._replace_method(torch.Tensor, "data_ptr", partial(_remembering, extents=wanted.extents))
        self._replace(module.TensorHandle, "origin", None)
        for handle in ("BlockPointerHandle", "TensorDescHandle"):
            if hasattr(module, handle):  # triton 3.9 has no block pointers
                self._replace_method(getattr(module, handle), "materialize_pointers", _materializing)
        self._replace_method(module.ReduceOps, "apply_impl", partial(_reducing, element_by_element="generic_reduce"))
        self._replace_method(module.ScanOps, "apply_impl", partial(_reducing, element_by_element="generic_scan"))
        self._replace(module.FunctionRewriter, "ast_transformer", KernelTransformer())
        self._replace(module.InterpretedFunction, "rewritten_fn", _rewritten)
        for name, value in kernel_globals(current.machine).items():
            self._replace(module, name, value)
        # By default Triton's interpreter computes every int32 result in int64 too, and does nothing with it.
        check = wanted.check_overflow
        options = replace(module.interpreter_builder.options, sanitize_overflow=check, debug=check)
        self._replace(module.interpreter_builder, "options", options)
        module.interpreter_builder.__class__ = MachineBuilder
        current.put(wanted)

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        self._saved.append((owner, name, owner.__dict__.get(name, _NOTHING)))
        setattr(owner, name, value)

    def _replace_method(self, owner: Any, name: str, replacement: Callable[[Any], Any]) -> None:
        self._replace(owner, name, replacement(getattr(owner, name)))

    def remove(self) -> None:
        """Put everything back. Idempotent."""
        if not self._saved:
            return
        current.put(None)
        triton_interpreter.interpreter_builder.__class__ = StockBuilder
        while self._saved:
            owner, name, value = self._saved.pop()
            if value is _NOTHING:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
        self._language.restore()


class _Nothing:
    """Stands for an attribute that was not there, and for a patch that there is nothing to undo of."""

    def restore(self) -> None:
        pass


_NOTHING = _Nothing()
