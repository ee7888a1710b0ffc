// SPDX-License-Identifier: Apache-2.0
// As much of NCCL's header as comm/nccl_network.h needs, for the unit that runs it on the CPU.
#pragma once

#include <cstdint>

#define NCCL_VERSION(major, minor, patch) ((major) * 10000 + (minor) * 100 + (patch))
#define NCCL_VERSION_CODE NCCL_VERSION(2, 30, 7)

using ncclWindow_t = int;
