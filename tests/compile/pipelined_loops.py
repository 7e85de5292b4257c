# SPDX-License-Identifier: Apache-2.0
"""Loads stay behind waits in loops that Triton would pipeline: what the compiler makes of such
loops, as JSON.

Run as a program of its own, without TRITON_INTERPRET; it needs no GPU. With another Triton, by
hand::

    pip download --no-deps triton==3.9.0 && unzip -q -d TRITON triton-3.9.0-*.whl
    PYTHONPATH=TRITON:. python tests/compile/pipelined_loops.py

It prints what is wrong, and ends with 1 if anything is. ``controls`` are loops that must be found
wrong. ``--few`` leaves out other architectures than sm_90, and numbers of stages other than 3.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
import tempfile
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource

import tdcoll
import tdcoll.language as tdl
from tdcoll.language import waits
from tdcoll.language.jit import OWN_OPTIONS, bitcode_path, for_descriptors, needs_nvshmem
from tdcoll.language.library import part_for_language
from tdcoll.spec.functions import FUNCTIONS, LIBRARY

CONSTANTS = {"STEPS": 64, "M": 64, "N": 64, "K": 32}
TYPES = {"a_ptr": "*fp16", "b_ptr": "*fp16", "c_ptr": "*fp32", "words": "*i64", "monitor": "*i64"}

# ---------------------------------------------------------------------- waits: each returns a token, real or not


PLACE, MASK = "tl.arange(0, 128)", "tl.arange(0, 128) < 100"
CALLS = {
    "wait_signal": "words + i, tdl.CMP_GE, 1, monitor, i, i",
    "wait_signals": "words, 4, -1, tdl.CMP_GE, i, monitor, 4",
    "wait_flagged": f"words + 2 * {PLACE}, i, {MASK}, monitor, 0",
    "wait_words": f"words + 2 * {PLACE}, i, {MASK}, monitor, 0, 1",
    "wait_words_of_all": f"words + 2 * {PLACE}, 2048, 2, 0, i, {MASK}, monitor, 1",
    "signal_wait_until": "words + i, tdl.CMP_GE, 1",
    "ld_acquire": 'words + i, "sys"',
    "ld": 'words + i, "sys", "acquire"',
    "block_and": "i",
    "wait_word": "words + i, tdl.CMP_GE, 1, monitor, i, i",
    "test_signal": "words + i, tdl.CMP_GE, 1",
    "grid_barrier": "words + i, monitor",
    "atom_add": 'words + i, i, "sys", "acquire"',
    "atom_cas": 'words + i, i, 1, "sys", "acquire"',
}
"""Arguments of calls that loads stay behind."""

KINDS = {
    (): "",
    ("ptr", "pe"): "words + i, 1",
    ("ptr", "value", "pe"): "words + i, i, 1",
    ("ptr", "value", "value", "pe"): "words + i, 0, i, 1",
    ("ptr", "ptr", "size", "pe"): "words, words + i, 8, i",
}
"""Arguments of the others that acquire, by the kinds of their parameters."""


def waits_of(folder: Path) -> dict[str, Any]:
    """Return a function for each call, in a file because Triton reads the source of kernels."""
    calls = {name: f"tdl.{name}({given})" for name, given in CALLS.items()}
    for name, function in FUNCTIONS.items():
        if function.acquires and name not in calls:
            calls[name] = f"tdl.{name}({KINDS[tuple(kind for _, kind in function.parameters)]})"
    # as kernels do that carry the answer along
    calls["in_a_branch"] = f"if i != 5:\n        {calls['wait_signal']}"
    code = ["import triton\nimport triton.language as tl\n\nimport tdcoll.language as tdl\n"]
    code += [
        f"@triton.jit\ndef by_{name}(words, monitor, i):\n    {call}\n    return 0\n"
        for name, call in calls.items()
    ]
    (folder / "waits_in_loops.py").write_text("\n\n".join(code))
    sys.path.insert(0, str(folder))
    module = importlib.import_module("waits_in_loops")
    return {name: getattr(module, f"by_{name}") for name in calls}


@triton.jit
def by_wait_token(words, monitor, i):
    return tdl.wait_token(words + i, tdl.CMP_GE, 1, monitor, i, i)


@triton.jit
def unheld(words, monitor, i):
    """A control: `wait_signal` without what holds the loads."""
    waits._block_and_for_descriptors(waits._poll(words + i, tdl.CMP_GE, 1, monitor, 1, i, i))
    return 0


@triton.jit
def token_not_consumed(words, monitor, i):
    """A control: a token is returned, but it is not the loads'."""
    tdl.wait_token(words + i, tdl.CMP_GE, 1, monitor, i, i)
    return 0


# ---------------------------------------------------------------------- loops


