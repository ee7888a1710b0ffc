// SPDX-License-Identifier: Apache-2.0
// Host form of histogram (cuda/histogram.cuh).
#include "cpu/histogram.h"

#include <algorithm>
#include <cstddef>
#include <vector>

namespace topoep {
namespace {

// Neighbouring ids are often equal when an expert is hot, and an increment that follows one of the
// same counter waits for it; four tables taken in turn break that chain.
constexpr int kTables = 4;

}  // namespace

template <class Id>
void histogram_cpu(const Id* ids, int64_t num_ids, int num_experts, int32_t* counts,
                   int32_t* invalid) {
    // Bin 0 counts padding, bins 1 .. E the experts, bin E + 1 everything else.
    const uint64_t num_bins = static_cast<uint64_t>(num_experts) + 2;
    const uint64_t invalid_bin = num_bins - 1;
    std::vector<int32_t> tables(kTables * num_bins, 0);
    int32_t* const table = tables.data();
    const auto bin_of = [=](Id id) {
        return std::min(static_cast<uint64_t>(static_cast<int64_t>(id)) + 1, invalid_bin);
    };
    int64_t i = 0;
    for (; i + kTables <= num_ids; i += kTables) {
        for (int t = 0; t < kTables; ++t) {
            table[t * num_bins + bin_of(ids[i + t])] += 1;
        }
    }
    for (; i < num_ids; ++i) {
        table[bin_of(ids[i])] += 1;
    }
    const auto sum_bin = [=](uint64_t bin) {
        int32_t sum = 0;
        for (int t = 0; t < kTables; ++t) {
            sum += table[t * num_bins + bin];
        }
        return sum;
    };
    for (int e = 0; e < num_experts; ++e) {
        counts[e] = sum_bin(static_cast<uint64_t>(e) + 1);
    }
    *invalid = sum_bin(invalid_bin);
}

template void histogram_cpu(const int32_t*, int64_t, int, int32_t*, int32_t*);
template void histogram_cpu(const int64_t*, int64_t, int, int32_t*, int32_t*);

}  // namespace topoep
