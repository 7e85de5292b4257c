# SPDX-License-Identifier: Apache-2.0
"""The table of the device language, its lowerings, its stubs and Triton-distributed have the same
functions."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
from kernels_to_launch import HALVES, parameters_of
from processes import python

import tdcoll.language as tdl
from tdcoll.simulator import lowering as simulator
from tdcoll.spec.functions import FUNCTIONS

ROOT = Path(__file__).resolve().parents[2]
STUB = ROOT / "tdcoll/language/__init__.pyi"


def parameters_in_the_table(name: str) -> list[list[Any]]:
    function = FUNCTIONS[name]
    required = len(function.parameters) - len(function.defaults)
    defaults = [None] * required + [repr(default) for default in function.defaults]
    return [
        [parameter, default]
        for (parameter, _), default in zip(function.parameters, defaults, strict=True)
    ]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_both_lowerings_have_the_function_of_the_table(compiled: dict[str, Any], name: str) -> None:
    assert (
        parameters_of(getattr(simulator, name))
        == compiled["parameters"][name]
        == parameters_in_the_table(name)
    )
    function = getattr(tdl, name)
    assert function is getattr(simulator, name)
    expected = [FUNCTIONS[name].doc, [parameter for parameter, _ in FUNCTIONS[name].parameters]]
    assert compiled["described"][name] == expected
    assert [inspect.getdoc(function), list(inspect.signature(function).parameters)] == expected


def test_nvshmem_lowering_is_the_one_of_a_compiled_process(compiled: dict[str, Any]) -> None:
    assert compiled["not_its_own"] == []


def test_functions_with_a_symbol_are_the_ones_that_need_nvshmem(compiled: dict[str, Any]) -> None:
    """`wait_signal` and the like are PTX; `signal_block` is a Triton function that calls
    `signal_op`."""
    with_symbol = {name for name, function in FUNCTIONS.items() if function.symbol is not None}
    assert set(compiled["marked"]) == with_symbol
    assert set(compiled["needs"]) == with_symbol | {"signal_block"}


def test_all_names_are_public() -> None:
    assert {*FUNCTIONS, "CMP_GE", "SIGNAL_ADD", "INTERPRETED"} <= set(tdl.__all__)
    assert len(set(tdl.__all__)) == len(tdl.__all__)
    assert all(hasattr(tdl, name) for name in tdl.__all__)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_table_is_complete(name: str) -> None:
    function = FUNCTIONS[name]
    assert function.name == name
    assert len(function.doc) > 15
    if function.symbol is not None:
        assert function.symbol in function.prototype
    for parameter, kind in function.parameters:
        assert kind in ("ptr", "ptr64", "size", "pe", "int", "u64", "value", "constant")
        assert (parameter == "pe") == (kind == "pe")
        assert kind == "ptr64" or parameter not in ("sig_addr", "signals", "monitor", "counter")
    page = (ROOT / "docs/functions.md").read_text(encoding="utf-8")
    assert f"\n`{function.signature}`\n: `{function.prototype}`\n" in page


def test_signature_of_a_function_with_defaults() -> None:
    assert FUNCTIONS["st"].signature == "st(ptr, val, scope='gpu', semantic='relaxed')"
    assert FUNCTIONS["fence"].signature == "fence()"


def test_wrong_arguments_name_the_function_when_compiled(compiled: dict[str, Any]) -> None:
    assert (
        "putmem_block: pe must be a scalar, got a block of shape"
        in compiled["errors"]["block_as_pe"]
    )
    assert "compare must be a CMP_* constant, got 6" in compiled["errors"]["compare"]
    assert "axis must be 0, 1 or 2, got 3" in compiled["errors"]["axis"]
    assert "scope must be one of gpu, sys; got 'cta'" in compiled["errors"]["scope"]
    assert (
        "semantic must be one of relaxed, release; got 'acquire'" in compiled["errors"]["semantic"]
    )
    assert "ld: ptr must point to 32- or 64-bit integers" in compiled["errors"]["pointee"]
    assert (
        "value must be a pointer or an offset, got a descriptor"
        in compiled["errors"]["descriptor_with_a_token"]
    )
    assert (
        "token must be what wait_token returned, an int32; got int64"
        in compiled["errors"]["token_of_64_bits"]
    )


@pytest.mark.parametrize("argument", HALVES)
def test_pointer_to_32_bits_where_64_are_wanted(compiled: dict[str, Any], argument: str) -> None:
    error = compiled["errors"][argument]
    assert error.startswith(f"{argument} must point to 64-bit integers (int64 or uint64), got")
    assert "a pointer to int32" in error


def test_addresses_have_no_type_to_be_wrong(compiled: dict[str, Any]) -> None:
    assert compiled["errors"]["whole_addresses"] == "nothing was raised"


KERNEL = """
from typing import Any

import tdcoll
import tdcoll.language as tdl
import triton.language as tl


