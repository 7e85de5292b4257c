# SPDX-License-Identifier: Apache-2.0
"""Latency and bandwidth of tdcoll's collectives, against peers: ``python -m tdcoll bench --help``.

One engine measures everything:

- :mod:`.timing` times launches on GPUs; ``graph_time_us`` is for everybody's use;
- :mod:`.engine` prepares, measures in turns and checks subjects, of which it knows no more than their calls;
- :mod:`.case` says what a benchmark has of its own, and has the command around it; :mod:`.job` are its ranks,
  :mod:`.options` its command line, :mod:`.table` what it shows, :mod:`.provenance` what it was measured with.

The cases:

- :mod:`.all_gather`, :mod:`.all_reduce` and :mod:`.reduce_scatter`, which share :mod:`.dense`, against :mod:`.peers`
  and :mod:`.reduction_peers`, on :mod:`.data`, of which every misplaced or stale word shows;
- :mod:`.sparse_all_reduce` against :mod:`.sparse_peers`, on :mod:`.sparse_data`;
- :mod:`.signal`, with :mod:`.kernels`.

:mod:`.tune` measures what dense collectives could do, and makes a tuning table by :mod:`.choosing`.
:mod:`.arithmetic` is what is computed from sizes and times; pure, as are :mod:`.rows` and :mod:`.report`.
"""
