# SPDX-License-Identifier: Apache-2.0
"""``tdcoll tune``: measure which algorithm is the fastest at which size, and write a table.

:mod:`.tuner` chooses what is measured and what follows from the times; :mod:`.command` measures and
writes.
"""
