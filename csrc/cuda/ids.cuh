// SPDX-License-Identifier: Apache-2.0
// Reading routed ids: int32 or int64, 16 bytes at a time where the address allows.
#pragma once

#include <cstdint>

#include "cuda/compat.cuh"

namespace topoep {

constexpr int kVectorBytes = 16;

TOPOEP_HD bool is_vector_aligned(const void* address) {
    return reinterpret_cast<uintptr_t>(address) % kVectorBytes == 0;
}

// The ids of one 16-byte load.
__device__ inline void unpack_ids(const uint4& vector, int32_t (&ids)[4]) {
    ids[0] = static_cast<int32_t>(vector.x);
    ids[1] = static_cast<int32_t>(vector.y);
    ids[2] = static_cast<int32_t>(vector.z);
    ids[3] = static_cast<int32_t>(vector.w);
}
__device__ inline void unpack_ids(const uint4& vector, int64_t (&ids)[2]) {
    ids[0] = static_cast<int64_t>(uint64_t{vector.y} << 32 | vector.x);
    ids[1] = static_cast<int64_t>(uint64_t{vector.w} << 32 | vector.z);
}

}  // namespace topoep
