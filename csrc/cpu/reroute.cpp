// SPDX-License-Identifier: Apache-2.0
// Host form of reroute (cuda/reroute.cuh): one cursor per expert that walks the expert's holders.
#include "cpu/reroute.h"

#include <type_traits>
#include <vector>

namespace topoep {
namespace {

// The current holder of an expert, and how many more tokens it takes.
struct Cursor {
    int32_t left;
    int32_t physical;
};

class Cursors {
public:
    explicit Cursors(const ReroutePlan& plan)
        : plan_(plan), current_(plan.num_experts), next_(plan.num_experts) {
        for (int e = 0; e < plan.num_experts; ++e) {
            const int home = plan.home_slot(e);
            const bool copied = plan.copy_offsets[e] < plan.copy_offsets[e + 1];
            current_[e] = {copied ? plan.send[home] : INT32_MAX, home};
            next_[e] = plan.copy_offsets[e];
        }
    }

    int32_t take(uint64_t expert) {
        Cursor& cursor = current_[expert];
        if (cursor.left == 0) {
            cursor = advance(static_cast<int>(expert));
        }
        cursor.left -= 1;
        return cursor.physical;
    }

private:
    // The next holder with a quota; after the last one the home slot takes whatever comes.
    Cursor advance(int expert) {
        while (next_[expert] < plan_.copy_offsets[expert + 1]) {
            const int32_t physical = plan_.copy_slots[next_[expert]++];
            if (plan_.send[physical] > 0) {
                return {plan_.send[physical], physical};
            }
        }
        return {INT32_MAX, plan_.home_slot(expert)};
    }

    const ReroutePlan& plan_;
    std::vector<Cursor> current_;
    std::vector<int32_t> next_;  // index of the next copy in copy_slots
};

}  // namespace

template <class Id>
void reroute_cpu(const ReroutePlan& plan, const Id* ids, int64_t num_ids, Id* out) {
    Cursors cursors(plan);
    using Bits = std::make_unsigned_t<Id>;  // negative ids become large
    const Bits num_experts = static_cast<Bits>(plan.num_experts);
    for (int64_t i = 0; i < num_ids; ++i) {
        const Bits expert = static_cast<Bits>(ids[i]);
        out[i] = expert < num_experts ? static_cast<Id>(cursors.take(expert)) : ids[i];
    }
}

template void reroute_cpu(const ReroutePlan&, const int32_t*, int64_t, int32_t*);
template void reroute_cpu(const ReroutePlan&, const int64_t*, int64_t, int64_t*);

}  // namespace topoep
