// SPDX-License-Identifier: Apache-2.0
// What the kernels of the data plane share: the sizes of one transport, the layout of the memory
// that ranks write into each other, the persistent state of a rank, and the error record.
// docs/dataplane.md has the protocol.
//
// Words used here: a rank is (node, local), local being its index among the ranks of its node; the
// rail g connects the ranks with local index g of all nodes. The stream m -> n carries every expert
// that node n fetches from its home node m (and, backwards, the partial gradients n -> m).
#pragma once

#include <cstdint>

#include "core/hd.h"
#include "core/shape.h"

namespace topoep {

// With two ranks in a node an expert has at most one copy in its home node: nothing to relay.
constexpr int kLeastRanksToRelay = 3;
// Relayed experts of a node (core/relays.h): each takes a warp about a microsecond to choose.
constexpr int kMaxRelays = 32;
// Six pieces and the counters of a puller fit into the shared memory of a block.
constexpr int kMaxBulkPieceBytes = 32 * 1024;

// Fixed for the life of a transport and equal on all ranks, but for the place of the rank.
struct DataPlaneConfig {
    int num_ranks = 0;
    int num_nodes = 0;
    int ranks_per_node = 0;  // num_ranks = num_nodes * ranks_per_node
    int num_experts = 0;
    int spare_slots = 0;
    int rank = 0;
    int node = 0;
    int local = 0;                     // index of the rank in its node
    int64_t chunk_bytes = 256 * 1024;  // one put; a multiple of 128
    int64_t tile_bytes = 64 * 1024;    // one pull inside the node; a multiple of 128
    int ring_slots = 8;                // chunks in flight per stream and rail
    int staging_slots = 8;             // chunks a sender holds until all receivers have read them
    int workers = 2;                   // blocks that may gather one stream's chunks of one rail
    int max_relays = kMaxRelays;       // experts that a node may relay; 0: none
    int bulk_piece_bytes = 0;          // of a copy by the bulk-copy engine of sm_90; a multiple of
                                       // 128; 0: copies by loads

