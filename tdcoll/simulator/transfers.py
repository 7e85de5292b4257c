# SPDX-License-Identifier: Apache-2.0
"""Puts, gets and signals of programs, their order, and barriers: NVSHMEM's functions on the
simulated machine."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from tdcoll.simulator.machine import Machine
from tdcoll.simulator.memory import write_word
from tdcoll.simulator.network import Transfer
from tdcoll.simulator.places import kernel_place
from tdcoll.simulator.pointers import PointerAccess, replace_word
from tdcoll.simulator.races import GETS, RELAXED, Message
from tdcoll.spec import constants as c

_SIGNAL_ADD = c.SIGNAL_ADD.value


def _send(
    machine: Machine,
    pe: int,
    kind: str,
    dest: int = 0,
    source: int | bytes = 0,
    nbytes: int = 0,
    *,
    signal: Callable[[], None] | None = None,
    done: Callable[[], None] | None = None,
    move: Callable[[int, Any, int], Any] | None = None,
    is_flag: bool = False,
    message: Message | None = None,
) -> Transfer | None:
    """Give a message of the running program to the network, or without one deliver it. See
    :class:`Transfer`."""
    program = machine.program
    network = machine.network
    scheduler = machine.scheduler
    if network is not None:
        pieces = (
            [(dest, source, nbytes)] if is_flag and nbytes else network.cut(dest, source, nbytes)
        )
        move = _noted(machine, message, move or partial(machine.unseen.write_from, program.pe))
        return network.issue(
            program, pe, kind, pieces, signal=signal, done=done, move=move, is_flag=is_flag
        )
    if nbytes:
        _noted(machine, message, ctypes.memmove)(dest, source, nbytes)
        scheduler.notify_words(dest, nbytes)
    if signal is not None:
        if nbytes:
            scheduler.turn()
        signal()
    if done is not None:
        done()
    return None


def _noted(
    machine: Machine, message: Message | None, move: Callable[[int, Any, int], Any]
) -> Callable[[int, Any, int], Any]:
    """Return a ``move`` that shows what it does to the races."""
    if machine.races is None or message is None:
        return move
    races = machine.races

    def noted(dest: int, source: Any, nbytes: int) -> None:
        races.moved(message, dest, source, nbytes)
        move(dest, source, nbytes)

    return noted


def put(
    machine: Machine,
    dest: int,
    source: int | bytes,
    nbytes: int,
    pe: int,
    *,
    nbi: bool,
    signal: tuple[int, int, int] | None = None,
) -> None:
    """Copy to ``pe``, then update the signal ``(address, value, operation)`` there.

    A ``source`` of bytes is a word, which arrives whole. If ``nbi``, an address is read when the
    bytes leave.
    """
    remote = machine.on(pe, dest) if nbytes else 0
    counts = machine.counts[machine.program.pe]
    counts.puts += 1
    counts.put_bytes += nbytes
    if not machine.accessible(pe):
        counts.inter_node_bytes += nbytes
    is_word = isinstance(source, bytes)
    address = 0 if isinstance(source, bytes) else source
    message = None
    if machine.races is not None:
        read = None if nbi or is_word else (address, nbytes)
        message = machine.races.message("puts", pe, read=read)
    update = None if signal is None else _update(machine, message, pe, *signal)
    done = machine.span("put" if signal is None else "put+signal", pe, nbytes, remote, address)
    payload = source if nbi or is_word else ctypes.string_at(address, nbytes)
    _send(
        machine,
        pe,
        "put",
        remote,
        payload,
        nbytes,
        signal=update,
        done=done,
        is_flag=is_word,
        message=message,
    )
    machine.scheduler.turn()


def get(machine: Machine, dest: int, source: int, nbytes: int, pe: int, *, nbi: bool) -> None:
    """Copy from ``pe``. Returns when the bytes are here, or at once if ``nbi``."""
    program = machine.program
    remote = machine.on(pe, source) if nbytes else 0
    done = machine.span("get", pe, nbytes, remote)

    def fetch(to: int, source: int, length: int) -> None:
        with machine.unseen.as_seen_by(program.pe, source, source + length):
            data = ctypes.string_at(source, length)
        ctypes.memmove(to, data, length)

    races = machine.races
    message = None if races is None else races.message(GETS, pe)
    operation = _send(
        machine, pe, "get", dest, remote, nbytes, done=done, move=fetch, message=message
    )
    if nbi or operation is None:
        machine.scheduler.turn()
    else:
        what = f"waits for a get of {nbytes} bytes from pe{pe}"
        machine.scheduler.wait(lambda: operation.arrived, lambda: what, [("arrived", program.pe)])
    if races is not None and message is not None and not nbi:
        races.arrived(message)


def signal(machine: Machine, address: int, value: int, operation: int, pe: int) -> None:
    """Update a signal of ``pe``."""
    message = None if machine.races is None else machine.races.message("signals", pe)
    _send(machine, pe, "signal", signal=_update(machine, message, pe, address, value, operation))
    machine.scheduler.turn()


def _update(
    machine: Machine, message: Message | None, pe: int, address: int, value: int, operation: int
) -> Callable[[], None]:
    """Return the update of ``pe``'s signal, to be called when it arrives."""
    program = machine.program
    memory = machine.memory
    remote = machine.on(pe, address)
    machine.counts[program.pe].signals += 1

    def update() -> None:
        with machine.unseen.as_seen_by(program.pe, remote, remote + 8):
            if operation == _SIGNAL_ADD:
                replace_word(
                    remote,
                    np.dtype(np.uint64),
                    lambda old: (int(old) + value) & 0xFFFF_FFFF_FFFF_FFFF,
                )
            else:
                write_word(remote, value)
        if machine.races is not None and message is not None:
            machine.races.signalled(message, remote, adds=operation == _SIGNAL_ADD)
        machine.scheduler.notify(remote)
        if machine.trace is not None:
            sign = "+=" if operation == _SIGNAL_ADD else "="
            machine.trace.instant(
                pe, f"{memory.describe(remote)} {sign} {value}", {"from": program.name}
            )

    return update


