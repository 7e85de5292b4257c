#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Measure what docs/performance.md shows, and run the tests on GPUs, on one host, in stages of minutes:
#
#     bash tests/gpu/measure.sh [--nproc N] [--limit SECONDS] [--dry-run] FOLDER STAGE...
#
# Each stage is a job or a few, leaves FOLDER/NAME-NxGPU.json and a .log beside it, and says how it ended. A stage that
# takes longer than --limit (540) is ended, and leaves the rows that it has. --nproc: default, all GPUs. Stages:
#
#     tests          the GPU tests that do not share GPUs, many at a time; needs pytest-xdist
#     sanitizer      compute-sanitizer over a mixed run
#     all-reduce, reduce-scatter, all-gather, sparse, rms-norm
#                    latency by size, with all peers
#     marks          one buffer replayed in CUDA graphs: for figures of others that were taken so
#     heaps          the same collectives on NVSHMEM's heap and on PyTorch's, in turns
#     tune           a tuning table; FOLDER/tuning-NxGPU.json and its .part are where the same command goes on
#     calls, training, tutorial
#                    host times of the backend, training steps, tutorial 05

set -u

usage() { sed -n '6p' "${BASH_SOURCE[0]}" | cut -c3- >&2; exit 2; }

nproc='' limit=540 dry=''
while (($#)); do
    case $1 in
    --nproc) nproc=${2:?}; shift 2 ;;
    --limit) limit=${2:?}; shift 2 ;;
    --dry-run) dry=1; shift ;;
    -*) usage ;;
    *) break ;;
    esac
done
(($# > 1)) || usage
mkdir -p "$1" && folder=$(cd "$1" && pwd) || exit 2
shift
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." || exit 1
gpus=$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null)
nproc=${nproc:-$(grep -c . <<<"$gpus")}
gpu=$(head -n 1 <<<"$gpus" | sed 's/NVIDIA //; s/[ -].*//')
if ((nproc < 1)); then
    echo "measure.sh: found no GPU; expected some, or --nproc and --dry-run" >&2
    exit 2
fi
# shellcheck source=../../setenv.sh
[[ -n $dry ]] || source setenv.sh || exit 1
python=${TDCOLL_PYTHON:-python} failed=0

go() { # NAME COMMAND...: FILE in the command is where the stage's JSON goes
    local name=$1-${nproc}x${gpu:-GPU} began=$SECONDS rc=0 words=()
    shift
    for word in "$@"; do words+=("${word//FILE/$folder/$name.json}"); done
    if [[ -n $dry ]]; then
        echo "${words[*]}"
        return
    fi
    timeout -s INT -k 20 "$limit" "${words[@]}" >"$folder/$name.log" 2>&1 || rc=$?
    echo "$name: status $rc, $((SECONDS - began)) s"
    ((rc == 0)) || { failed=1; tail -n 15 "$folder/$name.log"; }
}

bench() { # NAME ARGUMENTS...
    local name=$1
    shift
    go "$name" bash launch.sh --nproc "$nproc" -m tdcoll bench "$@" --json FILE
}

reduce=nccl,nccl-symmetric,torch-one-shot,torch-two-shot,trtllm-one-shot,trtllm-two-shot,vllm
scatter=nccl,nccl-symmetric,torch-reduce-scatter
gather=nccl,nccl-symmetric,torch-symm,torch-symm-cat,fcollect
norm=nccl,nccl-compiled,torch-one-shot,torch-one-shot-compiled,tdcoll-torch,tdcoll-compiled,trtllm-one-shot,trtllm-two-shot
small=$((1024 / nproc)) large=$((256 / nproc))M # of a reduce-scatter: bytes of a rank's part, of 1 KB to 256 MB

for stage in "$@"; do
    case $stage in
    tests) go tests bash launch.sh tests tests/gpu -k "not shared" -n 8 --tb=short ;;
    sanitizer) go sanitizer "$python" tests/sanitizer/sanitize.py --nproc "$nproc" --deadline 150 ;;
    all-reduce)
        bench all-reduce all_reduce --dtype bfloat16 -b 1K -e 256M -f 4 --both --iterations 40 \
            --algorithms auto,in-place --peers $reduce ;;
    reduce-scatter)
        bench reduce-scatter reduce_scatter --dtype bfloat16 -b $small -e $large -f 4 --both --iterations 40 \
            --algorithms auto --peers $scatter ;;
    all-gather)
        bench all-gather all_gather -b 1K -e 64M -f 4 --both --iterations 40 --algorithms auto,in-place --peers $gather ;;
    sparse)
        bench sparse sparse_all_reduce --rows 50000 --dims 2048 --distributions uniform,zipf1.05,zipf1.2 \
            --iterations 8 --algorithms owner,auto --peers published,allgather,dense ;;
    rms-norm)
        bench all-reduce-rms-norm all_reduce_rms_norm --rows 1,8,64,512 --hidden 8192 --both --iterations 60 \
            --algorithms auto,one_shot,two_stage,composed --peers $norm ;;
    marks)
        once=(--graph --buffers 1 --iterations 60)
        bench marks-all-reduce all_reduce --dtype bfloat16 -b 1K -e 256M -f 4 "${once[@]}" \
            --algorithms auto,in-place --peers $reduce
        bench marks-reduce-scatter reduce_scatter --dtype bfloat16 -b $small -e $large -f 4 "${once[@]}" \
            --algorithms auto --peers $scatter
        bench marks-all-gather all_gather -b 1K -e 64M -f 4 "${once[@]}" --algorithms auto,in-place \
            --peers nccl,nccl-symmetric ;;
    heaps)
        for turn in 1 2; do
            for heap in nvshmem torch; do
                for kind in all_reduce reduce_scatter all_gather; do
                    TDCOLL_HEAP=$heap bench "heap-$heap-$kind.$turn" $kind -b 1K -e 64M -f 4 --graph --iterations 30 \
                        --algorithms auto --peers=
                done
            done
        done ;;
    tune)
        go tuning bash launch.sh --nproc "$nproc" -m tdcoll tune --operation all_reduce,reduce_scatter,all_gather \
            -b 1K -e 64M -f 4 --in-place --channels 16,64 --warps 8,16 --iterations 20 --warmup 2 -o FILE ;;
    calls) go calls bash launch.sh --nproc "$nproc" tests/gpu/backend_calls.py --programs 32,64,128 --json FILE ;;
    training) go training "$python" tests/gpu/training.py --nproc "$nproc" --json FILE ;;
    tutorial) go tutorial-05 bash launch.sh --nproc "$nproc" tutorials/05-all-reduce.py ;;
    *) usage ;;
    esac
done
exit $failed
