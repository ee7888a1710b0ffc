// SPDX-License-Identifier: Apache-2.0
// Host form of histogram (cuda/histogram.cuh).
#include "cpu/histogram.h"

#include <cstddef>
#include <type_traits>
#include <vector>

namespace topoep {
namespace {

// Neighbouring ids are often equal when an expert is hot, and an increment that follows one of the
// same counter waits for it; tables taken in turn break that chain.
constexpr int kTables = 4;

// One test per id that is nearly always true, and so costs next to nothing.
template <class Id>
void count_id(Id id, int num_experts, int32_t* table, int32_t* invalid) {
    using Bits = std::make_unsigned_t<Id>;  // negative ids become large
    const Bits expert = static_cast<Bits>(id);
    if (expert < static_cast<Bits>(num_experts)) {
        table[expert] += 1;
    } else {
        *invalid += id != -1;
    }
}

}  // namespace

template <class Id>
void histogram_cpu(const Id* ids, int64_t num_ids, int num_experts, int32_t* counts,
                   int32_t* invalid) {
    std::vector<int32_t> memory(static_cast<size_t>(kTables) * num_experts, 0);
    int32_t* tables[kTables];
    for (int t = 0; t < kTables; ++t) {
        tables[t] = memory.data() + static_cast<size_t>(t) * num_experts;
    }
    *invalid = 0;
    int64_t i = 0;
    for (; i + kTables <= num_ids; i += kTables) {
        for (int t = 0; t < kTables; ++t) {
            count_id(ids[i + t], num_experts, tables[t], invalid);
        }
    }
    for (; i < num_ids; ++i) {
        count_id(ids[i], num_experts, tables[0], invalid);
    }
    for (int e = 0; e < num_experts; ++e) {
        counts[e] = tables[0][e] + tables[1][e] + tables[2][e] + tables[3][e];
    }
}

template void histogram_cpu(const int32_t*, int64_t, int, int32_t*, int32_t*);
template void histogram_cpu(const int64_t*, int64_t, int, int32_t*, int32_t*);

}  // namespace topoep
