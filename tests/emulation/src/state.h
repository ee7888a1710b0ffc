// SPDX-License-Identifier: Apache-2.0
// The emulated machine: threads, warps, blocks and the launch that they belong to. There is one
// machine per loaded library, and one host thread at a time may use it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "emulation/runtime.h"
#include "view.h"

namespace emu {

constexpr uint32_t kWarpSize = 32;
constexpr uint32_t kMaxThreadsPerBlock = 1024;
constexpr int kNumBarriers = 16;  // per block; barrier 0 is __syncthreads

struct Block;
struct Warp;

enum class ThreadState : uint8_t { kReady, kAtBarrier, kAtCollective, kAtGridBarrier, kExited };

// A lane's part in a warp collective.
struct WarpCall {
    WarpOp op;
    uint32_t mask;
    uint64_t value;
    ShuffleLanes shuffle;
};

struct Thread {
    void* stack_pointer = nullptr;  // while the thread does not run
    uintptr_t stack_begin = 0;

    Block* block = nullptr;
    Warp* warp = nullptr;
    uint3 index{};          // threadIdx
    uint32_t in_block = 0;  // linear index
    uint32_t in_grid = 0;
    uint32_t lane = 0;

    ThreadState state = ThreadState::kExited;
    uint32_t clock = 0;       // rises at fences, __syncwarp and named barriers
    Site site{};              // of the barrier or collective it waits in
    WarpCall call{};          // its part in a warp collective, while it waits
    WarpResult result{};      // what the collective gave it
    Vote vote = Vote::kNone;  // what it asked at a barrier
    int vote_result = 0;      // what the barrier gave it
    uint64_t ticks = 0;       // calls of clock()
    uint64_t chain = 0;       // barriers and collectives that had to follow one another so far

    // What the thread knows of others beyond its block's epoch and its warp's clocks (ordering.h).
    ViewPtr acquired;
    ViewPtr pending_device;    // seen by relaxed loads and atomics; known after a fence
    ViewPtr pending_block;     // the same, from its own block: a block fence is enough
    ViewPtr published_device;  // what its last fence lets later atomics pass on
    ViewPtr published_block;
};

struct Warp {
    Thread* lanes[kWarpSize];
    uint32_t first_thread;  // in the grid
    uint32_t present;       // lanes that exist
    uint32_t exited;
    uint32_t waiting;       // lanes that wait in a collective
    uint32_t woken;         // lanes that the scheduler is about to make ready
    uint32_t synced_epoch;  // of the last __syncwarp: lanes know of each other only from then on
    uint32_t known[kWarpSize][kWarpSize];  // known[i][k]: the clock of lane k that lane i knows of
};

struct Barrier {
    std::vector<Thread*> waiting;
    std::vector<View::ThreadEntry> stamps;  // of all who came, when they came
    ViewPtr view;                           // what they knew
    uint32_t arrived = 0;                   // without waiting
    int expected = 0;                       // threads; 0 means all that have not exited
    Site site{};                            // of the first to come
    uint64_t chain = 0;
    bool vote_and = true;
    bool vote_or = false;
    int vote_count = 0;
};

struct Block {
    uint32_t in_grid = 0;
    uint3 index{};              // blockIdx
    uint32_t first_thread = 0;  // in the grid
    uint32_t live = 0;          // threads that have not exited
    uint32_t epoch = 0;
    ViewPtr acquired;        // what all threads know of other blocks
    char* shared = nullptr;  // its shared memory
    Barrier barriers[kNumBarriers];
    std::vector<Thread*> threads;
    std::vector<Warp> warps;
};

struct Launch {
    LaunchRequest request{};
    uint64_t number = 0;
    uint32_t threads_per_block = 0;
    uint32_t num_blocks = 0;
    // Threads have serial numbers that never repeat: this one plus the index in the grid. Accesses
    // with a smaller one are of an earlier launch, or of before the last grid barrier.
    uint32_t first_serial = 1;
    std::vector<Block*> resident;
    std::vector<Thread*> at_grid_barrier;
    uint64_t polls = 0;     // of flags since anything last went forward
    uint64_t switches = 0;  // in this launch
    uint64_t chain = 0;
    const char* failure = nullptr;  // set when the launch was given up
};

extern Launch launch_state;
extern Thread* current;  // nullptr while host code runs
// Whether kernels report their accesses: true in a library with code built for it.
extern bool instrumented;

}  // namespace emu
