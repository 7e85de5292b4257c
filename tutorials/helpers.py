# SPDX-License-Identifier: Apache-2.0
"""Functions that the tutorials share: output, `--break RULE` in the simulator, and times on GPUs."""

import argparse
import importlib.util
import os
import sys
import textwrap
import traceback

import tdcoll
from tdcoll.language import INTERPRETED
from tdcoll.tools.measure.floor import FLOORS


def say(text):
    """Print `text` on rank 0 once all ranks are here: a rank that failed a check is not."""
    tdcoll.barrier()
    if tdcoll.topology().rank == 0:
        print(text, flush=True)


# ---------------------------------------------------------------------- breaking a rule


def parse(parser, arguments, rules, case, **world):
    """Parse `arguments`, with `--break RULE` added. If it is given, show how the simulator catches that, and exit.

    Args:
        rules: `{name: (explanation, changes)}`.
        case: takes the changes that break a rule, and returns a case for `tdcoll.testing.explore`.
        world: arguments of `tdcoll.testing.World`.
    """
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "rules:\n" + "\n".join(
        f"  {rule:12} {explanation}" for rule, (explanation, _) in rules.items()
    )
    parser.add_argument(
        "--break", dest="broken", choices=rules, metavar="RULE", help="simulate without this rule"
    )
    parser.add_argument(
        "--seed", type=int, metavar="N", help="with --break: replay this seed and write a timeline"
    )
    options = parser.parse_args(arguments)
    if getattr(options, "plot", None) and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot: matplotlib is not installed")
    if options.seed is not None and not options.broken:
        parser.error("--seed: expected --break RULE with it")
    if options.broken:
        need_simulator(parser, "--break")
        # A World holds all ranks in one process, so one process of a launch is enough.
        sys.exit(
            show_broken(options, rules, case, **world) if os.environ.get("RANK", "0") == "0" else 0
        )
    return options


def need_simulator(parser, option):
    """Exit with an error unless kernels run in the simulator, which `option` needs."""
    if not INTERPRETED:
        start = "start it with 'launch.sh' or 'python -m tdcoll run', and '--simulate --nproc 1'"
        parser.error(f"{option}: expected the simulator, but TRITON_INTERPRET isn't 1; {start}")


def show_broken(options, rules, case, **world):
    """Run the case in the simulator without one rule, seed after seed until it fails. Return the exit status."""
    from tdcoll.testing import first_failure, replay

    rule, seed = options.broken, options.seed
    explanation, changes = rules[rule]
    print(
        f"without {rule}: {explanation}\nchanged: {', '.join(f'{k}={v}' for k, v in changes.items())}",
        flush=True,
    )
    if seed is not None:
        trace = f"{rule}-{seed}.json"
        print(
            f"seed {seed} again, with its timeline in {trace} for https://ui.perfetto.dev",
            flush=True,
        )
        try:
            replay(case(changes), seed, trace=trace, races=False, **world)
        except Exception:
            traceback.print_exc()
            return 0
        return f"seed {seed} passes without this rule"
    # A race would be reported first; the tutorials show what becomes of it.
    failure = first_failure(case(changes), seeds=100, races=False, **world)
    if failure is None:
        return "100 seeds pass without this rule"
    print(f"caught with seed {failure.seed}:\n{textwrap.indent(failure.report, '  ')}")
    print(f"To replay it, with a traceback and a timeline: --break {rule} --seed {failure.seed}")
    return 0


# ---------------------------------------------------------------------- times

H200 = FLOORS["NVIDIA H200"]
"""GPUs with NVLink: the launch of an empty kernel, one hop, and the highest rate at which bytes leave a GPU."""
BOUND = "lower bound (H200)"


def untimed():
    """Return why times mean nothing here, or None if every rank has a GPU to itself."""
    if tdcoll.device().type != "cuda":
        return "the simulator's times mean nothing"
    shared = os.environ.get("TDCOLL_SHARE_GPUS", "0") not in ("", "0")
    return "ranks that share a GPU run one at a time" if shared else None


def times_us(sent_bytes, calls):
    """Return the microseconds of each of `calls {name: function}` in CUDA graphs, and their lower bound. Collective.

    The bound is a launch and a hop, or the time in which `sent_bytes` leave a GPU, if that is longer.
    `graph_time_us` captures 20 calls in a graph and times its replays. A late rank makes the others wait, so each
    replay counts as long as it took on the slowest rank; the result is the median over the replays.
    """
    from tdcoll.tools.measure.timing import graph_time_us

    measured = {name: graph_time_us(call, calls=(20,)) for name, call in calls.items()}
    return {BOUND: H200.us(sent_bytes, tdcoll.topology().world_size), **measured}


def show_times(title, rows, plot=None):
    """Print `rows {bytes: {name: microseconds}}`, and draw them into the file `plot` if it is given. Collective."""
    names = list(next(iter(rows.values())))
    say(f"{title}, µs per call, lower is better:")
    widths = {name: max(10, len(name) + 2) for name in names}
    say(f"{'bytes':>10}" + "".join(f"{name:>{widths[name]}}" for name in names))
    for nbytes, row in rows.items():
        say(f"{nbytes:10}" + "".join(f"{row[name]:{widths[name]}.1f}" for name in names))
    if plot and tdcoll.topology().rank == 0:
        from matplotlib.figure import Figure

        axes = (figure := Figure(layout="constrained")).subplots()
        for name in names:
            style = {"color": "black", "linestyle": ":"} if name == BOUND else {"marker": "o"}
            axes.plot(list(rows), [row[name] for row in rows.values()], label=name, **style)
        axes.set_xscale("log", base=2)
        axes.set(
            title=title,
            xlabel="bytes per rank",
            ylabel="µs per call (lower is better)",
            yscale="log",
        )
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
        axes.legend()
        figure.savefig(plot, dpi=120)
