// SPDX-License-Identifier: Apache-2.0
// A simulated cluster for the kernels of the data plane: the blocks of all ranks and one network
// fiber run in ONE launch, so that the race checker sees every rank's accesses, also from one
// microbatch to the next. Where a rank would start another kernel, its blocks meet in a barrier.
#include <algorithm>
#include <string>
#include <vector>

#include "cuda/exchange_counts.cuh"
#include "cuda/reduce_grads_across.cuh"
#include "cuda/replicate.cuh"
#include "cuda/stream_lists.cuh"
#include "emulation/control.h"

using namespace topoep;
using Int = long long;
using Word = unsigned long long;

namespace {

// The same names in the same order: SETTINGS and MEMORY in tests/kernels/cluster.py.
struct Settings {
    Int num_nodes, ranks_per_node, spare_slots, experts_per_rank, num_tensors, workers, senders,
        pullers, ring_slots, staging_slots, chunk_bytes, tile_bytes, slot_type, home_type,
        microbatches, threads, exchange, optimizer, dropped_signal, doubled_signal, doubled_late,
        slow_rank, delay, seed, timeout, alternate, backward, bulk_piece_bytes;
};
struct Memory {
    const int32_t* table;
    const int64_t* row_bytes;          // [T]
    const int64_t* elements;           // [T]
    const int32_t* slot_expert;        // [M, R, S]
    const int32_t* copy_offsets;       // [M, E + 1]
    const int32_t* copy_slots;         // [M, R * S]
    const int32_t* rows;               // [M, R, E]
    int32_t* counts;                   // [R, R, E]
    int32_t* lists;                    // [R, stream_lists_size]
    unsigned char* windows;            // [R, window bytes]
    Word* signals;                     // [R, num signals]
    unsigned char* states;             // [R, state bytes]
    ErrorRecord* errors;               // [R]
    Word* sent_bytes;                  // [R]
    Word* sent_signals;                // [1]
    unsigned char* const* home;        // [T] -> [R, H, row bytes]
    unsigned char* const* spare;       // [T] -> [R, S, row bytes]
    unsigned char* const* slot_grads;  // [T] -> [R, S, elements]
    unsigned char* const* home_grads;  // [T] -> [R, H, elements]
    const unsigned char* const*
        grads;  // [T] -> [M, R, S, elements]: what the experts' backward adds
    unsigned char* const* seen_spare;  // [T] -> [M, R, S, row bytes]
    unsigned char* const* seen_slots;  // [T] -> [M, R, S, elements] after reduce
    unsigned char* const* seen_home;   // [T] -> [M, R, H, elements]
    int32_t* seen_counts;              // [M, R, R, E]
};

// ---- The network: operations are posted as words, so that posting orders nothing by itself and
// every fence that the kernels need must be in the kernels.

enum Field { kSource, kTarget, kBytes, kSignal, kAdd, kFrom, kPosted, kNumFields };
constexpr unsigned kMaxOperations = 1 << 13;

struct Wire {
    Word operations[kMaxOperations][kNumFields];
    unsigned posted;
    unsigned ranks_done;
};

struct DelayedNetwork {
    Wire* wire;
    unsigned char* windows;
    int64_t window_bytes;
    Word* signals;
    int64_t num_signals;
    int rank;

    void post(Word source, Word target, int64_t bytes, int peer, uint32_t signal_id,
              uint64_t add) const {
        const unsigned i = atomicAdd(&wire->posted, 1u);
        if (i >= kMaxOperations) {
            __trap();
        }
        Word* fields = wire->operations[i];
        store_relaxed(fields + kSource, source);
        store_relaxed(fields + kTarget, target);
        store_relaxed(fields + kBytes, static_cast<Word>(bytes));
        store_relaxed(fields + kSignal,
                      reinterpret_cast<Word>(signals + peer * num_signals + signal_id));
        store_relaxed(fields + kAdd, static_cast<Word>(add));
        store_relaxed(fields + kFrom, static_cast<Word>(rank));
        store_relaxed(fields + kPosted, Word{1});
    }
    void put(int peer, int64_t target, int64_t source, int64_t bytes, uint32_t signal_id,
             uint64_t add) const {
        if (warp_lane() == 0) {
            post(reinterpret_cast<Word>(windows + rank * window_bytes + source),
                 reinterpret_cast<Word>(windows + peer * window_bytes + target), bytes, peer,
                 signal_id, add);
        }
    }
    void signal(int peer, uint32_t signal_id, uint64_t add) const {
        post(0, 0, 0, peer, signal_id, add);
    }
    uint64_t read(uint32_t signal_id) const {
        return load_relaxed(signals + rank * num_signals + signal_id);
    }
};

// With TOPOEP_TEST_PEER_MEMORY the ranks write into each other's memory instead.
#if defined(TOPOEP_TEST_PEER_MEMORY)
using TestNetwork = PeerMemory;
#else
using TestNetwork = DelayedNetwork;
#endif

struct Random {
    uint64_t state;

