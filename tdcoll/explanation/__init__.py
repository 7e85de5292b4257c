# SPDX-License-Identifier: Apache-2.0
"""What a call will do, and what memory a job takes, said in advance."""
