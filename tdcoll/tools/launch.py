# SPDX-License-Identifier: Apache-2.0
"""``tdcoll run``: start a job with torchrun, on GPUs or on the simulator.

It imports nothing but the standard library, because ``launch.sh`` runs this module in the first
Python that it finds.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from tdcoll.base import arguments
from tdcoll.tools.setenv import IN_CHECKOUT, ROOT, Job, prepare, say

_USAGE = "{program} [options] {{script.py | -m module{tests}}} [arguments...]"

_ABOUT = """\
Runs a Python program with one process per GPU of this host, started by torchrun. On a host without GPUs the processes
are PEs of tdcoll's simulator, and the program is the same. Options come before the program; everything after it is
the program's.
"""

_ABOUT_TESTS = """
Nothing has to be installed or activated, see setenv.sh.

  tests  pytest in this repository's root, without torchrun. On the simulator the tests are spread over the cores.
         Tests marked slow are the second tier: -m slow runs them."""

_STATUS = """\
Exit status: 0 if every process ended well, else 1 (of tests pytest's own); 2 for a wrong command line; 130 after
Ctrl-C."""

_FLAGS = {
    "-m": "the program is a module",
    "--simulate": "the simulator, even where there are GPUs",
    "--share-gpus": "processes may share GPUs, for tests of correctness, never for times: a GPU runs one process at a "
    "time, some 2 ms each, and torch.distributed has gloo for CUDA tensors, not NCCL",
    "--dry-run": "print what would be exported, and the command; run and install nothing",
}

_VALUES = {
    "--nproc": ("N", "processes on this host. Default: one per visible GPU, or 4 when simulating"),
    "--emulate-nodes": (
        "N",
        "the job behaves as if the processes of this host were spread over N hosts",
    ),
    "--nnodes": ("N", "hosts in the job. Start it on each, with the same --nnodes and --rdzv"),
    "--node-rank": ("R", "which of the hosts this is, from 0 to N - 1"),
    "--rdzv": (
        "HOST:PORT",
        "where the hosts meet: an address of the one with rank 0, and a free port on it. With a loopback address, "
        "several jobs' launchers may share a host; give each its own CUDA_VISIBLE_DEVICES. In a step of SLURM (srun "
        "--ntasks-per-node 1 ...) SLURM's variables say all three, and MASTER_PORT another port",
    ),
    "--timeout": (
        "SECONDS",
        "how long a wait may last before it raises CollectiveTimeout, and how long hosts wait for each other to start "
        "(10 minutes otherwise)",
    ),
    "--monitor-interval": (
        "SECONDS",
        "how often torchrun looks for dead processes (0.1). When it finds one it ends the others at once; with several "
        "times --timeout, the survivors usually report CollectiveTimeout first. The last lines say who died",
    ),
}

_MEETING_S = 600
"""How long hosts wait for each other to start, by default."""
_SLACK_S = 30
"""How much longer torchrun itself would wait: see ``torchrun.GIVE_UP``."""

_SPREAD = ("-n", "auto", "--maxprocesses", "8", "--dist", "worksteal")

_TEST_MODULES = (
    "pytest",
    "pytest_timeout",
    "xdist",
    "hypothesis",
    "psutil",
    "click",
    "pandas",
    "tabulate",
)


def main(words: Sequence[str] | None = None, program: str = "python -m tdcoll run") -> int:
    """Replace this process by the requested job. With ``--setenv``, print the commands that
    ``setenv.sh`` evaluates.

    Args:
        words: the command line; that of this process if None.
        program: the user's command, for help and errors.
    """
    usage = _USAGE.format(program=program, tests=" | tests" * IN_CHECKOUT)
    about = _ABOUT + _ABOUT_TESTS * IN_CHECKOUT
    end = f"{_STATUS}\n\nexample:\n  {program} --nproc 4 train.py --steps 10"
    parser = argparse.ArgumentParser(
        program,
        usage,
        about,
        end,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for name, text in _FLAGS.items():
        parser.add_argument(name, action="store_true", help=text)
    for name, (metavar, text) in _VALUES.items():
        parser.add_argument(
            name, metavar=metavar, type=float if metavar == "SECONDS" else str, help=text
        )
    parser.add_argument("--setenv", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("program", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parsed = parser.parse_args(words)
    if parsed.program[:1] == ["--"]:
        del parsed.program[0]
    try:
        if parsed.setenv:
            nnodes = _whole("TDCOLL_NNODES", os.environ.get("TDCOLL_NNODES") or "1", 1)
            job = prepare(os.environ, one_host=nnodes == 1)
            print(_exports({**job.variables, "TDCOLL_PYTHON": job.python}))
            return 0
        job, command = _planned(parsed)
    except ValueError as error:
        say(str(error))
        return 2
    if job.simulated and not job.variables.get("OMP_NUM_THREADS"):
        # Because simulated PEs share the cores, a pool of threads in each would only make them wait
        # for each other.
        job.variables["OMP_NUM_THREADS"] = "1"
    command = [job.python, "-m", *command]
    if parsed.dry_run:
        print(_exports(job.variables), shlex.join(command), sep="\n")
        return 0
    # signals go directly to torchrun, and its exit status stays
    return os.execvpe(job.python, command, job.variables)


def _exports(variables: Mapping[str, str]) -> str:
    """Return the shell commands that change this process's environment to ``variables``."""
    gone = [f"unset {name}" for name in os.environ if name not in variables]
    changed = {name: value for name, value in variables.items() if os.environ.get(name) != value}
    return "\n".join(
        [*gone, *(f"export {name}={shlex.quote(value)}" for name, value in changed.items())]
    )


def _planned(parsed: argparse.Namespace) -> tuple[Job, list[str]]:
    """Return the job's environment and what Python runs; ``ValueError`` if an option or variable of
    SLURM is wrong."""
    if not parsed.program:
        raise ValueError("program: expected script.py or -m module, got nothing (see --help)")
    name, *rest = parsed.program
    variables = dict(os.environ)
    if parsed.simulate:
        variables["TRITON_INTERPRET"] = "1"
    if parsed.timeout is not None:
        variables["TDCOLL_TIMEOUT_S"] = str(arguments.seconds("--timeout", parsed.timeout))
    if IN_CHECKOUT and not parsed.m and name == "tests":
        for option in ("--share-gpus", *_VALUES):
            if option != "--timeout" and getattr(parsed, option[2:].replace("-", "_")):
                raise ValueError(
                    f"{option}: expected only with a script or module, got it with tests"
                )
        job = prepare(variables, modules=_TEST_MODULES, dry_run=parsed.dry_run)
        os.chdir(ROOT)
        # GPU tests take the whole machine. The user's own -n comes after this one, and wins.
        spread = job.simulated and not {"--pdb", "--trace", "-s", "--capture=no", "no:xdist"} & set(
            rest
        )
        return job, ["pytest", *(_SPREAD if spread else ()), *rest]
    if not parsed.m and not Path(name).is_file():
        raise ValueError(f"script: expected a Python file, got '{name}', which is none")

    nproc = _whole("--nproc", parsed.nproc, 1)
    emulate_nodes = _whole("--emulate-nodes", parsed.emulate_nodes, 1)
    nnodes, node_rank, meeting_point = _hosts(parsed)
    if parsed.share_gpus:
        variables["TDCOLL_SHARE_GPUS"] = "1"
    if emulate_nodes:
        variables["TDCOLL_EMULATE_NODES"] = str(emulate_nodes)
    host, port = meeting_point or ("localhost", 0)
    one_host = nnodes == 1 or host.startswith("127.") or host in ("localhost", "::1")
    job = prepare(variables, one_host=one_host, dry_run=parsed.dry_run)
    nproc = nproc or (4 if job.simulated else job.gpus)
    if parsed.share_gpus and job.simulated:
        raise ValueError(
            "--share-gpus: expected GPUs, got the simulator, in which processes have none to share"
        )
    if not job.gpus and not job.simulated:
        interpret = job.variables["TRITON_INTERPRET"]
        raise ValueError(
            f"TRITON_INTERPRET: expected 1 on a host without a visible GPU, got '{interpret}'"
        )
    if (
        nproc > job.gpus
        and not job.simulated
        and job.variables.get("TDCOLL_SHARE_GPUS", "0") in ("", "0")
    ):
        raise ValueError(
            f"--nproc: expected at most {job.gpus}, the number of visible GPUs, got {nproc} (--simulate has no such "
            "limit; --share-gpus lets processes share GPUs, for tests of correctness)"
        )
    if emulate_nodes and emulate_nodes > nproc:
        raise ValueError(
            f"--emulate-nodes: expected 1 to {nproc}, the number of processes, got {emulate_nodes}"
        )
    # the static rendezvous: torchrun's node ranks are the ones given, not the order of arrival
    if meeting_point:
        meeting = ["--node-rank", str(node_rank), "--master-addr", host, "--master-port", str(port)]
        limit = _MEETING_S if parsed.timeout is None else math.ceil(parsed.timeout)
        meeting += ["--rdzv-conf", f"give_up={limit},timeout={limit + _SLACK_S}"]
    else:  # a free port of its own, on the loopback interface: jobs on one host do not meet
        meeting = [
            "--rdzv-backend",
            "c10d",
            "--rdzv-endpoint",
            "localhost:0",
            "--local-addr",
            "127.0.0.1",
        ]
    command = [
        "tdcoll.tools.torchrun",
        "--nproc-per-node",
        str(nproc),
        "--nnodes",
        str(nnodes),
        *meeting,
    ]
    if parsed.monitor_interval is not None:
        interval = arguments.seconds("--monitor-interval", parsed.monitor_interval)
        command += ["--monitor-interval", str(interval)]
    # Words after -- are not torchrun's. It knows -m as a flag.
    return job, [*command, *["-m"] * parsed.m, "--", name, *rest]


def _whole(name: str, text: str | None, least: int) -> int | None:
    return None if text is None else arguments.parse_whole(text, name, least)


def _hosts(parsed: argparse.Namespace) -> tuple[int, int, tuple[str, int] | None]:
    """Return the number of hosts, this one's, and their meeting place, from options or SLURM's
    variables."""
    slurm = {
        name: value for name, value in os.environ.items() if name.startswith("SLURM_") and value
    }
    nnodes = _whole("--nnodes", parsed.nnodes, 1)
    node_rank = _whole("--node-rank", parsed.node_rank, 0)
    rdzv = parsed.rdzv
    in_step = "SLURM_STEP_NUM_NODES" in slurm
    if nnodes is None and in_step:
        nnodes = _whole("SLURM_STEP_NUM_NODES", slurm["SLURM_STEP_NUM_NODES"], 1)
    elif nnodes is None and (arguments.decimal(slurm.get("SLURM_NNODES", "")) or 1) > 1:
        raise ValueError(
            f"--nnodes: expected one launcher on each of the {slurm['SLURM_NNODES']} hosts of this SLURM allocation, "
            "got one outside of a step (start it with srun --ntasks-per-node 1, or give --nnodes 1 for this host alone)"
        )
    nnodes = nnodes or 1
    if in_step and nnodes > 1:
        task = slurm.get("SLURM_LOCALID", "0")
        if task != "0":
            raise ValueError(
                f"SLURM_LOCALID: expected one launcher per host (srun --ntasks-per-node 1), got task {task}"
            )
        if node_rank is None:
            node_rank = _whole("SLURM_NODEID", slurm.get("SLURM_NODEID"), 0)
        rdzv = _rdzv_of_slurm(slurm) if rdzv is None else rdzv
    if nnodes > 1 and rdzv is None:
        raise ValueError(
            f"--rdzv: expected HOST:PORT with --nnodes {nnodes} outside of a SLURM step, got nothing"
        )
    if (node_rank is None and nnodes > 1) or (node_rank or 0) >= nnodes:
        got = "nothing" if node_rank is None else node_rank
        raise ValueError(
            f"--node-rank: expected 0 to {nnodes - 1} with --nnodes {nnodes}, got {got}"
        )
    if rdzv is None:
        return nnodes, node_rank or 0, None
    # HOST:PORT, [IPv6]:PORT
    found = re.fullmatch(r"(?:\[([^][\s]+)\]|([^:\s]+)):([0-9]{1,5})", rdzv)
    if found is None or not 1 <= int(found[3]) <= 65535:
        raise ValueError(f"--rdzv: expected HOST:PORT with a port from 1 to 65535, got '{rdzv}'")
    return nnodes, node_rank or 0, (found[1] or found[2], int(found[3]))


def _rdzv_of_slurm(slurm: Mapping[str, str]) -> str:
    """Return the first host and a port, which are the same on all hosts, and the port another for
    each job."""
    nodes = slurm.get("SLURM_STEP_NODELIST") or slurm.get("SLURM_JOB_NODELIST", "")
    found = re.match(r"(?:[^],[]|\[[0-9][^]]*\])+(?=,|$)", nodes)  # rack[03-05,9]n[1-4],other
    if found is None:
        raise ValueError(
            f"--rdzv: expected HOST:PORT or SLURM_JOB_NODELIST to take the host from, got '{nodes}'"
        )
    host = re.sub(r"\[([0-9]+)[^]]*\]", r"\1", found[0])
    port = os.environ.get("MASTER_PORT")
    if port:
        return f"{host}:{_whole('MASTER_PORT', port, 1)}"
    # Below the range from which Linux gives ports to clients.
    return f"{host}:{20000 + arguments.parse_whole(slurm.get('SLURM_JOB_ID', '0'), 'SLURM_JOB_ID', 0) % 10000}"
