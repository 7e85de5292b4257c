# SPDX-License-Identifier: Apache-2.0
"""Matmuls that communicate, as operations: checks, plans, and the contexts of their calls."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import torch

from tdcoll import runtime
from tdcoll.base import arguments
from tdcoll.calls.context import CollectiveContext
from tdcoll.calls.epilogues import (
    check_epilogue,
    describe_epilogue,
    describe_extra,
    identity_of,
    types_of,
)
from tdcoll.calls.explain import Explanation
from tdcoll.calls.implicit import ContextSize, PlannedContext, implicit_context, planned_context
from tdcoll.calls.operation import PreparedCall, Request
from tdcoll.calls.plan import Facts
from tdcoll.calls.spec import Collective
from tdcoll.calls.tensors import check_fits, check_readable, check_tensor, tensors_overlap
from tdcoll.calls.tuning import source
from tdcoll.collectives.all_gather.spec import SPEC as ALL_GATHER
from tdcoll.collectives.all_reduce.spec import SPEC as ALL_REDUCE
from tdcoll.collectives.reduce_scatter.spec import SPEC as REDUCE_SCATTER
from tdcoll.fused.matmul import policy
from tdcoll.fused.matmul.explanation import explain_matmul
from tdcoll.fused.matmul.policy import ALGORITHMS, GATHER, REDUCE, SCATTER, MatmulPlan, MatmulShape
from tdcoll.fused.matmul.prepared import PreparedMatmul
from tdcoll.fused.operation import FusedOperation, check_scale

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
RESULTS = (torch.bfloat16, torch.float16, torch.float32)
DTYPES = (*RESULTS, *FP8)
"""Dtypes of operands; those of results come first."""

_SIMULATED_MULTIPROCESSORS = 4


class MatmulOptions(NamedTuple):
    """Arguments of the public functions beside tensors, as passed.

    Attributes:
        names: of the request's tensors; those of the epilogue's tuple are ``extra.FIELD``.
        extra: The epilogue's tuple, in which None stands for tensors.
    """

    names: tuple[str, ...] = ("x", "weight")
    depth_first: Any = False
    gathered: Any = False
    out_dtype: Any = None
    batch_invariant: Any = False
    epilogue: Any = None
    extra: Any = None
    algorithm: Any = "auto"


def tensors_of(request: Request) -> dict[str, Any]:
    """Return the request's tensors by name."""
    return dict(zip(request.options.names, request.tensors, strict=True))


