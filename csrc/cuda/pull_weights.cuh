// SPDX-License-Identifier: Apache-2.0
// The pullers of replicate: what they fetch, and in which order.
//
//   tiles          guests from this node, straight from their home rank: nothing to wait for
//   gather units   (home node, rank, worker): the chunks of the guests from another node that have
//                  landed at that rank of this one, or of those that it relays
//   relay workers  what this rank relays to others (relays.cuh)
//
// Units are dealt out over the pullers. A puller takes whatever can go on and blocks on nothing.
#pragma once

#include <cstdint>

#include "core/limits.h"
#include "core/transfer_arguments.h"
#include "cuda/bounded_wait.cuh"
#include "cuda/compat.cuh"
#include "cuda/landing.cuh"
#include "cuda/packed_copy.cuh"
#include "cuda/relays.cuh"
#include "cuda/weight_rows.cuh"

namespace topoep {

// The guests that are pulled from their home rank in this node, and how their rows are cut into
// tiles.
struct LocalGuests {
    int slots[kMaxSpareSlots];
    int count;
    int tiles_per_guest;
};

__device__ inline void list_local_guests(const ReplicateArguments& arguments, LocalGuests* guests) {
    const DataPlaneConfig& config = arguments.plane.config;
    const int32_t* listed = arguments.lists.guests;
    unsigned in_chunks = 0;
    for (int i = 0; i < listed[0]; ++i) {
        in_chunks |= 1u << listed[1 + 3 * i];
    }
    int count = 0;
    for (int slot = 0; slot < config.spare_slots; ++slot) {
        const int expert = arguments.copies.slot_expert[config.rank * config.spare_slots + slot];
        if (expert >= 0 && (in_chunks >> slot & 1) == 0) {
            guests->slots[count++] = slot;
        }
    }
    guests->count = count;
    guests->tiles_per_guest =
        static_cast<int>((arguments.layout.total() + config.tile_bytes - 1) / config.tile_bytes);
}

__device__ inline void pull_tile(const ReplicateArguments& arguments, const LocalGuests& guests,
                                 BlockCopier& copier, int tile) {
    const DataPlane& plane = arguments.plane;
    const DataPlaneConfig& config = plane.config;
    const int slot = guests.slots[tile / guests.tiles_per_guest];
    const int expert = arguments.copies.slot_expert[config.rank * config.spare_slots + slot];
    const int home_local = place_of(plane.topology, home_rank(config, expert)).local;
    const int64_t begin = tile % guests.tiles_per_guest * config.tile_bytes;
    const int64_t left = arguments.layout.total() - begin;
    for_tensor_parts(arguments.layout, begin, left < config.tile_bytes ? left : config.tile_bytes,
                     [&](int t, int64_t from, int64_t to) {
                         copier.copy(spare_address(arguments, slot, t, from),
                                     home_address(arguments, expert, home_local, t, from),
                                     to - from);
                     });
}

// Guests of one home node: guests[first .. first + count) of the list of guests. This node's own
// are those that it relays.
struct GuestGroup {
    int node;
    int first;
    int count;
};

// Returns how many groups there are.
__device__ inline int list_guest_groups(const int32_t* guests, GuestGroup* groups) {
    int count = 0;
    for (int i = 0; i < guests[0]; ++i) {
        const int node = guests[1 + 3 * i + 1];
        if (count == 0 || groups[count - 1].node != node) {
            groups[count++] = {node, i, 0};
        }
        ++groups[count - 1].count;
    }
    return count;
}

// How rows are cut: over the rails of the network, and over the relays of this node.
struct WeightCuts {
    ShardCut rails;
    RelayCut relays;
};

// Chunks of the guests of one home node that one worker gathers from one rank, in order.
struct GatherUnit {
    const GuestGroup* group;
    int rail;  // local index of the rank
    int worker;
    int chunks_per_guest;  // of this worker

