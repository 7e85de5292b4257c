# SPDX-License-Identifier: Apache-2.0
"""All-to-all with parts of one size: LL, direct stores, and puts between nodes."""
