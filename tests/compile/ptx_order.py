# SPDX-License-Identifier: Apache-2.0
"""What a protocol assumes of the order of instructions, looked for in PTX along every path of a
kernel.

The simulator runs a program as one thread, at one scope and with its loads in order, so it cannot
see a missing block barrier, a wait that does not acquire, or a release that stops at this GPU. Each
inline asm is one event, because the device language and Triton emit one for an access. The line in
the source that an instruction comes from (its *site*) tells NVSHMEM's own instructions from the
kernel's, and memory of this GPU from a peer's.

**NVSHMEM's asynchronous copies.** From 3.7 on, NVSHMEM's puts inside a node contain copies by TMA,
and block barriers around them that some threads of a block don't reach. Nothing here looks at the
completion of such copies. A kernel of tdcoll's cannot reach them, for two reasons. First, NVSHMEM
tests the word ``tma_policy`` of its device state before all of them, and leaves them out if it is 0
(``NVSHMEMX_TMA_DISABLE``). That is its value unless ``NVSHMEM_TMA_POLICY`` says otherwise, and
``tdcoll.initialize`` refuses other values. The state is in constant memory, so the word does not
change while a kernel runs. Second, a block also needs shared memory that it has registered by
``nvshmemx_give_smem``, which the device language does not have. The rules use only the first
reason, because PTX shows it: they assume that the word is 0, and look at the part of a kernel that
can still be reached (:func:`ptx_blocks.without_tma`). An asynchronous copy that does not stand behind that
test is reported like any other.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache, lru_cache
from pathlib import Path
from typing import NamedTuple

from ptx_blocks import Block, without_tma

from tdcoll.spec.functions import FUNCTIONS

ROOT = Path(__file__).resolve().parents[2]
OF_THIS_GPU = {
    *(
        f"primitives.group.{name}"
        for name in ("begin_epoch", "begin_even_epoch", "still_alive", "this_epoch")
    ),
    "primitives.stores.signal_expired",
    "workers.language_checks.put_by_another",
    "workers.stores_and_waits_checks.sum_of_late_parts",
    *(
        f"index_match.kernels.{name}"
        for name in ("_read_header", "_read_ids", "flag", "assign_leader_ids")
    ),
    *(
        f"sparse_all_reduce.kernels_{name}"
        for name in ("lists._append", "lists._write_header", "values.combine")
    ),
    *(f"primitives.group.{name}" for name in ("signal_done", "wait_until_done", "leaves_last")),
}
"""Functions whose words only programs of this GPU touch: there, and nowhere else, GPU scope is
enough."""

MEETINGS = {
    "primitives.group.signal_done": r"\b(atom|red)\.\S*\brelease\b",
    "primitives.group.wait_until_done": r"\bld\.acquire\.",
    "primitives.group.leaves_last": r"\batom\.\S*\bacq_rel\b",
}
"""Functions in which thread blocks of a launch meet, and the accesses by which they do."""

MEETS = r"(?<![.\w])(atom|red)\.|\bld\.(acquire|relaxed|volatile)\b"
"""Atomic accesses of memory, which a barrier that reduces (``barrier.cta.red``) is not."""

TABLES = {
    *("primitives.stores.release_to", "primitives.stores.release_to_all"),
    "benchmarks.kernels_signals.ping_pong",
    "benchmarks.kernels_litmus._signal",
}
"""Functions that load addresses between their barrier and their release. Those never change while a
kernel runs."""

KINDS = {
    "barrier": r"\bbar\.sync|\bbarrier\.cta",
    "release": r"\bst\.release\.|\b(atom|red)\.\S*\b(release|acq_rel)\b",
    "add": r"\b(atom|red)\.\S*\badd\.[us]64",
    "control": r"\bld\.relaxed\.gpu\.global\.b64",
    "store": r"\bst\.(global|relaxed)\.",
    "load": r"\bld\.global\.(?!nc\b)",
    "meeting": r"\bld\.acquire\.gpu\b",
    "asynchronous": r"\bcp\.(async\.(?!bulk\.(tensor|commit_group|wait_group))|reduce)|\bst\.async",
    "descriptor load": r"\bcp\.async\.bulk\.tensor\.\S*\.global\.mbarrier",
    "descriptor store": r"\bcp\.async\.bulk\.tensor\.\S*\.global\.shared",
    "completion": r"\bcp\.async\.bulk\.wait_group\s+0\b",
    "proxy": r"\bfence\.proxy\.async\.global\b",
}
"""Kinds of an instruction or inline asm that is no polling loop; it may have several."""
POLL = r"\bbra POLL\b"
# of any kind, and calls that may
MEMORY = r"\b(?:(?:ld|st|atom|red)\.(?!param|shared)|cp\.|mbarrier\.|call\b)"
EARLY = r"\bgriddepcontrol\.wait; griddepcontrol\.launch_dependents;"
WAIT = r"\bld\.acquire\.sys\.global\.(b64 word|b32 half)"  # of a signal, or of a word
# Of a word that holds its data, and orders nothing else.
FLAGGED = r"\bld\.(volatile\.global\.b128 wide|relaxed\.sys\.global\.v4\.b32)"
MONITOR = r"\b(ld\.relaxed\.gpu\.global\.b64 (aborted|limit|record)|atom\.relaxed\.gpu\.global\.cas\.b64 aborted),"
ORDERED = r"(?<![.\w])((?:ld|st|atom|red|fence|membar)\.[\w.:]+)"
# all that has a kind
ACCESS = re.compile(r"\b(?:ld|st|atom|red|cp|bar|barrier|membar|fence)\.|\bcall\b")
NVSHMEM = frozenset(name for name, function in FUNCTIONS.items() if function.symbol)
BLOCK_BARRIERS = {"barrier_all_block", "sync_all_block"}
SENDS = r"(putmem|signal_op|int_p$|p$)"
# Words of this GPU that NVSHMEM looks at in a put. Neither Triton nor the device language loads
# like this.
OF_NVSHMEM = r"\bld\.relaxed\.gpu\.(b\d|global\.L1::no_allocate)"
# what NVSHMEM begins a put with
TOUCHES = r"\bbar\.sync|\bmembar|\bcall\b|\bld\.[bsu]\d|\bst\.(?!param|shared|local)"

RULES = {  # from, to: what it means if there is a path without a barrier
    (
        "store",
        "release",
    ): "stores are released without a barrier, by a thread that need not have made them",
    (
        "load",
        "release",
    ): "a release follows loads without a barrier, by a thread that need not have made them",
    (
        "flagged",
        "release",
    ): "a release follows words without a barrier, by a thread that need not have seen them",
    (
        "wait",
        "release",
    ): "a release follows a wait without a barrier, by a thread that need not have waited",
    ("store", "put"): "a put follows stores without a barrier, and may send what is not stored yet",
    (
        "flagged",
        "put",
    ): "a put follows words without a barrier, by a thread that need not have seen them",
    ("wait", "put"): "a put follows a wait without a barrier, by threads that need not have waited",
    ("wait", "load"): "loads follow a wait without a barrier, in threads that need not have waited",
    ("control", "add"): "the epoch goes up before all threads have read it",
    ("wait", "descriptor load"): "loads by descriptors follow a wait without a barrier",
    (
        "completion",
        "release",
    ): "a release follows completed stores of descriptors without a barrier",
}
ORDERS = {  # from, to: what must stand between, and what it means if there is a path without that
    ("wait", "descriptor load"): (
        "proxy",
        "loads by descriptors follow a wait without the proxy fence",
    ),
    ("descriptor store", "release"): (
        "completion",
        "a release follows stores of descriptors that may be on their way",
    ),
}
RELAXED = "a wait does not acquire at system scope"
UNORDERED = "thread blocks of a launch meet by an access that orders nothing"
NARROW = "an access has a scope narrower than the system, where a peer may be at the other end"
ASYNCHRONOUS = (
    "an asynchronous copy is in a kernel that releases, and its completion is not looked at here"
)


class Instruction(NamedTuple):
    """An instruction, a label or an inline asm of the kernel's body; the function that its line is
    in; and the function of NVSHMEM that is called there, if one is."""

    text: str
    site: str
    called: str


def _source(file: str) -> Path | None:
    """Return where the source is that PTX names: in this checkout, although another with the same
    text may have filled Triton's cache. None for Triton's own."""
    path = Path(file)
    for top in ("tdcoll", "tests", "benchmarks"):
        if top in path.parts:
            here = ROOT.joinpath(*path.parts[len(path.parts) - 1 - path.parts[::-1].index(top) :])
            if here.is_file():
                return here
    return None


@cache
def _sites(module: str, text: str) -> tuple[dict[int, str], dict[int, str]]:
    """By line of a module's text, the function that it is in, and the function of NVSHMEM that is
    called there."""
    functions: dict[int, str] = {}
    calls: dict[int, str] = {}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            functions |= dict.fromkeys(
                range(node.lineno, (node.end_lineno or 0) + 1), f"{module}.{node.name}"
            )
        elif isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name in NVSHMEM and getattr(getattr(node.func, "value", None), "id", "") != "tl":
                calls |= dict.fromkeys(range(node.lineno, (node.end_lineno or 0) + 1), name)
    return functions, calls


def _sites_of(file: str) -> tuple[dict[int, str], dict[int, str]]:
    if (source := _source(file)) is None:
        return {}, {}
    return _sites(f"{source.parent.name}.{source.stem}", source.read_text())


def _body(ptx: str) -> str:
    """The text of the kernel, without the functions that it calls, which follow."""
    body = ptx[ptx.index(".entry") :]
    return body[: body.index("// -- End function")]


@lru_cache(1)  # looked at several times
def _instructions(ptx: str) -> tuple[Instruction, ...]:
    """Instructions and labels of the kernel's body; an inline asm is one."""
    return tuple(_parsed(ptx))


