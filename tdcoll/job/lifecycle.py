# SPDX-License-Identifier: Apache-2.0
"""``tdcoll.initialize`` and ``tdcoll.finalize``: joining and leaving a job, explicit and
collective."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tdcoll import runtime
from tdcoll.base import arguments
from tdcoll.base.errors import (
    AlreadyInitializedError,
    CollectiveTimeout,
    TdcollError,
)
from tdcoll.base.forks import refuse_inherited_group
from tdcoll.base.torch_internals import name_groups_anew, watch_ddp
from tdcoll.job import admission, last_words
from tdcoll.job.settings import JobSettings, asks_to_share_gpus, heap_of
from tdcoll.language import INTERPRETED
from tdcoll.runtime import watch
from tdcoll.runtime.control import (
    StoreControlPlane,
    another_connection,
    generation,
    keep,
    require_equal,
)
from tdcoll.runtime.heap import SymmetricHeap
from tdcoll.runtime.store import ask
from tdcoll.runtime.topology import emulated_node

_log = logging.getLogger("tdcoll")

_FAREWELL_S = 5.0
"""How long ranks that are done wait for each other."""

_options: JobSettings | None = None
"""Those of the job that this process has joined."""
_own_group: Any = None
"""The default process group, if tdcoll made it: it stays when a job has failed, and goes with the
next."""


def is_initialized() -> bool:
    """True between :func:`initialize` and :func:`finalize` (on the calling PE, inside a
    simulation).

    Also in a forked child of such a process, which isn't a rank: see
    ``docs/distributed.md#forked-children``.

    >>> tdcoll.is_initialized()
    False
    """
    return runtime.current_or_none() is not None or runtime.inherited() is not None


def may_share_gpus() -> bool:
    """Return whether ranks may share GPUs: in this process's job, else in one that it would join
    now."""
    share_gpus = _options.share_gpus if _options is not None else asks_to_share_gpus()
    return share_gpus and not INTERPRETED


def device_index(local_rank: int, share_gpus: bool) -> int:
    """The number of the GPU that the launcher's ``LOCAL_RANK`` means; shared GPUs are dealt out in
    turn."""
    return local_rank % torch.cuda.device_count() if share_gpus else local_rank


def initialize(
    *,
    heap_bytes: int | str | None = None,
    timeout_s: float | None = None,
    emulate_nodes: int | None = None,
    share_gpus: bool | None = None,
    heap: str | None = None,
) -> None:
    """Join the job: find the ranks and nodes, make the symmetric heap. Collective.

    Under torchrun (or any launcher that sets ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and
    ``MASTER_PORT``) the default process group is made when there is none; beside one that the user
    made, that one is used, whatever its backend. With neither, the job is this process alone. Where
    kernels run interpreted (``TRITON_INTERPRET=1``), the symmetric heap is shared memory and no GPU
    is touched.

    A second call does nothing, unless it asks for other ranks or settings. After :func:`finalize`
    the ranks may join again, as often as they like; so they may when a call of this has failed, on
    all of them or on some.

    >>> tdcoll.initialize(heap_bytes="64M")

    Args:
        heap_bytes: symmetric heap of each rank, bytes, or a text such as ``"2G"``. It is taken from
            the GPU at once and does not grow; rank 0 logs its size (logger ``tdcoll``, level INFO),
            and :func:`tdcoll.heap_info` has it. Default: ``NVSHMEM_SYMMETRIC_SIZE``, else 384 MiB
            (64 MiB in the simulator).
        timeout_s: deadline of every wait, in kernels and on the host, in seconds; also for the
            other ranks to come. (A process group that is made here has PyTorch's own timeout.)
            Default: ``TDCOLL_TIMEOUT_S``, else 30.
        emulate_nodes: treat each host as this many nodes. Default: ``TDCOLL_EMULATE_NODES``, else
            1.
        share_gpus: ranks may use the same GPU, for tests of correctness: a GPU runs one process at
            a time, so that a call takes milliseconds. The device is ``LOCAL_RANK`` modulo the
            number of GPUs, and a process group that is made here has gloo for CUDA tensors, because
            NCCL refuses two ranks on one GPU. Without effect in the simulator. Default: whether
            ``TDCOLL_SHARE_GPUS`` is something other than 0.
        heap: who makes the symmetric heap on GPUs. ``"nvshmem"``: NVSHMEM. ``"torch"``: PyTorch's
            symmetric memory, for one node, where NVSHMEM need not be installed; kernels and
            algorithms that put (``"1d"``, ``"2d"``) raise an error, and ``"auto"`` never chooses
            one. ``"auto"``: NVSHMEM where nvshmem4py is installed, else PyTorch. Default:
            ``TDCOLL_HEAP``, else ``"auto"``. With ``"torch"`` the simulator refuses the same.

    Raises:
        AlreadyInitializedError: initialised before with other ranks or settings, or NVSHMEM has
            other PEs.
        RankMismatchError: ranks pass different settings, run different versions of tdcoll, PyTorch
            or Triton, or two ranks use one GPU without ``share_gpus``.
        CollectiveTimeout: a rank did not come, or the store where ranks meet does not answer.
        TdcollError: the store is gone; there is neither a GPU nor the simulator; NVSHMEM's bindings
            are missing; PyTorch cannot provide symmetric memory to these ranks; or a launcher, such
            as MPI's or Slurm's, says that there are several ranks, and nothing says which this is.
        TypeError, ValueError: an argument or environment variable is not as described.
    """
    existing = runtime.current_or_none()
    if existing is not None:
        asked = {
            "heap_bytes": None
            if heap_bytes is None
            else arguments.byte_count("heap_bytes", heap_bytes),
            "timeout_s": timeout_s,
            "emulate_nodes": emulate_nodes,
            "share_gpus": share_gpus,
            "heap": None if heap in (None, "auto") else heap_of(heap),
        }
        _refuse_other_job(existing, asked)
        return
    job = runtime.inherited()
    if job is not None:
        raise AlreadyInitializedError(
            f"initialize: {job.why_closed}. To join another job, call tdcoll.finalize() first, which forgets this one"
        )
    refuse_inherited_group("initialize")
    _be_ready()
    options = JobSettings.read(heap_bytes, timeout_s, emulate_nodes, share_gpus, heap)
    with watch.joining(*_place(), options.timeout_s):
        _initialize(options)


def _place() -> tuple[int, int, str]:
    """Return this rank, how many there are, and where they meet, as far as is known before they
    meet."""
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size(), "by the process group's store"
    variables = os.environ
    rank, world_size = (
        arguments.decimal(variables.get(name, "")) for name in ("RANK", "WORLD_SIZE")
    )
    if rank is None or world_size is None:
        return 0, 1, "alone"
    where = f"{variables.get('MASTER_ADDR')}:{variables.get('MASTER_PORT')}"
    return rank, world_size, f"meeting at {where}"


def _initialize(options: JobSettings) -> None:
    """Meet the other ranks, with a process group that is made if there is none, and join."""
    global _own_group
    makes_group = not dist.is_initialized()
    if makes_group:
        store, rank, world_size = _make_process_group(options)
        _own_group = dist.group.WORLD
    else:  # the default group's store: present with every backend, and used by no collective of the user's
        store = dist.distributed_c10d._get_default_store()
        rank = dist.get_rank()
        world_size = dist.get_world_size()
    try:
        store = _connection(store, rank, options.timeout_s)
        if not makes_group:
            store = generation(store, rank, range(world_size), "initialize", options.timeout_s)
        _install(options, store, rank, world_size)
    except BaseException:
        if makes_group:
            dist.destroy_process_group()
        raise


def join(
    store: Any,
    rank: int,
    world_size: int,
    *,
    heap_bytes: int | str | None = None,
    timeout_s: float | None = None,
) -> None:
    """:func:`initialize` for the making of the default process group, when there is a store and no
    group yet.

    Args:
        store: of ``torch.distributed``, the same for all ranks, and of this generation alone.
        rank, world_size: what the default process group will say.
    """
    _be_ready()
    options = JobSettings.read(heap_bytes, timeout_s)
    with watch.joining(rank, world_size, "by the store of the process group", options.timeout_s):
        _install(options, _connection(store, rank, options.timeout_s), rank, world_size)


def _be_ready() -> None:
    """Write down an error that ends this process, from now on. Raise if it has neither GPU nor
    simulator."""
    last_words.watch()
    last_words.report_at_exit()
    if not INTERPRETED and not torch.cuda.is_available():
        raise TdcollError(
            "no CUDA GPU is visible to PyTorch. To use the simulator, start through launch.sh or `python -m tdcoll "
            "run`, or set TRITON_INTERPRET=1 before triton is first imported"
        )


def _connection(store: Any, rank: int, timeout_s: float) -> Any:
    """``store`` by a connection of our own: a wait of ours must not hold up what PyTorch asks of it
    meanwhile."""
    return ask(lambda: another_connection(store), rank, "initialize", timeout_s)


def _install(options: JobSettings, store: Any, rank: int, world_size: int) -> None:
    global _options
    control = StoreControlPlane(dist.PrefixStore("job", store), rank, options.timeout_s)
    runtime.install(_join(options, control, dist.PrefixStore("heap", store), rank, world_size))
    watch.start(runtime.current())
    _options = options
    watch_ddp()
    if rank == 0:
        _log.info(
            "symmetric heap: %g MiB on each of %d ranks, by %s; NVSHMEM_SYMMETRIC_SIZE or initialize(heap_bytes=...) "
            "sets the size",
            round(options.heap_bytes / 2**20, 3),
            world_size,
            "the simulator"
            if INTERPRETED
            else {"nvshmem": "NVSHMEM", "torch": "PyTorch"}[options.heap],
        )


def _refuse_other_job(existing: runtime.Runtime, asked: dict[str, Any]) -> None:
    """Raise unless the job that this process has joined is the one asked for; None asks for
    nothing."""
    if _options is None:  # a simulated PE: its World has joined for it
        return
    ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else None
    if ranks not in (None, (existing.rank, existing.world_size)):
        raise AlreadyInitializedError(
            f"tdcoll is initialised as rank {existing.rank} of {existing.world_size}, but torch.distributed is now "
            f"rank {ranks[0]} of {ranks[1]}. NVSHMEM is one per process: call tdcoll.finalize() first."
        )
    for name, value in asked.items():
        current = getattr(_options, name)
        if value is not None and value != current:
            raise AlreadyInitializedError(
                f"tdcoll is initialised with {name}={current}; got {value}. Call tdcoll.finalize() first."
            )


def _make_process_group(options: JobSettings) -> tuple[Any, int, int]:
    """Make the default process group. Return its store, which is of this generation alone, its rank
    and its size."""
    # With share_gpus always gloo, also where ranks do not really share: whether another host's do
    # is not known here. Ranks that disagree still meet, because NCCL connects at its first use
    # only, and are told so by _join.
    on_gpus = "cpu:gloo,cuda:gloo" if options.share_gpus else "cpu:gloo,cuda:nccl"
    backend = "gloo" if INTERPRETED else on_gpus
    if not INTERPRETED and "LOCAL_RANK" in os.environ:
        local_rank = arguments.parse_whole(os.environ["LOCAL_RANK"], "LOCAL_RANK", 0)
        torch.cuda.set_device(device_index(local_rank, options.share_gpus))
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        store, rank, world_size = _rendezvous(options.timeout_s)
    else:
        admission.check_alone()
        store = dist.HashStore()
        rank = 0
        world_size = 1
    keep(store)
    store = generation(store, rank, range(world_size), "initialize", options.timeout_s)
    name_groups_anew()  # a default group is the first of all

    def make() -> None:  # ranks find each other's addresses in the store, and then connect
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)

    ask(
        make,
        rank,
        "initialize",
        options.timeout_s,
        "the other ranks, or the store, to make the process group",
    )
    return store, rank, world_size


def _rendezvous(timeout_s: float) -> tuple[Any, int, int]:
    """Return what the launcher's variables say: the store where ranks meet, this rank, and how many
    there are."""
    rank = int(os.environ["RANK"])
    where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    whom = f"the store at {where}, where the ranks meet: the process that serves it, or a rank, did not come"

    def meet() -> tuple[Any, int, int]:
        return next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout_s)))

    began = time.monotonic()
    try:
        return ask(meet, rank, "initialize", timeout_s, whom)
    except CollectiveTimeout:
        raise
    except (TdcollError, dist.DistStoreError) as error:
        waited = round(time.monotonic() - began, 2)
        raise CollectiveTimeout(
            f"in 'initialize' for {whom} ({error})", rank=rank, timeout_s=waited
        ) from error


def _join(
    options: JobSettings, control: StoreControlPlane, heap_store: Any, rank: int, world_size: int
) -> runtime.Runtime:
    everyone = range(world_size)
    own = (asdict(options), admission.node_name(), admission.gpu_name(), admission.software())
    answers = admission.of_same_software(control.all_gather(everyone, "initialize", own))
    require_equal(
        [given for given, _, _ in answers], everyone, "the settings of tdcoll.initialize()"
    )
    admission.refuse_impossible(
        answers, options.heap, emulate_nodes=options.emulate_nodes, share_gpus=options.share_gpus
    )
    names = [name for _, name, _ in answers]
    node_ids = tuple(
        (name, emulated_node(names[:r].count(name), names.count(name), options.emulate_nodes))
        for r, name in enumerate(names)
    )
    of_all: dict[str, Any] = {
        "pe": rank,
        "n_pes": world_size,
        "nbytes": options.heap_bytes,
        "control": control,
    }
    heap: SymmetricHeap
    if INTERPRETED:
        from tdcoll.simulator.process import ProcessHeap

        heap = ProcessHeap(**of_all, timeout_s=options.timeout_s, puts=options.heap == "nvshmem")
    elif options.heap == "torch":
        from tdcoll.job.torch_memory import TorchHeap

        heap = TorchHeap(**of_all, device=_device(), store=heap_store, timeout_s=options.timeout_s)
    else:
        from tdcoll.job.nvshmem import NvshmemHeap

        heap = NvshmemHeap(**of_all, device=_device())
        host = answers[rank][2][0]
        inaccessible = [
            r for r, (*_, gpu) in enumerate(answers) if gpu[0] == host and heap.peer_base(r) == 0
        ]
        if inaccessible:
            raise TdcollError(
                f"rank {rank}'s GPU cannot reach the memory of rank(s) {inaccessible} on the same host: peer-to-peer "
                "access is missing (see `nvidia-smi topo -p2p r`), and tdcoll needs it inside a host"
            )
    return runtime.Runtime(
        rank=rank,
        world_size=world_size,
        heap=heap,
        control=control,
        node_ids=node_ids,
        simulated=INTERPRETED,
        timeout_s=options.timeout_s,
    )


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def finalize() -> None:
    """Leave the job: close tdcoll's own contexts, free the symmetric heap, stop NVSHMEM if it runs.
    Collective.

    Tensors made by :func:`tdcoll.empty` and open contexts are invalid afterwards. The default
    process group is destroyed if :func:`initialize` made it. Does nothing when not initialised. A
    forked child only forgets the job. After a :class:`~tdcoll.base.errors.CollectiveTimeout`
    nothing collective is tried, because a peer may be gone: the process only forgets the job, and
    the process group stays. If no peer is gone, all ranks may join again; on GPUs the memory of the
    job that has failed stays taken.

    >>> tdcoll.initialize()
    >>> tdcoll.finalize()

    Raises:
        CollectiveTimeout: a wait in one of tdcoll's own contexts has expired, which hasn't been
            reported yet.
    """
    global _options
    if runtime.inherited() is not None:
        runtime.install(None)
        _destroy_own_group()
    if _options is None:
        return
    leaving = runtime.current()
    try:
        if not leaving.failed:
            with leaving.during("finalize"):
                for context in list(leaving.contexts.values()):
                    context.close()
                leaving.exchange(range(leaving.world_size), "all contexts are closed")
    except BaseException:
        leaving.heap.abort()
        raise
    finally:
        _options = None
        runtime.install(None)
        leaving.closed = True
        watch.stop()
    last_words.aborted = leaving.failed
    if leaving.failed:
        leaving.heap.abort()
        return
    leaving.kept_alive.clear()
    leaving.heap.close()
    # one rank's process holds the store: it goes when no other needs it
    with contextlib.suppress(TdcollError):
        everyone = range(leaving.world_size)
        at_most_s = min(leaving.timeout_s, _FAREWELL_S)
        leaving.control.all_gather(everyone, "leave", None, at_most_s)
    _destroy_own_group()


def _destroy_own_group() -> None:
    """Destroy the default process group if :func:`initialize` has made it."""
    global _own_group
    if _own_group is not None and dist.is_initialized() and dist.group.WORLD is _own_group:
        dist.destroy_process_group()
        _own_group = None


def _in_child() -> None:
    """Forget the settings of the rank's job, which :mod:`tdcoll.runtime` leaves."""
    global _options
    _options = None


os.register_at_fork(after_in_child=_in_child)
