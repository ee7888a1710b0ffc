// SPDX-License-Identifier: Apache-2.0
// stream_lists: what one rank sends, lands, gathers and sums (core/stream_lists.h), from the plan.
//
//   1   every entry of the list of copies: is it the first of its expert in its node, and does that
//       pair leave or enter this node? Kept in order (a prefix sum over the block).
//   2   a warp each for the two directions: number the pairs of every stream, 32 at a time
//   3   sort them by stream, which the numbers make a plain scatter
//   4   what this node relays (relay_lists.cuh); this rank's own slots
//
// Launch shape: one block. The order of entries decides everything, so all ranks number alike.
#pragma once

#include <cstdint>

#include "core/limits.h"
#include "core/stream_lists.h"
#include "cuda/compat.cuh"
#include "cuda/relay_lists.cuh"
#include "cuda/team.cuh"

namespace topoep {

constexpr int kStreamListThreads = 512;

// The other end of the pair that this entry leads, when this node is one end.
struct PairEnds {
    bool leaves;
    bool enters;
    int node;  // receiver of a pair that leaves, home node of one that enters
};

__device__ inline PairEnds pair_ends(const DataPlaneConfig& config, const TopologyView& topology,
                                     const PlanCopies& copies, int entry) {
    const Copy copy = load_copy(config, topology, copies, entry);
    const int home = place_of(topology, home_rank(config, copy.expert)).node;
    bool leads = copy.node != home;
    if (leads && entry > copies.copy_offsets[copy.expert]) {
        leads = load_copy(config, topology, copies, entry - 1).node != copy.node;
    }
    const bool leaves = leads && home == config.node;
    const bool enters = leads && copy.node == config.node;
    return {leaves, enters, leaves ? copy.node : home};
}

// Gives the pairs of `order` their index in their stream, in this order. streams[n] counts those of
// stream n and is zero at first. One warp.
__device__ inline void number_pairs(const DataPlaneConfig& config, const TopologyView& topology,
                                    const PlanCopies& copies, const int32_t* order, int count,
                                    int32_t* pair_index, int32_t* streams) {
    const int lane = warp_lane();
    for (int base = 0; base < count; base += kWarpSize) {
        const bool valid = base + lane < count;
        const int entry = valid ? order[base + lane] : -1;
        const int node = valid ? pair_ends(config, topology, copies, entry).node : -1;
        const unsigned same = __match_any_sync(kFullWarp, node);
        const int before = __popc(same & ((1u << lane) - 1));
        if (valid) {
            pair_index[entry] = streams[node] + before;
        }
        __syncwarp();
        if (valid && before == 0) {
            streams[node] += __popc(same);
        }
        __syncwarp();
    }
}

// This rank's slots whose expert comes in chunks, by (home node, index): `guests`.
__device__ inline void list_guests(const DataPlaneConfig& config, const TopologyView& topology,
                                   const PlanCopies& copies, const StreamLists& lists) {
    TOPOEP_SHARED(int32_t, home_node, [kMaxSpareSlots]);
    TOPOEP_SHARED(int32_t, pair, [kMaxSpareSlots]);
    const int slot = static_cast<int>(threadIdx.x);
    int own_node = -1;
    if (slot < config.spare_slots) {
        const int expert = copies.slot_expert[config.rank * config.spare_slots + slot];
        const int home =
            expert < 0 ? config.node : place_of(topology, home_rank(config, expert)).node;
        if (home != config.node) {
            own_node = home;
            int entry = copies.copy_offsets[expert];
            while (load_copy(config, topology, copies, entry).node != config.node) {
                ++entry;
            }
            pair[slot] = lists.pair_index[entry];
        } else if (expert >= 0) {
            pair[slot] = relay_index(copies, lists.relays, expert);
            own_node = pair[slot] >= 0 ? home : -1;
        }
        home_node[slot] = own_node;
    }
    __syncthreads();
    if (slot < config.spare_slots) {
        int before = 0;
        int count = 0;
        for (int other = 0; other < config.spare_slots; ++other) {
            if (home_node[other] >= 0) {
                ++count;
                before +=
                    own_node >= 0 && (home_node[other] < own_node ||
                                      (home_node[other] == own_node && pair[other] < pair[slot]));
            }
        }
        if (own_node >= 0) {
            int32_t* guest = lists.guests + 1 + 3 * before;
            guest[0] = slot;
            guest[1] = own_node;
            guest[2] = pair[slot];
        }
        if (slot == 0) {
            lists.guests[0] = count;
        }
    }
}

__global__ void __launch_bounds__(kStreamListThreads, 1)
    stream_lists_kernel(DataPlaneConfig config, TopologyView topology, PlanCopies copies,
                        StreamLists lists) {
    TOPOEP_SHARED(int32_t, out_streams, [kMaxRanks]);
    TOPOEP_SHARED(int32_t, in_streams, [kMaxRanks]);
    const BlockTeam team;
    const int num_entries = copies.copy_offsets[config.num_experts];
    for (int n = team.lane(); n < config.num_nodes; n += team.size()) {
        out_streams[n] = 0;
        in_streams[n] = 0;
    }
    int num_out = 0;
    int num_in = 0;
    for (int base = 0; base < num_entries; base += team.size()) {
        const int entry = base + team.lane();
        PairEnds ends{};
        if (entry < num_entries) {
            ends = pair_ends(config, topology, copies, entry);
            lists.pair_index[entry] = -1;
        }
        int32_t total = 0;
        const int32_t out_before = team.exclusive_sum(ends.leaves ? 1 : 0, &total);
        if (ends.leaves) {
            lists.out_order[num_out + out_before] = entry;
        }
        num_out += total;
        const int32_t in_before = team.exclusive_sum(ends.enters ? 1 : 0, &total);
        if (ends.enters) {
            lists.in_order[num_in + in_before] = entry;
        }
        num_in += total;
    }
    __syncthreads();

    const int num_warps = team.size() / kWarpSize;
    if (warp_index() == 0) {
        number_pairs(config, topology, copies, lists.out_order, num_out, lists.pair_index,
                     out_streams);
    }
    if (warp_index() == num_warps - 1) {
        number_pairs(config, topology, copies, lists.in_order, num_in, lists.pair_index,
                     in_streams);
    }
    __syncthreads();

    prefix_sum(team, out_streams, lists.out_begin, config.num_nodes);
    prefix_sum(team, in_streams, lists.in_begin, config.num_nodes);
    int num_staged = 0;
    for (int base = 0; base < num_out; base += team.size()) {
        const int i = base + team.lane();
        bool first = false;
        int expert = 0;
        if (i < num_out) {
            const int entry = lists.out_order[i];
            const Copy copy = load_copy(config, topology, copies, entry);
            lists.out_entry[lists.out_begin[copy.node] + lists.pair_index[entry]] = entry;
            expert = copy.expert;
            first = i == 0 ||
                    load_copy(config, topology, copies, lists.out_order[i - 1]).expert != expert;
        }
        int32_t total = 0;
        const int32_t before = team.exclusive_sum(first ? 1 : 0, &total);
        if (first) {
            lists.staged[1 + num_staged + before] = expert;
        }
        num_staged += total;
    }
    if (team.lane() == 0) {
        lists.staged[0] = num_staged;
    }
    for (int i = team.lane(); i < num_in; i += team.size()) {
        const int entry = lists.in_order[i];
        const int home = pair_ends(config, topology, copies, entry).node;
        lists.in_entry[lists.in_begin[home] + lists.pair_index[entry]] = entry;
    }
    __syncthreads();
    list_relays(config, topology, copies, lists);
    list_guests(config, topology, copies, lists);
}

inline const char* launch_stream_lists(const DataPlaneConfig& config, const TopologyView& topology,
                                       const PlanCopies& copies, int32_t* lists, Stream stream) {
    const LaunchShape shape{dim3(1), dim3(kStreamListThreads)};
    return launch(stream_lists_kernel, shape, stream, config, topology, copies,
                  view_stream_lists(lists, config));
}

}  // namespace topoep
