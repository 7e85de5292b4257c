# SPDX-License-Identifier: Apache-2.0
"""The tutorials on kernels: they run, their checks fail on wrong data, and every rule that they teach is needed."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from loading import TUTORIALS, load
from tiers import seeds

import tdcoll
from tdcoll.bench import timing
from tdcoll.testing import World, explore

helpers = load("helpers")
NOTIFY, ALL_GATHER, ALL_REDUCE = load("01-notify-and-wait"), load("02-all-gather"), load("05-all-reduce")
WITH_RULES = [NOTIFY, ALL_GATHER, ALL_REDUCE]


# ---------------------------------------------------------------------- as a reader runs them


def test_notify_and_wait_runs(launch):
    done = launch("--simulate", "--nproc", "2", NOTIFY.__file__)
    assert done.returncode == 0, done.stderr
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == ["hello", "queue", "deadline"]


def test_all_gather_runs_on_two_emulated_nodes(launch):
    done = launch("--simulate", "--nproc", "4", "--emulate-nodes", "2", ALL_GATHER.__file__)
    assert done.returncode == 0, done.stderr
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == [
        "4 rank(s) on 2 node(s) (2 + 2)",
        "my_all_gather",
        "all_gather ll",
        "all_gather 1d",
        "all_gather 2d",
        "all_gather_in_place",
        "all_gather_into_tensor",
        "time",
    ]
    assert "time: not measured, because the simulator's times mean nothing" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [1, 2])
def test_all_reduce_runs(launch, nodes):
    """On three ranks, whose number divides nothing."""
    done = launch("--simulate", "--nproc", "3", "--emulate-nodes", str(nodes), ALL_REDUCE.__file__)
    assert done.returncode == 0, done.stderr
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == [
        f"3 rank(s) on {nodes} node(s) ({'3' if nodes == 1 else '2 + 1'})",
        "my all-reduce",
        "all_reduce_rms_norm",
        "decoding",
        "time",
    ]


@pytest.mark.slow
def test_a_rank_that_leaves_is_named_by_the_others(launch):
    patient = ("--timeout", "5", "--monitor-interval", "25")
    done = launch("--simulate", "--nproc", "2", *patient, NOTIFY.__file__, "--die", "1")
    assert done.returncode != 0
    assert "CollectiveTimeout: rank 0 waited 5 s for peer 1" in done.stderr
    assert "queue:" not in done.stdout


@pytest.mark.gpu
@pytest.mark.parametrize("path", sorted(TUTORIALS.glob("0*.py")), ids=lambda path: path.stem)
def test_runs_on_gpus(launch, path):
    done = launch(str(path), timeout=280)
    assert done.returncode == 0, done.stderr
    assert "time: not measured" not in done.stdout
    print(done.stdout)


def test_kernels_compile():
    """For GPUs that need not be here."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    driver = Path(__file__).with_name("compile_tutorials.py")
    done = subprocess.run([sys.executable, str(driver)], capture_output=True, text=True, env=environment, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout) == ["queue", "my_all_gather", "one_stage", "two_stages"]


# ---------------------------------------------------------------------- the rules that they teach


