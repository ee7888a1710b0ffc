// SPDX-License-Identifier: Apache-2.0
// What rerouting needs of a plan: this rank's quotas per physical expert and the copies per expert.
#pragma once

#include <cstdint>

#include "core/hd.h"

namespace topoep {

struct ReroutePlan {
    int num_ranks;
    int num_experts;
    int num_physical;
    const int32_t* send;          // [P]
    const int32_t* copy_offsets;  // [E + 1]
    const int32_t* copy_slots;    // [R * S]

    TOPOEP_HD int home_slot(int expert) const {
        const int home_slots = num_experts / num_ranks;
        return expert / home_slots * (num_physical / num_ranks) + expert % home_slots;
    }

    // Physical expert of the ordinal-th token (in token order) that this rank routes to `expert`:
    // the home slot takes its quota first, then the copies in list order. Tokens beyond the quotas,
    // which exist only when the ids are not those of the plan, go home: still the right expert.
    TOPOEP_HD int physical_expert(int expert, int ordinal) const {
        const int home = home_slot(expert);
        int32_t before = send[home];
        if (ordinal < before) {
            return home;
        }
        for (int i = copy_offsets[expert]; i < copy_offsets[expert + 1]; ++i) {
            before += send[copy_slots[i]];
            if (ordinal < before) {
                return copy_slots[i];
            }
        }
        return home;
    }
};

}  // namespace topoep
