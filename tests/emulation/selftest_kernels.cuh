// SPDX-License-Identifier: Apache-2.0
// Correct kernels that use each feature of the emulation the way the product's kernels do. They
// must give right results, without a report, under every schedule. selftest_faults.cuh has their
// wrong counterparts.
#pragma once

#include "cuda/compat.cuh"

namespace selftest {

constexpr unsigned kFullWarp = 0xffffffffu;

__device__ __forceinline__ uint32_t warp_inclusive_scan(uint32_t value) {
    const unsigned lane = threadIdx.x & 31;
    for (unsigned distance = 1; distance < 32; distance <<= 1) {
        const uint32_t below = __shfl_up_sync(kFullWarp, value, distance);
        if (lane >= distance) {
            value += below;
        }
    }
    return value;
}

// warp_sums holds 32 words, one for each warp.
template <int kThreads>
__device__ inline uint32_t block_inclusive_scan(uint32_t value, uint32_t* warp_sums) {
    constexpr unsigned kWarps = kThreads / 32;
    const unsigned lane = threadIdx.x & 31;
    const unsigned warp = threadIdx.x >> 5;
    value = warp_inclusive_scan(value);
    if (lane == 31) {
        warp_sums[warp] = value;
    }
    __syncthreads();
    if (warp == 0) {
        const uint32_t sum = warp_inclusive_scan(lane < kWarps ? warp_sums[lane] : 0);
        if (lane < kWarps) {
            warp_sums[lane] = sum;
        }
    }
    __syncthreads();
    if (warp != 0) {
        value += warp_sums[warp - 1];
    }
    __syncthreads();  // warp_sums may be written again
    return value;
}

// One block: sorts kThreads keys, sums their low bytes, counts their low six bits.
template <int kThreads>
__global__ void __launch_bounds__(kThreads)
    sort_scan_count(const uint64_t* __restrict__ keys, uint64_t* __restrict__ sorted,
                    uint32_t* __restrict__ sums, uint32_t* __restrict__ counts, int rounds) {
    TOPOEP_SHARED(uint64_t, key, [kThreads]);
    TOPOEP_SHARED(uint32_t, warp_sums, [32]);
    TOPOEP_SHARED(uint32_t, bins, [64]);
    const unsigned t = threadIdx.x;
    for (int round = 0; round < rounds; ++round) {
        key[t] = keys[t];
        if (t < 64) {
            bins[t] = 0;
        }
        __syncthreads();
        for (unsigned size = 2; size <= kThreads; size <<= 1) {
            for (unsigned distance = size >> 1; distance > 0; distance >>= 1) {
                const unsigned partner = t ^ distance;
                if (partner > t) {
                    const uint64_t a = key[t];
                    const uint64_t b = key[partner];
                    if ((a > b) == ((t & size) == 0)) {
                        key[t] = b;
                        key[partner] = a;
                    }
                }
                __syncthreads();
            }
        }
        const uint32_t low = static_cast<uint32_t>(key[t]) & 0xff;
        sums[t] = block_inclusive_scan<kThreads>(low, warp_sums);
        const unsigned bin = low & 63;
        const unsigned peers = __match_any_sync(kFullWarp, bin);
        if ((t & 31) == static_cast<unsigned>(__ffs(static_cast<int>(peers))) - 1) {
            atomicAdd(&bins[bin], static_cast<uint32_t>(__popc(peers)));
        }
        __syncthreads();
        sorted[t] = key[t];
        if (t < 64) {
            counts[t] = bins[t];
        }
        __syncthreads();
    }
}

// Many blocks: counts ids in shared memory, then in global memory. Ids out of range are skipped.
__global__ void histogram(const int32_t* __restrict__ ids, int num_ids, int num_bins,
                          uint32_t* __restrict__ counts) {
    TOPOEP_DYNAMIC_SHARED(uint32_t, bins);
    for (int bin = threadIdx.x; bin < num_bins; bin += blockDim.x) {
        bins[bin] = 0;
    }
    __syncthreads();
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < num_ids; i += gridDim.x * blockDim.x) {
        const int32_t id = ids[i];
        if (id >= 0 && id < num_bins) {
            atomicAdd(&bins[id], 1u);
        }
    }
    __syncthreads();
    for (int bin = threadIdx.x; bin < num_bins; bin += blockDim.x) {
        if (bins[bin] != 0) {
            atomicAdd(&counts[bin], bins[bin]);
        }
    }
}

