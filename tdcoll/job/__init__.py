# SPDX-License-Identifier: Apache-2.0
"""Joining and leaving a job, the transports of its heap, and allocating symmetric memory."""
