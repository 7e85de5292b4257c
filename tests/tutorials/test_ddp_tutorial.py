# SPDX-License-Identifier: Apache-2.0
"""The tutorial on sparse embeddings under DDP: it runs, its arithmetic is right, its checks fail when they should."""

from __future__ import annotations

import json
import logging
import shutil
from functools import reduce
from pathlib import Path
from types import ModuleType

import pytest
import torch
from changes import changed_text, load

from tdcoll.collectives.sparse_all_reduce import kernels_lists, kernels_nodes, kernels_reduce

DDP = Path(__file__).resolve().parents[2] / "tutorials" / "04-sparse-embedding-ddp.py"
SIZES = {"vocabulary": 100, "rows": 500, "dim": 64, "batch": 8, "before": 1, "after": 0, "steps": 3}
SMALL = tuple(word for name, size in SIZES.items() for word in (f"--{name}", str(size)))
CPU = torch.device("cpu")


def changed(folder: Path, *changes: tuple[str, str]) -> Path:
    """The tutorial with changes to its text, each of which must apply, beside the one that it imports."""
    shutil.copy(DDP.with_name("03-sparse-all-reduce.py"), folder)
    copy = folder / DDP.name
    copy.write_text(changed_text(DDP, *changes), encoding="utf-8")
    return copy


@pytest.fixture(scope="module")
def tutorial():
    return load(DDP)


@pytest.fixture(scope="module")
def options(tutorial):
    return tutorial.parse([*SMALL, "--rate", "0.3", "--memory-rate", "100"])


@pytest.fixture(scope="module")
def text(tutorial):
    return tutorial.sparse_tutorial.Text(tutorial.sparse_tutorial.read_text(), SIZES["vocabulary"])


# ---------------------------------------------------------------------- as a reader runs it


@pytest.mark.slow
def test_runs(launch, tmp_path):
    written = tmp_path / "found.json"
    done = launch("--simulate", "--nproc", "2", str(DDP), *SMALL, "--json", str(written))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split(":")[0] for line in lines if not line.startswith(" ")] == [
        "2 rank(s) on 1 node(s) (2)",
        "text",
        "model",
        "process group 0",
        "log",
        "log",
        "tdcoll, sparse",
        "gloo, dense",
        "gloo with sparse_hook",
        "losses",
        "all ranks",
        "moved",
        "json",
    ]
    assert "  calls so far: 3 sparse_all_reduce by tdcoll" in lines
    assert "  sparse_all_reduce: tdcoll; sum and mean, context of 256 rows of 256 bytes per rank" in lines
    steps = [line.split() for line in lines if line.startswith("       ") and line.split()[0].isdigit()]
    assert [step[0] for step in steps] == ["0", "1", "2"]
    assert all(step[i][:7] == step[1][:7] for step in steps for i in (2, 3, 4))  # one process, and the runs
    assert " ms" not in done.stdout  # the simulator's times are not results

    found = json.loads(written.read_text(encoding="utf-8"))
    assert found["command"].startswith("bash launch.sh --nproc 2 --simulate tutorials/04-sparse-embedding-ddp.py --voc")
    assert found["provenance"]["simulated"] is True
    assert found["sizes"] == {"world": 2, **SIZES, "rate": 0.3, "memory_rate": 100.0}
    assert list(found["losses"]) == ["one process, fp64", "tdcoll, sparse", "gloo, dense", "gloo with sparse_hook"]
    assert all(len(losses) == 3 for losses in found["losses"].values())
    moved = found["bytes_per_rank_and_step"]
    assert moved["algorithm"] == "owner"
    assert 0 < moved["table, sparse"] < moved["table, dense"] == 500 * 256
    assert "step_ms" not in found
    assert "hidden" not in found


