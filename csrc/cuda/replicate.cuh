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

#include "core/limits.h"
#include "core/transfer_arguments.h"
#include "cuda/bounded_wait.cuh"
#include "cuda/compat.cuh"
#include "cuda/landing.cuh"
#include "cuda/network.cuh"
#include "cuda/packed_copy.cuh"
#include "cuda/relays.cuh"

namespace topoep {

constexpr int kTransferThreads = 512;

__device__ inline ShardCut weight_cut(const ReplicateArguments& arguments) {
    const DataPlaneConfig& config = arguments.plane.config;
    return cut_into_shards(arguments.layout.total(), config.ranks_per_node, config.chunk_bytes,
                           kByteAlignment);
}

// Where the packed position `at` of tensor t of an expert lies in its home rank's weights.
__device__ inline const unsigned char* home_address(const ReplicateArguments& arguments, int expert,
                                                    int home_local, int t, int64_t at) {
    const DataPlaneConfig& config = arguments.plane.config;
    const ExpertLayout& layout = arguments.layout;
    return arguments.home[t * config.ranks_per_node + home_local] +
           expert % config.experts_per_rank() * layout.row_units[t] + (at - layout.begin[t]);
}

__device__ inline unsigned char* spare_address(const ReplicateArguments& arguments, int slot, int t,
                                               int64_t at) {
    const ExpertLayout& layout = arguments.layout;
    return arguments.spare[t] + slot * layout.row_units[t] + (at - layout.begin[t]);
}

// A range of an expert's row -> target. All threads of the block.
__device__ inline void stage_weights(const ReplicateArguments& arguments, int expert,
                                     int home_local, const PackedRange& range,
                                     unsigned char* target) {
    for_tensor_parts(
        arguments.layout, range.begin, range.length, [&](int t, int64_t from, int64_t to) {
            copy_block(target + (from - range.begin),
                       home_address(arguments, expert, home_local, t, from), to - from);
        });
}

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
            stage_weights(arguments, expert, home_local, {begin, length}, own_window + staging);
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
                                 int tile) {
    const DataPlane& plane = arguments.plane;
    const DataPlaneConfig& config = plane.config;
    const int slot = guests.slots[tile / guests.tiles_per_guest];
    const int expert = arguments.copies.slot_expert[config.rank * config.spare_slots + slot];
    const int home_local = place_of(plane.topology, home_rank(config, expert)).local;
    const int64_t begin = tile % guests.tiles_per_guest * config.tile_bytes;
    const int64_t left = arguments.layout.total() - begin;
    for_tensor_parts(arguments.layout, begin, left < config.tile_bytes ? left : config.tile_bytes,
                     [&](int t, int64_t from, int64_t to) {
                         copy_block(spare_address(arguments, slot, t, from),
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
                                    const GuestChunk& chunk) {
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
                         copy_block(spare_address(arguments, chunk.slot, t, from),
                                    source + (from - chunk.range.begin), to - from);
                     });
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
                                   int worker, int step) {
    const DataPlane& plane = arguments.plane;
    const RelayedChunk chunk = relayed_chunk(arguments, rows, worker, step);
    const uint64_t number =
        view_state(plane.state, plane.config).header->relayed + static_cast<uint64_t>(step);
    stage_weights(arguments, chunk.expert, chunk.home, chunk.range,
                  relay_slot(plane, plane.config.local, worker, number));
    __syncthreads();
    if (threadIdx.x == 0) {
        announce_relayed(arguments, chunk, worker, number);
    }
}

// progress: shared memory, a counter for each unit of this puller.
__device__ inline bool pull_weights(const ReplicateArguments& arguments, Waiter& waiter, int puller,
                                    int num_pullers, int32_t* progress) {
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
            pull_tile(arguments, *local_guests, tile);
        }
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
            return unit == kNoUnitLeft;
        }
        last = unit;
        if (unit == num_units) {
            pull_tile(arguments, *local_guests, tile);
            tile += num_pullers;
            __syncthreads();  // all have read `chosen`
            continue;
        }
        const int number = puller + unit * num_pullers;
        if (number < relay_units) {
            relay_chunk(arguments, cuts.relays, number, progress[unit]);
        } else {
            const GatherUnit gather = gather_unit(config, cuts, groups, number - relay_units);
            gather_chunk(arguments, gather, guest_chunk(arguments, cuts, gather, progress[unit]));
        }
        if (threadIdx.x == 0) {  // behind a barrier: all have read it
            ++progress[unit];
        }
        __syncwarp();
    }
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
                                const Network& network, int block, uint32_t* shared) {
    const DataPlane& plane = arguments.plane;
    Waiter waiter(plane, Kernel::kReplicate);
    if (__syncthreads_or(waiter.failed())) {
        return;
    }
    bool complete = true;
    if (block == 0) {
        run_landing_agent(plane, arguments.copies, Kernel::kReplicate, plane.window.weights,
                          weight_cut(arguments), arguments.lists.in_begin, arguments.lists.in_entry,
                          view_state(plane.state, plane.config).weights_in, network, shared);
    } else if (block <= roles.senders) {
        complete = send_weights(arguments, network, waiter, block - 1, roles.senders);
    } else {
        const int puller = block - 1 - roles.senders;
        complete = pull_weights(arguments, waiter, puller, roles.pullers,
                                reinterpret_cast<int32_t*>(shared));
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
    TOPOEP_DYNAMIC_SHARED(uint32_t, shared);
    replicate_block(arguments, roles, network, static_cast<int>(blockIdx.x), shared);
}

// The agent's cursors or a puller's counters.
inline size_t replicate_shared_bytes(const DataPlaneConfig& config, const BlockRoles& roles) {
    const int64_t units =
        (int64_t{config.spare_slots} * config.ranks_per_node + 1) * config.workers;
    const int64_t of_puller = (units / roles.pullers + 1) * int64_t{sizeof(int32_t)};
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
    LaunchShape shape{dim3(static_cast<unsigned>(1 + roles.senders + roles.pullers)),
                      dim3(static_cast<unsigned>(roles.threads))};
    shape.shared_bytes = replicate_shared_bytes(arguments.plane.config, roles);
    return launch(replicate_kernel<Network>, shape, stream, arguments, roles, network);
}

}  // namespace topoep
