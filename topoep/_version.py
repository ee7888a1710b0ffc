# SPDX-License-Identifier: Apache-2.0
"""The version of the package, and nothing else: setup.py reads this file without importing torch."""

__version__ = "0.1.0"
