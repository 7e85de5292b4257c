# SPDX-License-Identifier: Apache-2.0
"""The calls of ``bench soak``: drawn from a seed, with data and exact results made on the device.

All ranks draw the same calls. Data depends on the rank and on a number on the device, the *turn*,
so a captured call has other data in each replay. Values are whole numbers, so small that every sum
is exact in any order, and a result is right only if all its elements are equal to the expected ones.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import tdcoll
from tdcoll.base.limits import COLLECTIVES, MATMULS
from tdcoll.calls.collective import spec_of
from tdcoll.calls.spec import Collective
from tdcoll.fused.matmul.policy import ALGORITHMS as MATMUL_ALGORITHMS
from tdcoll.fused.policy import ALGORITHMS as NORM_ALGORITHMS
from tdcoll.language import INTERPRETED
from tdcoll.primitives.reduce import OPERATIONS_OF
from tdcoll.tools.measure.collectives import DENSE_CALLS

MOST_BYTES = (2 << 20) if not INTERPRETED else 1200
"""The most bytes of a tensor or a result of one rank."""

MOVED_DTYPES = (torch.uint8, torch.int64, torch.bfloat16, torch.float32)
_TABLE_ROWS = 5000 if not INTERPRETED else 60

Turn = torch.Tensor
"""int64 with one element, on the device: data follows from it."""


@dataclass(frozen=True)
class Lane:
    """A context, and what its calls use.

    Attributes:
        name: for reports.
        stream: the stream of its calls; None in the simulator.
        buffer: symmetric memory for results, uint8.
    """

    name: str
    ctx: tdcoll.CollectiveContext
    stream: Any
    buffer: torch.Tensor


@dataclass(frozen=True)
class SoakCall:
    """A call with its check.

    Attributes:
        kind: the operation and how it is made, for counts.
        text: the same with dtypes and sizes, for reports.
        wrong: makes the call with the data of a turn, on the current stream; returns the number of
            wrong elements, an int64 on the device.
        can_capture: whether a CUDA graph may have it.
    """

    kind: str
    text: str
    wrong: Callable[[Turn], torch.Tensor]
    can_capture: bool = True


def numbers(rank: int, turn: Turn, count: int, dtype: torch.dtype, most: int = 7) -> torch.Tensor:
    """``[count]``: whole numbers that depend on rank, turn and place, on the turn's device.

    Args:
        most: the largest absolute value. fp8 has at most 1, whatever this is, and unsigned dtypes
            no negative values.
    """
    if dtype.itemsize == 1 and dtype.is_floating_point:
        most = 1
    place = torch.arange(count, device=turn.device)
    mixed = (place * 7 + (place >> 8) * 3 + rank * 41 + turn * 89) % (2 * most + 1)
    least = 0 if dtype is torch.uint8 else -most
    return (mixed + least).to(dtype)


def count_wrong(got: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Return how many elements differ; all, if shape or dtype do."""
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        return torch.full((), max(1, wanted.numel()), dtype=torch.int64, device=wanted.device)
    if got.dtype.itemsize == 1:
        return (got.view(torch.uint8) != wanted.view(torch.uint8)).sum()
    return (got != wanted).sum()


def reduced(parts: Sequence[torch.Tensor], op: str) -> torch.Tensor:
    """Return the elementwise reduction of the ranks' ``parts``."""
    dtype = parts[0].dtype
    exact = torch.int64
    if dtype.is_floating_point:
        exact = torch.float64 if dtype is torch.float64 else torch.float32
    stacked = torch.stack([part.to(exact) for part in parts])
    if op == "max":
        return stacked.amax(0).to(dtype)
    if op == "min":
        return stacked.amin(0).to(dtype)
    total = stacked.sum(0)
    if op == "mean":
        total = total / len(parts)
    return total.to(dtype)


