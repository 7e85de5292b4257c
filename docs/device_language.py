# SPDX-License-Identifier: Apache-2.0
"""Print the device language: ``python docs/device_language.py`` has the tables of
``docs/language.md``.

With ``--full`` the list of ``docs/functions.md``, with ``--stubs`` what type checkers read:
``language/__init__.pyi``.
"""

from __future__ import annotations

import argparse
import json
import textwrap

from tdcoll.spec import constants
from tdcoll.spec.functions import FUNCTIONS, DeviceFunction

_TOPICS = {
    "Ranks and addresses": "my_pe n_pes remote_ptr",
    "Puts and gets": "putmem getmem p g int_p",
    "Signals": "putmem_signal signal_block signal_op",
    "Waits with a deadline": "wait_signal wait_signals wait_word wait_token consume_token test_signal",
    "Order and barriers": "fence quiet syncthreads block_and grid_barrier barrier_all sync_all signal_wait_until",
    "Atomics": "atomic_add atomic_fetch_add atomic_swap atomic_compare_swap atomic_fetch atomic_set atom_add atom_cas",
    "Loads, stores and copies": "ld ld_acquire st st_release wait_descriptor_stores copy_block tid ntid",
    "LL and Lamport words": "store_flagged wait_flagged store_words load_words wait_words wait_words_of_all",
}
"""The functions by topic, without the forms that end with _nbi, _warp and _block of functions that
have them."""


def overview() -> str:
    """Return the tables of ``docs/language.md``: a line for each function and its forms, by
    topic."""
    parts = []
    for topic, names in _TOPICS.items():
        lines = [f"**{topic}**", "", "| function | meaning |", "|---|---|"]
        for name in names.split():
            function = FUNCTIONS[name]
            forms = [
                end
                for end in ("_nbi", "_warp", "_block")
                if not name.endswith(end) and name + end in FUNCTIONS
            ]
            also = f", also {', '.join(f'`{end}`' for end in forms)}" if forms else ""
            first = (
                function.doc.partition(". ")[0]
                .partition("; ")[0]
                .removesuffix(".")
                .replace("|", "\\|")
            )
            lines.append(f"| `{function.signature}`{also} | {first} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def definitions() -> str:
    """Return the list of ``docs/functions.md``: each function's signature, what it stands for, and
    its meaning."""
    entries = [
        f"`{function.signature}`\n: `{function.prototype}`\n: {function.doc}"
        for function in FUNCTIONS.values()
    ]
    return "\n\n".join(entries)


_STUBS = '''# SPDX-License-Identifier: Apache-2.0
# Made by `python docs/device_language.py --stubs > tdcoll/language/__init__.pyi`, from tdcoll.spec.
"""Communication functions for Triton kernels: ``import tdcoll.language as tdl``."""

from typing import Any, Literal, TypeAlias

import triton.language as tl

_Number: TypeAlias = tl.tensor | tl.constexpr | int
_Pointer: TypeAlias = tl.tensor | int
_Value: TypeAlias = tl.tensor | tl.constexpr | int | float
_Scope: TypeAlias = Literal["gpu", "sys"]
_Semantic: TypeAlias = Literal["relaxed", "acquire", "release", "acq_rel"]

INTERPRETED: bool
LOWERING: str
'''

_STUB_TYPES = {
    "ptr": "_Pointer",
    "ptr64": "_Pointer",
    "value": "_Value",
    "constant": "tl.constexpr | int",
}
_STUB_RETURNS = {None: "None", "value": "Any"}
"""Some functions return several blocks."""


def _stub(function: DeviceFunction) -> str:
    """Return the declaration of a function for type checkers."""
    shown = []
    for (name, kind), parameter in zip(
        function.parameters, function.call.parameters.values(), strict=True
    ):
        of = {"scope": "_Scope", "semantic": "_Semantic"}.get(
            name, _STUB_TYPES.get(kind, "_Number")
        )
        default = parameter.default
        given = "" if default is parameter.empty else f" = {json.dumps(default)}"
        shown.append(f"{name}: {of}{given}")
    returns = _STUB_RETURNS.get(function.returns, "tl.tensor")
    head = f"def {function.name}({', '.join(shown)}) -> {returns}:"
    if len(head) > 100:
        inner = (
            f"    {', '.join(shown)}\n"
            if len(", ".join(shown)) <= 96
            else "".join(f"    {s},\n" for s in shown)
        )
        head = f"def {function.name}(\n{inner}) -> {returns}:"
    doc = "\n    ".join(textwrap.wrap(f'"""{function.doc}"""', 96))
    return f"{head}\n    {doc}\n"


def stubs() -> str:
    """Return ``tdcoll/language/__init__.pyi``: the device language for type checkers and
    editors."""
    names = [f"{name}: tl.constexpr" for name in constants.__all__]
    return "\n".join([_STUBS + "\n".join(names) + "\n", *map(_stub, FUNCTIONS.values())])


def main() -> None:
    """Print one of them."""
    parser = argparse.ArgumentParser(description="Print the device language.")
    parser.add_argument(
        "--full", action="store_true", help="one table with the full text, for docs/functions.md"
    )
    parser.add_argument(
        "--stubs", action="store_true", help="for type checkers, instead of tables for docs"
    )
    options = parser.parse_args()
    print(
        stubs() if options.stubs else f"{definitions() if options.full else overview()}\n", end=""
    )


if __name__ == "__main__":
    main()
