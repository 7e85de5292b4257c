# SPDX-License-Identifier: Apache-2.0
"""Reduce-scatter: words that need no signal, direct stores, and puts; one stage."""