class Palette:
    """The dtypes and operations of calls, and the data of a job.

    Each pair of dtype and operation is another kernel to compile, so there are few.

    Args:
        chooser: the same on all ranks.
        variety: dtypes and operations of each collective.
    """

    def __init__(self, chooser: random.Random, variety: int, rank: int, world: int) -> None:
        self.chooser = chooser
        self.rank = rank
        self.world = world
        reductions = [
            (dtype, op) for dtype, ops in OPERATIONS_OF.items() for op in ops if op != "prod"
        ]
        self._pairs: dict[str, list[tuple[torch.dtype, str]]] = {}
        for name in COLLECTIVES:
            known = [(dtype, "") for dtype in MOVED_DTYPES]
            if spec_of(name).reduces:
                known = reductions
            self._pairs[name] = chooser.sample(known, min(variety, len(known)))

    def size(self, most: int) -> int:
        """Draw a number of elements: 0 now and then, else of any magnitude up to ``most``."""
        if self.chooser.random() < 0.03:
            return 0
        return max(1, int(most ** self.chooser.random()))

    def _algorithm(self, operation: str, names: Sequence[str], shape: Any, **call: Any) -> str:
        """Draw ``"auto"``, or one of ``names`` that supports the call.

        Args:
            shape, call: arguments of :func:`tdcoll.explain`.
        """
        unsupported = tdcoll.explain(operation, shape, **call).unsupported
        return self.chooser.choice(["auto", *(name for name in names if name not in unsupported)])

    # ------------------------------------------------------------------ dense collectives

    def dense(self, lane: Lane) -> SoakCall:
        """Draw a call of a dense collective on a lane's context."""
        spec = spec_of(self.chooser.choice(COLLECTIVES))
        dtype, op = self.chooser.choice(self._pairs[spec.name])
        n = self.size(MOST_BYTES // dtype.itemsize // self.world)
        form = self.chooser.choice(forms_of(spec))
        given = n * self.world if spec.scatters else n
        in_place = form == "in place" and spec.in_place
        shape = n * self.world if in_place else given
        algorithm = self._algorithm(
            spec.name,
            spec.names,
            shape,
            dtype=dtype,
            ctx=lane.ctx,
            in_place=in_place,
            symmetric=form == "symmetric",
        )
        root = self.chooser.randrange(self.world)
        offset = self.chooser.choice((0, 0, 1, 3))
        made = functools.partial(
            self._dense_result, spec, form, lane, algorithm, op, root, (n, dtype, offset)
        )

        def wrong(turn: Turn) -> torch.Tensor:
            every = [numbers(rank, turn, given, dtype) for rank in range(self.world)]
            return count_wrong(made(every[self.rank]), self._dense_wanted(spec, every, op, root))

        details = [str(dtype).removeprefix("torch."), op, f"{n} elements", form, lane.name]
        if spec.rooted:
            details.append(f"root {root}")
        if offset:
            details.append(f"offset {offset}")
        text = ", ".join(filter(None, [algorithm, *details]))
        return SoakCall(f"{spec.name} {algorithm}", f"{spec.name}({text})", wrong)

    def _dense_wanted(
        self, spec: Collective, every: Sequence[torch.Tensor], op: str, root: int
    ) -> torch.Tensor:
        """Return this rank's result of a dense collective."""
        parts = list(every)
        if spec.rooted:
            parts = [every[root]]
        if spec.scatters:
            parts = [tensor.view(self.world, -1)[self.rank] for tensor in every]
        return reduced(parts, op) if spec.reduces else torch.cat(parts)

    def _dense_result(
        self,
        spec: Collective,
        form: str,
        lane: Lane,
        algorithm: str,
        op: str,
        root: int,
        layout: tuple[int, torch.dtype, int],
        tensor: torch.Tensor,
    ) -> torch.Tensor:
        """Make a call of a dense collective; return its result.

        Args:
            layout: elements of a segment, their dtype, and the elements before the tensor and the
                result in their memory.
        """
        n, dtype, offset = layout
        size = n * self.world if spec.gathers else n
        options: dict[str, Any] = {"ctx": lane.ctx, "algorithm": algorithm}
        if spec.reduces:
            options["op"] = op
        if spec.rooted:
            options["root"] = root
        if form == "symmetric" or (form == "in place" and spec.in_place):
            memory = lane.buffer[: (size + offset) * dtype.itemsize].view(dtype)
        else:
            memory = torch.zeros(size + offset, dtype=dtype, device=tensor.device)
        result = memory[offset:]
        if form == "in place":
            own = result
            if spec.gathers and not spec.scatters:
                own = result[self.rank * n : (self.rank + 1) * n]
            own.copy_(tensor)
            function = getattr(tdcoll, DENSE_CALLS[spec.name].in_place_name or "")
            updated: torch.Tensor = function(result, **options)
            return updated
        given = torch.zeros(tensor.numel() + offset, dtype=dtype, device=tensor.device)[offset:]
        given.copy_(tensor)
        if form == "symmetric":
            options["symmetric"] = True
        out = None if form == "new" else result
        new: torch.Tensor = getattr(tdcoll, spec.name)(given, out=out, **options)
        return new

    # ------------------------------------------------------------------ fused calls

    def norm(self, ctx: tdcoll.CollectiveContext) -> SoakCall:
        """Draw an all-reduce with residual and norm, whose rows are all 4 or -4, so that the norm
        is exact."""
        rows = self.chooser.choice((1, 3, 17) if not INTERPRETED else (1, 3))
        hidden = self.chooser.choice((512, 4096) if not INTERPRETED else (64,))
        dtype = self.chooser.choice((torch.bfloat16, torch.float32))
        algorithm = self._algorithm(
            "all_reduce_rms_norm", NORM_ALGORITHMS[1:], (rows, hidden), dtype=dtype, ctx=ctx
        )

        def wrong(turn: Turn) -> torch.Tensor:
            count = rows * hidden
            every = [numbers(rank, turn, count, dtype) for rank in range(self.world)]
            signs = 2 * (numbers(self.world, turn, count, torch.int64) % 2) - 1
            new = (4 * signs).to(dtype).view(rows, hidden)
            residual = (new.view(-1) - reduced(every, "sum")).view(rows, hidden)
            weight = numbers(99, turn, hidden, dtype)
            got, updated = tdcoll.fused.all_reduce_rms_norm(
                every[self.rank].view(rows, hidden),
                residual,
                weight,
                eps=1e-30,
                ctx=ctx,
                algorithm=algorithm,
            )
            normalized = (new / 4) * weight
            return count_wrong(updated, new) + count_wrong(got + 0.0, normalized + 0.0)

        name = f"all_reduce_rms_norm {algorithm}"
        return SoakCall(name, f"{name}({rows} x {hidden} {dtype})", wrong)

    def matmul(self, ctx: tdcoll.CollectiveContext) -> SoakCall:
        """Draw a matmul that communicates, of small whole numbers."""
        name = self.chooser.choice(MATMULS)
        reduces = name != "all_gather_matmul"
        n = self.chooser.choice((8, 64) if not INTERPRETED else (4,))
        depth = self.chooser.choice((64, 128) if not INTERPRETED else (16,))
        columns = self.chooser.choice((64, 256) if not INTERPRETED else (16,))
        dtype = torch.bfloat16
        rows = n * self.world if name == "matmul_reduce_scatter" else n
        algorithm = self._algorithm(
            name,
            MATMUL_ALGORITHMS[name],
            (rows, depth),
            dtype=dtype,
            ctx=ctx,
            weight=(columns, depth),
        )

        def wrong(turn: Turn) -> torch.Tensor:
            every = [
                numbers(rank, turn, rows * depth, dtype, 1).view(rows, depth)
                for rank in range(self.world)
            ]
            weights = [
                numbers(50 + rank, turn, columns * depth, dtype, 1).view(columns, depth)
                for rank in range(self.world)
            ]
            function = getattr(tdcoll.fused, name)
            got = function(every[self.rank], weights[self.rank], ctx=ctx, algorithm=algorithm)
            if reduces:
                products = [
                    (x.float() @ weight.float().t()).to(dtype)
                    for x, weight in zip(every, weights, strict=True)
                ]
                wanted = reduced(products, "sum")
                if name == "matmul_reduce_scatter":
                    wanted = wanted[self.rank * n : (self.rank + 1) * n]
            else:
                wanted = (torch.cat(every).float() @ weights[self.rank].float().t()).to(dtype)
            return count_wrong(got, wanted)

        return SoakCall(
            f"{name} {algorithm}", f"{name}({algorithm}, {rows} x {depth} x {columns})", wrong
        )

    # ------------------------------------------------------------------ sparse

    def sparse(self) -> SoakCall:
        """Draw a sum of row-sparse tensors."""
        most = self.size(_TABLE_ROWS // 2)
        width = self.chooser.choice((1, 4, 128) if not INTERPRETED else (1, 4))
        algorithm = self.chooser.choice(("auto", "owner", "gather", "dense"))
        dtype = self.chooser.choice((torch.float32, torch.bfloat16))

        def part(rank: int, turn: Turn) -> tuple[torch.Tensor, torch.Tensor]:
            count = max(0, most - rank)
            place = torch.arange(count, device=turn.device)
            ids = (place * 3 + rank * 13 + turn * 7) % _TABLE_ROWS
            return ids, numbers(rank, turn, count * width, dtype, 1).view(count, width)

        def wrong(turn: Turn) -> torch.Tensor:
            table = torch.zeros((_TABLE_ROWS, width), dtype=torch.float32, device=turn.device)
            present = torch.zeros(_TABLE_ROWS, dtype=torch.bool, device=turn.device)
            for rank in range(self.world):
                ids, values = part(rank, turn)
                table.index_add_(0, ids, values.float())
                present[ids] = True
            got_ids, got = tdcoll.sparse_all_reduce_rows(
                *part(self.rank, turn), _TABLE_ROWS, algorithm=algorithm
            )
            wanted_ids = present.nonzero().view(-1)
            wrong_ids = count_wrong(got_ids, wanted_ids)
            return wrong_ids + count_wrong(got + 0.0, table[wanted_ids].to(dtype) + 0.0)

        name = f"sparse_all_reduce {algorithm}"
        return SoakCall(name, f"{name}({most} rows of {width} {dtype})", wrong, can_capture=False)

    # ------------------------------------------------------------------ torch.distributed

    def backend(self, group: Any, later: Callable[[Any], None]) -> SoakCall:
        """Draw a call of ``torch.distributed`` on a group of backend "tdcoll".

        Args:
            later: takes the function that waits for an asynchronous call and returns the number of
                wrong elements, and calls it when the group's other calls are under way.
        """
        name = self.chooser.choice(("all_reduce", "all_gather", "reduce_scatter", "broadcast"))
        dtype = self.chooser.choice((torch.float32, torch.bfloat16))
        n = max(1, self.size(MOST_BYTES // dtype.itemsize // self.world))
        root = self.chooser.randrange(self.world)
        is_async = self.chooser.random() < 0.5
        spec = spec_of(name)

        def wrong(turn: Turn) -> torch.Tensor:
            given = n * self.world if spec.scatters else n
            every = [numbers(rank, turn, given, dtype) for rank in range(self.world)]
            wanted = self._dense_wanted(spec, every, "sum", root)
            tensor = every[self.rank].clone()
            result = tensor
            if name == "all_reduce":
                work = dist.all_reduce(tensor, group=group, async_op=is_async)
            elif name == "broadcast":
                work = dist.broadcast(tensor, root, group=group, async_op=is_async)
            else:
                result = torch.empty_like(wanted)
                single = _single(f"{name}_single", dist)
                work = single(result, tensor, group=group, async_op=is_async)
            if work is None:
                return count_wrong(result, wanted)

            def end() -> torch.Tensor:
                work.wait()
                return count_wrong(result, wanted)

            later(end)
            return torch.zeros((), dtype=torch.int64, device=turn.device)

        kind = f"torch.distributed {name}"
        how = "asynchronous" if is_async else "synchronous"
        text = f"{kind}({dtype}, {n} elements, {how}, root {root})"
        return SoakCall(kind, text, wrong, can_capture=False)


def _single(name: str, module: Any) -> Any:
    """Return PyTorch's function for one tensor, by its name in this version."""
    older = {
        "all_gather_single": "all_gather_into_tensor",
        "reduce_scatter_single": "reduce_scatter_tensor",
    }
    return getattr(module, name, None) or getattr(module, older[name])


def forms_of(spec: Collective) -> list[str]:
    """Return the forms that calls of a dense collective have."""
    forms = ["new", "out"]
    if DENSE_CALLS[spec.name].in_place_name:
        forms.append("in place")
    if spec.reduces and not spec.scatters:
        forms.append("symmetric")
    return forms
