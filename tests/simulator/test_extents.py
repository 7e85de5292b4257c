# SPDX-License-Identifier: Apache-2.0
"""Accesses beyond the tensor that a pointer was derived from are errors, wherever they land."""

from __future__ import annotations

import gc

import kernels
import pytest
import torch
import triton.language as tl
import triton.runtime.interpreter as interpreter

import tdcoll
import tdcoll.language as tdl
from tdcoll.language.jit import jit
from tdcoll.runtime.simulator import extents
from tdcoll.testing import World, first_failure

ROWS = "bytes 64..72 of pe0.rows, which has 64 bytes"


def run(host, n_pes=1, **options):
    return World(n_pes, **options).run(host)


def on_rows(body, n_pes=2, **options):
    """``body(rows, after)`` on PE 0; both int64 ``[8]``, symmetric, ``after`` right behind ``rows`` and its padding."""

    def host(pe):
        rows, after = (tdcoll.zeros(8, torch.int64, name=name) for name in ("rows", "after"))
        result = body(rows, after) if pe == 0 else None
        tdcoll.barrier()
        return result

    return run(host, n_pes, **options)[0]


def call(function, *pointers):
    """A kernel that calls ``function`` with its pointers."""
    kernels.CALL = function
    (kernels.call if len(pointers) == 1 else kernels.call_two)[(1,)](*pointers)


def as_flagged(p):
    return p + 2 * tl.arange(0, 4)


INT64 = tl.pointer_type(tl.int64)
ONE = tl.constexpr(1)

BEYOND = {  # what a kernel does with a pointer to 8 words -> the bytes that the error names
    "load": (lambda p: tl.load(p + 8), f"would load from {ROWS}"),
    "load of a block": (lambda p: tl.load(p + tl.arange(0, 16)), f"would load from {ROWS}"),
    "store": (lambda p: tl.store(p + 8, 1), f"would store to {ROWS}"),
    "store before": (lambda p: tl.store(p - 1, 1), "would store to bytes -8..0 of pe0.rows, which has 64 bytes"),
    "store of wider words": (
        lambda p: tl.store((p.to(tl.int64) + 60).to(INT64), 1),
        "would store to bytes 60..68 of pe0.rows",
    ),
    "masked store": (lambda p: tl.store(p + tl.arange(0, 16), 1, mask=tl.arange(0, 16) < 9), f"would store to {ROWS}"),
    "atomic": (lambda p: tl.atomic_add(p + 8, 1), f"would store to {ROWS}"),
    "compare and swap": (lambda p: tl.atomic_cas(p + 8, 0, 1), f"would store to {ROWS}"),
    "ld": (lambda p: tdl.ld(p + 8, "sys"), f"would load from {ROWS}"),
    "st_release": (lambda p: tdl.st_release(p + 8, 1, "sys"), f"would store to {ROWS}"),
    "remote load": (lambda p: tl.load(tdl.remote_ptr(p, 1) + 8), "bytes 64..72 of pe1.rows, which has 64 bytes"),
    "remote store": (lambda p: tl.store(tdl.remote_ptr(p + 8, 1), 1), "bytes 64..72 of pe1.rows, which has 64 bytes"),
    "put to": (
        lambda p: tdl.putmem_block(p + 7, p, 16, 1),
        "dest must stay within one tensor; got bytes 56..72 of pe0.rows, which has 64 bytes",
    ),
    "put from": (
        lambda p: tdl.putmem_nbi_block(p, p + 7, 16, 1),
        "source must stay within one tensor; got bytes 56..72 of pe0.rows",
    ),
    "signal of a put": (
        lambda p: tdl.putmem_signal_block(p, p, 8, p + 8, 1, tdl.SIGNAL_SET, 1),
        f"sig_addr must stay within one tensor; got {ROWS}",
    ),
    "get from": (lambda p: tdl.getmem_block(p, p + 8, 8, 1), f"source must stay within one tensor; got {ROWS}"),
    "get to": (lambda p: tdl.getmem_nbi_block(p + 8, p, 8, 1), f"dest must stay within one tensor; got {ROWS}"),
    "int_p": (lambda p: tdl.int_p(p + 8, 1, 1), "dest must stay within one tensor; got bytes 64..68 of pe0.rows"),
    "signal_op": (
        lambda p: tdl.signal_op(p + 8, 1, tdl.SIGNAL_SET, 1),
        f"sig_addr must stay within one tensor; got {ROWS}",
    ),
    "signal_block": (
        lambda p: tdl.signal_block(p + 8, 1, tdl.SIGNAL_ADD, 1),
        f"sig_addr must stay within one tensor; got {ROWS}",
    ),
    "signal_wait_until": (
        lambda p: tdl.signal_wait_until(p + 8, tdl.CMP_EQ, 0),
        f"sig_addr must stay within one tensor; got {ROWS}",
    ),
    "wait_signal": (
        lambda p: tdl.wait_signal(p + 8, tdl.CMP_EQ, 0, p, 0, 0),
        f"signal must stay within one tensor; got {ROWS}",
    ),
    "wait_signals": (
        lambda p: tdl.wait_signals(p + 1, 8, -1, tdl.CMP_EQ, 0, p, 8),
        "signals must stay within one tensor; got bytes 8..72 of pe0.rows",
    ),
    "wait_flagged": (
        lambda p: tdl.wait_flagged(as_flagged(p + 2), 0, tl.arange(0, 4) < 4, p, 0),
        "would load from bytes 64..80 of pe0.rows",
    ),
    "store_flagged": (
        lambda p: tdl.store_flagged(as_flagged(p + 2), *[tl.arange(0, 4)] * 3, 1, tl.arange(0, 4) < 4),
        "would store to bytes 64..80 of pe0.rows",
    ),
    "wait_words": (
        lambda p: tdl.wait_words(as_flagged(p + 2), 0, tl.arange(0, 4) < 4, p, 0, 1),
        "would load from bytes 64..80 of pe0.rows",
    ),
    "wait_words_of_all": (
        lambda p: tdl.wait_words_of_all(as_flagged(p), 16, 2, 0, 0, tl.arange(0, 4) < 4, p, 1),
        "would load from bytes 64..80 of pe0.rows",
    ),
    "load_words": (
        lambda p: tdl.load_words(as_flagged(p + 2), tl.arange(0, 4) < 4),
        "would load from bytes 64..68 of pe0.rows",
    ),
    "store_words": (
        lambda p: tdl.store_words(as_flagged(p + 2), *[tl.arange(0, 4)] * 4, tl.arange(0, 4) < 4),
        "would store to bytes 64..80 of pe0.rows",
    ),
    "copy to": (lambda p: tdl.copy_block(p + 8, p, 8), f"would store to {ROWS}"),
    "copy from": (lambda p: tdl.copy_block(p, p + 1, 64), "would load from bytes 8..72 of pe0.rows"),
    "descriptor": (
        lambda p: tl.make_tensor_descriptor(p, (4, 4), (4, ONE), (4, 4)).store([0, 0], tl.zeros((4, 4), tl.int64)),
        f"would store to {ROWS}",
    ),
}


