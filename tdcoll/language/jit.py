# SPDX-License-Identifier: Apache-2.0
"""``tdcoll.jit``: ``triton.jit`` for kernels that may call the device language.

Two things must happen to a kernel that calls NVSHMEM, and to no other:

1. it is compiled with the part of NVSHMEM's bitcode library that the language calls
   (:mod:`tdcoll.language.library`), unless its launch names another
   (``extern_libs={"libnvshmem_device": ...}``);
2. its loaded module is given to NVSHMEM (``nvshmemx_cumodule_init``) before the first launch, so
   that the library's device state in that module points at this process's heap.

Both are done in subclasses of Triton's own classes. A process-wide Triton hook would do it too, and
would touch every other library's kernels. (Triton-distributed's compiler does both by itself; with
it this module does neither.) Launch options are checked, because Triton's interpreter drops what it
does not know, such as ``num_warsp=8``.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import inspect
import os
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from tdcoll import runtime
from tdcoll.base import environment
from tdcoll.base.device_library import device_library
from tdcoll.base.errors import NotInitializedError, TdcollError
from tdcoll.base.torch_internals import breaks_graphs
from tdcoll.language import INTERPRETED, LOWERING
from tdcoll.language.library import part_for_language
from tdcoll.spec import functions
from tdcoll.spec.functions import LIBRARY, LINKED, no_puts, not_a_monitor

_DEVICE_STATE = "nvshmemi_device_state"
"""Symbol that modules with NVSHMEM code define; the bare name also occurs in paths of debug
information."""

_LEFT_TO_TRITON_DISTRIBUTED = LOWERING == "tdcoll.language.triton_dist"
"""Its backend links the library, and its CompiledKernel initialises the module."""

_LAUNCH_OPTIONS = frozenset(
    "num_warps num_stages num_ctas maxnreg extern_libs debug launch_cooperative_grid launch_pdl "
    "enable_fp_fusion sanitize_overflow ptx_version ptx_options ir_override warp_size cluster_dims".split()
)


OWN_OPTIONS = {"enable_fp_fusion": True}
"""Launch options of all tdcoll's own kernels. If a product is fused with a sum, the result is
rounded once, and may have other bits. Triton up to 3.9 fuses by default, 3.10 will not, and
``TRITON_DEFAULT_FP_FUSION`` changes the default. tdcoll's results have the same bits in every case.
Kernels of yours have Triton's default."""


def bitcode_path(arch: int | None = None) -> str:
    """Path of NVSHMEM's device library: in ``$NVSHMEM_HOME/lib``, or in NVIDIA's wheel
    ``nvidia-nvshmem-cu*``.

    Args:
        arch: the GPU's architecture, 90 for sm_90; None: the current device's.

    Raises:
        FileNotFoundError: no library is installed, or none for that architecture.
    """
    if arch is None:
        arch = _architecture(driver.active.get_current_device())
    return _bitcode_path(arch)


@functools.cache
def _bitcode_path(arch: int) -> str:
    return str(device_library(environment.nvshmem_folders(os.environ.get("NVSHMEM_HOME")), arch))


@functools.cache
def _architecture(device: int) -> int:
    """Return the architecture that Triton compiles for on ``device``, which is the current one."""
    return int(driver.active.get_current_target().arch)


# ---------------------------------------------------------------------- which kernels need NVSHMEM


def _referenced(function: JITFunction) -> Iterator[Any]:
    """Every object that a Triton function can reach: globals that its source names, dotted or not,
    and defaults."""
    yield from function.fn.__defaults__ or ()
    yield from (function.fn.__kwdefaults__ or {}).values()
    yield from _named(function, ast.parse(inspect.cleandoc("\n" + function.src)))


def _named(function: JITFunction, tree: ast.AST) -> Iterator[Any]:
    """Every global that a part of a Triton function's source names, dotted or not."""
    scope = {**function.fn.__globals__, **inspect.getclosurevars(function.fn).nonlocals}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Name, ast.Attribute)):
            first, *rest = ast.unparse(node).split(".")
            yield functools.reduce(
                lambda found, name: getattr(found, name, None), rest, scope.get(first)
            )


