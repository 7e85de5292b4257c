# SPDX-License-Identifier: Apache-2.0
"""``tdcoll.initialize`` and ``tdcoll.finalize``: joining and leaving a job, explicit and collective."""

from __future__ import annotations

import importlib.util
import logging
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tdcoll import arguments, environment, runtime
from tdcoll.errors import AlreadyInitializedError, CollectiveTimeout, RankMismatchError, TdcollError
from tdcoll.language import INTERPRETED
from tdcoll.runtime import last_words
from tdcoll.runtime.control import StoreControlPlane, generation, keep, require_equal
from tdcoll.runtime.heap import SymmetricHeap
from tdcoll.runtime.store import ask
from tdcoll.runtime.topology import emulated_node
from tdcoll.torch_internals import name_groups_anew, watch_ddp

__all__ = ["device_index", "finalize", "heap_of", "initialize", "is_initialized", "join", "may_share_gpus"]

_log = logging.getLogger("tdcoll")

DEFAULT_TIMEOUT_S = 30.0


_HEAPS = ("auto", "nvshmem", "torch")


def heap_of(heap: str | None = None) -> str:
    """Return ``"nvshmem"`` or ``"torch"``: the heap that is asked for, or the one that ``"auto"`` means here.

    Raises:
        TypeError, ValueError: ``heap`` or ``TDCOLL_HEAP`` is none of :data:`_HEAPS`.
    """
    name = "heap" if heap is not None else "TDCOLL_HEAP"
    asked = heap if heap is not None else os.environ.get(name) or "auto"
    arguments.instance(name, asked, str, "a string")
    if asked not in _HEAPS:
        raise ValueError(f"{name} must be one of {', '.join(_HEAPS)}; got {asked!r}")
    if asked != "auto":
        return asked
    return "nvshmem" if INTERPRETED or _has_nvshmem() else "torch"


def _has_nvshmem() -> bool:
    """Return whether NVSHMEM's Python bindings are installed.

    What tdcoll.compat puts in their place lies in no folder, and does not count.
    """
    found = importlib.util.find_spec("nvshmem")
    return found is not None and bool(found.submodule_search_locations)


def _asks_to_share_gpus() -> bool:
    return os.environ.get("TDCOLL_SHARE_GPUS", "0") not in ("", "0")


@dataclass(frozen=True)
class _Settings:
    """What ``initialize`` was asked for; must agree over the ranks."""

    heap_bytes: int
    timeout_s: float
    emulate_nodes: int
    share_gpus: bool = False
    heap: str = "nvshmem"

    @classmethod
    def read(
        cls,
        heap_bytes: int | str | None,
        timeout_s: float | None,
        emulate_nodes: int | None = None,
        share_gpus: bool | None = None,
        heap: str | None = None,
    ) -> _Settings:
        environment.warn_of_unknown()
        env = os.environ
        if heap_bytes is None:
            heap_bytes = environment.heap_bytes(INTERPRETED)
        if timeout_s is None:
            try:
                timeout_s = float(env.get("TDCOLL_TIMEOUT_S", "") or DEFAULT_TIMEOUT_S)
            except ValueError:
                text = env["TDCOLL_TIMEOUT_S"]
                raise ValueError(f"TDCOLL_TIMEOUT_S must be a number of seconds, got {text!r}") from None
            arguments.seconds("TDCOLL_TIMEOUT_S", timeout_s)
        if emulate_nodes is None:
            text = env.get("TDCOLL_EMULATE_NODES", "") or "1"
            emulate_nodes = arguments.parse_whole(text, "TDCOLL_EMULATE_NODES", 1)
        if share_gpus is None:
            share_gpus = _asks_to_share_gpus()
        return cls(
            arguments.byte_count("heap_bytes", heap_bytes),
            arguments.seconds("timeout_s", timeout_s),
            arguments.whole("emulate_nodes", emulate_nodes, 1),
            bool(share_gpus),
            heap_of(heap),
        )


@dataclass
class _Job:
    """What this process has to undo in :func:`finalize`."""

    settings: _Settings
    control: StoreControlPlane


_job: _Job | None = None
_own_group: Any = None
"""The default process group, if tdcoll made it: it stays when a job has failed, and goes with the next."""