def _parsed(ptx: str) -> Iterator[Instruction]:
    files = re.findall(r'^\s*\.file\s+(\d+)\s+"([^"]+)"', ptx, flags=re.MULTILINE)
    sites = {number: _sites_of(file) for number, file in files}
    asm: list[str] | None = None
    site = called = ""
    for line in _body(ptx).splitlines():
        if "// begin inline asm" in line:
            asm = []
        elif "// end inline asm" in line:
            yield Instruction("asm " + "\n".join(asm or []), site, called)
            asm = None
        elif asm is not None:
            asm.append(line)
        elif place := re.match(r"\s*\.loc\s+(\d+)\s+(\d+)", line):
            functions, calls = sites.get(place[1], ({}, {}))
            site, called = functions.get(int(place[2]), ""), calls.get(int(place[2]), "")
        elif text := line.split("//")[0].strip():
            yield Instruction(text, site, called)


def _narrow(instruction: Instruction) -> str | None:
    """The scope of an access that orders or is atomic, if that is narrower than the system; None if
    it is not."""
    text = re.sub(OF_NVSHMEM, "", instruction.text) if instruction.called else instruction.text
    for access in re.findall(ORDERED, re.sub(MONITOR, "", text)):
        words = set(re.split(r"[.:]+", access))
        strong = words & {
            "acquire",
            "release",
            "acq_rel",
            "relaxed",
            "sc",
            "atom",
            "red",
            "fence",
            "membar",
        }
        if strong and not words & {"sys", "shared", "proxy"}:
            return "block" if words & {"cta", "cluster"} else "gpu"
    return None