def _used_by(value: Any) -> Iterator[Any]:
    """``value`` and whatever a Triton function reaches from there: functions of the device language
    and Triton functions, also inside tuples, lists, dicts and ``constexpr``."""
    seen: dict[int, Any] = {}  # holds on to the values: the id of one that is gone may come again
    stack = [value]
    while stack:
        current = stack.pop()
        if id(current) in seen:
            continue
        seen[id(current)] = current
        yield current
        if isinstance(current, JITFunction):
            stack.extend(_referenced(current))
        elif isinstance(current, tl.constexpr):
            stack.append(current.value)
        elif isinstance(current, (tuple, list)):
            stack.extend(current)
        elif isinstance(current, dict):
            stack.extend(current.values())


def _marked(used: Iterable[Any], mark: str) -> bool:
    """Return whether a function of the device language is among ``used`` that has the attribute
    ``mark``."""
    return any(getattr(one, mark, False) is True for one in used)


def needs_nvshmem(value: Any) -> bool:
    """Return whether a Triton function calls NVSHMEM, itself or through what it reaches."""
    return _marked(_used_by(value), "needs_nvshmem")


_MAY_HOLD_FUNCTIONS = (JITFunction, tl.constexpr, tuple, list, dict, types.FunctionType)
_data_types: set[type] = set()
"""Types of arguments that were seen and cannot bring a function into a kernel."""


_function_needs_nvshmem = functools.lru_cache(needs_nvshmem)


def _arguments_need_nvshmem(values: Iterable[Any]) -> bool:
    """Return whether an argument of a launch brings a function that calls NVSHMEM, in 1 us where
    none can."""
    for value in values:
        kind = type(value)
        if kind in _data_types:
            continue
        if not issubclass(kind, _MAY_HOLD_FUNCTIONS):
            _data_types.add(kind)
        elif issubclass(kind, (JITFunction, types.FunctionType)):
            if _function_needs_nvshmem(value):
                return True
        elif needs_nvshmem(value):
            return True
    return False


# ---------------------------------------------------------------------- the compiled kernel


_module_init: Callable[[Any], None] | None = None
_initialized: weakref.WeakSet[Any] = weakref.WeakSet()


def set_module_init(init: Callable[[Any], None] | None) -> None:
    """Say how a loaded module is given to NVSHMEM; None when the process leaves its job.

    Modules that are loaded already are given again: after a second ``initialize`` their device
    state is stale.
    """
    global _module_init
    _module_init = init
    if init is not None:
        for kernel in _initialized:
            init(kernel.module)


def initialized_modules() -> list[Any]:
    """CUmodule handles that were given to NVSHMEM and are still loaded."""
    return [kernel.module for kernel in _initialized]


class _NvshmemKernel(CompiledKernel):
    """A compiled kernel whose module is given to NVSHMEM as soon as it is loaded."""

    def _refuse_outside_a_job(self) -> None:
        if _module_init is None:
            raise NotInitializedError(
                f"kernel {self.name} calls NVSHMEM: call tdcoll.initialize() before launching it (and not "
                "tdcoll.finalize())"
            )

    @property
    def run(self) -> Any:
        # a module that is loaded already points at a heap that is gone
        self._refuse_outside_a_job()
        return super().run

    def _init_handles(self) -> None:
        loaded = self.module is not None
        if not loaded:
            self._refuse_outside_a_job()
        super()._init_handles()
        if not loaded:
            assert _module_init is not None
            _module_init(self.module)
            _initialized.add(self)


def _retyped(compile: Callable[..., Any]) -> Callable[..., Any]:
    """Triton's ``compile``, for kernels that get NVSHMEM's library. It may run in another thread,
    at any time."""

    def compile_for_nvshmem(src: Any, *args: Any, **kwargs: Any) -> Any:
        with for_descriptors(src):
            kernel = compile(src, *args, **kwargs)
        if type(kernel) is CompiledKernel and LIBRARY in dict(kernel.metadata.extern_libs):
            if _DEVICE_STATE in kernel.asm["ptx"]:
                kernel.__class__ = _NvshmemKernel
        return kernel

    return compile_for_nvshmem


@contextlib.contextmanager
def for_descriptors(src: Any) -> Iterator[None]:
    """Waits that are lowered in here are right for loads by descriptors, if the kernel is given one
    or makes one."""
    from tdcoll.language.ptx import descriptors

    given = any("tensordesc" in str(kind) for kind in src.signature.values())
    makes = any(
        one is tl.make_tensor_descriptor for one in _used_by([src.fn, *src.constants.values()])
    )
    token = descriptors.set(given or makes)
    try:
        yield
    finally:
        descriptors.reset(token)


_FOLDERS = Path(__file__).parent, Path(functions.__file__).parent


