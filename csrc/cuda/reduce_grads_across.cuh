// SPDX-License-Identifier: Apache-2.0
// reduce_grads_across: the gradients of all copies of this rank's experts, added to the home
// gradients; slot gradients are zero afterwards.
//
//   home += copies of its node in rank order, + one partial sum per other node in node order
//   partial sum of a node = its copies in rank order, in float32
//
// in float32 with one rounding at the end: the order is that of the plan, whatever the timing, and
// every element has one writer.
//
// Blocks of a rank: one landing agent (landing.cuh), senders, pullers.
//
//   agent    first: "my slot gradients are final" to all ranks of the node
//   sender   every chunk of this rail's shard of every pair that this node imports: the holders'
//            gradients are ready, credit -> partial sum -> staging slot -> put to the home node
//   puller   own experts with copies, in the order (expert, rail, chunk): gradients ready, partials
//            arrived -> sum -> done
//   last of these blocks: "I read no slots any more" to all ranks of the node; pullers wait for
//   that of all ranks, then clear this rank's slots
//
// No cycle of waits: streams share nothing at the sender, so each goes on when its home node does.
// All senders and pullers that work for one home node keep one order of experts and chunks, so the
// smallest that is not finished can always go on: a puller may block.
//
// Launch shape: as replicate.
#pragma once

#include <cstdint>

#include "core/limits.h"
#include "core/numeric.h"
#include "core/transfer_arguments.h"
#include "cuda/bounded_wait.cuh"
#include "cuda/compat.cuh"
#include "cuda/copy.cuh"
#include "cuda/landing.cuh"
#include "cuda/network.cuh"
#include "cuda/packed_copy.cuh"
#include "cuda/replicate.cuh"

namespace topoep {

// Partial sums travel as float32.
__device__ inline ShardCut grad_cut(const ReduceArguments& arguments) {
    const DataPlaneConfig& config = arguments.plane.config;
    return cut_into_shards(arguments.layout.total(), config.ranks_per_node,
                           config.chunk_bytes / static_cast<int64_t>(sizeof(float)),
                           kElementAlignment);
}

// ---- Sums of several arrays

constexpr int kElementsPerVector = 4;
constexpr int kVectorsInFlight = 4;

struct FloatVector {
    float values[kElementsPerVector];
};

__device__ __forceinline__ FloatVector load_vector(const float* address) {
    const uint4 bits = load_streaming(reinterpret_cast<const uint4*>(address));
    return {{float_from_bits(bits.x), float_from_bits(bits.y), float_from_bits(bits.z),
             float_from_bits(bits.w)}};
}
__device__ __forceinline__ FloatVector load_vector(const BFloat16* address) {
    const uint2 bits = load_streaming(reinterpret_cast<const uint2*>(address));
    return {{float_from_bits(bits.x << 16), float_from_bits(bits.x & 0xffff0000u),
             float_from_bits(bits.y << 16), float_from_bits(bits.y & 0xffff0000u)}};
}
__device__ __forceinline__ void store_vector(float* address, const FloatVector& vector) {
    *reinterpret_cast<float4*>(address) =
        make_float4(vector.values[0], vector.values[1], vector.values[2], vector.values[3]);
}
__device__ __forceinline__ void store_vector(BFloat16* address, const FloatVector& vector) {
    uint32_t bits[kElementsPerVector];
    for (int i = 0; i < kElementsPerVector; ++i) {
        bits[i] = Narrow<BFloat16>::from(vector.values[i]).bits;
    }
    *reinterpret_cast<uint2*>(address) =
        make_uint2(bits[0] | bits[1] << 16, bits[2] | bits[3] << 16);
}

// Arrays that are added up, in this order: first, then `num_copies` of type Slot, then float32
// partial sums. The addresses are in shared memory.
template <class First, class Slot>
struct Summands {
    const First* first;
    const void* const* others;
    int num_copies;
    int num_others;

