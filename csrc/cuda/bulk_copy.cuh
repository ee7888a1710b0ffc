// SPDX-License-Identifier: Apache-2.0
// Copies of bytes by the bulk-copy engine, a ring of pieces deep:
//
//     source -> shared memory -> target      piece n uses stage n % kBulkStages
//
//     load    n  n-1  n-2  n-3  n-4          on their way, when piece n has been started
//     store                          n-5     started before; its stage is loaded again with piece
//                                            n + 1, when the engine has read it
//
// One thread of the block does it all; the others have nothing to do. Nothing is held in registers,
// so that a block keeps kLoadsAhead + 1 pieces in flight, however few threads it has.
#pragma once

#include <cstdint>

#include "core/data_plane.h"
#include "cuda/bulk_engine.cuh"
#include "cuda/compat.cuh"
#include "cuda/ids.cuh"
#include "cuda/packed_copy.cuh"

namespace topoep {

constexpr uint32_t kLoadsAhead = kBulkStages - 2;

// At the begin of the shared memory of a BulkCopier; the pieces follow.
struct alignas(128) BulkStages {
    uint64_t barriers[kBulkStages];       // first: a BulkEngine's
    unsigned char* targets[kBulkStages];  // where the piece in a stage goes
    uint32_t bytes[kBulkStages];
};

TOPOEP_HD size_t bulk_shared_bytes(const DataPlaneConfig& config) {
    const size_t pieces = kBulkStages * static_cast<size_t>(config.bulk_piece_bytes);
    return pieces == 0 ? 0 : sizeof(BulkStages) + pieces;
}

// A state of one thread of the block; the others' is not used.
class BulkCopier {
public:
    // shared: bulk_shared_bytes() bytes, aligned to 128.
    __device__ BulkCopier(unsigned char* shared, int piece_bytes)
        : stages_(reinterpret_cast<BulkStages*>(shared)),
          piece_bytes_(static_cast<uint32_t>(piece_bytes)),
          engine_(reinterpret_cast<uint64_t*>(shared)) {}

    // Before anything else.
    __device__ void start() { engine_.start(); }

    // Starts a copy. Addresses and `bytes` are multiples of 16; the source does not change until
    // finish() has returned, and what others have written there was seen by this thread.
    __device__ void copy(unsigned char* target, const unsigned char* source, int64_t bytes) {
        engine_.fence();  // the source was written by threads
        while (bytes > 0) {
            const uint32_t length =
                bytes < piece_bytes_ ? static_cast<uint32_t>(bytes) : piece_bytes_;
            if (loaded_ - stored_ > kLoadsAhead) {
                store_oldest();
            }
            engine_.wait_reads_but_one();
            const int stage = static_cast<int>(loaded_ % kBulkStages);
            stages_->targets[stage] = target;
            stages_->bytes[stage] = length;
            engine_.load(stage, piece(stage), source, length);
            ++loaded_;
            target += length;
            source += length;
            bytes -= length;
        }
    }

    // All copies are done, and this thread may tell others.
    __device__ void finish() {
        while (stored_ < loaded_) {
            store_oldest();
        }
        engine_.wait_stores();
        engine_.fence();
    }

private:
    __device__ unsigned char* piece(int stage) const {
        return reinterpret_cast<unsigned char*>(stages_ + 1) +
               static_cast<uint32_t>(stage) * piece_bytes_;
    }

    __device__ void store_oldest() {
        const int stage = static_cast<int>(stored_ % kBulkStages);
        engine_.wait_load(stage, stored_ / kBulkStages & 1);
        engine_.fence();  // the engine has written the piece, and reads it for another copy
        engine_.store(stages_->targets[stage], piece(stage), stages_->bytes[stage]);
        ++stored_;
    }

    BulkStages* stages_;
    uint32_t piece_bytes_;
    BulkEngine engine_;
    uint32_t loaded_ = 0;  // pieces whose load was started
    uint32_t stored_ = 0;
};

// Copies of a block, by loads of all threads or by the engine. All threads make the same calls.
class BlockCopier {
public:
    // By loads.
    __device__ BlockCopier() : bulk_(nullptr, 0), by_engine_(false) {}

    // As the configuration says. shared: bulk_shared_bytes() bytes, aligned to 128.
    __device__ BlockCopier(const DataPlaneConfig& config, unsigned char* shared)
        : bulk_(shared, config.bulk_piece_bytes),
          by_engine_(kHasBulkEngine && config.bulk_piece_bytes > 0) {
        if (by_engine_ && threadIdx.x == 0) {
            bulk_.start();
        }
    }

    // Without the engine each thread has done its part on return, with it nothing need be there
    // before finish().
    __device__ void copy(unsigned char* target, const unsigned char* source, int64_t bytes) {
        int64_t by_engine = 0;
        if (by_engine_ && is_vector_aligned(target) && is_vector_aligned(source)) {
            by_engine = bytes / kVectorBytes * kVectorBytes;
            if (threadIdx.x == 0) {
                bulk_.copy(target, source, by_engine);
            }
        }
        copy_block(target + by_engine, source + by_engine, bytes - by_engine);
    }

    // Before the barrier behind which others may see the copies.
    __device__ void finish() {
        if (by_engine_ && threadIdx.x == 0) {
            bulk_.finish();
        }
    }

private:
    BulkCopier bulk_;
    bool by_engine_;
};

}  // namespace topoep