@pytest.mark.slow
def test_run_that_loses_one_ranks_rows_fails(launch, tmp_path):
    lost = "model.memory.weight.register_hook(lambda gradient: gradient * (dist.get_rank() != 0))"
    whole = "        self.model = distribute(model, group)\n"
    path = changed(tmp_path, (whole, f"{whole}        {lost}\n"))
    done = launch("--simulate", "--nproc", "2", str(path), *SMALL)
    assert done.returncode != 0
    assert "AssertionError: tdcoll, sparse: in step 1 the loss is" in done.stderr
    assert "all ranks:" not in done.stdout


@pytest.mark.gpu
def test_runs_on_gpus(launch, tmp_path):
    written = tmp_path / "found.json"
    done = launch(str(DDP), "--rows", "200000", "--json", str(written), timeout=280)
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    found = json.loads(written.read_text(encoding="utf-8"))
    assert len(found["step_ms"]) == 3
    assert all(0 <= share <= 1 for share in found["hidden"]["share"])


# ---------------------------------------------------------------------- model and batches


def test_hashed_is_a_polynomial_of_the_last_words(tutorial):
    context = torch.tensor([[7, 3, 0, 5], [1, 3, 0, 5], [7, 3, 0, 6]])

    def expected(words):
        number = len(words)
        for word in words:
            number = (number * 1_000_003 + word + 1) % (2**31 - 1)
        return number % 1000

    found = tutorial.hashed(context, 1000)
    assert found.tolist() == [[expected(words[-order:]) for order in (2, 3, 4)] for words in context.tolist()]
    assert found[0, :2].tolist() == found[1, :2].tolist()  # the last 3 words are the same
    assert found[0, 2] != found[1, 2]


def test_sequences_share_rows_as_seldom_as_a_hash_allows(tutorial, text):
    context, _ = tutorial.draw(text, 0, 3000)
    different, rows = len(torch.unique(context, dim=0)), 100_000
    used = len(torch.unique(tutorial.hashed(context, rows)[:, 2]))
    assert different > 2000
    assert used == pytest.approx(rows * (1 - (1 - 1 / rows) ** different), rel=0.02)


def test_targets_follow_their_contexts(tutorial, text):
    context, target = tutorial.draw(text, 5, 200)
    assert all(torch.equal(a, b) for a, b in zip(tutorial.draw(text, 5, 200), (context, target), strict=True))
    assert not torch.equal(tutorial.draw(text, 6, 200)[1], target)
    ids = text.ids.tolist()
    near = {(*ids[i - 4 : i], ids[i]) for i in range(4, len(ids))}
    assert {(*before, after) for before, after in zip(context.tolist(), target.tolist(), strict=True)} <= near


def test_models_differ_in_the_memorys_gradient_alone(tutorial, options, text):
    context, target = tutorial.draw(text, 0, 20)
    gradients = []
    for sparse in (True, False):
        model = tutorial.LanguageModel(options, CPU, sparse=sparse)
        tutorial.train_step(model, tutorial.make_optimizer(model, options), context, target)
        assert (model.memory.weight.grad.layout == torch.sparse_coo) == sparse
        gradients.append({name: p.grad.to_dense() for name, p in model.named_parameters()})
    assert next(iter(gradients[0])) == "words.weight"
    names = [name.split(".")[0] for name in gradients[0]]
    assert list(dict.fromkeys(names)) == ["words", "before", "memory", "out"]  # DDP reduces them from the last on
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], rtol=1e-5, atol=1e-8)


def test_default_training_learns(tutorial):
    options = tutorial.parse([])
    for name, size in tutorial.SIMULATED.items():
        setattr(options, name, size)
    text = tutorial.sparse_tutorial.Text(tutorial.sparse_tutorial.read_text(), options.vocabulary)
    model = tutorial.LanguageModel(options, CPU, sparse=True)
    batches = [tutorial.draw(text, step, 4 * options.batch) for step in range(options.steps)]
    losses = tutorial.train(model, tutorial.make_optimizer(model, options), batches)
    assert losses.dtype == torch.float64
    assert losses[-3:].mean() < 0.95 * losses[0]


# ---------------------------------------------------------------------- the comparison