def _kinds(instruction: Instruction) -> frozenset[str]:
    """What an instruction does, as far as the rules look at it."""
    text = instruction.text
    if not ACCESS.search(text):
        return frozenset()
    if re.search(POLL, text):
        kinds = {
            "wait" if re.search(WAIT, text) else "flagged" if re.search(FLAGGED, text) else "poll"
        }
    else:
        kinds = {kind for kind, pattern in KINDS.items() if re.search(pattern, text)}
        if "release" in kinds:
            kinds.discard("store")
        if (
            instruction.called
            and instruction.called not in BLOCK_BARRIERS
            and re.search(TOUCHES, text)
        ):
            kinds -= {"barrier", "store", "add"}  # NVSHMEM's own
            if re.match(SENDS, instruction.called):
                kinds.add("put")
        if "load" in kinds and instruction.site in TABLES:
            kinds.discard("load")
    scope = _narrow(instruction)
    if scope == "block" or (scope == "gpu" and instruction.site not in OF_THIS_GPU):
        kinds.add("narrow")
    return frozenset(kinds)


@lru_cache(1)
def blocks_of(ptx: str) -> dict[str, Block]:
    """The kernel's basic blocks by label, but for those that are reached only if NVSHMEM may use
    TMA."""
    return without_tma(ptx, _all_blocks(ptx))


