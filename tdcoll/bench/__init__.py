# SPDX-License-Identifier: Apache-2.0
"""Latency and bandwidth of tdcoll's collectives, against peers: ``python -m tdcoll bench --help``.

One engine measures everything:

- :mod:`.timing` times launches on GPUs; ``graph_time_us`` is for everybody's use;
- :mod:`.engine` prepares, measures in turns and checks subjects, of which it knows no more than their calls;
- :mod:`.case` has the command around a benchmark, :mod:`.options` its command line, :mod:`.rows` what it measured and
  how that is shown, :mod:`.provenance` what it was measured with.

The benchmarks:

- :mod:`.dense` of every collective in :mod:`.specs`, against :mod:`.peers`, on :mod:`.data`, of which every misplaced
  or stale element shows;
- :mod:`.all_reduce_rms_norm`, :mod:`.sparse_all_reduce`, and :mod:`.signal` with the kernels there.

:mod:`.tune` measures plans of dense collectives, and makes a tuning table by :mod:`.choosing`. :mod:`.report` and
:mod:`.plots` show files of rows. :mod:`.arithmetic`, :mod:`.rows`, :mod:`.specs`, :mod:`.report` are pure.
"""
