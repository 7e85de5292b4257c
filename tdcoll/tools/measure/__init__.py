# SPDX-License-Identifier: Apache-2.0
"""Times and checks of calls on the GPUs of a job.

`tdcoll tune` and the checkout's ``benchmarks/`` use it, and you can time kernels of your own.

:mod:`.timing` has the clock (``graph_time_us``), and :mod:`.engine` times and checks several
workloads side by side. :mod:`.benchmark` is the command around a benchmark: it joins the job,
measures, prints and writes. :mod:`.dense` has the workloads of tdcoll's dense collectives, on
:mod:`.buffers` whose numbers show every misplaced or stale element. :mod:`.results` has the rows of
a result and their file.
"""