@functools.cache
def _lowering_digest() -> str:
    """Return what Triton's own cache keys leave out: the text of the lowering, whose extern
    functions write PTX."""
    files = sorted(file for folder in _FOLDERS for file in folder.glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def typed_fields(kind: type) -> dict[str, tl.dtype]:
    """The integer fields of a ``NamedTuple`` that say their type, by name."""
    return {
        name: of
        for name, of in getattr(kind, "__annotations__", {}).items()
        if isinstance(of, tl.dtype)
    }


def _with_plain_fields(bind: Callable[..., Any]) -> Callable[..., Any]:
    """Triton's binder of arguments, which here leaves integer fields of tuples as they are
    annotated. By itself it makes a constant of a 1 and notes what 16 divides, so that each rank
    would compile a kernel of its own."""

    def bound(*args: Any, **kwargs: Any) -> Any:
        parameters, specialization, options = bind(*args, **kwargs)
        for place, value in enumerate(parameters.values()):
            fields = typed_fields(type(value)) if isinstance(value, tuple) else None
            if fields:
                types, notes = specialization[place]
                types = types._replace(
                    **{name: of.name.replace("int", "i") for name, of in fields.items()}
                )
                specialization[place] = (types, notes._replace(**dict.fromkeys(fields)))
        return parameters, specialization, options

    return bound


def _as_arguments(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of a launch, those that have a ``kernel_argument`` replaced by it, in 1 us where
    none has."""
    for value in (*args, *kwargs.values()):
        kind = type(value)
        if kind not in _plain_types:
            if hasattr(kind, "kernel_argument"):
                break
            _plain_types.add(kind)
    else:
        return args, kwargs
    given = lambda value: getattr(value, "kernel_argument", value)  # noqa: E731
    return tuple(map(given, args)), {name: given(value) for name, value in kwargs.items()}


_plain_types: set[type] = set()
"""Types of arguments that were seen and have no ``kernel_argument``."""


class TdcollJITFunction(JITFunction):
    """A ``triton.jit`` function that links and initialises NVSHMEM when it calls it."""

    @functools.cached_property
    def _used(self) -> tuple[Any, ...]:
        """All that this kernel reaches, whatever its arguments are."""
        return tuple(_used_by(self))

    @functools.cached_property
    def _is_own(self) -> bool:
        """Whether this kernel is part of tdcoll."""
        return str(self.__module__).startswith("tdcoll.")

    @functools.cached_property
    def calls_nvshmem(self) -> bool:
        """Whether this kernel needs NVSHMEM's bitcode whatever its arguments are."""
        return _marked(self._used, "needs_nvshmem")

    @functools.cached_property
    def begins_in_stream_order(self) -> bool:
        """True if the kernel begins with :func:`tdcoll.primitives.group.in_stream_order`, so it may
        launch early."""
        function = ast.parse(inspect.cleandoc("\n" + self.src)).body[0]
        assert isinstance(function, ast.FunctionDef)
        statements = function.body[ast.get_docstring(function) is not None :]
        call = statements[0].value if statements and isinstance(statements[0], ast.Expr) else None
        return isinstance(call, ast.Call) and _marked(_named(self, call.func), "in_stream_order")

    @functools.cached_property
    def _waits(self) -> bool:
        """Whether this kernel has bounded waits."""
        return _marked(self._used, "bounded")

    def _check_monitor(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise ``ValueError`` unless what is called ``monitor``, an argument or a field of one, is
        a monitor's. The waits cannot tell: to look would cost each of them an instruction."""
        job = runtime.current_or_none()
        if job is None or not self._waits:
            return
        for name, value in (*zip(self.arg_names, args, strict=False), *kwargs.items()):
            given = (
                value
                if name == "monitor"
                else getattr(value, "monitor", None)
                if isinstance(value, tuple)
                else None
            )
            if isinstance(given, torch.Tensor) and given.data_ptr() not in job.monitors:
                raise ValueError(f"{self.__name__}: {not_a_monitor(given.data_ptr())}")

    @property
    def cache_key(self) -> str:
        """Triton's, and what it does not see of the device language."""
        return f"{super().cache_key}-{_lowering_digest()}"

    def run(self, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        args, kwargs = _as_arguments(args, kwargs)
        if self._is_own:
            kwargs = {**OWN_OPTIONS, **kwargs}
        self._check_monitor(args, kwargs)
        if not _LEFT_TO_TRITON_DISTRIBUTED and (
            self.calls_nvshmem
            or _arguments_need_nvshmem(args)
            or _arguments_need_nvshmem(kwargs.values())
        ):
            job = runtime.current_or_none()
            if job is not None and not job.heap.puts:
                raise TdcollError(no_puts(f"kernel {self.__name__}"))
            kwargs["extern_libs"] = {
                LIBRARY: part_for_language(bitcode_path()),
                **kwargs.get("extern_libs", {}),
            }
        return super().run(*args, grid=grid, warmup=warmup, **kwargs)

    def _refuse_calls_that_wait(self) -> None:
        """Raise ``ValueError`` if a helper acquires that Triton does not inline: it moves loads
        above calls."""
        for helper in self._used:
            called = helper is not self and isinstance(helper, JITFunction) and helper.noinline
            if called and _marked(_used_by(helper), "acquires"):
                raise ValueError(
                    f"{helper.__name__} waits or acquires, and is noinline: Triton would move loads of the loop that "
                    "calls it above the call. Leave noinline out"
                )

    def create_binder(self) -> Any:
        self._refuse_calls_that_wait()
        *made, bind = super().create_binder()  # once per device; sets `compile`
        if not _LEFT_TO_TRITON_DISTRIBUTED:
            self.compile = _retyped(self.compile)  # type: ignore[has-type]
        return (*made, _with_plain_fields(bind))


def _checked_interpreted(function: Any) -> Any:
    """An interpreted kernel that may call NVSHMEM. It refuses unknown launch options and calls
    outside a simulation."""
    from triton.runtime.errors import InterpreterError

    from tdcoll.simulator.launcher import root_cause

    launch = function.run
    name = function.__name__
    parameters = frozenset(function.arg_names)

    def run(*args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> Any:
        unknown = sorted(set(kwargs) - parameters - _LAUNCH_OPTIONS)
        if unknown:
            raise TypeError(
                f"{name}() got unknown keyword(s) {unknown}: neither parameters of the kernel nor launch options"
            )
        args, kwargs = _as_arguments(args, kwargs)
        try:
            return launch(*args, grid=grid, warmup=warmup, **{LINKED: True}, **kwargs)
        except InterpreterError as error:
            if isinstance(root_cause(error), NotInitializedError):
                raise NotInitializedError(
                    f"kernel {name} calls the device language: call tdcoll.initialize() before launching it, or launch "
                    "it inside tdcoll.testing.World.run()"
                ) from None
            raise

    function.run = breaks_graphs(run, f"kernel {name}")
    function.__class__ = _interpreted_class(function.__class__)
    return function


@functools.cache
def _interpreted_class(base: type) -> type:
    """Return a subclass of Triton's interpreted functions, whose error says why they can't be
    compiled."""

    def cache_key(self: Any) -> str:
        raise AttributeError(
            f"kernel {self.__name__} is interpreted, and can't be compiled: TRITON_INTERPRET=1 was "
            f"set when its module {self.fn.__module__} was imported. Import it in a process "
            "without that variable, and without a module that sets it"
        )

    return type(base.__name__, (base,), {"cache_key": property(cache_key)})


def jit(fn: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Like ``triton.jit``, for kernels that call :mod:`tdcoll.language`.

    Helpers called by a kernel may be decorated with this or with ``triton.jit``; the kernel that is
    launched wants this one. A :class:`~tdcoll.WaitMonitor` may be passed as it is. Options are
    ``triton.jit``'s. Integers that are annotated with their type (``rank: tl.int32``), as
    parameters or fields of a ``NamedTuple``, are not specialised.

    >>> @tdcoll.jit
    ... def whoami(out):
    ...     tl.store(out, tdl.my_pe())
    """
    # raises TypeError for an option that there is not
    inspect.signature(triton.jit).bind(fn, **options)

    def decorate(function: Callable[..., Any]) -> Any:
        typed = [name for name, of in function.__annotations__.items() if isinstance(of, tl.dtype)]
        given = {
            **options,
            "do_not_specialize": [*(options.get("do_not_specialize") or ()), *typed],
        }
        if function.__module__.startswith("tdcoll."):  # a profiler shows kernels of many libraries
            given.setdefault("repr", lambda _: f"tdcoll_{function.__name__.lstrip('_')}")
        if INTERPRETED:
            return _checked_interpreted(triton.jit(**given)(function))
        return TdcollJITFunction(function, **given)

    return decorate if fn is None else decorate(fn)
