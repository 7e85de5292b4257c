# SPDX-License-Identifier: Apache-2.0
"""How the fallback backend makes NCCL, as each PyTorch makes its backend "nccl". Nothing of NCCL
runs here."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from tdcoll.base.versions import version_of
from tdcoll.distributed import fallback

TIMEOUT = timedelta(seconds=5)
SOURCE = SimpleNamespace(backend="of the default group")


class Nccl:
    """Stands for ``ProcessGroupNCCL``; notes what it is made of."""

    class Options:
        def __init__(self) -> None:
            self.split_from: Any = None
            self.split_color = 0

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        self.made_of = (store, rank, size)
        self.options = options
        self.numbered = False

    def _set_sequence_number_for_group(self) -> None:
        self.numbered = True


@pytest.fixture(autouse=True)
def _no_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Nccl, raising=False)
    monkeypatch.setattr(c10d, "_DistributedBackendOptions", SimpleNamespace)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(c10d, "_get_default_group", lambda: "the default group")
    monkeypatch.setattr(
        fallback,
        "_split_source",
        lambda default: SOURCE if default == "the default group" else None,
    )
    monkeypatch.setattr(fallback, "device_of_this_rank", lambda: torch.device("cuda", 3))


def make(
    plain: Any = None,
    nccl_options: Any = None,
    split: bool = False,
    ranks: tuple[int, ...] = (0, 5),
    device=None,
) -> Any:
    return fallback._nccl(
        plain,
        dist.HashStore(),
        1,
        2,
        TIMEOUT,
        "child",
        list(ranks),
        nccl_options,
        split,
        print,
        device,
    )


@pytest.fixture
def before_2_14(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fallback, "_creator_of_nccl", lambda: None)


@pytest.fixture
def created(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What PyTorch's function for backend "nccl" was given."""
    seen: list[Any] = []

    def creator(asked: Any, options: Any) -> str:
        seen.append((asked, options))
        return "made"

    monkeypatch.setattr(fallback, "_creator_of_nccl", lambda: creator)
    return seen


@pytest.mark.usefixtures("before_2_14")
def test_pytorchs_class_before_2_14(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.13.0")
    made = make(split=True)
    assert made.made_of[1:] == (1, 2)
    assert (made.options._timeout, made.options.group_name) == (TIMEOUT, "child")
    assert made.options.global_ranks_in_group == [0, 5]
    assert made.options.split_from is SOURCE
    assert made.options.split_color == c10d._process_group_color([0, 5])
    assert made.numbered
    assert make(split=True, ranks=()).options.split_from is None, (
        "the default group has none to split"
    )
    assert make(split=False).options.split_from is None


@pytest.mark.usefixtures("before_2_14")
@pytest.mark.parametrize(
    ("version", "numbered"), [("2.13.1+cu130", True), ("2.14.0", False), ("2.15.0+cu132", False)]
)
def test_calls_are_numbered_by_us_only_where_pytorch_does_not(
    monkeypatch: pytest.MonkeyPatch, version: str, numbered: bool
) -> None:
    """From 2.14 on it would print, on each rank, that this is deprecated."""
    monkeypatch.setattr(torch, "__version__", version)
    assert make().numbered is numbered


@pytest.mark.parametrize("by_function", [False, True])
def test_a_parents_options_do_not_say_where_nccl_splits(
    by_function: bool, created: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch.distributed.split_group passes them, and the parent may itself have been split off
    another group."""
    nccl_options = SimpleNamespace(
        split_from="the default group's communicator", is_high_priority_stream=True
    )
    if not by_function:
        monkeypatch.setattr(fallback, "_creator_of_nccl", lambda: None)
    made = make(nccl_options=nccl_options)
    options = created[0][1] if by_function else made.options
    assert options.split_from is None
    assert options.is_high_priority_stream
    assert nccl_options.split_from is not None


def test_pytorchs_function_gets_what_pytorch_gives_it(created: list[Any]) -> None:
    plain = SimpleNamespace(bound_device_id=None)
    assert make(plain, split=True) == "made"
    ((asked, options),) = created
    assert (asked.group_rank, asked.group_size, asked.timeout, asked.group_id) == (
        1,
        2,
        TIMEOUT,
        "child",
    )
    assert (asked.global_ranks_in_group, asked.process_group, asked.split_from) == (
        [0, 5],
        plain,
        SOURCE,
    )
    assert isinstance(asked.store, dist.PrefixStore)
    assert options._timeout == TIMEOUT
    assert plain.bound_device_id is None, (
        "an implementation that connects when it is used needs none"
    )
    make(plain)
    assert not hasattr(created[1][0], "split_from")


@pytest.mark.parametrize(("device", "bound"), [(None, 3), (torch.device("cuda", 1), 1)])
def test_nccl2_connects_at_once_on_this_ranks_gpu(
    created: list[Any], monkeypatch: pytest.MonkeyPatch, device: torch.device | None, bound: int
) -> None:
    """By itself PyTorch would take the one that LOCAL_RANK names."""
    monkeypatch.setattr(
        c10d, "_create_nccl2_process_group", fallback._creator_of_nccl(), raising=False
    )
    plain = SimpleNamespace(bound_device_id=None)
    make(plain, device=device)
    assert plain.bound_device_id == torch.device("cuda", bound)
    assert created


def test_which_function_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of this PyTorch."""
    monkeypatch.undo()
    found = fallback._creator_of_nccl()
    version = version_of(torch.__version__)
    if version < (2, 14):
        assert found is None
    else:
        assert found.__name__ == (
            "_create_nccl_process_group" if version < (2, 15) else "_create_nccl2_process_group"
        )


@pytest.mark.parametrize("asks_for_the_name", [False, True])
def test_where_pytorch_splits(monkeypatch: pytest.MonkeyPatch, asks_for_the_name: bool) -> None:
    monkeypatch.undo()
    asked: list[tuple[Any, ...]] = []
    before = lambda pg: asked.append((pg,)) or SOURCE  # noqa: E731
    since_2_15 = lambda pg, requested_backend: asked.append((pg, requested_backend)) or SOURCE  # noqa: E731
    monkeypatch.setattr(c10d, "_get_split_source", since_2_15 if asks_for_the_name else before)
    bound = SimpleNamespace(bound_device_id=torch.device("cuda", 0))
    assert fallback._split_source(SimpleNamespace(bound_device_id=None)) is None
    assert asked == []
    assert fallback._split_source(bound) is SOURCE
    assert asked == [(bound, "tdcoll")[: 1 + asks_for_the_name]]


def test_this_pytorchs_split_source_has_one_of_these_forms() -> None:
    import inspect

    parameters = list(inspect.signature(c10d._get_split_source).parameters)
    assert parameters in (["pg"], ["pg", "requested_backend"])
