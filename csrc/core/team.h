// SPDX-License-Identifier: Apache-2.0
// A team is a group of threads that executes one planner function together. The planner is written
// once against this small interface: SerialTeam runs it on the host, WarpTeam and BlockTeam
// (cuda/team.cuh) on the device. All results are the same whatever the size of the team, because
// every reduction is over integers and every arg-min carries its id in the low bits of the key.
//
// Rules for team functions: all lanes call them with the same arguments and take the same branches;
// shared state is written by one lane between two sync() calls (lanes may still be reading the old
// value before the first, and read the new one after the second).
#pragma once

#include <cstdint>

#include "core/hd.h"

namespace topoep {

struct SerialTeam {
    static constexpr int lane() { return 0; }
    static constexpr int size() { return 1; }
    void sync() const {}

    // The smallest value over all lanes, known to all lanes.
    uint64_t min(uint64_t value) const { return value; }
    uint32_t sum(uint32_t value) const { return value; }
    int64_t sum(int64_t value) const { return value; }
    // Sum of the lower lanes' values; *total is the sum of all.
    int32_t exclusive_sum(int32_t value, int32_t* total) const {
        *total = value;
        return 0;
    }
    // Integer accumulation into shared memory: the order of the lanes cannot show in the result.
    void add(uint32_t* target, uint32_t value) const { *target += value; }
    void add(uint64_t* target, uint64_t value) const { *target += value; }
    void raise(uint32_t* target, uint32_t value) const {
        *target = *target < value ? value : *target;
    }
    void raise(uint64_t* target, uint64_t value) const {
        *target = *target < value ? value : *target;
    }
    void set_bits(uint32_t* word, uint32_t bits) const { *word |= bits; }
};

constexpr uint64_t kNothing = UINT64_MAX;  // min() of a team none of whose lanes has a candidate

TOPOEP_HD uint64_t min64(uint64_t a, uint64_t b) {
    return a < b ? a : b;
}
TOPOEP_HD int64_t min64(int64_t a, int64_t b) {
    return a < b ? a : b;
}
TOPOEP_HD int64_t max64(int64_t a, int64_t b) {
    return a > b ? a : b;
}
TOPOEP_HD int32_t min32(int32_t a, int32_t b) {
    return a < b ? a : b;
}
TOPOEP_HD int32_t max32(int32_t a, int32_t b) {
    return a > b ? a : b;
}

// before[i] = values[0] + .. + values[i - 1] for i in 0..count. The two may be the same array.
// Needs team.sync() before the call.
template <class Team>
TOPOEP_TEAM void prefix_sum(const Team& team, const int32_t* values, int32_t* before, int count) {
    int32_t carry = 0;
    for (int base = 0; base < count; base += team.size()) {
        const int i = base + team.lane();
        int32_t total = 0;
        const int32_t value = i < count ? values[i] : 0;
        const int32_t below = team.exclusive_sum(value, &total);
        if (i < count) {
            before[i] = carry + below;
        }
        carry += total;
    }
    if (team.lane() == 0) {
        before[count] = carry;
    }
    team.sync();
}

}  // namespace topoep
