# SPDX-License-Identifier: Apache-2.0
"""All schedules of a small case: :mod:`.search` chooses, and the others show it what each step
touches.

- :mod:`.search` is dynamic partial-order reduction, and knows nothing of the machine;
- :mod:`.recorder` says what depends on what;
- :mod:`.scheduler`, :mod:`.network` and :mod:`.races` are the machine's, and note what they do;
- :mod:`.world` puts them together. :func:`tdcoll.testing.exhaust` runs it.
"""