def total(parts: list[torch.Tensor]) -> torch.Tensor:
    """Sum of gradients that are all sparse or all dense."""
    return reduce(torch.add, parts)


def train_in_shares(tutorial: ModuleType, options, batches, world: int, combine=None) -> tuple[list[float], object]:
    """What DDP does, in this process: mean of the shares' gradients, one step. Losses and model.

    ``combine(step, name, parts)`` makes another gradient of the shares'.
    """
    model = tutorial.LanguageModel(options, CPU, sparse=True)
    optimizer = tutorial.make_optimizer(model, options)
    still = torch.optim.SGD(model.parameters(), lr=0.0)
    losses = []
    for step, batch in enumerate(batches):
        parts: dict[str, list[torch.Tensor]] = {name: [] for name, _ in model.named_parameters()}
        of_step = []
        for share in zip(*(part.chunk(world) for part in batch), strict=True):
            of_step.append(float(tutorial.train_step(model, still, *share)))
            for name, parameter in model.named_parameters():
                parts[name].append(parameter.grad)
        for name, parameter in model.named_parameters():
            given = combine and combine(step, name, parts[name])
            parameter.grad = total([part / world for part in parts[name]]) if given is None else given
        optimizer.step()
        losses.append(sum(of_step) / world)
    return losses, model


@pytest.fixture(scope="module")
def batches(tutorial, options, text):
    return [tutorial.draw(text, step, 24) for step in range(options.steps)]


@pytest.fixture(scope="module")
def yardstick(tutorial, options, batches):
    return tutorial.Yardstick(options, CPU, batches)


@pytest.mark.parametrize("world", [1, 3])
def test_shares_agree_with_one_process(tutorial, options, batches, yardstick, world):
    losses, model = train_in_shares(tutorial, options, batches, world)
    off, memory, others = yardstick.check("case", losses, model)
    assert off < yardstick.loss_allowed < 1e-5
    assert 0 < memory <= yardstick.weights_allowed[0] < 1e-5
    assert 0 < others <= yardstick.weights_allowed[1] < 1e-4


def summed(step, name, parts):
    return total(parts) if name == "memory.weight" else None


def one_ranks_is_lost(step, name, parts):
    return total(parts[1:]) / len(parts) if name == "memory.weight" else None


def one_row_is_lost_in_the_last_step(step, name, parts):
    if name != "memory.weight" or step != SIZES["steps"] - 1:
        return None
    mean = (total(parts) / len(parts)).coalesce()
    return torch.sparse_coo_tensor(mean.indices()[:, 1:], mean.values()[1:], mean.shape, check_invariants=True)


def a_dense_layer_is_not_reduced(step, name, parts):
    return parts[0] if name == "before.0.inner.1.weight" else None


def not_a_number(step, name, parts):
    return parts[0] * float("nan") if name == "before.0.inner.1.weight" and step == 1 else None


@pytest.mark.parametrize(
    ("combine", "complaint"),
    [
        (summed, "case: in step 1 the loss is"),
        (one_ranks_is_lost, "case: in step 1 the loss is"),
        (one_row_is_lost_in_the_last_step, r"case: weights \(memory\) differ by"),
        (a_dense_layer_is_not_reduced, "case: in step 1 the loss is"),
        (not_a_number, "case: in step 2 the loss is nan"),
    ],
)
def test_wrong_gradients_are_caught(tutorial, options, batches, yardstick, combine, complaint):
    losses, model = train_in_shares(tutorial, options, batches, 3, combine)
    with pytest.raises(AssertionError, match=complaint):
        yardstick.check("case", losses, model)


def test_weights_that_are_not_numbers_are_caught(tutorial, options, batches, yardstick):
    losses, model = train_in_shares(tutorial, options, batches, 1)
    with torch.no_grad():
        model.out[1].bias[3] = float("nan")
    with pytest.raises(AssertionError, match=r"weights \(others\) differ by nan"):
        yardstick.check("case", losses, model)


