# SPDX-License-Identifier: Apache-2.0
"""Kernels and helpers that reach NVSHMEM in every way that a source can say it, or not at all."""

from __future__ import annotations

import inspect
import types
from typing import Any

import triton
import triton.language as tl

import tdcoll
import tdcoll.language
import tdcoll.language as tdl
from tdcoll.language import putmem_block

outer = types.SimpleNamespace(inner=types.SimpleNamespace(tdl=tdl))


@triton.jit
def helper(out):
    tl.store(out, tdl.my_pe())


@triton.jit
def helper_of_helper(out):
    helper(out)


@triton.jit
def only_thread_helper(out):
    tl.store(out, tdl.tid(0))


@tdcoll.jit
def direct(out):
    tl.store(out, tdl.my_pe())


@tdcoll.jit
def by_its_name(out):
    putmem_block(out, out, 4, 0)


@tdcoll.jit
def by_the_full_name(out):
    tdcoll.language.fence()


@tdcoll.jit
def in_a_nested_module(out):
    outer.inner.tdl.quiet()


@tdcoll.jit
def through_two_helpers(out):
    helper_of_helper(out)


@tdcoll.jit
def through_the_language(out):
    tdl.signal_block(out.to(tl.pointer_type(tl.int64)), 1, tdl.SIGNAL_ADD, 0)


def make_closure():
    inner = helper

    @tdcoll.jit
    def in_a_closure(out):
        inner(out)

    return in_a_closure


in_a_closure = make_closure()


in_a_tuple = (None, helper)
in_a_list_in_a_dict = {"helpers": [only_thread_helper, helper_of_helper]}
in_a_constexpr = tl.constexpr(helper)
in_a_namespace = types.SimpleNamespace(helpers=(helper,))
unrelated = {"helpers": [only_thread_helper, 1, "x"], "itself": ()}
unrelated["itself"] = (unrelated,)


@tdcoll.jit
def through_a_tuple(out):
    in_a_tuple[1](out)


@tdcoll.jit
def through_a_list_in_a_dict(out):
    in_a_list_in_a_dict["helpers"][1](out)


@tdcoll.jit
def through_a_constexpr(out):
    in_a_constexpr(out)


@tdcoll.jit
def through_a_container_of_a_namespace(out):
    in_a_namespace.helpers[0](out)


@tdcoll.jit
def by_default(out, function: tl.constexpr = helper):
    function(out)


@tdcoll.jit
def through_unrelated_containers(out):
    unrelated["helpers"][0](out)


@tdcoll.jit
def calls_its_argument(out, function: tl.constexpr):
    function(out)


@tdcoll.jit
def calls_itself(out, n: tl.constexpr):
    if n > 0:
        calls_itself(out, n - 1)


@tdcoll.jit
def only_threads(out):
    tl.store(out, tdl.tid(0))
    tdl.syncthreads()


@tdcoll.jit
def only_mentions(out):
    """Says my_pe() and tdl.quiet() here, which calls nothing."""
    my_pe = tl.program_id(0)
    tl.store(out, my_pe)


@triton.jit
def of_another_library(out):
    tl.store(out, 1)


NEED = (
    "direct",
    "by_its_name",
    "by_the_full_name",
    "in_a_nested_module",
    "through_two_helpers",
    "through_the_language",
    "in_a_closure",
    "through_a_tuple",
    "through_a_list_in_a_dict",
    "through_a_constexpr",
    "through_a_container_of_a_namespace",
    "by_default",
)
NEED_NOT = (
    "calls_itself",
    "only_threads",
    "only_mentions",
    "of_another_library",
    "through_unrelated_containers",
    "calls_its_argument",
)


# ---------------------------------------------------------------------- mistakes


