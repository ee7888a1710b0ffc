// SPDX-License-Identifier: Apache-2.0
// replicate: the weights of this rank's guests into its spare slots.
//
// Blocks of a rank: one landing agent (landing.cuh), senders, pullers.
//
//   sender   every chunk of this rail's shard of every expert of this node that leaves it:
//            home window -> staging slot, once; for each receiving node: credit, put
//   puller   guests from this node: tiles, home window -> spare slot; waits for nothing
//            guests from other nodes: for each (home node, rail, worker) a sequence of chunks;
//            arrived -> landing slot of rank `rail` -> spare slot -> done
//            guests that this node relays (relays.cuh): the same, from the ring of a relay;
//            and for each relay worker the chunks that this rank relays
//
// No cycle of waits: a puller never waits for one stream while another could go on, so every chunk
// that has been put or relayed is read, and credited; senders of a rank take chunks in one order,
// and wait for credits of chunks that were put before. A staging slot serves all receivers and is
// free again when all of them have credited what was sent from it.
//
// Launch shape: 1 + senders + pullers blocks; all blocks of all ranks must be resident.
#pragma once

#include <cstdint>

#include "core/transfer_arguments.h"
#include "cuda/bounded_wait.cuh"
#include "cuda/compat.cuh"
#include "cuda/landing.cuh"
#include "cuda/network.cuh"
#include "cuda/pull_weights.cuh"
#include "cuda/weight_rows.cuh"