def is_initialized() -> bool:
    """True between :func:`initialize` and :func:`finalize` (on the calling PE, inside a simulation)."""
    return runtime.current_or_none() is not None


def may_share_gpus() -> bool:
    """Return whether ranks may share GPUs: in this process's job, else in one that it would join now."""
    share_gpus = _job.settings.share_gpus if _job is not None else _asks_to_share_gpus()
    return share_gpus and not INTERPRETED


def device_index(local_rank: int, share_gpus: bool) -> int:
    """The number of the GPU that the launcher's ``LOCAL_RANK`` means; shared GPUs are dealt out in turn."""
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

    Under torchrun (or any launcher that sets ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT``) the
    default process group is made when there is none; beside one that the user made, that one is used, whatever
    its backend. With neither, the job is this process alone. Where kernels run interpreted
    (``TRITON_INTERPRET=1``), the symmetric heap is shared memory and no GPU is touched.

    A second call does nothing, unless it asks for other ranks or settings. After :func:`finalize` the ranks may join
    again, as often as they like; so they may when a call of this has failed, on all of them or on some.

    Args:
        heap_bytes: symmetric heap of each rank, bytes, or a text such as ``"2G"``. Default:
            ``NVSHMEM_SYMMETRIC_SIZE``, else 384 MiB (64 MiB in the simulator). The heap is taken from the GPU at
            once, and does not grow; its size is logged (logger ``tdcoll``, level INFO, on rank 0), and is the
            ``total`` of :func:`tdcoll.heap_info`.
        timeout_s: deadline of every wait, in kernels and on the host, in seconds; also for the other ranks to come. (A
            process group that is made here has PyTorch's own timeout for its own collectives.) Default:
            ``TDCOLL_TIMEOUT_S``, else 30.
        emulate_nodes: treat each host as this many nodes. Default: ``TDCOLL_EMULATE_NODES``, else 1.
        share_gpus: ranks may use the same GPU, for tests of correctness: a GPU runs one process at a time, so that a
            call takes milliseconds. A process group that is made here then has gloo for CUDA tensors, because NCCL
            refuses two ranks on one GPU, and the device is ``LOCAL_RANK`` modulo the number of GPUs. Default: whether
            ``TDCOLL_SHARE_GPUS`` is set to something other than 0. Without effect in the simulator.
        heap: who makes the symmetric heap on GPUs. ``"nvshmem"``: NVSHMEM, which is started. ``"torch"``: PyTorch's
            symmetric memory, for the GPUs of one node that reach each other's memory; NVSHMEM need not be installed.
            Kernels and algorithms that put (``"1d"``, ``"2d"``) then raise an error; ``"auto"`` never chooses one.
            ``"auto"``: NVSHMEM where nvshmem4py is installed, else PyTorch. Default: ``TDCOLL_HEAP``, else ``"auto"``.
            The simulator has one heap; with ``"torch"`` it refuses what PyTorch's does not have.

    Raises:
        AlreadyInitializedError: initialised before with other ranks or settings, or NVSHMEM has other PEs.
        RankMismatchError: ranks pass different settings, or two ranks use one GPU without ``share_gpus``.
        CollectiveTimeout: a rank did not come, or the store where ranks meet does not answer.
        TdcollError: the store is gone; there is no GPU, and kernels are not interpreted; NVSHMEM's bindings are
            missing; or PyTorch's symmetric memory is asked for, and the job has several nodes or PyTorch cannot provide
            it.
        TypeError, ValueError: an argument or environment variable is not as described.
    """
    if (existing := runtime.current_or_none()) is not None:
        asked = {
            "heap_bytes": None if heap_bytes is None else arguments.byte_count("heap_bytes", heap_bytes),
            "timeout_s": timeout_s,
            "emulate_nodes": emulate_nodes,
            "share_gpus": share_gpus,
            "heap": None if heap in (None, "auto") else heap_of(heap),
        }
        _refuse_other_job(existing, asked)
        return
    last_words.watch()
    settings = _Settings.read(heap_bytes, timeout_s, emulate_nodes, share_gpus, heap)
    _refuse_no_gpu()
    made_process_group = _ensure_process_group(settings)
    global _own_group
    if made_process_group:
        _own_group = dist.group.WORLD
    try:
        # The default group's store: present with every backend, and used by no collective of the user's.
        rank, world_size = dist.get_rank(), dist.get_world_size()
        store = _connection(dist.distributed_c10d._get_default_store(), rank, settings.timeout_s)
        store = generation(store, rank, range(world_size), "initialize", settings.timeout_s)
        _install(settings, store, rank, world_size)
    except BaseException:
        if made_process_group:
            dist.destroy_process_group()
        raise


def join(
    store: Any, rank: int, world_size: int, *, heap_bytes: int | str | None = None, timeout_s: float | None = None
) -> None:
    """:func:`initialize` for the making of the default process group, when there is a store and no group yet.

    Args:
        store: of ``torch.distributed``, the same for all ranks, and of this generation alone.
        rank, world_size: what the default process group will say.
        heap_bytes, timeout_s: as for :func:`initialize`.

    Raises:
        AlreadyInitializedError: this process has joined a job before.
        Others: as :func:`initialize`.
    """
    if runtime.current_or_none() is not None:
        raise AlreadyInitializedError("tdcoll is initialised already; call tdcoll.finalize() first")
    last_words.watch()
    settings = _Settings.read(heap_bytes, timeout_s)
    _refuse_no_gpu()
    _install(settings, _connection(store, rank, settings.timeout_s), rank, world_size)


def _refuse_no_gpu() -> None:
    if not INTERPRETED and not torch.cuda.is_available():
        raise TdcollError(
            "no CUDA GPU is visible to PyTorch. To use the simulator, start through launch.sh or set "
            "TRITON_INTERPRET=1 before triton is first imported."
        )


def _connection(store: Any, rank: int, timeout_s: float) -> Any:
    """``store`` by a connection of our own: a wait of ours must not hold up what PyTorch asks of it meanwhile."""
    return ask(store.clone, rank, "initialize", timeout_s) if hasattr(store, "clone") else store


def _install(settings: _Settings, store: Any, rank: int, world_size: int) -> None:
    global _job
    control = StoreControlPlane(dist.PrefixStore("job", store), rank, settings.timeout_s)
    joined = _join(settings, control, dist.PrefixStore("heap", store), rank, world_size)
    runtime.install(joined)
    _job = _Job(settings, control)
    last_words.gave_up = False
    watch_ddp()
    if rank == 0:
        _log.info(
            "symmetric heap: %g MiB on each of %d ranks, by %s; NVSHMEM_SYMMETRIC_SIZE or initialize(heap_bytes=...) "
            "sets the size",
            round(settings.heap_bytes / 2**20, 3),
            world_size,
            "the simulator" if INTERPRETED else {"nvshmem": "NVSHMEM", "torch": "PyTorch"}[settings.heap],
        )


def _refuse_other_job(existing: runtime.Runtime, asked: dict[str, Any]) -> None:
    """Raise unless the job that this process has joined is the one asked for; None asks for nothing."""
    if _job is None:  # a simulated PE: its World has joined for it
        return
    ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else None
    if ranks not in (None, (existing.rank, existing.world_size)):
        raise AlreadyInitializedError(
            f"tdcoll is initialised as rank {existing.rank} of {existing.world_size}, but torch.distributed is now "
            f"rank {ranks[0]} of {ranks[1]}. NVSHMEM is one per process: call tdcoll.finalize() first."
        )
    for name, value in asked.items():
        if value is not None and value != getattr(_job.settings, name):
            raise AlreadyInitializedError(
                f"tdcoll is initialised with {name}={getattr(_job.settings, name)}; got {value}. Call "
                "tdcoll.finalize() first."
            )


def _ensure_process_group(settings: _Settings) -> bool:
    """Make the default process group if there is none; True if this call made it."""
    if dist.is_initialized():
        return False
    # With share_gpus always gloo, also where ranks do not really share: whether another host's do is not known here.
    # Ranks that disagree still meet, because NCCL connects at its first use only, and are told so by _join.
    on_gpus = "cpu:gloo,cuda:gloo" if settings.share_gpus else "cpu:gloo,cuda:nccl"
    backend = "gloo" if INTERPRETED else on_gpus
    if not INTERPRETED and "LOCAL_RANK" in os.environ:
        torch.cuda.set_device(
            device_index(arguments.parse_whole(os.environ["LOCAL_RANK"], "LOCAL_RANK", 0), settings.share_gpus)
        )
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        store, rank, world_size = _rendezvous(settings.timeout_s)
        keep(store)
        store = generation(store, rank, range(world_size), "initialize", settings.timeout_s)
        name_groups_anew()  # a default group is the first of all

        def make() -> None:
            dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)

        # Ranks find each other's addresses in the store, and then connect.
        ask(make, rank, "initialize", settings.timeout_s, "the other ranks, or the store, to make the process group")
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return True


def _rendezvous(timeout_s: float) -> tuple[Any, int, int]:
    """Return what the launcher's variables say: the store where ranks meet, this rank, and how many there are.

    Raises:
        CollectiveTimeout: the store does not answer, or not all ranks have come to it.
    """
    rank, where = int(os.environ["RANK"]), f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    whom = f"the store at {where}, where the ranks meet: the process that serves it, or a rank, did not come"

    def meet() -> tuple[Any, int, int]:
        return next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout_s)))

    began = time.monotonic()
    try:
        return ask(meet, rank, "initialize", timeout_s, whom)
    except (TdcollError, dist.DistStoreError) as error:
        if isinstance(error, CollectiveTimeout):
            raise
        waited = round(time.monotonic() - began, 2)
        raise CollectiveTimeout(f"in 'initialize' for {whom} ({error})", rank=rank, timeout_s=waited) from error


def _node_name() -> str:
    """Return what names this process's node: the launcher's number of it, else the host's name."""
    for variable in ("GROUP_RANK", "SLURM_NODEID"):
        if os.environ.get(variable):
            return f"{variable}={os.environ[variable]}"
    return socket.gethostname()


def _gpu_name() -> Any:
    if INTERPRETED:
        return None
    return socket.gethostname(), str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


def _refuse_settings_of_one_host(hosts: set[str]) -> None:
    """Raise where several hosts have settings, as setenv.sh makes them for one, with which NVSHMEM would hang."""
    for variable, value in (("NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME", "lo"), ("NVSHMEM_REMOTE_TRANSPORT", "none")):
        if len(hosts) > 1 and os.environ.get(variable) == value:
            raise TdcollError(
                f"{variable}={value} is for one host, and the job has {len(hosts)} ({', '.join(sorted(hosts))}). Start "
                "it with launch.sh --nnodes, set TDCOLL_NNODES before sourcing setenv.sh, or set the variable yourself."
            )


def _refuse_several_nodes(settings: _Settings, answers: Sequence[Any]) -> None:
    """Raise unless PyTorch's symmetric memory, if it is asked for, can serve the ranks with these names and GPUs."""
    if settings.heap != "torch":
        return
    if settings.emulate_nodes > 1:
        raise TdcollError(
            f"emulate_nodes={settings.emulate_nodes} needs puts, which heap='torch' does not have; use heap='nvshmem'"
        )
    # Two agents of torchrun on one host are two nodes, between which algorithms put.
    nodes = sorted({name if gpu is None or name == gpu[0] else f"{name} on {gpu[0]}" for _, name, gpu in answers})
    if len(nodes) > 1:
        raise TdcollError(
            f"heap='torch' is for one node, and the job has {len(nodes)} ({', '.join(nodes)}): install tdcoll[cu12] or "
            "tdcoll[cu13] on all of them, which bring NVSHMEM's Python bindings, and use heap='nvshmem'"
        )
    gpus = [answer[2] for answer in answers]
    if not INTERPRETED and len(set(gpus)) < len(gpus):
        raise TdcollError("share_gpus needs heap='nvshmem': PyTorch's symmetric memory wants a GPU for each rank")


def _join(
    settings: _Settings, control: StoreControlPlane, heap_store: Any, rank: int, world_size: int
) -> runtime.Runtime:
    everyone = range(world_size)
    answers = control.all_gather(everyone, "initialize", (asdict(settings), _node_name(), _gpu_name()))
    require_equal([answer[0] for answer in answers], everyone, "the settings of tdcoll.initialize()")
    gpus: dict[Any, int] = {}
    for other, (_, _, gpu) in enumerate(answers):
        if gpu is not None and gpus.setdefault(gpu, other) != other and not settings.share_gpus:
            raise RankMismatchError(
                f"ranks {gpus[gpu]} and {other} use the same GPU; call torch.cuda.set_device(LOCAL_RANK) before "
                "tdcoll.initialize(). For tests of correctness ranks may share GPUs: launch.sh --share-gpus, "
                "TDCOLL_SHARE_GPUS=1 or initialize(share_gpus=True)"
            )
    _refuse_several_nodes(settings, answers)
    if not INTERPRETED and settings.heap == "nvshmem":
        _refuse_settings_of_one_host({answer[2][0] for answer in answers})
    names = [answer[1] for answer in answers]
    node_ids = tuple(
        (name, emulated_node(names[:r].count(name), names.count(name), settings.emulate_nodes))
        for r, name in enumerate(names)
    )
    heap: SymmetricHeap
    if INTERPRETED:
        from tdcoll.runtime.simulator.process import ProcessHeap

        heap = ProcessHeap(
            pe=rank,
            n_pes=world_size,
            nbytes=settings.heap_bytes,
            control=control,
            timeout_s=settings.timeout_s,
            puts=settings.heap == "nvshmem",
        )
    elif settings.heap == "torch":
        from tdcoll.runtime.torch_memory import TorchHeap

        device = torch.device("cuda", torch.cuda.current_device())
        heap = TorchHeap(
            pe=rank,
            n_pes=world_size,
            nbytes=settings.heap_bytes,
            device=device,
            store=heap_store,
            control=control,
            timeout_s=settings.timeout_s,
        )
    else:
        from tdcoll.runtime.nvshmem import NvshmemHeap

        device = torch.device("cuda", torch.cuda.current_device())
        heap = NvshmemHeap(pe=rank, n_pes=world_size, nbytes=settings.heap_bytes, device=device, control=control)
        same_host = [r for r, answer in enumerate(answers) if answer[2][0] == answers[rank][2][0]]
        if unreachable := [r for r in same_host if heap.peer_base(r) == 0]:
            raise TdcollError(
                f"rank {rank}'s GPU cannot reach the memory of rank(s) {unreachable} on the same host: peer-to-peer "
                "access is missing (see `nvidia-smi topo -p2p r`), and tdcoll needs it inside a host"
            )
    return runtime.Runtime(
        rank=rank,
        world_size=world_size,
        heap=heap,
        control=control,
        node_ids=node_ids,
        simulated=INTERPRETED,
        timeout_s=settings.timeout_s,
    )


def finalize() -> None:
    """Leave the job: close tdcoll's own contexts, free the symmetric heap, stop NVSHMEM if it runs. Collective.

    Tensors made by :func:`tdcoll.empty` and open contexts are invalid afterwards. The default process group is
    destroyed if :func:`initialize` made it. Does nothing when not initialised. After a
    :class:`~tdcoll.errors.CollectiveTimeout` nothing collective is tried, because a peer may be gone: the process
    only forgets the job, and the process group stays. If no peer is gone, all ranks may join again; on GPUs the
    memory of the job that has failed stays taken.

    Raises:
        CollectiveTimeout: a wait in one of tdcoll's own contexts has expired, and nobody has been told yet.
    """
    global _job, _own_group
    if _job is None:
        return
    leaving, job = runtime.current(), _job
    try:
        if not leaving.failed:
            for context in list(leaving.contexts.values()):
                context.close()
            leaving.exchange(range(leaving.world_size), "finalize")
    except BaseException:
        leaving.heap.abandon()
        raise
    finally:
        _job = None
        runtime.install(None)
        leaving.closed = True
    last_words.gave_up = leaving.failed
    if leaving.failed:
        leaving.heap.abandon()
        return
    leaving.held.clear()
    leaving.heap.close()
    job.control.leave(range(leaving.world_size))
    if _own_group is not None and dist.is_initialized() and dist.group.WORLD is _own_group:
        dist.destroy_process_group()
        _own_group = None
