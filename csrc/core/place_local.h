// SPDX-License-Identifier: Apache-2.0
// Copies for locality: an expert whose tokens from a node cost more to send than its weights is
// imported by that node for exactly those tokens, whether or not its home rank is too full. Runs
// before the node step of candidates that ask for it; the node step then balances what is left.
#pragma once

#include "core/candidate.h"
#include "core/team.h"
#include "core/workload.h"

namespace topoep {

// One node's imports: foreign experts by tokens from this node, most first, as many as it has
// slots. Every node leaves one token of what it could take at the expert's home, which therefore
// keeps some.
template <class Team>
TOPOEP_TEAM void import_local(const Team& team, Candidate& c, const int32_t* node_tokens,
                              int64_t least_tokens, int node) {
    const Shape& shape = c.shape;
    const int32_t* tokens = node_tokens + node * shape.num_experts;
    const int begin = c.topology.node_begin[node] * shape.spare_slots;
    const int slots = c.topology.node_size(node) * c.usable_slots;
    uint64_t last = 0;  // key of the latest import; keys grow as tokens fall
    int count = 0;
    for (; count < slots; ++count) {
        uint64_t best = kNothing;
        for (int e = team.lane(); e < shape.num_experts; e += team.size()) {
            if (c.home_node(e) == node || tokens[e] < 2 || tokens[e] < least_tokens) {
                continue;
            }
            const uint64_t key = uint64_t{static_cast<uint32_t>(INT32_MAX - tokens[e])} << 16 |
                                 static_cast<uint64_t>(e + 1);
            best = key > last ? min64(best, key) : best;
        }
        last = team.min(best);
        if (last == kNothing) {
            break;
        }
        const int expert = static_cast<int>(last & 0xffff) - 1;
        if (team.lane() == 0) {
            const uint32_t moved = static_cast<uint32_t>(tokens[expert] - 1);
            c.import_expert[begin + count] = static_cast<uint16_t>(expert);
            c.import_tokens[begin + count] = static_cast<int32_t>(moved);
            // Other nodes take from the same expert and the same rank at this moment.
            team.add(reinterpret_cast<uint32_t*>(&c.home[expert]), 0u - moved);
            team.add(reinterpret_cast<uint32_t*>(&c.load[c.home_rank(expert)]), 0u - moved);
        }
    }
    if (team.lane() == 0) {
        c.num_imports[node] = count;
    }
}

template <class Group>
TOPOEP_TEAM void place_local(const Group& group, Candidate& c, const int32_t* node_tokens,
                             int64_t least_tokens, const Workload& own) {
    group.each(c.shape.num_nodes, [&](const auto& team, int n) {
        import_local(team, c, node_tokens, least_tokens, n);
    });
    sort_loads(group.all(), c.shape, c.topology, own);
}

}  // namespace topoep
