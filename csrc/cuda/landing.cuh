// SPDX-License-Identifier: Apache-2.0
// The landing agent, block 0 of replicate and reduce_grads_across: signals are seen by this GPU
// alone, so it tells the ranks of its node what has landed, and the senders what has been read.
//
// For the stream of every other node m, in order of its chunks:
//   signal data(m, slot) says chunk a is here   -> arrived[m][rail] = a + 1 at every reader; ++a
//   done[m][h] of every reader h is above k     -> signal credit to the sender; ++k
// A thread looks after one stream or more and never waits for one of them alone.
#pragma once

#include <cstdint>

#include "core/expert_layout.h"
#include "core/stream_lists.h"
#include "cuda/bounded_wait.cuh"
#include "cuda/compat.cuh"

namespace topoep {

// The incoming stream of one node on this rank's rail.
struct IncomingStream {
    const RingLayout* ring;
    int node;       // where it comes from
    int sender;     // rank, on this rail
    uint64_t base;  // sequence number of its first chunk in this launch
    int num_pairs;
    int num_chunks;          // of a pair, on this rail
    const int32_t* entries;  // [num_pairs]

    __device__ uint64_t total() const { return uint64_t{1} * num_pairs * num_chunks; }
};

// Readers: f(local rank) for every rank of this node that reads chunks of the pair. Weights are
// read by the holders, whose entries follow the leading one; partial gradients by the home rank.
template <class F>
__device__ void for_readers(const DataPlane& plane, const PlanCopies& copies, Kernel kernel,
                            int entry, F&& f) {
    const Copy first = load_copy(plane.config, plane.topology, copies, entry);
    if (kernel == Kernel::kReduce) {
        f(place_of(plane.topology, home_rank(plane.config, first.expert)).local);
        return;
    }
    const int end = copies.copy_offsets[first.expert + 1];
    for (Copy copy = first; copy.node == first.node;) {
        f(copy.local);
        if (++entry == end) {
            return;
        }
        copy = load_copy(plane.config, plane.topology, copies, entry);
    }
}

__device__ inline uint64_t* arrived_flag(const DataPlane& plane, const RingLayout& ring, int reader,
                                         int node, int rail) {
    return reinterpret_cast<uint64_t*>(plane.windows[reader] + ring.arrived) +
           node * plane.config.ranks_per_node + rail;
}

// Written by worker `worker` of `reader`, read by the rank of this rail.
__device__ inline uint64_t* done_flag(const DataPlane& plane, const RingLayout& ring, int rail,
                                      int node, int reader, int worker) {
    return reinterpret_cast<uint64_t*>(plane.windows[rail] + ring.done) +
           (int64_t{node} * plane.config.ranks_per_node + reader) * plane.config.workers + worker;
}

// One step of a stream. False: a signal cannot be right.
template <class Network>
__device__ bool step_stream(const DataPlane& plane, const PlanCopies& copies, Kernel kernel,
                            const Waiter& waiter, const Network& network,
                            const IncomingStream& stream, uint32_t* landed, uint32_t* credited,
                            bool* moved, Wanted* wanted) {
    const DataPlaneConfig& config = plane.config;
    const RingLayout& ring = *stream.ring;
    const uint64_t slots = static_cast<uint64_t>(config.ring_slots);
    if (*landed < stream.total()) {
        const uint64_t sequence = stream.base + *landed;
        const uint32_t slot = static_cast<uint32_t>(sequence % slots);
        const uint64_t uses = sequence / slots + 1;
        const uint64_t value = network.read(
            ring.data_signal + static_cast<uint32_t>(stream.node) * config.ring_slots + slot);
        const SignalState state = signal_state(value, uses);
        *wanted = {state == SignalState::kImpossible ? Waited::kImpossibleSignal : Waited::kData,
                   stream.sender, slot, signal_after(uses), value};
        if (state == SignalState::kImpossible) {
            waiter.fail(*wanted);
            return false;
        }
        if (state == SignalState::kReached) {
            __threadfence_system();  // what the network wrote, to this thread and on to the readers
            const int entry = stream.entries[*landed / stream.num_chunks];
            for_readers(plane, copies, kernel, entry, [&](int reader) {
                store_relaxed(arrived_flag(plane, ring, reader, stream.node, config.local),
                              sequence + 1);
            });
            ++*landed;
            *moved = true;
        }
    }
    if (*credited < *landed) {
        const uint64_t sequence = stream.base + *credited;
        const int chunk = static_cast<int>(*credited % stream.num_chunks);
        bool all_done = true;
        for_readers(
            plane, copies, kernel, stream.entries[*credited / stream.num_chunks], [&](int reader) {
                const uint64_t done = load_relaxed(done_flag(plane, ring, config.local, stream.node,
                                                             reader, chunk % config.workers));
                if (done <= sequence && all_done) {
                    all_done = false;
                    *wanted = {Waited::kDone, rank_of(plane.topology, config.node, reader),
                               static_cast<uint32_t>(stream.node), sequence + 1, done};
                }
            });
        if (all_done) {
            __threadfence_system();  // the readers' loads before the network's next write
            const uint32_t slot = static_cast<uint32_t>(sequence % slots);
            network.signal(
                stream.sender,
                ring.credit_signal + static_cast<uint32_t>(config.node) * config.ring_slots + slot,
                signal_step(sequence / slots));
            ++*credited;
            *moved = true;
        }
    }
    return true;
}

// begin, entries: the streams (in_begin, in_entry or out_begin, out_entry). base: [N, G].
// cursors: shared memory, [2, N].
template <class Network>
__device__ void run_landing_agent(const DataPlane& plane, const PlanCopies& copies, Kernel kernel,
                                  const RingLayout& ring, const ShardCut& cut, const int32_t* begin,
                                  const int32_t* entries, const uint64_t* base,
                                  const Network& network, uint32_t* cursors) {
    const DataPlaneConfig& config = plane.config;
    const int num_nodes = config.num_nodes;
    const int num_threads = static_cast<int>(blockDim.x);
    // Neighbouring streams go to different warps: lanes of one warp would take turns.
    const int num_warps = num_threads / kWarpSize;
    const int first = warp_lane() * num_warps + warp_index();
    for (int node = first; node < num_nodes; node += num_threads) {
        cursors[node] = 0;
        cursors[num_nodes + node] = 0;
    }
    Waiter waiter(plane, kernel);
    for (bool left = true; left;) {
        left = false;
        bool moved = false;
        Wanted wanted{};
        for (int node = first; node < num_nodes; node += num_threads) {
            const IncomingStream stream{&ring,
                                        node,
                                        rank_of(plane.topology, node, config.local),
                                        base[node * config.ranks_per_node + config.local],
                                        begin[node + 1] - begin[node],
                                        cut.num_chunks(config.local),
                                        entries + begin[node]};
            if (cursors[num_nodes + node] == stream.total()) {
                continue;
            }
            left = true;
            if (!step_stream(plane, copies, kernel, waiter, network, stream, cursors + node,
                             cursors + num_nodes + node, &moved, &wanted)) {
                return;
            }
        }
        if (moved) {
            waiter.progress();
        } else if (left && !waiter.keep_waiting(wanted)) {
            return;
        }
    }
}

inline int64_t landing_agent_shared_bytes(const DataPlaneConfig& config) {
    return int64_t{2} * config.num_nodes * int64_t{sizeof(uint32_t)};
}

}  // namespace topoep
