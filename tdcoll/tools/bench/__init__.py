# SPDX-License-Identifier: Apache-2.0
"""Latency and bandwidth of tdcoll's collectives, against baselines: ``python -m tdcoll bench --help``.

:mod:`.engine` measures everything, with :mod:`.timing`, and knows only how to call it. :mod:`.case` has the command
around a benchmark. :mod:`.dense` measures every collective in :mod:`.specs` against the baselines in :mod:`.peers`, on
:mod:`.data` that shows every misplaced or stale element. :mod:`.tune` makes a tuning table by :mod:`.choosing`.
:mod:`.report` and :mod:`.plots` show files of :mod:`.rows`.
"""
