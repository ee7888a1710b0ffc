# SPDX-License-Identifier: Apache-2.0
"""Plain-Python versions of what the product computes, to check it against."""
