# SPDX-License-Identifier: Apache-2.0
"""What ``python -m topoep`` does, one module per command."""