    __device__ __forceinline__ const Slot* copy(int k) const {
        return static_cast<const Slot*>(others[k]);
    }
    __device__ __forceinline__ const float* partial(int k) const {
        return static_cast<const float*>(others[k]);
    }
};

// sums[v] += the vectors first + v * stride of the source; all loads before the first sum.
template <int kVectors, class Source>
__device__ __forceinline__ void add_vectors(FloatVector (&sums)[kVectors], const Source* source,
                                            int first, int stride) {
    FloatVector loaded[kVectors];
    for (int v = 0; v < kVectors; ++v) {
        loaded[v] = load_vector(source + (first + v * stride) * kElementsPerVector);
    }
    for (int v = 0; v < kVectors; ++v) {
        for (int i = 0; i < kElementsPerVector; ++i) {
            sums[v].values[i] += loaded[v].values[i];
        }
    }
}

template <int kVectors, class Target, class First, class Slot>
__device__ __forceinline__ void sum_vectors(Target* target, const Summands<First, Slot>& summands,
                                            int first, int stride) {
    FloatVector sums[kVectors];
    for (int v = 0; v < kVectors; ++v) {
        sums[v] = load_vector(summands.first + (first + v * stride) * kElementsPerVector);
    }
    for (int k = 0; k < summands.num_copies; ++k) {
        add_vectors(sums, summands.copy(k), first, stride);
    }
    for (int k = summands.num_copies; k < summands.num_others; ++k) {
        add_vectors(sums, summands.partial(k), first, stride);
    }
    for (int v = 0; v < kVectors; ++v) {
        store_vector(target + (first + v * stride) * kElementsPerVector, sums[v]);
    }
}

// target[i] = the sum at i, for i < count. All threads of the block; `target` may be the first
// summand. aligned: every address allows vectors.
template <class Target, class First, class Slot>
__device__ void sum_elements(Target* target, const Summands<First, Slot>& summands, int count,
                             bool aligned) {
    const int num_threads = static_cast<int>(blockDim.x);
    const int num_vectors = aligned ? count / kElementsPerVector : 0;
    int i = static_cast<int>(threadIdx.x);
    for (; i + (kVectorsInFlight - 1) * num_threads < num_vectors;
         i += kVectorsInFlight * num_threads) {
        sum_vectors<kVectorsInFlight>(target, summands, i, num_threads);
    }
    for (; i < num_vectors; i += num_threads) {
        sum_vectors<1>(target, summands, i, num_threads);
    }
    for (int e = num_vectors * kElementsPerVector + static_cast<int>(threadIdx.x); e < count;
         e += num_threads) {
        float sum = widen(summands.first[e]);
        for (int k = 0; k < summands.num_copies; ++k) {
            sum += widen(summands.copy(k)[e]);
        }
        for (int k = summands.num_copies; k < summands.num_others; ++k) {
            sum += summands.partial(k)[e];
        }
        target[e] = Narrow<Target>::from(sum);
    }
}

// addresses[k] = address_of(k) for k < count, in shared memory. Returns whether all of them and
// `target` allow vectors. A barrier before the next call is the caller's.
template <class AddressOf>
__device__ bool list_addresses(const void** addresses, int count, const void* target,
                               AddressOf&& address_of) {
    bool aligned = is_vector_aligned(target);
    for (int k = static_cast<int>(threadIdx.x); k < count; k += static_cast<int>(blockDim.x)) {
        addresses[k] = address_of(k);
        aligned = aligned && is_vector_aligned(addresses[k]);
    }
    return __syncthreads_and(aligned) != 0;
}

// ---- What the blocks do

__device__ inline uint64_t reduce_generation(const DataPlane& plane) {
    return static_cast<StateHeader*>(plane.state)->generation[static_cast<int>(Kernel::kReduce)] +
           1;
}

// Flag of rank `local` of this node, in the window of rank `reader`.
__device__ inline uint64_t* node_flag(const DataPlane& plane, int64_t offset, int reader,
                                      int local) {
    return reinterpret_cast<uint64_t*>(plane.windows[reader] + offset) + local;
}

// Gradient of a copy at the packed position `at` of tensor t.
template <class Slot>
__device__ const Slot* slot_grad(const ReduceArguments& arguments, const Copy& copy, int t,
                                 int64_t at) {
    const ExpertLayout& layout = arguments.layout;
    return static_cast<const Slot*>(
               arguments.slot_grads[t * arguments.plane.config.ranks_per_node + copy.local]) +
           copy.slot * layout.row_units[t] + (at - layout.begin[t]);
}

// Chunks of partial sums that a sender makes for one home node.
struct PartialChunk {
    int entry;        // leads the pair
    int num_holders;  // entries from there on
    int index;
    uint64_t sequence;
};

__device__ inline PartialChunk partial_chunk(const ReduceArguments& arguments, int num_chunks,
                                             int node, uint32_t progress) {
    const DataPlane& plane = arguments.plane;
    const PlanCopies& copies = arguments.copies;
    const int pair = static_cast<int>(progress / num_chunks);
    const int entry = arguments.lists.in_entry[arguments.lists.in_begin[node] + pair];
    const Copy first = load_copy(plane.config, plane.topology, copies, entry);
    const int end = copies.copy_offsets[first.expert + 1];
    int holders = 1;
    while (entry + holders < end &&
           load_copy(plane.config, plane.topology, copies, entry + holders).node == first.node) {
        ++holders;
    }
    return {entry, holders, static_cast<int>(progress % num_chunks),
            view_state(plane.state, plane.config).grads_out[node] + progress};
}

// How the next chunk for a home node is; see next_unit.
template <class Network>
__device__ UnitState check_partial(const ReduceArguments& arguments, const Network& network,
                                   const Waiter& waiter, uint64_t generation, int num_chunks,
                                   int node, uint32_t progress, Wanted* wanted) {
    const DataPlane& plane = arguments.plane;
    const DataPlaneConfig& config = plane.config;
    const StreamLists& lists = arguments.lists;
    const int pairs = lists.in_begin[node + 1] - lists.in_begin[node];
    if (progress >= static_cast<uint64_t>(pairs) * num_chunks) {
        return UnitState::kFinished;
    }
    const PartialChunk chunk = partial_chunk(arguments, num_chunks, node, progress);
    for (int k = 0; k < chunk.num_holders; ++k) {
        const Copy copy = load_copy(config, plane.topology, arguments.copies, chunk.entry + k);
        const uint64_t ready =
            load_relaxed(node_flag(plane, plane.window.grads_ready, config.local, copy.local));
        if (ready < generation) {
            *wanted = {Waited::kGradsReady, copy.rank, static_cast<uint32_t>(copy.expert),
                       generation, ready};
            return UnitState::kWaiting;
        }
    }
    const uint64_t slots = static_cast<uint64_t>(config.ring_slots);
    const uint32_t slot = static_cast<uint32_t>(chunk.sequence % slots);
    const uint64_t uses = chunk.sequence / slots;
    const uint64_t value = network.read(plane.window.grads.credit_signal +
                                        static_cast<uint32_t>(node) * config.ring_slots + slot);
    const SignalState state = signal_state(value, uses);
    const int receiver = rank_of(plane.topology, node, config.local);
    if (state == SignalState::kImpossible) {
        waiter.fail({Waited::kImpossibleSignal, receiver, slot, signal_after(uses), value});
        return UnitState::kFailed;
    }
    *wanted = {Waited::kCredit, receiver, slot, signal_after(uses), value};
    return state == SignalState::kReached ? UnitState::kReady : UnitState::kWaiting;
}

// progress: shared memory, [N].
template <class Slot, class Network>
__device__ bool send_partials(const ReduceArguments& arguments, const Network& network,
                              Waiter& waiter, int sender, int num_senders, const void** addresses,
                              uint32_t* progress) {
    const DataPlane& plane = arguments.plane;
    const DataPlaneConfig& config = plane.config;
    const RingLayout& ring = plane.window.grads;
    const ShardCut cut = grad_cut(arguments);
    const int num_chunks = cut.num_chunks(config.local);
    const uint64_t generation = reduce_generation(plane);
    TOPOEP_SHARED(int, chosen, [1]);
    if (num_chunks == 0) {
        return true;
    }
    // Chunks are dealt out by sequence number.
    for (int node = static_cast<int>(threadIdx.x); node < config.num_nodes;
         node += static_cast<int>(blockDim.x)) {
        const uint64_t base = view_state(plane.state, config).grads_out[node];
        progress[node] = static_cast<uint32_t>(
            (static_cast<uint64_t>(sender + num_senders) - base % num_senders) % num_senders);
    }
    __syncthreads();
    int last = config.node;  // the next node first: not all nodes send to the same one
    for (;;) {
        if (warp_index() == 0) {
            const int unit =
                next_unit(waiter, config.num_nodes, last, [&](int node, Wanted* wanted) {
                    return check_partial(arguments, network, waiter, generation, num_chunks, node,
                                         progress[node], wanted);
                });
            if (warp_lane() == 0) {
                chosen[0] = unit;
            }
            __threadfence_system();  // gradients of the holders; the receiver's reads of the slot
        }
        __syncthreads();
        const int node = chosen[0];
        if (node < 0) {
            return node == kNoUnitLeft;
        }
        last = node;
        const PartialChunk chunk = partial_chunk(arguments, num_chunks, node, progress[node]);
        const uint64_t slots = static_cast<uint64_t>(config.ring_slots);
        const uint32_t ring_slot = static_cast<uint32_t>(chunk.sequence % slots);
        const int64_t begin = cut.chunk_begin(config.local, chunk.index);
        const int64_t length = cut.chunk_length(config.local, chunk.index);
        const int64_t staging =
            ring.staging + (int64_t{node} * config.ring_slots + ring_slot) * config.chunk_bytes;
        float* staged = reinterpret_cast<float*>(plane.windows[config.local] + staging);
        for_tensor_parts(arguments.layout, begin, length, [&](int t, int64_t from, int64_t to) {
            float* target = staged + (from - begin);
            const bool aligned = list_addresses(addresses, chunk.num_holders, target, [&](int k) {
                return slot_grad<Slot>(
                    arguments, load_copy(config, plane.topology, arguments.copies, chunk.entry + k),
                    t, from);
            });
            const Summands<Slot, Slot> summands{static_cast<const Slot*>(addresses[0]),
                                                addresses + 1, chunk.num_holders - 1,
                                                chunk.num_holders - 1};
            sum_elements(target, summands, static_cast<int>(to - from), aligned);
            __syncthreads();
        });
        if (warp_index() == 0) {
            if (warp_lane() == 0) {
                progress[node] += static_cast<uint32_t>(num_senders);
                __threadfence_system();  // staged sums with the put
            }
            __syncwarp();
            network.put(rank_of(plane.topology, node, config.local),
                        ring.landing + (int64_t{config.node} * config.ring_slots + ring_slot) *
                                           config.chunk_bytes,
                        staging, length * static_cast<int64_t>(sizeof(float)),
                        ring.data_signal + static_cast<uint32_t>(config.node) * config.ring_slots +
                            ring_slot,
                        signal_step(chunk.sequence / slots));
        }
    }
}

// The entries of one home expert: copies in this node, then the leading entry of every other node
// that has copies, both in order.
struct HomeEntries {
    int num_copies;
    int num_all;
};

// Called by the first warp.
__device__ inline HomeEntries list_home_entries(const ReduceArguments& arguments, int expert,
                                                int32_t* entries) {
    const DataPlane& plane = arguments.plane;
    const int begin = arguments.copies.copy_offsets[expert];
    const int end = arguments.copies.copy_offsets[expert + 1];
    HomeEntries result{};
    for (int pass = 0; pass < 2; ++pass) {
        for (int base = begin; base < end; base += kWarpSize) {
            const int entry = base + warp_lane();
            bool listed = false;
            if (entry < end) {
                const bool here =
                    load_copy(plane.config, plane.topology, arguments.copies, entry).node ==
                    plane.config.node;
                listed = pass == 0 ? here : arguments.lists.pair_index[entry] >= 0;
            }
            const unsigned mask = __ballot_sync(kFullWarp, listed);
            if (listed) {
                entries[result.num_all + __popc(mask & ((1u << warp_lane()) - 1))] = entry;
            }
            result.num_all += __popc(mask);
        }
        if (pass == 0) {
            result.num_copies = result.num_all;
        }
    }
    return result;
}

template <class Slot, class Home>
__device__ bool sum_at_home(const ReduceArguments& arguments, Waiter& waiter, int puller,
                            int num_pullers, const void** addresses) {
    const DataPlane& plane = arguments.plane;
    const DataPlaneConfig& config = plane.config;
    const RingLayout& ring = plane.window.grads;
    const ExpertLayout& layout = arguments.layout;
    const ShardCut cut = grad_cut(arguments);
    const uint64_t generation = reduce_generation(plane);
    const uint64_t* bases = view_state(plane.state, config).grads_in;
    TOPOEP_SHARED(int32_t, entries, [kMaxRanks]);
    TOPOEP_SHARED(HomeEntries, shared_counts, [1]);
    const int thread = static_cast<int>(threadIdx.x);
    const int num_threads = static_cast<int>(blockDim.x);
    int turn = 0;
    for (int x = 0; x < config.experts_per_rank(); ++x) {
        const int expert = config.rank * config.experts_per_rank() + x;
        if (arguments.copies.copy_offsets[expert] == arguments.copies.copy_offsets[expert + 1]) {
            continue;
        }
        __syncthreads();  // the last expert's entries are read
        if (warp_index() == 0) {
            const HomeEntries counts = list_home_entries(arguments, expert, entries);
            if (warp_lane() == 0) {
                shared_counts[0] = counts;
            }
        }
        __syncthreads();
        const HomeEntries counts = shared_counts[0];
        const bool has_partials = counts.num_copies < counts.num_all;
        const auto copy_of = [&](int k) {
            return load_copy(config, plane.topology, arguments.copies, entries[k]);
        };
        for (int rail = 0; rail < config.ranks_per_node; ++rail) {
            const int num_chunks = cut.num_chunks(rail);
            const auto sequence_of = [&](int k, int c) {
                return bases[copy_of(k).node * config.ranks_per_node + rail] +
                       uint64_t{1} * arguments.lists.pair_index[entries[k]] * num_chunks + c;
            };
            for (int c = 0; c < num_chunks; ++c, ++turn) {
                // Partial sums keep to their worker, whose reads the landing rank counts.
                const int worker = c % config.workers;
                const int owner = has_partials ? rail * config.workers + worker : turn;
                if (owner % num_pullers != puller) {
                    continue;
                }
                waiter.progress();
                bool ready = true;
                for (int k = thread; k < counts.num_all && ready; k += num_threads) {
                    const Copy copy = copy_of(k);
                    if (k < counts.num_copies) {
                        ready = waiter.until_at_least(
                            node_flag(plane, plane.window.grads_ready, config.local, copy.local),
                            {Waited::kGradsReady, copy.rank, static_cast<uint32_t>(expert),
                             generation, 0});
                    } else {
                        ready = waiter.until_at_least(
                            arrived_flag(plane, ring, config.local, copy.node, rail),
                            {Waited::kArrived, rank_of(plane.topology, config.node, rail),
                             static_cast<uint32_t>(copy.node), sequence_of(k, c) + 1, 0});
                    }
                }
                if (thread < counts.num_all) {
                    __threadfence_system();  // gradients and partial sums, for the whole block
                }
                if (!__syncthreads_and(ready)) {
                    return false;
                }
                const int64_t begin = cut.chunk_begin(rail, c);
                for_tensor_parts(
                    layout, begin, cut.chunk_length(rail, c), [&](int t, int64_t from, int64_t to) {
                        Home* target = static_cast<Home*>(arguments.home_grads[t]) +
                                       x * layout.row_units[t] + (from - layout.begin[t]);
                        const bool aligned = list_addresses(
                            addresses, counts.num_all, target, [&](int k) -> const void* {
                                if (k < counts.num_copies) {
                                    return slot_grad<Slot>(arguments, copy_of(k), t, from);
                                }
                                const int64_t slot = static_cast<int64_t>(
                                    sequence_of(k, c) % static_cast<uint64_t>(config.ring_slots));
                                return plane.windows[rail] + ring.landing +
                                       (int64_t{copy_of(k).node} * config.ring_slots + slot) *
                                           config.chunk_bytes +
                                       (from - begin) * static_cast<int64_t>(sizeof(float));
                            });
                        const Summands<Home, Slot> summands{target, addresses, counts.num_copies,
                                                            counts.num_all};
                        sum_elements(target, summands, static_cast<int>(to - from), aligned);
                        __syncthreads();
                    });
                for (int k = counts.num_copies + thread; k < counts.num_all; k += num_threads) {
                    __threadfence_system();  // all loads before the slot is given back
                    store_relaxed(
                        done_flag(plane, ring, rail, copy_of(k).node, config.local, worker),
                        sequence_of(k, c) + 1);
                }
            }
        }
    }
    return true;
}

// The last of the rank's readers tells the node's ranks that their slots are read.
__device__ inline void end_reading(const DataPlane& plane, int num_readers) {
    const DataPlaneConfig& config = plane.config;
    StateHeader* header = static_cast<StateHeader*>(plane.state);
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence_system();
        if (atomicAdd(&header->readers, 1u) == static_cast<unsigned>(num_readers - 1)) {
            store_relaxed(&header->readers, 0u);
            __threadfence_system();
            for (int local = 0; local < config.ranks_per_node; ++local) {
                store_relaxed(node_flag(plane, plane.window.grads_read, local, config.local),
                              reduce_generation(plane));
            }
        }
    }
}

