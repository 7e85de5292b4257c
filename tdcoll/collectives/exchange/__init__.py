# SPDX-License-Identifier: Apache-2.0
"""Kernels that bring every rank a segment of every other rank: those of all-gather and of all-to-all.

The two differ in one number. In an all-to-all, a rank has a segment for each rank, ``source_stride`` bytes apart; in an
all-gather it has one for all, which is a stride of 0.

Kernels take offsets as numbers, and no call agrees on bytes. Dispatch and combine for mixtures of experts, where only
the device knows the counts, can therefore be built here: an exchange of counts, and then an exchange of rows.
"""
