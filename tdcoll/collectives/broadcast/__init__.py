# SPDX-License-Identifier: Apache-2.0
"""Broadcast from any rank: LL, direct stores, and puts between nodes."""
