#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Starts a job with torchrun, on GPUs or on the simulator; `bash launch.sh --help` says how.

if [ -z "${BASH_VERSION:-}" ]; then
    echo "launch.sh: expected to be run by bash, as in: bash launch.sh script.py" >&2
    exit 2
fi
set -u

# These are launch.sh's to say; what an outer job left in the environment does not count.
unset TDCOLL_NNODES TDCOLL_RDZV

here=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P) || exit 2

usage() {
    cat <<'HELP'
usage: bash launch.sh [options] script.py [arguments...]
       bash launch.sh [options] --compat script.py [arguments...]
       bash launch.sh [options] -m module [arguments...]
       bash launch.sh [options] tests [pytest arguments...]

Runs a Python program with one process per GPU of this host, started by torchrun. On a host without GPUs the processes
are PEs of tdcoll's simulator, and the program is the same. setenv.sh is sourced first, so nothing has to be installed
or activated. Options come before the program; everything after it is the program's.

  tests                  pytest in this repository's root, without torchrun. On the simulator the tests are spread
                         over the cores, unless -n, -s or --pdb asks for something else. Tests marked slow are the
                         second tier: -m slow runs them.

  --compat               the script is written for Triton-distributed: its `triton_dist` is tdcoll.compat, see
                         docs/triton-distributed.md.
  --nproc N              processes on this host. Default: one per visible GPU (CUDA_VISIBLE_DEVICES counts), or 4
                         when simulating.
  --share-gpus           with GPUs only: processes may share them, so that --nproc may be more than the visible ones.
                         To see whether results are right, never for times: a GPU runs one process at a time, some 2 ms
                         each, so a call takes milliseconds, and torch.distributed has gloo for CUDA tensors, not NCCL.
  --simulate             the simulator, even where there are GPUs.
  --emulate-nodes N      the job behaves as if this host's processes were spread over N hosts, so that the paths for
                         several hosts are the ones taken. N is from 1 to the number of processes.

  --nnodes N             hosts in the job. Start launch.sh on each of them, with the same --nnodes and --rdzv.
  --node-rank R          which of them this is, from 0 to N - 1.
  --rdzv HOST:PORT       where they meet: an address of the host with rank 0 and a free port on it.
                         With a loopback address several launch.sh may share one host; give each its own GPUs
                         with CUDA_VISIBLE_DEVICES.
                         In a step of SLURM (one launch.sh per host: srun --ntasks-per-node 1 bash launch.sh ...) the
                         three follow from SLURM's variables; an option overrides. MASTER_PORT sets the port.

  --timeout SECONDS      how long a wait inside a kernel may last before tdcoll raises CollectiveTimeout.
  --monitor-interval SECONDS
                         how often torchrun looks for dead processes; its default is 0.1. When it finds one it ends
                         the others at once. With several times --timeout, the survivors usually report
                         CollectiveTimeout first. In the end launch.sh says who died and who only noticed.

  --dry-run              prints the environment and the command, and runs and installs nothing.
  -h, --help             this text.

Exit status: 0 if every process ended well, else 1 (torchrun's; for tests pytest's own); 2 for a wrong command line.
HELP
}

fail() { # MESSAGE: a wrong command line
    printf 'launch.sh: %s\n' "$*" >&2
    exit 2
}

# --- the command line -----------------------------------------------------------------------------

nproc='' nnodes='' node_rank='' rdzv='' emulate_nodes='' timeout_s='' monitor_interval='' simulate='' share_gpus='' compat='' dry_run=''

