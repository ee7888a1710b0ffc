// SPDX-License-Identifier: Apache-2.0
// The shared memory of each block: an arena in which a launch places its shared variables, with
// unused bytes between them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "state.h"

namespace emu {

struct SharedSlot {
    uint32_t offset;
    uint32_t bytes;
    const char* name;
};

class SharedMemory {
public:
    // Size of every block's arena, so that [shared, shared + arena_bytes()) is all a block has.
    static size_t arena_bytes();
    // A new arena between two pages that may not be touched, or nullptr.
    static char* make_arena();

    // Starts a launch with this much dynamic shared memory and no static variables.
    void reset(size_t dynamic_bytes);
    // Fills a block's shared memory with garbage, as another kernel would have left it.
    void poison(const Block& block) const;

    uint32_t place(const char* name, size_t bytes, size_t alignment, Site site);
    uint32_t dynamic_offset() const { return kDynamicOffset; }
    size_t dynamic_bytes() const { return dynamic_bytes_; }

    // The variable that holds all bytes of an access, or nullptr.
    const SharedSlot* find(size_t offset, size_t bytes) const {
        for (const SharedSlot& slot : slots_) {
            if (offset - slot.offset < slot.bytes && offset - slot.offset + bytes <= slot.bytes) {
                return &slot;
            }
        }
        return nullptr;
    }
    // "keys+0x10", for the variable at or before the offset.
    std::string describe(size_t offset) const;

private:
    // Aligned to the 128 bytes that are promised, and to no more.
    static constexpr uint32_t kDynamicOffset = 1024 + 128;

    void poison(const Block& block, const SharedSlot& slot) const;
    void check_limits(Site site) const;

    std::vector<SharedSlot> slots_;
    size_t dynamic_bytes_ = 0;
    size_t static_bytes_ = 0;
    uint32_t used_ = 0;
};

extern SharedMemory shared_memory;

}  // namespace emu
