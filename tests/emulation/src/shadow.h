// SPDX-License-Identifier: Apache-2.0
// Shadow memory: for each 4-byte word that kernels touch, the last accesses to it, and which of its
// bytes were ever written.
#pragma once

#include <cstddef>
#include <cstdint>
#include <unordered_map>

namespace emu {

constexpr uintptr_t kWordBytes = 4;
constexpr uintptr_t kPageBytes = 4096;
constexpr size_t kWordsPerPage = kPageBytes / kWordBytes;

constexpr int kClockBits = 26;
constexpr uint32_t kMaxClock = (1u << kClockBits) - 1;

struct Record {
    uint32_t serial;  // of the thread; 0 means no record
    uint32_t epoch;
    uint32_t clock : kClockBits;
    uint32_t bytes : 4;  // of the word, one bit each
    uint32_t is_write : 1;
    uint32_t is_atomic : 1;
    int32_t code;  // the instruction, relative to the runtime's own code to save half a pointer
};

// Four records, so that four threads that write one byte each are all remembered. Together they
// fill one cache line.
struct alignas(64) Cell {
    Record records[4];
};
static_assert(sizeof(Cell) == 64, "a cell should be one cache line");

struct ShadowPage {
    Cell cells[kWordsPerPage];
    uint8_t written[kWordsPerPage];  // one bit for each byte of the word
};

class Shadow {
public:
    ~Shadow();

    // The page of the address, made when it is first asked for.
    ShadowPage& page(uintptr_t address) {
        const uintptr_t number = address / kPageBytes;
        CacheEntry& entry = cache_[number % kCacheEntries];
        if (entry.page == nullptr || entry.number != number) {
            entry = {number, &find_or_make(number)};
        }
        return *entry.page;
    }
    static size_t word_in_page(uintptr_t address) { return address % kPageBytes / kWordBytes; }

    void forget_accesses(uintptr_t begin, uintptr_t end);
    void forget_all_accesses();
    void set_written(uintptr_t begin, uintptr_t end, bool written);
    // Gives back the pages that lie wholly between the two: shadow memory is 16 times as large as
    // what it covers, and a test process registers one array after another.
    void release(uintptr_t begin, uintptr_t end);

private:
    struct CacheEntry {
        uintptr_t number;
        ShadowPage* page;
    };
    static constexpr size_t kCacheEntries = 256;

    ShadowPage& find_or_make(uintptr_t number);

    std::unordered_map<uintptr_t, ShadowPage*> pages_;
    CacheEntry cache_[kCacheEntries] = {};
};

extern Shadow shadow;

}  // namespace emu
