// SPDX-License-Identifier: Apache-2.0
// Regions do not overlap, so the only one that can hold an address is the last to begin before it.
#include "memory_map.h"

#include <algorithm>
#include <iterator>

namespace emu {

MemoryMap memory_map;

bool MemoryMap::add(uintptr_t begin, size_t bytes, const char* name, bool initialised) {
    const uintptr_t end = begin + bytes;
    auto next = regions_.lower_bound(begin);
    if (bytes == 0 || (next != regions_.end() && next->first < end)) {
        return false;
    }
    if (next != regions_.begin() && std::prev(next)->second.end > begin) {
        return false;
    }
    regions_.emplace(begin, Region{begin, end, name, initialised});
    clear_cache();
    return true;
}

uintptr_t MemoryMap::remove(uintptr_t begin) {
    clear_cache();
    const auto found = regions_.find(begin);
    if (found == regions_.end()) {
        return 0;
    }
    const uintptr_t end = found->second.end;
    regions_.erase(found);
    return end;
}

const Region* MemoryMap::search(uintptr_t address) const {
    auto next = regions_.upper_bound(address);
    if (next == regions_.begin()) {
        return nullptr;
    }
    const Region& region = std::prev(next)->second;
    return address < region.end ? &region : nullptr;
}

const Region* MemoryMap::find_before(uintptr_t address) const {
    constexpr uintptr_t kNear = 4096;
    auto next = regions_.upper_bound(address);
    if (next == regions_.begin()) {
        return nullptr;
    }
    const Region& region = std::prev(next)->second;
    return address >= region.end && address - region.end < kNear ? &region : nullptr;
}

void MemoryMap::clear_cache() {
    std::fill(std::begin(cache_), std::end(cache_), nullptr);
}

}  // namespace emu