// One block: rank[i] = how many earlier entries have the same id.
// Dynamic shared memory: (warps + 1) * num_bins words.
template <int kThreads>
__global__ void __launch_bounds__(kThreads)
    stable_rank(const int32_t* __restrict__ ids, int num_ids, int num_bins,
                uint32_t* __restrict__ rank) {
    constexpr int kWarps = kThreads / 32;
    TOPOEP_DYNAMIC_SHARED(uint32_t, words);
    uint32_t* in_warp = words;                     // [kWarps][num_bins]
    uint32_t* before = words + kWarps * num_bins;  // [num_bins], over all earlier tiles
    const unsigned lane = threadIdx.x & 31;
    const int warp = threadIdx.x >> 5;
    for (int bin = threadIdx.x; bin < num_bins; bin += kThreads) {
        before[bin] = 0;
    }
    for (int tile = 0; tile < num_ids; tile += kThreads) {
        for (int i = threadIdx.x; i < kWarps * num_bins; i += kThreads) {
            in_warp[i] = 0;
        }
        __syncthreads();
        const int i = tile + static_cast<int>(threadIdx.x);
        const int32_t id = i < num_ids ? ids[i] : -1;
        const unsigned peers = __match_any_sync(kFullWarp, id);
        const uint32_t lower = __popc(peers & ((1u << lane) - 1));
        if (id >= 0 && lower == 0) {
            in_warp[warp * num_bins + id] = __popc(peers);
        }
        __syncthreads();
        for (int bin = threadIdx.x; bin < num_bins; bin += kThreads) {
            uint32_t sum = before[bin];
            for (int w = 0; w < kWarps; ++w) {
                const uint32_t count = in_warp[w * num_bins + bin];
                in_warp[w * num_bins + bin] = sum;
                sum += count;
            }
            before[bin] = sum;
        }
        __syncthreads();
        if (id >= 0) {
            rank[i] = in_warp[warp * num_bins + id] + lower;
        }
        __syncthreads();
    }
}

// 16 bytes at a time where both sides allow it, single bytes before and after.
__global__ void copy_bytes(const unsigned char* __restrict__ from, unsigned char* __restrict__ to,
                           size_t bytes) {
    const size_t first = size_t{blockIdx.x} * blockDim.x + threadIdx.x;
    const size_t step = size_t{gridDim.x} * blockDim.x;
    const bool same_phase =
        ((reinterpret_cast<uintptr_t>(from) ^ reinterpret_cast<uintptr_t>(to)) & 15) == 0;
    const size_t to_boundary = -reinterpret_cast<uintptr_t>(to) & 15;
    const size_t head = !same_phase || to_boundary > bytes ? bytes : to_boundary;
    const size_t vectors = (bytes - head) / 16;
    for (size_t i = first; i < head; i += step) {
        to[i] = from[i];
    }
    const uint4* from_vectors = reinterpret_cast<const uint4*>(from + head);
    uint4* to_vectors = reinterpret_cast<uint4*>(to + head);
    for (size_t i = first; i < vectors; i += step) {
        to_vectors[i] = topoep::load_streaming(&from_vectors[i]);
    }
    for (size_t i = head + vectors * 16 + first; i < bytes; i += step) {
        to[i] = from[i];
    }
}

// The block that finishes last adds up what all wrote: write, fence, ticket; ticket, fence, read.
template <int kThreads>
__global__ void __launch_bounds__(kThreads)
    last_block_sum(const uint32_t* __restrict__ values, int num_values, uint32_t* partial,
                   unsigned* ticket, uint32_t* sum) {
    TOPOEP_SHARED(uint32_t, warp_sums, [32]);
    TOPOEP_SHARED(bool, is_last);
    uint32_t own = 0;
    for (int i = blockIdx.x * kThreads + threadIdx.x; i < num_values; i += gridDim.x * kThreads) {
        own += values[i];
    }
    own = block_inclusive_scan<kThreads>(own, warp_sums);
    if (threadIdx.x == kThreads - 1) {
        partial[blockIdx.x] = own;
        __threadfence();
        is_last = atomicAdd(ticket, 1u) == gridDim.x - 1;
        __threadfence();
    }
    __syncthreads();
    if (is_last && threadIdx.x == 0) {
        uint32_t total = 0;
        for (unsigned block = 0; block < gridDim.x; ++block) {
            total += partial[block];
        }
        *sum = total;
    }
}

// All blocks meet, twice: what one wrote, another reads.
__global__ void reverse_through_grid(uint32_t* scratch, uint32_t* out) {
    const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    const unsigned last = gridDim.x * blockDim.x - 1;
    scratch[i] = i;
    topoep::grid_sync();
    const uint32_t value = scratch[last - i];
    topoep::grid_sync();
    scratch[i] = value;
    out[i] = value;
}

// Every block waits for the one before it. A whole warp writes and a whole warp reads, while lane 0
// alone handles the flag: __syncwarp passes the order on, before the fence and after it.
__global__ void look_back(unsigned* flags, uint32_t* values) {
    const unsigned lane = threadIdx.x;
    uint32_t before = 0;
    if (blockIdx.x != 0) {
        if (lane == 0) {
            while (topoep::load_relaxed(&flags[blockIdx.x - 1]) == 0) {
            }
            __threadfence();
        }
        __syncwarp();
        before = values[(blockIdx.x - 1) * 32 + lane];
    }
    values[blockIdx.x * 32 + lane] = before + lane + blockIdx.x;
    __syncwarp();
    if (lane == 0) {
        __threadfence();
        topoep::store_relaxed(&flags[blockIdx.x], 1u);
    }
}

