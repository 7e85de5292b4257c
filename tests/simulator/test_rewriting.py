# SPDX-License-Identifier: Apache-2.0
"""Kernels are rewritten function by function, also where several threads launch some for the first time."""

from __future__ import annotations

import gc
import linecache
import sys
import threading
from typing import Any

import triton.runtime.interpreter as triton_interpreter

from tdcoll.testing import World

SOURCE = """
def kernel_{0}(x):
    if x == {0}:
        y = x and not x
        z = y or x
    return x
"""
THREADS, ROUNDS = 8, 10


def function(number: int) -> Any:
    """A function of its own, whose source ``inspect`` finds."""
    source, name = SOURCE.format(number), f"<kernel {number}>"
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    scope: dict[str, Any] = {}
    exec(compile(source, name, "exec"), scope)
    return scope[f"kernel_{number}"]


def collected(phase: str, info: dict[str, int]) -> None:
    sum(range(20))


def test_functions_are_rewritten_in_several_threads() -> None:
    wrong: list[str] = []

    def host(pe: int) -> None:
        def rewrite(number: int) -> None:
            for _ in range(ROUNDS):
                try:
                    kernel = function(number)
                    rewritten = triton_interpreter.InterpretedFunction(kernel).rewrite()
                    if rewritten is kernel or rewritten(number) != number:
                        wrong.append(f"{rewritten}")
                except Exception as error:
                    wrong.append(repr(error))

        # What Python code a garbage collection runs lets other threads go on in the middle of an ast.parse.
        interval, threshold = sys.getswitchinterval(), gc.get_threshold()
        sys.setswitchinterval(1e-6)
        gc.set_threshold(20)
        gc.callbacks.append(collected)
        try:
            threads = [threading.Thread(target=rewrite, args=(number,)) for number in range(THREADS)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            gc.callbacks.remove(collected)
            gc.set_threshold(*threshold)
            sys.setswitchinterval(interval)

    World(1).run(host)
    assert wrong == []
