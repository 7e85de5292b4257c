# SPDX-License-Identifier: Apache-2.0
"""PyTorch's own tests of torch.distributed, with "tdcoll" in the place of the backend that they were written for.

    TRITON_INTERPRET=1 python tests/distributed/pytorch_suite.py                     # on the simulator, against gloo
    source setenv.sh && python tests/distributed/pytorch_suite.py --baseline nccl    # on GPUs, one for each rank

Run by hand: it takes a quarter of an hour. It needs PyTorch's test package, which its wheels have, and `expecttest`
(`pip install expecttest`; with `--target FOLDER` and FOLDER in PYTHONPATH it stays out of the environment).

The cases are the methods of `DistributedTest`. Each runs twice, on as many processes as --ranks says: as PyTorch has
it, with the baseline's name in `init_process_group`, and with "tdcoll" there. With fewer than 8 processes PyTorch skips
those cases in which a group has some of the ranks. What passes with the former has to pass
with the latter, except for what :data:`CANNOT` lists with the reasons; anything else is a difference, and the exit
status is 1. A case that is listed and passes is a difference as well.

The processes live on from case to case, and so join again hundreds of times. They are ended and started anew after a
case that fails, because such a case may leave a rank in a collective.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import multiprocessing
import os
import re
import sys
import tempfile
import time
import traceback
import unittest
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

CANNOT = {
    "test_get_backend": "compares the backend's name with the baseline's",
    # rank_0_timeout calls the method of the group, which gloo handles, and the others call the function.
    "test_monitored_barrier_(?!gloo_rank_0_timeout$).*": "torch.distributed.monitored_barrier is for gloo alone",
}
"""What cannot pass, as patterns of whole names, and why."""

_START_S = 600.0
"""How long the processes may take to start; on a busy machine their imports take minutes."""

GRACE_S = 5.0
"""How long ranks have to end a case when one of them has failed."""


def reason(name: str) -> str | None:
    return next((why for pattern, why in CANNOT.items() if re.fullmatch(pattern, name)), None)


# ---------------------------------------------------------------------- the processes


def _cases() -> Any:
    """The class of all cases, and its module. Imported late: it reads the environment."""
    from torch.testing._internal.distributed import distributed_test

    class Cases(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
        pass

    return Cases, distributed_test


def names() -> list[str]:
    made, _ = _cases()
    return sorted(name for name in dir(made) if name.startswith("test_"))


@contextmanager
def _in_the_place_of(baseline: str, backend: str) -> Iterator[None]:
    """``init_process_group`` takes ``baseline`` for ``backend``."""
    import torch.distributed as dist

    original = dist.init_process_group

    def replaced(given: Any = None, *args: Any, **more: Any) -> Any:
        if "backend" in more:
            given = more.pop("backend")
        return original(backend if given == baseline else given, *args, **more)

    dist.init_process_group = dist.distributed_c10d.init_process_group = replaced
    try:
        yield
    finally:
        dist.init_process_group = dist.distributed_c10d.init_process_group = original


def _one(name: str, file: str, rank: int, baseline: str) -> tuple[str, str]:
    """Run a case as its own process would, see ``TestDistBackend._run``. What became of it, and why."""
    import torch.distributed as dist
    from torch.testing._internal.common_distributed import TEST_SKIPS
    from torch.testing._internal.common_utils import set_rng_seed

    made, module = _cases()
    module.INIT_METHOD = f"file://{file}-again"
    module.Barrier.barrier_id = 0
    skips = {skip.exit_code: skip.message for skip in TEST_SKIPS.values()}
    case = made(name)
    case.rank, case.file_name = rank, file
    try:
        timeout = timedelta(seconds=module.CUSTOM_PG_TIMEOUT.get(name, module.default_pg_timeout))
        world = int(os.environ["WORLD_SIZE"])
        dist.init_process_group(baseline, init_method=f"file://{file}", world_size=world, rank=rank, timeout=timeout)
        case._barrier(timeout=30)
        set_rng_seed()
        outcome = "passed", ""
        try:
            getattr(case, name)()
        except unittest.SkipTest as skipped:
            outcome = "skipped", str(skipped)
        except SystemExit as ended:
            if ended.code not in skips:
                raise
            outcome = "skipped", skips[ended.code]
        case._barrier(timeout=30)
        if dist.is_initialized():
            dist.destroy_process_group()
        return outcome
    except BaseException:
        return "failed", traceback.format_exc()


def _run_task(rank: int, baseline: str, backend: str, pipe: Any) -> None:
    """Run the cases that come through the pipe."""
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
    warnings.simplefilter("ignore")
    nowhere = os.open(os.devnull, os.O_WRONLY)  # what a case prints is of no use, and much
    for stream in (1, 2):
        os.dup2(nowhere, stream)
    import torch

    import tdcoll.distributed  # noqa: F401

    torch.set_num_threads(1)
    if torch.cuda.is_available():
        torch.cuda.set_device(rank)
    _cases()
    pipe.send("ready")
    with _in_the_place_of(baseline, backend):
        while True:
            name, file = pipe.recv()
            pipe.send(_one(name, file, rank, baseline))


class Processes:
    """The processes of one backend."""

    def __init__(self, ranks: int, baseline: str, backend: str, timeout_s: float) -> None:
        self._ranks, self._baseline, self._backend, self._timeout_s = ranks, baseline, backend, timeout_s
        self._started: list[tuple[Any, Any]] = []

    def end(self) -> None:
        for process, pipe in self._started:
            process.kill()
            process.join()
            pipe.close()
        self._started = []

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        for rank in range(self._ranks):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_run_task, args=(rank, self._baseline, self._backend, theirs), daemon=True, name=f"rank {rank}"
            )
            process.start()
            theirs.close()
            self._started.append((process, ours))
        for answer in self._answers(_START_S):
            if answer != "ready":
                raise RuntimeError(f"the processes did not start: {answer}")

    def _answers(self, timeout_s: float) -> list[Any]:
        """What each rank says; of one that does not, in time or any more, why not."""
        found: dict[int, Any] = {}
        deadline = time.monotonic() + timeout_s
        while len(found) < self._ranks:
            for rank, (process, pipe) in enumerate(self._started):
                if rank in found:
                    continue
                try:
                    if pipe.poll():
                        found[rank] = pipe.recv()
                    elif time.monotonic() > deadline:
                        found[rank] = "failed", "no answer in time"
                except (EOFError, OSError):
                    process.join(GRACE_S)
                    found[rank] = "failed", f"the process has ended with {process.exitcode}"
                if found.get(rank, ("passed",))[0] == "failed":
                    deadline = min(deadline, time.monotonic() + GRACE_S)
            time.sleep(0.002)
        return [found[rank] for rank in range(self._ranks)]

    def run(self, name: str, folder: Path, number: int) -> tuple[str, str, float]:
        """What became of a case, why, and the seconds it took."""
        if not self._started:
            self._start()
        for part in ("barrier", "test_dir"):
            for left in (folder / part).iterdir():
                left.unlink()
        begin = time.monotonic()
        for _, pipe in self._started:
            pipe.send((name, str(folder / "init_dir" / f"{self._backend}-{number}")))
        answers = self._answers(self._timeout_s)
        seconds = time.monotonic() - begin
        for wanted in ("failed", "skipped"):
            told = [f"rank {rank}: {text}" for rank, (what, text) in enumerate(answers) if what == wanted]
            if told:
                if wanted == "failed":
                    self.end()
                return wanted, "\n".join(told), seconds
        return "passed", "", seconds


# ---------------------------------------------------------------------- the comparison


def verdict(name: str, theirs: str, ours: str | None) -> str:
    if theirs != "passed":
        return ""
    expected = reason(name)
    if ours == "passed":
        return "same" if expected is None else "DIFFERENT: passes, and is listed as one that cannot"
    return f"cannot: {expected}" if expected is not None and ours == "failed" else "DIFFERENT"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-k", metavar="REGEX", default="", help="only cases whose names this is found in")
    parser.add_argument("--baseline", choices=("gloo", "nccl"), default="gloo")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--timeout", type=float, default=180.0, metavar="SECONDS", help="of one case")
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="print why cases were skipped, failed or cannot pass"
    )
    given = parser.parse_args()
    if importlib.util.find_spec("expecttest") is None:
        print("PyTorch's test package needs expecttest: pip install expecttest", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for part in ("barrier", "test_dir", "init_dir"):
            (folder / part).mkdir()
        os.environ |= {
            "BACKEND": given.baseline, "WORLD_SIZE": str(given.ranks), "TEMP_DIR": temporary,
            "INIT_METHOD": f"file://{folder}/init_dir/again", "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        chosen = [name for name in names() if re.search(given.k, name)]
        both = {
            backend: Processes(given.ranks, given.baseline, backend, given.timeout)
            for backend in (given.baseline, "tdcoll")
        }
        table: list[tuple[str, str, str, str]] = []
        said: dict[str, str] = {}
        try:
            for number, name in enumerate(chosen):
                theirs, why, seconds = both[given.baseline].run(name, folder, number)
                ours, took = None, ""
                if theirs == "passed":
                    ours, why, own_seconds = both["tdcoll"].run(name, folder, number)
                    took = f", tdcoll {ours} in {own_seconds:.1f} s"
                progress = f"{number + 1}/{len(chosen)} {name}: {given.baseline} {theirs} in {seconds:.1f} s{took}"
                print(progress, file=sys.stderr, flush=True)
                found = verdict(name, theirs, ours)
                if found.startswith("DIFFERENT"):
                    print(why, file=sys.stderr, flush=True)
                table.append((name, theirs, ours or "", found))
                if found.startswith("DIFFERENT") or (given.verbose and found != "same"):
                    said[name] = why
        finally:
            for processes in both.values():
                processes.end()
    width = max(len(name) for name, *_ in table) if table else 0
    print(f"{'case':{width}}  {given.baseline:8} {'tdcoll':8}")
    for name, theirs, ours, found in table:
        if found:
            print(f"{name:{width}}  {theirs:8} {ours:8} {found}")
    for name, why in said.items():
        print(f"\n--- {name}\n{why}")
    counts = {theirs: len(list(group)) for theirs, group in itertools.groupby(sorted(row[1] for row in table))}
    different = sum(row[3].startswith("DIFFERENT") for row in table)
    same, cannot = sum(row[3] == "same" for row in table), sum(row[3].startswith("cannot") for row in table)
    print(f"\n{given.baseline}, {given.ranks} ranks: {', '.join(f'{n} {what}' for what, n in counts.items())}")
    print(f"tdcoll: {same} of {counts.get('passed', 0)} pass as well, {cannot} cannot, {different} differ")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
