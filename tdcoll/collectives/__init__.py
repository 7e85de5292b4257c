# SPDX-License-Identifier: Apache-2.0
"""One folder per collective: ``kernels.py`` (device), ``op.py`` (host), ``policy.py`` (pure choice)."""
