# SPDX-License-Identifier: Apache-2.0
"""Reduce-scatter: every rank gets the reduction of everybody's part for it."""
