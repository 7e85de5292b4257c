# SPDX-License-Identifier: Apache-2.0
"""``tdcoll.explain`` is what the call then logs and launches, whatever it is."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tiers import slow_tier

import tdcoll
from tdcoll import runtime
from tdcoll.base.limits import COLLECTIVES
from tdcoll.calls.call_launches import CallLaunches
from tdcoll.calls.collective import spec_of
from tdcoll.calls.explain import Explanation
from tdcoll.fused import all_reduce_rms_norm
from tdcoll.testing import World

NORM = "all_reduce_rms_norm"

GROUPS: list[tuple[int, int | None, list[int] | None]] = [
    (1, None, None),
    (2, None, None),
    (3, None, [2, 0]),
    (4, 2, None),
    (3, 2, None),
]
"""Ranks of the job, ranks of a node, and the group."""

CONTEXTS: list[dict[str, Any] | None] = [
    None,
    {"max_bytes_per_rank": 1024, "lamport_bytes": 0, "flagged_bytes": 0},
    {"max_bytes_per_rank": 4096, "lamport_bytes": 512},
    {"max_bytes_per_rank": 1 << 16, "max_blocks": 24},
]
"""Arguments of the caller's context; None: tdcoll's own."""


class Handler(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno == logging.DEBUG:
            self.lines.append(record.getMessage())


@pytest.fixture(scope="module")
def log() -> Any:
    logger = logging.getLogger("tdcoll")
    handler = Handler()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(level)


@st.composite
def calls(draw: Any) -> dict[str, Any]:
    """Return the arguments of a call and of its explanation."""
    name = draw(st.sampled_from([*COLLECTIVES, NORM]))
    case = {
        "name": name,
        "group": draw(st.sampled_from(GROUPS)),
        "context": draw(st.sampled_from(CONTEXTS)),
        "count": draw(st.sampled_from([0, 1, 3, 64, 700, 2500])),
        "landing": "",
        "algorithm": "auto",
        "dtype": draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int64])),
    }
    if name == NORM:
        case["dtype"] = torch.float32
        case["algorithm"] = draw(st.sampled_from(["auto", "one_shot", "two_shot", "composed"]))
        return case
    spec = spec_of(name)
    landings = [""]
    if not (spec.reduces and spec.scatters):
        landings.append("symmetric")
    if spec.in_place:
        landings.append("in place")
    case["landing"] = draw(st.sampled_from(landings))
    case["algorithm"] = draw(st.sampled_from(["auto", "auto", *spec.names]))
    return case


def explained(case: dict[str, Any], tensor: torch.Tensor, **where: Any) -> Explanation:
    return tdcoll.explain(
        case["name"],
        tensor,
        algorithm=case["algorithm"],
        in_place=case["landing"] == "in place",
        symmetric=case["landing"] == "symmetric",
        **where,
    )


def tensor_of(case: dict[str, Any], world: int, ranks: list[int]) -> torch.Tensor:
    """Return the tensor of a call."""
    count = case["count"]
    if case["name"] == NORM:
        return torch.ones(count, 16)
    spec = spec_of(case["name"])
    if case["landing"] == "in place":
        return tdcoll.zeros(world * count, case["dtype"], group=ranks)
    return torch.ones(count * world if spec.scatters else count, dtype=case["dtype"])


def make(
    case: dict[str, Any], tensor: torch.Tensor, world: int, ranks: list[int], **where: Any
) -> None:
    """Make the call."""
    algorithm = case["algorithm"]
    if case["name"] == NORM:
        all_reduce_rms_norm(tensor, tensor.clone(), torch.ones(16), algorithm=algorithm, **where)
        return
    function = getattr(tdcoll, case["name"])
    if case["landing"] == "in place":
        getattr(tdcoll, f"{case['name']}_")(tensor, algorithm=algorithm, **where)
    elif case["landing"] == "symmetric":
        (shape, *_) = spec_of(case["name"]).results(tensor.shape, world)
        out = tdcoll.zeros(shape, tensor.dtype, group=ranks)
        function(tensor, out=out, symmetric=True, algorithm=algorithm, **where)
    else:
        function(tensor, algorithm=algorithm, **where)


@pytest.mark.parametrize("examples", [4, slow_tier(100)])
def test_an_explanation_is_what_the_call_logs_and_launches(log: Handler, examples: int) -> None:
    # Cases are small already, and it takes minutes to shrink them.
    @settings(
        max_examples=examples, deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate)
    )
    @given(case=calls())
    def check(case: dict[str, Any]) -> None:
        compare(log, case)

    check()


def compare(log: Handler, case: dict[str, Any]) -> None:
    """Make a call, and compare it with its explanation."""
    n_pes, ranks_per_node, group = case["group"]
    ranks = list(range(n_pes)) if group is None else group

    def host(pe: int) -> None:
        if pe not in ranks:
            return
        world = len(ranks)
        options = case["context"]
        where: dict[str, Any] = {"group": group}
        if options is not None:
            where = {"ctx": tdcoll.CollectiveContext(ranks, **options)}
        tensor = tensor_of(case, world, ranks)
        said = explained(case, tensor, **where)
        if pe == ranks[0]:
            log.lines.clear()
        if said.algorithm is None:
            with pytest.raises((ValueError, tdcoll.ContextError)) as refused:
                make(case, tensor, world, ranks, **where)
            assert str(refused.value) == said.why
            return
        make(case, tensor, world, ranks, **where)
        if pe == ranks[0]:
            assert said.line in log.lines
        context = where.get("ctx") or runtime.current().contexts[case["name"], tuple(ranks)].context
        launches = [made for made in context.cache.values() if isinstance(made, CallLaunches)]
        if case["name"] != NORM:
            (made,) = launches
            plan = made.plan
            assert (plan.algorithm, plan.chunks, plan.chunk) == (
                said.algorithm,
                said.chunks,
                said.chunk_bytes,
            )
            assert (plan.blocks, plan.num_warps) == (said.blocks, said.warps)
            assert made.record.epochs + made.record.lamport == said.epochs
        assert explained(case, tensor, ctx=context).line == said.line

    World(n_pes, ranks_per_node=ranks_per_node).run(host)
