// SPDX-License-Identifier: Apache-2.0
// One access to memory, as the checkers see it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "reports.h"
#include "state.h"

namespace emu {

enum class AccessKind : uint8_t {
    kRead,
    kWrite,
    kAtomicRead,    // a relaxed load
    kAtomicUpdate,  // reads and writes
    kAtomicWrite,   // does not care for the old value
};

struct Access {
    uintptr_t address;
    size_t bytes;
    AccessKind kind;
    uintptr_t code;  // return address into the kernel

    bool is_atomic() const { return kind >= AccessKind::kAtomicRead; }
    bool is_write() const { return kind != AccessKind::kRead && kind != AccessKind::kAtomicRead; }
    bool needs_value() const {
        return kind != AccessKind::kWrite && kind != AccessKind::kAtomicWrite;
    }
    Place place() const { return Place::of(code); }
};

const char* verb_of(bool is_write, bool is_atomic);

// What a report calls this address: "counts+0x40", or the shared variable, or the array before it.
std::string describe(uintptr_t address, const Thread& thread);

// ---- The checks. Every access of an instrumented kernel passes the first before it is made; host
// code may come there too (its unit is instrumented as well), and is let through.

// Whether the memory is the kernel's to touch. (bounds.cpp)
void check_access(const Access& access);
// Then, whether it races, and whether what it reads was ever written. (races.cpp)
void check_history(const Access& access, const Thread& thread, bool initialised_by_host);
// Before a launch: makes it independent of those before.
void reset_history_checks();

// An address that is no multiple of the size of its type. Ends the launch, as a GPU would.
[[noreturn]] void report_misaligned(uintptr_t address, size_t bytes, const Place& place);

}  // namespace emu
