#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# `tdcoll run` from a checkout: starts a job with torchrun, on GPUs or on the simulator; `bash launch.sh --help` says
# how. Here is only the search for a Python that can run tdcoll/tools/launch.py, which does the rest.

here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd -P) || exit 2
main='import sys; sys.path = [sys.argv.pop(1)] + [p for p in sys.path if p]; from tdcoll.tools.launch import main; sys.exit(main(program="bash launch.sh"))'

for python in ${PYTHON:+"$PYTHON"} ${VIRTUAL_ENV:+"$VIRTUAL_ENV/bin/python"} ${CONDA_PREFIX:+"$CONDA_PREFIX/bin/python"} \
    python3 python "$here/.venv/bin/python"; do
    if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
        exec "$python" -c "$main" "$here" "$@"
    elif [ "$python" = "${PYTHON-}" ]; then
        echo "tdcoll: PYTHON=$PYTHON: expected Python 3.10 or newer, found no such program" >&2
        exit 1
    fi
done
echo "tdcoll: no Python 3.10 or newer found; install one or set PYTHON" >&2
exit 1