@pytest.mark.parametrize("what", BEYOND)
def test_beyond_a_symmetric_tensor(what):
    """Into the padding behind it, and a second time from a pointer that was an integer in between."""
    function, message = BEYOND[what]
    with pytest.raises(ValueError) as raised:
        on_rows(lambda rows, _: call(function, rows))
    assert message in str(raised.value)
    assert raised.value.__notes__ == ["raised by pe0 call(0,0,0)"]
    with pytest.raises(ValueError, match="which has 64 bytes"):
        on_rows(lambda rows, _: call(lambda p: function((p.to(tl.int64) + 0).to(INT64)), rows))


THROUGH = {  # a pointer to the tensor behind, made from one to `rows`
    "addition": lambda p: p + 64,
    "a block": lambda p: p + 64 + tl.arange(0, 4),
    "another type": lambda p: (p.to(tl.pointer_type(tl.int32)) + 128).to(INT64),
    "integers": lambda p: (p.to(tl.int64) + 512).to(INT64),
    "shifts": lambda p: (((p.to(tl.int64) >> 9) + 1) << 9).to(INT64),
    "rounding": lambda p: ((p.to(tl.int64) + 1023) // 512 * 512).to(INT64),
    "masking": lambda p: ((p.to(tl.int64) + 512) & -512).to(INT64),
    "splat and reshape": lambda p: tl.trans(tl.broadcast_to((p + 64)[None, None], (2, 4))).reshape(8),
    "where": lambda p: tl.where(tl.arange(0, 4) < 2, p + 64, p + 65),
    "remote_ptr and a distance": lambda p: (
        p.to(tl.int64) + 512 + (tdl.remote_ptr(p, 1).to(tl.int64) - p.to(tl.int64))
    ).to(INT64),
    "join": lambda p: tl.join(p + 64 + tl.arange(0, 4), p + 64 + tl.arange(0, 4)),
    "split": lambda p: tl.split((p + 64 + tl.arange(0, 8)).reshape(4, 2))[0],
}


@pytest.mark.parametrize("how", THROUGH)
def test_into_the_next_tensor(how):
    """A pointer belongs to its tensor whatever was done to it in between."""
    with pytest.raises(ValueError, match=r"bytes 512..520 of pe[01]\.rows, which has 64 bytes"):
        on_rows(lambda rows, _: call(lambda p: tl.store(THROUGH[how](p), 7), rows))


WITHIN = {
    "the end": lambda p, q: tl.store(p + 7, 1),
    "lanes that are masked off": lambda p, q: tl.store(p + tl.arange(0, 16), 1, mask=tl.arange(0, 16) < 8),
    "a put of nothing from the end": lambda p, q: tdl.putmem_block(p + 8, p + 8, 0, 1),
    "a copy of nothing": lambda p, q: tdl.copy_block(p + 8, p + 8, 0),
    "an address rounded down": lambda p, q: tl.store((p.to(tl.int64) - p.to(tl.int64) % 16).to(INT64), 1),
    "an address rounded up": lambda p, q: tl.store((p.to(tl.int64) + 1 + (15 - p.to(tl.int64) % 16)).to(INT64), 1),
    "an offset in the other tensor": lambda p, q: tl.store(p + (((q + 3).to(tl.int64) - q.to(tl.int64)) // 8), 1),
    "two tensors": lambda p, q: tl.store(tl.where(tl.arange(0, 4) < 2, p, q) + tl.arange(0, 4), 1),
    "a pointer from memory": lambda p, q: (
        tl.store(p, q.to(tl.int64)),
        tl.store(tl.load(p).to(INT64) + 7, 1),
    ),
    "a distance between tensors": lambda p, q: tl.store(
        (p.to(tl.int64) + 8 + (q.to(tl.int64) - p.to(tl.int64))).to(INT64), 1
    ),
    "a peer by distance": lambda p, q: tl.store(
        (p.to(tl.int64) + (tdl.remote_ptr(q, 1).to(tl.int64) - q.to(tl.int64))).to(INT64) + 7, 1
    ),
}


@pytest.mark.parametrize("what", WITHIN)
def test_what_stays_within_is_no_error(what):
    on_rows(lambda rows, after: call(WITHIN[what], rows, after))


def test_views_reach_all_of_what_they_view():
    own = torch.zeros(8, dtype=torch.int64)

    def body(rows, _):
        for tensor in (rows, own):
            call(lambda p: tl.store(p - 2 + tl.arange(0, 8), tl.arange(0, 8)), tensor[2:4])
            assert tensor.tolist() == list(range(8))
        with pytest.raises(ValueError, match=r"would store to bytes 64..72 of pe0\.rows, which has 64 bytes"):
            call(lambda p: tl.store(p + 6, 1), rows[2:4])

    with pytest.raises(ValueError, match=r"bytes 64..72 of pe0"):  # a failed program ends the run
        on_rows(body)
    with pytest.raises(ValueError, match=r"would store to bytes 64..72 of `pointer`, which has 64 bytes"):
        on_rows(lambda rows, _: call(lambda p: tl.store(p + 6, 1), own[2:4]))


@jit
def overrun(out, n):
    tl.store(out + tl.program_id(0), n)


def test_beyond_an_ordinary_tensor_with_seed_and_names():
    """What ended the process in the allocator before, some time later."""

    def case(world):
        world.run(lambda pe: overrun[(9,)](torch.zeros(8, dtype=torch.int32), 1))

    failure = first_failure(case, n_pes=2, seeds=3)
    assert failure is not None
    assert failure.seed == 0
    assert "seed 0, weak" in failure.report
    assert "overrun(8,0,0) would store to bytes 32..36 of `out`, which has 32 bytes" in failure.report


@jit
def store_at(address, value):
    tl.store(tl.cast(address, tl.int64).to(tl.pointer_type(tl.int64)), value)


@jit
def store_through(pointers, value):
    tl.store(tl.load(pointers).to(tl.pointer_type(tl.int64)), value)


@pytest.mark.parametrize("through", ["argument", "memory"])
def test_addresses_without_their_tensor(through):
    """They must lie within one tensor that is alive, symmetric or not."""

    def put(address):
        if through == "argument":
            store_at[(1,)](address, 7)
        else:
            store_through[(1,)](torch.tensor([address]), 7)

    def right(rows, _):
        own = torch.zeros(8, dtype=torch.int64)
        put(own.data_ptr() + 56)
        put(own.untyped_storage().data_ptr())  # nobody asked the tensor for it
        put(rows.data_ptr() + 56)
        put(tdcoll.runtime.current().heap.peer_base(1) + rows.data_ptr() - tdcoll.runtime.current().heap.base)
        return own.tolist(), rows.tolist()

    assert on_rows(right) == ([7, *[0] * 6, 7], [*[0] * 7, 7])
    own = torch.zeros(8, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"would store to bytes 60..68 of a tensor at .*, which has 64 bytes"):
        on_rows(lambda rows, _: put(own.data_ptr() + 60))
    with pytest.raises(ValueError, match=r"would store to bytes 60..68 of pe0\.rows, which has 64 bytes"):
        on_rows(lambda rows, _: put(rows.data_ptr() + 60))
    with pytest.raises(ValueError, match=r"would store to pe0\.heap\[0x40\], where no symmetric tensor lives"):
        on_rows(lambda rows, _: put(rows.data_ptr() + 64))
    with pytest.raises(ValueError, match="would store to a null pointer"):
        on_rows(lambda rows, _: put(8))


def test_ordinary_memory_after_it_was_freed():
    def host(pe):
        own = torch.zeros(1 << 16, dtype=torch.int64)
        address = own.data_ptr()
        store_at[(1,)](address, 7)
        del own
        gc.collect()
        store_at[(1,)](address, 7)

    with pytest.raises(ValueError, match=r"store_at\(0,0,0\) would store to address 0x.*, where no tensor lives"):
        run(host)


def test_symmetric_memory_after_it_was_freed():
    def host(pe):
        rows = tdcoll.zeros(8, torch.int64, name="rows")
        tdcoll.free(rows)
        overrun[(1,)](rows, 1)

    with pytest.raises(ValueError, match=r"would store to pe0\.heap\[0x0\], where no symmetric tensor lives"):
        run(host)

    def freed_meanwhile(pe):
        rows = tdcoll.zeros(8, torch.int64, name="rows")
        kernels.CALL = lambda p: (tdcoll.free(rows), tl.store(p, 1))  # a host thread of the process, say
        kernels.call[(1,)](rows)

    with pytest.raises(ValueError, match=r"would store to pe0\.rows, which was freed"):
        run(freed_meanwhile)


@pytest.mark.parametrize("how", ["put", "store"])
def test_a_pe_that_has_no_part_in_a_tensor(how):
    """The bytes there are somebody else's."""

    def host(pe):
        if pe < 2:
            tdcoll.empty(8, torch.int64, group=[0, 1], name="pair")
            rows = tdcoll.empty(8, torch.int64, group=[0, 1], name="rows")
            if pe == 0 and how == "put":
                kernels.put[(1,)](rows, rows, 8, 2)
            elif pe == 0:
                kernels.store_to[(1,)](rows, 2)
        else:
            tdcoll.empty(8, torch.int64, group=[2], name="others")

    with pytest.raises(ValueError, match=r"pe2, which has no part in rows: PEs \[0, 1\] made it"):
        run(host, 3)


def test_argument_of_several_tensors():
    """Tuples and descriptors are origins as well."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    a, b = torch.zeros(8, dtype=torch.int64), torch.zeros(8, dtype=torch.int64)
    run(lambda pe: call(lambda pair: tl.store(pair[1] + 7, 5), (a, b)))
    assert b[7] == 5
    with pytest.raises(ValueError, match=r"bytes 64..72 of `pointer\[1\]`, which has 64 bytes"):
        run(lambda pe: call(lambda pair: tl.store(pair[1] + 8, 5), (a, b)))
    matrix = torch.zeros(4, 4, dtype=torch.int64)
    run(
        lambda pe: call(
            lambda d: d.store([0, 0], tl.full((4, 4), 3, tl.int64)), TensorDescriptor.from_tensor(matrix, [4, 4])
        )
    )
    assert (matrix == 3).all()
    beyond = TensorDescriptor(matrix, [8, 4], [4, 1], [4, 4])
    with pytest.raises(ValueError, match=r"bytes 128..136 of `pointer`, which has 128 bytes"):
        run(lambda pe: call(lambda d: d.load([4, 0]), beyond))


@pytest.mark.skipif(not hasattr(interpreter, "BlockPointerHandle"), reason="this Triton has no block pointers")
@pytest.mark.filterwarnings("ignore:tl.make_block_ptr is deprecated")
def test_block_pointers():
    with pytest.raises(ValueError, match=r"bytes 64..72 of pe0\.rows, which has 64 bytes"):
        on_rows(lambda rows, _: call(lambda p: tl.load(tl.make_block_ptr(p, (16,), (ONE,), (0,), (16,), (0,))), rows))


def test_storages_that_are_gone_are_forgotten() -> None:
    """However many there have been, and those that live are known."""
    storages, memory = extents._Storages(), bytearray(64 * 10_000)

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
