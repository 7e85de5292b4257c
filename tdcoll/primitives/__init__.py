# SPDX-License-Identifier: Apache-2.0
"""What kernels of several collectives share: device functions, and the tuples that they take.

``docs/architecture.md`` lists the modules. Only ``puts`` needs NVSHMEM's device code.
"""
