// SPDX-License-Identifier: Apache-2.0
// Copying and clearing bytes with a group of threads: 16 bytes per load where both addresses allow,
// single bytes otherwise.
#pragma once

#include <cstdint>

#include "cuda/compat.cuh"
#include "cuda/ids.cuh"

namespace topoep {

// Thread `thread` of `num_threads` copies its share of `bytes` bytes.
__device__ inline void copy_bytes(unsigned char* target, const unsigned char* source, int64_t bytes,
                                  int thread, int num_threads) {
    const bool aligned = is_vector_aligned(target) && is_vector_aligned(source);
    const int64_t num_vectors = aligned ? bytes / kVectorBytes : 0;
    for (int64_t i = thread; i < num_vectors; i += num_threads) {
        reinterpret_cast<uint4*>(target)[i] =
            load_streaming(reinterpret_cast<const uint4*>(source) + i);
    }
    for (int64_t i = num_vectors * kVectorBytes + thread; i < bytes; i += num_threads) {
        target[i] = source[i];
    }
}

__device__ inline void clear_bytes(unsigned char* target, int64_t bytes, int thread,
                                   int num_threads) {
    const int64_t num_vectors = is_vector_aligned(target) ? bytes / kVectorBytes : 0;
    for (int64_t i = thread; i < num_vectors; i += num_threads) {
        reinterpret_cast<uint4*>(target)[i] = make_uint4(0, 0, 0, 0);
    }
    for (int64_t i = num_vectors * kVectorBytes + thread; i < bytes; i += num_threads) {
        target[i] = 0;
    }
}

}  // namespace topoep
