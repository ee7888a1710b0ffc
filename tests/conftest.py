# SPDX-License-Identifier: Apache-2.0
"""Settings of every test run: hypothesis without deadlines, torch on one thread."""

import hypothesis
import torch

# print_blob: a failure says how to replay it. Deadlines would only measure the machine.
hypothesis.settings.register_profile(
    "topoep",
    deadline=None,
    derandomize=False,
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("topoep")
torch.set_num_threads(1)
