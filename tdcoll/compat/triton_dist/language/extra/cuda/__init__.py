# SPDX-License-Identifier: Apache-2.0
"""``triton_dist.language.extra.cuda``: the same, by the names that it has for NVIDIA's GPUs."""
