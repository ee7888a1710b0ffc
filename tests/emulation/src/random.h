// SPDX-License-Identifier: Apache-2.0
// A small generator (splitmix64): the same seed must give the same schedule everywhere.
#pragma once

#include <cstdint>

namespace emu {

class Random {
public:
    explicit Random(uint64_t seed = 0) : state_(seed) {}

    uint64_t next() {
        state_ += 0x9e3779b97f4a7c15ull;
        uint64_t z = state_;
        z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
        z = (z ^ z >> 27) * 0x94d049bb133111ebull;
        return z ^ z >> 31;
    }

    uint32_t below(uint32_t limit) {
        return static_cast<uint32_t>((next() >> 32) * uint64_t{limit} >> 32);
    }

private:
    uint64_t state_;
};

}  // namespace emu