@tdcoll.jit
def exchange(box: Any, flag: Any, nbytes: int, call: int, monitor: tdcoll.WaitMonitor, BLOCK: tl.constexpr) -> None:
    peer = (tdl.my_pe() + 1) % tdl.n_pes()
    tdl.putmem_signal_block(box, box, nbytes, flag, call, tdl.SIGNAL_SET, peer)
    if tdl.wait_signal(flag, tdl.CMP_GE, call, monitor) != 0:
        there = tdl.remote_ptr(box, peer)
        tl.store(there + tl.arange(0, BLOCK), tdl.ld_acquire(box, "sys"))
    tdl.st_release(flag, call, scope="sys")
    tdl.wait_signal(flag, compare=tdl.CMP_GE, value=call, monitor=monitor, peer=peer, index=2)
"""

WRONG = {
    "tdl.wait_signal(flag, tdl.CMP_GE, call)": 'Missing positional argument "monitor" in call to "wait_signal"',
    "tdl.putmem_signal_blok()": 'Module has no attribute "putmem_signal_blok"',
    'tdl.st_release(flag, call, scope="cta")': 'Argument "scope" to "st_release" has incompatible type',
    "tdl.wait_signal(flag, tdl.CMP_GE, call, monitor, pier=1)": 'Unexpected keyword argument "pier"',
}


def test_the_stubs_are_current() -> None:
    done = python("docs/device_language.py", "--stubs", PYTHONPATH=str(ROOT))
    assert STUB.read_text(encoding="utf-8") == done.stdout, (
        f"run python docs/device_language.py --stubs > {STUB}"
    )


def test_a_kernel_is_checked(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    (tmp_path / "kernel.py").write_text(KERNEL, encoding="utf-8")
    for place, call in enumerate(WRONG):
        (tmp_path / f"wrong_{place}.py").write_text(f"{KERNEL}    {call}\n", encoding="utf-8")
    done = python(
        *("-m", "mypy", "--config-file=", "--follow-imports=skip", "--ignore-missing-imports"),
        *(
            "--disallow-untyped-defs",
            "--check-untyped-defs",
            f"--cache-dir={tmp_path / 'cache'}",
            str(STUB),
        ),
        *map(str, sorted(tmp_path.glob("*.py"))),
        timeout=240,
    )
    lines = [line for line in done.stdout.splitlines() if ": error: " in line]
    found = {Path(line.split(":")[0]).name: line for line in lines}
    assert len(lines) == len(found), done.stdout + done.stderr
    for place, text in enumerate(WRONG.values()):
        assert text in found.pop(f"wrong_{place}.py"), done.stdout
    assert found == {}, done.stdout


LIBRARY = {
    "": "my_pe n_pes fence quiet barrier_all* sync_all*",
    "local_ptr pe": "remote_ptr",
    "dest value pe": "int_p",
    "dest source bytes pe": "putmem* putmem_nbi* getmem* getmem_nbi*",
    "dest source bytes sig_addr signal sig_op pe": "putmem_signal* putmem_signal_nbi*",
    "sig_addr signal sig_op pe": "signal_op",
    "sig_addr cmp_ cmp_val": "signal_wait_until",
}
"""Functions of libshmem_device in triton-dist 0.0.0 by parameters; a star adds those of a warp and
of a block."""

CONSTANTS = dict(
    zip(("CMP_EQ", "CMP_NE", "CMP_GT", "CMP_LE", "CMP_LT", "CMP_GE"), range(6), strict=True)
)
CONSTANTS |= {"SIGNAL_SET": 9, "SIGNAL_ADD": 10}
BY_THREADS = [  # those of its language_extra
    *(
        "tid(axis)",
        "ntid(axis)",
        "ld(ptr, scope='gpu', semantic='relaxed')",
        "ld_acquire(ptr, scope='gpu')",
    ),
    *("st(ptr, val, scope='gpu', semantic='relaxed')", "syncthreads()"),
]


def test_functions_of_nvshmem_have_the_parameters_of_triton_distributed() -> None:
    theirs = {
        name.replace("*", form): parameters.split()
        for parameters, names in LIBRARY.items()
        for name in names.split()
        for form in (("", "_warp", "_block") if "*" in name else ("",))
    }
    # Its library has none for typed words.
    ours = {
        name: function
        for name, function in FUNCTIONS.items()
        if function.symbol is not None and not function.types
    }
    assert {
        name: [parameter for parameter, _ in of.parameters] for name, of in ours.items()
    } == theirs
    assert [
        FUNCTIONS[signature.partition("(")[0]].signature for signature in BY_THREADS
    ] == BY_THREADS


def test_constants_have_the_values_of_triton_distributed() -> None:
    for name, value in CONSTANTS.items():
        assert getattr(tdl, name).value == getattr(tdl, f"NVSHMEM_{name}").value == value
