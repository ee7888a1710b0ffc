# SPDX-License-Identifier: Apache-2.0
"""Thin adapters for training frameworks; each imports its framework only when it is turned on."""
