// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace topoep {

// counts[e] = number of ids equal to e; *invalid = number of ids outside [-1, num_experts). -1 is
// padding: neither counted nor invalid. Id is int32_t or int64_t.
template <class Id>
void histogram_cpu(const Id* ids, int64_t num_ids, int num_experts, int32_t* counts,
                   int32_t* invalid);

}  // namespace topoep
