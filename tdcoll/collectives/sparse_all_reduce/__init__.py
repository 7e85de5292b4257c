# SPDX-License-Identifier: Apache-2.0
"""Sparse all-reduce: the sum over the ranks of tensors that have few of their rows.

Every row is reduced by one of the ranks that have it. One call, step by step; each line is one
launch, on every rank, in the order of its stream. ``lists``, ``out`` and ``stage`` are symmetric
memory of a :class:`SparseContext`, the rest is this GPU's own::

    join       ids of several tensors --each behind those of the table before--> own ids; only with several
    pack       own ids --sorted, each once--> lists[rank], with a header that says how many; clears the directory
    exchange   lists[rank] --counted all-gather in place--> lists[rank] on every rank                     epoch e
    prepare    lists --> directory: the union, where each id is in each list, and where each table begins in the union
               (tdcoll.collectives.index_match)
               own ids, directory --> who reduces each of my rows: work lists
               rows that I have several times, or that another rank reduces: sum --> stage[position in lists[rank]]
    reduce     rows that I reduce: own row, stage[...] of the others --sum in rank order--> out[union position] of all
               and no rank is done before all have stored                                                 epoch e + 1

Why each is a launch: more than 1,024 ids are sorted by PyTorch, between *join* and *pack*.
*exchange* is the kernel of the all-gather, which waits for peers. *prepare* needs the lists of all
ranks. *reduce* waits until the *prepare* of its peers has ended. Within a launch, phases follow
each other without the host (:func:`tdcoll.primitives.group.wait_until_done`), which waits once, for
the sizes of the results, after it has launched everything.

With few rows (gather) *pack* puts them behind the ids, and each rank sums all of them itself:
*merge*, after *exchange*, makes the directory and the sums, and the rest is left out. Lists with
rows reach from ``lists`` into ``out``, and the sums are in memory of their own. For dense,
*prepare* leaves the work lists out and puts all rows into the stage; then PyTorch makes the table
of them, and the dense all-reduce reduces that. The form of fixed size ends with *pad*. Over several
nodes *reduce* becomes one launch per node, then *forward*, then *meet_nodes*, which moves nothing;
each has an epoch.

The exchange is the all-gather in place: by stores in one node, else by puts.

Why the memory may be used again: when *exchange* of the next call is complete here, every rank has
begun that call, so it is done with the results of this one (the caller's work on its stream
included) and with everybody's ``stage``. The exchange itself lets no peer write into ``lists`` of a
rank that has not begun. So one ``lists``, one ``stage`` and one ``out`` are enough. If a wait
expires, no call follows that could complete, and *prepare* leaves ``stage`` alone for peers that
still read it.
"""
