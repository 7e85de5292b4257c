# SPDX-License-Identifier: Apache-2.0
"""Latency and bandwidth of tdcoll's collectives, against baselines: ``python -m tdcoll bench --help``.

One engine measures everything:

- :mod:`.timing` times launches on GPUs; ``graph_time_us`` is public;
- :mod:`.engine` prepares, measures in turns and checks subjects, and knows only how to call them;
- :mod:`.case` has the command around a benchmark, :mod:`.options` its command line, :mod:`.rows` its measurements and
  their format, :mod:`.provenance` the versions and GPUs that they depend on.

The benchmarks:

- :mod:`.dense` measures every collective in :mod:`.specs` against the baselines in :mod:`.peers`, on :mod:`.data` that
  shows every misplaced or stale element;
- :mod:`.all_reduce_rms_norm`, :mod:`.sparse_all_reduce`, and :mod:`.signal` with the kernels there.

:mod:`.tune` measures plans of dense collectives, and makes a tuning table with :mod:`.choosing`. :mod:`.report` and
:mod:`.plots` show files of rows. :mod:`.arithmetic`, :mod:`.rows`, :mod:`.specs`, :mod:`.report` are pure.
"""
