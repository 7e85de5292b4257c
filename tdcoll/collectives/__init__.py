# SPDX-License-Identifier: Apache-2.0
"""One folder per collective: kernels (device), ``op`` (what users call), ``policy`` (pure choice),
``reference``."""
