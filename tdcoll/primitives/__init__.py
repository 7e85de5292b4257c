# SPDX-License-Identifier: Apache-2.0
"""What kernels of several collectives share: device functions, and the tuples that they take.

``group``: the ranks, this call's epoch, the signals, the memory that peers write to; ``stores``: data and signals by
stores, inside a node; ``puts``: data and signals by NVSHMEM, also between nodes; ``ll``: words that carry a flag;
``lamport``: words that announce themselves; ``words``: words of either kind, for reductions; ``tiles``: counters of
tiles, between the programs of one GPU; ``reduce``: arithmetic of reductions; ``fp8``: numbers of 8 bits; ``sums``: a
tile of all ranks, reduced. Only ``puts`` needs NVSHMEM's device code.
"""
