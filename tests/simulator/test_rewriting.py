# SPDX-License-Identifier: Apache-2.0
"""Kernels are rewritten function by function, also where several threads launch some for the first time."""

from __future__ import annotations

import ast
import sys
import textwrap
import threading

import triton.runtime.interpreter as triton_interpreter

from tdcoll.testing import World

SOURCE = textwrap.dedent("""
    def kernel_{0}(x):
        if tid("x") == 0:
            y = x and not x
            z_{0} = y or x
        return x
""")


def test_functions_are_rewritten_in_several_threads_at_once() -> None:
    with_state: list[str] = []

    def host(pe: int) -> None:
        visit = triton_interpreter.FunctionRewriter.ast_transformer.visit
        wanted = [ast.unparse(visit(ast.parse(SOURCE.format(n)))) for n in range(8)]

        def rewrite(number: int) -> None:
            for _ in range(200):
                try:
                    if ast.unparse(visit(ast.parse(SOURCE.format(number)))) != wanted[number]:
                        with_state.append("differs")
                except Exception as error:
                    with_state.append(repr(error))

        before = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        try:
            threads = [threading.Thread(target=rewrite, args=(number,)) for number in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            sys.setswitchinterval(before)

    World(1).run(host)
    assert with_state == []
