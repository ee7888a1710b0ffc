// SPDX-License-Identifier: Apache-2.0
// Which memory a kernel may touch: what the host registered, and what belongs to the library.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>

namespace emu {

struct Region {
    uintptr_t begin;
    uintptr_t end;
    std::string name;
    bool initialised;  // by the host: then reads need no write before them
};

class MemoryMap {
public:
    bool add(uintptr_t begin, size_t bytes, const char* name, bool initialised);
    // Returns the end of the region that began here, or 0 when there is none.
    uintptr_t remove(uintptr_t begin);

    // The region that holds the address, or nullptr.
    const Region* find(uintptr_t address) {
        const Region*& cached = cache_[address / kCacheGrain % kCacheEntries];
        if (cached == nullptr || address < cached->begin || address >= cached->end) {
            cached = search(address);
        }
        return cached;
    }
    // The region that ends at the address or shortly before it, or nullptr: an access just behind
    // an array is most likely meant for it.
    const Region* find_before(uintptr_t address) const;

private:
    static constexpr uintptr_t kCacheGrain = 4096;
    static constexpr size_t kCacheEntries = 64;

    const Region* search(uintptr_t address) const;
    void clear_cache();

    std::map<uintptr_t, Region> regions_;
    const Region* cache_[kCacheEntries] = {};
};

extern MemoryMap memory_map;

}  // namespace emu
