# SPDX-License-Identifier: Apache-2.0
"""The version, and nothing else: the build reads this file without importing the package."""

__version__ = "0.1.0"
