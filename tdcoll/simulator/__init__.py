# SPDX-License-Identifier: Apache-2.0
"""A machine with several GPUs, simulated on CPUs: Triton's interpreter runs the kernels, this the
rest.

From the bottom up:

- :mod:`.policy` makes every choice that a real machine leaves open, from a seed;
- :mod:`.scheduler` runs tasks (hosts and programs) one at a time, and finds deadlocks;
- :mod:`.memory` is the symmetric heap of all PEs; :mod:`.network` delivers messages late and out of
  order;
- :mod:`.races` follows which access comes before which, with :mod:`.clocks`, :mod:`.shadow` and
  :mod:`.hosts`, if that is wanted;
- :mod:`.machine` is all of these together; :mod:`.trace` records a timeline of it;
- :mod:`.transfers`, :mod:`.pointers` and :mod:`.waits` are the operations of programs on it;
- :mod:`.interpreter` hooks it into Triton's interpreter: :mod:`.launcher` for launches,
  :mod:`.builder` for operations, :mod:`.branches` for conditions and threads;
- :mod:`.world` puts all PEs into one process, with :mod:`.streams`; :mod:`.process` is one process
  per rank;
- :mod:`.exhaustive` runs all schedules of a small case in such a world.

Users reach it through :mod:`tdcoll.testing` and ``launch.sh``; ``docs/simulator.md`` describes the
model.
"""
