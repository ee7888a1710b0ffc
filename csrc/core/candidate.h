// SPDX-License-Identifier: Apache-2.0
// The state of one candidate while it is being solved: a few small arrays in one block of memory
// (shared memory of a thread block, or a host buffer), and the elementary moves on it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/limits.h"
#include "core/policy.h"
#include "core/shape.h"
#include "core/team.h"
#include "core/workload.h"

namespace topoep {

constexpr uint16_t kNoExpert = UINT16_MAX;

// Copies and tokens per link of a finished candidate, from which its time follows (cost_model.h).
struct Traffic {
    uint64_t* tokens_out;  // [N] tokens that leave the node
    uint64_t* tokens_in;   // [N]
    uint32_t* pairs_out;   // [N] (expert, remote node) copies that leave the node
    uint32_t* pairs_in;    // [N]
    uint32_t* copies_out;  // [R] copies that the rank serves inside its node
    uint32_t* copies_in;   // [R] copies that it fetches inside its node
    uint32_t* exports;     // [R] pairs whose home it is
    uint32_t* imports;     // [R] pairs that it receives
};

// State of the transport planner (match_transport.h).
struct Transport {
    int64_t* row;         // [N] scaling of the sending side
    int64_t* column;      // [N] scaling of the receiving side
    int64_t* supply;      // [N] the node's share of all excess, fixed point
    int64_t* demand;      // [N] the node's share of all room, fixed point
    int64_t* total_room;  // [1]
    uint64_t* proposal;   // [R] score and expert of the rank's proposal
    int32_t* spill;       // [E] tokens of the expert that should still leave its home
    uint8_t* matched;     // [R] the rank took a copy in this round
};

struct Candidate {
    Shape shape;
    TopologyView topology;
    Policy policy;
    int32_t cap;           // the rank load that this candidate tries not to exceed ("tau")
    int32_t usable_slots;  // of every rank; a policy can leave some empty

    int32_t* home;          // [E] tokens of the expert that its home rank still computes
    uint16_t* order;        // [E] per rank: its experts, most home tokens first, then lower id
    int32_t* load;          // [R] tokens that the rank computes, imports of its node not yet placed
    int32_t* slot_tokens;   // [R * S] tokens that the copy in this slot serves
    uint16_t* slot_expert;  // [R * S] planner expert id or kNoExpert
    uint8_t* free;          // [R] usable slots that are empty
    uint32_t* copied;       // [E / 32] bit set: the expert has, or had, a copy

    int64_t* node_room;       // [N] tokens that the node can take in (or, negative, must give away)
    int32_t* num_imports;     // [N] entries of the node's import list
    int32_t* import_tokens;   // [R * S] list of node n starts at node_begin[n] * S
    uint16_t* import_expert;  // [R * S]
    int32_t* excess;          // [R] tokens that a rank still has to give away in this step
    uint32_t* near_node;      // [N / 32] bit set: the step prefers this node
    uint64_t* reach;          // [R] tokens that a rank can take or pass on (drop_copies.h)
    uint64_t* far_reach;      // [R] tokens that it can give to such a rank
    uint32_t* claim;          // [R] the copy that may be dropped with a change of this rank
    uint32_t* arrival;        // [R] how a search reached the rank (exchange_copies.h)
    uint32_t* fresh;          // [R] the same for ranks that the last hop reached
    int32_t* turn;            // [R * S] tokens that a copy had before exchanges, -1 after its turn
    Traffic traffic;
    Transport transport;
    uint32_t* steps;  // [4] dependent steps: nodes, slowest node, last resort, dropping

    TOPOEP_HD int32_t room(int p) const { return free[p] > 0 && load[p] < cap ? cap - load[p] : 0; }
    TOPOEP_HD int copies_on(int p) const { return usable_slots - free[p]; }
    TOPOEP_HD bool holds(int p, int expert) const {
        for (int i = p * shape.spare_slots; i < (p + 1) * shape.spare_slots; ++i) {
            if (slot_expert[i] == expert) {
                return true;
            }
        }
        return false;
    }
    TOPOEP_HD bool is_copied(int expert) const { return copied[expert / 32] >> (expert % 32) & 1; }
    TOPOEP_HD int home_rank(int expert) const { return expert / shape.experts_per_rank(); }
    TOPOEP_HD int home_node(int expert) const { return topology.node_at[home_rank(expert)]; }
};

// Hands out aligned pieces of one block of memory; with a null base it only measures.
class Arena {
public:
    TOPOEP_HD explicit Arena(void* base) : base_(static_cast<unsigned char*>(base)) {}
    template <class T>
    TOPOEP_HD T* take(int count) {
        used_ = (used_ + sizeof(T) - 1) / sizeof(T) * sizeof(T);
        T* piece = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + used_);
        used_ += sizeof(T) * static_cast<size_t>(count);
        return piece;
    }
    TOPOEP_HD size_t used() const { return used_; }
    TOPOEP_HD void rewind(size_t used) { used_ = used; }

private:
    unsigned char* base_;
    size_t used_ = 0;
};

