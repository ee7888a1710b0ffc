// SPDX-License-Identifier: Apache-2.0
// A kernel that interprets random programs, for test_ordering.py. Each thread runs its own list of
// steps, and the order in which they happened is recorded.
#include <vector>

#include "cuda/compat.cuh"

namespace {

// As in test_ordering.py. A step is kind + 256 * argument.
enum Step : uint32_t {
    kNothing,
    kRead,
    kWrite,
    kAtomicAdd,
    kRelaxedLoad,
    kRelaxedStore,
    kFence,
    kBlockFence,
    kBlockBarrier,
    kWarpBarrier,
    kNamedBarrier,
    kNamedArrive,
};
constexpr uint32_t kComing = 128;  // added to the kind of a barrier before the thread waits in it

struct Event {
    uint32_t thread;
    uint32_t step;
};
std::vector<Event> buffer;
Event* events = nullptr;
long long num_events = 0;

// Not instrumented, so that no other thread runs between a step and its record.
__attribute__((no_sanitize("thread"), noinline)) void record(uint32_t step) {
    events[num_events++] = {blockIdx.x * blockDim.x + threadIdx.x, step};
}

// Makes the compiler read a value that nobody needs.
void consume(uint32_t value) {
    asm volatile("" ::"r"(value));
}

__global__ void run_programs(const uint32_t* programs, int num_steps, uint32_t* data,
                             uint32_t* flags) {
    const uint32_t thread = blockIdx.x * blockDim.x + threadIdx.x;
    for (int i = 0; i < num_steps; ++i) {
        const uint32_t step = programs[thread * num_steps + i];
        const uint32_t kind = step & 255;
        const uint32_t argument = step >> 8;
        if (kind >= kBlockBarrier) {
            record(step + kComing);
        }
        switch (kind) {
            case kRead:
                consume(data[argument]);
                record(step);
                break;
            case kWrite:
                data[argument] = thread;
                record(step);
                break;
            case kAtomicAdd:
                atomicAdd(&flags[argument], 1u);
                record(step);
                break;
            case kRelaxedLoad:
                topoep::load_relaxed(&flags[argument]);
                record(step);
                break;
            case kRelaxedStore:
                topoep::store_relaxed(&flags[argument], thread);
                record(step);
                break;
            case kFence:
                __threadfence();
                record(step);
                break;
            case kBlockFence:
                __threadfence_block();
                record(step);
                break;
            case kBlockBarrier:
                __syncthreads();
                record(step);
                break;
            case kWarpBarrier:
                __syncwarp();
                record(step);
                break;
            case kNamedBarrier:
                topoep::named_barrier(static_cast<int>(argument), 64);
                record(step);
                break;
            case kNamedArrive:
                topoep::named_barrier_arrive(static_cast<int>(argument), 64);
                break;
            default:
                break;
        }
    }
}

}  // namespace

extern "C" {

const char* programs_run(const uint32_t* programs, long long num_steps, uint32_t* data,
                         uint32_t* flags, long long num_blocks, long long num_threads) {
    buffer.resize(static_cast<size_t>(2 * num_steps * num_blocks * num_threads));
    events = buffer.data();
    num_events = 0;
    return topoep::launch(run_programs,
                          {static_cast<unsigned>(num_blocks), static_cast<unsigned>(num_threads)},
                          nullptr, programs, static_cast<int>(num_steps), data, flags);
}

// Pairs of thread and step, in the order in which they happened.
const uint32_t* programs_events(long long* count) {
    *count = num_events;
    return &events->thread;
}

}  // extern "C"