def test_ranks_that_differ_are_caught(tutorial, monkeypatch):
    memory = torch.zeros(50, 4)
    memory[[3, 17]] = 1.0
    monkeypatch.setattr(tutorial, "gather", lambda own: torch.stack([own, own, own]))
    assert tutorial.check_same_everywhere("case", memory) == 2
    digests = []
    for row, value in ((17, 1.0), (17, 1.0 + 2**-23), (18, 1.0)):  # as it is, another bit, another row
        other = torch.zeros(50, 4)
        other[[3, row]] = 1.0
        other[row, 2] = value
        monkeypatch.setattr(tutorial, "gather", lambda own: digests.append(own) or torch.stack([own, own]))
        tutorial.check_same_everywhere("case", other)
    monkeypatch.setattr(tutorial, "gather", lambda own: torch.stack([own, *digests]))
    with pytest.raises(AssertionError, match=r"case: rank\(s\) \[2, 3\] have other bits than rank 0"):
        tutorial.check_same_everywhere("case", memory)


# ---------------------------------------------------------------------- bytes, times, the trace


def test_bytes_moved_are_what_messages_count(tutorial):
    shares = [torch.tensor([[4, 1], [4, 9]]), torch.tensor([[2, 1], [1, 1]]), torch.tensor([[5, 5], [5, 5]])]
    sent = [sum(8 * 4 + len(set(share.flatten().tolist())) * (48 + 8) for _ in range(2)) for share in shares]
    assert tutorial.table_bytes_moved("gather", shares, 48) == pytest.approx(sum(sent) / 3)
    # By "owner": row 1 has two ranks, and 2, 4, 5 and 9 one each.
    rows, ids = 1 + 5 * 2, sum(8 * (4 + n) * 2 for n in (3, 2, 1))
    assert tutorial.table_bytes_moved("owner", shares, 48) == pytest.approx((48 * rows + ids) / 3)
    with pytest.raises(AssertionError, match="another algorithm than owner or gather: dense"):
        tutorial.table_bytes_moved("dense", shares, 48)


def test_log_knows_the_algorithm(tutorial):
    logger = logging.getLogger("tdcoll")
    level = logger.level
    log = tutorial.Log()
    try:
        assert logger.level == logging.INFO
        logger.info("%s: algorithm %s for %d rows of all ranks, %d of them different, on x", "sum", "gather", 3, 2)
        logger.info("backend tdcoll: sparse_all_reduce of group 0 is served by tdcoll")
        assert log.algorithm() == "gather"
        logger.info("%s: algorithm %s for %d rows of all ranks, %d of them different, on x", "sum", "owner", 3, 2)
        assert log.algorithm() == "owner"
    finally:
        logger.removeHandler(log)
        logger.setLevel(level)


class Clock:
    """In place of a CUDA event: the n-th one of a test is recorded at n * n milliseconds."""

    recorded = 0

    def __init__(self, *, enable_timing):
        assert enable_timing
        self.at = None

    def record(self):
        Clock.recorded += 1
        self.at = Clock.recorded**2

    def elapsed_time(self, end):
        return float(end.at - self.at)


@pytest.fixture
def without_gpu(tutorial, monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Clock)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(tutorial.dist, "barrier", lambda: None)
    monkeypatch.setattr(Clock, "recorded", 0)


def test_step_times_leave_the_warm_up_out(tutorial, options, batches, without_gpu):
    model = tutorial.LanguageModel(options, CPU, sparse=True)
    times = tutorial.step_times(model, tutorial.make_optimizer(model, options), batches, 1)
    assert times == [9.0 - 4.0, 16.0 - 9.0]


