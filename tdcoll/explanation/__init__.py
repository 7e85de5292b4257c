# SPDX-License-Identifier: Apache-2.0
"""Predictions: how a call will be made, and how much memory a job takes."""
