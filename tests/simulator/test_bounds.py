# SPDX-License-Identifier: Apache-2.0
"""Accesses beyond the tensor that a pointer was derived from are errors, wherever they land."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import triton.language as tl
import triton.runtime.interpreter as interpreter
from cases import case, device, on_rows
from exploring import first_failure
from triton.tools.tensor_descriptor import TensorDescriptor

import tdcoll
import tdcoll.language as tdl
from tdcoll.language.jit import jit
from tdcoll.simulator import bounds
from tdcoll.testing import World

ROWS = "bytes 64..72 of pe0.rows, which has 64 bytes"
LOAD, STORE, WITHIN_ONE = (
    f"would load from {ROWS}",
    f"would store to {ROWS}",
    "must stay within one tensor; got",
)
INT64 = tl.pointer_type(tl.int64)
ONE, SET = tl.constexpr(1), tdl.SIGNAL_SET


def flags(p, first=2):
    """128-bit words, of which the third is beyond."""
    return p + first + 2 * tl.arange(0, 4)


def four(n=1):
    return [tl.arange(0, 4)] * n


def mask():
    return tl.arange(0, 4) < 4


BEYOND = {  # what a kernel does with a pointer to 8 words -> what the error says
    "load": (lambda p: tl.load(p + 8), LOAD),
    "load of a block": (lambda p: tl.load(p + tl.arange(0, 16)), LOAD),
    "store": (lambda p: tl.store(p + 8, 1), STORE),
    "store before": (
        lambda p: tl.store(p - 1, 1),
        "would store to bytes -8..0 of pe0.rows, which has 64 bytes",
    ),
    "store of wider words": (
        lambda p: tl.store((p.to(tl.int64) + 60).to(INT64), 1),
        "bytes 60..68 of pe0.rows",
    ),
    "masked store": (lambda p: tl.store(p + tl.arange(0, 16), 1, mask=tl.arange(0, 16) < 9), STORE),
    "atomic": (lambda p: tl.atomic_add(p + 8, 1), STORE),
    "compare and swap": (lambda p: tl.atomic_cas(p + 8, 0, 1), STORE),
    "ld": (lambda p: tdl.ld(p + 8, "sys"), LOAD),
    "st_release": (lambda p: tdl.st_release(p + 8, 1, "sys"), STORE),
    "remote load": (
        lambda p: tl.load(tdl.remote_ptr(p, 1) + 8),
        "bytes 64..72 of pe1.rows, which has 64 bytes",
    ),
    "remote store": (
        lambda p: tl.store(tdl.remote_ptr(p + 8, 1), 1),
        "bytes 64..72 of pe1.rows, which has 64 bytes",
    ),
    "put to": (
        lambda p: tdl.putmem_block(p + 7, p, 16, 1),
        f"dest {WITHIN_ONE} bytes 56..72 of pe0.rows",
    ),
    "put from": (
        lambda p: tdl.putmem_nbi_block(p, p + 7, 16, 1),
        f"source {WITHIN_ONE} bytes 56..72 of pe0.rows",
    ),
    "signal of a put": (
        lambda p: tdl.putmem_signal_block(p, p, 8, p + 8, 1, SET, 1),
        f"sig_addr {WITHIN_ONE} {ROWS}",
    ),
    "get from": (lambda p: tdl.getmem_block(p, p + 8, 8, 1), f"source {WITHIN_ONE} {ROWS}"),
    "get to": (lambda p: tdl.getmem_nbi_block(p + 8, p, 8, 1), f"dest {WITHIN_ONE} {ROWS}"),
    "int_p": (lambda p: tdl.int_p(p + 8, 1, 1), f"dest {WITHIN_ONE} bytes 64..68 of pe0.rows"),
    "signal_op": (lambda p: tdl.signal_op(p + 8, 1, SET, 1), f"sig_addr {WITHIN_ONE} {ROWS}"),
    "signal_block": (lambda p: tdl.signal_block(p + 8, 1, SET, 1), f"sig_addr {WITHIN_ONE} {ROWS}"),
    "signal_wait_until": (
        lambda p: tdl.signal_wait_until(p + 8, tdl.CMP_EQ, 0),
        f"sig_addr {WITHIN_ONE} {ROWS}",
    ),
    "wait_signal": (
        lambda p: tdl.wait_signal(p + 8, tdl.CMP_EQ, 0, p, 0, 0),
        f"signal {WITHIN_ONE} {ROWS}",
    ),
    "wait_signals": (
        lambda p: tdl.wait_signals(p + 1, 8, -1, tdl.CMP_EQ, 0, p, 8),
        "bytes 8..72 of pe0.rows",
    ),
    "wait_flagged": (
        lambda p: tdl.wait_flagged(flags(p), 0, mask(), p, 0),
        "would load from bytes 64..80 of pe0.rows",
    ),
    "store_flagged": (
        lambda p: tdl.store_flagged(flags(p), *four(3), 1, mask()),
        "store to bytes 64..80 of pe0.rows",
    ),
    "wait_words": (
        lambda p: tdl.wait_words(flags(p), 0, mask(), p, 0, 1),
        "would load from bytes 64..80 of pe0.rows",
    ),
    "wait_words_of_all": (
        lambda p: tdl.wait_words_of_all(flags(p, 0), 16, 2, 0, 0, mask(), p, 1),
        "bytes 64..80 of pe0",
    ),
    "load_words": (
        lambda p: tdl.load_words(flags(p), mask()),
        "would load from bytes 64..68 of pe0.rows",
    ),
    "store_words": (
        lambda p: tdl.store_words(flags(p), *four(4), mask()),
        "would store to bytes 64..80 of pe0.rows",
    ),
    "copy to": (lambda p: tdl.copy_block(p + 8, p, 8), STORE),
    "copy from": (
        lambda p: tdl.copy_block(p, p + 1, 64),
        "would load from bytes 8..72 of pe0.rows",
    ),
    "descriptor": (
        lambda p: tl.make_tensor_descriptor(p, (4, 4), (4, ONE), (4, 4)).store(
            [0, 0], tl.zeros((4, 4), tl.int64)
        ),
        STORE,
    ),
}


@pytest.mark.parametrize("what", BEYOND)
def test_beyond_a_symmetric_tensor(what):
    """Into the padding behind it, and a second time from a pointer that was an integer in
    between."""
    function, message = BEYOND[what]
    with pytest.raises(ValueError) as raised:
        on_rows(lambda rows, _: device(function, rows))
    assert message in str(raised.value)
    (note,) = raised.value.__notes__
    assert re.fullmatch(r"raised by pe0 call\(0,0,0\) \(\S*test_bounds\.py:\d+\)", note)
    with pytest.raises(ValueError, match="which has 64 bytes"):
        on_rows(lambda rows, _: device(lambda p: function((p.to(tl.int64) + 0).to(INT64)), rows))


def distance(p, q):
    return q.to(tl.int64) - p.to(tl.int64)


THROUGH = {  # a pointer to the tensor behind, made from one to `rows`
    "addition": lambda p: p + 64,
    "a block": lambda p: p + 64 + tl.arange(0, 4),
    "another type": lambda p: (p.to(tl.pointer_type(tl.int32)) + 128).to(INT64),
    "integers": lambda p: (p.to(tl.int64) + 512).to(INT64),
    "shifts": lambda p: (((p.to(tl.int64) >> 9) + 1) << 9).to(INT64),
    "rounding": lambda p: ((p.to(tl.int64) + 1023) // 512 * 512).to(INT64),
    "masking": lambda p: ((p.to(tl.int64) + 512) & -512).to(INT64),
    "splat and reshape": lambda p: tl.trans(tl.broadcast_to((p + 64)[None, None], (2, 4))).reshape(
        8
    ),
    "where": lambda p: tl.where(tl.arange(0, 4) < 2, p + 64, p + 65),
    "remote_ptr and a distance": lambda p: (
        p.to(tl.int64) + 512 + distance(p, tdl.remote_ptr(p, 1))
    ).to(INT64),
    "join": lambda p: tl.join(p + 64 + tl.arange(0, 4), p + 64 + tl.arange(0, 4)),
    "split": lambda p: tl.split((p + 64 + tl.arange(0, 8)).reshape(4, 2))[0],
}


@pytest.mark.parametrize("how", THROUGH)
def test_into_the_next_tensor(how):
    """A pointer belongs to its tensor whatever was done to it in between."""
    with pytest.raises(ValueError, match=r"bytes 512..520 of pe[01]\.rows, which has 64 bytes"):
        on_rows(lambda rows, _: device(lambda p: tl.store(THROUGH[how](p), 7), rows))


class Within(NamedTuple):
    """Stores and copies of nothing that stay within the tensors ``p`` and ``q``, which is behind
    it.

    Attributes:
        rows, after: the words of ``p`` and ``q`` that change.
        peer: the words of PE 1's ``p`` that change.
    """

    device: Callable[[Any, Any], Any]
    rows: Sequence[int] = ()
    after: Sequence[int] = ()
    peer: Sequence[int] = ()


def masked_off(p, q):
    tl.store(p + tl.arange(0, 16), 1, mask=tl.arange(0, 16) < 8)


def rounded_up(p, q):
    tl.store((p.to(tl.int64) + 1 + (15 - p.to(tl.int64) % 16)).to(INT64), 1)


def to_either(p, q):
    tl.store(tl.where(tl.arange(0, 4) < 2, p, q) + tl.arange(0, 4), 1)


def from_memory(p, q):
    tl.store(p, q.to(tl.int64))
    tl.store(tl.load(p).to(INT64) + 7, 1)


def by_distance(p, q):
    tl.store((p.to(tl.int64) + 8 + distance(p, q)).to(INT64), 1)


def to_a_peer(p, q):
    tl.store((p.to(tl.int64) + distance(q, tdl.remote_ptr(q, 1))).to(INT64) + 7, 1)


WITHIN = {
    "the end": Within(lambda p, q: tl.store(p + 7, 1), rows=[7]),
    "lanes that are masked off": Within(masked_off, rows=range(8)),
    "a put of nothing from the end": Within(lambda p, q: tdl.putmem_block(p + 8, p + 8, 0, 1)),
    "a copy of nothing": Within(lambda p, q: tdl.copy_block(p + 8, p + 8, 0)),
    "an address rounded down": Within(
        lambda p, q: tl.store((p.to(tl.int64) - p.to(tl.int64) % 16).to(INT64), 1), rows=[0]
    ),
    "an address rounded up": Within(rounded_up, rows=[2]),
    "an offset in the other tensor": Within(
        lambda p, q: tl.store(p + distance(q, q + 3) // 8, 1), rows=[3]
    ),
    "two tensors": Within(to_either, rows=[0, 1], after=[2, 3]),
    "a pointer from memory": Within(from_memory, rows=[0], after=[7]),
    "a distance between tensors": Within(by_distance, after=[1]),
    "a peer by distance": Within(to_a_peer, peer=[7]),
}


@pytest.mark.parametrize("within", WITHIN.values(), ids=WITHIN)
def test_what_stays_within_is_no_error(within):
    def body(rows, after):
        device(within.device, rows, after)
        for tensor, words in (
            (rows, within.rows),
            (after, within.after),
            (tdcoll.peer_tensor(rows, 1), within.peer),
        ):
            assert tensor.nonzero().flatten().tolist() == list(words)

    on_rows(body)


def test_views_reach_all_of_what_they_view():
    own = torch.zeros(8, dtype=torch.int64)

    def body(rows, _):
        for tensor in (rows, own):
            device(lambda p: tl.store(p - 2 + tl.arange(0, 8), tl.arange(0, 8)), tensor[2:4])
            assert tensor.tolist() == list(range(8))
        device(lambda p: tl.store(p + 6, 1), rows[2:4])

    with pytest.raises(
        ValueError, match=r"would store to bytes 64..72 of pe0\.rows, which has 64 bytes"
    ):
        on_rows(body)
    with pytest.raises(
        ValueError, match=r"would store to bytes 64..72 of `arguments\[0\]`, which has 64 bytes"
    ):
        on_rows(lambda rows, _: device(lambda p: tl.store(p + 6, 1), own[2:4]))


@jit
def overrun(out, n):
    tl.store(out + tl.program_id(0), n)


def test_beyond_an_ordinary_tensor_with_seed_and_names():
    """What ended the process in the allocator before, some time later."""

    beyond = case(lambda pe, n: overrun[(9,)](torch.zeros(8, dtype=torch.int32), 1))
    failure = first_failure(beyond, n_pes=2, seeds=3)
    assert failure is not None
    assert failure.seed == 0
    assert "seed 0, weak" in failure.report
    assert (
        "overrun(8,0,0) would store to bytes 32..36 of `out`, which has 32 bytes" in failure.report
    )


def store_at(address, value=7):
    tl.store(tl.cast(address, tl.int64).to(INT64), value)


@pytest.mark.parametrize("through", ["argument", "memory"])
def test_addresses_without_their_tensor(through):
    """They must lie within one tensor that is alive, symmetric or not."""

    def put(address):
        if through == "argument":
            device(store_at, address)
        else:
            device(lambda pointers: store_at(tl.load(pointers)), torch.tensor([address]))

    def right(rows, _):
        own, heap = torch.zeros(8, dtype=torch.int64), tdcoll.runtime.current().heap
        put(own.data_ptr() + 56)
        put(own.untyped_storage().data_ptr())  # nobody asked the tensor for it
        put(rows.data_ptr() + 56)
        put(heap.peer_base(1) + rows.data_ptr() - heap.base)
        return own.tolist(), rows.tolist()

    assert on_rows(right) == ([7, *[0] * 6, 7], [*[0] * 7, 7])
    own = torch.zeros(8, dtype=torch.int64)
    for address, message in (
        (
            lambda rows: own.data_ptr() + 60,
            r"would store to bytes 60..68 of a tensor at .*, which has 64 bytes",
        ),
        (
            lambda rows: rows.data_ptr() + 60,
            r"would store to bytes 60..68 of pe0\.rows, which has 64 bytes",
        ),
        (
            lambda rows: rows.data_ptr() + 64,
            r"would store to pe0\.heap\[0x40\], where no symmetric tensor lives",
        ),
        (lambda rows: 8, "would store to a null pointer"),
    ):
        with pytest.raises(ValueError, match=message):
            on_rows(lambda rows, _, address=address: put(address(rows)))


def test_memory_after_it_was_freed():
    def ordinary(pe):
        own = torch.zeros(1 << 16, dtype=torch.int64)
        address = own.data_ptr()
        device(store_at, address)
        del own
        gc.collect()
        device(store_at, address)

    def symmetric(pe):
        rows = tdcoll.zeros(8, torch.int64, name="rows")
        tdcoll.free(rows)
        device(lambda p: tl.store(p, 1), rows)

    def meanwhile(pe):
        rows = tdcoll.zeros(8, torch.int64, name="rows")
        # a host thread of the process, say
        device(lambda p: (tdcoll.free(rows), tl.store(p, 1)), rows)

    for host, message in (
        (ordinary, r"call\(0,0,0\) would store to address 0x.*, where no tensor lives"),
        (symmetric, r"would store to pe0\.heap\[0x0\], where no symmetric tensor lives"),
        (meanwhile, r"would store to pe0\.rows, which was freed"),
    ):
        with pytest.raises(ValueError, match=message):
            World(1).run(host)


@pytest.mark.parametrize("how", ["put", "store"])
def test_a_pe_that_has_no_part_in_a_tensor(how):
    """The bytes there are somebody else's."""

    def host(pe):
        if pe < 2:
            tdcoll.empty(8, torch.int64, group=[0, 1], name="pair")
            rows = tdcoll.empty(8, torch.int64, group=[0, 1], name="rows")
            if pe == 0 and how == "put":
                device(lambda p: tdl.putmem_block(p, p, 8, 2), rows)
            elif pe == 0:
                device(lambda p: tl.store(tdl.remote_ptr(p, 2), 5), rows)
        else:
            tdcoll.empty(8, torch.int64, group=[2], name="others")

    with pytest.raises(ValueError, match=r"pe2, which has no part in rows: PEs \[0, 1\] made it"):
        World(3).run(host)


