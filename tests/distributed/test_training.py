# SPDX-License-Identifier: Apache-2.0
"""Training: the script that compares steps on two backends, and clip_grad_norm_ on sparse and dense
gradients."""

from __future__ import annotations

import importlib.util
import json
import subprocess
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import utils

from tdcoll.base.versions import version_of
from tdcoll.distributed import clip_grad_norm_

Launch = Callable[..., "subprocess.CompletedProcess[str]"]
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "training.py"
_spec = importlib.util.spec_from_file_location("training", SCRIPT)
training: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(training)


def steps(ms: list[float], losses: list[float]) -> dict[str, list[float]]:
    return {"ms": ms, "losses": losses}


def test_pairs_are_compared() -> None:
    row = training.compare(
        steps([9.0, 20.0, 11.0], [1.0, 2.5]), steps([10.0, 10.0, 10.0], [1.0, 2.0])
    )
    assert (row["tdcoll_ms"], row["baseline_ms"], row["losses_differ_by"]) == (11.0, 10.0, 0.25)
    assert row["ratio"] == pytest.approx(1.1)
    assert row["ratio_lower_quartile"] == pytest.approx(0.9)
    assert row["ratio_upper_quartile"] == pytest.approx(2.0)


def test_steps_take_turns(one_rank: None) -> None:
    taken: list[str] = []
    ways = {
        way: lambda way=way: taken.append(way) or torch.tensor(float(len(taken)))
        for way in ("a", "b", "c")
    }
    found = training.in_turns(ways, warm_up=1, steps=2)
    assert "".join(taken) == "abccbaabc"
    assert found["a"]["losses"] == [1.0, 6.0, 7.0]
    assert [len(one["ms"]) for one in found.values()] == [2, 2, 2]


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.slow
def test_workloads_have_the_same_losses_on_both_backends(tmp_path: Path, launch: Launch) -> None:
    file = tmp_path / "training.json"
    done = launch(
        "--simulate",
        "--nproc",
        "2",
        str(SCRIPT),
        "--steps",
        "2",
        "--warm-up",
        "1",
        "--json",
        str(file),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(file.read_text())
    assert [row["workload"] for row in found["rows"]] == list(training.WORKLOADS)
    for row in found["rows"]:
        assert row["losses_differ_by"] < 1e-5, row
        assert row["losses_repeat"] == {"baseline": True, "tdcoll": True}, row
        assert ("alone_ms" in row) == row["workload"].startswith(training.ALONE)
    for kind in ("all_gather", "all_reduce", "reduce_scatter"):  # the hook's calls are its own
        assert f" {kind} by tdcoll" in found["explain"], found["explain"]


ORDERS = [0.0, 1.0, 2.0, 3.0, float("inf"), -1.0, -2.0, float("-inf")]


class Model(nn.Module):
    """Two tables around a dense layer; of small integers, so that squares and sums are exact in any
    order."""

    def __init__(self, sparse: bool, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first = nn.Embedding(9, 4, sparse=sparse, dtype=dtype)
        self.dense = nn.Linear(4, 3, dtype=dtype)
        self.last = nn.Embedding(5, 3, sparse=sparse, dtype=dtype)
        with torch.no_grad():
            for i, parameter in enumerate(self.parameters()):
                parameter.copy_(
                    (torch.arange(parameter.numel()).view_as(parameter) * 5 + i) % 7 - 3
                )

    def forward(self, ids: Iterable[int]) -> torch.Tensor:
        """Rows that come twice; of the last table all."""
        made = self.dense(self.first(torch.tensor([*ids], dtype=torch.int64))).sum()
        return made + (self.last(torch.arange(5)) * torch.tensor([1, -2, 3])).sum()


def pair(
    ids: Iterable[int] = (1, 4, 1, 8, 1), dtype: torch.dtype = torch.float32
) -> tuple[Model, Model]:
    """``(with sparse gradients, with dense ones)``, which are the same."""
    models = Model(True, dtype), Model(False, dtype)
    for model in models:
        model(ids).backward()
    return models


def check_same(ours: Model, dense: Model, to_the_bit: bool = True) -> None:
    for mine, other in zip(ours.parameters(), dense.parameters(), strict=True):
        got, wanted = mine.grad.to_dense(), other.grad
        if to_the_bit:
            assert torch.equal(got, wanted)
        else:
            torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize(
    ("foreach", "ids"), [*((how, (1, 4, 1, 8, 1)) for how in (None, True, False)), (None, ())]
)
@pytest.mark.parametrize("order", ORDERS)
def test_the_dense_models_norm_and_gradients(
    order: float, foreach: bool | None, ids: tuple[int, ...]
) -> None:
    """Also of a table without rows."""
    ours, dense = pair(ids)
    got = clip_grad_norm_(ours.parameters(), 2.0, order, foreach=foreach)
    wanted = utils.clip_grad_norm_(dense.parameters(), 2.0, order, foreach=foreach)
    torch.testing.assert_close(got, wanted)
    check_same(ours, dense, to_the_bit=torch.equal(got, wanted))
    if order in (0.0, 1.0, float("inf"), float("-inf")):
        assert torch.equal(got, wanted)  # sums of integers


@pytest.mark.parametrize(
    ("ids", "order", "wanted"),
    [
        ((), float("inf"), "refused"),
        ((), -1.0, "refused"),
        ((1, 4), -1.0, "another"),
        ((1, 4), float("-inf"), "another"),
    ],
)
def test_sparse_gradients_of_which_torchs_function_is_wrong(
    ids: tuple[int, ...], order: float, wanted: str
) -> None:
    """Before PyTorch 2.14 it refuses all sparse gradients; later those without rows, and it takes
    no row for zero."""
    ours, theirs = nn.Embedding(9, 4, sparse=True), nn.Embedding(9, 4, sparse=True)
    for table in (ours, theirs):
        (
            table(torch.tensor(ids, dtype=torch.int64)) * torch.tensor([1.0, 2.0, 3.0, 4.0])
        ).sum().backward()
    dense = ours.weight.grad.to_dense()
    got = clip_grad_norm_(ours.parameters(), 2.0, order)
    assert torch.equal(got, torch.linalg.vector_norm(dense, order))
    if version_of(torch.__version__) < (2, 14):
        wanted = "refused"
    if wanted == "another":
        assert not torch.equal(utils.clip_grad_norm_(theirs.parameters(), 2.0, order), got)
        return
    with pytest.raises(RuntimeError):  # also NotImplementedError
        utils.clip_grad_norm_(theirs.parameters(), 2.0, order)


def test_rows_that_come_twice_are_added_first() -> None:
    ours, dense = pair()
    assert not ours.first.weight.grad.is_coalesced()
    twice = torch.linalg.vector_norm(ours.first.weight.grad._values())  # what must not be counted
    held = ours.first.weight.grad
    got = clip_grad_norm_([ours.first.weight], 0.5)
    assert torch.equal(got, torch.linalg.vector_norm(dense.first.weight.grad))
    assert not torch.equal(got, twice)
    assert ours.first.weight.grad is held
    assert held.is_coalesced()


def test_what_is_small_enough_or_dense_keeps_torchs_bits() -> None:
    (ours, dense), (_, other) = pair(), pair()
    clip_grad_norm_(ours.parameters(), 1e6)
    check_same(ours, dense)
    assert torch.equal(
        clip_grad_norm_(dense.parameters(), 1.0), utils.clip_grad_norm_(other.parameters(), 1.0)
    )
    check_same(dense, other)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    ours, dense = pair(dtype=dtype)
    got = clip_grad_norm_(ours.parameters(), 2.0)
    torch.testing.assert_close(got, utils.clip_grad_norm_(dense.parameters(), 2.0))
    assert got.dtype is dtype
    check_same(ours, dense, to_the_bit=False)


def test_parameters_as_torch_takes_them() -> None:
    ours, dense = pair()
    ours.dense.bias.grad = dense.dense.bias.grad = None
    assert torch.equal(
        clip_grad_norm_((p for p in ours.parameters()), 2.0, "inf"),  # type: ignore[arg-type]
        utils.clip_grad_norm_(dense.parameters(), 2.0, float("inf")),
    )
    assert ours.dense.bias.grad is None
    assert clip_grad_norm_([], 2.0).item() == 0
    used_up = ours.parameters()
    list(used_up)
    with pytest.warns(UserWarning, match="empty generator"):
        clip_grad_norm_(used_up, 2.0)


def test_a_norm_that_is_not_finite() -> None:
    ours, dense = pair()
    for model in (ours, dense):
        model.dense.bias.grad[0] = float("inf")
    before = [parameter.grad.to_dense().clone() for parameter in ours.parameters()]
    with pytest.raises(RuntimeError, match="non-finite"):
        clip_grad_norm_(ours.parameters(), 2.0, error_if_nonfinite=True)
    for parameter, old in zip(ours.parameters(), before, strict=True):
        assert torch.equal(parameter.grad.to_dense(), old)
    assert clip_grad_norm_(ours.parameters(), 2.0).isinf()
    utils.clip_grad_norm_(dense.parameters(), 2.0)
    for got, wanted in zip(ours.parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(got.grad.to_dense(), wanted.grad, equal_nan=True)


@pytest.mark.parametrize("overflow", [False, True])
def test_between_unscaling_and_the_step_of_a_scaler(overflow: bool) -> None:
    """The same steps are made and skipped, and the same weights come out."""
    weights = []
    for sparse in (True, False):
        model = Model(sparse)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for step in range(2):
            optimizer.zero_grad()
            scaler.scale(
                model((1, 4, 1, step)) * (1e38 if overflow and step == 0 else 1)
            ).backward()
            scaler.unscale_(optimizer)
            (clip_grad_norm_ if sparse else utils.clip_grad_norm_)(model.parameters(), 2.0)
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == (4.0 if overflow else 8.0)
        weights.append([parameter.detach() for parameter in model.parameters()])
    for mine, other in zip(*weights, strict=True):
        torch.testing.assert_close(mine, other)
        assert mine.isfinite().all()


def test_wrong_parameters_are_named() -> None:
    with pytest.raises(TypeError, match=r"parameters must be a torch\.Tensor or several, got 3"):
        clip_grad_norm_(3, 1.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"parameters\[1\] must be a torch\.Tensor, got 'w'"):
        clip_grad_norm_([nn.Parameter(torch.ones(1)), "w"], 1.0)  # type: ignore[list-item]
