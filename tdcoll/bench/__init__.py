# SPDX-License-Identifier: Apache-2.0
"""Latency and bandwidth of tdcoll's collectives, against peers: ``python -m tdcoll.bench --help``.

- :mod:`.job` is the command around a benchmark: options, ranks that agree, table and file;
- :mod:`.timing` measures on GPUs; ``graph_time_us`` is for everybody's use;
- :mod:`.arithmetic` is what is computed from sizes and times; pure, as are :mod:`.rows` and :mod:`.report`;
- :mod:`.table` shows rows as they come, :mod:`.provenance` says what they were measured with;
- :mod:`.all_gather` measures :mod:`.subjects` and :mod:`.peers` on :mod:`.data`, of which every misplaced or stale byte
  shows;
- :mod:`.sparse_all_reduce` measures tdcoll and :mod:`.sparse_peers` on :mod:`.sparse_data`, with :mod:`.entries`;
- :mod:`.index_match` likewise, on one GPU, also against a kernel of :mod:`.kernels`;
- :mod:`.signal` measures signals with the other kernels there;
- :mod:`.tune` makes a tuning table by what :mod:`.all_gather` does with candidates;
- :mod:`.projection` turns the simulator's counts into the time of a cluster.
"""