template <class Slot>
__device__ bool clear_slots(const ReduceArguments& arguments, Waiter& waiter, int puller,
                            int num_pullers) {
    const DataPlane& plane = arguments.plane;
    const DataPlaneConfig& config = plane.config;
    const int thread = static_cast<int>(threadIdx.x);
    const int num_threads = static_cast<int>(blockDim.x);
    const uint64_t generation = reduce_generation(plane);
    waiter.progress();
    bool read = true;
    for (int local = thread; local < config.ranks_per_node && read; local += num_threads) {
        const int reader = rank_of(plane.topology, config.node, local);
        read = waiter.until_at_least(
            node_flag(plane, plane.window.grads_read, config.local, local),
            {Waited::kGradsRead, reader, static_cast<uint32_t>(local), generation, 0});
    }
    if (thread < config.ranks_per_node) {
        __threadfence_system();  // the readers' loads before these stores
    }
    if (!__syncthreads_and(read)) {
        return false;
    }
    for (int slot = 0; slot < config.spare_slots; ++slot) {
        if (arguments.copies.slot_expert[config.rank * config.spare_slots + slot] < 0) {
            continue;
        }
        for (int t = 0; t < arguments.layout.num_tensors; ++t) {
            const int64_t bytes =
                arguments.layout.row_units[t] * static_cast<int64_t>(sizeof(Slot));
            clear_bytes(static_cast<unsigned char*>(
                            arguments.slot_grads[t * config.ranks_per_node + config.local]) +
                            slot * bytes,
                        bytes, puller * num_threads + thread, num_pullers * num_threads);
        }
    }
    return true;
}

