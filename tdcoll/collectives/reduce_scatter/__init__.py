# SPDX-License-Identifier: Apache-2.0
"""Reduce-scatter: Lamport or LL, direct stores, and puts; one step."""
