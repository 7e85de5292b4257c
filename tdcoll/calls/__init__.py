# SPDX-License-Identifier: Apache-2.0
"""How every call gets to the GPU: contexts, monitors, plans, launches, the fast path, tuning
tables."""
