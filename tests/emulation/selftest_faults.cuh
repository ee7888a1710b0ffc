// SPDX-License-Identifier: Apache-2.0
// Kernels that are wrong on purpose, each in one way. The emulation must report every one under
// every schedule, whether or not its result came out right. `out` has 256 words.
#pragma once

#include "cuda/compat.cuh"

namespace selftest {

// ---- Inside a block

__global__ void missing_barrier(uint32_t* out, uint32_t*) {
    TOPOEP_SHARED(uint32_t, values, [256]);
    values[threadIdx.x] = threadIdx.x;
    out[threadIdx.x] = values[255 - threadIdx.x];
}

__global__ void write_after_read(uint32_t* out, uint32_t*) {
    TOPOEP_SHARED(uint32_t, values, [256]);
    values[threadIdx.x] = threadIdx.x;
    __syncthreads();
    const uint32_t next = values[(threadIdx.x + 1) & 255];
    values[threadIdx.x] = next;
    __syncthreads();
    out[threadIdx.x] = values[threadIdx.x];
}

__global__ void lost_update(uint32_t* out, uint32_t*) {
    TOPOEP_SHARED(uint32_t, count);
    if (threadIdx.x == 0) {
        count = 0;
    }
    __syncthreads();
    count = count + 1;
    __syncthreads();
    out[threadIdx.x] = count;
}

// The counter is atomic, but one thread looks at it with a plain read.
__global__ void plain_read_of_atomic(uint32_t* out, uint32_t*) {
    TOPOEP_SHARED(uint32_t, count);
    if (threadIdx.x == 0) {
        count = 0;
    }
    __syncthreads();
    atomicAdd(&count, 1u);
    if (threadIdx.x == 77) {
        out[0] = count;
    }
}

__global__ void divergent_barrier(uint32_t* out, uint32_t*) {
    if (threadIdx.x < 96) {
        out[threadIdx.x] = 1;
        __syncthreads();
    } else {
        out[threadIdx.x] = 2;
        __syncthreads();
    }
}

// One warp waits for a partner that never comes, all others for that warp.
__global__ void missing_thread_at_barrier(uint32_t* out, uint32_t*) {
    if (threadIdx.x < 32) {
        topoep::named_barrier(1, 64);
    }
    __syncthreads();
    out[threadIdx.x] = 1;
}

__global__ void poll_without_end(uint32_t* out, uint32_t*) {
    if (threadIdx.x == 7) {
        while (topoep::load_relaxed(&out[0]) != 12345) {
        }
    }
    __syncthreads();
}

__global__ void barrier_counts_differ(uint32_t* out, uint32_t*) {
    topoep::named_barrier(1, threadIdx.x & 1 ? 64 : 128);
    out[threadIdx.x] = 1;
}

// The producer writes after it told the consumer that all is there.
__global__ void write_after_arrive(uint32_t* out, uint32_t*) {
    TOPOEP_SHARED(uint32_t, buffer, [32]);
    const unsigned lane = threadIdx.x & 31;
    if (threadIdx.x < 32) {
        topoep::named_barrier_arrive(1, 64);
        buffer[lane] = lane;
    } else if (threadIdx.x < 64) {
        topoep::named_barrier(1, 64);
        out[lane] = buffer[lane];
    }
}

// ---- Inside a warp

__global__ void missing_syncwarp(uint32_t* out, uint32_t*) {
    TOPOEP_SHARED(uint32_t, values, [256]);
    values[threadIdx.x] = threadIdx.x;
    out[threadIdx.x] = values[threadIdx.x ^ 1];
}

// A vote makes the lanes meet, but orders no memory.
__global__ void vote_as_syncwarp(uint32_t* out, uint32_t*) {
    TOPOEP_SHARED(uint32_t, values, [256]);
    values[threadIdx.x] = threadIdx.x;
    __any_sync(0xffffffffu, 1);
    out[threadIdx.x] = values[threadIdx.x ^ 1];
}

__global__ void shuffle_from_outside_mask(uint32_t* out, uint32_t*) {
    uint32_t value = threadIdx.x;
    if ((threadIdx.x & 31) < 16) {
        value = __shfl_down_sync(0x0000ffffu, value, 8, 32);
    }
    out[threadIdx.x] = value;
}

__global__ void mask_without_caller(uint32_t* out, uint32_t*) {
    out[threadIdx.x] = __ballot_sync(0x0000ffffu, 1);
}

__global__ void masks_differ(uint32_t* out, uint32_t*) {
    const unsigned mask = (threadIdx.x & 31) < 16 ? 0xffffffffu : 0xffff8000u;
    out[threadIdx.x] = __ballot_sync(mask, 1);
}

__global__ void collectives_differ(uint32_t* out, uint32_t*) {
    if (threadIdx.x & 1) {
        out[threadIdx.x] = __ballot_sync(0xffffffffu, 1);
    } else {
        out[threadIdx.x] = __any_sync(0xffffffffu, 1);
    }
}

__global__ void divergent_shuffle(uint32_t* out, uint32_t*) {
    uint32_t value = threadIdx.x;
    if (threadIdx.x & 1) {
        value = __shfl_xor_sync(0xffffffffu, value, 2);
    }
    __syncthreads();
    out[threadIdx.x] = value;
}

// ---- Memory that is not there, or holds nothing

__global__ void shared_out_of_bounds(uint32_t* out, uint32_t*) {
    TOPOEP_SHARED(uint32_t, values, [255]);
    values[threadIdx.x] = 1;
    __syncthreads();
    out[threadIdx.x] = values[threadIdx.x / 2];
}

__global__ void global_out_of_bounds(uint32_t* out, uint32_t*) {
    out[threadIdx.x + 1] = 1;
}

__global__ void null_pointer(uint32_t* out, uint32_t* extra) {
    uint32_t* nothing = extra - (reinterpret_cast<uintptr_t>(extra) / 4);
    out[threadIdx.x] = nothing[threadIdx.x];
}

__global__ void local_of_another_thread(uint32_t* out, uint32_t*) {
    TOPOEP_SHARED(uint32_t*, pointer);
    uint32_t local[2] = {threadIdx.x, out[threadIdx.x]};
    if (threadIdx.x == 0) {
        pointer = local;
    }
    __syncthreads();
    out[threadIdx.x] = pointer[threadIdx.x & 1];
    __syncthreads();
}

__global__ void uninitialised_shared(uint32_t* out, uint32_t*) {
    TOPOEP_SHARED(uint32_t, values, [256]);
    if (threadIdx.x < 255) {
        values[threadIdx.x] = 1;
    }
    __syncthreads();
    out[threadIdx.x] = values[threadIdx.x];
}

// `extra` is registered as not initialised.
__global__ void uninitialised_global(uint32_t* out, uint32_t* extra) {
    if (threadIdx.x != 9) {
        extra[threadIdx.x] = 1;
    }
    __syncthreads();
    out[threadIdx.x] = extra[threadIdx.x];
}

// ---- Alignment

__global__ void misaligned_vector_load(uint32_t* out, uint32_t* extra) {
    const uint4 value = *reinterpret_cast<const uint4*>(extra + 1);
    out[threadIdx.x] = value.x + value.w;
}

__global__ void misaligned_vector_store(uint32_t*, uint32_t* extra) {
    if (threadIdx.x == 0) {
        *reinterpret_cast<uint4*>(extra + 2) = make_uint4(1, 2, 3, 4);
    }
}

// The bytes may lie anywhere: only their type's alignment is promised.
__global__ void misaligned_shared_vector(uint32_t* out, uint32_t*) {
    TOPOEP_SHARED(unsigned char, bytes, [64]);
    if (threadIdx.x < 4) {
        reinterpret_cast<uint4*>(bytes)[threadIdx.x] = make_uint4(1, 2, 3, 4);
    }
    __syncthreads();
    out[threadIdx.x] = bytes[threadIdx.x & 63];
}

__global__ void misaligned_hinted_load(uint32_t* out, uint32_t* extra) {
    const uint2 value = __ldg(reinterpret_cast<const uint2*>(extra + 1));
    out[threadIdx.x] = value.x + value.y;
}

__global__ void misaligned_atomic(uint32_t*, uint32_t* extra) {
    unsigned char* bytes = reinterpret_cast<unsigned char*>(extra);
    atomicAdd(reinterpret_cast<uint32_t*>(bytes + 2), 1u);
}

// ---- Between blocks. extra[0] is a ticket, extra[1 ..] what each block has to tell.

__global__ void cross_block_race(uint32_t* out, uint32_t*) {
    out[blockIdx.x / 2] = blockIdx.x;
}

// The writer's block orders a read after the write; that must not hide the write from the others.
__global__ void race_behind_a_read(uint32_t* out, uint32_t* extra) {
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        extra[0] = 1;
    }
    __syncthreads();
    if (threadIdx.x == 1) {
        out[blockIdx.x] = extra[0];
    }
}

