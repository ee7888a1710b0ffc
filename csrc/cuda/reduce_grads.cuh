// SPDX-License-Identifier: Apache-2.0
// reduce_grads_: out[s] += rows[order[offsets[s]]] + rows[order[offsets[s] + 1]] + .., in that
// order, in float32 (float64 for float64), rounded once.
//
// Launch shape: a thread per element of a segment that has rows; blocks of 256 threads stride over
// (segment, tile of elements). One writer per element, no atomics: the order of the sum is the
// order of the list, whatever the timing.
#pragma once

#include <cstdint>

#include "core/numeric.h"
#include "cuda/compat.cuh"
#include "cuda/grid.cuh"

namespace topoep {

constexpr int kReduceThreads = 256;
constexpr int kReduceBlocksPerSm = 8;

template <class T>
__global__ void __launch_bounds__(kReduceThreads, 1)
    reduce_grads_kernel(T* out, const AccumulatorOf<T>* rows, const int64_t* offsets,
                        const int64_t* order, int64_t num_segments, int64_t width) {
    using Sum = AccumulatorOf<T>;
    const int64_t tiles = (width + kReduceThreads - 1) / kReduceThreads;
    for (int64_t tile = blockIdx.x; tile < num_segments * tiles; tile += gridDim.x) {
        const int64_t segment = tile / tiles;
        const int64_t d = tile % tiles * kReduceThreads + threadIdx.x;
        const int64_t begin = offsets[segment];
        const int64_t end = offsets[segment + 1];
        if (begin == end || d >= width) {
            continue;
        }
        Sum sum = widen(out[segment * width + d]);
        for (int64_t i = begin; i < end; ++i) {
            sum += rows[order[i] * width + d];
        }
        out[segment * width + d] = Narrow<T>::from(sum);
    }
}

template <class T>
const char* launch_reduce_grads(T* out, const AccumulatorOf<T>* rows, const int64_t* offsets,
                                const int64_t* order, int64_t num_segments, int64_t width,
                                int num_sms, Stream stream) {
    const int64_t num_tiles = num_segments * ((width + kReduceThreads - 1) / kReduceThreads);
    const LaunchShape shape =
        strided_shape(num_tiles, 1, kReduceThreads, int64_t{num_sms} * kReduceBlocksPerSm);
    return launch(reduce_grads_kernel<T>, shape, stream, out, rows, offsets, order, num_segments,
                  width);
}

}  // namespace topoep
