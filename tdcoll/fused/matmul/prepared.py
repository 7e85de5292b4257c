# SPDX-License-Identifier: Apache-2.0
"""A prepared matmul that communicates: one kernel, or a matmul and a collective in a row.

The frame of a call is one dictionary of tensors by name: those of the request, the result ``out``,
and *temporaries*, which the steps leave for each other.
"""

from __future__ import annotations

from typing import Any

import torch

from tdcoll.base.call_log import CallRecord, record_of
from tdcoll.base.limits import MAX_BLOCKS
from tdcoll.calls.context import CollectiveContext
from tdcoll.calls.copies import CopyEngines, enter_step
from tdcoll.calls.epilogues import identity_of, join_extra, with_plain_numbers
from tdcoll.calls.launch_spec import KernelOptions
from tdcoll.calls.operation import Bound
from tdcoll.calls.plan import Facts
from tdcoll.calls.spec import Collective
from tdcoll.calls.steps import Step
from tdcoll.calls.tensors import tensors_overlap
from tdcoll.collectives.all_gather.spec import SPEC as ALL_GATHER
from tdcoll.fused.matmul import (
    copies,
    kernels_all_reduce,
    kernels_gather,
    kernels_local,
    kernels_scatter,
    launches,
)
from tdcoll.fused.matmul.kernels_gather import Shards
from tdcoll.fused.matmul.launches import Operands
from tdcoll.fused.matmul.policy import (
    COMPOSED,
    COPIED,
    GATHER,
    REDUCE,
    SCATTER,
    TWO_SHOT,
    MatmulPlan,
    MatmulShape,
    is_whole,
)
from tdcoll.fused.operation import aligned, requires_gradient
from tdcoll.fused.prepared import PreparedSteps
from tdcoll.primitives.epilogue import identity
from tdcoll.primitives.group import Inbox