// What the launch adds to the persistent state.
__device__ inline void advance_grads(const ReduceArguments& arguments, int thread,
                                     int num_threads) {
    const DataPlaneConfig& config = arguments.plane.config;
    const StreamLists& lists = arguments.lists;
    const StateView state = view_state(arguments.plane.state, config);
    const ShardCut cut = grad_cut(arguments);
    for (int i = thread; i < config.num_ranks; i += num_threads) {
        const int node = i / config.ranks_per_node;
        const int pairs = lists.out_begin[node + 1] - lists.out_begin[node];
        state.grads_in[i] += uint64_t{1} * pairs * cut.num_chunks(i % config.ranks_per_node);
    }
    for (int node = thread; node < config.num_nodes; node += num_threads) {
        const int pairs = lists.in_begin[node + 1] - lists.in_begin[node];
        state.grads_out[node] += uint64_t{1} * pairs * cut.num_chunks(config.local);
    }
}

// shared: landing_agent_shared_bytes().
template <class Slot, class Home, class Network>
__device__ void reduce_grads_across_block(const ReduceArguments& arguments, const BlockRoles& roles,
                                          const Network& network, int block, uint32_t* shared) {
    const DataPlane& plane = arguments.plane;
    const DataPlaneConfig& config = plane.config;
    TOPOEP_SHARED(const void*, addresses, [kMaxRanks]);
    Waiter waiter(plane, Kernel::kReduce);
    if (__syncthreads_or(waiter.failed())) {
        return;
    }
    const int num_readers = roles.senders + roles.pullers;
    bool complete = true;
    if (block == 0) {
        for (int local = static_cast<int>(threadIdx.x); local < config.ranks_per_node;
             local += static_cast<int>(blockDim.x)) {
            __threadfence_system();  // the gradients that earlier kernels of this rank wrote
            store_relaxed(node_flag(plane, plane.window.grads_ready, local, config.local),
                          reduce_generation(plane));
        }
        run_landing_agent(plane, arguments.copies, Kernel::kReduce, plane.window.grads,
                          grad_cut(arguments), arguments.lists.out_begin, arguments.lists.out_entry,
                          view_state(plane.state, config).grads_in, network, shared);
    } else if (block <= roles.senders) {
        complete = send_partials<Slot>(arguments, network, waiter, block - 1, roles.senders,
                                       addresses, shared);
        if (complete) {
            end_reading(plane, num_readers);
        }
    } else {
        const int puller = block - 1 - roles.senders;
        complete = sum_at_home<Slot, Home>(arguments, waiter, puller, roles.pullers, addresses);
        if (complete) {
            end_reading(plane, num_readers);
            complete = clear_slots<Slot>(arguments, waiter, puller, roles.pullers);
        }
    }
    if (complete) {
        leave_kernel(plane, Kernel::kReduce, 1 + num_readers, [&](int thread, int num_threads) {
            advance_grads(arguments, thread, num_threads);
        });
    }
}