def test_trace_has_the_steps_after_the_first_two(tutorial, options, batches, tmp_path, without_gpu):
    model = tutorial.LanguageModel(options, CPU, sparse=True)
    path = tmp_path / "trace.json"
    events = tutorial.trace_steps(model, tutorial.make_optimizer(model, options), [*batches, *batches], path)
    steps = {e["name"] for e in events if e.get("name", "").startswith("ProfilerStep#")}
    assert steps == {f"ProfilerStep#{step}" for step in range(2, 2 * len(batches))}
    assert sum(e.get("name") == "aten::embedding" for e in events) == 2 * len(steps)  # of words and memory
    with pytest.raises(AssertionError, match="no kernels of the sparse all-reduce"):
        tutorial.hidden_us(events)  # for want of a GPU


def test_slowest_median(tutorial):
    assert tutorial.slowest_median([[1.0, 9.0, 2.0], [3.0, 2.5, 8.0]]) == 3.0


def event(name: str, stream: int, begin: float, end: float, cat: str = "kernel") -> dict:
    return {"ph": "X", "cat": cat, "name": name, "ts": begin, "dur": end - begin, "args": {"stream": stream}}


def test_hidden_is_the_overlap_with_computation(tutorial):
    assert tutorial.merged([(5, 9), (0, 2), (1, 3), (3, 4), (6, 7)]) == [(0, 4), (5, 9)]
    events = [
        {"ph": "M", "name": "process_name", "args": {"name": "python"}},
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 500},
        event("sort", 20, 10, 14),  # of the sum's stream, though not a kernel of tdcoll
        event("write_list", 20, 14, 20),
        event("Memcpy DtoH", 20, 22, 24, cat="gpu_memcpy"),
        event("reduce", 20, 30, 50),
        event("gemm", 7, 0, 16),
        event("gemm", 7, 23, 35),
        event("gemm", 9, 34, 40),  # overlaps the one before: counts once
        event("Memset", 7, 40, 45, cat="gpu_memset"),  # not a kernel
        event("ncclDevKernel_AllReduce_Sum_f32", 21, 0, 60),  # not computation
    ]
    assert tutorial.hidden_us(events) == (6 + 1 + 10, 4 + 6 + 2 + 20)
    assert tutorial.hidden_us([e for e in events if e["name"] != "gemm"])[0] == 0
    assert tutorial.hidden_us([*events, event("gemm", 7, 0, 60)]) == (32, 32)
    with pytest.raises(AssertionError, match="no kernels of the sparse all-reduce"):
        tutorial.hidden_us([e for e in events if e["name"] not in ("write_list", "reduce")])


def test_names_of_kernels_are_those_of_the_sparse_all_reduce(tutorial):
    kernels = vars(kernels_lists) | vars(kernels_reduce) | vars(kernels_nodes)
    assert all(kernels[name].__name__ == name for name in tutorial.SPARSE_KERNELS)


def test_command_line(tutorial):
    sizes = {"rows": 5, "memory_rate": 2.0}
    script = "tutorials/04-sparse-embedding-ddp.py --rows 5 --memory-rate 2.0"
    assert tutorial.command_line(sizes, 8, 8, False) == f"bash launch.sh --nproc 8 {script}"
    assert tutorial.command_line(sizes, 16, 8, False) == f"bash launch.sh --nproc 8 --nnodes 2 {script}"
    assert tutorial.command_line(sizes, 4, 4, True) == f"bash launch.sh --nproc 4 --simulate {script}"


@pytest.mark.parametrize("times", [{}, {"a": 1.0, "b": 3.0, "c": 2.0}], ids=["bytes", "times"])
def test_plot(tutorial, tmp_path, times):
    pytest.importorskip("matplotlib")
    losses = {name: [3.0, 2.0, 1.5] for name in ("exact", "a", "b", "c")}
    tutorial.plot(tmp_path / "losses.png", losses, {"a": 1e3, "b": 1e6}, times)
    assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("option", "value", "least"), [("--steps", "0", 1), ("--rows", "x", 1), ("--before", "-1", 0)])
def test_options_are_checked(tutorial, capsys, option, value, least):
    with pytest.raises(SystemExit):
        tutorial.parse([option, value])
    assert f"{option}: expected a whole number from {least}, got '{value}'" in capsys.readouterr().err
