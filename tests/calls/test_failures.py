# SPDX-License-Identifier: Apache-2.0
"""Calls that fail on one rank: before they begin nothing has happened, and after that the context
is of no more use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import Wrapped, on_ranks

import tdcoll
from tdcoll import runtime
from tdcoll.calls.budget import StreamOrder
from tdcoll.calls.call_launches import launches_of
from tdcoll.calls.checks import CallChecks
from tdcoll.calls.kernel_launch import KernelLaunch, LaunchCache
from tdcoll.calls.launch_spec import KernelOptions
from tdcoll.calls.plan import Facts
from tdcoll.calls.spec import Collective
from tdcoll.calls.tuning import SIMULATOR, Entry, Section, Table
from tdcoll.collectives.all_reduce.spec import SPEC as ALL_REDUCE
from tdcoll.fused import rms_norm as fused
from tdcoll.spec.constants import RECORD_VALID
from tdcoll.testing import World

WORLD = 2
NBYTES = 256


def tensor(pe: int, call: int, n: int = 16) -> torch.Tensor:
    return torch.arange(n, dtype=torch.float32) + 100 * pe + 1000 * call


def gather(ctx: Any, pe: int, call: int) -> torch.Tensor:
    return tdcoll.all_gather(tensor(pe, call), ctx=ctx)


def scatter(ctx: Any, pe: int, call: int) -> torch.Tensor:
    return tdcoll.reduce_scatter(tensor(pe, call), ctx=ctx)


def reduce(ctx: Any, pe: int, call: int) -> torch.Tensor:
    return tdcoll.all_reduce(tensor(pe, call), ctx=ctx)


def norm(ctx: Any, pe: int, call: int, algorithm: str = "one_shot") -> torch.Tensor:
    x = tensor(pe, call).view(2, 8)
    return tdcoll.fused.all_reduce_rms_norm(
        x, torch.ones(2, 8), torch.ones(8), ctx=ctx, algorithm=algorithm
    )[1]


def composed(ctx: Any, pe: int, call: int) -> torch.Tensor:
    return norm(ctx, pe, call, "composed")


def expected(kind: Callable[..., Any], pe: int, call: int) -> list[float]:
    parts = [tensor(rank, call, 200 if kind is several else 16) for rank in range(WORLD)]
    if kind is gather:
        return torch.cat(parts).tolist()
    total = parts[0] + parts[1]
    if kind is scatter:
        return total.chunk(WORLD)[pe].tolist()
    return total.tolist() if kind in (reduce, several) else (total.view(2, 8) + 1).tolist()


KINDS = [gather, scatter, reduce, norm, composed]


def several(ctx: Any, pe: int, call: int) -> torch.Tensor:
    """An all-reduce of three epochs or more."""
    return tdcoll.all_reduce(tensor(pe, call, 200), ctx=ctx, algorithm="direct")


class OutOfMemory:
    """``torch.empty`` and ``torch.empty_like`` that fail on one rank while :attr:`now` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, victim: int) -> None:
        self.now = False
        for name in ("empty", "empty_like"):
            monkeypatch.setattr(torch, name, self._failing(getattr(torch, name), victim))

    def _failing(self, real: Callable[..., Any], victim: int) -> Callable[..., Any]:
        def make(*arguments: Any, **named: Any) -> Any:
            if self.now and tdcoll.runtime.current().rank == victim:
                self.now = False
                raise torch.OutOfMemoryError("CUDA out of memory, says a test")
            return real(*arguments, **named)

        return make