template <class Slot, class Home, class Network>
__global__ void __launch_bounds__(kTransferThreads, 1)
    reduce_grads_across_kernel(const __grid_constant__ ReduceArguments arguments,
                               const __grid_constant__ BlockRoles roles,
                               const __grid_constant__ Network network) {
    TOPOEP_DYNAMIC_SHARED(uint32_t, shared);
    reduce_grads_across_block<Slot, Home>(arguments, roles, network, static_cast<int>(blockIdx.x),
                                          shared);
}

template <class Network>
const char* launch_reduce_grads_across(const ReduceArguments& arguments, const BlockRoles& roles,
                                       const Network& network, Stream stream) {
    if (const char* problem = problem_with_roles(arguments.plane.config, roles)) {
        return problem;
    }
    LaunchShape shape{dim3(static_cast<unsigned>(1 + roles.senders + roles.pullers)),
                      dim3(static_cast<unsigned>(roles.threads))};
    shape.shared_bytes = static_cast<size_t>(landing_agent_shared_bytes(arguments.plane.config));
    const bool wide_slots = arguments.slot_type == DType::kFloat32;
    const bool wide_home = arguments.home_type == DType::kFloat32;
    const auto kernel = wide_slots
                            ? (wide_home ? reduce_grads_across_kernel<float, float, Network>
                                         : reduce_grads_across_kernel<float, BFloat16, Network>)
                            : (wide_home ? reduce_grads_across_kernel<BFloat16, float, Network>
                                         : reduce_grads_across_kernel<BFloat16, BFloat16, Network>);
    return launch(kernel, shape, stream, arguments, roles, network);
}

}  // namespace topoep