@tdcoll.jit
def mistaken(out, HOW: tl.constexpr):
    word = out.to(tl.pointer_type(tl.int64))
    if HOW == "block_as_pe":
        tdl.putmem_block(out, out, 4, tl.arange(0, 8))
    elif HOW == "compare":
        tdl.wait_signal(word, 6, 1, word, 0, 0)
    elif HOW == "axis":
        tdl.tid(3)
    elif HOW == "scope":
        tdl.ld(out, "cta")
    elif HOW == "semantic":
        tdl.st(out, 1, "sys", "acquire")
    elif HOW == "pointee":
        tdl.ld(out.to(tl.pointer_type(tl.int8)))
    elif HOW == "descriptor_with_a_token":
        tdl.consume_token(
            tl.make_tensor_descriptor(out, shape=[64, 64], strides=[64, 1], block_shape=[64, 64]), 1
        )
    elif HOW == "token_of_64_bits":
        tdl.consume_token(out, tl.cast(1, tl.int64))


@triton.jit
def launched_by_triton_through_a_helper(out):
    through_the_language(out)


@triton.jit(noinline=True)
def waiting_helper(word, monitor):
    tdl.wait_signal(word, tdl.CMP_GE, 1, monitor, 0, 0)


@tdcoll.jit
def calls_a_waiting_helper(out):
    word = out.to(tl.pointer_type(tl.int64))
    waiting_helper(word, word)


MISTAKES = (
    *("block_as_pe", "compare", "axis", "scope", "semantic", "pointee"),
    *("descriptor_with_a_token", "token_of_64_bits"),
)


@tdcoll.jit
def waits_untold(out, monitor):
    came = tdl.wait_signal(monitor, tdl.CMP_GE, 1, monitor) & tdl.wait_word(
        out, tdl.CMP_GE, 1, monitor
    )
    token = tdl.wait_token(monitor, tdl.CMP_GE, 1, monitor, index=2)
    lane = tl.arange(0, 32)
    _, _, _, there = tdl.wait_flagged(monitor + 2 * lane, 1, lane < 1, monitor)
    tl.store(out + lane, there & came & token)


@tdcoll.jit
def waits(out, monitor):
    tl.store(out, tdl.wait_signal(monitor, tdl.CMP_GE, 1, monitor, 0, 0))


# ---------------------------------------------------------------------- 32 bits where 64 are wanted: out is int32


@tdcoll.jit
def halves(out, words, HOW: tl.constexpr):
    place = tl.arange(0, 8)
    at, mask = words + 2 * place, place < 8
    if HOW == "wait_signal: signal":
        tdl.wait_signal(out, tdl.CMP_GE, 1, words, 0, 0)
    elif HOW == "wait_signal: monitor":
        tdl.wait_signal(words, tdl.CMP_GE, 1, out, 0, 0)
    elif HOW == "wait_signals: signals":
        tdl.wait_signals(out, 4, -1, tdl.CMP_GE, 1, words, 4)
    elif HOW == "wait_token: signal":
        tdl.wait_token(out, tdl.CMP_GE, 1, words, 0, 0)
    elif HOW == "wait_flagged: monitor":
        tdl.wait_flagged(at, 1, mask, out, 0)
    elif HOW == "wait_words: monitor":
        tdl.wait_words(at, 1, mask, out, 0, 1)
    elif HOW == "wait_words_of_all: monitor":
        tdl.wait_words_of_all(at, 64, 2, 0, 1, mask, out, 1)
    elif HOW == "putmem_signal_nbi_block: sig_addr":
        tdl.putmem_signal_nbi_block(words, words, 8, out, 1, tdl.SIGNAL_SET, 0)


HALVES = (
    *("wait_signal: signal", "wait_signal: monitor", "wait_signals: signals", "wait_token: signal"),
    *("wait_flagged: monitor", "wait_words: monitor", "wait_words_of_all: monitor"),
    "putmem_signal_nbi_block: sig_addr",
)


@tdcoll.jit
def whole_addresses(out, words):
    """Plain addresses have no type to be wrong."""
    tdl.wait_signal(out.to(tl.int64), tdl.CMP_GE, 1, words.to(tl.int64), 0, 0)


def parameters_of(function: Any) -> list[list[Any]]:
    """Names and defaults of a function's parameters, without Triton's own."""
    signature = inspect.signature(getattr(function, "fn", function))
    return [
        [p.name, None if p.default is p.empty else repr(p.default)]
        for p in signature.parameters.values()
        if p.name not in ("_semantic", "_generator")
    ]