def atomic(
    machine: Machine,
    address: int,
    kind: Any,
    pe: int,
    change: Callable[[Any], Any],
    *,
    fetches: bool,
) -> Any:
    """Replace a word of ``pe`` by ``change(word)``, atomically.

    Args:
        address: of the word here, a multiple of its size.
        kind: its numpy type.
        fetches: if true, make the change at once, and return the old word. Otherwise it travels as
            a signal does.
    """
    program = machine.program
    network = machine.network
    remote = machine.on(pe, address)
    update = partial(PointerAccess(machine).change_word, program.pe, remote, kind, change)
    if not fetches:
        announced = _announcing(machine, remote, pe, update)
        _send(machine, pe, "signal", signal=announced, is_flag=True)
        machine.scheduler.turn()
        return None
    if network is not None:
        network.flush_fenced(program.pe, pe)
    before = update()
    if machine.races is not None:
        places = np.array([remote], np.uint64)
        machine.races.change(places, kind.itemsize, None, RELAXED, system=True)
    # maybe in a loop
    machine.scheduler.poll(remote, lambda: f"asks for {machine.memory.describe(remote)}")
    return before


def _announcing(
    machine: Machine, address: int, pe: int, update: Callable[[], Any]
) -> Callable[[], Any]:
    """Return an ``update`` of a word of ``pe`` that is a signal to the races."""
    if machine.races is None:
        return update
    races = machine.races
    message = races.message("adds by an atomic", pe)

    def changed() -> None:
        update()
        races.signalled(message, address, adds=True)

    return changed


def fence(machine: Machine) -> None:
    """Order the PE's messages to each PE before and after this."""
    if machine.races is not None:
        machine.races.fence()
    program = machine.program
    network = machine.network
    if network is not None:
        # NVSHMEM's fence is a membar as well, so other PEs see this one's stores to its own memory.
        network.flush_stores(program, to=program.pe)
        network.flush_released(program.pe)
        network.fence(program.pe)


def quiet(machine: Machine) -> None:
    """Wait until all messages of the PE so far have arrived, except the stores of other
    programs."""
    program = machine.program
    network = machine.network
    if network is None:
        machine.scheduler.turn()
        _completed(machine)
        return
    network.flush_released(program.pe)
    sent = network.outstanding(program)
    machine.scheduler.wait(
        lambda: all(operation.arrived for operation in sent),
        lambda: (
            f"waits in quiet for {sum(not operation.arrived for operation in sent)} operation(s)"
        ),
        [("arrived", program.pe)],
    )
    _completed(machine)


def _completed(machine: Machine) -> None:
    if machine.races is not None:
        machine.races.quiet()


def release(machine: Machine, *, system: bool = True) -> None:
    """Order the running program's earlier stores, but not its puts, before later operations.

    It also orders stores that other programs of the PE have released, and that it may have
    acquired.

    Args:
        system: for all PEs; otherwise for the programs of this one.
    """
    program = machine.program
    network = machine.network
    if network is None:
        return
    if system:
        network.flush_stores(program)
        network.flush_released(program.pe)
    else:
        network.release_stores(program)


def complete_descriptor_stores(machine: Machine) -> None:
    """Let releases of the running program order the stores through descriptors that it has
    begun."""
    if machine.network is not None:
        machine.network.complete_descriptor_stores(machine.program)
    if machine.races is not None:
        machine.races.complete_descriptor_stores()
    machine.scheduler.turn()


def barrier(machine: Machine, name: str) -> None:
    """Wait for every PE; ``barrier_all`` completes what the PE has sent first."""
    if name == "barrier_all":
        quiet(machine)
    arrivals = machine.arrivals[name]
    pe = machine.program.pe
    scheduler = machine.scheduler
    arrivals[pe] += 1
    generation = arrivals[pe]
    races = machine.races
    if races is not None:
        races.barrier()
        races.arrive((name, generation))
    place = kernel_place()
    scheduler.notify(("barrier", name))

    def describe() -> str:
        missing = [f"pe{other}" for other, count in enumerate(arrivals) if count < generation]
        return f"waits in {name} number {generation} for {', '.join(missing)}{place.note()}"

    with machine.slice(name):
        scheduler.wait(lambda: min(arrivals) >= generation, describe, [("barrier", name)])
    if races is not None:
        races.depart((name, generation))
        races.barrier()