def loops(wait: Any) -> dict[str, Any]:
    """Kernels whose loops wait by ``wait`` and then load."""

    @tdcoll.jit
    def load(
        a_ptr,
        b_ptr,
        c_ptr,
        words,
        monitor,
        STEPS: tl.constexpr,
        M: tl.constexpr,
        N: tl.constexpr,
        K: tl.constexpr,
    ):
        m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
        total = tl.zeros((M, N), tl.float32)
        for i in range(STEPS):
            token = wait(words, monitor, i)
            at = tdl.consume_token(a_ptr, token)
            a = tl.load(at + m[:, None] * (STEPS * K) + i * K + k[None, :])
            b = tl.load(tdl.consume_token(b_ptr, token) + (i * K + k[:, None]) * N + n[None, :])
            total = tl.dot(a, b, total)
        tl.store(c_ptr + m[:, None] * N + n[None, :], total)

    @tdcoll.jit
    def descriptor(
        a_ptr,
        b_ptr,
        c_ptr,
        words,
        monitor,
        STEPS: tl.constexpr,
        M: tl.constexpr,
        N: tl.constexpr,
        K: tl.constexpr,
    ):
        m, n = tl.arange(0, M), tl.arange(0, N)
        a_all = tl.make_tensor_descriptor(
            a_ptr, shape=[M, STEPS * K], strides=[STEPS * K, 1], block_shape=[M, K]
        )
        b_all = tl.make_tensor_descriptor(
            b_ptr, shape=[STEPS * K, N], strides=[N, 1], block_shape=[K, N]
        )
        total = tl.zeros((M, N), tl.float32)
        for i in range(STEPS):
            token = wait(words, monitor, i)
            a = a_all.load([tdl.consume_token(0, token), i * K])
            b = b_all.load([tdl.consume_token(i * K, token), 0])
            total = tl.dot(a, b, total)
        tl.store(c_ptr + m[:, None] * N + n[None, :], total)

    @tdcoll.jit
    def stream(
        a_ptr,
        b_ptr,
        c_ptr,
        words,
        monitor,
        STEPS: tl.constexpr,
        M: tl.constexpr,
        N: tl.constexpr,
        K: tl.constexpr,
    ):
        """No matmul: pipelined because it asks for it."""
        m = tl.arange(0, 1024)
        for i in tl.range(STEPS, num_stages=K):
            token = wait(words, monitor, i)
            source = tdl.consume_token(a_ptr.to(tl.pointer_type(tl.float32)) + i * 1024 + m, token)
            tl.store(c_ptr + i * 1024 + m, tl.load(source) + 1)

    return {"load": load, "descriptor": descriptor, "stream": stream}


class Lowered(Exception):
    """Thrown with the TTGIR, to leave a compilation there."""


_add_stages = CUDABackend.add_stages
_until = "ptx"


def _stages_up_to_ptx(backend: Any, stages: dict[str, Callable[..., Any]], *rest: Any) -> None:
    _add_stages(backend, stages, *rest)
    # what ptxas takes most of the time for, and no test looks at
    stages["cubin"] = lambda source, metadata: b""

    def llir(source: Any, metadata: Any, lower: Callable[..., Any] = stages["llir"]) -> Any:
        if _until == "ttgir":
            raise Lowered(str(source))
        return lower(source, metadata)

    stages["llir"] = llir


CUDABackend.add_stages = _stages_up_to_ptx


def lower(kernel: Any, arch: int, num_stages: int, until: str = "ptx") -> dict[str, str]:
    """TTGIR and, unless that is all that is wanted, PTX."""
    global _until
    _until = until
    constants = {**CONSTANTS, "K": num_stages} if kernel.__name__ == "stream" else CONSTANTS
    signature = {
        name: "constexpr" if name in constants else TYPES[name] for name in kernel.arg_names
    }
    aligned = {
        (i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names) if name in TYPES
    }
    libraries = {LIBRARY: part_for_language(bitcode_path(arch))} if needs_nvshmem(kernel) else {}
    options = {"num_warps": 4, "num_stages": num_stages, "extern_libs": libraries, **OWN_OPTIONS}
    try:
        source = ASTSource(kernel, signature, constants, aligned)
        with for_descriptors(source):
            made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    except Lowered as reached:
        return {"ttgir": str(reached)}
    except (
        RuntimeError
    ):  # as of a loop with a wait on Blackwell, when nothing tells the pipeliner to leave it alone
        return {"ttgir": "", "ptx": ""}
    return {"ttgir": str(made.asm["ttgir"]), "ptx": made.asm["ptx"]}


# ---------------------------------------------------------------------- what came out

