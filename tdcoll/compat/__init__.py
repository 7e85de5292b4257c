# SPDX-License-Identifier: Apache-2.0
"""Programs written for Triton-distributed, on stock Triton: ``import triton_dist`` resolves to
tdcoll.

Either start them by ``python -m tdcoll.compat script.py``, also with ``launch.sh``, or call
:func:`activate` before the first ``import triton_dist``. ``docs/triton-distributed.md`` lists what
is the same, what differs, and what is missing. Names and behaviour follow
ByteDance-Seed/Triton-distributed at commit 1512a81189315eca7ba38f884aaf239469a88ba3; the code is
tdcoll's own.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType

__all__ = ["NotProvidedError", "activate"]

_HERE = "tdcoll.compat.triton_dist"

_ALIASES = {
    "triton_dist.kernels.common_ops": "triton_dist.kernels.nvidia.common_ops",
    "triton_dist.language.extra.cuda": "triton_dist.language.extra",
    "triton_dist.language.extra.cuda.language_extra": "triton_dist.language.extra.language_extra",
    "triton_dist.language.extra.cuda.libnvshmem_device": "triton_dist.language.extra.libshmem_device",
}
"""Modules that are another name of one that has their functions."""


class NotProvidedError(ImportError):
    """A module of Triton-distributed that tdcoll.compat does not provide."""


class _Loader(importlib.abc.Loader):
    """A loader that gives a module of tdcoll under another name."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._spec: importlib.machinery.ModuleSpec | None = None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._target)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # the import system has put the other name's there


class _Finder(importlib.abc.MetaPathFinder):
    """A finder of ``triton_dist``, of modules below it, and of the parts of ``nvshmem`` that tdcoll
    replaces."""

    def __init__(self, without_nvshmem: bool) -> None:
        packages = (
            ("nvshmem", "nvshmem.bindings", "nvshmem.bindings.nvshmem") if without_nvshmem else ()
        )
        self._nvshmem = {"nvshmem.core", *packages}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname in self._nvshmem:
            ours = f"{_HERE}.nvshmem"
        elif fullname.partition(".")[0] == "triton_dist":
            ours = _HERE + _ALIASES.get(fullname, fullname).removeprefix("triton_dist")
        else:
            return None
        try:
            found = importlib.util.find_spec(ours)
        except ModuleNotFoundError:  # of what is around it
            found = None
        if found is None:
            raise NotProvidedError(
                f"tdcoll.compat does not provide the module {fullname}; docs/triton-distributed.md lists what it has",
                name=fullname,
            )
        is_package = found.submodule_search_locations is not None
        return importlib.machinery.ModuleSpec(fullname, _Loader(ours), is_package=is_package)


def activate() -> None:
    """Let ``import triton_dist`` and its submodules resolve to tdcoll in this process, and
    ``nvshmem.core`` as well.

    Idempotent. On the simulator it also puts stand-ins for ``torch.cuda`` in place, and lets the
    device ``"cuda"`` be the CPU. There, and if ranks share GPUs, collectives of process groups are
    complete when they return. If ``TDCOLL_EMULATE_NODES`` is set, ``LOCAL_WORLD_SIZE`` and
    ``LOCAL_RANK`` become those of the emulated node.

    Raises:
        ImportError: a real Triton-distributed is imported already, or installed; the message has
            its path.
    """
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    _refuse_the_real_one()
    from tdcoll.language import INTERPRETED

    sys.meta_path.insert(0, _Finder(INTERPRETED or importlib.util.find_spec("nvshmem") is None))
    from tdcoll.compat import stand_ins
    from tdcoll.job import lifecycle

    stand_ins.emulate_nodes()
    if INTERPRETED:
        stand_ins.replace_cuda()
    if INTERPRETED or lifecycle.may_share_gpus():
        stand_ins.wait_for_collectives()


def _refuse_the_real_one() -> None:
    loaded = sys.modules.get("triton_dist")
    found = loaded.__spec__ if loaded is not None else importlib.util.find_spec("triton_dist")
    if found is not None:
        where = found.origin or next(iter(found.submodule_search_locations or ["?"]))
        raise ImportError(
            f"the real triton_dist is {'installed' if loaded is None else 'imported already'}, at {where}, and is the "
            "one that is used: uninstall it to run on tdcoll, or start the program without tdcoll.compat"
        )
