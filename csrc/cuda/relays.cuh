// SPDX-License-Identifier: Apache-2.0
// Relays in replicate: what a rank does for the relayed experts of its node (core/relays.h), and
// where holders find their chunks.
//
// The row of a relayed expert is cut into a shard for each rank of the node but its home. A rank's
// worker w relays the chunks c of its shard with c % workers == w, through a ring of its own:
//
//   the readers of what the ring slot held before have read it
//   -> home window -> ring slot -> ready[rank][w] = n + 1 at every holder in the node
//
// and, when everything was sent on, waits until all of it was read: no chunk stays in a ring from
// one launch to the next, so no state but the numbers survives it.
//
// Numbers: chunk j of worker w of the i-th relayed expert has the number base + i * chunks + j on
// every rank, also where it is empty (at the home, and in shards that are shorter). Empty chunks
// are neither sent nor read.
#pragma once

#include <cstdint>

#include "core/transfer_arguments.h"
#include "cuda/bounded_wait.cuh"
#include "cuda/compat.cuh"
#include "cuda/landing.cuh"
#include "cuda/weight_rows.cuh"

namespace topoep {

// How the rows of relayed experts are cut.
struct RelayCut {
    ShardCut cut;
    int chunks;  // numbers of each worker per expert
};

__device__ inline RelayCut relay_cut(const ReplicateArguments& arguments) {
    const DataPlaneConfig& config = arguments.plane.config;
    const int relays = config.ranks_per_node < 2 ? 1 : config.ranks_per_node - 1;
    const ShardCut cut =
        cut_into_shards(arguments.layout.total(), relays, config.chunk_bytes, kByteAlignment);
    return {cut, (cut.num_chunks(0) + config.workers - 1) / config.workers};
}

// Chunk j of a worker of the relay (a local rank).
__device__ inline PackedRange relayed_range(const DataPlaneConfig& config, const RelayCut& rows,
                                            int home, int relay, int worker, int j) {
    const int shard = relay < home ? relay : relay - 1;
    const int index = j * config.workers + worker;
    if (relay == home || index >= rows.cut.num_chunks(shard)) {
        return {0, 0};
    }
    return {rows.cut.chunk_begin(shard, index), rows.cut.chunk_length(shard, index)};
}

__device__ inline unsigned char* relay_slot(const DataPlane& plane, int relay, int worker,
                                            uint64_t number) {
    const int slots = plane.config.relay_slots();
    const int64_t slot = static_cast<int64_t>(number % static_cast<uint64_t>(slots));
    return plane.windows[relay] + plane.window.relays.ring +
           (int64_t{worker} * slots + slot) * plane.config.chunk_bytes;
}

// In the window of the reader, written by the relay.
__device__ inline uint64_t* relay_ready_flag(const DataPlane& plane, int reader, int relay,
                                             int worker) {
    return reinterpret_cast<uint64_t*>(plane.windows[reader] + plane.window.relays.ready) +
           relay * plane.config.workers + worker;
}

// In the window of the relay, written by the reader.
__device__ inline uint64_t* relay_read_flag(const DataPlane& plane, int relay, int reader,
                                            int worker) {
    return reinterpret_cast<uint64_t*>(plane.windows[relay] + plane.window.relays.read) +
           reader * plane.config.workers + worker;
}

// What this rank relays as number base + `step` of one worker.
struct RelayedChunk {
    int entry;  // of the first copy in this node
    int expert;
    int home;  // local rank
    PackedRange range;
};

__device__ inline RelayedChunk relayed_chunk(const ReplicateArguments& arguments,
                                             const RelayCut& rows, int worker, int step) {
    const DataPlane& plane = arguments.plane;
    const int entry = arguments.lists.relays[1 + step / rows.chunks];
    const int expert = load_copy(plane.config, plane.topology, arguments.copies, entry).expert;
    const int home = place_of(plane.topology, home_rank(plane.config, expert)).local;
    return {
        entry, expert, home,
        relayed_range(plane.config, rows, home, plane.config.local, worker, step % rows.chunks)};
}

// How the work of a relay worker is, from step *progress on, which skips empty chunks; see
// next_unit. After the last chunk come as many steps as the ring has slots, which only wait.
__device__ inline UnitState check_relay(const ReplicateArguments& arguments, const RelayCut& rows,
                                        int worker, int32_t* progress, Wanted* wanted) {
    const DataPlane& plane = arguments.plane;
    const DataPlaneConfig& config = plane.config;
    const uint64_t base = view_state(plane.state, config).header->relayed;
    const int slots = config.relay_slots();
    const int count = arguments.lists.relays[0] * rows.chunks;
    for (int step = *progress; step < count + slots; ++step) {
        *progress = step;
        const int before = step - slots;
        if (before >= 0 && before < count) {
            const RelayedChunk chunk = relayed_chunk(arguments, rows, worker, before);
            const uint64_t number = base + static_cast<uint64_t>(before);
            bool is_read = true;
            if (chunk.range.length > 0) {
                for_readers(
                    plane, arguments.copies, Kernel::kReplicate, chunk.entry, [&](int reader) {
                        const uint64_t read =
                            load_relaxed(relay_read_flag(plane, config.local, reader, worker));
                        if (read <= number && is_read) {
                            is_read = false;
                            *wanted = {Waited::kDone, rank_of(plane.topology, config.node, reader),
                                       static_cast<uint32_t>(config.node), number + 1, read};
                        }
                    });
            }
            if (!is_read) {
                return UnitState::kWaiting;
            }
        }
        if (step < count && relayed_chunk(arguments, rows, worker, step).range.length > 0) {
            return UnitState::kReady;
        }
    }
    *progress = count + slots;
    return UnitState::kFinished;
}

// Tells the holders that a chunk can be read. One thread, after the block has written it.
__device__ inline void announce_relayed(const ReplicateArguments& arguments,
                                        const RelayedChunk& chunk, int worker, uint64_t number) {
    const DataPlane& plane = arguments.plane;
    __threadfence_system();  // the chunk before its flags
    for_readers(plane, arguments.copies, Kernel::kReplicate, chunk.entry, [&](int reader) {
        store_relaxed(relay_ready_flag(plane, reader, plane.config.local, worker), number + 1);
    });
}

}  // namespace topoep
