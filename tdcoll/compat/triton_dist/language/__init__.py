# SPDX-License-Identifier: Apache-2.0
"""``triton_dist.language``: what its compiler adds to Triton, as functions of stock Triton.

Who waits and who notifies:

- :func:`notify` is one thread's release (``gpu``, ``intra_node``) or NVSHMEM's signal (``inter_node``). It has no
  barrier of the block before it; the kernel writes ``__syncthreads()``, as in Triton-distributed.
- :func:`wait` acquires in the lanes of each warp, and its warp goes on together. Loads that follow it in the program
  stay behind it: stock Triton does not pipeline a loop that has one. So :func:`consume_token` has nothing to do.
"""

import triton
import triton.language as tl

import tdcoll.language as tdl
from tdcoll.compat.missing import attributes_of
from tdcoll.compat.triton_dist.language._wait import wait
from tdcoll.language import SIGNAL_ADD as _ADD
from tdcoll.language import SIGNAL_SET as _SET

__all__ = ["consume_token", "notify", "num_ranks", "rank", "symm_at", "wait"]

# Defaults: triton 3.6 makes no compile-time value of a text.
_DEFAULT_OP, _DEFAULT_SCOPE = tl.constexpr("set"), tl.constexpr("inter_node")

__getattr__ = attributes_of("triton_dist.language")


@triton.jit
def rank(axis: tl.constexpr = -1):
    """Return this PE, which is the global rank. ``axis`` must be -1."""
    tl.static_assert(axis == -1, "axis must be -1: tdcoll has one axis of ranks")
    return tdl.my_pe()


@triton.jit
def num_ranks(axis: tl.constexpr = -1):
    """Return the number of ranks of the job. ``axis`` must be -1."""
    tl.static_assert(axis == -1, "axis must be -1: tdcoll has one axis of ranks")
    return tdl.n_pes()


@triton.jit
def symm_at(ptr, rank):
    """Return the pointer to the same place on another rank of this node."""
    return tdl.remote_ptr(ptr, rank)


@triton.jit
def consume_token(value, token):
    """Return ``value`` unchanged: loads through it are already behind the :func:`wait` that gave ``token``."""
    return value


@triton.jit
def notify(
    ptr,
    rank,
    signal=1,
    sig_op: tl.constexpr = _DEFAULT_OP,
    comm_scope: tl.constexpr = _DEFAULT_SCOPE,
):
    """Set a 64-bit signal of ``rank``, or add to it, after what this thread has written.

    ``comm_scope``: ``gpu``, this rank's own signal, for its other programs; ``intra_node``, by a store to the peer's
    memory; ``inter_node``, by NVSHMEM after its fence, which reaches every rank.
    """
    if sig_op != "set":
        tl.static_assert(sig_op == "add", "sig_op must be 'set' or 'add'")
    if comm_scope == "inter_node":
        if tdl.tid(0) == 0:
            tdl.fence()  # NVSHMEM's signal orders nothing before it, not even stores to a peer's memory
            if sig_op == "set":
                tdl.signal_op(ptr, signal, _SET, rank)
            else:
                tdl.signal_op(ptr, signal, _ADD, rank)
    elif comm_scope == "intra_node":
        theirs = tdl.remote_ptr(ptr, rank)
        if tdl.tid(0) == 0:
            if sig_op == "set":
                tdl.st_release(theirs, signal, "sys")
            else:
                tdl.atom_add(theirs, signal, "sys", "release")
    else:
        tl.static_assert(comm_scope == "gpu", "comm_scope must be 'gpu', 'intra_node' or 'inter_node'")
        if tdl.tid(0) == 0:
            if sig_op == "set":
                tdl.st_release(ptr, signal, "gpu")
            else:
                tdl.atom_add(ptr, signal, "gpu", "release")