def result_dtype(x: torch.Tensor, out_dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype of a result."""
    if out_dtype is not None:
        return out_dtype
    return torch.bfloat16 if x.dtype in FP8 else x.dtype


def columns_of(weight: torch.Tensor, depth_first: bool) -> int:
    """Return the columns of a weight, which are those of the result."""
    columns: int = weight.shape[1 if depth_first else 0]
    return columns


def precision_of(dtype: torch.dtype | None) -> str:
    """Return how fp32 operands are multiplied, as PyTorch's own matmuls do it."""
    return "tf32" if dtype is torch.float32 and torch.backends.cuda.matmul.allow_tf32 else "ieee"


class MatmulOperation(FusedOperation):
    """One of :data:`~tdcoll.fused.matmul.policy.NAMES`.

    Requests have the tensors that the options name: ``x`` and ``weight`` first.
    """

    names: ClassVar[tuple[str, ...]] = ("x", "weight")
    local_options = ("names", "extra")

    def __init__(self, name: str, collective: Collective) -> None:
        self.name = name
        self.collective = collective

    def key(self, tensors: tuple[Any, ...], options: MatmulOptions, ctx: Any) -> Hashable:
        epilogue = options.epilogue
        # Hashing a Triton function is slow. The prepared call keeps it, so its id stays its own.
        plain = options._replace(epilogue=id(epilogue), extra=None)
        # Compiled code depends on whether the result, and what an epilogue reads, is aligned.
        aligned = tuple(tensor.data_ptr() % 16 == 0 for tensor in tensors[2:])
        numbers = identity_of(options.extra)
        precision = precision_of(tensors[0].dtype)
        return (super().key(tensors, plain, ctx), aligned, numbers, precision)

    def agreement(self, request: Request, ctx: Any) -> dict[str, Any]:
        weight = request.tensors[1]
        facts = super().agreement(request, ctx)
        shape = facts.pop("shape")
        facts["shape of x (pad the shorter shards)"] = shape
        facts["shape of weight"] = str(tuple(getattr(weight, "shape", ())))
        options: MatmulOptions = request.options
        facts["epilogue"] = describe_epilogue(options.epilogue)
        named = zip(options.names, request.tensors, strict=True)
        read = [tensor for name, tensor in named if name.startswith("extra.")]
        facts["types of extra"] = str(types_of(options.extra, read))
        if self.name == REDUCE:  # the result is the same on all ranks
            facts["numbers of extra"] = describe_extra(options.extra)
        others = [
            name
            for name in request.options.names[2:]
            if name != "out" and not name.startswith("extra.")
        ]
        facts["tensors"] = ", ".join(others)  # `out` may be given on one rank only
        facts["precision"] = precision_of(getattr(request.tensors[0], "dtype", None))
        facts["multiprocessors"] = machine_of(ctx.device)[0]
        return facts

    # ------------------------------------------------------------------ contexts

    def _size(self, request: Request, job: runtime.Runtime, ranks: tuple[int, ...]) -> ContextSize:
        """Return the size of tdcoll's own context: for a call in one kernel, also with the tile of
        the tuning table, if half of the heap is enough for it."""
        world = len(ranks)
        heap_bytes = job.heap.nbytes
        shape = self.shape(request, world, job.device)
        plan = policy.plan_of(shape, world, ALGORITHMS[self.name][0], keeps=False)
        most = heap_bytes // (4 * world)
        wanted = (policy.inbox_bytes(shape, plan, world), _tuned_bytes(shape, world))
        fitting = [nbytes for nbytes in wanted if 0 < nbytes <= most]  # 0: no tuned tile, no rows
        segment = shape.nbytes // world
        if self.name != GATHER:
            result_bytes = shape.rows * shape.columns * self._widest_itemsize(request, shape)
            segment = self.collective.segment_bytes(result_bytes, world)
        if self.name == REDUCE or not fitting:
            return ContextSize(self.collective.inbox(segment, world, heap_bytes), policy.CHUNKS)
        return ContextSize(max(fitting), policy.CHUNKS)

    @staticmethod
    def _widest_itemsize(request: Request, shape: MatmulShape) -> int:
        """Return the bytes of an element that a reduction of its own has: fp32 before a bias or an
        epilogue."""
        options: MatmulOptions = request.options
        finishes = "bias" in options.names or options.epilogue is not None
        return 4 if finishes else shape.out_itemsize

    def check_early(self, request: Request) -> None:
        super().check_early(request)
        arguments.tensor("weight", request.tensors[1])
        if self._made_context(request) is None:
            check_operands(request)

    def _made_context(self, request: Request) -> CollectiveContext | None:
        """Return tdcoll's own context, if it has been made."""
        job = runtime.current()
        implicit = job.contexts.get((self.name, job.ranks_of(request.group)))
        made: CollectiveContext | None = None if implicit is None else implicit.context
        return made

    def own_context(self, request: Request) -> CollectiveContext:
        job = runtime.current()
        made = self._made_context(request)
        if made is not None:
            try:
                check_operands(request)
            except (TypeError, ValueError):
                return made  # `check` raises it, in debug mode on all ranks
        size = self._size(request, job, job.ranks_of(request.group))
        return implicit_context(
            self.collective, request.tensors[0], request.group, self.name, size=size
        )

    def planned_context(self, request: Request) -> CollectiveContext | PlannedContext:
        """Return the context of :meth:`own_context`, or its plan. Local."""
        job = runtime.current()
        size = self._size(request, job, job.ranks_of(request.group))
        return planned_context(self.collective, 0, request.group, self.name, size)

    # ------------------------------------------------------------------ checks

    def check(self, request: Request, ctx: Any) -> None:
        tensors = tensors_of(request)
        options: MatmulOptions = request.options
        x = tensors["x"]
        weight = tensors["weight"]
        check_tensor("x", x, ctx.device)
        check_tensor("weight", weight, ctx.device)
        check_operands(request)
        self.check_no_gradient(request, options.names)
        if self.name == SCATTER and x.shape[0] % ctx.world_size:
            missing = -x.shape[0] % ctx.world_size
            raise ValueError(
                f"x's first dimension must be divisible by the {ctx.world_size} rank(s); got shape "
                f"{list(x.shape)}. Pad it by {missing}"
            )
        columns = columns_of(weight, options.depth_first)
        dtype = result_dtype(x, options.out_dtype)
        if "bias" in tensors:
            check_fits("bias", tensors["bias"], ctx.device, [dtype], [(columns,)])
        rows = x.numel() // x.shape[-1]
        for name, count in (("x_scale", rows), ("weight_scale", columns)):
            if (name in tensors) != (x.dtype in FP8):
                raise ValueError(
                    f"{name} is for operands of fp8, which need it; got x of {x.dtype}"
                )
            if name in tensors:
                check_scale(name, tensors[name], ctx.device, (1, count))
        if "out" in tensors:
            out = tensors["out"]
            check_fits(
                "out", out, ctx.device, [dtype], [self.result_shape(request, ctx.world_size)]
            )
            for name, tensor in tensors.items():
                if name != "out" and tensors_overlap(out, tensor):
                    raise ValueError(f"out must not overlap {name}")
        for name, tensor in tensors.items():
            if name.startswith("extra."):
                check_readable(name, tensor, ctx.device)
        arguments.instance("algorithm", options.algorithm, (str, MatmulPlan), "a str")

    def result_shape(self, request: Request, world: int) -> tuple[int, ...]:
        """Return the shape of the result."""
        x, weight = request.tensors[:2]
        first = x.shape[0]
        if self.name == GATHER:
            first = first * world
        elif self.name == SCATTER:
            first = first // world
        return (first, *x.shape[1:-1], columns_of(weight, request.options.depth_first))

    # ------------------------------------------------------------------ plans

    def shape(self, request: Request, world: int, device: torch.device) -> MatmulShape:
        """Return the call as the policy sees it."""
        x, weight = request.tensors[:2]
        depth = x.shape[-1]
        rows = x.numel() // depth
        if self.name == GATHER:
            rows *= world
        out_itemsize = result_dtype(x, request.options.out_dtype).itemsize
        columns = columns_of(weight, request.options.depth_first)
        full = x.dtype is torch.float32 and precision_of(x.dtype) == "ieee"
        return MatmulShape(
            self.name, rows, columns, depth, x.itemsize, out_itemsize, full, *machine_of(device)
        )

    def _decision(self, request: Request, ctx: Any) -> tuple[MatmulShape, Facts, Any, bool, bool]:
        """Return what the policy decides by, for a call or an explanation of one."""
        options: MatmulOptions = request.options
        shape = self.shape(request, ctx.world_size, ctx.job.device)
        tuning = ctx.tuning
        entry = policy.measured_entry(
            self.name, shape.rows, ctx.world_size, tuning.sections, tuning.name
        )
        shape = replace(shape, measured=entry)
        # Lamport words are of the result's type, which is always one that has them.
        facts = Facts.of(ctx, 0, torch.float32)
        return shape, facts, options.algorithm, options.batch_invariant, bool(options.gathered)

    def explain(self, request: Request, ctx: Any) -> Explanation:
        return explain_matmul(*self._decision(request, ctx))

    def prepare(self, request: Request, ctx: Any) -> PreparedCall:
        self.log_plan(request, ctx)
        shape, facts, *how = self._decision(request, ctx)
        plan, _ = policy.choose(shape, facts, *how)
        x = request.tensors[0]
        result = (
            self.result_shape(request, ctx.world_size),
            result_dtype(x, request.options.out_dtype),
        )
        tensors = tensors_of(request)
        precision = precision_of(x.dtype)
        return PreparedMatmul(
            ctx, self.collective, tensors, request.options, shape, plan, result, precision
        )


def _tuned_bytes(shape: MatmulShape, world: int) -> int:
    """Return the most bytes of a rank's segment in the inbox that a call needs by the tuning table;
    0 if the table says nothing.

    Sections for any GPU count, because ranks may have different ones, and their contexts one size.
    """
    try:
        table = source.read(None)
    except (OSError, TypeError, ValueError):
        return 0  # All ranks raise the error when the context is made.
    most = 0
    for section in table.sections:
        entry = policy.measured_entry(shape.name, shape.rows, world, (section,), table.name)
        if entry is not None:
            tuned = replace(shape, measured=entry)
            plan = policy.plan_of(tuned, world, entry.algorithm, keeps=False)
            most = max(most, policy.inbox_bytes(shape, plan, world))
    return most


OPERATIONS = {
    GATHER: MatmulOperation(GATHER, ALL_GATHER),
    SCATTER: MatmulOperation(SCATTER, REDUCE_SCATTER),
    REDUCE: MatmulOperation(REDUCE, ALL_REDUCE),
}


def machine_of(device: torch.device) -> tuple[int, bool]:
    """Return the multiprocessors of a device, and whether it has asynchronous stores by
    descriptors."""
    if device.type != "cuda":
        return _SIMULATED_MULTIPROCESSORS, True
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, properties.major >= 9


def check_operands(request: Request) -> None:
    """Raise unless the dtypes and shapes of ``x`` and ``weight`` fit each other, and the options
    are valid."""
    x, weight = request.tensors[:2]
    options: MatmulOptions = request.options
    for name in ("depth_first", "gathered", "batch_invariant"):
        arguments.instance(name, getattr(options, name), bool, "a bool")
    check_epilogue(options.epilogue, options.extra)
    for name, tensor in (("x", x), ("weight", weight)):
        if tensor.is_nested:
            raise ValueError(f"{name} must be an ordinary tensor; got a nested one")
    if x.dtype not in DTYPES:
        raise TypeError(f"x must be of {', '.join(map(str, DTYPES))}; got {x.dtype}")
    if options.out_dtype not in (None, *RESULTS):
        raise ValueError(
            f"out_dtype must be None, {', '.join(map(str, RESULTS))}; got {options.out_dtype!r}"
        )
    if x.dim() < 2 or not x.shape[-1] or x.shape[-1] * x.itemsize % 16:
        raise ValueError(
            f"x must be [rows, ..., depth] with a depth that is a multiple of {16 // x.itemsize} of {x.dtype}; got "
            f"shape {list(x.shape)}. Pad x and weight by zeros"
        )
    depth = x.shape[-1]
    expected = f"[{depth}, columns]" if options.depth_first else f"[columns, {depth}]"
    fits = weight.dim() == 2 and weight.shape[0 if options.depth_first else 1] == depth
    if weight.dtype != x.dtype or not fits or not weight.numel():
        raise ValueError(
            f"weight must be {x.dtype} of shape {expected}; got {weight.dtype} of shape {list(weight.shape)}"
        )
    if options.depth_first and weight.shape[1] * weight.itemsize % 16:
        raise ValueError(
            f"weight must have a multiple of {16 // x.itemsize} columns with depth_first=True; got shape "
            f"{list(weight.shape)}. Pad it by zeros"
        )
