// SPDX-License-Identifier: Apache-2.0
// Device forms of the team interface (core/team.h): a warp, and a thread block.
#pragma once

#include <cstdint>

#include "core/team.h"
#include "cuda/compat.cuh"

namespace topoep {

constexpr unsigned kFullWarp = 0xffffffffu;
constexpr int kWarpSize = 32;

__device__ inline int warp_lane() {
    return static_cast<int>(threadIdx.x) % kWarpSize;
}
__device__ inline int warp_index() {
    return static_cast<int>(threadIdx.x) / kWarpSize;
}

// Two 32-bit reductions in hardware instead of ten 32-bit shuffles.
__device__ inline uint64_t warp_min(uint64_t value) {
    const uint32_t high = __reduce_min_sync(kFullWarp, static_cast<uint32_t>(value >> 32));
    const uint32_t low = __reduce_min_sync(kFullWarp, static_cast<uint32_t>(value >> 32) == high
                                                          ? static_cast<uint32_t>(value)
                                                          : UINT32_MAX);
    return uint64_t{high} << 32 | low;
}

__device__ inline int64_t warp_sum(int64_t value) {
    for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
        value += __shfl_xor_sync(kFullWarp, value, distance);
    }
    return value;
}

// Sum of the values of this and all lower lanes.
__device__ inline int32_t warp_inclusive_sum(int32_t value) {
    for (int distance = 1; distance < kWarpSize; distance *= 2) {
        const int32_t below = __shfl_up_sync(kFullWarp, value, distance);
        value += warp_lane() >= distance ? below : 0;
    }
    return value;
}

struct DeviceAccumulation {
    __device__ void add(uint32_t* target, uint32_t value) const { atomicAdd(target, value); }
    __device__ void add(uint64_t* target, uint64_t value) const {
        atomicAdd(reinterpret_cast<unsigned long long*>(target),
                  static_cast<unsigned long long>(value));
    }
    __device__ void raise(uint32_t* target, uint32_t value) const { atomicMax(target, value); }
    __device__ void raise(uint64_t* target, uint64_t value) const {
        atomicMax(reinterpret_cast<unsigned long long*>(target),
                  static_cast<unsigned long long>(value));
    }
    __device__ void set_bits(uint32_t* word, uint32_t bits) const { atomicOr(word, bits); }
};

struct WarpTeam : DeviceAccumulation {
    __device__ static int lane() { return warp_lane(); }
    static constexpr __device__ int size() { return kWarpSize; }
    __device__ void sync() const { __syncwarp(); }
    __device__ uint64_t min(uint64_t value) const { return warp_min(value); }
    __device__ uint32_t sum(uint32_t value) const { return __reduce_add_sync(kFullWarp, value); }
    __device__ int64_t sum(int64_t value) const { return warp_sum(value); }
    __device__ int32_t exclusive_sum(int32_t value, int32_t* total) const {
        const int32_t inclusive = warp_inclusive_sum(value);
        *total = __shfl_sync(kFullWarp, inclusive, kWarpSize - 1);
        return inclusive - value;
    }
};

// All threads of a one-dimensional block, a multiple of 32.
struct BlockTeam : DeviceAccumulation {
    __device__ static int lane() { return static_cast<int>(threadIdx.x); }
    __device__ static int size() { return static_cast<int>(blockDim.x); }
    __device__ void sync() const { __syncthreads(); }

    __device__ uint64_t min(uint64_t value) const {
        TOPOEP_SHARED(uint64_t, partial, [kWarpSize]);
        const uint64_t own = warp_min(value);
        return warp_min(all_warps(partial, own, kNothing));
    }
    __device__ uint32_t sum(uint32_t value) const {
        TOPOEP_SHARED(uint32_t, partial, [kWarpSize]);
        const uint32_t own = __reduce_add_sync(kFullWarp, value);
        return __reduce_add_sync(kFullWarp, all_warps(partial, own, 0u));
    }
    __device__ int64_t sum(int64_t value) const {
        TOPOEP_SHARED(int64_t, partial, [kWarpSize]);
        const int64_t own = warp_sum(value);
        return warp_sum(all_warps(partial, own, int64_t{0}));
    }
    __device__ int32_t exclusive_sum(int32_t value, int32_t* total) const {
        TOPOEP_SHARED(int32_t, partial, [kWarpSize]);
        const int32_t inclusive = warp_inclusive_sum(value);
        const int32_t warp_total = __shfl_sync(kFullWarp, inclusive, kWarpSize - 1);
        const int32_t of_lane = warp_inclusive_sum(all_warps(partial, warp_total, 0));
        *total = __shfl_sync(kFullWarp, of_lane, kWarpSize - 1);
        const int32_t through_warp = __shfl_sync(kFullWarp, of_lane, warp_index());
        return through_warp - warp_total + inclusive - value;
    }

private:
    // Lane i of every warp gets warp i's value. The second barrier lets the memory be used again.
    template <class T>
    __device__ static T all_warps(T* partial, T own, T missing) {
        if (warp_lane() == 0) {
            partial[warp_index()] = own;
        }
        __syncthreads();
        const T value = warp_lane() < size() / kWarpSize ? partial[warp_lane()] : missing;
        __syncthreads();
        return value;
    }
};

// How a block executes a candidate (core/solve_candidate.h): teams are its warps.
struct BlockGroup {
    __device__ BlockTeam all() const { return {}; }
    template <class F>
    __device__ void one(F&& f) const {
        if (warp_index() == 0) {
            f(WarpTeam{});
        }
        __syncthreads();
    }
    template <class F>
    __device__ void each(int n, F&& f) const {
        for (int i = warp_index(); i < n; i += BlockTeam::size() / kWarpSize) {
            f(WarpTeam{}, i);
        }
        __syncthreads();
    }
};

}  // namespace topoep
