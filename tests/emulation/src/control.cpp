// SPDX-License-Identifier: Apache-2.0
// The C interface of control.h: options by name, so that a new one needs no change in callers.
#include "emulation/control.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "memory_map.h"
#include "options.h"
#include "reports.h"
#include "shadow.h"

namespace emu {

Options options;
Stats stats;

namespace {

using Setter = void (*)(int64_t value);
struct Option {
    const char* name;
    Setter set;
};

const Option kOptions[] = {
    {"seed", [](int64_t v) { options.seed = static_cast<uint64_t>(v); }},
    {"order", [](int64_t v) { options.order = static_cast<Order>(v); }},
    {"preempt", [](int64_t v) { options.preempt = static_cast<int>(v); }},
    {"resident", [](int64_t v) { options.resident = static_cast<int>(v); }},
    {"stack_bytes", [](int64_t v) { options.stack_bytes = static_cast<size_t>(v); }},
    {"max_shared_bytes", [](int64_t v) { options.max_shared_bytes = static_cast<size_t>(v); }},
    {"max_polls", [](int64_t v) { options.max_polls = static_cast<uint64_t>(v); }},
    {"max_switches", [](int64_t v) { options.max_switches = static_cast<uint64_t>(v); }},
    {"check_races", [](int64_t v) { options.check_races = v != 0; }},
    {"check_bounds", [](int64_t v) { options.check_bounds = v != 0; }},
    {"check_initialised", [](int64_t v) { options.check_initialised = v != 0; }},
};

}  // namespace
}  // namespace emu

extern "C" {

void emu_reset_options() {
    emu::options = emu::Options();
}

int emu_set_option(const char* name, int64_t value) {
    for (const emu::Option& option : emu::kOptions) {
        if (std::strcmp(option.name, name) == 0) {
            option.set(value);
            return 0;
        }
    }
    return -1;
}

int emu_register(const void* memory, size_t bytes, const char* name, int initialised) {
    const uintptr_t begin = reinterpret_cast<uintptr_t>(memory);
    if (!emu::memory_map.add(begin, bytes, name, initialised != 0)) {
        return -1;
    }
    if (initialised == 0) {
        emu::shadow.set_written(begin, begin + bytes, false);
    }
    return 0;
}

int emu_unregister(const void* memory) {
    const uintptr_t begin = reinterpret_cast<uintptr_t>(memory);
    const uintptr_t end = emu::memory_map.remove(begin);
    if (end == 0) {
        return -1;
    }
    emu::shadow.release(begin, end);
    return 0;
}

const char* emu_take_reports() {
    static std::string text;
    text = emu::report_log.take();
    return text.c_str();
}

size_t emu_read_stats(uint64_t* values, size_t capacity) {
    const emu::Stats& stats = emu::stats;
    const uint64_t all[] = {stats.switches, stats.barriers, stats.warp_ops,
                            stats.accesses, stats.atomics,  stats.chain};
    const size_t count = std::min(capacity, sizeof(all) / sizeof(all[0]));
    std::copy_n(all, count, values);
    return count;
}

}  // extern "C"
