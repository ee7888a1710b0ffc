// SPDX-License-Identifier: Apache-2.0
// What a test may set before a launch, and what the emulation counts.
#pragma once

#include <cstddef>
#include <cstdint>

namespace emu {

// The order in which threads that are ready run, and blocks start.
enum class Order : int { kInOrder = 0, kReverse = 1, kRandom = 2, kWarpRandom = 3 };

struct Options {
    uint64_t seed = 1;
    Order order = Order::kRandom;
    int preempt = 0;             // a forced switch every so many accesses; 0: only at barriers
    int resident = 1;            // blocks that run interleaved; the others wait for them to end
    size_t stack_bytes = 65536;  // of each thread
    size_t max_shared_bytes = 227 * 1024;  // static and dynamic, per block
    uint64_t max_polls = 300000;           // of flags, without progress, before a livelock
    uint64_t max_switches = 1000000000;    // in a launch, before a livelock; 0: no limit
    bool check_races = true;
    bool check_bounds = true;
    bool check_initialised = true;
};

struct Stats {
    uint64_t switches = 0;  // from one thread to another
    uint64_t barriers = 0;  // of a block or a grid, completed
    uint64_t warp_ops = 0;  // warp collectives completed
    uint64_t accesses = 0;  // to memory other than the thread's own stack (instrumented builds)
    uint64_t atomics = 0;   // relaxed loads and stores included
    // Barriers and warp collectives that had to follow one another: the longest chain of each
    // launch, summed over launches. It bounds the kernel's latency from below.
    uint64_t chain = 0;
};

extern Options options;
extern Stats stats;

}  // namespace emu
