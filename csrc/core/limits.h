// SPDX-License-Identifier: Apache-2.0
// Every hard limit of the library, by name. Each one is checked where input enters (bindings and
// Python) with a message that names it, and tests/test_limits.py asserts both sides of each.
#pragma once

#include <cstdint>

namespace topoep {

constexpr int kMaxRanks = 1024;     // positions fit in 10 bits of a packed key
constexpr int kMaxExperts = 4096;   // expert ids fit in uint16 with room for kNoExpert
constexpr int kMaxSpareSlots = 16;  // spare slots per rank
constexpr int64_t kMaxPartsPerMillion = 1000000000;  // caps and tolerances: 1000 times the mean
constexpr int kMaxTopK = 64;                         // routed experts per token
constexpr int kMaxCandidates = 256;  // of one solve; the list travels as a kernel argument

// Costs in nanoseconds. Their products with 2^31 tokens, of which 4 exchanges are counted, and with
// 2^14 copies, and the sum of those products, stay below 2^63.
constexpr int64_t kMaxCost = int64_t{1} << 29;
constexpr int64_t kMaxInterference = 1000;  // parts per thousand: then hiding gains nothing

// Sums of tokens are int32, so one plan covers at most this many routed (token, expert) pairs.
constexpr int64_t kMaxTokens = INT32_MAX;

}  // namespace topoep