namespace topoep {

constexpr int kTransferThreads = 512;

// The staging slot is free when every receiver has credited the chunk last sent from it.
template <class Network>
__device__ bool wait_for_staging_slot(const DataPlane& plane, const Waiter& waiter,
                                      const Network& network, const uint64_t* staged_for) {
    const DataPlaneConfig& config = plane.config;
    const uint64_t slots = static_cast<uint64_t>(config.ring_slots);
    bool free = true;
    for (int node = static_cast<int>(threadIdx.x); node < config.num_nodes && free;
         node += static_cast<int>(blockDim.x)) {
        if (staged_for[node] == 0) {
            continue;
        }
        const uint64_t sequence = staged_for[node] - 1;
        const uint32_t slot = static_cast<uint32_t>(sequence % slots);
        const uint32_t signal = plane.window.weights.credit_signal +
                                static_cast<uint32_t>(node) * config.ring_slots + slot;
        // Later chunks may have used the ring slot again: any larger value does.
        Wanted wanted{Waited::kCredit, rank_of(plane.topology, node, config.local), slot,
                      signal_after(sequence / slots + 1), 0};
        for (;;) {
            wanted.seen = network.read(signal);
            if (wanted.seen >= wanted.value) {
                break;
            }
            if (!waiter.keep_waiting(wanted)) {
                free = false;
                break;
            }
        }
    }
    if (static_cast<int>(threadIdx.x) < config.num_nodes) {
        __threadfence_system();  // the receivers' reads before this block's writes
    }
    return __syncthreads_and(free) != 0;
}

template <class Network>
__device__ bool send_weights(const ReplicateArguments& arguments, const Network& network,
                             Waiter& waiter, int sender, int num_senders) {
    const DataPlane& plane = arguments.plane;
    const DataPlaneConfig& config = plane.config;
    const RingLayout& ring = plane.window.weights;
    const StateView state = view_state(plane.state, config);
    const ShardCut cut = weight_cut(arguments);
    const int num_chunks = cut.num_chunks(config.local);
    const uint64_t slots = static_cast<uint64_t>(config.ring_slots);
    const int num_staged = arguments.lists.staged[0];
    unsigned char* own_window = plane.windows[config.local];
    BlockCopier by_loads;

    uint64_t turn = state.header->staged;
    for (int i = 0; i < num_staged; ++i) {
        const int expert = arguments.lists.staged[1 + i];
        const int home_local = place_of(plane.topology, home_rank(config, expert)).local;
        const int first_entry = arguments.copies.copy_offsets[expert];
        const int num_entries = arguments.copies.copy_offsets[expert + 1] - first_entry;
        for (int c = 0; c < num_chunks; ++c, ++turn) {
            if (static_cast<int>(turn % num_senders) != sender) {
                continue;
            }
            const int slot = static_cast<int>(turn % config.staging_slots);
            uint64_t* staged_for = state.staged_for + int64_t{slot} * config.num_nodes;
            waiter.progress();
            if (!wait_for_staging_slot(plane, waiter, network, staged_for)) {
                return false;
            }
            const int64_t begin = cut.chunk_begin(config.local, c);
            const int64_t length = cut.chunk_length(config.local, c);
            const int64_t staging = ring.staging + slot * config.chunk_bytes;
            stage_weights(arguments, expert, home_local, {begin, length}, own_window + staging,
                          by_loads);
            __syncthreads();
            // The receivers are spread over the warps: one that is slow holds up few others.
            bool sent = true;
            const int num_warps = static_cast<int>(blockDim.x) / kWarpSize;
            for (int k = warp_index(); k < num_entries && sent; k += num_warps) {
                const int pair = arguments.lists.pair_index[first_entry + k];
                if (pair < 0) {
                    continue;
                }
                const int node =
                    load_copy(config, plane.topology, arguments.copies, first_entry + k).node;
                const int receiver = rank_of(plane.topology, node, config.local);
                const uint64_t sequence =
                    state.weights_out[node] + uint64_t{1} * pair * num_chunks + c;
                const uint32_t ring_slot = static_cast<uint32_t>(sequence % slots);
                if (warp_lane() == 0) {
                    sent = waiter.until_signal(
                        network,
                        ring.credit_signal + static_cast<uint32_t>(node) * config.ring_slots +
                            ring_slot,
                        sequence / slots, {Waited::kCredit, receiver, ring_slot, 0, 0});
                    __threadfence_system();  // credit before, staged bytes with the put
                    if (sent) {
                        staged_for[node] = sequence + 1;
                    }
                }
                sent = __shfl_sync(kFullWarp, sent ? 1 : 0, 0) != 0;
                if (sent) {
                    network.put(
                        receiver,
                        ring.landing + (int64_t{config.node} * config.ring_slots + ring_slot) *
                                           config.chunk_bytes,
                        staging, length,
                        ring.data_signal + static_cast<uint32_t>(config.node) * config.ring_slots +
                            ring_slot,
                        signal_step(sequence / slots));
                }
            }
            if (!__syncthreads_and(sent)) {
                return false;
            }
        }
    }
    return true;
}

// What the launch adds to the persistent state.
__device__ inline void advance_weights(const ReplicateArguments& arguments, int thread,
                                       int num_threads) {
    const DataPlaneConfig& config = arguments.plane.config;
    const StreamLists& lists = arguments.lists;
    const StateView state = view_state(arguments.plane.state, config);
    const ShardCut cut = weight_cut(arguments);
    for (int i = thread; i < config.num_ranks; i += num_threads) {
        const int node = i / config.ranks_per_node;
        const int pairs = lists.in_begin[node + 1] - lists.in_begin[node];
        state.weights_in[i] += uint64_t{1} * pairs * cut.num_chunks(i % config.ranks_per_node);
    }
    for (int node = thread; node < config.num_nodes; node += num_threads) {
        const int pairs = lists.out_begin[node + 1] - lists.out_begin[node];
        state.weights_out[node] += uint64_t{1} * pairs * cut.num_chunks(config.local);
    }
    if (thread == 0) {
        state.header->staged += uint64_t{1} * lists.staged[0] * cut.num_chunks(config.local);
        state.header->relayed += uint64_t{1} * lists.relays[0] * relay_cut(arguments).chunks;
    }
}

// shared: replicate_shared_bytes() bytes.
template <class Network>
__device__ void replicate_block(const ReplicateArguments& arguments, const BlockRoles& roles,
                                const Network& network, int block, unsigned char* shared) {
    const DataPlane& plane = arguments.plane;
    Waiter waiter(plane, Kernel::kReplicate);
    if (__syncthreads_or(waiter.failed())) {
        return;
    }
    bool complete = true;
    if (block == 0) {
        run_landing_agent(plane, arguments.copies, Kernel::kReplicate, plane.window.weights,
                          weight_cut(arguments), arguments.lists.in_begin, arguments.lists.in_entry,
                          view_state(plane.state, plane.config).weights_in, network,
                          reinterpret_cast<uint32_t*>(shared));
    } else if (block <= roles.senders) {
        complete = send_weights(arguments, network, waiter, block - 1, roles.senders);
    } else {
        const int puller = block - 1 - roles.senders;
        unsigned char* const counters = shared + bulk_shared_bytes(plane.config);
        BlockCopier copier(plane.config, shared);
        complete = pull_weights(arguments, waiter, copier, puller, roles.pullers,
                                reinterpret_cast<int32_t*>(counters));
    }
    if (complete) {
        leave_kernel(
            plane, Kernel::kReplicate, 1 + roles.senders + roles.pullers,
            [&](int thread, int num_threads) { advance_weights(arguments, thread, num_threads); });
    }
}

template <class Network>
__global__ void __launch_bounds__(kTransferThreads, 1)
    replicate_kernel(const __grid_constant__ ReplicateArguments arguments,
                     const __grid_constant__ BlockRoles roles,
                     const __grid_constant__ Network network) {
    TOPOEP_DYNAMIC_SHARED(unsigned char, shared);
    replicate_block(arguments, roles, network, static_cast<int>(blockIdx.x), shared);
}

// The agent's cursors, or a puller's stages and counters.
inline size_t replicate_shared_bytes(const DataPlaneConfig& config, const BlockRoles& roles) {
    const int64_t units =
        (int64_t{config.spare_slots} * config.ranks_per_node + 1) * config.workers;
    const int64_t of_puller = static_cast<int64_t>(bulk_shared_bytes(config)) +
                              (units / roles.pullers + 1) * int64_t{sizeof(int32_t)};
    const int64_t of_agent = landing_agent_shared_bytes(config);
    return static_cast<size_t>(of_puller > of_agent ? of_puller : of_agent);
}

// nullptr, or what is wrong with the roles.
inline const char* problem_with_roles(const DataPlaneConfig& config, const BlockRoles& roles) {
    if (roles.pullers < 1 || (config.num_nodes > 1 && roles.senders < 1)) {
        return "the data plane needs a puller, and with more than one node a sender";
    }
    if (config.num_nodes > 1 && config.staging_slots % roles.senders != 0) {
        return "the number of senders must divide staging_slots";
    }
    if (roles.threads % kWarpSize != 0 || roles.threads < kWarpSize ||
        roles.threads > kTransferThreads) {
        return "threads per block must be a multiple of 32, at most 512";
    }
    return nullptr;
}

template <class Network>
const char* launch_replicate(const ReplicateArguments& arguments, const BlockRoles& roles,
                             const Network& network, Stream stream) {
    if (const char* problem = problem_with_roles(arguments.plane.config, roles)) {
        return problem;
    }
    if (arguments.plane.config.bulk_piece_bytes > 0 && !has_bulk_engine()) {
        return "bulk copies need a GPU of compute capability 9.0 or later";
    }
    LaunchShape shape{dim3(static_cast<unsigned>(1 + roles.senders + roles.pullers)),
                      dim3(static_cast<unsigned>(roles.threads))};
    shape.shared_bytes = replicate_shared_bytes(arguments.plane.config, roles);
    return launch(replicate_kernel<Network>, shape, stream, arguments, roles, network);
}

}  // namespace topoep