// Places the arrays that only one phase needs; phases that never overlap in time share memory.
// Returns the end of the longest.
TOPOEP_HD size_t bind_phases(const Shape& shape, Arena arena, Candidate& c) {
    const size_t begin = arena.used();
    c.import_tokens = arena.take<int32_t>(shape.num_spare());  // placing and refining
    c.excess = arena.take<int32_t>(shape.num_ranks);
    c.import_expert = arena.take<uint16_t>(shape.num_spare());
    size_t end = arena.used();
    arena.rewind(begin);
    c.reach = arena.take<uint64_t>(shape.num_ranks);  // dropping copies
    c.far_reach = arena.take<uint64_t>(shape.num_ranks);
    c.claim = arena.take<uint32_t>(shape.num_ranks);
    end = arena.used() > end ? arena.used() : end;
    arena.rewind(begin);
    c.arrival = arena.take<uint32_t>(shape.num_ranks);  // exchanging copies
    c.fresh = arena.take<uint32_t>(shape.num_ranks);
    c.turn = arena.take<int32_t>(shape.num_spare());
    end = arena.used() > end ? arena.used() : end;
    arena.rewind(begin);
    c.traffic.tokens_out = arena.take<uint64_t>(shape.num_nodes);  // predicting the time
    c.traffic.tokens_in = arena.take<uint64_t>(shape.num_nodes);
    c.traffic.pairs_out = arena.take<uint32_t>(shape.num_nodes);
    c.traffic.pairs_in = arena.take<uint32_t>(shape.num_nodes);
    c.traffic.copies_out = arena.take<uint32_t>(shape.num_ranks);
    c.traffic.copies_in = arena.take<uint32_t>(shape.num_ranks);
    c.traffic.exports = arena.take<uint32_t>(shape.num_ranks);
    c.traffic.imports = arena.take<uint32_t>(shape.num_ranks);
    end = arena.used() > end ? arena.used() : end;
    arena.rewind(begin);
    c.transport.row = arena.take<int64_t>(shape.num_nodes);  // matching by transport
    c.transport.column = arena.take<int64_t>(shape.num_nodes);
    c.transport.supply = arena.take<int64_t>(shape.num_nodes);
    c.transport.demand = arena.take<int64_t>(shape.num_nodes);
    c.transport.total_room = arena.take<int64_t>(1);
    c.transport.proposal = arena.take<uint64_t>(shape.num_ranks);
    c.transport.spill = arena.take<int32_t>(shape.num_experts);
    c.transport.matched = arena.take<uint8_t>(shape.num_ranks);
    return arena.used() > end ? arena.used() : end;
}

// Places a candidate and the workload sorted in place of it into `base`; returns the bytes it
// takes.
TOPOEP_HD size_t bind_candidate(const Shape& shape, void* base, Candidate* candidate,
                                Workload* work) {
    const int ranks = shape.num_ranks;
    Candidate& c = *candidate;
    Arena arena(base);
    c.node_room = arena.take<int64_t>(shape.num_nodes);
    work->node_out = arena.take<int64_t>(shape.num_nodes);
    work->node_in = arena.take<int64_t>(shape.num_nodes);
    c.home = arena.take<int32_t>(shape.num_experts);
    c.load = arena.take<int32_t>(ranks);
    c.slot_tokens = arena.take<int32_t>(shape.num_spare());
    c.num_imports = arena.take<int32_t>(shape.num_nodes);
    c.copied = arena.take<uint32_t>((shape.num_experts + 31) / 32);
    c.steps = arena.take<uint32_t>(4);
    c.near_node = arena.take<uint32_t>((shape.num_nodes + 31) / 32);
    work->load_before = arena.take<int32_t>(ranks + 1);
    work->by_load = arena.take<uint16_t>(ranks);
    work->node_order = arena.take<uint16_t>(ranks);
    c.order = arena.take<uint16_t>(shape.num_experts);
    c.slot_expert = arena.take<uint16_t>(shape.num_spare());
    c.free = arena.take<uint8_t>(ranks);
    arena.take<uint64_t>(0);  // align the phases
    work->total = c.home;
    work->order = c.order;
    work->load = c.load;
    return bind_phases(shape, arena, c);
}

// Everything at home, all spare slots empty.
template <class Team>
TOPOEP_TEAM void start_candidate(const Team& team, const Workload& work, Candidate& c) {
    const Shape& shape = c.shape;
    if (work.total != c.home) {  // else the workload was sorted in place
        for (int e = team.lane(); e < shape.num_experts; e += team.size()) {
            c.home[e] = work.total[e];
            c.order[e] = work.order[e];
        }
        for (int p = team.lane(); p < shape.num_ranks; p += team.size()) {
            c.load[p] = work.load[p];
        }
    }
    for (int p = team.lane(); p < shape.num_ranks; p += team.size()) {
        c.free[p] = static_cast<uint8_t>(c.usable_slots);
    }
    for (int i = team.lane(); i < shape.num_spare(); i += team.size()) {
        c.slot_expert[i] = kNoExpert;
        c.slot_tokens[i] = 0;
    }
    for (int i = team.lane(); i < (shape.num_experts + 31) / 32; i += team.size()) {
        c.copied[i] = 0;
    }
    for (int n = team.lane(); n < shape.num_nodes; n += team.size()) {
        c.num_imports[n] = 0;
    }
    for (int i = team.lane(); i < 4; i += team.size()) {
        c.steps[i] = 0;
    }
    team.sync();
}

// A new copy of `expert` on rank p that serves `tokens`. One lane, between two syncs. The caller
// has checked that p has a free slot and does not hold the expert. Teams of other nodes do the same
// at the same time, and the only thing they share with this one is the word of `copied`.
template <class Team>
TOPOEP_TEAM void open_copy(const Team& team, Candidate& c, int expert, int p, int32_t tokens) {
    int i = p * c.shape.spare_slots;
    while (c.slot_expert[i] != kNoExpert) {
        ++i;
    }
    c.slot_expert[i] = static_cast<uint16_t>(expert);
    c.slot_tokens[i] = tokens;
    c.free[p] -= 1;
    c.load[p] += tokens;
    team.set_bits(&c.copied[expert / 32], 1u << (expert % 32));
}

TOPOEP_HD void leave_home(Candidate& c, int expert, int32_t tokens) {
    c.home[expert] -= tokens;
    c.load[c.home_rank(expert)] -= tokens;
}

}  // namespace topoep