    uint32_t below(uint32_t bound) {
        state += 0x9e3779b97f4a7c15ull;
        uint64_t z = state;
        z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
        z = (z ^ z >> 27) * 0x94d049bb133111ebull;
        return static_cast<uint32_t>(((z ^ z >> 31) >> 32) * bound >> 32);
    }
};

// An operation under way: four pieces of the bytes in any order, then the signal.
struct Flight {
    Word fields[kPosted];
    uint32_t not_before;
    uint32_t pieces;
    bool doubled;
};

struct World {
    Settings settings;
    Memory memory;
    Wire* wire;
    Flight* flights;
    unsigned* barriers;  // [R]
    ExchangeArguments* exchange;
    ReplicateArguments* replicate;
    ReduceArguments* reduce;
    TestNetwork* networks;
    BlockRoles roles;
};

void deliver_piece(const Word* fields, uint32_t piece) {
    const Word bytes = fields[kBytes];
    const Word quarter = (bytes / 16 + 3) / 4 * 16;
    const Word begin = std::min(piece * quarter, bytes);
    const Word end = std::min(begin + quarter, bytes);
    for (Word at = begin; at < end; at += sizeof(uint32_t)) {
        *reinterpret_cast<uint32_t*>(fields[kTarget] + at) =
            *reinterpret_cast<const uint32_t*>(fields[kSource] + at);
    }
}

void run_network(const World& world) {
    const Settings& settings = world.settings;
    Wire& wire = *world.wire;
    Random random{static_cast<uint64_t>(settings.seed) * 7919 + 5};
    const auto pause = [&](uint32_t now, uint32_t of) {
        return now + (random.below(of) != 0
                          ? 0
                          : random.below(static_cast<uint32_t>(settings.delay) + 1));
    };
    const unsigned num_ranks = static_cast<unsigned>(settings.num_nodes * settings.ranks_per_node);
    unsigned taken = 0;
    unsigned under_way = 0;
    for (uint32_t now = 0;; ++now) {
        while (load_relaxed(&wire.posted) > taken &&
               load_relaxed(wire.operations[taken] + kPosted) != 0) {
            __threadfence();
            const Word* posted = wire.operations[taken++];
            Flight& flight = world.flights[under_way++];
            for (int field = 0; field < kPosted; ++field) {
                flight.fields[field] = load_relaxed(posted + field);
            }
            flight.not_before = pause(now, 4);
            flight.pieces = flight.fields[kBytes] == 0 ? 15 : 0;
            flight.doubled = false;
        }
        if (under_way == 0) {
            if (load_relaxed(&wire.ranks_done) >= num_ranks &&
                load_relaxed(&wire.posted) == taken) {
                return;
            }
            __nanosleep(1);
            continue;
        }
        const unsigned chosen = random.below(under_way);
        Flight& flight = world.flights[chosen];
        if (flight.not_before > now) {
            if (now % 4 == 0) {
                __nanosleep(1);
            }
            continue;
        }
        if (flight.pieces != 15) {
            uint32_t piece = random.below(4);
            while (flight.pieces >> piece & 1) {
                piece = (piece + 1) % 4;
            }
            deliver_piece(flight.fields, piece);
            flight.pieces |= 1u << piece;
            if (flight.pieces == 15) {
                world.memory.sent_bytes[flight.fields[kFrom]] += flight.fields[kBytes];
                flight.not_before = pause(now, 3);
            }
        } else {
            __threadfence();
            const Int number =
                flight.doubled ? -1 : static_cast<Int>((*world.memory.sent_signals)++);
            if (flight.doubled || number != settings.dropped_signal) {
                atomicAdd(reinterpret_cast<Word*>(flight.fields[kSignal]), flight.fields[kAdd]);
            }
            if (!flight.doubled && number == settings.doubled_signal) {
                flight.doubled = true;
                flight.not_before = now + static_cast<uint32_t>(settings.doubled_late);
            } else {
                world.flights[chosen] = world.flights[--under_way];
            }
        }
        if (random.below(3) == 0) {
            __nanosleep(1);
        }
    }
}

// ---- A rank

// Stands for the end of one kernel and the start of the next one on the rank's stream.
void next_kernel(unsigned* barrier, unsigned num_blocks, unsigned* phase) {
    __syncthreads();
    ++*phase;
    if (threadIdx.x == 0) {
        __threadfence();
        atomicAdd(barrier, 1u);
        while (load_relaxed(barrier) < *phase * num_blocks) {
            __nanosleep(1);
        }
        __threadfence();
    }
    __syncthreads();
}

// This rank's share of the elements: element i belongs to block and thread i modulo their number.
template <class F>
void for_elements(Int count, int block, int num_blocks, F&& f) {
    for (Int i = Int{block} * blockDim.x + threadIdx.x; i < count;
         i += Int{num_blocks} * blockDim.x) {
        f(i);
    }
}

void copy_all(unsigned char* target, const unsigned char* source, Int bytes, int block,
              int num_blocks) {
    const bool whole_words = (reinterpret_cast<Word>(target) | reinterpret_cast<Word>(source) |
                              static_cast<Word>(bytes)) %
                                 sizeof(uint32_t) ==
                             0;
    if (whole_words) {
        for_elements(bytes / 4, block, num_blocks, [&](Int i) {
            reinterpret_cast<uint32_t*>(target)[i] = reinterpret_cast<const uint32_t*>(source)[i];
        });
    } else {
        for_elements(bytes, block, num_blocks, [&](Int i) { target[i] = source[i]; });
    }
}

template <class Bits>
void add_bits(unsigned char* target, const unsigned char* source, Int count, int block,
              int num_blocks) {
    Bits* to = reinterpret_cast<Bits*>(target);
    const Bits* from = reinterpret_cast<const Bits*>(source);
    // A slot that is not zero gives a wrong gradient.
    for_elements(count, block, num_blocks,
                 [&](Int i) { to[i] = static_cast<Bits>(to[i] + from[i]); });
}

void run_rank(const World& world, int rank, int block, uint32_t* shared) {
    const Settings& settings = world.settings;
    const Memory& memory = world.memory;
    const DataPlane& plane = world.replicate[rank].plane;
    const DataPlaneConfig& config = plane.config;
    const int num_blocks = 1 + world.roles.senders + world.roles.pullers;
    const int slot_bytes = static_cast<DType>(settings.slot_type) == DType::kFloat32 ? 4 : 2;
    const int home_bytes = static_cast<DType>(settings.home_type) == DType::kFloat32 ? 4 : 2;
    Random random{static_cast<uint64_t>(settings.seed) * 131 + blockIdx.x};
    unsigned phase = 0;
    const auto end_kernel = [&] {
        next_kernel(world.barriers + rank, static_cast<unsigned>(num_blocks), &phase);
        return load_relaxed(&static_cast<StateHeader*>(plane.state)->failed) == 0;
    };
    for (Int m = 0; m < settings.microbatches; ++m) {
        // Layers of two shapes share the rings: every second microbatch has fewer tensors.
        const int num_tensors =
            static_cast<int>(settings.alternate != 0 && m % 2 == 1 ? (settings.num_tensors + 1) / 2
                                                                   : settings.num_tensors);
        const PlanCopies copies{memory.slot_expert + m * config.num_spare(),
                                memory.copy_offsets + m * (config.num_experts + 1),
                                memory.copy_slots + m * config.num_spare()};
        for (uint32_t i = settings.slow_rank == rank ? 300 : random.below(20); i > 0; --i) {
            __nanosleep(1);  // ranks drift apart
        }
        if (settings.exchange != 0) {
            ExchangeArguments arguments = world.exchange[rank];
            arguments.row += m * config.num_ranks * config.num_experts;
            exchange_counts_block(arguments, world.networks[rank], block, num_blocks);
            if (!end_kernel()) {
                return;
            }
            const Int bytes = Int{4} * config.num_ranks * config.num_experts;
            copy_all(reinterpret_cast<unsigned char*>(memory.seen_counts) +
                         (m * config.num_ranks + rank) * bytes,
                     reinterpret_cast<unsigned char*>(arguments.counts), bytes, block, num_blocks);
        }
        if (block == 0) {
            stream_lists_block(config, plane.topology, copies, world.replicate[rank].lists,
                               reinterpret_cast<int32_t*>(shared));
        }
        end_kernel();
        ReplicateArguments replicate = world.replicate[rank];
        replicate.copies = copies;
        replicate.layout.num_tensors = num_tensors;
        replicate_block(replicate, world.roles, world.networks[rank], block,
                        reinterpret_cast<unsigned char*>(shared));
        if (!end_kernel()) {
            return;
        }
        for (int t = 0; t < settings.num_tensors; ++t) {
            const Int rows = Int{config.spare_slots} * memory.row_bytes[t];
            copy_all(memory.seen_spare[t] + (m * config.num_ranks + rank) * rows,
                     memory.spare[t] + rank * rows, rows, block, num_blocks);
            const Int elements = memory.elements[t];
            for (int slot = 0; slot < config.spare_slots; ++slot) {
                if (t >= num_tensors || settings.backward == 0 ||
                    copies.slot_expert[rank * config.spare_slots + slot] < 0) {
                    continue;
                }
                const Int at = (Int{rank} * config.spare_slots + slot) * elements * slot_bytes;
                unsigned char* target = memory.slot_grads[t] + at;
                const unsigned char* source =
                    memory.grads[t] + m * config.num_spare() * elements * slot_bytes + at;
                slot_bytes == 4 ? add_bits<uint32_t>(target, source, elements, block, num_blocks)
                                : add_bits<uint16_t>(target, source, elements, block, num_blocks);
            }
        }
        end_kernel();
        if (settings.backward == 0) {
            continue;
        }
        ReduceArguments reduce = world.reduce[rank];
        reduce.copies = copies;
        reduce.layout.num_tensors = num_tensors;
        const auto run_reduce = [&](auto slot, auto home) {
            reduce_grads_across_block<decltype(slot), decltype(home)>(
                reduce, world.roles, world.networks[rank], block, shared);
        };
        if (slot_bytes == 4) {
            home_bytes == 4 ? run_reduce(float{}, float{}) : run_reduce(float{}, BFloat16{});
        } else {
            home_bytes == 4 ? run_reduce(BFloat16{}, float{}) : run_reduce(BFloat16{}, BFloat16{});
        }
        if (!end_kernel()) {
            return;
        }
        for (int t = 0; t < settings.num_tensors; ++t) {
            const Int slots = Int{config.spare_slots} * memory.elements[t] * slot_bytes;
            copy_all(memory.seen_slots[t] + (m * config.num_ranks + rank) * slots,
                     memory.slot_grads[t] + rank * slots, slots, block, num_blocks);
            const Int home = settings.experts_per_rank * memory.elements[t] * home_bytes;
            copy_all(memory.seen_home[t] + (m * config.num_ranks + rank) * home,
                     memory.home_grads[t] + rank * home, home, block, num_blocks);
            if (settings.optimizer != 0) {
                const Int weights = settings.experts_per_rank * memory.row_bytes[t];
                unsigned char* own = memory.home[t] + rank * weights;
                for_elements(weights, block, num_blocks,
                             [&](Int i) { own[i] = static_cast<unsigned char>(own[i] + 1); });
            }
        }
        end_kernel();
    }
}

void cluster_kernel(const World* world) {
    TOPOEP_DYNAMIC_SHARED(uint32_t, shared);
    const int num_blocks = 1 + world->roles.senders + world->roles.pullers;
    const int num_ranks =
        static_cast<int>(world->settings.num_nodes * world->settings.ranks_per_node);
    const int rank = static_cast<int>(blockIdx.x) / num_blocks;
    const int block = static_cast<int>(blockIdx.x) % num_blocks;
    if (rank == num_ranks) {
        if (threadIdx.x == 0) {
            run_network(*world);
        }
        return;
    }
    run_rank(*world, rank, block, shared);
    __syncthreads();
    if (block == 0 && threadIdx.x == 0) {
        __threadfence();
        atomicAdd(&world->wire->ranks_done, 1u);
    }
}

DataPlaneConfig make_config(const Settings& settings) {
    DataPlaneConfig config{};
    config.num_nodes = static_cast<int>(settings.num_nodes);
    config.ranks_per_node = static_cast<int>(settings.ranks_per_node);
    config.num_ranks = config.num_nodes * config.ranks_per_node;
    config.num_experts = config.num_ranks * static_cast<int>(settings.experts_per_rank);
    config.spare_slots = static_cast<int>(settings.spare_slots);
    config.chunk_bytes = settings.chunk_bytes;
    config.tile_bytes = settings.tile_bytes;
    config.ring_slots = static_cast<int>(settings.ring_slots);
    config.staging_slots = static_cast<int>(settings.staging_slots);
    config.workers = static_cast<int>(settings.workers);
    config.bulk_piece_bytes = static_cast<int>(settings.bulk_piece_bytes);
    return config;
}

// Memory of this unit that kernels touch.
template <class T>
class Registered {
public:
    Registered(size_t count, const char* name) : values_(count) {
        emu_register(values_.data(), count * sizeof(T), name, 1);
    }
    ~Registered() { emu_unregister(values_.data()); }
    T* data() { return values_.data(); }
    T& operator[](size_t i) { return values_[i]; }

private:
    std::vector<T> values_;
};

}  // namespace