// Two warps of producers and two of consumers, with a buffer of one round between them. Each side
// tells the other by arriving, and waits only for what it needs.
__global__ void producers_and_consumers(const uint32_t* in, uint32_t* out, int rounds) {
    constexpr int kFull = 1;
    constexpr int kEmpty = 2;
    TOPOEP_SHARED(uint32_t, buffer, [64]);
    const bool is_producer = threadIdx.x < 64;
    const unsigned i = threadIdx.x & 63;
    if (is_producer) {
        for (int round = 0; round < rounds; ++round) {
            topoep::named_barrier(kEmpty, 128);
            buffer[i] = in[round * 64 + i];
            topoep::named_barrier_arrive(kFull, 128);
        }
    } else {
        for (int round = 0; round < rounds; ++round) {
            topoep::named_barrier_arrive(kEmpty, 128);
            topoep::named_barrier(kFull, 128);
            out[round * 64 + i] = buffer[63 - i];
        }
    }
}

// A flag between two warps of one block: fences of block scope are enough.
__global__ void flag_in_block(uint32_t* out) {
    TOPOEP_SHARED(unsigned, flag);
    TOPOEP_SHARED(uint32_t, value);
    if (threadIdx.x == 0) {
        flag = 0;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        value = 42;
        __threadfence_block();
        atomicExch(&flag, 1u);
    } else if (threadIdx.x == 32) {
        while (topoep::load_relaxed(&flag) == 0) {
        }
        __threadfence_block();
        *out = value;
    }
}

// Bytes of one word belong to four threads: that is no race.
__global__ void bytes_of_words(unsigned char* out) {
    TOPOEP_SHARED(unsigned char, bytes, [256]);
    bytes[threadIdx.x] = static_cast<unsigned char>(threadIdx.x * 3);
    __syncthreads();
    out[threadIdx.x] = bytes[threadIdx.x ^ 1];
}

// A block whose last warp is half a warp. Pairs of lanes swap through shared memory; the short warp
// needs its own mask.
__global__ void short_warp(uint32_t* out) {
    TOPOEP_SHARED(uint32_t, values, [48]);
    const unsigned mask = threadIdx.x < 32 ? kFullWarp : 0xffffu;
    values[threadIdx.x] = threadIdx.x;
    __syncwarp(mask);
    const uint32_t partner = values[threadIdx.x ^ 1];
    out[threadIdx.x] = partner + 100 * __reduce_add_sync(mask, 1u);
}

// Most threads of the second warp leave at once; the others do not wait for them.
__global__ void early_exit(uint32_t* out) {
    if (threadIdx.x >= 40) {
        return;
    }
    __syncthreads();
    out[threadIdx.x] = __ballot_sync(kFullWarp, 1);
}

// The first block tells the second through one lane, which then passes it on to another warp at a
// named barrier: that warp knows what the lane learnt.
__global__ void hand_over(unsigned* flag, uint32_t* value, uint32_t* out) {
    if (blockIdx.x == 0) {
        if (threadIdx.x == 0) {
            *value = 7;
            __threadfence();
            topoep::store_relaxed(flag, 1u);
        }
        return;
    }
    if (threadIdx.x == 0) {
        while (topoep::load_relaxed(flag) == 0) {
        }
        __threadfence();
    }
    if (threadIdx.x < 64) {  // the third warp has no part in it
        topoep::named_barrier(5, 64);
    }
    if (threadIdx.x == 63) {
        *out = *value;
    }
}

// Waits for a flag that never comes, and gives up after its own number of clock calls.
__global__ void bounded_wait(const unsigned* flag, uint32_t* timed_out) {
    const long long start = clock64();
    const uint64_t timer_start = topoep::global_timer();
    while (topoep::load_relaxed(flag) == 0) {
        if (clock64() - start > 1000 || topoep::global_timer() - timer_start > 1000000000) {
            timed_out[threadIdx.x] = 1;
            return;
        }
        __nanosleep(100);
    }
}

// Each thread takes a number: the order in which the schedule let them run.
__global__ void running_order(unsigned* ticket, uint32_t* order) {
    order[atomicAdd(ticket, 1u)] = threadIdx.x;
}

// Barriers and shuffles in a row, and nothing else: for the counters, and to measure speed.
__global__ void barriers_and_shuffles(int barriers, int shuffles, uint32_t* out) {
    uint32_t x = threadIdx.x;
    for (int i = 0; i < barriers; ++i) {
        x = x * 1664525u + 1013904223u;
        __syncthreads();
    }
    for (int i = 0; i < shuffles; ++i) {
        x += __shfl_xor_sync(kFullWarp, x, 1 + (i & 15));
    }
    out[threadIdx.x] = x;
}

}  // namespace selftest