    TOPOEP_HD int experts_per_rank() const { return num_experts / num_ranks; }
    TOPOEP_HD int slots_per_rank() const { return experts_per_rank() + spare_slots; }
    TOPOEP_HD int num_spare() const { return num_ranks * spare_slots; }
    // Chunks in flight from one relay worker.
    TOPOEP_HD int relay_slots() const { return ring_slots < workers ? 1 : ring_slots / workers; }
    // One row of counts in the window: whole vectors, so that every row can be put.
    TOPOEP_HD int64_t count_row_bytes() const { return (num_experts + 3) / 4 * 16; }
};

// One direction of the network: weights forward, partial gradients backward. Offsets are bytes in
// the window; signals are ids, of which the reader owns the value.
struct RingLayout {
    int64_t landing;  // [N source nodes, ring_slots, chunk_bytes], written by the network
    int64_t staging;  // what this rank sends. Weights: [staging_slots, chunk_bytes], a slot serves
                      // all receivers. Gradients: [N, ring_slots, chunk_bytes]
    int64_t arrived;  // uint64 [N, G]: chunks of stream m on rail g that may be read here;
                      // written by rank g of this node
    int64_t done;     // uint64 [N, G, workers]: worker w of rank h of this node has read all its
                      // chunks of stream m below this; on this rank's rail
    uint32_t data_signal;    // + m * ring_slots + slot: a chunk of stream m has landed
    uint32_t credit_signal;  // + n * ring_slots + slot: the receiver has read a chunk
};

// Relays (core/relays.h): a rank of the expert's home node passes a shard on to those of its node
// that hold a copy. Every worker has a ring of its own.
struct RelayLayout {
    int64_t ring;   // [workers, relay_slots, chunk_bytes], written by this rank
    int64_t ready;  // uint64 [G, workers]: chunks of rank g's worker w that may be read there;
                    // written by rank g of this node
    int64_t read;   // uint64 [G, workers]: rank h of this node has read all its chunks of this
                    // rank's worker w below this
};

// One symmetric window per rank: all offsets are equal on all ranks.
struct WindowLayout {
    int64_t counts;        // [2, R, count_row_bytes]: int32 rows of all ranks, by parity of the
                           // generation
    int64_t counts_ready;  // uint64 [R]: generation of the row of rank r
    int64_t grads_ready;   // uint64 [G]: rank h of this node has final slot gradients
    int64_t grads_read;    // uint64 [G]: rank h of this node reads this rank's slots no more
    RingLayout weights;
    RingLayout grads;
    RelayLayout relays;
    uint32_t counts_signal;  // + parity of the generation * N + m: the row of node m's rank on
                             // this rank's rail
    uint32_t num_signals;    // ids 0 .. num_signals - 1 are used
    int64_t bytes;           // of the whole window; must be zero before the first kernel
};

inline WindowLayout make_window_layout(const DataPlaneConfig& config) {
    constexpr int64_t kLine = 128;
    WindowLayout window{};
    const auto take = [&](int64_t bytes) {
        const int64_t at = window.bytes;
        window.bytes += (bytes + kLine - 1) / kLine * kLine;
        return at;
    };
    constexpr int64_t kFlag = sizeof(uint64_t);
    const int64_t nodes = config.num_nodes;
    const int64_t ranks = config.num_ranks;
    const int64_t local_ranks = config.ranks_per_node;
    const int64_t slots = nodes > 1 ? config.ring_slots : 0;  // one node needs no rings
    const auto ring = [&](int64_t staging_slots) {
        RingLayout layout{};
        layout.landing = take(nodes * slots * config.chunk_bytes);
        layout.staging = take(staging_slots * config.chunk_bytes);
        layout.arrived = take(ranks * kFlag);
        layout.done = take(ranks * config.workers * kFlag);
        layout.data_signal = window.num_signals;
        layout.credit_signal = window.num_signals + static_cast<uint32_t>(nodes * slots);
        window.num_signals += static_cast<uint32_t>(2 * nodes * slots);
        return layout;
    };
    window.counts = take(2 * ranks * config.count_row_bytes());
    window.counts_ready = take(ranks * kFlag);
    window.grads_ready = take(local_ranks * kFlag);
    window.grads_read = take(local_ranks * kFlag);
    window.weights = ring(nodes > 1 ? config.staging_slots : 0);
    window.grads = ring(nodes * slots);
    const bool relays = local_ranks >= kLeastRanksToRelay;
    window.relays.ring =
        take(relays ? int64_t{config.workers} * config.relay_slots() * config.chunk_bytes : 0);
    window.relays.ready = take(local_ranks * config.workers * kFlag);
    window.relays.read = take(local_ranks * config.workers * kFlag);
    window.counts_signal = window.num_signals;
    window.num_signals += static_cast<uint32_t>(nodes > 1 ? 2 * nodes : 0);
    return window;
}

// What a bounded wait was for.
enum class Waited : uint32_t {
    kNothing = 0,      // no error
    kCounts,           // the row of a rank of this node, or of one that it forwards
    kCountsSignal,     // the row of a rank on this rail, over the network
    kCredit,           // the receiver to read an older chunk
    kData,             // a chunk, over the network
    kArrived,          // rank `from` of this node to say that a chunk can be read there: it has
                       // landed, or (source node: this one) `from` relays it
    kDone,             // a rank of this node to read such a chunk
    kGradsReady,       // the slot gradients of rank `from`
    kGradsRead,        // rank `from` to have read this rank's slot gradients
    kImpossibleSignal  // not a wait: a signal had a value that no sequence of uses gives
};

// The first failure of a rank. Its memory is seen by the host while kernels run (pinned and
// mapped); `waited` is written last, and stays for good: sequence numbers of ranks differ from then
// on, so the transport must be made anew.
struct ErrorRecord {
    uint32_t waited;  // Waited, 0: none
    uint32_t kernel;  // Kernel
    uint32_t rank;    // who waited
    uint32_t block;
    uint32_t from;        // the rank waited for
    uint32_t what;        // expert, ring slot or row, by `waited`
    uint64_t wanted;      // value
    uint64_t seen;        // value
    uint64_t generation;  // of the kernel on this rank
};

enum class Kernel : uint32_t { kExchange = 0, kReplicate, kReduce, kNumKernels };
constexpr int kNumKernels = static_cast<int>(Kernel::kNumKernels);

// Persistent state of a rank in its own device memory: state_bytes() bytes, zero before the first
// kernel. Sequence numbers live here and not in arguments, so captured graphs continue them.
struct StateHeader {
    uint32_t failed;                // a wait of this rank gave up: no kernel waits any more
    uint32_t leaving[kNumKernels];  // blocks that have left the kernel
    uint32_t readers;               // blocks of reduce that have read their last slot gradient
    uint32_t unused[3];
    uint64_t generation[kNumKernels];  // launches that have ended
    uint64_t staged;                   // chunks of weights ever staged
    uint64_t relayed;                  // numbers ever given to the chunks of each relay worker
};

// Counts of chunks ever moved on a stream and rail, and what the staging slots hold.
struct StateView {
    StateHeader* header;
    uint64_t* weights_in;   // [N, G] stream from node m, rail g
    uint64_t* weights_out;  // [N] stream to node n, this rank's rail
    uint64_t* grads_in;     // [N, G]
    uint64_t* grads_out;    // [N]
    uint64_t* staged_for;  // [staging_slots, N] 1 + sequence number of the chunk last sent from the
                           // slot to node n, 0: none
};

inline int64_t state_bytes(const DataPlaneConfig& config) {
    const int64_t words = 2 * (int64_t{config.num_ranks} + config.num_nodes) +
                          int64_t{config.staging_slots} * config.num_nodes;
    return static_cast<int64_t>(sizeof(StateHeader)) +
           words * static_cast<int64_t>(sizeof(uint64_t));
}

TOPOEP_HD StateView view_state(void* memory, const DataPlaneConfig& config) {
    StateView view{};
    view.header = static_cast<StateHeader*>(memory);
    view.weights_in = reinterpret_cast<uint64_t*>(view.header + 1);
    view.weights_out = view.weights_in + config.num_ranks;
    view.grads_in = view.weights_out + config.num_nodes;
    view.grads_out = view.grads_in + config.num_ranks;
    view.staged_for = view.grads_out + config.num_nodes;
    return view;
}

// What every kernel of a transport gets, the same in each launch.
struct DataPlane {
    DataPlaneConfig config;
    WindowLayout window;
    TopologyView topology;          // device memory; every node has ranks_per_node ranks
    unsigned char* const* windows;  // device memory, [G]: the windows of the ranks of this node by
                                    // local index, this rank's own included, as addresses that
                                    // kernels of this rank may load and store
    void* state;                    // device memory, state_bytes()
    ErrorRecord* error;             // pinned host memory, as the device addresses it
    uint64_t timeout;               // nanoseconds without progress after which a wait gives up
};

}  // namespace topoep
