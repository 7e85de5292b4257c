# SPDX-License-Identifier: Apache-2.0
"""What a user needs when a job does not start: ``python -m tdcoll doctor``.

It has to run where nothing else does, so the modules of this process import nothing but the standard library, and
whatever may be missing, crash or hang happens in a child with a deadline:

- :mod:`.collect` finds the facts: from files and variables, from ``nvidia-smi``, and from :mod:`.probe`, a child that
  imports PyTorch, Triton and NVSHMEM and asks CUDA;
- :mod:`.packages`, :mod:`.devices` and :mod:`.surroundings` judge them: pure functions of :class:`.facts.Facts`;
- :mod:`.functional` starts :mod:`.job`, a small job of all ranks of this host, and judges how it ended;
- :mod:`.child` runs a command and ends it, with all that it started, when its time is over;
- :mod:`.command` is the command line.
"""