OPTIONS = [{"n_pes": 1}, {"n_pes": 3}, {"n_pes": 3, "ranks_per_node": 1}, {"n_pes": 4, "resident": 1}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("module", [ALL_GATHER, ALL_REDUCE], ids=lambda module: module.__name__)
@seeds(4, 20)
def test_collectives_are_right_in_any_order(module, options, seeds):
    explore(module.case(), seeds=seeds, **options)


@pytest.mark.parametrize("options", OPTIONS[:3], ids=str)  # both sides of the queue have to run at once
@seeds(4, 20)
def test_queue_is_right_in_any_order(options, seeds):
    explore(NOTIFY.case(), seeds=seeds, **options)


@pytest.mark.parametrize(
    ("module", "rule"),
    [pytest.param(module, rule, id=f"{module.__name__}-{rule}") for module in WITH_RULES for rule in module.RULES],
)
def test_every_rule_is_needed(module, rule, capsys):
    with pytest.raises(SystemExit) as ended:
        module.main(["--break", rule])
    assert ended.value.code == 0
    told = capsys.readouterr().out
    assert f"{rule}: {module.RULES[rule][0]}\nbroken by " in told
    seed = re.search(r"the first seed that fails is (\d+):\n  seed \1, weak", told)
    assert seed, told
    assert f"--break {rule} --seed {seed[1]}\n" in told
    assert ("Deadlock" in told) == (rule in ("at-least", "waiter-last"))


@pytest.mark.parametrize("module", WITH_RULES, ids=lambda module: module.__name__)
def test_rules_are_those_of_the_text(module):
    text = Path(module.__file__).read_text(encoding="utf-8")
    assert re.findall(r"^# \d\. \*\*([\w-]+): ", text, re.M) == list(module.RULES)


@pytest.mark.parametrize(
    ("given", "code"), [("list", 0), ("nothing", "--break: expected one of these rules, or list; got 'nothing'")]
)
def test_rules_are_listed(given, code, capsys):
    with pytest.raises(SystemExit) as ended:
        ALL_GATHER.main(["--break", given])
    assert ended.value.code == code
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["rules:", *ALL_GATHER.RULES]


def test_a_seed_is_replayed_with_its_timeline(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        ALL_GATHER.main(["--break", "two-slots", "--seed", "0"])
    assert ended.value.code == 0
    assert "AssertionError: my_all_gather: 20 of 80 numbers are wrong" in capsys.readouterr().err
    assert json.loads((tmp_path / "two-slots-0.json").read_text())["traceEvents"]


@pytest.mark.parametrize(("seed", "told"), [([], "100 seeds pass"), (["--seed", "3"], "seed 3 passes")])
def test_a_rule_that_is_not_needed_is_an_error(seed, told, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rules = {"idle": ("nothing needs it", {})}
    with pytest.raises(SystemExit, match=told):
        helpers.parse(
            argparse.ArgumentParser(), ["--break", "idle", *seed], rules, lambda changes: lambda world: None, n_pes=2
        )


def test_only_one_rank_of_a_job_breaks_rules(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit) as ended:
        NOTIFY.main(["--break", "credits"])
    assert (ended.value.code, capsys.readouterr().out) == (0, "")


def test_dead_neighbour_is_named():
    world = World(2, seed=3, weak=True)

    def host(pe):
        ring, monitor = NOTIFY.Queue(), tdcoll.WaitMonitor()
        ring.run(monitor, 0, 9)
        if pe == 1:
            world.kill(1)
        ring.run(monitor, 9, NOTIFY.ITEMS - 9)
        with pytest.raises(tdcoll.CollectiveTimeout) as caught:
            monitor.check()
        return caught.value

    error, dead = world.run(host)
    assert dead is None
    assert (error.rank, error.peer) == (0, 1)


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


# ---------------------------------------------------------------------- times


def test_times_have_a_lower_bound_and_are_drawn(monkeypatch, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(timing, "graph_time_us", lambda call, *, calls: call() * calls[0])
    rows = {1024: helpers.times_us(390_000, {"mine": lambda: 0.5}), 4096: helpers.times_us(0, {"mine": lambda: 1.0})}
    assert rows == {1024: {"lower bound": 1.9, "mine": 10.0}, 4096: {"lower bound": 0.9, "mine": 20.0}}
    World(2).run(lambda pe: helpers.show_times("gather", rows, tmp_path / "times.png"))
    assert capsys.readouterr().out.splitlines() == [
        "gather, µs per call, lower is better:",
        "     bytes  lower bound  mine",
        "      1024          1.9  10.0",
        "      4096          0.9  20.0",
    ]
    assert (tmp_path / "times.png").read_bytes().startswith(b"\x89PNG")


TIMED = """
import contextlib, sys
import torch
sys.path.insert(0, {folder!r})
from loading import load
from tdcoll.bench import timing

tutorial = load({name!r})
def run_twice(call, *, calls):
    assert calls == (20,)
    call(), call()
    return 2.5
timing.graph_time_us = run_twice
torch.cuda.Stream, torch.cuda.stream = object, lambda stream: contextlib.nullcontext()
tutorial.helpers.untimed = lambda: None
tutorial.main(["--plot", {plot!r}])
"""


@pytest.mark.slow
@pytest.mark.parametrize("module", [ALL_GATHER, ALL_REDUCE], ids=lambda module: module.__name__)
def test_timed_calls_are_checked_and_drawn(launch, module, tmp_path):
    """With a stand-in for the clock, since the simulator has none."""
    pytest.importorskip("matplotlib")
    script, plot = tmp_path / "timed.py", tmp_path / "times.png"
    names = {"folder": str(Path(__file__).parent), "name": Path(module.__file__).stem, "plot": str(plot)}
    script.write_text(TIMED.format(**names))
    done = launch("--simulate", "--nproc", "2", str(script), timeout=280)
    assert done.returncode == 0, done.stderr
    assert ", µs per call, lower is better:\n" in done.stdout
    assert " 2.5" in done.stdout
    assert plot.read_bytes().startswith(b"\x89PNG")
