# SPDX-License-Identifier: Apache-2.0
"""``python -m tdcoll.language``: the table of the device language, for ``docs/language.md``."""

from tdcoll.spec.functions import table

print(table())