    __device__ bool is_relayed(const DataPlaneConfig& config) const {
        return group->node == config.node;
    }
};

__device__ inline GatherUnit gather_unit(const DataPlaneConfig& config, const WeightCuts& cuts,
                                         const GuestGroup* groups, int unit) {
    const int worker = unit % config.workers;
    const int rail = unit / config.workers % config.ranks_per_node;
    const GuestGroup* group = groups + unit / (config.workers * config.ranks_per_node);
    const int num_chunks = cuts.rails.num_chunks(rail);
    return {group, rail, worker,
            group->node == config.node
                ? cuts.relays.chunks
                : (num_chunks - worker + config.workers - 1) / config.workers};
}

// One chunk of a guest.
struct GuestChunk {
    int slot;
    PackedRange range;
    uint64_t sequence;
};

__device__ inline GuestChunk guest_chunk(const ReplicateArguments& arguments,
                                         const WeightCuts& cuts, const GatherUnit& unit,
                                         int progress) {
    const DataPlaneConfig& config = arguments.plane.config;
    const StateView state = view_state(arguments.plane.state, config);
    const int guest = unit.group->first + progress / unit.chunks_per_guest;
    const int32_t* fields = arguments.lists.guests + 1 + 3 * guest;
    const int j = progress % unit.chunks_per_guest;
    if (unit.is_relayed(config)) {
        const int expert =
            arguments.copies.slot_expert[config.rank * config.spare_slots + fields[0]];
        const int home = place_of(arguments.plane.topology, home_rank(config, expert)).local;
        return {fields[0], relayed_range(config, cuts.relays, home, unit.rail, unit.worker, j),
                state.header->relayed + uint64_t{1} * fields[2] * cuts.relays.chunks + j};
    }
    const int index = j * config.workers + unit.worker;
    const uint64_t base = state.weights_in[unit.group->node * config.ranks_per_node + unit.rail];
    return {fields[0],
            {cuts.rails.chunk_begin(unit.rail, index), cuts.rails.chunk_length(unit.rail, index)},
            base + uint64_t{1} * fields[2] * cuts.rails.num_chunks(unit.rail) + index};
}

// How the work of a gather unit is, from chunk *progress on, which skips empty ones; see next_unit.
__device__ inline UnitState check_chunk(const ReplicateArguments& arguments, const WeightCuts& cuts,
                                        const GatherUnit& unit, int32_t* progress, Wanted* wanted) {
    const DataPlane& plane = arguments.plane;
    const DataPlaneConfig& config = plane.config;
    const int count = unit.chunks_per_guest * unit.group->count;
    for (int i = *progress; i < count; ++i) {
        const GuestChunk chunk = guest_chunk(arguments, cuts, unit, i);
        if (chunk.range.length == 0) {
            continue;
        }
        *progress = i;
        const uint64_t ready = load_relaxed(
            unit.is_relayed(config) ? relay_ready_flag(plane, config.local, unit.rail, unit.worker)
                                    : arrived_flag(plane, plane.window.weights, config.local,
                                                   unit.group->node, unit.rail));
        if (ready > chunk.sequence) {
            return UnitState::kReady;
        }
        *wanted = {Waited::kArrived, rank_of(plane.topology, config.node, unit.rail),
                   static_cast<uint32_t>(unit.group->node), chunk.sequence + 1, ready};
        return UnitState::kWaiting;
    }
    *progress = count;
    return UnitState::kFinished;
}

// Ring slot -> spare slot, and the ring slot is given back.
__device__ inline void gather_chunk(const ReplicateArguments& arguments, const GatherUnit& unit,
                                    const GuestChunk& chunk, BlockCopier& copier) {
    const DataPlane& plane = arguments.plane;
    const DataPlaneConfig& config = plane.config;
    const RingLayout& ring = plane.window.weights;
    const bool is_relayed = unit.is_relayed(config);
    const int64_t ring_slot =
        static_cast<int64_t>(chunk.sequence % static_cast<uint64_t>(config.ring_slots));
    const unsigned char* source =
        is_relayed
            ? relay_slot(plane, unit.rail, unit.worker, chunk.sequence)
            : plane.windows[unit.rail] + ring.landing +
                  (int64_t{unit.group->node} * config.ring_slots + ring_slot) * config.chunk_bytes;
    for_tensor_parts(arguments.layout, chunk.range.begin, chunk.range.length,
                     [&](int t, int64_t from, int64_t to) {
                         copier.copy(spare_address(arguments, chunk.slot, t, from),
                                     source + (from - chunk.range.begin), to - from);
                     });
    copier.finish();
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence_system();  // all loads before the slot is given back
        store_relaxed(is_relayed ? relay_read_flag(plane, unit.rail, config.local, unit.worker)
                                 : done_flag(plane, ring, unit.rail, unit.group->node, config.local,
                                             unit.worker),
                      chunk.sequence + 1);
    }
}

