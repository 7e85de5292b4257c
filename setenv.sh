# shellcheck shell=bash
# SPDX-License-Identifier: Apache-2.0
#
# Makes tdcoll usable in this shell:
#
#     source setenv.sh
#
# It takes the active Python if that has what tdcoll needs, else the repository's own .venv, which it makes the first
# time (minutes; later a fraction of a second), and says on stderr, a line each, what it chose. It leaves the shell's
# options, traps, IFS, directory and arguments alone, and may be sourced again at any time, for instance after
# CUDA_VISIBLE_DEVICES changed.
#
# What you may set before (a value of yours always wins over a default of this file):
#
#   PYTHON                  the Python to look at first, and to make .venv with
#   TDCOLL_PIP_ARGS         more arguments for pip when .venv is made. Example, PyTorch's CPU-only build on Linux:
#                           TDCOLL_PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"
#   TDCOLL_REQUIRES         more modules that the Python must have, such as "pytest ruff"
#   TRITON_INTERPRET        1: the simulator, even with GPUs; 0: never the simulator
#   CUDA_VISIBLE_DEVICES    the GPUs to use; empty: none, so the simulator
#   NVSHMEM_*, LD_LIBRARY_PATH, PYTHONPATH    see where they are exported below
#
# launch.sh also sets TDCOLL_NNODES and TDCOLL_RDZV (HOST:PORT), from which this file knows whether the job has one
# host or several. Set TDCOLL_NNODES yourself if you call torchrun by hand on several.
#
# What it leaves: the exports below, and three variables of the shell that launch.sh reads: TDCOLL_PYTHON (the Python
# it chose), TDCOLL_GPUS (how many GPUs are visible) and TDCOLL_MODE (gpu or simulator).

if [ -z "${BASH_VERSION-}" ]; then
    echo "tdcoll: setenv.sh needs bash: run 'bash', then 'source setenv.sh'" >&2
    return 1
fi
if [[ ${BASH_SOURCE[0]} == "$0" ]]; then
    echo "tdcoll: setenv.sh changes the shell that sources it: use 'source setenv.sh'" >&2
    exit 2
fi

_tdcoll_say() { printf 'tdcoll: %s\n' "$*" >&2; }

# Which defaults this file has exported itself, as words NAME=VALUE in TDCOLL_SETENV. A value that is still the one it
# exported may be replaced or withdrawn when it is sourced again (one host, then several; GPUs, then none); any other
# value is the user's. It is exported because launch.sh is another process.
_tdcoll_is_ours() { # NAME
    [[ -n ${!1-} && " ${TDCOLL_SETENV-} " == *" $1=${!1} "* ]]
}

_tdcoll_forget() { # NAME
    local word words kept=''
    read -r -a words <<<"${TDCOLL_SETENV-}"
    for word in ${words[@]+"${words[@]}"}; do
        [[ $word == "$1="* ]] || kept+="${kept:+ }$word"
    done
    if [[ -n $kept ]]; then export TDCOLL_SETENV="$kept"; else unset TDCOLL_SETENV; fi
}

_tdcoll_default() { # NAME VALUE: exports it unless the user has set NAME
    if [[ -z ${!1-} ]] || _tdcoll_is_ours "$1"; then
        _tdcoll_forget "$1"
        export "$1=$2" TDCOLL_SETENV="${TDCOLL_SETENV:+$TDCOLL_SETENV }$1=$2"
    else
        export "${1?}" # the user's; a variable of the shell alone would not reach Python
    fi
}

_tdcoll_withdraw() { # NAME: a default that an earlier sourcing exported does not hold any more
    if _tdcoll_is_ours "$1"; then
        _tdcoll_forget "$1"
        unset "$1"
    fi
}

_tdcoll_whose() { # NAME REASON: in words, for the lines on stderr
    if _tdcoll_is_ours "$1"; then echo "${!1} ($2)"; else echo "${!1} (your $1)"; fi
}

