# SPDX-License-Identifier: Apache-2.0
"""Every exception of the package survives pickle and copy, as a ProcessPoolExecutor needs."""

from __future__ import annotations

import ast
import copy
import importlib
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tdcoll
from tdcoll.base.errors import CollectiveTimeout
from tdcoll.distributed.work import BackendTimeout, as_backend_error
from tdcoll.testing import Blocked, DataRace, Deadlock, ExplorationFailed, Failure

PACKAGE = Path(tdcoll.__file__).parent


def exceptions() -> list[type[BaseException]]:
    """Return all exception classes that the package defines at the top of a module."""
    found = []
    for file in sorted(PACKAGE.rglob("*.py")):
        classes = [
            node for node in ast.parse(file.read_text()).body if isinstance(node, ast.ClassDef)
        ]
        bases = {node.name: [ast.unparse(base) for base in node.bases] for node in classes}
        names = [
            name
            for name, of in bases.items()
            if any(
                base.endswith(("Error", "Exception", "Timeout", "Failure", "Warning"))
                for base in of
            )
        ]
        if names:
            module = importlib.import_module(
                ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts)
            )
            found += [getattr(module, name) for name in names]
    return [kind for kind in found if issubclass(kind, BaseException)]


def a_wait(kind: type[CollectiveTimeout]) -> CollectiveTimeout:
    return kind(rank=1, peer=0, signal=7, epoch=3, expected=4, seen=2, timeout_s=2.5)


MADE_OF_MORE: dict[type[BaseException], Callable[[], BaseException]] = {
    Deadlock: lambda: Deadlock("no task can run", [Blocked("pe0 host", 0, "waits")]),
    ExplorationFailed: lambda: ExplorationFailed(
        Failure(3, ValueError("wrong"), "wrong in pe1", {"n_pes": 2})
    ),
    DataRace: lambda: DataRace("pe1.box[0:32]", ("one stores", "one loads"), ["a barrier"]),
}


def state(error: BaseException) -> dict[str, Any]:
    """Return an error's attributes in words."""
    return {
        name: [*map(str, value)] if name == "blocked" else repr(value)
        for name, value in vars(error).items()
    }


def test_there_are_exceptions_to_look_at() -> None:
    found = exceptions()
    assert {
        *MADE_OF_MORE,
        CollectiveTimeout,
        BackendTimeout,
        tdcoll.TdcollError,
        tdcoll.NotSymmetricError,
    } <= {*found}
    assert len(found) >= 13


@pytest.mark.parametrize("kind", exceptions(), ids=lambda kind: kind.__name__)
@pytest.mark.parametrize(
    "again",
    [lambda error: pickle.loads(pickle.dumps(error)), copy.copy, copy.deepcopy],
    ids=["pickle", "copy", "deepcopy"],
)
def test_a_round_trip(kind: type[BaseException], again: Callable[[Any], Any]) -> None:
    error: BaseException
    if issubclass(kind, CollectiveTimeout):
        error = a_wait(kind)
    else:
        error = MADE_OF_MORE[kind]() if kind in MADE_OF_MORE else kind("no room")
    error.of_the_users = 5  # type: ignore[attr-defined]
    back = again(error)
    assert type(back) is kind
    assert (str(back), len(back.args), state(back)) == (str(error), len(error.args), state(error))


def test_a_backend_error_has_all_of_what_it_was_made_of() -> None:
    error = a_wait(CollectiveTimeout)
    made: Any = as_backend_error(error)
    assert (type(made), str(made), vars(made), made.__cause__) == (
        BackendTimeout,
        str(error),
        vars(error),
        error,
    )
    vars(made)["rank"] = 5
    assert error.rank == 1