whole_number() { # NAME VALUE LEAST [DIGITS]: use the value only as 10#VALUE afterwards, since 08 would be octal
    if ! [[ $2 =~ ^[0-9]{1,${4:-9}}$ ]] || ((10#$2 < $3)); then
        fail "$1: expected a whole number of at least $3, got '$2'"
    fi
}

seconds() { # NAME VALUE
    [[ $2 =~ ^[0-9]+(\.[0-9]+)?$ && $2 =~ [1-9] ]] || fail "$1: expected a positive number of seconds, got '$2'"
}

while (($#)) && [[ $1 == -?* && $1 != -m ]]; do
    option=$1
    shift
    case $option in
    -h | --help)
        usage
        exit 0
        ;;
    --simulate) simulate=1 ;;
    --share-gpus) share_gpus=1 ;;
    --compat) compat=1 ;;
    --dry-run) dry_run=1 ;;
    --simulate=* | --share-gpus=* | --compat=* | --dry-run=*) fail "${option%%=*}: expected no value, got '${option#*=}'" ;;
    --nproc | --nnodes | --node-rank | --rdzv | --emulate-nodes | --timeout | --monitor-interval | --nproc=* | \
        --nnodes=* | --node-rank=* | --rdzv=* | --emulate-nodes=* | --timeout=* | --monitor-interval=*)
        if [[ $option == *=* ]]; then
            value=${option#*=} option=${option%%=*}
        else
            (($#)) || fail "$option: expected a value, got nothing"
            value=$1
            shift
        fi
        case $option in
        --nproc) whole_number "$option" "$value" 1 && nproc=$((10#$value)) ;;
        --nnodes) whole_number "$option" "$value" 1 && nnodes=$((10#$value)) ;;
        --node-rank) whole_number "$option" "$value" 0 && node_rank=$((10#$value)) ;;
        --emulate-nodes) whole_number "$option" "$value" 1 && emulate_nodes=$((10#$value)) ;;
        --timeout) seconds "$option" "$value" && timeout_s=$value ;;
        --monitor-interval) seconds "$option" "$value" && monitor_interval=$value ;;
        --rdzv) rdzv=$value ;;
        esac
        ;;
    *) fail "$option: expected one of the options that --help lists, got an unknown one (a script's options come after the script)" ;;
    esac
done

(($#)) || fail "script: expected script.py, -m module or tests, got nothing (see --help)"
case $1 in
tests)
    program=tests
    for option in nproc nnodes node_rank rdzv emulate_nodes monitor_interval share_gpus compat; do
        [[ -z ${!option} ]] || fail "--${option//_/-}: expected only with a script or module, got it with tests, which run without torchrun"
    done
    ;;
-m)
    program=module
    (($# > 1)) || fail "-m: expected a module, got nothing"
    [[ $2 =~ ^[^-] ]] || fail "-m: expected a module, got '$2'"
    [[ -z $compat ]] || fail "--compat: expected a script, got it with -m $2"
    ;;
*)
    program=script
    [[ -f $1 ]] || fail "script: expected a Python file, got '$1', which is not one ($([[ -e $1 ]] && echo "not a file" || echo "not found"))"
    ;;
esac

# --- the hosts of the job -------------------------------------------------------------------------

# node[03-05,9],other -> node03, where scontrol is not at hand to say it.
first_host() { # NODELIST
    if type -P scontrol >/dev/null; then
        scontrol show hostnames "$1" 2>/dev/null | head -n 1 && return
    fi
    if [[ $1 =~ ^([^],[]+)(\[([0-9]+)[^]]*\]([^],[]*))? ]]; then
        echo "${BASH_REMATCH[1]}${BASH_REMATCH[3]}${BASH_REMATCH[4]}"
    fi
}

if [[ $program != tests ]]; then
    # Only inside a step are there several launch.sh; a batch script runs one, on the first host of the allocation.
    slurm_nnodes=''
    # (SLURM numbers the batch script itself, and interactive shells, from 2^32 - 1 downwards.)
    if [[ ${SLURM_STEP_ID-} =~ ^[0-9]{1,9}$ || -n ${SLURM_STEP_NUM_NODES-} ]]; then
        slurm_nnodes=${SLURM_STEP_NUM_NODES:-${SLURM_NNODES-}}
        slurm_name=${SLURM_STEP_NUM_NODES:+SLURM_STEP_NUM_NODES}
    elif [[ -z $nnodes && ${SLURM_NNODES-} =~ ^[0-9]{1,9}$ ]] && ((10#$SLURM_NNODES > 1)); then
        fail "--nnodes: expected one launch.sh on each of the $SLURM_NNODES hosts of this SLURM allocation, got one outside of a step (start it with srun --ntasks-per-node 1, or give --nnodes 1 for this host alone)"
    fi
    if [[ -z $nnodes && -n $slurm_nnodes ]]; then
        whole_number "${slurm_name:-SLURM_NNODES}" "$slurm_nnodes" 1
        nnodes=$((10#$slurm_nnodes))
    fi
    nnodes=${nnodes:-1}
    if ((nnodes > 1)) && [[ -n $slurm_nnodes ]]; then
        [[ ${SLURM_LOCALID:-0} == 0 ]] ||
            fail "SLURM_LOCALID: expected one launch.sh per host (srun --ntasks-per-node 1), got task $SLURM_LOCALID of this host"
        if [[ -z $node_rank && -n ${SLURM_NODEID-} ]]; then
            whole_number SLURM_NODEID "$SLURM_NODEID" 0
            node_rank=$((10#$SLURM_NODEID))
        fi
        if [[ -z $rdzv ]]; then
            host=$(first_host "${SLURM_STEP_NODELIST:-${SLURM_JOB_NODELIST-}}")
            host=${host:-${SLURM_LAUNCH_NODE_IPADDR-}}
            [[ -n $host ]] || fail "--rdzv: expected HOST:PORT or SLURM_JOB_NODELIST to take the host from, got neither"
            # Every host has to come to the same port, and jobs that share a host to different ones. Below the range
            # from which Linux gives ports to clients.
            if [[ -n ${MASTER_PORT-} ]]; then
                whole_number MASTER_PORT "$MASTER_PORT" 1
                port=$MASTER_PORT
            else
                whole_number SLURM_JOB_ID "${SLURM_JOB_ID:-0}" 0 18 # of a federation of clusters: more than 2^31
                port=$((20000 + 10#${SLURM_JOB_ID:-0} % 10000))
            fi
            rdzv=$host:$port
        fi
    fi
    if ((nnodes > 1)); then
        [[ -n $rdzv ]] || fail "--rdzv: expected HOST:PORT with --nnodes $nnodes outside a SLURM step, got nothing"
        [[ -n $node_rank ]] || fail "--node-rank: expected 0 to $((nnodes - 1)) with --nnodes $nnodes, got nothing"
    fi
    ((${node_rank:-0} < nnodes)) || fail "--node-rank: expected 0 to $((nnodes - 1)) with --nnodes $nnodes, got $node_rank"
    if [[ -n $rdzv ]]; then
        rdzv_host=${rdzv%:*} rdzv_port=${rdzv##*:}
        if [[ $rdzv_host == "["*"]" ]]; then # an IPv6 address
            rdzv_host=${rdzv_host#"["} rdzv_host=${rdzv_host%"]"}
        elif [[ $rdzv_host == *:* ]]; then
            rdzv_host=
        fi
        if ! [[ $rdzv_host =~ ^[[:graph:]]+$ && $rdzv_port =~ ^[0-9]{1,5}$ ]] || ((10#$rdzv_port < 1 || 10#$rdzv_port > 65535)); then
            fail "--rdzv: expected HOST:PORT with a port from 1 to 65535, got '$rdzv'"
        fi
        rdzv_port=$((10#$rdzv_port))
        export TDCOLL_RDZV=$rdzv # for setenv.sh: is it a loopback address?
    fi
    export TDCOLL_NNODES=$nnodes # for setenv.sh: one host or several
fi

# --- the environment ------------------------------------------------------------------------------

[[ -z $simulate ]] || export TRITON_INTERPRET=1
[[ -z $emulate_nodes ]] || export TDCOLL_EMULATE_NODES=$emulate_nodes
[[ -z $share_gpus ]] || export TDCOLL_SHARE_GPUS=1
[[ -z $timeout_s ]] || export TDCOLL_TIMEOUT_S=$timeout_s
[[ $program != tests || " ${TDCOLL_REQUIRES-} " == *" pytest "* ]] || TDCOLL_REQUIRES+="${TDCOLL_REQUIRES:+ }pytest"
# shellcheck disable=SC2034 # setenv.sh reads it
_TDCOLL_DRY_RUN=$dry_run
# shellcheck source=setenv.sh
source "$here/setenv.sh" || exit 1

if [[ $TDCOLL_MODE == simulator ]]; then
    # Simulated PEs share the cores; a pool of threads in each would only make them wait for each other.
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
fi

if [[ $program == tests ]]; then
    cd -- "$here" || exit 1
    command=("$TDCOLL_PYTHON" -m pytest)
    # GPU tests take the whole machine; simulated ones are spread over the cores, if the plug-in is there.
    if [[ $TDCOLL_MODE == simulator ]]; then
        spread=1
        for argument in "${@:2}"; do
            case $argument in
            -n | -n?* | --numprocesses* | --pdb | --pdbcls* | --trace | -s | --capture=no | --collect-only | --co | -h | --help | no:xdist) spread='' ;;
            esac
        done
        if [[ -n $spread ]] && "$TDCOLL_PYTHON" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("xdist") is None)' 2>/dev/null; then
            command+=(-n auto --maxprocesses 8 --dist worksteal)
        fi
    fi
    # Without a path among the arguments pytest runs tests/, see pyproject.toml.
    command+=("${@:2}")
else
    if [[ -z $nproc ]]; then
        if [[ $TDCOLL_MODE == simulator ]]; then nproc=4; else nproc=$TDCOLL_GPUS; fi
    fi
    if [[ $TDCOLL_MODE == gpu ]]; then
        ((TDCOLL_GPUS)) || fail "TRITON_INTERPRET: expected 1 on a host without a visible GPU, got '${TRITON_INTERPRET-}' (unset it, or give --simulate)"
        [[ ${TDCOLL_SHARE_GPUS:-0} != 0 ]] || ((nproc <= TDCOLL_GPUS)) ||
            fail "--nproc: expected at most the $TDCOLL_GPUS visible GPUs of this host, got $nproc (--simulate has no such limit; --share-gpus lets processes share GPUs, for tests of correctness)"
    elif [[ -n $share_gpus ]]; then
        fail "--share-gpus: expected GPUs, got the simulator, in which processes have none to share (leave it out)"
    fi
    [[ -z $emulate_nodes ]] || ((emulate_nodes <= nproc)) ||
        fail "--emulate-nodes: expected 1 to $nproc, the number of processes, got $emulate_nodes"

    # torchrun, and in the end who died; see tdcoll/torchrun.py.
    command=("$TDCOLL_PYTHON" -m tdcoll.torchrun --nproc-per-node "$nproc")
    if [[ -n $rdzv ]]; then
        # The static rendezvous: torchrun's node ranks are the ones given, not the order of arrival.
        command+=(--nnodes "$nnodes" --node-rank "${node_rank:-0}" --master-addr "$rdzv_host" --master-port "$rdzv_port")
    else
        # A free port of its own on the loopback interface: jobs on one host do not meet.
        command+=(--nnodes 1 --rdzv-backend c10d --rdzv-endpoint localhost:0 --local-addr 127.0.0.1)
    fi
    [[ -z $monitor_interval ]] || command+=(--monitor-interval "$monitor_interval")
    # The -- keeps torchrun from taking one that is the script's. It knows -m as a flag.
    if [[ $program == module ]]; then
        command+=(-m -- "${@:2}")
    elif [[ -n $compat ]]; then
        command+=(-m -- tdcoll.compat "$@")
    else
        command+=(-- "$@")
    fi
fi

if [[ -n $dry_run ]]; then
    for name in ${!TDCOLL_@} TRITON_INTERPRET ${!NVSHMEM_@} OMP_NUM_THREADS LD_LIBRARY_PATH PYTHONPATH; do
        case $name in
        TDCOLL_SETENV | TDCOLL_PYTHON | TDCOLL_GPUS | TDCOLL_MODE | TDCOLL_REQUIRES | TDCOLL_PIP_ARGS) continue ;;
        esac
        [[ -z ${!name-} ]] || printf 'export %s=%q\n' "$name" "${!name}"
    done
    printf '%q ' "${command[@]:0:${#command[@]}-1}"
    printf '%q\n' "${command[-1]}"
    exit 0
fi

# exec: signals go straight to torchrun, and its exit status is launch.sh's.
exec "${command[@]}"
