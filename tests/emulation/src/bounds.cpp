// SPDX-License-Identifier: Apache-2.0
// Whether an access stays inside memory that the kernel may touch: its own stack, the variables in
// its block's shared memory, what the host registered, and the library's constants.
#include <cstdio>
#include <string>

#include "access.h"
#include "fiber.h"
#include "memory_map.h"
#include "options.h"
#include "scheduler.h"
#include "shared_memory.h"
#include "symbols.h"

namespace emu {
namespace {

// An offset beyond the arena when the address is not in the block's shared memory at all.
size_t shared_offset(uintptr_t address, const Block& block) {
    return address - reinterpret_cast<uintptr_t>(block.shared);
}

std::string message(const char* what, const Access& access, const Thread& thread) {
    return std::string(what) + ": " + verb_of(access.is_write(), access.is_atomic()) + " of " +
           std::to_string(access.bytes) + " bytes, " + describe(access.address, thread) + ", by " +
           name_of(thread) + " at {0}";
}

void check_shared(const Access& access, const Thread& thread) {
    const size_t offset = shared_offset(access.address, *thread.block);
    if (options.check_bounds && shared_memory.find(offset, access.bytes) == nullptr) {
        // The unused bytes between the variables are there for this. The kernel may go on, and show
        // what else is wrong with it.
        if (!report_log.repeat(Kind::kBounds, access.place(), {})) {
            report_log.add(Kind::kBounds, access.place(), {},
                           message("outside all shared variables", access, thread));
        }
        return;
    }
    // Nobody but the block itself can initialise shared memory.
    check_history(access, thread, false);
}

bool is_launch_argument(uintptr_t address) {
    const LaunchRequest& request = launch_state.request;
    return address - reinterpret_cast<uintptr_t>(request.call) < request.call_bytes;
}

const Segment* find_segment(uintptr_t address) {
    for (const Segment& segment : library_segments()) {
        if (address >= segment.begin && address < segment.end) {
            return &segment;
        }
    }
    return nullptr;
}

const char* what_is_at(uintptr_t address) {
    if (stacks.contains(address)) {
        return "another thread's local variable";
    }
    for (const Block* block : launch_state.resident) {
        if (shared_offset(address, *block) < SharedMemory::arena_bytes()) {
            return "another block's shared memory";
        }
    }
    return "memory that is not registered";
}

void check_global(const Access& access, const Thread& thread) {
    const Region* region = memory_map.find(access.address);
    if (region != nullptr && access.address + access.bytes <= region->end) {
        check_history(access, thread, region->initialised);
        return;
    }
    if (region == nullptr) {
        // Arguments and constants never change during a launch: there is no history to check.
        if (is_launch_argument(access.address)) {
            return;
        }
        const Segment* segment = find_segment(access.address);
        if (segment != nullptr && !segment->writable) {
            return;
        }
        if (segment != nullptr) {
            check_history(access, thread, true);
            return;
        }
    }
    if (options.check_bounds) {
        // The access would hit the test process itself, so that it must not be made.
        const char* what =
            region != nullptr ? "over the end of an array" : what_is_at(access.address);
        fail_launch(Kind::kBounds, access.place(), {}, message(what, access, thread));
    }
    check_history(access, thread, true);
}

}  // namespace

const char* verb_of(bool is_write, bool is_atomic) {
    if (is_atomic) {
        return is_write ? "atomic update" : "relaxed load";
    }
    return is_write ? "write" : "read";
}

std::string describe(uintptr_t address, const Thread& thread) {
    const size_t offset = shared_offset(address, *thread.block);
    if (offset < SharedMemory::arena_bytes()) {
        return shared_memory.describe(offset);
    }
    char text[64];
    if (const Region* region = memory_map.find(address)) {
        std::snprintf(text, sizeof(text), "+0x%zx", address - region->begin);
        return region->name + text;
    }
    if (const Region* region = memory_map.find_before(address)) {
        std::snprintf(text, sizeof(text), "%zu bytes behind the end of ", address - region->end);
        return text + region->name;
    }
    std::snprintf(text, sizeof(text), "address 0x%zx", address);
    return text;
}

void check_access(const Access& access) {
    const Thread* thread = current;
    // Most accesses of most kernels are to the thread's own locals, so this test comes first.
    if (thread == nullptr || access.address - thread->stack_begin < options.stack_bytes ||
        access.bytes == 0) {
        return;
    }
    if (access.kind == AccessKind::kWrite) {
        launch_state.polls = 0;  // somebody does something other than poll
    }
    // Others may run now, before the access: it and its record then belong together.
    spend_fuel();
    if (shared_offset(access.address, *thread->block) < SharedMemory::arena_bytes()) {
        check_shared(access, *thread);
    } else {
        check_global(access, *thread);
    }
}

void report_misaligned(uintptr_t address, size_t bytes, const Place& place) {
    fail_launch(Kind::kMisaligned, place, {},
                "misaligned access of " + std::to_string(bytes) + " bytes, " +
                    describe(address, *current) + " (" + std::to_string(address % bytes) +
                    " beyond a multiple), by " + name_of(*current) + " at {0}");
}

}  // namespace emu
