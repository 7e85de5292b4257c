# SPDX-License-Identifier: Apache-2.0
"""Errors, limits, checks of arguments, environment variables and other modules that the rest of
tdcoll uses."""
