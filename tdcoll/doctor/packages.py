# SPDX-License-Identifier: Apache-2.0
"""Checks of what is installed. Pure."""

from __future__ import annotations

from tdcoll.doctor.facts import Facts, Line, note, ok, problem, version

__all__ = ["PACKAGE_CHECKS"]

_REINSTALL = "pip install --force-reinstall --no-deps triton=={0}"


def _extra(facts: Facts) -> str:
    """The extra that PyTorch's CUDA asks for, in words."""
    major = version(facts.of("torch").get("cuda") or "")[0]
    which = f"'.[cu{major}]'" if major in (12, 13) else "'.[cu12]' or '.[cu13]'"
    return f"pip install -e {which} in tdcoll's folder, or let launch.sh make an environment"


def python(facts: Facts) -> Line:
    text = ".".join(map(str, facts.python))
    if facts.python < (3, 10):
        return problem("Python", text, "tdcoll needs 3.10 or newer")
    return ok("Python", text)


def torch(facts: Facts) -> Line:
    found = facts.of("torch")
    if found.get("missing"):
        return problem("torch", "not installed", "pip install 'torch>=2.10', or let launch.sh make an environment")
    if "error" in found:
        return problem("torch", f"cannot be imported: {found['error']}", "reinstall it: pip install -U 'torch>=2.10'")
    text = f"{found['version']}, " + (f"for CUDA {found['cuda']}" if found.get("cuda") else "without CUDA")
    if version(found["version"]) < (2, 10):
        return problem("torch", text, "tdcoll needs 2.10 or newer: pip install -U 'torch>=2.10'")
    if facts.simulated:
        return ok("torch", text)
    if found.get("hip"):
        return problem("torch", f"{found['version']}, for ROCm", "tdcoll runs on NVIDIA GPUs; install a CUDA build")
    if not found.get("cuda"):
        advice = "install the CUDA build of PyTorch (pytorch.org), or set TRITON_INTERPRET=1 for the simulator"
        return problem("torch", text, advice)
    return ok("torch", text)


def triton(facts: Facts) -> Line:
    found = facts.of("triton")
    if found.get("missing"):
        return problem("triton", "not installed", "pip install -U torch, which brings the Triton that it fits to")
    recorded = facts.distributions.get("triton")
    reinstall = _REINSTALL.format(recorded or "3.6.0")
    wants_fork = facts.environment.get("TDCOLL_COMPILER") == "triton_dist" and not facts.simulated
    overwriters = [name for name in facts.triton_owners if name.replace("_", "-") == "triton-dist"]
    if overwriters and not (wants_fork and found.get("distributed")):
        text = f"{overwriters[0]} {facts.distributions.get('triton-dist', '')} has overwritten the triton package"
        return problem("triton", " ".join(text.split()), f"pip uninstall {overwriters[0]}, then {reinstall}")
    if "error" in found:
        return problem("triton", f"cannot be imported: {found['error']}", reinstall)
    if found.get("compiler"):
        return problem("triton", f"{found['version']} has no compiler: {found['compiler']}", reinstall)
    loaded = version(found["version"])
    if recorded and loaded != version(recorded):
        text = f"{found['version']} is what Python finds, and pip has installed {recorded}"
        return problem("triton", text, f"something has overwritten it, or comes first in PYTHONPATH: {reinstall}")
    if not (3, 6) <= loaded < (4, 0):
        return problem("triton", str(found["version"]), "tdcoll needs 3.6 or newer, below 4: pip install -U torch")
    if wants_fork and not found.get("distributed"):
        advice = "install Triton-distributed with its compiler, or unset TDCOLL_COMPILER"
        return problem("triton", f"{found['version']}; TDCOLL_COMPILER=triton_dist asks for another compiler", advice)
    return ok("triton", f"{found['version']}" + (", of Triton-distributed" if overwriters else ""))


def numpy(facts: Facts) -> Line:
    found = facts.of("numpy")
    if "error" in found:
        return problem("numpy", "not installed" if found.get("missing") else found["error"], "pip install -U numpy")
    return ok("numpy", found["version"])


def greenlet(facts: Facts) -> Line:
    found = facts.of("greenlet")
    if "error" not in found:
        return ok("greenlet", found["version"])
    text = "not installed" if found.get("missing") else found["error"]
    if facts.simulated:
        return problem("greenlet", text, "the simulator needs it: pip install 'greenlet>=3'")
    return note("greenlet", text, "only the simulator needs it: pip install 'greenlet>=3'")


def _installed(facts: Facts, name: str) -> list[tuple[str, str]]:
    names = [f"{name}-cu{major}" for major in (12, 13)]
    return [(name, facts.distributions[name]) for name in names if name in facts.distributions]


