# SPDX-License-Identifier: Apache-2.0
"""What a kernel may say: constants and functions, of which :mod:`tdcoll.language` has the lowerings."""
