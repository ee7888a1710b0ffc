// SPDX-License-Identifier: Apache-2.0
// exchange_counts: counts[r] = the row of rank r, on every rank, without the host.
//
//   1   this rank's row -> the windows of its node's ranks; ready flag
//   2   block 0: one put of the row to rank `local` of every other node
//   3   every row that lands here -> the windows of this node's ranks; ready flag
//   4   wait for the flags of all ranks; window -> counts
//
// A row crosses to another node once. A rank leaves only when all rows are here, so every rank has
// started this exchange, and ended the previous one: that makes it a barrier, and two buffers by
// parity of the generation are enough. The signals need the same two sets: a rank may start an
// exchange while its row of the last one is still on its way. No step waits for a later step of
// another rank.
//
// Launch shape: blocks stride over ranks and nodes; all blocks of all ranks must be resident.
#pragma once

#include <cstdint>

#include "core/transfer_arguments.h"
#include "cuda/bounded_wait.cuh"
#include "cuda/compat.cuh"
#include "cuda/copy.cuh"
#include "cuda/network.cuh"

namespace topoep {

constexpr int kExchangeThreads = 256;
constexpr int kMaxExchangeBlocks = 16;

template <class Network>
__device__ void exchange_counts_block(const ExchangeArguments& arguments, const Network& network,
                                      int block, int num_blocks) {
    const DataPlane& plane = arguments.plane;
    const DataPlaneConfig& config = plane.config;
    const WindowLayout& window = plane.window;
    Waiter waiter(plane, Kernel::kExchange);
    if (__syncthreads_or(waiter.failed())) {
        return;
    }
    const int thread = static_cast<int>(threadIdx.x);
    const int num_threads = static_cast<int>(blockDim.x);
    const int local_ranks = config.ranks_per_node;
    const uint64_t generation =
        static_cast<StateHeader*>(plane.state)->generation[static_cast<int>(Kernel::kExchange)] + 1;
    const int64_t row_bytes = config.count_row_bytes();
    const int64_t used_bytes = int64_t{config.num_experts} * int64_t{sizeof(int32_t)};
    const auto row_at = [&](int rank) {
        return window.counts +
               (static_cast<int64_t>(generation % 2) * config.num_ranks + rank) * row_bytes;
    };
    // Every second generation uses the same signals.
    const uint64_t uses = (generation + 1) / 2;
    const uint32_t first_signal =
        window.counts_signal +
        static_cast<uint32_t>(generation % 2) * static_cast<uint32_t>(config.num_nodes);
    const auto flag_at = [&](int local, int rank) {
        return reinterpret_cast<uint64_t*>(plane.windows[local] + window.counts_ready) + rank;
    };

    // 1. The own window is block 0's: it puts from there.
    for (int turn = block; turn < local_ranks; turn += num_blocks) {
        const int local = (config.local + turn) % local_ranks;
        copy_bytes(plane.windows[local] + row_at(config.rank),
                   reinterpret_cast<const unsigned char*>(arguments.row), used_bytes, thread,
                   num_threads);
        __syncthreads();
        if (thread == 0) {
            __threadfence_system();
            store_relaxed(flag_at(local, config.rank), generation);
        }
    }
    // 2.
    if (block == 0) {
        for (int node = warp_index(); node < config.num_nodes; node += num_threads / kWarpSize) {
            if (node != config.node) {
                if (warp_lane() == 0) {
                    __threadfence_system();
                }
                network.put(rank_of(plane.topology, node, config.local), row_at(config.rank),
                            row_at(config.rank), row_bytes,
                            first_signal + static_cast<uint32_t>(config.node),
                            signal_step(uses - 1));
            }
        }
    }
    // 3.
    for (int node = block; node < config.num_nodes; node += num_blocks) {
        if (node == config.node) {
            continue;
        }
        const int source = rank_of(plane.topology, node, config.local);
        bool landed = true;
        if (thread == 0) {
            landed = waiter.until_signal(
                network, first_signal + static_cast<uint32_t>(node), uses,
                {Waited::kCountsSignal, source, static_cast<uint32_t>(node), 0, 0});
            __threadfence_system();
        }
        if (!__syncthreads_and(landed)) {
            return;
        }
        const unsigned char* row = plane.windows[config.local] + row_at(source);
        for (int local = 0; local < local_ranks; ++local) {
            if (local != config.local) {
                copy_bytes(plane.windows[local] + row_at(source), row, used_bytes, thread,
                           num_threads);
            }
        }
        __syncthreads();
        if (thread < local_ranks) {
            __threadfence_system();
        }
        for (int local = thread; local < local_ranks; local += num_threads) {
            store_relaxed(flag_at(local, source), generation);
        }
    }
    // 4.
    bool complete = true;
    for (int rank = block + thread * num_blocks; rank < config.num_ranks && complete;
         rank += num_threads * num_blocks) {
        complete = waiter.until_at_least(
            flag_at(config.local, rank),
            {Waited::kCounts, rank, static_cast<uint32_t>(rank), generation, 0});
    }
    __threadfence_system();
    if (!__syncthreads_and(complete)) {
        return;
    }
    for (int rank = block; rank < config.num_ranks; rank += num_blocks) {
        copy_bytes(
            reinterpret_cast<unsigned char*>(arguments.counts + int64_t{rank} * config.num_experts),
            plane.windows[config.local] + row_at(rank), used_bytes, thread, num_threads);
    }
    leave_kernel(plane, Kernel::kExchange, num_blocks, [](int, int) {});
}

template <class Network>
__global__ void __launch_bounds__(kExchangeThreads, 1)
    exchange_counts_kernel(const __grid_constant__ ExchangeArguments arguments,
                           const __grid_constant__ Network network) {
    exchange_counts_block(arguments, network, static_cast<int>(blockIdx.x),
                          static_cast<int>(gridDim.x));
}

template <class Network>
const char* launch_exchange_counts(const ExchangeArguments& arguments, const Network& network,
                                   Stream stream) {
    const int ranks = arguments.plane.config.num_ranks;
    const int blocks = ranks < kMaxExchangeBlocks ? ranks : kMaxExchangeBlocks;
    const LaunchShape shape{dim3(static_cast<unsigned>(blocks)), dim3(kExchangeThreads)};
    return launch(exchange_counts_kernel<Network>, shape, stream, arguments, network);
}

}  // namespace topoep
