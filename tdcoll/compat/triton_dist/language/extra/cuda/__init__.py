# SPDX-License-Identifier: Apache-2.0
"""``triton_dist.language.extra.cuda``: what ``extra`` has, by its names for NVIDIA's GPUs."""
