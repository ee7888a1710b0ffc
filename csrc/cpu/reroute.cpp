// SPDX-License-Identifier: Apache-2.0
// Host form of reroute (cuda/reroute.cuh): one cursor per expert that walks the expert's holders.
#include "cpu/reroute.h"

#include <vector>

namespace topoep {
namespace {

struct Cursor {
    int32_t left;      // tokens that the current holder still takes
    int32_t physical;  // the current holder
    int32_t next;      // index of the next copy in copy_slots
};

Cursor start_cursor(const ReroutePlan& plan, int expert) {
    const int home = plan.home_slot(expert);
    const bool copied = plan.copy_offsets[expert] < plan.copy_offsets[expert + 1];
    return {copied ? plan.send[home] : INT32_MAX, home, plan.copy_offsets[expert]};
}

// The next holder with a quota; after the last one the home slot takes whatever comes.
void advance_cursor(const ReroutePlan& plan, int expert, Cursor* cursor) {
    while (cursor->left == 0) {
        if (cursor->next == plan.copy_offsets[expert + 1]) {
            *cursor = {INT32_MAX, plan.home_slot(expert), cursor->next};
        } else {
            cursor->physical = plan.copy_slots[cursor->next];
            cursor->left = plan.send[cursor->physical];
            cursor->next += 1;
        }
    }
}

}  // namespace

template <class Id>
void reroute_cpu(const ReroutePlan& plan, const Id* ids, int64_t num_ids, Id* out) {
    std::vector<Cursor> cursors;
    cursors.reserve(plan.num_experts);
    for (int e = 0; e < plan.num_experts; ++e) {
        cursors.push_back(start_cursor(plan, e));
    }
    for (int64_t i = 0; i < num_ids; ++i) {
        const Id id = ids[i];
        if (static_cast<uint64_t>(static_cast<int64_t>(id)) >=
            static_cast<uint64_t>(plan.num_experts)) {
            out[i] = id;
            continue;
        }
        Cursor& cursor = cursors[id];
        if (cursor.left == 0) {
            advance_cursor(plan, static_cast<int>(id), &cursor);
        }
        cursor.left -= 1;
        out[i] = static_cast<Id>(cursor.physical);
    }
}

template void reroute_cpu(const ReroutePlan&, const int32_t*, int64_t, int32_t*);
template void reroute_cpu(const ReroutePlan&, const int64_t*, int64_t, int64_t*);

}  // namespace topoep
