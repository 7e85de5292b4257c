# SPDX-License-Identifier: Apache-2.0
"""Latency and bandwidth of tdcoll's collectives, against peers: ``python -m tdcoll.bench --help``.

- :mod:`.timing` measures on GPUs; ``graph_time_us`` is for everybody's use;
- :mod:`.arithmetic` is what is computed from sizes and times; pure, as are :mod:`.rows` and :mod:`.report`;
- :mod:`.data` fills buffers so that every misplaced or stale byte shows, and checks them;
- :mod:`.subjects` and :mod:`.peers` are what is measured; :mod:`.all_gather` measures it;
- :mod:`.table` shows rows as they come, :mod:`.provenance` says what they were measured with.
"""