// The same with an atomic in place of the read.
__global__ void race_behind_an_atomic(uint32_t*, uint32_t* extra) {
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        extra[0] = 1;
    }
    __syncthreads();
    if (threadIdx.x == 1) {
        atomicAdd(&extra[0], 1u);
    }
}

// Each block wants to read what the one before it wrote, but the swap that should tell of it fails.
__global__ void release_by_failed_swap(uint32_t* out, uint32_t* extra) {
    if (threadIdx.x == 0) {
        const unsigned place = atomicAdd(&extra[0], 1u);
        extra[2 + place] = place;
        __threadfence();
        atomicCAS(&extra[1], 12345u, 1u);
        __threadfence();
        out[place] = place == 0 ? 0 : extra[2 + place - 1];
    }
}

enum FencePlace { kNoFence, kBeforeWrite, kBeforeTicket, kAfterTicket, kBlockScope };

// Blocks leave a value and take a ticket; the last one reads all values.
__device__ __forceinline__ void tell_last_block(uint32_t* out, uint32_t* extra, FencePlace release,
                                                FencePlace acquire) {
    if (threadIdx.x != 0) {
        return;
    }
    if (release == kBeforeWrite) {
        __threadfence();
    }
    extra[1 + blockIdx.x] = blockIdx.x;
    if (release == kBeforeTicket) {
        __threadfence();
    }
    if (release == kBlockScope) {
        __threadfence_block();
    }
    const bool is_last = atomicAdd(&extra[0], 1u) == gridDim.x - 1;
    if (acquire == kAfterTicket) {
        __threadfence();
    }
    if (acquire == kBlockScope) {
        __threadfence_block();
    }
    if (is_last) {
        uint32_t sum = 0;
        for (unsigned block = 0; block < gridDim.x; ++block) {
            sum += extra[1 + block];
        }
        out[0] = sum;
    }
}