@pytest.mark.parametrize("first", [True, False], ids=["first call", "repeated call"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_call_without_memory_for_its_result_may_be_made_again(
    kind: Callable[..., torch.Tensor], first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks are in step after the second try, and have the right results."""
    out_of_memory = OutOfMemory(monkeypatch, victim=1)

    def host(pe: int) -> None:
        with tdcoll.CollectiveContext(max_bytes_per_rank=NBYTES) as ctx:
            for call in range(6):
                if pe == 1 and call == (0 if first else 2):
                    out_of_memory.now = True
                    with pytest.raises(torch.OutOfMemoryError):
                        kind(ctx, pe, call)
                    assert not out_of_memory.now
                assert kind(ctx, pe, call).tolist() == expected(kind, pe, call)
            ctx.check()

    World(WORLD).run(host)


def test_in_debug_mode_all_ranks_hear_that_one_has_no_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out_of_memory = OutOfMemory(monkeypatch, victim=1)

    def host(pe: int) -> None:
        with tdcoll.CollectiveContext(max_bytes_per_rank=NBYTES, debug=True) as ctx:
            out_of_memory.now = True
            expected_error = torch.OutOfMemoryError if pe else tdcoll.RankMismatchError
            with pytest.raises(expected_error, match="CUDA out of memory, says a test"):
                reduce(ctx, pe, 0)
            assert reduce(ctx, pe, 1).tolist() == expected(reduce, pe, 1)

    World(WORLD).run(host)


ENDED = (
    "KeyboardInterrupt, ContextError because of an interrupt, ContextError because of an interrupt"
)
TIMED_OUT = "CollectiveTimeout, CollectiveTimeout, CollectiveTimeout"


class Interrupted:
    """Launches, one of which is interrupted on one rank: the one of this number, while :attr:`now`
    is set."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, victim: int, number: int, kind: type = KernelLaunch
    ) -> None:
        self.now = False
        real = kind.__call__
        made = [0]

        def launch(this: Any, *arguments: Any, **named: Any) -> None:
            if self.now and tdcoll.runtime.current().rank == victim:
                made[0] += 1
                if made[0] == number:
                    raise KeyboardInterrupt
            real(this, *arguments, **named)

        monkeypatch.setattr(kind, "__call__", launch)


def after_an_interrupt(
    call_of: Callable[[Any, int, int], bool],
    interrupted: Interrupted,
    make: Callable[[], Any] = lambda: tdcoll.CollectiveContext(max_bytes_per_rank=NBYTES),
) -> list[str]:
    """Say how each rank's calls end when one is interrupted on rank 1: the call itself, and those
    that follow."""

    def host(pe: int) -> str:
        ctx = make()
        for call in range(3):
            assert call_of(ctx, pe, call)
        interrupted.now = True
        ended = []
        for call in range(3, 6):
            try:
                right = call_of(ctx, pe, call)
                ctx.check()
                ended.append("right" if right else "WRONG")
            except (KeyboardInterrupt, tdcoll.TdcollError) as error:
                why = (
                    " because of an interrupt"
                    if "ended with KeyboardInterrupt after it" in str(error)
                    else ""
                )
                ended.append(type(error).__name__ + why)
        return ", ".join(ended)

    return World(WORLD, on_timeout="expire").run(host)


def test_graphs_do_nothing_after_an_interrupted_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay asks no host. Its kernels must not stand in for the epochs that the rank has not
    made."""
    n = 200
    interrupted = Interrupted(monkeypatch, victim=1, number=2)

    def host(pe: int) -> str:
        ctx = tdcoll.CollectiveContext(max_bytes_per_rank=NBYTES)
        given, out = tensor(pe, 0, n), torch.empty(n)
        tdcoll.all_reduce(given, ctx=ctx, out=out, algorithm="direct")
        captured = launches_of(
            ALL_REDUCE,
            ctx,
            Facts.of(ctx, given.nbytes, torch.float32),
            "direct",
            KernelOptions(torch.float32, "sum"),
        )
        interrupted.now = True
        other = tensor(pe, 1, n)
        try:
            tdcoll.all_reduce(other, ctx=ctx, out=out, algorithm="direct")
        except KeyboardInterrupt:
            interrupted.now = False
            captured(ctx.current_stream(), given.data_ptr(), out.data_ptr())  # as by a replay
            return "interrupted"
        try:
            ctx.check()
        except tdcoll.CollectiveTimeout:
            return "timeout"
        return "right" if out.equal(tensor(0, 1, n) + tensor(1, 1, n)) else "WRONG"

    assert World(WORLD, on_timeout="expire").run(host) == ["timeout", "interrupted"]


@pytest.mark.parametrize(
    ("kind", "number"), [*((kind, 1) for kind in (*KINDS, several)), (several, 2), (several, 3)]
)
def test_an_interrupted_launch_ends_the_context(
    kind: Callable[..., Any], number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No rank takes the next call of rank 1, which may be epochs behind, for another."""

    def call_of(ctx: Any, pe: int, call: int) -> bool:
        return kind(ctx, pe, call).tolist() == expected(kind, pe, call)

    interrupted = Interrupted(monkeypatch, victim=1, number=number)
    peer, victim = after_an_interrupt(call_of, interrupted)
    assert victim == ENDED
    assert peer == TIMED_OUT


def test_a_check_after_an_interrupted_call_does_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interrupt has ended the kernels of earlier calls that still ran, whose results are
    incomplete."""
    interrupted = Interrupted(monkeypatch, victim=1, number=1)

    def host(pe: int) -> None:
        ctx = tdcoll.CollectiveContext(max_bytes_per_rank=NBYTES)
        assert reduce(ctx, pe, 0).tolist() == expected(reduce, pe, 0)
        ctx.check()
        interrupted.now = True
        if pe == 0:
            return
        with pytest.raises(KeyboardInterrupt):
            reduce(ctx, pe, 1)
        for check in (ctx.check, ctx.monitor.check, tdcoll.check):
            with pytest.raises(
                tdcoll.ContextError, match="an earlier all_reduce ended with KeyboardInterrupt"
            ):
                check()

    World(WORLD, on_timeout="expire").run(host)


@pytest.mark.parametrize(
    ("algorithm", "number"), [("gather", 1), ("gather", 2), *(("owner", n) for n in (1, 2, 3))]
)
def test_an_interrupted_sparse_call_ends_the_context(
    algorithm: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def call_of(ctx: Any, pe: int, call: int) -> bool:
        ids, rows = torch.tensor([pe, 2, 2]), tensor(pe, call, 12).view(3, 4)
        found, values = tdcoll.sparse_all_reduce_rows(ids, rows, 8, ctx=ctx, algorithm=algorithm)
        total = sum(tensor(rank, call, 12).view(3, 4)[1:].sum(0) for rank in range(WORLD))
        return found.tolist() == [0, 1, 2] and values[2].equal(total)

    peer, victim = after_an_interrupt(
        call_of,
        Interrupted(monkeypatch, victim=1, number=number, kind=LaunchCache),
        lambda: tdcoll.SparseContext(max_rows_per_rank=8, max_row_bytes=64),
    )
    assert victim == ENDED
    # the last launch needs no peer
    assert peer in (TIMED_OUT, TIMED_OUT.replace("CollectiveTimeout", "right", 1))


def test_a_kernel_that_cannot_be_compiled_leaves_the_context_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a GPU, kernels are compiled before a call begins."""
    fails = [True]

    def prepare(launch: KernelLaunch) -> None:
        if fails[0] and tdcoll.runtime.current().rank == 1:
            raise RuntimeError("ptxas says no")

    monkeypatch.setattr(KernelLaunch, "prepared", property(lambda launch: not fails[0]))
    monkeypatch.setattr(KernelLaunch, "prepare", prepare)

    def host(pe: int) -> None:
        with tdcoll.CollectiveContext(max_bytes_per_rank=NBYTES) as ctx:
            if pe == 1:
                with pytest.raises(RuntimeError, match="ptxas says no"):
                    reduce(ctx, pe, 0)
                fails[0] = False
            assert reduce(ctx, pe, 0).tolist() == expected(reduce, pe, 0)

    World(WORLD).run(host)


@on_ranks(WORLD)
def test_tensors_without_memory_are_refused(pe: int) -> None:
    """Also where a call with such a shape has been made before."""
    with tdcoll.CollectiveContext(max_bytes_per_rank=NBYTES, debug=False) as ctx:
        wrapped, x = Wrapped(torch.ones(4)), torch.ones(4)
        for call, size in ((tdcoll.all_reduce, 4), (tdcoll.all_gather, 4 * WORLD)):
            for _ in range(2):
                for out in (None, torch.empty(size)):
                    with pytest.raises(
                        TypeError,
                        match=r"tensor must be a tensor with memory of its own; got Wrapped",
                    ):
                        call(wrapped, out=out, ctx=ctx)
                    call(x, out=out, ctx=ctx)
                with pytest.raises(
                    TypeError, match=r"out must be a tensor with memory of its own; got Wrapped"
                ):
                    call(x, out=Wrapped(torch.ones(size)), ctx=ctx)
        right = {"residual": torch.ones(1, 16), "weight": torch.ones(16), "scale": torch.ones(1)}
        for name in right:
            for _ in range(2):
                wrong = {**right, name: Wrapped(right[name])}
                with pytest.raises(
                    TypeError, match=rf"{name} must be a tensor with memory of its own; got Wrapped"
                ):
                    tdcoll.fused.all_reduce_rms_norm(
                        torch.ones(1, 16), **wrong, out_dtype=torch.float8_e4m3fn, ctx=ctx
                    )
                tdcoll.fused.all_reduce_rms_norm(
                    torch.ones(1, 16), **right, out_dtype=torch.float8_e4m3fn, ctx=ctx
                )


@on_ranks(WORLD)
def test_a_refused_gather_into_symmetric_memory_leaves_it_alone(pe: int) -> None:
    out, x = tdcoll.zeros(4), torch.ones(2)
    ctx = tdcoll.CollectiveContext(max_bytes_per_rank=NBYTES)
    for wrong, text in (
        (out[2 - 2 * pe :][:2], "must not overlap"),
        (torch.ones(4)[::2], "must be contiguous"),
    ):
        with pytest.raises(ValueError, match=rf"tensor {text}"):
            tdcoll.all_gather(wrong, out=out, ctx=ctx, symmetric=True)
    with pytest.raises(tdcoll.NotSymmetricError, match=r"^out must lie in the symmetric heap"):
        tdcoll.all_gather(x, out=torch.zeros(4), ctx=ctx, symmetric=True)
    ctx.close()
    with pytest.raises(tdcoll.ContextError, match=r"^all_gather: the context is closed"):
        tdcoll.all_gather(x, out=out, ctx=ctx, symmetric=True)
    assert not out.any()


@on_ranks(WORLD)
def test_a_timeout_in_an_outgrown_context_is_raised_by_the_next_call(pe: int) -> None:
    """A captured graph may still use it, and nobody else has a handle to it."""
    tdcoll.all_reduce(torch.ones(4))
    pool = runtime.current().contexts["all_reduce", (0, 1)]
    old = pool.context
    old.captured = True
    tdcoll.all_reduce(torch.ones(1 << 18))
    assert pool.context is not old
    old.monitor._record[RECORD_VALID.value] = 1  # as a replay does whose wait expires
    with pytest.raises(tdcoll.CollectiveTimeout):
        tdcoll.all_reduce(torch.ones(4))


# ---------------------------------------------------------------------- calls that are made again


@pytest.mark.parametrize("call", [tdcoll.all_reduce, tdcoll.all_gather, tdcoll.all_reduce_])
@on_ranks(WORLD)
def test_scalars_may_be_passed_again(pe: int, call: Callable[..., torch.Tensor]) -> None:
    with tdcoll.CollectiveContext(max_bytes_per_rank=NBYTES) as ctx:
        for again in range(3):
            got = call(torch.tensor(1.0 + again), ctx=ctx)
            assert got.tolist() == (
                [1.0 + again] * 2 if call is tdcoll.all_gather else 2.0 + 2 * again
            )


@on_ranks(WORLD, backend="thread")  # greenlets share grad mode
def test_scalars_that_require_grad_may_be_passed_again(pe: int) -> None:
    with tdcoll.CollectiveContext(max_bytes_per_rank=NBYTES) as ctx:
        for _ in range(3):
            loss = torch.tensor(3.0, requires_grad=True)
            tdcoll.all_reduce(loss, ctx=ctx).backward()
            assert loss.grad == 2.0


def test_two_ranks_choose_alike_while_one_captures_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that captures has the same facts and chooses alike: it may replay a graph while
    another calls eagerly."""
    names = {"all_gather": "direct", "all_reduce": "one_shot", "reduce_scatter": "direct"}
    table = Table(
        tuple(
            Section(SIMULATOR, name, WORLD, 1, False, (Entry(None, how),))
            for name, how in names.items()
        )
    )
    chosen: dict[int, list[Any]] = {0: [], 1: []}

    def note(owner: Any, name: str) -> None:
        choose = getattr(owner, name)

        def choosing(*given: Any) -> Any:
            facts, made = next(each for each in given if isinstance(each, Facts)), choose(*given)
            shown = {name: value for name, value in vars(facts).items() if name != "topology"}
            chosen[facts.topology.rank].append((shown, given[2:], made))
            return made

        monkeypatch.setattr(owner, name, choosing)

    note(Collective, "decide_call")
    note(fused, "choose")
    capturing = property(lambda checks: checks.topology.rank == 1, lambda checks, value: None)
    monkeypatch.setattr(CallChecks, "capturing", capturing, raising=False)
    monkeypatch.setattr(StreamOrder, "follow_in_capture", lambda order, stream: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)

    def host(pe: int) -> None:
        with tdcoll.CollectiveContext(max_bytes_per_rank=NBYTES, tuning=table) as ctx:
            for kind in KINDS:
                assert kind(ctx, pe, 0).tolist() == expected(kind, pe, 0)

    World(WORLD).run(host)
    assert chosen[0] == chosen[1]
    assert len(chosen[0]) >= len(KINDS)
