// SPDX-License-Identifier: Apache-2.0
// The boundary between kernel code, which is instrumented, and the emulation runtime, which is not.
// The inline headers beside this one translate CUDA's names into these calls.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "emulation/vector_types.h"

namespace emu {

// A source line. As a default argument, Site::here() is the caller's line: that is how barriers and
// collectives know their place without debug information.
struct Site {
    const char* file;
    int line;

    static constexpr Site here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
        return {file, line};
    }
};

// ---- Where a thread is. Constant for the life of a thread, so the compiler may keep the answer.
__attribute__((const)) uint3 thread_index();
__attribute__((const)) uint3 block_index();
__attribute__((const)) dim3 block_shape();
__attribute__((const)) dim3 grid_shape();

// ---- Barriers
enum class Vote : uint8_t { kNone, kAnd, kOr, kCount };

int block_barrier(Vote vote, int predicate, Site site);
void named_barrier(int id, int num_threads, Site site);
void named_barrier_arrive(int id, int num_threads, Site site);
void grid_barrier(Site site);

// ---- Warp collectives
enum class WarpOp : uint8_t {
    kSync,
    kShuffle,
    kShuffleUp,
    kShuffleDown,
    kShuffleXor,
    kBallot,
    kAny,
    kAll,
    kMatchAny,
    kMatchAll,
    kAdd,
    kMinSigned,
    kMaxSigned,
    kMinUnsigned,
    kMaxUnsigned,
    kAnd,
    kOr,
    kXor,
};

// How a shuffle picks lanes: a source, a distance or a lane mask, within segments of some lanes.
struct ShuffleLanes {
    int operand = 0;
    int width = 32;
};

struct WarpResult {
    uint64_t value;
    bool predicate;  // kMatchAll only
};

// `value` is the lane's operand as raw bits. All arguments fit into registers: this is the hottest
// call of warp-level code.
WarpResult warp_collective(WarpOp op, uint32_t mask, uint64_t value, ShuffleLanes shuffle,
                           Site site);
uint32_t active_mask();

// ---- Memory
enum class FenceScope : uint8_t { kBlock, kDevice };

enum class AtomicOp : uint8_t {
    kLoad,
    kStore,
    kExchange,
    kCompareExchange,
    kAdd,
    kSub,
    kMin,
    kMax,
    kAnd,
    kOr,
    kXor,
    kIncrement,
    kDecrement,
};

enum class Number : uint8_t { kUnsigned, kSigned, kFloat };

void fence(FenceScope scope);
// Operands and results are raw bits of `bytes` (4 or 8) bytes. Returns the old value.
uint64_t atomic(void* address, int bytes, AtomicOp op, Number number, uint64_t operand,
                uint64_t expected);

// One static shared variable of a kernel; the runtime places it at its first use in a launch.
struct SharedVariable {
    uint64_t launch = 0;
    uint32_t offset = 0;
};
void* shared_variable(SharedVariable* variable, const char* name, size_t bytes, size_t alignment,
                      Site site);
void* dynamic_shared(Site site);

// ---- Time and failure
void yield();     // lets every other thread run: a pause in a spin loop
int64_t clock();  // counts this thread's own calls, so a time limit does not depend on the others
[[noreturn]] void trap(Site site);

// ---- Launch
struct LaunchRequest {
    dim3 grid;
    dim3 block;
    size_t shared_bytes;
    bool cooperative;
    void (*invoke)(const void* call);  // runs the kernel for the current thread
    const void* call;                  // kernel and arguments, readable by every thread
    size_t call_bytes;
};
// Runs the whole grid. Returns nullptr, or why the launch was refused or died.
const char* run(const LaunchRequest& request);

// ---- Values as raw bits
template <class T>
uint64_t to_bits(T value) {
    static_assert(std::is_trivially_copyable<T>::value && sizeof(T) <= sizeof(uint64_t), "");
    uint64_t bits = 0;
    __builtin_memcpy(&bits, &value, sizeof(T));
    return bits;
}

template <class T>
T from_bits(uint64_t bits) {
    T value;
    __builtin_memcpy(&value, &bits, sizeof(T));
    return value;
}

}  // namespace emu
