// SPDX-License-Identifier: Apache-2.0
// A step of stream_lists: what the links of this node carry, and which experts are relayed
// (core/relays.h).
//
//   1   every entry in this node: its reads, and is it the first copy of an expert of this node?
//   2   a warp for each of those: how many copies has it here? Two or more make a candidate.
//   3   one warp chooses, and sorts what it chose
//
// Sums and keys are integers, so neither the order of the atomics nor that of the candidates shows.
#pragma once

#include <cstdint>

#include "core/relays.h"
#include "core/stream_lists.h"
#include "cuda/compat.cuh"
#include "cuda/team.cuh"

namespace topoep {

// Place of an expert in `relays`; -1: it is not relayed.
__device__ inline int relay_index(const PlanCopies& copies, const int32_t* relays, int expert) {
    for (int i = 0; i < relays[0]; ++i) {
        const int entry = relays[1 + i];
        if (entry >= copies.copy_offsets[expert] && entry < copies.copy_offsets[expert + 1]) {
            return i;
        }
    }
    return -1;
}

// Whether this entry is the first of two copies or more that its home node has.
__device__ inline bool leads_copies_at_home(const DataPlaneConfig& config,
                                            const TopologyView& topology, const PlanCopies& copies,
                                            int entry, const Copy& copy) {
    const auto is_here = [&](int other) {
        return load_copy(config, topology, copies, other).node == copy.node;
    };
    return entry + 1 < copies.copy_offsets[copy.expert + 1] && is_here(entry + 1) &&
           (entry == copies.copy_offsets[copy.expert] || !is_here(entry - 1));
}

// links: what they carry without relays. Returns the number of candidates, whose `copies` are not
// known yet. A chunk of what crosses the network counts as a shard too: that is 1 / G of a row
// against 1 / (G - 1), which the comparison can bear.
__device__ inline int survey_node(const DataPlaneConfig& config, const TopologyView& topology,
                                  const PlanCopies& copies, const StreamLists& lists,
                                  const NodeLinks& links) {
    TOPOEP_SHARED(uint32_t, imported, [1]);
    TOPOEP_SHARED(uint32_t, num_candidates, [1]);
    const BlockTeam team;
    const uint32_t copy_shards = static_cast<uint32_t>(links.shards_per_copy());
    uint32_t* out = reinterpret_cast<uint32_t*>(links.out);
    uint32_t* in = reinterpret_cast<uint32_t*>(links.in);
    for (int rank = team.lane(); rank < links.num_ranks; rank += team.size()) {
        out[rank] = 0;
        in[rank] = static_cast<uint32_t>(lists.staged[0]);
    }
    if (team.lane() == 0) {
        imported[0] = 0;
        num_candidates[0] = 0;
    }
    team.sync();
    // Every rank but the home fetches its shard of what leaves the node.
    for (int i = team.lane(); i < lists.staged[0]; i += team.size()) {
        const int home = place_of(topology, home_rank(config, lists.staged[1 + i])).local;
        team.add(out + home, copy_shards);
        team.add(in + home, ~0u);
    }
    const int num_entries = copies.copy_offsets[config.num_experts];
    for (int entry = team.lane(); entry < num_entries; entry += team.size()) {
        const Copy copy = load_copy(config, topology, copies, entry);
        if (copy.node != config.node) {
            continue;
        }
        const Place home = place_of(topology, home_rank(config, copy.expert));
        team.add(in + copy.local, copy_shards);
        if (home.node != config.node) {  // a shard from the landing ring of every other rank
            team.add(imported, 1u);
            team.add(out + copy.local, ~0u);
            continue;
        }
        team.add(out + home.local, copy_shards);
        if (leads_copies_at_home(config, topology, copies, entry, copy)) {
            lists.relay_candidates[atomicAdd(num_candidates, 1u)] = {
                entry, static_cast<int16_t>(home.local), 0};
        }
    }
    team.sync();
    for (int rank = team.lane(); rank < links.num_ranks; rank += team.size()) {
        out[rank] += imported[0];
    }
    return static_cast<int>(num_candidates[0]);
}

// How many copies the candidate has in this node. One warp.
__device__ inline int copies_in_node(const DataPlaneConfig& config, const TopologyView& topology,
                                     const PlanCopies& copies, int entry) {
    const int end = copies.copy_offsets[load_copy(config, topology, copies, entry).expert + 1];
    int count = 0;
    for (int base = entry; base < end; base += kWarpSize) {
        const int other = base + warp_lane();
        const bool is_here =
            other < end && load_copy(config, topology, copies, other).node == config.node;
        const unsigned here = __ballot_sync(kFullWarp, is_here);
        count += __popc(here);
        if (here != kFullWarp) {
            break;  // the copies of a node follow each other
        }
    }
    return count;
}

// All threads of the block, all with the same arguments. Needs a barrier before the call.
__device__ inline void list_relays(const DataPlaneConfig& config, const TopologyView& topology,
                                   const PlanCopies& copies, const StreamLists& lists) {
    const NodeLinks links{topology.node_size(config.node), lists.relay_links,
                          lists.relay_links + config.num_ranks};
    if (links.num_ranks < kLeastRanksToRelay || config.max_relays == 0) {
        if (threadIdx.x == 0) {
            lists.relays[0] = 0;
        }
        __syncthreads();
        return;
    }
    const int num_candidates = survey_node(config, topology, copies, lists, links);
    const int num_warps = static_cast<int>(blockDim.x) / kWarpSize;
    for (int i = warp_index(); i < num_candidates; i += num_warps) {
        RelayCandidate& candidate = lists.relay_candidates[i];
        const int count = copies_in_node(config, topology, copies, candidate.entry);
        if (warp_lane() == 0) {
            candidate.copies = static_cast<int16_t>(count);
        }
    }
    __syncthreads();
    if (warp_index() == 0) {
        TOPOEP_SHARED(int32_t, chosen, [kMaxRelays]);
        const int count = choose_relays(
            WarpTeam{}, links, lists.relay_candidates, num_candidates, chosen, config.max_relays,
            [&](int entry) { return load_copy(config, topology, copies, entry).local; });
        if (warp_lane() < count) {
            int before = 0;
            for (int i = 0; i < count; ++i) {
                before += chosen[i] < chosen[warp_lane()];
            }
            lists.relays[1 + before] = chosen[warp_lane()];
        }
        if (warp_lane() == 0) {
            lists.relays[0] = count;
        }
    }
    __syncthreads();
}

}  // namespace topoep