def _all_blocks(ptx: str) -> dict[str, Block]:
    """The kernel's basic blocks by label. The branch at the end of one goes to the first of those
    that may follow."""
    blocks: dict[str, Block] = {}
    tables = {  # of jumps
        name: re.findall(r"\$L__BB\w+", labels)
        for name, labels in re.findall(r"([$\w]+):\s*\.branchtargets([^;]*);", _body(ptx))
    }
    block, label, count = Block([], [], [], []), "begin", 0
    for instruction in _instructions(ptx):
        text = instruction.text
        block.texts.append(text)
        begins, branch = (
            re.match(r"(\$L__BB\w+):", text),
            re.search(r"\bbra(?:\.uni)?\s+(\$L__BB\w+);", text),
        )
        jump = re.match(r"brx\.idx\S*\s+[^,]+,\s*(\S+);", text)
        if begins or branch:
            count += 1
            after = begins[1] if begins else f"after {count}"
            if branch:
                block.following.append(branch[1])
            if begins or text.startswith("@"):
                block.following.append(after)
            blocks[label] = block
            block, label = Block([], [], [], []), after
        elif jump or re.match(r"(ret|exit);", text):
            block.following.extend(tables[jump[1]] if jump else [])
            blocks[label] = block
            count += 1
            block, label = Block([], [], [], []), f"after {count}"
        elif kinds := _kinds(instruction):
            block.events.append(kinds)
            block.accesses.append(text)
    blocks[label] = block
    return blocks


def _reaches(
    blocks: dict[str, Block], label: str, place: int, wanted: str, between: str = "barrier"
) -> bool:
    """Whether an event ``wanted`` follows event ``place`` of a block, on some path without one of
    kind ``between``."""
    pending, seen = [(label, place + 1)], set()
    while pending:
        here, first = pending.pop()
        for kinds in blocks[here].events[first:]:
            if wanted in kinds:
                return True
            if between in kinds:
                break
        else:
            following = blocks[here].following
            pending += [(after, 0) for after in following if after not in seen]
            seen.update(following)
    return False


def early(ptx: str) -> bool | None:
    """Whether a kernel waits for the launch before it ahead of all accesses, and lets the next
    begin; None: no wait."""
    if "griddepcontrol" not in ptx:
        return None
    for text, _, _ in _instructions(ptx):
        if re.search(EARLY, text):
            return True
        # nor on a path of its own
        if re.search(MEMORY, text) or re.search(r"\bbra\b|^\$L__BB", text):
            return False
    return False


def count(ptx: str) -> dict[str, int]:
    """How often each kind of event stands in the kernel."""
    events = [kinds for block in blocks_of(ptx).values() for kinds in block.events]
    names = (*KINDS, "wait", "flagged", "poll", "put", "narrow")
    return {kind: sum(kind in kinds for kinds in events) for kind in names}


def of_this_gpu(ptx: str) -> list[str]:
    """The functions that use a scope narrower than the system."""
    accesses = (
        instruction for instruction in _instructions(ptx) if ACCESS.search(instruction.text)
    )
    return sorted({instruction.site for instruction in accesses if _narrow(instruction)})


def _meets_unordered(ptx: str) -> bool:
    """Whether thread blocks of the launch meet by accesses that aren't those of
    :data:`MEETINGS`."""
    return any(
        site in MEETINGS and re.search(MEETS, text) and not re.search(MEETINGS[site], text)
        for text, site, _ in _instructions(ptx)
    )


def problems(ptx: str) -> list[str]:
    """Return what is not in order; empty: nothing."""
    blocks, seen = blocks_of(ptx), count(ptx)
    found = [RELAXED] if seen["poll"] else []
    found += [NARROW] if seen["narrow"] else []
    found += [UNORDERED] if _meets_unordered(ptx) else []
    found += [ASYNCHRONOUS] if seen["asynchronous"] and seen["release"] + seen["put"] else []
    rules = [(*rule, "barrier", meaning) for rule, meaning in RULES.items()]
    rules += [(*rule, *between) for rule, between in ORDERS.items()]
    for origin, wanted, between, meaning in rules:
        if any(
            origin in kinds and _reaches(blocks, label, place, wanted, between)
            for label, block in blocks.items()
            for place, kinds in enumerate(block.events)
        ):
            found.append(meaning)
    return found
