# SPDX-License-Identifier: Apache-2.0
"""The tutorials on kernels: they run, their checks fail on wrong data, and every rule that they
teach is needed."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import pytest
import torch
from loading import TUTORIALS, load
from tiers import seeds, slow_tier

from tdcoll.testing import World, first_failure
from tdcoll.tools.measure import timing

helpers = load("helpers")
NOTIFY, ALL_GATHER, ALL_REDUCE, MATMUL, FSDP2 = (
    load("01-notify-and-wait"),
    load("02-all-gather"),
    load("05-all-reduce"),
    load("06-all-gather-matmul"),
    load("07-fsdp2-beside-matmuls"),
)
WITH_RULES = [NOTIFY, ALL_GATHER, ALL_REDUCE, MATMUL]


def name(value):
    return getattr(value, "__name__", None)


# ---------------------------------------------------------------------- as a reader runs them

GATHERED = ["all_gather_", "all_gather_into_tensor", "time"]
REDUCED = ["my all-reduce", "all_reduce_rms_norm", "decoding", "time"]
MULTIPLIED = ["my all-gather + matmul", "MLP", "time"]
TRAINED = ["plan", "bytes", "order", "losses", "time"]


@pytest.mark.parametrize(
    ("module", "ranks", "nodes", "told"),
    [
        slow_tier(NOTIFY, 2, 1, ["hello", "queue", "deadline"]),
        (
            ALL_GATHER,
            4,
            1,
            [
                "4 rank(s) on 1 node(s)",
                "my_all_gather",
                "2d",
                "all_gather ll",
                "all_gather 1d",
                *GATHERED,
            ],
        ),
        slow_tier(
            ALL_GATHER,
            4,
            2,
            [
                "4 rank(s) on 2 node(s) (2 + 2)",
                "my_all_gather",
                "all_gather 1d",
                "all_gather 2d",
                *GATHERED,
            ],
        ),
        slow_tier(ALL_REDUCE, 3, 2, ["3 rank(s) on 2 node(s) (2 + 1)", *REDUCED]),
        (MATMUL, 2, 1, ["2 rank(s) on 1 node(s)", *MULTIPLIED]),
        slow_tier(MATMUL, 4, 2, ["4 rank(s) on 2 node(s) (2 + 2)", *MULTIPLIED]),
        slow_tier(FSDP2, 3, 1, ["3 rank(s) on 1 node(s)", *TRAINED]),
    ],
    ids=name,
)
def test_runs(launch, module, ranks, nodes, told):
    done = launch(
        "--simulate", "--nproc", str(ranks), "--emulate-nodes", str(nodes), module.__file__
    )
    assert done.returncode == 0, done.stderr
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == told
    assert ("time: not measured, because the simulator's times mean nothing" in done.stdout) == (
        "time" in told
    )


@pytest.mark.slow
def test_a_rank_that_leaves_is_named_by_the_others(launch):
    patient = ("--timeout", "3", "--monitor-interval", "20")
    done = launch("--simulate", "--nproc", "2", *patient, NOTIFY.__file__, "--die", "1")
    assert done.returncode != 0
    assert "CollectiveTimeout: rank 0 waited 3 s for peer 1" in done.stderr
    assert "queue:" not in done.stdout


@pytest.mark.gpu
@pytest.mark.parametrize("path", sorted(TUTORIALS.glob("0*.py")), ids=lambda path: path.stem)
def test_runs_on_gpus(launch, path):
    done = launch(str(path), timeout=280)
    assert done.returncode == 0, done.stderr
    assert "time: not measured" not in done.stdout
    print(done.stdout)


# ---------------------------------------------------------------------- the rules that they teach


OPTIONS = [
    {"n_pes": 1},
    {"n_pes": 3},
    {"n_pes": 3, "ranks_per_node": 1},
    {"n_pes": 4, "resident": 1},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("module", WITH_RULES, ids=name)
@seeds(4, 10)
def test_kernels_are_right_in_any_order(module, options, seeds):
    if module is NOTIFY:
        options = {**options, "resident": None}  # both sides of the queue have to run at once
    assert first_failure(module.case(), seeds=seeds, **options) is None


@pytest.mark.parametrize(
    ("module", "rule"),
    [
        pytest.param(module, rule, id=f"{module.__name__}-{rule}")
        for module in WITH_RULES
        for rule in module.RULES
    ],
)
def test_every_rule_is_needed(module, rule, capsys):
    with pytest.raises(SystemExit) as ended:
        module.main(["--break", rule])
    assert ended.value.code == 0
    told = capsys.readouterr().out
    assert told.startswith(f"without {rule}: {module.RULES[rule][0]}\nchanged: ")
    seed = re.search(r"^caught with seed (\d+):\n  seed \1, weak", told, re.M)
    assert seed, told
    assert told.endswith(f"--break {rule} --seed {seed[1]}\n")
    assert ("Deadlock" in told) == (rule in ("at-least", "waiter-last", "senders-first"))
    assert re.search(r"(Deadlock|AssertionError|CollectiveTimeout): ", told), told


def test_a_seed_is_replayed_with_its_timeline(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        ALL_GATHER.main(["--break", "two-slots", "--seed", "0"])
    assert ended.value.code == 0
    assert "AssertionError: my_all_gather: 20 of 80 numbers are wrong" in capsys.readouterr().err
    assert json.loads((tmp_path / "two-slots-0.json").read_text())["traceEvents"]


def test_a_timeline_has_pieces_and_waits(tmp_path, monkeypatch, capsys):
    path = tmp_path / "tiles.json"
    MATMUL.main(["--timeline", str(path)])
    assert "3 calls on 3 ranks" in capsys.readouterr().out
    events = json.loads(path.read_text())["traceEvents"]
    begun = [event["name"] for event in events if event["ph"] == "b"]
    sent = [name for name in begun if re.match(r"put\+signal inbox\[.* -> pe\d", name)]
    assert len(sent) == 3 * 3 * 2 * 2, begun  # calls, ranks, peers, pieces
    waits = [event for event in events if re.match(r"wait .*signals", event["name"])]
    assert {event["pid"] for event in waits} == {0, 1, 2}
    monkeypatch.setattr(helpers, "INTERPRETED", False)
    with pytest.raises(SystemExit):
        MATMUL.main(["--timeline", str(path)])
    assert "--timeline: expected the simulator" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("seed", "told"), [([], "100 seeds pass"), (["--seed", "3"], "seed 3 passes")]
)
def test_a_rule_that_is_not_needed_is_an_error(seed, told, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rules, parser = {"idle": ("no kernel needs it", {})}, argparse.ArgumentParser()
    with pytest.raises(SystemExit, match=told):
        helpers.parse(
            parser, ["--break", "idle", *seed], rules, lambda changes: lambda world: None, n_pes=2
        )


@pytest.mark.parametrize("module", WITH_RULES, ids=name)
def test_help_and_text_list_the_rules(module, capsys):
    text = Path(module.__file__).read_text(encoding="utf-8")
    assert re.findall(r"^# \d\. \*\*([\w-]+): ", text, re.M) == list(module.RULES)
    with pytest.raises(SystemExit):
        module.main(["--help"])
    listed = capsys.readouterr().out.split("\nrules:\n")[1].splitlines()
    assert [line.split(maxsplit=1) for line in listed] == [
        [rule, why] for rule, (why, _) in module.RULES.items()
    ]


@pytest.mark.parametrize(
    ("given", "gpus", "complaint"),
    [
        (["--break", "other"], False, "argument --break: invalid choice: 'other' (choose from "),
        (["--seed", "1"], False, "--seed: expected --break RULE with it"),
        (
            ["--break", "epoch"],
            True,
            "--break: expected the simulator, but TRITON_INTERPRET isn't 1; start",
        ),
        (["--plot", "x.png"], True, "--plot: matplotlib is not installed"),
    ],
    ids=lambda value: None if isinstance(value, str) else str(value),
)
def test_wrong_options_are_errors(given, gpus, complaint, monkeypatch, capsys):
    monkeypatch.setattr(helpers, "INTERPRETED", not gpus)
    monkeypatch.setattr(helpers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as ended:
        ALL_GATHER.main(given)
    assert ended.value.code == 2
    assert f"error: {complaint}" in capsys.readouterr().err


def test_only_one_rank_of_a_job_breaks_rules(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit) as ended:
        NOTIFY.main(["--break", "credits"])
    assert (ended.value.code, capsys.readouterr().out) == (0, "")


# ---------------------------------------------------------------------- checks that can fail


def test_check_of_the_queue_fails_on_wrong_data():
    received = 3 * 1000000 + torch.arange(NOTIFY.ITEMS)[:, None] * 1000 + torch.arange(NOTIFY.WORDS)
    NOTIFY.check_received(received, 3)
    with pytest.raises(AssertionError, match="from rank 2"):
        NOTIFY.check_received(received, 2)
    received[5, 7] += 1
    with pytest.raises(AssertionError, match="1 wrong words from rank 3; item 5, word 7"):
        NOTIFY.check_received(received, 3)


def test_checks_of_the_collectives_fail_on_wrong_data():
    right = torch.cat([ALL_GATHER.make(rank, 1, 10, "cpu") for rank in range(3)])
    ALL_GATHER.check("right", right.view(3, 10), right)
    wrong = torch.cat([right[10:20], right[:10], right[20:]])
    with pytest.raises(AssertionError, match="swapped: 20 of 30 numbers are wrong; number 0"):
        ALL_GATHER.check("swapped", wrong, right)
    total = ALL_REDUCE.reference(0, 10, 3, "cpu")
    ALL_REDUCE.check("right", total.clone(), total)
    other = total.clone()
    other.view(torch.int32)[4] ^= 1
    with pytest.raises(AssertionError, match="a bit: 1 of 10 numbers are wrong"):
        ALL_REDUCE.check("a bit", other, total)


def test_checks_of_the_matmul_fail_on_wrong_data(monkeypatch):
    sizes = ((32, 16, 16), (16, 16, 16), 3, 1, 2)
    World(2).run(lambda pe: MATMUL.run_mine(*sizes, 2, pe, "cpu"))
    unfused = MATMUL.unfused

    def of_other_rows(every, *rest):
        return unfused(every.roll(1, 0), *rest)

    monkeypatch.setattr(MATMUL, "unfused", of_other_rows)
    with pytest.raises(AssertionError, match=r"call 0: 10\d\d of 1024 numbers are wrong"):
        World(2).run(lambda pe: MATMUL.run_mine(*sizes, 2, pe, "cpu"))


def test_predictions_of_the_matmul():
    """The numbers of the text, and that a slow link is the longer part."""
    found = MATMUL.predicted_us(2048, 8192, 3584, 2)
    assert [round(us) for us in found.values()] == [396, 302]
    few_columns = MATMUL.predicted_us(2048, 8192, 256, 8)
    assert few_columns["predicted, one kernel"] > 7 * 2048 * 8192 * 2 / 390e3


# ---------------------------------------------------------------------- times


def test_times_have_a_lower_bound_and_are_drawn(monkeypatch, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(timing, "graph_time_us", lambda call, *, calls: call() * calls[0])

    def host(pe):
        sent = {1024: (0, 0.5), 4096: (3_900_000, 1.0)}
        rows = {
            nbytes: helpers.times_us(sends, {"mine": lambda us=us: us})
            for nbytes, (sends, us) in sent.items()
        }
        helpers.show_times("gather", rows, tmp_path / "times.png")

    World(2).run(host)
    assert capsys.readouterr().out.splitlines() == [
        "gather, µs per call, lower is better:",
        "     bytes  lower bound (H200)      mine",
        "      1024                 1.8      10.0",
        "      4096                10.8      20.0",
    ]
    assert (tmp_path / "times.png").read_bytes().startswith(b"\x89PNG")


# ---------------------------------------------------------------------- FSDP2


def test_the_bytes_and_times_of_a_step():
    """Of two weights, of which the second has rows that three ranks don't divide."""
    weights = [torch.zeros(6, 5), torch.zeros(4, 8, dtype=torch.bfloat16)]
    once = 2 * (2 * 5 * 4 + 2 * 8 * 2)
    assert FSDP2.sent_bytes(weights, 3) == (2 * once, once)
    assert FSDP2.sent_bytes(weights, 1) == (0, 0)
    weights = [torch.zeros(1 << 10, 1 << 10, dtype=torch.bfloat16)]
    link, compute = FSDP2.predicted_ms(weights, 1100, 2)
    assert link == pytest.approx(compute, rel=0.02)  # as the text says


def test_losses_that_differ_are_named():
    losses = torch.tensor([1.0, 2.0])
    FSDP2.check_equal("one and other", losses, losses.clone())
    with pytest.raises(AssertionError, match=r"^one and other: losses differ by 0\.5: "):
        FSDP2.check_equal("one and other", losses, torch.tensor([1.0, 2.5]))


def test_the_times_of_a_step_are_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    plot = tmp_path / "step.png"
    FSDP2.draw({"compute alone": 2.0, "NCCL": 3.0, "symmetric": 1.9}, (1.0, 2.0), plot)
    assert plot.stat().st_size > 1000
