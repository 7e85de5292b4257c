# SPDX-License-Identifier: Apache-2.0
"""Matmuls that communicate inside their kernel: all-gather + matmul, matmul + reduce-scatter,
matmul + all-reduce."""
