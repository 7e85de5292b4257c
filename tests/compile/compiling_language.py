# SPDX-License-Identifier: Apache-2.0
"""Compile the kernels of the language checks, of words, in Triton-distributed's style, and of the
tutorials."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "language"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "workers"))

import kernels_of_words as kernels
import language_checks
import stores_and_waits_checks
from compiling import ORDER, compile_for, instructions, resources
from triton.runtime.jit import JITFunction

import tdcoll.compat
from tdcoll.language.jit import bitcode_path, needs_nvshmem
from tdcoll.language.library import part_for_language

TESTS = Path(__file__).resolve().parents[1]
LANGUAGE_TYPES = {
    **dict.fromkeys(("dest", "source", "dst", "src"), "*u8"),
    **dict.fromkeys(("signal", "signals", "monitor", "seen", "words", "done"), "*i64"),
    **dict.fromkeys(("parts", "sent"), "*fp16"),
    "total": "*fp32",
    **dict.fromkeys(("out", "ok", "number", "flag", "torn"), "*i32"),
    "value": "i64",
}


def compile_language_checks(arch: int) -> list[dict[str, object]]:
    """The kernels of the language checks: every function of the device language."""
    done = []
    for name, kernel in (vars(language_checks) | vars(stores_and_waits_checks)).items():
        if not isinstance(kernel, JITFunction):
            continue
        types = LANGUAGE_TYPES | ({"data": "*i32"} if name == "store_through_pointer" else {})
        # FORM, STEP and SEMANTIC as values known at run time only: one compilation holds all forms.
        constants = {name: 8 for name in ("BLOCK", "PARTS") if name in kernel.arg_names}
        ptx = compile_for(kernel, arch, constants, types, assembled=False).asm["ptx"]
        links, needs = "nvshmemi_device_state" in ptx, needs_nvshmem(kernel)
        done.append({"kernel": name, "arch": arch, "links": links, "needs": needs})
    return done


def compile_with_all_of_nvshmem() -> dict[str, str]:
    """The code of a kernel that calls much of NVSHMEM, linked with its library and with the part
    that kernels get."""
    ptx = {}
    for name, library in (
        ("whole", bitcode_path(90)),
        ("part", part_for_language(bitcode_path(90))),
    ):
        whole = compile_for(
            language_checks.put_signal, 90, {}, LANGUAGE_TYPES, library=library
        ).asm["ptx"]
        ptx[name] = whole.partition("\n\t.file\t")[0]  # not where its source lies
        ORDER.pop()
    return ptx


WORD_TYPES = {
    **dict.fromkeys(("words", "wide", "arrived", "monitor", "signals", "counter"), "*i64"),
    **dict.fromkeys(("narrow", "turns", "ok", "cells", "sums", "source", "dest", "out"), "*i32"),
    **dict.fromkeys(("floats", "out_floats"), "*fp64"),
}
WORDS: dict[str, dict[str, Any]] = {
    "values": {},
    "count_by_threads": {"ALL": False},
    "wait_here_and_there": {"SEND": True},
    "ask": {"TIMES": 1},
    "rounds": {"ROUNDS": 2, "BARRIER": True, "BLOCK": 256},
    "move_words": {"BLOCK": 1024},
    "part_of_flagged": {"BLOCK": 32},
}
"""Kernels of tests/language/kernels_of_words.py, and their constants."""

INSTRUCTIONS = {
    "add by the thread": "atom.release.sys.global.add.u64",
    "swap by the thread": "atom.acq_rel.sys.global.cas.b32",
    "narrow wait": "ld.acquire.sys.global.b32 half",
    "wide wait": "ld.acquire.sys.global.b64 word",
    "signed": "lt.s32 done",
    "look": "ld.acquire.sys.global.b64 seen",
    "arrive": "atom.global.gpu.acq_rel.add.u64",
    "load": "ld.global.v4.b32",
    "store": "st.relaxed.sys.global.v4.b32",
}
"""The instructions that are looked for in kernels."""


def compile_words(arch: int) -> list[dict[str, Any]]:
    found = []
    for name, constants in WORDS.items():
        kernel = getattr(kernels, name)
        if arch != 90 and needs_nvshmem(kernel):  # which takes seconds each
            continue
        made = compile_for(kernel, arch, constants, WORD_TYPES).asm
        ptx = made["ptx"]
        body = ptx[ptx.index(".entry") :]
        seen: dict[str, Any] = {what: body.count(text) for what, text in INSTRUCTIONS.items()}
        if name == "part_of_flagged":
            loads = re.findall(r"\bLDG?\.E(\S*)\.STRONG\.SYS\b", instructions(made["cubin"], arch))
            seen["widths"] = sorted(set(loads))
        about = {"kernel": name, "arch": arch, "needs": needs_nvshmem(kernel)}
        found.append({**about, "problems": ORDER.pop()["problems"], **seen, **resources(ptx)})
    return found


COMPAT_TYPES = {
    **dict.fromkeys(("source", "inbox", "signal", "out", "ready"), "*i64"),
    **dict.fromkeys(("words", "peers"), "*i32"),
    "floats": "*fp32",
}
TEXTS = {
    "wait": ".b64 seen, [at]",
    "warp": "bar.warp.sync",
    "proxy": "fence.proxy.async.global",
    "release": "st.release",
    "add": "atom.release.sys.global.add.u32",
}


def compile_compat() -> dict[str, Any]:
    """Kernels in Triton-distributed's style, and whether its wait keeps Triton from pipelining a
    loop."""
    sys.path.insert(0, str(TESTS / "compat"))
    tdcoll.compat.activate()
    style = importlib.import_module("in_its_style")
    found: dict[str, Any] = {}
    for kernel, constants, types in (
        (style.pass_on, {"N": 64, "SCOPE": "intra_node"}, {"turn": "i32"}),
        (style.by_threads, {"N": 4}, {}),
    ):
        ptx = compile_for(kernel, 90, constants, COMPAT_TYPES | types).asm["ptx"]
        body = ptx[ptx.index(".entry") :]
        found[kernel.__name__] = {
            what: body.count(text) for what, text in TEXTS.items()
        } | resources(ptx)
    types = COMPAT_TYPES | dict.fromkeys(("a", "b"), "*fp16") | {"out": "*fp32"}
    for wait in (True, False):
        made = compile_for(style.multiply, 90, {"WAIT": wait, "N": 64}, types, aligned=True)
        found[f"pipelined, wait: {wait}"] = "async_copy_global_to_local" in made.asm["ttgir"]
    return found


def compile_tutorials() -> list[str]:
    sys.path.insert(0, str(TESTS / "tutorials"))
    load = importlib.import_module("loading").load
    notify, gather, reduce, matmul = (
        load("01-notify-and-wait"),
        load("02-all-gather"),
        load("05-all-reduce"),
        load("06-all-gather-matmul"),
    )
    types = {
        **dict.fromkeys(
            ("slots", "outbox", "received", "arrived", "credits", "signals", "epochs", "monitor"),
            "*i64",
        ),
        "source": "*fp32",
        "inbox": "*fp32",
        "sums": "*fp32",
        "buffer": "*u8",
    }
    sums = {"BLOCK": 1024, "WIDTH": 8, "WAITS": 1, "RANK_ORDER": True, "ROWS": 2}
    kernels_of = {
        notify.queue: {"WORDS": notify.WORDS, "SLOTS": notify.SLOTS, **notify.KEPT},
        gather.my_all_gather: {"WIDTH": 8, "COUNTED": True, "WAITS_LAST": True},
        reduce.one_shot: sums,
        reduce.two_shot: sums,
    }
    tile = {"M": 128, "N": 128, "K": 64}
    rules = {"WAITS": 1, "PER_PIECE": 1, "SIGNAL_LAST": True, "SENDERS_FIRST": True}
    operands = types | dict.fromkeys(("source", "inbox", "x", "weight", "out"), "*bf16")
    return [
        *(
            kernel.__name__
            for kernel, constants in kernels_of.items()
            if compile_for(kernel, 90, constants, types)
        ),
        *(
            kernel.__name__
            for kernel, constants in {
                matmul.my_all_gather_matmul: tile | rules,
                matmul.my_matmul: tile,
            }.items()
            if compile_for(kernel, 90, constants, operands, aligned=True)
        ),
    ]
