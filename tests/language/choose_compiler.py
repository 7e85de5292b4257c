# SPDX-License-Identifier: Apache-2.0
"""Run with TDCOLL_COMPILER=triton_dist: importing the language without that compiler, and with one
made up here."""

from __future__ import annotations

import json
import sys
import types


def attempt() -> str:
    try:
        import tdcoll.language  # noqa: F401
    except ImportError as error:
        return str(error)
    return "imported"


report: dict[str, object] = {"without": attempt()}

sys.modules["triton._C.libtriton.distributed"] = types.ModuleType("distributed")
report["without the package"] = attempt()

packages = ("triton_dist", "triton_dist.language", "triton_dist.language.extra")
for name in packages:
    package = types.ModuleType(name)
    package.__path__ = []
    sys.modules[name] = package
library = types.ModuleType("triton_dist.language.extra.libshmem_device")
sys.modules[library.__name__] = library
library.__getattr__ = lambda name: ("theirs", name)  # type: ignore[method-assign]
report["with"] = attempt()

import tdcoll.language as tdl  # noqa: E402
from tdcoll.language import nvshmem  # noqa: E402
from tdcoll.spec.functions import FUNCTIONS  # noqa: E402

report["lowering"] = tdl.LOWERING
report["theirs"] = [name for name in FUNCTIONS if getattr(tdl, name) == ("theirs", name)]
report["ours"] = [name for name in FUNCTIONS if getattr(tdl, name) is getattr(nvshmem, name)]
json.dump(report, sys.stdout)
