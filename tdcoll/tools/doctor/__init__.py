# SPDX-License-Identifier: Apache-2.0
"""``python -m tdcoll doctor`` finds out why a job doesn't start.

It must run where PyTorch, Triton or NVSHMEM is missing or broken. Therefore the doctor's own
process imports nothing but the standard library, and everything that may crash or hang runs in a
child with a deadline (:mod:`.child`):

- :mod:`.facts` collects facts: the environment that setenv.sh makes, and the output of
  :mod:`.probe`, a child for each package, which imports the package and asks CUDA;
- :mod:`.checks` turns facts into lines of the report, by pure functions;
- :mod:`.job` starts a small job on this host, and is the program that its ranks run;
- :mod:`.command` is the command line.
"""
