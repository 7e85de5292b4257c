# SPDX-License-Identifier: Apache-2.0
"""``triton_dist.language.extra.cuda.language_extra``: another name of ``extra.language_extra``."""

from tdcoll.compat.missing import attributes_of
from tdcoll.compat.triton_dist.language.extra.language_extra import *  # noqa: F403

__getattr__ = attributes_of("triton_dist.language.extra.language_extra")
