// SPDX-License-Identifier: Apache-2.0
// combine: y[t] = sum over k, in order, of weights[t, k] * rows[row_of_pair[t, k]], and its
// gradients.
//
// Sums are float32 (float64 for float64) with two roundings per step, in an order that the shapes
// alone decide, so host and device agree bit for bit (core/numeric.h).
// Launch shape: forward and grad_rows take a block of 256 threads per row, grad_weights a warp per
// (token, k); blocks stride over the rest. Elements are read eight at a time (kDotRun), as one or
// two 16-byte loads, if the rows are aligned, one by one otherwise.
#pragma once

#include <cstdint>

#include "core/numeric.h"
#include "cuda/compat.cuh"
#include "cuda/grid.cuh"
#include "cuda/ids.cuh"
#include "cuda/team.cuh"

namespace topoep {

constexpr int kCombineThreads = 256;
constexpr int kCombineBlocksPerSm = 8;

inline LaunchShape combine_shape(int64_t num_items, int items_per_block, int num_sms) {
    return strided_shape(num_items, items_per_block, kCombineThreads,
                         int64_t{num_sms} * kCombineBlocksPerSm);
}

// Up to kDotRun consecutive elements. Loops over a run have constant bounds and test i < count
// inside, so that it stays in registers.
template <class T>
struct Run {
    T values[kDotRun];
};

template <class T>
__device__ Run<T> load_run(const T* row, int64_t begin, int count) {
    constexpr int kVectors = static_cast<int>(sizeof(Run<T>)) / kVectorBytes;
    union {
        uint4 vectors[kVectors];
        Run<T> run;
    };
    if (count == kDotRun && is_vector_aligned(row + begin)) {
        for (int i = 0; i < kVectors; ++i) {
            vectors[i] = reinterpret_cast<const uint4*>(row + begin)[i];
        }
    } else {
        for (int i = 0; i < kDotRun; ++i) {
            run.values[i] = T{};
            if (i < count) {
                run.values[i] = row[begin + i];
            }
        }
    }
    return run;
}

template <class T>
__device__ void store_run(T* row, int64_t begin, int count, const Run<T>& values) {
    constexpr int kVectors = static_cast<int>(sizeof(Run<T>)) / kVectorBytes;
    union {
        uint4 vectors[kVectors];
        Run<T> run;
    };
    run = values;
    if (count == kDotRun && is_vector_aligned(row + begin)) {
        for (int i = 0; i < kVectors; ++i) {
            reinterpret_cast<uint4*>(row + begin)[i] = vectors[i];
        }
    } else {
        for (int i = 0; i < kDotRun; ++i) {
            if (i < count) {
                row[begin + i] = run.values[i];
            }
        }
    }
}

__device__ inline int run_length(int64_t begin, int64_t width) {
    return static_cast<int>(min64(int64_t{kDotRun}, width - begin));
}

template <class T>
__global__ void __launch_bounds__(kCombineThreads, 1)
    combine_kernel(const T* rows, const int64_t* row_of_pair, const AccumulatorOf<T>* weights,
                   int64_t num_tokens, int top_k, int64_t width, T* y) {
    using Sum = AccumulatorOf<T>;
    for (int64_t token = blockIdx.x; token < num_tokens; token += gridDim.x) {
        for (int64_t d = int64_t{threadIdx.x} * kDotRun; d < width;
             d += kCombineThreads * kDotRun) {
            const int count = run_length(d, width);
            Sum sums[kDotRun] = {};
            for (int64_t pair = token * top_k; pair < (token + 1) * top_k; ++pair) {
                const int64_t row = row_of_pair[pair];
                if (row < 0) {
                    continue;
                }
                const Sum weight = weights[pair];
                const Run<T> run = load_run(rows + row * width, d, count);
                for (int i = 0; i < kDotRun; ++i) {
                    sums[i] = multiply_add(weight, widen(run.values[i]), sums[i]);
                }
            }
            Run<T> result;
            for (int i = 0; i < kDotRun; ++i) {
                result.values[i] = Narrow<T>::from(sums[i]);
            }
            store_run(y + token * width, d, count, result);
        }
    }
}

template <class T>
__global__ void __launch_bounds__(kCombineThreads, 1)
    combine_grad_rows_kernel(const T* grad_y, const int64_t* pair_of_row,
                             const AccumulatorOf<T>* weights, int64_t num_rows, int top_k,
                             int64_t width, T* grad_rows) {
    using Sum = AccumulatorOf<T>;
    for (int64_t row = blockIdx.x; row < num_rows; row += gridDim.x) {
        const int64_t pair = pair_of_row[row];
        const Sum weight = pair < 0 ? Sum{0} : weights[pair];
        for (int64_t d = int64_t{threadIdx.x} * kDotRun; d < width;
             d += kCombineThreads * kDotRun) {
            const int count = run_length(d, width);
            Run<T> result = {};
            if (pair >= 0) {
                const Run<T> grad = load_run(grad_y + pair / top_k * width, d, count);
                for (int i = 0; i < kDotRun; ++i) {
                    result.values[i] = Narrow<T>::from(weight * widen(grad.values[i]));
                }
            }
            store_run(grad_rows + row * width, d, count, result);
        }
    }
}

template <class T>
__global__ void __launch_bounds__(kCombineThreads, 1)
    combine_grad_weights_kernel(const T* grad_y, const T* rows, const int64_t* row_of_pair,
                                int64_t num_pairs, int top_k, int64_t width,
                                AccumulatorOf<T>* grad_weights) {
    using Sum = AccumulatorOf<T>;
    static_assert(kDotLanes == kWarpSize, "a lane of the dot product is a lane of a warp");
    const int64_t num_warps = int64_t{gridDim.x} * (kCombineThreads / kWarpSize);
    for (int64_t pair = int64_t{blockIdx.x} * (kCombineThreads / kWarpSize) + warp_index();
         pair < num_pairs; pair += num_warps) {
        const int64_t row = row_of_pair[pair];
        Sum sum = 0;
        for (int64_t d = int64_t{warp_lane()} * kDotRun; row >= 0 && d < width;
             d += kDotLanes * kDotRun) {
            const int count = run_length(d, width);
            const Run<T> a = load_run(rows + row * width, d, count);
            const Run<T> b = load_run(grad_y + pair / top_k * width, d, count);
            for (int i = 0; i < kDotRun; ++i) {
                if (i < count) {
                    sum = multiply_add(widen(a.values[i]), widen(b.values[i]), sum);
                }
            }
        }
        for (int distance = kDotLanes / 2; distance > 0; distance /= 2) {
            sum += __shfl_down_sync(kFullWarp, sum, distance);
        }
        if (warp_lane() == 0) {
            grad_weights[pair] = sum;
        }
    }
}

template <class T>
const char* launch_combine(const T* rows, const int64_t* row_of_pair,
                           const AccumulatorOf<T>* weights, int64_t num_tokens, int top_k,
                           int64_t width, int num_sms, T* y, Stream stream) {
    return launch(combine_kernel<T>, combine_shape(num_tokens, 1, num_sms), stream, rows,
                  row_of_pair, weights, num_tokens, top_k, width, y);
}

template <class T>
const char* launch_combine_backward(const T* grad_y, const T* rows, const int64_t* pair_of_row,
                                    const int64_t* row_of_pair, const AccumulatorOf<T>* weights,
                                    int64_t num_tokens, int64_t num_rows, int top_k, int64_t width,
                                    int num_sms, T* grad_rows, AccumulatorOf<T>* grad_weights,
                                    Stream stream) {
    const char* error =
        launch(combine_grad_rows_kernel<T>, combine_shape(num_rows, 1, num_sms), stream, grad_y,
               pair_of_row, weights, num_rows, top_k, width, grad_rows);
    if (error != nullptr) {
        return error;
    }
    const int64_t num_pairs = num_tokens * top_k;
    return launch(combine_grad_weights_kernel<T>,
                  combine_shape(num_pairs, kCombineThreads / kWarpSize, num_sms), stream, grad_y,
                  rows, row_of_pair, num_pairs, top_k, width, grad_weights);
}

}  // namespace topoep
