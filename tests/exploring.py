# SPDX-License-Identifier: Apache-2.0
"""``explore`` and ``first_failure`` without the detector of races.

They are for tests that want wrong results, before which a race would end the run, and for tests
with many seeds, which would take half as long again. ``collectives/test_exhausted.py`` and
``simulator/test_races.py`` look for races.
"""

from functools import partial

from tdcoll import testing

explore = partial(testing.explore, races=False)
first_failure = partial(testing.first_failure, races=False)
