// SPDX-License-Identifier: Apache-2.0
// A static shared variable gets its place when the first thread of a launch comes to its
// declaration, since the host compiler knows no list of a kernel's variables. All blocks use the
// same places, as on hardware.
#include "shared_memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstring>

#include "options.h"
#include "random.h"
#include "scheduler.h"
#include "shadow.h"

namespace emu {
namespace {

constexpr uint32_t kRedZone = 64;                 // unused bytes before each static variable
constexpr size_t kArenaSlack = 64 * 1024;         // for red zones, beyond what kernels may use
constexpr size_t kLargestArena = 1024 * 1024;     // more than any GPU's shared memory
constexpr size_t kBytesWithoutOptIn = 48 * 1024;  // as in cuda/compat.cuh

}  // namespace

SharedMemory shared_memory;

size_t SharedMemory::arena_bytes() {
    return kLargestArena + kArenaSlack;
}

char* SharedMemory::make_arena() {
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    void* memory = mmap(nullptr, arena_bytes() + 2 * page, PROT_NONE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) {
        return nullptr;
    }
    char* arena = static_cast<char*>(memory) + page;
    return mprotect(arena, arena_bytes(), PROT_READ | PROT_WRITE) == 0 ? arena : nullptr;
}

void SharedMemory::reset(size_t dynamic_bytes) {
    slots_.clear();
    static_bytes_ = 0;
    dynamic_bytes_ = dynamic_bytes;
    // As on hardware, dynamic memory is one piece; the static variables follow.
    used_ = kDynamicOffset + static_cast<uint32_t>(dynamic_bytes);
    if (dynamic_bytes != 0) {
        slots_.push_back({kDynamicOffset, static_cast<uint32_t>(dynamic_bytes), "dynamic"});
    }
}

void SharedMemory::poison(const Block& block) const {
    for (const SharedSlot& slot : slots_) {
        poison(block, slot);
    }
}

void SharedMemory::poison(const Block& block, const SharedSlot& slot) const {
    // Its own generator: how much shared memory a kernel has must not change its schedule.
    Random garbage(options.seed * 0x9e3779b1u + block.in_grid);
    char* begin = block.shared + slot.offset;
    for (uint32_t done = 0; done < slot.bytes;) {
        const uint64_t word = garbage.next();
        const uint32_t bytes = std::min<uint32_t>(sizeof(word), slot.bytes - done);
        std::memcpy(begin + done, &word, bytes);
        done += bytes;
    }
    if (instrumented) {
        const uintptr_t address = reinterpret_cast<uintptr_t>(begin);
        shadow.forget_accesses(address, address + slot.bytes);
        shadow.set_written(address, address + slot.bytes, false);
    }
}

uint32_t SharedMemory::place(const char* name, size_t bytes, size_t alignment, Site site) {
    // Exactly the alignment of the type and never more: a kernel that reads an array of bytes as
    // uint4 must not pass here by luck.
    const uint32_t twice = static_cast<uint32_t>(2 * alignment);
    const uint32_t offset =
        (used_ + kRedZone + twice - 1) / twice * twice + static_cast<uint32_t>(alignment);
    used_ = offset + static_cast<uint32_t>(bytes);
    static_bytes_ += bytes;
    check_limits(site);
    slots_.push_back({offset, static_cast<uint32_t>(bytes), name});
    for (const Block* block : launch_state.resident) {
        poison(*block, slots_.back());
    }
    return offset;
}

void SharedMemory::check_limits(Site site) const {
    const size_t total = static_bytes_ + dynamic_bytes_;
    if (total > options.max_shared_bytes || used_ > arena_bytes()) {
        fail_launch(Kind::kLimit, Place::of(site), {},
                    "shared memory: " + std::to_string(total) + " bytes at {0}, more than " +
                        std::to_string(options.max_shared_bytes));
    }
    // launch() opts in for large dynamic shared memory only, since static variables alone cannot
    // pass this size.
    if (total > kBytesWithoutOptIn && dynamic_bytes_ <= kBytesWithoutOptIn) {
        fail_launch(Kind::kLimit, Place::of(site), {},
                    "shared memory: static and dynamic variables together take " +
                        std::to_string(total) +
                        " bytes at {0}, which a kernel may not have "
                        "unless the dynamic part alone is over " +
                        std::to_string(kBytesWithoutOptIn));
    }
}

std::string SharedMemory::describe(size_t offset) const {
    const SharedSlot* before = nullptr;
    for (const SharedSlot& slot : slots_) {
        if (slot.offset <= offset && (before == nullptr || slot.offset > before->offset)) {
            before = &slot;
        }
    }
    if (before == nullptr) {
        return "shared memory before all variables";
    }
    char text[160];
    std::snprintf(text, sizeof(text), "shared variable %s+0x%zx (of 0x%x bytes)", before->name,
                  offset - before->offset, before->bytes);
    return text;
}

void* shared_variable(SharedVariable* variable, const char* name, size_t bytes, size_t alignment,
                      Site site) {
    if (variable->launch != launch_state.number) {
        variable->offset = shared_memory.place(name, bytes, alignment, site);
        variable->launch = launch_state.number;
    }
    return current->block->shared + variable->offset;
}

void* dynamic_shared(Site site) {
    if (shared_memory.dynamic_bytes() == 0) {
        report_log.add(Kind::kBounds, Place::of(site), {},
                       "dynamic shared memory is used at {0}, but the launch asks for none");
    }
    return current->block->shared + shared_memory.dynamic_offset();
}

}  // namespace emu