// Home window -> ring slot of this rank, and the holders are told.
__device__ inline void relay_chunk(const ReplicateArguments& arguments, const RelayCut& rows,
                                   int worker, int step, BlockCopier& copier) {
    const DataPlane& plane = arguments.plane;
    const RelayedChunk chunk = relayed_chunk(arguments, rows, worker, step);
    const uint64_t number =
        view_state(plane.state, plane.config).header->relayed + static_cast<uint64_t>(step);
    stage_weights(arguments, chunk.expert, chunk.home, chunk.range,
                  relay_slot(plane, plane.config.local, worker, number), copier);
    copier.finish();
    __syncthreads();
    if (threadIdx.x == 0) {
        announce_relayed(arguments, chunk, worker, number);
    }
}

// progress: shared memory, a counter for each unit of this puller.
__device__ inline bool pull_weights(const ReplicateArguments& arguments, Waiter& waiter,
                                    BlockCopier& copier, int puller, int num_pullers,
                                    int32_t* progress) {
    const DataPlane& plane = arguments.plane;
    const DataPlaneConfig& config = plane.config;
    const WeightCuts cuts{weight_cut(arguments), relay_cut(arguments)};
    TOPOEP_SHARED(LocalGuests, local_guests, [1]);
    TOPOEP_SHARED(GuestGroup, groups, [kMaxSpareSlots]);
    TOPOEP_SHARED(int, num_groups, [1]);
    TOPOEP_SHARED(int, chosen, [1]);
    if (threadIdx.x == 0) {
        list_local_guests(arguments, local_guests);
        num_groups[0] = list_guest_groups(arguments.lists.guests, groups);
    }
    __syncthreads();
    const int num_tiles = local_guests->count * local_guests->tiles_per_guest;
    // Units that may have to wait: first the relay workers, then what is gathered.
    const int relay_units = arguments.lists.relays[0] > 0 ? config.workers : 0;
    const int all_units = relay_units + num_groups[0] * config.ranks_per_node * config.workers;
    const int num_units = puller < all_units ? (all_units - puller - 1) / num_pullers + 1 : 0;
    int tile = puller;
    if (num_units == 0) {  // nothing to wait for: no barrier between tiles
        for (; tile < num_tiles; tile += num_pullers) {
            pull_tile(arguments, *local_guests, copier, tile);
        }
        copier.finish();
        return true;
    }
    for (int i = static_cast<int>(threadIdx.x); i < num_units; i += static_cast<int>(blockDim.x)) {
        progress[i] = 0;
    }
    __syncthreads();

    // Unit num_units stands for the tiles: they fill the time until chunks arrive.
    int last = -1;
    for (;;) {
        if (warp_index() == 0) {
            const int unit =
                next_unit(waiter, num_units + 1, last, [&](int candidate, Wanted* wanted) {
                    if (candidate == num_units) {
                        return tile < num_tiles ? UnitState::kReady : UnitState::kFinished;
                    }
                    const int number = puller + candidate * num_pullers;
                    if (number < relay_units) {
                        return check_relay(arguments, cuts.relays, number, progress + candidate,
                                           wanted);
                    }
                    return check_chunk(arguments, cuts,
                                       gather_unit(config, cuts, groups, number - relay_units),
                                       progress + candidate, wanted);
                });
            if (warp_lane() == 0) {
                chosen[0] = unit;
            }
            __threadfence_system();  // the landed bytes, for the block behind the barrier
        }
        __syncthreads();
        const int unit = chosen[0];
        if (unit < 0) {
            copier.finish();
            return unit == kNoUnitLeft;
        }
        last = unit;
        if (unit == num_units) {
            pull_tile(arguments, *local_guests, copier, tile);
            tile += num_pullers;
            __syncthreads();  // all have read `chosen`
            continue;
        }
        const int number = puller + unit * num_pullers;
        if (number < relay_units) {
            relay_chunk(arguments, cuts.relays, number, progress[unit], copier);
        } else {
            const GatherUnit gather = gather_unit(config, cuts, groups, number - relay_units);
            gather_chunk(arguments, gather, guest_chunk(arguments, cuts, gather, progress[unit]),
                         copier);
        }
        if (threadIdx.x == 0) {  // behind a barrier: all have read it
            ++progress[unit];
        }
        __syncwarp();
    }
}

}  // namespace topoep
