// SPDX-License-Identifier: Apache-2.0
// The C interface by which a test drives the emulation: harness.py calls it through ctypes, and a
// C++ test unit that makes its own buffers may call it too.
#pragma once

#include <cstddef>
#include <cstdint>

// The rest of the runtime is hidden in its library; this much is not.
#pragma GCC visibility push(default)
extern "C" {

// Back to the default of every option.
void emu_reset_options();
// Returns 0, or -1 for a name that is no option (the names are those of emu::Options).
int emu_set_option(const char* name, int64_t value);

// Kernels may touch [memory, memory + bytes) under this name in reports. Memory registered as not
// initialised must be written by a kernel before one reads it. Returns 0, or -1 when the range is
// empty or overlaps another one.
int emu_register(const void* memory, size_t bytes, const char* name, int initialised);
// Returns 0, or -1 when nothing is registered at this address.
int emu_unregister(const void* memory);

// Everything found since the last call, one report a line:
//     kind <tab> how often <tab> place[|place] <tab> message
// The text stays valid until the next call.
const char* emu_take_reports();

// Fills in counters since the library was loaded, in the order of emu::Stats; returns how many.
size_t emu_read_stats(uint64_t* values, size_t capacity);
}
#pragma GCC visibility pop