TTGIR = {
    "for": r"scf\.for",
    "wait": (
        r"barrier\.cta\.red|ld\.acquire|b128|sys\.global\.v4|tt\.extern_elementwise|gpu\.barrier|ttg\.barrier"
        r"|\batom\.\S*acq"
    ),
    "async": r"ttg\.async_copy_global_to_local|ttng\.async_tma_copy_global",
    "load": r"tt\.load|tt\.descriptor_load",
}
PTX = {
    "wait": r"barrier\.cta\.red",
    "async": r"cp\.async\.c[ag]\.|cp\.async\.bulk\.tensor\S*\.global\.mbarrier",
    "load": r"\bld\.global\.(v\d|b16|b32)",
}


def events(text: str, kinds: dict[str, str]) -> list[str]:
    """What stands in ``text``, in order; several of a kind in a row are one."""
    found = [
        kind
        for line in text.splitlines()
        for kind, pattern in kinds.items()
        if re.search(pattern, line)
    ]
    return [kind for kind, _ in groupby(found)]


def problem_of_plain(lowered: dict[str, str]) -> str | None:
    """A plain wait: the loop is as it was written, each load behind its wait."""
    seen = events(lowered["ttgir"], TTGIR)
    # Loads by descriptors, where they are not pointers in disguise, are copies that are waited for
    # at once.
    if seen not in (["for", "wait", "load"], ["for", "wait", "async"]):
        return f"TTGIR has {seen}"
    if "ptx" in lowered and events(lowered["ptx"], PTX) not in (
        ["wait", "load"],
        ["wait", "async"],
    ):
        return f"PTX has {events(lowered['ptx'], PTX)}"
    return None


def problem_of_token(lowered: dict[str, str], ahead: int) -> str | None:
    """A wait by token: ``ahead`` iterations are ahead of the loop, each of them behind its own
    wait."""
    seen, before = events(lowered["ttgir"], TTGIR), ["wait", "async"] * ahead
    if seen != [*before, "for", "wait", "async"] and (ahead or seen != ["for", "wait", "load"]):
        return f"TTGIR has {seen}"
    # In the text the loop's own loads may stand before its wait, and so next to those ahead of the
    # loop.
    ptx = events(lowered["ptx"], PTX) if "ptx" in lowered else [*before, "wait", seen[-1]]
    if ptx not in ([*before, "wait", seen[-1]], [*(before or [seen[-1]]), "wait"]):
        return f"PTX has {ptx}"
    return None


def main(folder: Path, few: bool) -> int:
    made = waits_of(folder)
    report: dict[str, Any] = {
        "triton": triton.__version__,
        "checked": [],
        "problems": [],
        "controls": {},
    }

    def note(problem: str | None, *what: Any) -> None:
        report["checked"].append([*what])
        if problem is not None:
            report["problems"].append(f"{', '.join(map(str, what))}: {problem}")

    plain, token = loops(made["wait_signal"]), loops(by_wait_token)
    for arch in (90,) if few else (80, 90):
        for num_stages in (3,) if few else (1, 2, 3, 4):
            for form in ("load", "descriptor", "stream"):
                if form == "stream" and num_stages == 1:
                    continue
                wanted = arch >= 90 and form == "descriptor"
                for kind, kernels in (("plain", plain), ("token", token)):
                    lowered = lower(kernels[form], arch, num_stages)
                    problem = (
                        problem_of_plain(lowered)
                        if kind == "plain"
                        else problem_of_token(lowered, num_stages - 1)
                    )
                    note(problem, kind, form, arch, num_stages)
                    fence = "fence.proxy.async.global" in lowered["ptx"]
                    note(
                        None if fence == wanted else f"proxy fence: {fence}",
                        f"{kind}, fence",
                        form,
                        arch,
                        num_stages,
                    )
    for form in (
        () if few else ("load", "descriptor")
    ):  # on Blackwell the matmul is asynchronous, and takes a stage of its own
        note(problem_of_plain(lower(plain[form], 100, 3, "ttgir")), "plain", form, 100, 3)
        note(problem_of_token(lower(token[form], 100, 3, "ttgir"), 3), "token", form, 100, 3)
    bars = lower(plain["stream"], 90, 3)["ptx"].count("bar.sync")
    note(f"PTX has {bars} bar.sync" if bars else None, "nothing is left of what holds the loads")
    for name, wait in made.items():
        note(problem_of_plain(lower(loops(wait)["load"], 90, 3, "ttgir")), name)

    for name, wait in {"unheld": unheld, "token not consumed": token_not_consumed}.items():
        for form, kernel in loops(wait).items():
            for num_stages in (3,) if few else (2, 4):
                lowered = lower(kernel, 90, num_stages)
                problem = problem_of_plain(lowered) and problem_of_token(lowered, num_stages - 1)
                report["controls"][f"{name}, {form}, {num_stages}"] = problem
    json.dump({"loops": report}, sys.stdout, indent=1)
    print()
    missed = [name for name, problem in report["controls"].items() if problem is None]
    return 1 if report["problems"] or missed else 0


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made_files:
        sys.exit(main(Path(made_files), "--few" in sys.argv))
