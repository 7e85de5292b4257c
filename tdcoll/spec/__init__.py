# SPDX-License-Identifier: Apache-2.0
"""The device language: constants and functions, of which :mod:`tdcoll.language` has the
lowerings."""