def test_arguments_of_several_tensors():
    """Tuples and descriptors are origins as well."""
    a, b = torch.zeros(8, dtype=torch.int64), torch.zeros(8, dtype=torch.int64)
    matrix = torch.zeros(4, 4, dtype=torch.int64)
    right = TensorDescriptor.from_tensor(matrix, [4, 4])

    def host(pe):
        device(lambda pair: tl.store(pair[1] + 7, 5), (a, b))
        device(lambda d: d.store([0, 0], tl.full((4, 4), 3, tl.int64)), right)

    World(1).run(host)
    assert b[7] == 5
    assert (matrix == 3).all()
    with pytest.raises(
        ValueError, match=r"bytes 64..72 of `arguments\[0\]\[1\]`, which has 64 bytes"
    ):
        World(1).run(lambda pe: device(lambda pair: tl.store(pair[1] + 8, 5), (a, b)))
    beyond = TensorDescriptor(matrix, [8, 4], [4, 1], [4, 4])
    with pytest.raises(
        ValueError, match=r"bytes 128..136 of `arguments\[0\]`, which has 128 bytes"
    ):
        World(1).run(lambda pe: device(lambda d: d.load([4, 0]), beyond))


@pytest.mark.skipif(
    not hasattr(interpreter, "BlockPointerHandle"), reason="this Triton has no block pointers"
)
@pytest.mark.filterwarnings("ignore:tl.make_block_ptr is deprecated")
def test_block_pointers():
    with pytest.raises(ValueError, match=r"bytes 64..72 of pe0\.rows, which has 64 bytes"):
        on_rows(
            lambda rows, _: device(
                lambda p: tl.load(tl.make_block_ptr(p, (16,), (ONE,), (0,), (16,), (0,))), rows
            )
        )


def test_storages_that_are_gone_are_forgotten() -> None:
    """However many there have been, and those that live are known."""
    storages, memory = bounds._Storages(), bytearray(64 * 10_000)

    def at(n: int) -> torch.Tensor:
        tensor = torch.frombuffer(memory, dtype=torch.uint8, offset=64 * n, count=64)
        storages.remember(tensor)
        return tensor

    kept = [at(n) for n in range(0, 10_000, 5)]
    for n in range(10_000):
        at(n)
    living = {tensor.data_ptr() for tensor in kept}
    assert living <= set(storages._seen)
    assert len(storages._seen) <= 2 * len(living)
    assert storages._begins == sorted(storages._seen)
    begin = kept[7].data_ptr()
    assert storages.around(begin + 3, begin + 9) == (begin, begin + 64)
