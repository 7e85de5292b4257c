# SPDX-License-Identifier: Apache-2.0
"""``nvshmem`` and ``nvshmem.bindings`` on the simulator, where they are not installed."""

__path__: list[str] = []
