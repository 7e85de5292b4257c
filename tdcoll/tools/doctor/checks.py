# SPDX-License-Identifier: Apache-2.0
"""Judge facts. Every check is a pure function of
:class:`~tdcoll.tools.doctor.facts.MachineFacts`."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from tdcoll.base import environment
from tdcoll.base.versions import OLDEST_TORCH, OLDEST_TRITON, TRITON_BELOW, text_of, version_of
from tdcoll.tools.doctor.facts import MachineFacts
from tdcoll.tools.setenv import COMMAND, IN_CHECKOUT, LAUNCHER


class Line(NamedTuple):
    """One line of the report.

    Attributes:
        status: ``ok``, ``note`` (look at it if something doesn't work) or ``problem`` (something
            will not work).
        advice: what to do; empty if there is nothing to do.
    """

    status: str
    name: str
    text: str
    advice: str = ""


def ok(name: str, text: str) -> Line:
    return Line("ok", name, text)


def note(name: str, text: str, advice: str = "") -> Line:
    return Line("note", name, text, advice)


def problem(name: str, text: str, advice: str) -> Line:
    return Line("problem", name, text, advice)


def diagnose(facts: MachineFacts) -> list[Line]:
    """Return every line of the report but that of the small job."""
    return [line for check in _CHECKS for line in check(facts)]


# ---------------------------------------------------------------------- packages


def _python(facts: MachineFacts) -> list[Line]:
    text = ".".join(map(str, facts.python))
    return [
        ok("Python", text)
        if facts.python >= (3, 10)
        else problem("Python", text, "tdcoll needs 3.10 or newer")
    ]


def _failure(facts: MachineFacts, package: str) -> str:
    """Return why a package cannot be imported, in words; empty if it can."""
    found = facts.found[package]
    if found.get("missing"):
        return "not installed"
    return f"cannot be imported: {found['error']}" if "error" in found else ""


def _torch(facts: MachineFacts) -> list[Line]:
    name = "torch"
    found = facts.found["torch"]
    install = f"pip install -U 'torch>={text_of(OLDEST_TORCH)}'"
    failure = _failure(facts, name)
    if failure:
        return [
            problem(
                name,
                failure,
                f"{install}, or let launch.sh make an environment" if IN_CHECKOUT else install,
            )
        ]
    text = f"{found['version']}, " + (
        f"for CUDA {found['cuda']}" if found["cuda"] else "without CUDA"
    )
    if version_of(found["version"]) < OLDEST_TORCH:
        return [problem(name, text, f"tdcoll needs {text_of(OLDEST_TORCH)} or newer: {install}")]
    if not found["cuda"] and not facts.simulated:
        advice = "install a CUDA build of PyTorch (pytorch.org), or set TRITON_INTERPRET=1 to use the simulator"
        return [problem(name, text, advice)]
    return [ok(name, text)]


def _triton(facts: MachineFacts) -> list[Line]:
    name = "triton"
    version = facts.found["triton"].get("version", "")
    installed = facts.distributions.get("triton")
    oldest = text_of(OLDEST_TRITON)
    below = text_of(TRITON_BELOW)
    which = f"triton=={installed}" if installed else f"'triton>={oldest},<{below}'"
    reinstall = f"pip install --force-reinstall --no-deps {which}"
    fork = facts.distributions.get("triton-dist")
    if fork and (facts.simulated or facts.environment.get("TDCOLL_COMPILER") != "triton_dist"):
        text = f"triton-dist {fork} has overwritten the triton package"
        return [problem(name, text, f"pip uninstall triton-dist, then {reinstall}")]
    failure = _failure(facts, name)
    if failure:
        return [problem(name, f"{version} {failure}".lstrip(), reinstall)]
    if installed and version_of(version) != version_of(installed):
        text = f"Python finds {version}, and pip has installed {installed}"
        return [
            problem(
                name,
                text,
                f"another Triton has overwritten it or comes first in PYTHONPATH: {reinstall}",
            )
        ]
    if not OLDEST_TRITON <= version_of(version) < TRITON_BELOW:
        return [
            problem(
                name,
                version,
                f"tdcoll needs {oldest} or newer, below {below}: pip install -U torch",
            )
        ]
    return [ok(name, version)]


def _small_packages(facts: MachineFacts) -> list[Line]:
    lines = []
    extra = "-e '.[sim]'" if IN_CHECKOUT else "'tdcoll[sim]'"
    for name, needed, advice in (
        ("numpy", True, "pip install -U numpy"),
        ("greenlet", facts.simulated, f"the simulator needs it: pip install {extra}"),
    ):
        failure = _failure(facts, name)
        if failure:
            lines.append(Line("problem" if needed else "note", name, failure, advice))
        else:
            lines.append(ok(name, facts.found[name]["version"]))
    return lines


def _nvshmem(facts: MachineFacts) -> list[Line]:
    name = "NVSHMEM"
    found = facts.found["nvshmem"]
    cuda = facts.found["torch"].get("cuda")
    installed = {key: value for key, value in facts.distributions.items() if "nvshmem" in key}
    text = (
        ", ".join(f"{key} {value}" for key, value in installed.items())
        or "no packages installed by pip"
    )
    if facts.simulated:
        return [ok(name, f"{text}; the simulator doesn't need it")]
    major = version_of(cuda)[0]
    extra = (
        f"pip install -e '.[cu{major}]'"
        if major in (12, 13)
        else "pip install -e '.[cu12]' or '.[cu13]'"
    )
    heap = facts.environment.get("TDCOLL_HEAP") or "auto"
    if heap == "torch" or (heap == "auto" and found.get("missing")):
        why = "TDCOLL_HEAP=torch" if heap == "torch" else "not installed"
        advice = f"jobs on several hosts, and algorithms that put, need NVSHMEM: {extra}"
        return [note(name, f"{why}: PyTorch makes the symmetric heap", advice)]
    wrong = [key for key in installed if cuda and not key.endswith(f"cu{major}")]
    if wrong:
        advice = f"packages for CUDA 12 and 13 share files: pip uninstall {' '.join(installed)}, then {extra}"
        return [
            problem(
                name,
                f"{text}: {', '.join(wrong)} and torch, for CUDA {cuda}, don't fit together",
                advice,
            )
        ]
    failure = _failure(facts, "nvshmem")
    if failure:
        return [problem(name, f"{text}; nvshmem4py {failure}", extra)]
    libraries = facts.found["device library"]
    if "error" in libraries:
        return [problem(name, f"{text}; {libraries['error']}", extra)]
    policy = facts.environment.get("NVSHMEM_TMA_POLICY")
    if policy:
        if policy.strip().upper() != "DISABLE":
            text = f"NVSHMEM_TMA_POLICY={policy} lets NVSHMEM copy asynchronously, which tdcoll refuses"
            return [problem(name, text, "unset NVSHMEM_TMA_POLICY")]
    files = [f"{arch}: {path}" for arch, path in libraries.items()]
    return [ok(name, "; ".join([text, found["library"] or "its library loads", *files]))]


def _driver(facts: MachineFacts) -> list[Line]:
    name = "CUDA driver"
    found = facts.found["driver"]
    if facts.simulated:
        return [ok(name, "the simulator doesn't need it")]
    if "error" in found:
        advice = "install NVIDIA's driver; in a container, start it with the GPUs (docker run --gpus all)"
        return [problem(name, f"libcuda.so.1 doesn't answer: {found['error']}", advice)]
    supported = tuple(found["cuda"])
    cuda = facts.found["torch"].get("cuda")
    text = f"supports CUDA up to {supported[0]}.{supported[1]}"
    if cuda and supported[0] < version_of(cuda)[0]:
        advice = f"install a newer driver, or a PyTorch for CUDA {supported[0]} and tdcoll's extra cu{supported[0]}"
        return [problem(name, f"{text}; torch is for CUDA {cuda}", advice)]
    if cuda and supported < version_of(cuda):
        advice = "this works within a major version; install a newer driver if kernels fail to load"
        return [note(name, f"{text}; torch is for CUDA {cuda}", advice)]
    return [ok(name, text)]


# ---------------------------------------------------------------------- devices


def _gpus(facts: MachineFacts) -> list[Line]:
    name = "GPUs"
    if facts.simulated:
        return [_simulator(name, facts)]
    if not facts.gpus:
        error = facts.found["gpus"].get("error")
        text = f"PyTorch cannot ask for them: {error}" if error else "PyTorch sees none"
        advice = "see the lines on torch and the driver; `nvidia-smi` has to work. TRITON_INTERPRET=1 is the simulator"
        return [problem(name, f"{text}; nvidia-smi counts {facts.visible_gpus}", advice)]
    kinds = Counter("{} (sm_{}{})".format(gpu["name"], *gpu["capability"]) for gpu in facts.gpus)
    text = ", ".join(f"{count} × {kind}" for kind, count in kinds.items())
    if min(tuple(gpu["capability"]) for gpu in facts.gpus) < (8, 0):
        return [note(name, text, "Triton supports compute capability 8.0 and newer")]
    return [ok(name, text)]


def _simulator(name: str, facts: MachineFacts) -> Line:
    """Name the launchers that run kernels in the simulator, because not all of them do."""
    asked, visible = (
        facts.environment.get(key) for key in ("TRITON_INTERPRET", "CUDA_VISIBLE_DEVICES")
    )
    if asked and "TRITON_INTERPRET=1" not in facts.environment.get("TDCOLL_SETENV", "").split():
        return ok(name, f"not used: TRITON_INTERPRET={asked} asks for the simulator")
    text = "none"
    advice = (
        "install NVIDIA's driver; in a container, start it with the GPUs (docker run --gpus all)"
    )
    if visible is not None:
        text = f"none with CUDA_VISIBLE_DEVICES={visible}"
        advice = "unset CUDA_VISIBLE_DEVICES"
    torchrun = (
        '`torchrun script.py` raises "no CUDA GPU is visible" unless TRITON_INTERPRET=1 is set'
    )
    text = f"{text}: {LAUNCHER} runs kernels in the simulator; {torchrun}"
    return note(name, text, f"if this host has GPUs, {advice}")


def _peer_access(facts: MachineFacts) -> list[Line]:
    name = "peer access"
    if facts.simulated or len(facts.gpus) < 2:
        return []
    missing = sorted({(min(pair), max(pair)) for pair in facts.found["gpus"]["no_peer_access"]})
    if missing:
        shown = ", ".join(f"{i} and {j}" for i, j in missing[:6]) + (
            ", ..." if len(missing) > 6 else ""
        )
        advice = (
            "see `nvidia-smi topo -p2p r`: some GPUs, and MIG instances, have none, and PCI access control (ACS) or an "
            "IOMMU may forbid it. Choose GPUs that have it with CUDA_VISIBLE_DEVICES"
        )
        return [
            problem(
                name,
                f"none between GPUs {shown}; tdcoll needs it between all GPUs of a host",
                advice,
            )
        ]
    return [ok(name, f"between all {len(facts.gpus)} GPUs")]


# ---------------------------------------------------------------------- settings


def _setenv(facts: MachineFacts) -> list[Line]:
    """Compare this shell, whose environment torchrun passes on, with the environment that launch.sh
    makes."""
    name = "setenv.sh" if IN_CHECKOUT else "environment"
    here = facts.environment
    launched = facts.launched
    if facts.simulated:
        return []
    names = {key for key in {*here, *launched} if key.startswith("NVSHMEM_")} | {
        "LD_LIBRARY_PATH",
        "TRITON_INTERPRET",
    }
    differs = [
        f"{key}={launched[key]}" if key in launched else f"no {key}"
        for key in sorted(names)
        if set(here.get(key, "").split(":")) != set(launched.get(key, "").split(":"))
    ]
    if differs:
        text = f"this shell lacks what {LAUNCHER} sets: {', '.join(differs)}"
        advice = (
            "`source setenv.sh` before torchrun"
            if IN_CHECKOUT
            else f"start jobs by `{COMMAND}` instead of torchrun"
        )
        return [note(name, text, advice)]
    return [ok(name, f"this shell has the variables that {LAUNCHER} sets")]


def _variables(facts: MachineFacts) -> list[Line]:
    """Find variables that look like tdcoll's and are none of them. The small job shows values that
    tdcoll refuses."""
    name = "variables"
    lines = []
    for variable, meant in environment.unknown(facts.environment).items():
        text = f"{variable} is none of tdcoll's and has no effect"
        lines.append(
            problem(name, text, f"did you mean {meant}?") if meant else note(name, text, "unset it")
        )
    return lines or [ok(name, "none of tdcoll's is misspelt")]


_CHECKS = (
    *(_python, _torch, _triton, _small_packages, _nvshmem, _driver),
    *(_gpus, _peer_access, _setenv, _variables),
)
