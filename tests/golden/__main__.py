# SPDX-License-Identifier: Apache-2.0
"""Writes plans.json. The change belongs into CHANGELOG.md: plans are promised to stay."""

import json

from tests.golden import FILE, digests

FILE.write_text(json.dumps(digests(), indent=1) + "\n")
