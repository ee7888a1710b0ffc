// SPDX-License-Identifier: Apache-2.0
// histogram: ids [T, K] -> counts [E] and the number of invalid ids, in one cooperative launch.
//
//   block b    bins[0 .. E + 1] = 0 in shared memory; count the block's share of the ids
//              partial[b, bin] = bins[bin]
//   --- grid barrier ---
//   all        counts[e] = sum over b of partial[b, e + 1]
//
// Bin 0 is padding (-1), bins 1 .. E the experts, bin E + 1 everything else.
// Launch shape: 512 threads, 16 bytes of ids per thread and pass, at most kMaxBlocks blocks: the
// last phase reads a column of that length. Shared memory: the bins, four times over for E <= 1024,
// where tokens of one hot expert would otherwise queue up at one address. Determinism: integer
// sums; partial results instead of a zeroed output, so no memset is needed.
#pragma once

#include <cstdint>

#include "cuda/compat.cuh"
#include "cuda/grid.cuh"
#include "cuda/ids.cuh"
#include "cuda/team.cuh"

namespace topoep {

constexpr int kHistogramThreads = 512;
constexpr int kMaxHistogramBlocks = 64;
constexpr int kMaxExpertsForCopies = 1024;
constexpr int kHistogramCopies = 4;

struct HistogramShape {
    LaunchShape launch;
    int num_copies;
    size_t workspace_bytes;
};

inline HistogramShape histogram_shape(int64_t num_ids, int id_bytes, int num_experts, int num_sms) {
    HistogramShape shape{};
    shape.num_copies = num_experts <= kMaxExpertsForCopies ? kHistogramCopies : 1;
    shape.launch =
        strided_shape(num_ids, kHistogramThreads * (kVectorBytes / id_bytes), kHistogramThreads,
                      num_sms < kMaxHistogramBlocks ? num_sms : kMaxHistogramBlocks);
    const size_t bins = (static_cast<size_t>(num_experts) + 2) * sizeof(uint32_t);
    shape.launch.shared_bytes = bins * shape.num_copies;
    shape.launch.cooperative = true;
    shape.workspace_bytes = bins * shape.launch.grid.x;
    return shape;
}

__device__ inline uint32_t bin_of(int64_t id, uint32_t num_bins) {
    const uint64_t bin = static_cast<uint64_t>(id) + 1;
    return bin < num_bins ? static_cast<uint32_t>(bin) : num_bins - 1;
}

template <class Id>
__device__ void count_ids(const Id* ids, int64_t num_ids, uint32_t num_bins, uint32_t* bins) {
    constexpr int kIdsPerVector = kVectorBytes / static_cast<int>(sizeof(Id));
    const int64_t thread = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    const int64_t num_threads = int64_t{gridDim.x} * blockDim.x;
    const int64_t num_vectors = is_vector_aligned(ids) ? num_ids / kIdsPerVector : 0;
    for (int64_t i = thread; i < num_vectors; i += num_threads) {
        Id values[kIdsPerVector];
        unpack_ids(load_streaming(reinterpret_cast<const uint4*>(ids) + i), values);
        for (const Id id : values) {
            atomicAdd(&bins[bin_of(id, num_bins)], 1u);
        }
    }
    for (int64_t i = num_vectors * kIdsPerVector + thread; i < num_ids; i += num_threads) {
        atomicAdd(&bins[bin_of(ids[i], num_bins)], 1u);
    }
}

template <class Id>
__global__ void __launch_bounds__(kHistogramThreads, 1)
    histogram_kernel(const Id* ids, int64_t num_ids, int num_experts, int num_copies,
                     uint32_t* partial, int32_t* counts, int32_t* invalid) {
    TOPOEP_DYNAMIC_SHARED(uint32_t, bins);
    const uint32_t num_bins = static_cast<uint32_t>(num_experts) + 2;
    for (uint32_t i = threadIdx.x; i < num_bins * num_copies; i += blockDim.x) {
        bins[i] = 0;
    }
    __syncthreads();
    count_ids(ids, num_ids, num_bins, bins + warp_index() % num_copies * num_bins);
    __syncthreads();
    for (uint32_t bin = threadIdx.x; bin < num_bins; bin += blockDim.x) {
        uint32_t sum = 0;
        for (int copy = 0; copy < num_copies; ++copy) {
            sum += bins[copy * num_bins + bin];
        }
        partial[blockIdx.x * num_bins + bin] = sum;
    }
    grid_sync();
    for (uint32_t bin = 1 + blockIdx.x * blockDim.x + threadIdx.x; bin < num_bins;
         bin += gridDim.x * blockDim.x) {
        uint32_t sum = 0;
        for (unsigned block = 0; block < gridDim.x; ++block) {
            sum += partial[block * num_bins + bin];
        }
        (bin == num_bins - 1 ? *invalid : counts[bin - 1]) = static_cast<int32_t>(sum);
    }
}

template <class Id>
const char* launch_histogram(const Id* ids, int64_t num_ids, int num_experts,
                             const HistogramShape& shape, void* workspace, int32_t* counts,
                             int32_t* invalid, Stream stream) {
    return launch(histogram_kernel<Id>, shape.launch, stream, ids, num_ids, num_experts,
                  shape.num_copies, static_cast<uint32_t*>(workspace), counts, invalid);
}

}  // namespace topoep
