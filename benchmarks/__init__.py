# SPDX-License-Identifier: Apache-2.0
"""Latency and bandwidth of tdcoll's collectives, against baselines: ``python -m tdcoll bench``.

A benchmark is a module with a subclass of :class:`~tdcoll.tools.measure.benchmark.Benchmark`: its
options, sizes, workloads and baselines, and the layout of its tables. :mod:`.registry` lists them,
and other experiments (:class:`~tdcoll.tools.measure.benchmark.Experiment`), such as litmus tests.
The measuring itself is :mod:`tdcoll.tools.measure`, which `tdcoll tune` uses as well.

:mod:`.report` shows files of results: :mod:`.tables`, :mod:`.pages` of the documentation, and
:mod:`.plots`. Scripts that are started by themselves are ``measure.py`` (all measurements of a
host), ``backend_calls.py``, ``training.py`` and ``start_up.py``.
"""
