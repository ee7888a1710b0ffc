// SPDX-License-Identifier: Apache-2.0
// Copies of a range of an expert's packed row (core/expert_layout.h) by a whole block, with many
// loads in flight per thread: peers answer after more than a microsecond.
#pragma once

#include <cstdint>

#include "core/expert_layout.h"
#include "cuda/compat.cuh"
#include "cuda/ids.cuh"

namespace topoep {

constexpr int kLoadsInFlight = 8;

template <class Word>
__device__ __forceinline__ Word load_word(const Word* address) {
    return *address;
}
__device__ __forceinline__ uint4 load_word(const uint4* address) {
    return load_streaming(address);
}

template <class Word>
__device__ __forceinline__ void copy_words(Word* target, const Word* source, int64_t count) {
    const int64_t num_threads = blockDim.x;
    int64_t i = threadIdx.x;
    for (; i + (kLoadsInFlight - 1) * num_threads < count; i += kLoadsInFlight * num_threads) {
        Word words[kLoadsInFlight];
        for (int k = 0; k < kLoadsInFlight; ++k) {
            words[k] = load_word(source + i + k * num_threads);
        }
        for (int k = 0; k < kLoadsInFlight; ++k) {
            target[i + k * num_threads] = words[k];
        }
    }
    for (; i < count; i += num_threads) {
        target[i] = load_word(source + i);
    }
}

// All threads of the block. Vectors where both addresses allow, else words of 4 bytes (scales of
// odd rows), else bytes.
__device__ inline void copy_block(unsigned char* target, const unsigned char* source,
                                  int64_t bytes) {
    const uintptr_t either =
        reinterpret_cast<uintptr_t>(target) | reinterpret_cast<uintptr_t>(source);
    int64_t copied = 0;
    if (either % kVectorBytes == 0) {
        copied = bytes / kVectorBytes * kVectorBytes;
        copy_words(reinterpret_cast<uint4*>(target), reinterpret_cast<const uint4*>(source),
                   bytes / kVectorBytes);
    } else if (either % sizeof(uint32_t) == 0) {
        copied =
            bytes / static_cast<int64_t>(sizeof(uint32_t)) * static_cast<int64_t>(sizeof(uint32_t));
        copy_words(reinterpret_cast<uint32_t*>(target), reinterpret_cast<const uint32_t*>(source),
                   bytes / static_cast<int64_t>(sizeof(uint32_t)));
    }
    for (int64_t i = copied + threadIdx.x; i < bytes; i += blockDim.x) {
        target[i] = source[i];
    }
}

// f(tensor, begin, end): the parts of tensors in the packed range [begin, begin + length), as
// packed positions.
template <class F>
__device__ void for_tensor_parts(const ExpertLayout& layout, int64_t begin, int64_t length, F&& f) {
    const int64_t end = begin + length;
    for (int t = 0; t < layout.num_tensors; ++t) {
        const int64_t first = layout.begin[t];
        const int64_t last = first + layout.row_units[t];
        const int64_t from = begin > first ? begin : first;
        const int64_t to = end < last ? end : last;
        if (from < to) {
            f(t, from, to);
        }
    }
}

}  // namespace topoep
