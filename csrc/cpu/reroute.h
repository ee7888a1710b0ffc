// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "core/reroute_plan.h"

namespace topoep {

// out[i] = physical expert of ids[i]; quotas are filled in token order. Ids outside [0, E) are
// passed through. Id is int32_t or int64_t; ids and out do not overlap.
template <class Id>
void reroute_cpu(const ReroutePlan& plan, const Id* ids, int64_t num_ids, Id* out);

}  // namespace topoep
