// SPDX-License-Identifier: Apache-2.0
// The bulk-copy engine of sm_90 and later: one thread starts copies between global and shared
// memory and waits for them. Like compat.cuh, each statement of PTX in a function of its own with a
// host twin. The twin does everything as late as a GPU may: bytes arrive in shared memory when
// their barrier is waited for, and leave it when the engine is waited for.
#pragma once

#include <cstdint>

#include "cuda/compat.cuh"

namespace topoep {

constexpr int kBulkStages = 6;  // pieces of shared memory through which copies go

#if defined(TOPOEP_EMULATE)

// Whether the current device has the engine.
inline bool has_bulk_engine() {
    return true;
}

constexpr bool kHasBulkEngine = true;

// All calls come from one thread of the block.
class BulkEngine {
public:
    // barriers: [kBulkStages] in shared memory.
    explicit BulkEngine(uint64_t* barriers) : barriers_(barriers) {}

    void start() {
        for (int stage = 0; stage < kBulkStages; ++stage) {
            barriers_[stage] = 0;  // phases that have ended
        }
    }

    void load(int stage, unsigned char* shared, const unsigned char* global, uint32_t bytes) {
        loads_[stage] = {shared, global, bytes};
    }

    // Waits for the phase of this parity to end. On a GPU that never comes if nothing was loaded.
    void wait_load(int stage, uint32_t parity) {
        if ((barriers_[stage] & 1) == parity) {
            move(loads_[stage]);
            ++barriers_[stage];
        }
    }

    void store(unsigned char* global, const unsigned char* shared, uint32_t bytes) {
        stores_[(first_store_ + num_stores_++) % kBulkStages] = {global, shared, bytes};
    }

    // Until the engine has read the shared memory of all stores but the last one.
    void wait_reads_but_one() { finish_stores(1); }

    // Until all stores are done, and what they wrote can be seen by this thread.
    void wait_stores() { finish_stores(0); }

    // Between accesses of threads and of the engine to the same memory.
    static void fence() {}

private:
    struct Copy {
        unsigned char* target = nullptr;
        const unsigned char* source = nullptr;
        uint32_t bytes = 0;
    };

    static void move(Copy& copy) {
        for (uint32_t i = 0; i < copy.bytes; ++i) {
            copy.target[i] = copy.source[i];
        }
        copy.bytes = 0;
    }

    void finish_stores(int left) {
        for (; num_stores_ > left; --num_stores_) {
            move(stores_[first_store_]);
            first_store_ = (first_store_ + 1) % kBulkStages;
        }
    }

    uint64_t* barriers_;
    Copy loads_[kBulkStages];
    Copy stores_[kBulkStages];
    int first_store_ = 0;
    int num_stores_ = 0;
};

#else

inline bool has_bulk_engine() {
    int device = 0;
    int major = 0;
    return cudaGetDevice(&device) == cudaSuccess &&
           cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) ==
               cudaSuccess &&
           major >= 9;
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900

constexpr bool kHasBulkEngine = false;

// Never used: the host refuses to ask for it on these devices.
class BulkEngine {
public:
    __device__ explicit BulkEngine(uint64_t*) {}
    __device__ void start() {}
    __device__ void load(int, unsigned char*, const unsigned char*, uint32_t) {}
    __device__ void wait_load(int, uint32_t) {}
    __device__ void store(unsigned char*, const unsigned char*, uint32_t) {}
    __device__ void wait_reads_but_one() {}
    __device__ void wait_stores() {}
    __device__ static void fence() {}
};

#else

constexpr bool kHasBulkEngine = true;

class BulkEngine {
public:
    __device__ explicit BulkEngine(uint64_t* barriers) : barriers_(barriers) {}

    __device__ void start() {
        for (int stage = 0; stage < kBulkStages; ++stage) {
            asm volatile(
                "mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(in_shared(barriers_ + stage))
                : "memory");
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        fence();
    }

    // Addresses and sizes are multiples of 16. The phase ends when all bytes have come.
    __device__ void load(int stage, unsigned char* shared, const unsigned char* global,
                         uint32_t bytes) {
        const uint32_t barrier = in_shared(barriers_ + stage);
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
                     "r"(bytes)
                     : "memory");
        asm volatile(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
            "[%3];" ::"r"(in_shared(shared)),
            "l"(__cvta_generic_to_global(global)), "r"(bytes), "r"(barrier)
            : "memory");
    }

    __device__ void wait_load(int stage, uint32_t parity) {
        uint32_t done = 0;
        while (done == 0) {
            asm volatile(
                "{\n"
                ".reg .pred ended;\n"
                "mbarrier.try_wait.parity.shared::cta.b64 ended, [%1], %2;\n"
                "selp.u32 %0, 1, 0, ended;\n"
                "}\n"
                : "=r"(done)
                : "r"(in_shared(barriers_ + stage)), "r"(parity)
                : "memory");
        }
    }

    __device__ void store(unsigned char* global, const unsigned char* shared, uint32_t bytes) {
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(
                         __cvta_generic_to_global(global)),
                     "r"(in_shared(shared)), "r"(bytes)
                     : "memory");
        asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    }

    __device__ void wait_reads_but_one() {
        asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
    }

    __device__ void wait_stores() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

    __device__ static void fence() { asm volatile("fence.proxy.async;" ::: "memory"); }

private:
    __device__ static uint32_t in_shared(const void* address) {
        return static_cast<uint32_t>(__cvta_generic_to_shared(address));
    }

    uint64_t* barriers_;
};

#endif
#endif

}  // namespace topoep
