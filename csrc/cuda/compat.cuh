// SPDX-License-Identifier: Apache-2.0
// The header through which kernel files reach CUDA (bulk_engine.cuh has one more engine). The same
// kernel source compiles with nvcc for a GPU and, with TOPOEP_EMULATE defined, with a host
// compiler: the test suite then executes it on the CPU (tests/emulation).
//
// Whatever g++ cannot parse or nvcc spells differently is hidden here: __shared__ variables, the
// launch syntax, cooperative groups, and inline PTX, each statement in a named function of its own
// with a host twin of the same meaning.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "core/hd.h"

#if defined(TOPOEP_EMULATE)
#if defined(__CUDACC__)
#error "TOPOEP_EMULATE is for host compilers only"
#endif
#include "emulation.h"
#elif defined(__CUDACC__)
#include <cooperative_groups.h>
#include <cuda_runtime.h>
#else
#error "compile kernel files with nvcc, or with TOPOEP_EMULATE and tests/emulation/include"
#endif

// TOPOEP_SHARED(uint32_t, counts, [64]);  a variable of the block: counts is an array of 64
// TOPOEP_SHARED(State, state);            state is a reference-like name for one State
// TOPOEP_DYNAMIC_SHARED(uint32_t, data);  data points to LaunchShape::shared_bytes bytes
#if defined(TOPOEP_EMULATE)
#define TOPOEP_SHARED(T, name, ...) EMU_SHARED(T, name, __VA_ARGS__)
#define TOPOEP_DYNAMIC_SHARED(T, name) EMU_DYNAMIC_SHARED(T, name)
#else
#define TOPOEP_SHARED(T, name, ...) __shared__ T name __VA_ARGS__
#define TOPOEP_DYNAMIC_SHARED(T, name)                                      \
    extern __shared__ __align__(128) unsigned char topoep_dynamic_shared[]; \
    T* name = reinterpret_cast<T*>(topoep_dynamic_shared)
#endif

namespace topoep {

struct LaunchShape {
    dim3 grid;
    dim3 block;
    size_t shared_bytes = 0;   // dynamic shared memory per block
    bool cooperative = false;  // all blocks are resident at once: grid_sync() may be used
};

// A kernel may use this much shared memory without asking; more needs an attribute on the function.
constexpr size_t kSharedBytesWithoutOptIn = 48 * 1024;

#if defined(TOPOEP_EMULATE)

using Stream = void*;

// Returns nullptr, or what is wrong with the launch.
template <class... Parameters, class... Arguments>
const char* launch(void (*kernel)(Parameters...), const LaunchShape& shape, Stream,
                   Arguments&&... arguments) {
    return emu::launch(kernel, shape.grid, shape.block, shape.shared_bytes, shape.cooperative,
                       std::forward<Arguments>(arguments)...);
}

inline void grid_sync(emu::Site site = emu::Site::here()) {
    emu::grid_barrier(site);
}

inline void named_barrier(int id, int num_threads, emu::Site site = emu::Site::here()) {
    emu::named_barrier(id, num_threads, site);
}

inline void named_barrier_arrive(int id, int num_threads, emu::Site site = emu::Site::here()) {
    emu::named_barrier_arrive(id, num_threads, site);
}

using emu::load_relaxed;
using emu::store_relaxed;

__forceinline__ uint4 load_streaming(const uint4* address) {
    return *address;
}
__forceinline__ uint2 load_streaming(const uint2* address) {
    return *address;
}

inline uint64_t global_timer() {
    return static_cast<uint64_t>(emu::clock());
}

#else

using Stream = cudaStream_t;

// Returns nullptr, or the CUDA error text. Launches are asynchronous: an error of the kernel itself
// shows at a later call.
template <class... Parameters, class... Arguments>
const char* launch(void (*kernel)(Parameters...), const LaunchShape& shape, Stream stream,
                   Arguments&&... arguments) {
    cudaError_t error = cudaSuccess;
    if (shape.shared_bytes > kSharedBytesWithoutOptIn) {
        error = cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                     cudaFuncAttributeMaxDynamicSharedMemorySize,
                                     static_cast<int>(shape.shared_bytes));
    }
    if (error == cudaSuccess) {
        cudaLaunchAttribute cooperative{};
        cooperative.id = cudaLaunchAttributeCooperative;
        cooperative.val.cooperative = 1;
        cudaLaunchConfig_t config{};
        config.gridDim = shape.grid;
        config.blockDim = shape.block;
        config.dynamicSmemBytes = shape.shared_bytes;
        config.stream = stream;
        config.attrs = &cooperative;
        config.numAttrs = shape.cooperative ? 1 : 0;
        error = cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...);
    }
    if (error == cudaSuccess) {
        return nullptr;
    }
    // The caller reports it: left pending, it would surface again at someone else's next check.
    cudaGetLastError();
    return cudaGetErrorString(error);
}

// Waits for all threads of a cooperative launch and orders all memory between them.
__device__ __forceinline__ void grid_sync() {
    cooperative_groups::this_grid().sync();
}

// A barrier of num_threads threads (whole warps) of the block. Ids 1 to 15 are free; 0 is
// __syncthreads.
__device__ __forceinline__ void named_barrier(int id, int num_threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(num_threads) : "memory");
}

// Counts at a named barrier without waiting: for producers that have nothing to wait for.
__device__ __forceinline__ void named_barrier_arrive(int id, int num_threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(num_threads) : "memory");
}

// Loads and stores of flags that other threads, blocks or GPUs write meanwhile. Volatile accesses
// are relaxed accesses of system scope in the PTX memory model: they order nothing, so put a fence
// beside them.
template <class T>
__device__ __forceinline__ T load_relaxed(const T* address) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "relaxed accesses are of 4 or 8 bytes");
    return *static_cast<const volatile T*>(address);
}
template <class T>
__device__ __forceinline__ void store_relaxed(T* address, std::common_type_t<T> value) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "relaxed accesses are of 4 or 8 bytes");
    *static_cast<volatile T*>(address) = value;
}

// A 16- or 8-byte load of data that is read once: it leaves the L1 cache to others. Unlike __ldg it
// may read what other blocks or GPUs wrote during the kernel.
__device__ __forceinline__ uint4 load_streaming(const uint4* address) {
    uint4 value;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(address)
                 : "memory");
    return value;
}

__device__ __forceinline__ uint2 load_streaming(const uint2* address) {
    uint2 value;
    asm volatile("ld.global.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
                 : "=r"(value.x), "=r"(value.y)
                 : "l"(address)
                 : "memory");
    return value;
}

// Nanoseconds since some common start, for time limits; the emulation counts the thread's calls.
__device__ __forceinline__ uint64_t global_timer() {
    uint64_t nanoseconds;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(nanoseconds));
    return nanoseconds;
}

#endif

}  // namespace topoep
