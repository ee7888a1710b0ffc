// SPDX-License-Identifier: Apache-2.0
// Pages are made as kernels touch them and found through a hash table, with a small cache in front
// (in the header) that takes nearly all look-ups.
#include "shadow.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace emu {

Shadow shadow;

Shadow::~Shadow() {
    for (auto& entry : pages_) {
        munmap(entry.second, sizeof(ShadowPage));
    }
}

ShadowPage& Shadow::find_or_make(uintptr_t number) {
    ShadowPage*& page = pages_[number];
    if (page == nullptr) {
        // Straight from the system: zeroed already, and only where it is touched.
        void* memory = mmap(nullptr, sizeof(ShadowPage), PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED) {
            std::perror("emulation: no memory to check accesses");
            std::abort();
        }
        page = static_cast<ShadowPage*>(memory);
    }
    return *page;
}

void Shadow::forget_accesses(uintptr_t begin, uintptr_t end) {
    while (begin < end) {
        const uintptr_t next = std::min(end, (begin / kPageBytes + 1) * kPageBytes);
        const auto found = pages_.find(begin / kPageBytes);
        if (found != pages_.end()) {
            const size_t first = word_in_page(begin);
            const size_t last = word_in_page(next - 1);
            std::memset(static_cast<void*>(&found->second->cells[first]), 0,
                        (last - first + 1) * sizeof(Cell));
        }
        begin = next;
    }
}

void Shadow::forget_all_accesses() {
    for (auto& entry : pages_) {
        std::memset(static_cast<void*>(entry.second->cells), 0, sizeof(entry.second->cells));
    }
}

void Shadow::set_written(uintptr_t begin, uintptr_t end, bool written) {
    while (begin < end) {
        const uintptr_t next = std::min(end, (begin / kWordBytes + 1) * kWordBytes);
        uint8_t bytes = 0;
        for (uintptr_t address = begin; address < next; ++address) {
            bytes = static_cast<uint8_t>(bytes | 1u << address % kWordBytes);
        }
        uint8_t& word = page(begin).written[word_in_page(begin)];
        word = static_cast<uint8_t>(written ? word | bytes : word & ~bytes);
        begin = next;
    }
}

void Shadow::release(uintptr_t begin, uintptr_t end) {
    const uintptr_t first = (begin + kPageBytes - 1) / kPageBytes;
    for (uintptr_t number = first; (number + 1) * kPageBytes <= end; ++number) {
        const auto found = pages_.find(number);
        if (found != pages_.end()) {
            munmap(found->second, sizeof(ShadowPage));
            pages_.erase(found);
            cache_[number % kCacheEntries] = {};
        }
    }
}

}  // namespace emu