class PreparedMatmul(PreparedSteps):
    """See the module.

    Args:
        tensors: Of the first call, by name.
        options: :class:`~tdcoll.fused.matmul.operation.MatmulOptions`.
        precision: Of fp32 operands.
    """

    def __init__(
        self,
        ctx: CollectiveContext,
        collective: Collective,
        tensors: dict[str, torch.Tensor],
        options: Any,
        shape: MatmulShape,
        plan: MatmulPlan,
        result: tuple[tuple[int, ...], torch.dtype],
        precision: str,
    ) -> None:
        super().__init__(ctx, shape.name)
        self._options = options
        self._shape = shape
        self._plan = plan
        self._result_shape, self._dtype = result
        self._precision = precision
        if "out" not in tensors:
            self.add_temporary("out", *result)
        x = tensors["x"]
        if options.gathered or (shape.name == GATHER and plan.algorithm == COMPOSED):
            self.add_temporary("gathered", (ctx.world_size * x.shape[0], *x.shape[1:]), x.dtype)
        if not x.numel():
            return
        if plan.algorithm == COPIED:
            self._add_copied(tensors)
        elif plan.algorithm != COMPOSED:
            self._add_fused(tensors)
        elif shape.name == GATHER:
            self._add_gather_and_matmul(tensors)
        else:
            self._add_matmul_and_reduction(tensors, collective)
        epilogue = options.epilogue
        variant = (
            shape,
            plan,
            options.depth_first,
            options.gathered,
            options.batch_invariant,
            frozenset(tensors) - {"out"},  # which one rank alone may pass
            None if epilogue is None else (id(epilogue), epilogue.__name__),
            tuple(tensor.dtype for name, tensor in tensors.items() if name.startswith("extra.")),
            None if options.extra is None else tuple(map(type, options.extra)),
            x.dtype,
            self._dtype,
            precision,
        )
        # Alignment and numbers of the epilogue may differ between ranks.
        aligned_tensors = tuple(tensor.data_ptr() % 16 == 0 for tensor in tensors.values())
        local = (aligned_tensors, identity_of(options.extra))
        self.complete(plan.algorithm, shape.nbytes, variant, local)

    # ------------------------------------------------------------------ steps

    def _add_fused(self, tensors: dict[str, torch.Tensor]) -> None:
        """Add the kernel that does everything."""
        ctx = self._ctx
        plan = self._plan
        group = ctx.device_group
        operands = self._operands(tensors, "x", "out")
        inbox = Inbox(ctx.inbox.data_ptr(), ctx.capacity, group.deltas, launches.TWO_SLOTS)
        workers = plan.blocks
        if self._shape.name == GATHER:
            kernel = kernels_gather.all_gather_matmul
            blocks, arguments = launches.gather(
                operands,
                plan.cut,
                group,
                inbox,
                workers=workers,
                pushers=plan.pushers,
                piece=plan.piece,
                keepers=plan.keepers,
                whole=is_whole(self._shape, plan, ctx.world_size),
            )
        elif self._shape.name == SCATTER:
            kernel = kernels_scatter.matmul_reduce_scatter
            blocks, arguments = launches.scatter(
                operands, plan.cut, group, inbox, workers=workers, lag=plan.lag, stages=plan.stages
            )
        else:
            kernel = kernels_all_reduce.matmul_all_reduce
            two_shot = plan.algorithm == TWO_SHOT
            assert ctx.device_lamport is not None
            blocks, arguments = launches.reduce(
                operands, plan.cut, group, ctx.device_lamport, workers=workers, two_shot=two_shot
            )
        record = record_of(self._shape.name)
        if self._shape.name == REDUCE:
            record = record_of(self._shape.name, 0, 1)
        parameters = self._parameters(tensors, "x", "out", keeps=plan.keepers > 0)
        self._add_kernel(kernel, blocks, arguments, parameters, record)

    def _add_copied(self, tensors: dict[str, torch.Tensor]) -> None:
        """Add the copies by copy engines, and the kernel that multiplies what arrives."""
        ctx = self._ctx
        plan = self._plan
        world = ctx.world_size
        rows = self._shape.rows // world
        scale = None
        if "x_scale" in tensors:
            scale = "x_scale"
            if tensors[scale].numel() != rows:  # a copy takes a scale for each row
                scale = "own_scale"
                self.add_temporary(scale, (rows,), torch.float32)
                self.add_host_step(_expand_scale)
        engines = CopyEngines(ctx, self._shape.name)
        shard_copies = copies.ShardCopies(
            ctx,
            self._shape.name,
            engines,
            nbytes=self._shape.nbytes // world,
            piece=plan.piece,
            rows=rows,
            scale=scale,
        )
        whole, own, others = (
            self._copied_launch(tensors, shards, keepers)
            for shards, keepers in (
                (Shards(0, world), plan.keepers),
                (Shards(0, 1), 0),
                (Shards(1, world), plan.keepers),
            )
        )
        self.add_step(enter_step(ctx, engines), record_of(self._shape.name, even=True))
        self.add_step(copies.CopiedShardsStep(ctx, shard_copies, whole, own, others))

    def _copied_launch(
        self, tensors: dict[str, torch.Tensor], shards: Shards, keepers: int
    ) -> Step:
        """Return the launch that multiplies some of the shards.

        It doesn't begin early, because copies come before it.
        """
        ctx = self._ctx
        plan = self._plan
        group = ctx.device_group
        blocks, arguments = launches.gather(
            self._operands(tensors, "x", "out"),
            plan.cut,
            group,
            Inbox(ctx.inbox.data_ptr(), ctx.capacity, group.deltas, launches.TWO_SLOTS),
            workers=plan.blocks,
            piece=plan.piece,
            keepers=keepers,
            shards=shards,
        )
        parameters = self._parameters(tensors, "x", "out", keeps=plan.keepers > 0)
        kernel = kernels_gather.all_gather_matmul
        return self._kernel_step(kernel, blocks, arguments, parameters, allow_pdl=False)

    def _add_gather_and_matmul(self, tensors: dict[str, torch.Tensor]) -> None:
        ctx = self._ctx
        self.add_collective(ALL_GATHER, Facts.of(ctx, tensors["x"].nbytes), "x", "gathered")
        scaled = "x_scale" in tensors
        if scaled:
            rows = self._shape.rows // ctx.world_size
            self.add_temporary("own_scale", (rows,), torch.float32)
            self.add_temporary("gathered_scale", (self._shape.rows,), torch.float32)
            self.add_host_step(_expand_scale)
            self.add_collective(ALL_GATHER, Facts.of(ctx, 4 * rows), "own_scale", "gathered_scale")
        if self._takes_cublas(tensors) and not self._finishes:
            self.add_host_step(_Multiply("gathered", "out", self._options.depth_first))
            return
        self._add_local_matmul(tensors, "gathered", "out")

    def _add_matmul_and_reduction(
        self, tensors: dict[str, torch.Tensor], collective: Collective
    ) -> None:
        shape = self._shape
        dtype = self._dtype
        sizes = (shape.rows, shape.columns)
        self.add_temporary("product", sizes, dtype)
        if self._takes_cublas(tensors):
            self.add_host_step(_Multiply("x", "product", self._options.depth_first))
        else:
            self._add_local_matmul(tensors, "x", "product")
        parts = "product"
        sums = "out"
        if self._finishes:
            # Sums stay in fp32, so that the result is rounded once, behind the epilogue.
            dtype = torch.float32
            parts = "wide"
            sums = "sums"
            self.add_temporary("wide", sizes, dtype)
            self.add_temporary("sums", self._result_shape, dtype)
            self.add_host_step(_widen)
        segment = collective.segment_bytes(
            shape.rows * shape.columns * dtype.itemsize, self._ctx.world_size
        )
        facts = Facts.of(self._ctx, segment, dtype)
        self.add_collective(collective, facts, parts, sums, KernelOptions(dtype, "sum"))
        if self._finishes:
            rows = torch.Size(self._result_shape[:-1]).numel()
            blocks, arguments = launches.finish(self._operands(tensors, "x", "out"), rows)
            parameters = self._parameters(tensors, "sums", "out")
            kept = {
                name: parameters[name] for name in parameters if name.partition(".")[0] in arguments
            }
            self._add_kernel(kernels_local.finish, blocks, arguments, kept, num_warps=4)

    @property
    def _finishes(self) -> bool:
        """Whether something is done with sums before they are rounded."""
        return "bias" in self._options.names or self._options.epilogue is not None

    def _takes_cublas(self, tensors: dict[str, torch.Tensor]) -> bool:
        same_dtype = self._dtype is tensors["x"].dtype
        return same_dtype and not self._options.batch_invariant

    def _add_local_matmul(self, tensors: dict[str, torch.Tensor], source: str, out: str) -> None:
        """Add a matmul; with bias and epilogue if its result is the call's."""
        bare = tensors
        if out != "out":
            bare = {name: tensor for name, tensor in tensors.items() if name != "bias"}
        operands = self._operands(bare, source, out)
        blocks, arguments = launches.local(operands, self._plan.cut, workers=self._plan.blocks)
        parameters = self._parameters(bare, source, out)
        if operands.extra is None:
            parameters = {
                name: value for name, value in parameters.items() if not name.startswith("extra.")
            }
        self._add_kernel(kernels_local.matmul, blocks, arguments, parameters)

    def _add_kernel(
        self,
        kernel: Any,
        blocks: int,
        arguments: dict[str, Any],
        parameters: dict[str, str],
        record: CallRecord | None = None,
        num_warps: int | None = None,
    ) -> None:
        """Add the launch of a kernel, see :meth:`_kernel_step`."""
        step = self._kernel_step(kernel, blocks, arguments, parameters, num_warps=num_warps)
        self.add_step(step, record)

    def _kernel_step(
        self,
        kernel: Any,
        blocks: int,
        arguments: dict[str, Any],
        parameters: dict[str, str],
        *,
        num_warps: int | None = None,
        allow_pdl: bool = True,
    ) -> Step:
        """Return the launch of a kernel.

        Args:
            parameters: The parameters that each call brings, and the names of their tensors.
        """
        options: dict[str, Any] = self._plan.cut.options
        if num_warps is not None:
            options = {"num_warps": num_warps}
        options["allow_pdl"] = allow_pdl and self._ctx.allow_pdl
        fixed = {name: value for name, value in arguments.items() if name not in parameters}
        # Triton sees what an epilogue reads as tensors, because their dtypes are its own.
        extra = [name for name in parameters.values() if name.startswith("extra.")]
        return self.kernel_step(kernel, blocks, fixed, parameters, extra, **options)

    def _operands(self, tensors: dict[str, torch.Tensor], source: str, out: str) -> Operands:
        """Return what a kernel multiplies. Tensors that a launch brings count by shape, dtype and
        alignment."""
        x = tensors["x"]
        weight = tensors["weight"]
        rows = self._shape.rows if source == "gathered" else x.numel() // x.shape[-1]
        result = tensors.get(out)
        if result is None:
            result = torch.empty(1, dtype=self._dtype, device="meta")
        extra = None
        epilogue = identity
        if out == "out" and self._options.epilogue is not None:
            epilogue = self._options.epilogue
            extra = join_extra(self._options.extra, tensors)
            if self._ctx.max_blocks != MAX_BLOCKS:  # as for dense reductions
                extra = with_plain_numbers(extra)
        x_scale = tensors.get("x_scale")
        if source == "gathered" and x_scale is not None:
            x_scale = torch.empty(rows, dtype=torch.float32, device="meta")
        return Operands(
            torch.empty(rows, x.shape[-1], dtype=x.dtype, device="meta"),
            weight,
            result,
            self._options.depth_first,
            tensors.get("bias"),
            x_scale,
            tensors.get("weight_scale"),
            epilogue,
            extra,
            self._precision,
        )

    def _parameters(
        self, tensors: dict[str, torch.Tensor], source: str, out: str, *, keeps: bool = False
    ) -> dict[str, str]:
        """Return the parameters of a kernel that each call brings, and the names of their
        tensors."""
        found = {"source": source, "out": out}
        if keeps:
            found["gathered"] = "gathered"
        found["weight.base"] = "weight"
        if "bias" in tensors:
            found["weight.bias"] = "bias"
        if "x_scale" in tensors:
            found["scales.x"] = "gathered_scale" if source == "gathered" else "x_scale"
            found["scales.weight"] = "weight_scale"
        found |= {name: name for name in tensors if name.startswith("extra.")}
        return found

    # ------------------------------------------------------------------ calls

    def bind(self, *tensors: Any) -> Bound | None:
        if requires_gradient(*tensors):
            return None
        frame = dict(zip(self._options.names, tensors, strict=True))
        out = frame.get("out")
        if out is not None:
            for name, tensor in frame.items():
                if name != "out" and tensors_overlap(out, tensor):
                    return None
        frame["x"] = aligned(frame["x"])
        frame["weight"] = aligned(frame["weight"])
        self.make_temporaries(frame)
        result = frame["out"]
        if self._options.gathered:
            return (result, frame["gathered"]), (frame,)
        return result, (frame,)


class _Multiply:
    """``torch.mm``, hence cuBLAS, from one tensor of a frame to another."""

    def __init__(self, source: str, out: str, depth_first: bool) -> None:
        self._source = source
        self._out = out
        self._depth_first = depth_first

    def __call__(self, tensors: dict[str, torch.Tensor]) -> None:
        x = tensors[self._source]
        out = tensors[self._out]
        weight = tensors["weight"]
        if not self._depth_first:
            weight = weight.t()
        torch.mm(x.view(-1, x.shape[-1]), weight, out=out.view(-1, out.shape[-1]))


def _expand_scale(tensors: dict[str, torch.Tensor]) -> None:
    """Give each row of ``x`` a scale."""
    tensors["own_scale"].copy_(tensors["x_scale"].view(-1).expand(tensors["own_scale"].shape))


def _widen(tensors: dict[str, torch.Tensor]) -> None:
    """Copy rounded parts to fp32."""
    tensors["wide"].copy_(tensors["product"])
