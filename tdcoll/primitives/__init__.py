# SPDX-License-Identifier: Apache-2.0
"""Device functions that kernels of several collectives share, and the tuples that they take.

``docs/architecture.md`` lists the modules. Only ``puts`` needs NVSHMEM's device code.
"""