extern "C" {

// sizes: window bytes, signals, bytes of state, entries of lists.
void cluster_sizes(const Settings* settings, Int* sizes) {
    const DataPlaneConfig config = make_config(*settings);
    const WindowLayout window = make_window_layout(config);
    sizes[0] = window.bytes;
    sizes[1] = window.num_signals;
    sizes[2] = state_bytes(config);
    sizes[3] = stream_lists_size(config);
}

const char* check_roles(Int num_nodes, Int staging_slots, Int senders, Int pullers, Int threads) {
    DataPlaneConfig config{};
    config.num_nodes = static_cast<int>(num_nodes);
    config.staging_slots = static_cast<int>(staging_slots);
    return problem_with_roles(
        config, {static_cast<int>(senders), static_cast<int>(pullers), static_cast<int>(threads)});
}

const char* run_cluster(const Settings* settings, const Memory* memory) {
    const DataPlaneConfig shared_config = make_config(*settings);
    const WindowLayout window = make_window_layout(shared_config);
    const size_t num_ranks = static_cast<size_t>(shared_config.num_ranks);
    const size_t local_ranks = static_cast<size_t>(shared_config.ranks_per_node);
    const size_t num_tensors = static_cast<size_t>(settings->num_tensors);
    const TopologyView topology = view_topology_table(memory->table, shared_config.num_ranks);

    Registered<World> world(1, "world");
    Registered<Wire> wire(1, "wire");
    Registered<Flight> flights(kMaxOperations, "operations under way");
    Registered<unsigned> barriers(num_ranks, "barriers");
    Registered<ExchangeArguments> exchange(num_ranks, "exchange arguments");
    Registered<ReplicateArguments> replicate(num_ranks, "replicate arguments");
    Registered<ReduceArguments> reduce(num_ranks, "reduce arguments");
    Registered<TestNetwork> networks(num_ranks, "networks");
    Registered<unsigned char*> rank_windows(num_ranks, "window pointers by rank");
    Registered<Word*> rank_signals(num_ranks, "signal pointers by rank");
    Registered<unsigned char*> windows(num_ranks, "window pointers");                 // [N, G]
    Registered<const unsigned char*> home(num_ranks * num_tensors, "home pointers");  // [N, T, G]
    Registered<void*> slot_grads(num_ranks * num_tensors, "slot gradient pointers");

    const int64_t slot_size = static_cast<DType>(settings->slot_type) == DType::kFloat32 ? 4 : 2;
    const int64_t home_size = static_cast<DType>(settings->home_type) == DType::kFloat32 ? 4 : 2;
    const ExpertLayout bytes =
        make_expert_layout(static_cast<int>(num_tensors), memory->row_bytes, kByteAlignment);
    const ExpertLayout elements =
        make_expert_layout(static_cast<int>(num_tensors), memory->elements, kElementAlignment);
    for (size_t rank = 0; rank < num_ranks; ++rank) {
        const Place place = place_of(topology, static_cast<int>(rank));
        const size_t node = static_cast<size_t>(place.node);
        const size_t local = static_cast<size_t>(place.local);
        windows[node * local_ranks + local] =
            memory->windows + static_cast<Int>(rank) * window.bytes;
        rank_windows[rank] = windows[node * local_ranks + local];
        rank_signals[rank] = memory->signals + static_cast<Int>(rank) * window.num_signals;
        for (size_t t = 0; t < num_tensors; ++t) {
            const size_t at = (node * num_tensors + t) * local_ranks + local;
            home[at] = memory->home[t] +
                       static_cast<Int>(rank) * settings->experts_per_rank * memory->row_bytes[t];
            slot_grads[at] = memory->slot_grads[t] + static_cast<Int>(rank) *
                                                         settings->spare_slots *
                                                         memory->elements[t] * slot_size;
        }
    }
    for (size_t r = 0; r < num_ranks; ++r) {
        const Int rank = static_cast<Int>(r);
        DataPlane plane{};
        plane.config = shared_config;
        const Place place = place_of(topology, static_cast<int>(rank));
        plane.config.rank = static_cast<int>(rank);
        plane.config.node = place.node;
        plane.config.local = place.local;
        plane.window = window;
        plane.topology = topology;
        const size_t first = static_cast<size_t>(place.node) * local_ranks;
        plane.windows = windows.data() + first;
        plane.state = memory->states + rank * state_bytes(shared_config);
        plane.error = memory->errors + rank;
        plane.timeout = static_cast<uint64_t>(settings->timeout);
        exchange[r] = {plane, memory->rows + rank * shared_config.num_experts,
                       memory->counts + rank * shared_config.num_ranks * shared_config.num_experts};
        const StreamLists lists = view_stream_lists(
            memory->lists + rank * stream_lists_size(shared_config), shared_config);
        replicate[r].plane = reduce[r].plane = plane;
        replicate[r].lists = reduce[r].lists = lists;
        replicate[r].layout = bytes;
        replicate[r].home = home.data() + first * num_tensors;
        reduce[r].layout = elements;
        reduce[r].slot_grads = slot_grads.data() + first * num_tensors;
        for (size_t t = 0; t < num_tensors; ++t) {
            replicate[r].spare[t] =
                memory->spare[t] + rank * settings->spare_slots * memory->row_bytes[t];
            reduce[r].home_grads[t] = memory->home_grads[t] + rank * settings->experts_per_rank *
                                                                  memory->elements[t] * home_size;
        }
#if defined(TOPOEP_TEST_PEER_MEMORY)
        networks[r] = {rank_windows.data(), rank_signals.data(), static_cast<int>(rank)};
#else
        networks[r] = {wire.data(),     memory->windows,    window.bytes,
                       memory->signals, window.num_signals, static_cast<int>(rank)};
#endif
    }
    const BlockRoles roles{static_cast<int>(settings->senders), static_cast<int>(settings->pullers),
                           static_cast<int>(settings->threads)};
    world[0] = {*settings,       *memory,          wire.data(),   flights.data(),  barriers.data(),
                exchange.data(), replicate.data(), reduce.data(), networks.data(), roles};
    const unsigned num_blocks = static_cast<unsigned>(1 + roles.senders + roles.pullers);
    LaunchShape shape{dim3(num_blocks * static_cast<unsigned>(num_ranks) + 1),
                      dim3(static_cast<unsigned>(roles.threads))};
    shape.shared_bytes = std::max(replicate_shared_bytes(shared_config, roles),
                                  stream_lists_shared_bytes(shared_config.num_nodes));
    emu_set_option("resident", shape.grid.x);
    return launch(cluster_kernel, shape, nullptr, static_cast<const World*>(world.data()));
}
}