def nvshmem(facts: Facts) -> list[Line]:
    """Bindings and libraries by their versions, then whether they load, then the device library."""
    heap = facts.environment.get("TDCOLL_HEAP") or "auto"
    if heap == "torch" or (heap == "auto" and facts.of("nvshmem").get("missing")):
        if not facts.simulated and facts.nnodes == 1:
            why = "TDCOLL_HEAP=torch" if heap == "torch" else "not installed"
            text = f"{why}: the symmetric heap is PyTorch's, on one host"
            return [note("NVSHMEM", text, f"jobs on several hosts, and algorithms that put, need it: {_extra(facts)}")]
    lines = []
    cuda = version(facts.of("torch").get("cuda") or "")[0]
    for name in ("nvshmem4py", "nvidia-nvshmem"):
        installed = _installed(facts, name)
        text = ", ".join(" ".join(pair) for pair in installed)
        if len(installed) > 1:
            advice = f"they share files: pip uninstall {' '.join(pair[0] for pair in installed)}, then {_extra(facts)}"
            lines.append(note(name, text, advice) if facts.simulated else problem(name, text, advice))
        elif facts.simulated:
            lines.append(ok(name, text or "not installed; the simulator does not need it"))
        elif not installed:
            # NVSHMEM itself may be the system's, or that of NVSHMEM_HOME; whether it loads is the next line.
            missing = note if name == "nvidia-nvshmem" and facts.bitcode else problem
            lines.append(missing(name, "not installed by pip", _extra(facts)))
        elif cuda and not installed[0][0].endswith(f"cu{cuda}"):
            advice = f"pip uninstall {installed[0][0]}, then {_extra(facts)}"
            lines.append(problem(name, f"{text}, and torch is for CUDA {facts.of('torch')['cuda']}", advice))
        elif name == "nvidia-nvshmem" and version(installed[0][1]) < (3, 0):
            lines.append(problem(name, text, f"tdcoll needs NVSHMEM 3: {_extra(facts)}"))
        else:
            lines.append(ok(name, text))
    lines.append(_host_library(facts))
    lines.append(_device_library(facts))
    return lines


def _host_library(facts: Facts) -> Line:
    name, found = "NVSHMEM host library", facts.of("nvshmem")
    if facts.simulated:
        return ok(name, "not needed by the simulator")
    if "error" in found:
        return problem(name, f"does not load: {found['error']}", _extra(facts))
    text = found.get("library") or "loads"
    folder = facts.nvshmem_libraries
    if folder and folder not in facts.environment.get("LD_LIBRARY_PATH", "").split(":"):
        advice = "it loads its plug-ins by bare name: start with launch.sh, or `source setenv.sh` before"
        return note(name, f"{text}; its folder is not in LD_LIBRARY_PATH", advice)
    return ok(name, text)


def _device_library(facts: Facts) -> Line:
    name = "NVSHMEM device library"
    if facts.bitcode:
        return ok(name, facts.bitcode)
    if facts.simulated:
        return ok(name, "none; the simulator does not need it")
    text = f"libnvshmem_device.bc is not in {', '.join(facts.bitcode_places) or 'any nvidia package'}"
    return problem(name, text, f"{_extra(facts)}; or set NVSHMEM_HOME")


def driver(facts: Facts) -> Line:
    name, found = "CUDA driver", facts.of("driver")
    if facts.simulated:
        return ok(name, facts.driver or "not needed by the simulator")
    if "error" in found:
        advice = "install NVIDIA's driver; in a container, start it with the GPUs (docker run --gpus all)"
        return problem(name, f"libcuda.so.1 does not answer: {found['error']}", advice)
    knows, wanted = tuple(found["cuda"]), version(facts.of("torch").get("cuda") or "")
    numbers = f"CUDA {knows[0]}.{knows[1]}"
    text = f"{facts.driver}, for up to {numbers}" if facts.driver else f"for up to {numbers}"
    if knows[0] < wanted[0]:
        advice = f"a newer driver, or a PyTorch for CUDA {knows[0]} with tdcoll's extra cu{knows[0]}"
        return problem(name, f"{text}; torch is for CUDA {wanted[0]}.{wanted[1]}", advice)
    if knows < wanted:
        advice = "within a major version this works; take a newer driver if kernels fail to load"
        return note(name, f"{text}; torch is for CUDA {wanted[0]}.{wanted[1]}", advice)
    return ok(name, text)


PACKAGE_CHECKS = (python, torch, triton, numpy, greenlet, nvshmem, driver)
