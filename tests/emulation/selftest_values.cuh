// SPDX-License-Identifier: Apache-2.0
// Kernels that record what votes, collectives, atomics and intrinsics return, for comparison with
// the test's own idea of them.
#pragma once

#include "cuda/compat.cuh"

namespace selftest {

// out[16][32]: row r is the result of the r-th collective on each lane.
__global__ void warp_values(const uint32_t* in, uint32_t* out) {
    const unsigned lane = threadIdx.x;
    const unsigned all = 0xffffffffu;
    const uint32_t v = in[lane];
    int equal = 0;
    int row = 0;
    auto put = [&](uint32_t value) { out[32 * row++ + lane] = value; };
    put(__shfl_sync(all, v, 5, 8));
    put(__shfl_up_sync(all, v, 3, 16));
    put(__shfl_down_sync(all, v, 3, 16));
    put(__shfl_xor_sync(all, v, 6, 32));
    put(__ballot_sync(all, v & 1));
    put(static_cast<uint32_t>(__any_sync(all, v == in[7])));
    put(static_cast<uint32_t>(__all_sync(all, v == in[7])));
    put(__match_any_sync(all, v & 3));
    put(__match_all_sync(all, v & 0, &equal) + static_cast<uint32_t>(equal));
    put(__match_all_sync(all, v, &equal) + static_cast<uint32_t>(equal));
    put(__reduce_add_sync(all, v));
    put(__reduce_min_sync(all, v));
    put(static_cast<uint32_t>(__reduce_min_sync(all, static_cast<int>(v))));
    put(static_cast<uint32_t>(__reduce_max_sync(all, static_cast<int>(v))));
    put(__reduce_and_sync(all, v) ^ __reduce_or_sync(all, v) ^ __reduce_xor_sync(all, v));
    // The lanes of a half warp talk among themselves, each half under its own mask.
    const unsigned half = lane < 16 ? 0x0000ffffu : 0xffff0000u;
    put(__ballot_sync(half, v & 2));
}

// out[3][threads] of the votes of a whole block.
__global__ void block_votes(const int* in, int* out) {
    const int v = in[threadIdx.x];
    out[threadIdx.x] = __syncthreads_count(v > 0);
    out[blockDim.x + threadIdx.x] = __syncthreads_and(v >= 0);
    out[2 * blockDim.x + threadIdx.x] = __syncthreads_or(v < 0);
}

struct AtomicCells {
    unsigned add, sub, min, max, bit_and, bit_or, bit_xor, exchanged, wrapped_up, wrapped_down, cas;
    int signed_min, signed_max;
    unsigned long long wide_add, wide_cas;
    float float_add;
    double double_add;
};

// All threads of all blocks apply every atomic operation; none of the results depends on the order.
__global__ void atomic_values(AtomicCells* cells) {
    const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    atomicAdd(&cells->add, i);
    atomicSub(&cells->sub, 2u);
    atomicMin(&cells->min, i + 7);
    atomicMax(&cells->max, i + 7);
    atomicAnd(&cells->bit_and, ~(1u << (i & 7)));
    atomicOr(&cells->bit_or, 1u << (i & 15));
    atomicXor(&cells->bit_xor, i);
    atomicExch(&cells->exchanged, 77u);
    atomicInc(&cells->wrapped_up, 9u);
    atomicDec(&cells->wrapped_down, 9u);
    atomicMin(&cells->signed_min, 5 - static_cast<int>(i));
    atomicMax(&cells->signed_max, static_cast<int>(i) - 500);
    atomicAdd(&cells->wide_add, 1ull << 33);
    atomicAdd(&cells->float_add, 0.5f);
    atomicAdd(&cells->double_add, 0.25);
    for (unsigned old = topoep::load_relaxed(&cells->cas);;) {
        const unsigned seen = atomicCAS(&cells->cas, old, old + 3);
        if (seen == old) {
            break;
        }
        old = seen;
    }
    atomicCAS(&cells->wide_cas, 0ull, 1ull << 40);
}

// out[i] is the i-th function of a and b.
__global__ void intrinsic_values(unsigned a, unsigned b, uint32_t* out) {
    int i = 0;
    auto put = [&](uint32_t value) { out[i++] = value; };
    put(__popc(a));
    put(__popcll(static_cast<unsigned long long>(a) << 32 | b));
    put(__clz(static_cast<int>(a)));
    put(__clz(0));
    put(__clzll(static_cast<long long>(b)));
    put(__ffs(static_cast<int>(a)));
    put(__ffs(0));
    put(__ffsll(static_cast<long long>(a) << 32));
    put(__brev(a));
    put(__umulhi(a, b));
    put(static_cast<uint32_t>(__mulhi(static_cast<int>(a), static_cast<int>(b))));
    put(static_cast<uint32_t>(__umul64hi(static_cast<unsigned long long>(a) << 32,
                                         static_cast<unsigned long long>(b) << 16)));
    put(__funnelshift_l(a, b, 5));
    put(__funnelshift_r(a, b, 37));
    put(__byte_perm(a, b, 0x5140));
    put(__byte_perm(a, b, 0x8f3c));
    put(__float_as_uint(__fmaf_rn(1.5f, 2.0f, __uint_as_float(0x3f800000u))));
    put(min(a, b));
    put(max(a, b));
    put(__ldg(&out[0]));
}

// Where the variables lie: misaligned for more than their type promises.
__global__ void shared_alignment(uint32_t* out) {
    TOPOEP_DYNAMIC_SHARED(unsigned char, dynamic);
    TOPOEP_SHARED(unsigned char, bytes, [3]);
    TOPOEP_SHARED(uint4, vector);
    bytes[threadIdx.x] = 0;
    vector = uint4{};
    dynamic[threadIdx.x] = 0;
    out[0] = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(dynamic) % 256);
    out[1] = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(&bytes[0]) % 2);
    out[2] = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(&vector) % 32);
}

}  // namespace selftest