_tdcoll_prepend() { # NAME DIRECTORY: makes the directory the first of a path variable, and there only once
    local rest=":${!1-}:"
    while [[ $rest == *":$2:"* ]]; do rest=${rest/":$2:"/:}; done
    rest=${rest#:} rest=${rest%:}
    export "$1=$2${rest:+:$rest}"
}

# Prints two numbers: the host's GPUs, from nvidia-smi (or the device files, in a container without nvidia-smi), and
# those that CUDA_VISIBLE_DEVICES leaves visible. CUDA ignores everything from the first entry that does not exist.
_tdcoll_count_gpus() {
    local found=0 seen=0 line device
    if type -P nvidia-smi >/dev/null; then
        while read -r line; do
            [[ $line == "GPU "* ]] && found=$((found + 1))
        done < <(nvidia-smi -L 2>/dev/null || true)
    else
        while [[ -e /dev/nvidia$found ]]; do found=$((found + 1)); done
    fi
    if [[ -z ${CUDA_VISIBLE_DEVICES+set} ]]; then
        seen=$found
    elif ((found)); then
        while read -r -d , device; do
            device=${device//[[:space:]]/}
            if [[ $device =~ ^[0-9]+$ ]]; then
                ((10#$device < found)) || break
            elif ! [[ $device =~ ^(GPU|MIG)- ]]; then
                break
            fi
            seen=$((seen + 1))
        done <<<"$CUDA_VISIBLE_DEVICES,"
    fi
    echo "$found $seen"
}

# Looks at a Python without importing anything large. Prints, a line each: ok or what speaks against it, sys.executable,
# its versions in words, the directory of NVSHMEM's libraries (or -), and where it would import tdcoll from (or -).
_tdcoll_probe_source='
import importlib.util, os, re, sys

sys.path[:] = [entry for entry in sys.path if entry]  # not the current directory
modules = sys.argv[1:]


def package(name):
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    # A directory that happens to have the name is not the package.
    return spec if spec is not None and spec.origin is not None else None


def version(name, file):
    spec = package(name)
    if spec is None:
        return ""
    try:
        text = open(os.path.join(os.path.dirname(spec.origin), file), encoding="utf-8").read()
    except OSError:
        return ""
    found = re.search(r"^__version__[^=\n]*= *.([0-9][^\"\x27]*)", text, re.M)
    return found.group(1) if found else ""


def older(text, least):
    found = re.match(r"(\d+)\.(\d+)", text)
    return bool(found) and (int(found[1]), int(found[2])) < least


torch, triton = version("torch", "version.py"), version("triton", "__init__.py")
missing = [name for name in modules if package(name) is None]
if sys.version_info < (3, 10):
    verdict = "is Python %d.%d, needs 3.10 or newer" % sys.version_info[:2]
elif missing:
    verdict = "lacks " + ", ".join(missing)
elif older(torch, (2, 10)):
    verdict = "has torch " + torch + ", needs 2.10 or newer"
elif older(triton, (3, 6)) or not older(triton or "3.6", (4, 0)):
    verdict = "has triton " + triton + ", needs 3.6 or newer, below 4"
else:
    verdict = "ok"

libraries = "-"
spec = importlib.util.find_spec("nvidia")
for parent in (spec.submodule_search_locations or []) if spec is not None else []:
    candidate = os.path.join(parent, "nvshmem", "lib")
    if os.path.isdir(candidate):
        libraries = os.path.abspath(candidate)
        break

spec = package("tdcoll")
tdcoll = os.path.dirname(os.path.dirname(os.path.realpath(spec.origin))) if spec is not None else "-"

print(verdict)
print(sys.executable)
print("Python %d.%d.%d, torch %s, triton %s" % (*sys.version_info[:3], torch or "?", triton or "?"))
print(libraries)
print(tdcoll)
'

# The interface of the default route with the lowest metric, straight from the kernel's table.
_tdcoll_default_route_interface() {
    local table=/proc/net/route interface destination metric mask best='' least='' _
    [[ -r $table ]] || return 0
    while read -r interface destination _ _ _ _ metric mask _; do
        if [[ $destination == 00000000 && $mask == 00000000 && (-z $least || $metric -lt $least) ]]; then
            best=$interface least=$metric
        fi
    done <"$table"
    echo "$best"
}

# What .venv is installed from; if this changes, pip runs again. .venv/.tdcoll-stamp holds it and a last line with the
# kind of .venv: gpu or cpu.
_tdcoll_inputs() { # ROOT
    echo "$1"
    cksum <"$1/pyproject.toml"
    cksum <"$1/constraints-cpu.txt"
}

# Makes or updates .venv. Runs in a subshell, under a lock: several agents may start on one host at once.
_tdcoll_make_venv() { # ROOT KIND BASE_PYTHON INPUTS OLD_STAMP
    local root=$1 kind=$2 base=$3 inputs=$4 old=$5 venv=$1/.venv python=$1/.venv/bin/python now='' cuda
    local -a args=()
    if type -P flock >/dev/null; then
        exec 9>"$root/.venv.lock" || return 1
        flock 9
    fi
    [[ -r $venv/.tdcoll-stamp ]] && now=$(<"$venv/.tdcoll-stamp")
    [[ $now == "$old" || $now != "$inputs"$'\n'"$kind" ]] || return 0 # somebody else has just made it
    cd "$root" || return 1
    if [[ $now == *$'\n'gpu ]]; then
        kind=gpu # it serves a machine without GPUs too
    fi
    # One that was moved here, or that has a PyTorch for CPUs where there are GPUs, starts afresh.
    if [[ -n $now && (${now%%$'\n'*} != "$root" || $now != *$'\n'"$kind") ]]; then
        "$base" -m venv --clear "$venv" || return 1
    elif ! [[ -x $python ]]; then
        "$base" -m venv "$venv" || return 1
    fi
    rm -f "$venv/.tdcoll-stamp"
    # Words separated by blanks, like PIP_FIND_LINKS and the like.
    read -r -a args <<<"${TDCOLL_PIP_ARGS-}" || true
    _tdcoll_pip() {
        _tdcoll_say "installing: pip install $*"
        "$python" -m pip install --quiet --disable-pip-version-check "$@" >&2
    }
    if [[ $kind == cpu ]]; then
        args+=(-c constraints-cpu.txt)
        _tdcoll_pip ${args[@]+"${args[@]}"} torch triton numpy || return 1
        _tdcoll_pip ${args[@]+"${args[@]}"} -e '.[sim,compile,bench,test,dev]' || return 1
    else
        # First the PyTorch that pip would give, then NVSHMEM for its CUDA.
        _tdcoll_pip ${args[@]+"${args[@]}"} torch numpy || return 1
        cuda=$("$python" -c 'import torch; print((torch.version.cuda or "none").split(".")[0])') || return 1
        if [[ $cuda != 12 && $cuda != 13 ]]; then
            _tdcoll_say "pip gave a PyTorch with CUDA '$cuda'; tdcoll needs one for CUDA 12 or 13 (see TDCOLL_PIP_ARGS)"
            return 1
        fi
        _tdcoll_pip ${args[@]+"${args[@]}"} -e ".[cu$cuda,sim,bench,test,dev]" || return 1
    fi
    printf '%s\n' "$inputs" "$kind" >"$venv/.tdcoll-stamp"
}

_tdcoll_setenv() {
    local IFS=$' \t\n'
    local root venv kind=cpu host_gpus needs inputs old='' candidate path rejected='' base='' origin='' one_host=1
    local reason libraries heap
    local -a candidates=() modules=() report=()
    root=$(CDPATH='' builtin cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P) || return 1
    venv=$root/.venv

    # Before anything is made. Bash would evaluate any other text as an expression, command substitutions included.
    if ! [[ ${TDCOLL_NNODES:-1} =~ ^[0-9]{1,9}$ ]] || ((10#${TDCOLL_NNODES:-1} < 1)); then
        _tdcoll_say "TDCOLL_NNODES: expected a whole number of at least 1, got '$TDCOLL_NNODES'"
        return 1
    fi

    # GPU or simulator.
    read -r host_gpus TDCOLL_GPUS < <(_tdcoll_count_gpus)
    _tdcoll_withdraw TRITON_INTERPRET
    local interpret=${TRITON_INTERPRET-}
    case ${interpret,,} in # as Triton reads it
    '') if ((TDCOLL_GPUS)); then TDCOLL_MODE=gpu; else TDCOLL_MODE=simulator; fi ;;
    1 | true | yes | on | y) TDCOLL_MODE=simulator ;;
    *) TDCOLL_MODE=gpu ;;
    esac
    if [[ $TDCOLL_MODE == simulator && -n ${TRITON_INTERPRET-} ]]; then
        reason="simulator (TRITON_INTERPRET=$TRITON_INTERPRET or --simulate; GPUs visible: $TDCOLL_GPUS)"
    elif [[ $TDCOLL_MODE == simulator ]]; then
        reason="simulator (no GPU visible)"
    elif ((TDCOLL_GPUS)); then
        reason="$TDCOLL_GPUS GPU$( ((TDCOLL_GPUS == 1)) || echo s)"
    else
        reason="no GPU visible and TRITON_INTERPRET=$TRITON_INTERPRET: kernels compile, nothing runs"
    fi

    # The Python: the active one if it will do, else .venv. What goes into .venv depends on the host's GPUs and not on
    # the visible ones; simulating for a while is no reason to rebuild it.
    ((host_gpus == 0)) || kind=gpu
    needs="torch triton numpy"
    if [[ $TDCOLL_MODE == simulator ]]; then
        needs+=" greenlet"
    elif ((TDCOLL_GPUS)) && [[ ${TDCOLL_HEAP-} != torch ]]; then
        needs+=" nvshmem"
    fi
    read -r -a modules <<<"$needs ${TDCOLL_REQUIRES-}"
    inputs=$(_tdcoll_inputs "$root") || return 1
    [[ -r $venv/.tdcoll-stamp ]] && old=$(<"$venv/.tdcoll-stamp")

    if [[ -n ${PYTHON-} ]]; then
        candidates=("$PYTHON")
    else
        candidates=(${VIRTUAL_ENV:+"$VIRTUAL_ENV/bin/python"} ${CONDA_PREFIX:+"$CONDA_PREFIX/bin/python"} python3 python)
    fi
    TDCOLL_PYTHON=
    for candidate in "${candidates[@]}"; do
        if ! path=$(type -P "$candidate"); then
            if [[ -n ${PYTHON-} ]]; then
                _tdcoll_say "PYTHON=$PYTHON: expected a Python, found no such program"
                return 1
            fi
            continue
        fi
        # Our own .venv comes last, and has to be up to date.
        [[ $path == "$venv"/* && -n $old ]] && continue
        mapfile -t report < <("$path" -c "$_tdcoll_probe_source" "${modules[@]}" 2>/dev/null)
        if [[ ${report[0]-} == ok ]]; then
            TDCOLL_PYTHON=${report[1]} origin=active
            break
        fi
        rejected=${rejected:-$path ${report[0]-does not work}}
        [[ -n ${report[0]-} && ${report[0]} != "is Python"* && -z $base ]] && base=${report[1]}
    done

    if [[ -z $TDCOLL_PYTHON ]]; then
        TDCOLL_PYTHON=$venv/bin/python origin=.venv report=()
        if [[ ${old%$'\n'*} == "$inputs" ]]; then
            mapfile -t report < <("$TDCOLL_PYTHON" -c "$_tdcoll_probe_source" "${modules[@]}" 2>/dev/null)
        fi
        if [[ ${report[0]-} != ok && -n ${_TDCOLL_DRY_RUN-} ]]; then
            origin=".venv, which would be made or updated first"
        elif [[ ${report[0]-} != ok ]]; then
            # The only Python around may be .venv's own; then the one that it was made with.
            [[ -n $base || ! -x $venv/bin/python ]] || base=$venv/bin/python
            [[ $base != "$venv"/* ]] || base=$(readlink -f "$base")
            if [[ -z $base ]]; then
                _tdcoll_say "no Python 3.10 or newer found${rejected:+ ($rejected)}; install one or set PYTHON"
                return 1
            fi
            _tdcoll_say "${rejected:-$venv is not up to date}: making $venv (once; this takes minutes)"
            if ! (_tdcoll_make_venv "$root" "$kind" "$base" "$inputs" "$old"); then
                _tdcoll_say "could not make $venv (see above); or activate a Python that has: ${modules[*]}"
                return 1
            fi
            mapfile -t report < <("$TDCOLL_PYTHON" -c "$_tdcoll_probe_source" "${modules[@]}" 2>/dev/null)
            if [[ ${report[0]-} != ok ]]; then
                _tdcoll_say "$TDCOLL_PYTHON ${report[0]-does not work}; remove $venv and source setenv.sh again"
                return 1
            fi
        fi
        # Its programs, python and pytest among them, come first.
        _tdcoll_prepend PATH "$venv/bin"
        export VIRTUAL_ENV="$venv"
    fi
    _tdcoll_say "python: $TDCOLL_PYTHON ($origin${report[2]+; ${report[2]}})"

    # PYTHONPATH: the Python has no tdcoll of its own, or another checkout's.
    if [[ ${report[0]-} == ok && ${report[4]} != "$root" ]]; then
        _tdcoll_prepend PYTHONPATH "$root"
    fi

    # One host or several. Agents that meet on a loopback address are on one host, whatever their number.
    if ((10#${TDCOLL_NNODES:-1} > 1)); then
        case ${TDCOLL_RDZV-} in
        127.* | localhost:* | '[::1]'*) ;;
        *) one_host= ;;
        esac
    fi

    # NVSHMEM_SYMMETRIC_SIZE, if you set it: bytes of symmetric heap per rank, in the simulator as well. The default is
    # tdcoll.initialize()'s. (Withdrawn, because earlier versions of this file exported one.)
    _tdcoll_withdraw NVSHMEM_SYMMETRIC_SIZE
    if [[ -n ${NVSHMEM_SYMMETRIC_SIZE-} ]]; then
        export NVSHMEM_SYMMETRIC_SIZE
        heap="$NVSHMEM_SYMMETRIC_SIZE per rank (your NVSHMEM_SYMMETRIC_SIZE)"
    else
        heap="tdcoll's default (NVSHMEM_SYMMETRIC_SIZE sets another)"
    fi

    _tdcoll_say "mode: $reason"
    if [[ $TDCOLL_MODE == simulator ]]; then
        # TRITON_INTERPRET: the one switch that makes tdcoll simulate. Triton reads it on its first import, so it has
        # to be there before Python starts.
        _tdcoll_default TRITON_INTERPRET 1
        _tdcoll_withdraw NVSHMEM_DISABLE_NVLS
        _tdcoll_withdraw NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME
        _tdcoll_withdraw NVSHMEM_REMOTE_TRANSPORT
        _tdcoll_say "nvshmem: not used by the simulator"
        _tdcoll_say "bootstrap: not used by the simulator"
        _tdcoll_say "heap: $heap"
        return 0
    fi

    # LD_LIBRARY_PATH: NVSHMEM's host library loads its bootstrap and transport plugins by bare name.
    # They are in NVIDIA's wheel, unless NVSHMEM_HOME names another NVSHMEM.
    libraries=${report[3]--}
    if [[ -n ${NVSHMEM_HOME-} && -d $NVSHMEM_HOME/lib ]]; then
        libraries=$NVSHMEM_HOME/lib
    fi
    if [[ $libraries != - ]]; then
        _tdcoll_prepend LD_LIBRARY_PATH "$libraries"
        _tdcoll_say "nvshmem: $libraries"
    else
        _tdcoll_say "nvshmem: no wheel's libraries found; the system's loader has to find libnvshmem_host.so.3"
    fi

    # NVSHMEM_DISABLE_NVLS: multicast is off unless asked for. On some hosts its set-up fails or hangs, and tdcoll
    # never needs it. Set it to 0 to have it.
    _tdcoll_default NVSHMEM_DISABLE_NVLS 1

    # NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME: the interface over which the ranks find each other. Left to itself NVSHMEM
    # takes the first that is up, often a bridge of a container engine that the other ranks cannot reach.
    if [[ -n $one_host ]]; then
        path=lo reason="one host"
    else
        path=$(_tdcoll_default_route_interface) reason="of the default route"
    fi
    if [[ -n $path ]]; then
        _tdcoll_default NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME "$path"
    else
        _tdcoll_withdraw NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME
    fi
    if [[ -n ${NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME-} ]]; then
        _tdcoll_say "bootstrap: interface $(_tdcoll_whose NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME "$reason")"
    else
        _tdcoll_say "bootstrap: no default route found; set NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME if NVSHMEM picks wrongly"
    fi

    # NVSHMEM_REMOTE_TRANSPORT: on one host all traffic is NVLink's or PCIe's; looking for network cards costs time,
    # and fails on hosts that have none.
    if [[ -n $one_host ]]; then
        _tdcoll_default NVSHMEM_REMOTE_TRANSPORT none
    else
        _tdcoll_withdraw NVSHMEM_REMOTE_TRANSPORT
    fi

    _tdcoll_say "heap: $heap"
}

_tdcoll_clean_up() {
    unset _tdcoll_probe_source
    unset -f _tdcoll_say _tdcoll_is_ours _tdcoll_forget _tdcoll_default _tdcoll_withdraw _tdcoll_whose _tdcoll_prepend \
        _tdcoll_count_gpus _tdcoll_default_route_interface _tdcoll_inputs _tdcoll_make_venv _tdcoll_setenv \
        _tdcoll_clean_up
}

# As a condition, so that a failing command inside does not end a shell that runs with set -e.
if _tdcoll_setenv; then
    _tdcoll_clean_up
else
    _tdcoll_clean_up
    return 1
fi