__global__ void fences_in_place(uint32_t* out, uint32_t* extra) {  // the control of what follows
    tell_last_block(out, extra, kBeforeTicket, kAfterTicket);
}
__global__ void missing_release_fence(uint32_t* out, uint32_t* extra) {
    tell_last_block(out, extra, kNoFence, kAfterTicket);
}
__global__ void missing_acquire_fence(uint32_t* out, uint32_t* extra) {
    tell_last_block(out, extra, kBeforeTicket, kNoFence);
}
__global__ void fence_before_write(uint32_t* out, uint32_t* extra) {
    tell_last_block(out, extra, kBeforeWrite, kAfterTicket);
}
__global__ void release_of_block_scope(uint32_t* out, uint32_t* extra) {
    tell_last_block(out, extra, kBlockScope, kAfterTicket);
}
__global__ void acquire_of_block_scope(uint32_t* out, uint32_t* extra) {
    tell_last_block(out, extra, kBeforeTicket, kBlockScope);
}

// ---- Other

__global__ void grid_sync_without_cooperation(uint32_t* out, uint32_t*) {
    topoep::grid_sync();
    out[threadIdx.x] = 1;
}

__global__ void exit_before_grid_sync(uint32_t* out, uint32_t*) {
    if (threadIdx.x == 0) {
        return;
    }
    topoep::grid_sync();
    out[threadIdx.x] = 1;
}

__global__ void trap_in_one_thread(uint32_t* out, uint32_t*) {
    out[threadIdx.x] = 1;
    if (threadIdx.x == 200) {
        __trap();
    }
}

}  // namespace selftest
