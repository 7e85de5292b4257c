# shellcheck shell=bash
# SPDX-License-Identifier: Apache-2.0
#
# Makes tdcoll usable in this shell:
#
#     source setenv.sh
#
# It takes the active Python if that has what tdcoll needs, else the repository's own .venv, which it makes the first
# time (minutes; later a fraction of a second), and says on stderr what it chose. It leaves the shell's options, traps,
# IFS, directory and arguments alone. Source it again at any time, for instance after CUDA_VISIBLE_DEVICES changed.
#
# What you may set before (a value of yours always wins over a default; the others are in docs/environment.md):
#
#   PYTHON                  the Python to look at first, and to make .venv with
#   TDCOLL_PIP_ARGS         more arguments for pip when .venv is made. Example, PyTorch's CPU-only build on Linux:
#                           TDCOLL_PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"
#   TDCOLL_REQUIRES         more modules that the Python must have, such as "pytest ruff"
#   TDCOLL_NNODES           hosts of the job, if you call torchrun by hand on several
#   TRITON_INTERPRET        1: the simulator, even with GPUs; 0: never the simulator
#   CUDA_VISIBLE_DEVICES    the GPUs to use; empty: none, so the simulator
#
# It exports the environment of tdcoll/tools/setenv.py, and TDCOLL_PYTHON, the Python that it chose.

if [ -z "${BASH_VERSION-}" ]; then
    echo "tdcoll: setenv.sh needs bash: run 'bash', then 'source setenv.sh'" >&2
    return 1
fi
if [[ ${BASH_SOURCE[0]} == "$0" ]]; then
    echo "tdcoll: setenv.sh changes the shell that sources it: use 'source setenv.sh'" >&2
    exit 2
fi

_tdcoll_setenv() {
    local root assignments
    root=$(CDPATH='' builtin cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P) || return 1
    export "${!NVSHMEM_@}" "${!TDCOLL_@}" TRITON_INTERPRET # variables of the shell alone would not reach Python
    assignments=$(PYTHON=${PYTHON-} sh "$root/launch.sh" --setenv) && eval "$assignments"
}

# As a condition, so that a failing command inside does not end a shell that runs with set -e.
if _tdcoll_setenv; then
    unset -f _tdcoll_setenv
else
    unset -f _tdcoll_setenv
    return 1
fi
