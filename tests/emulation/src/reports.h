// SPDX-License-Identifier: Apache-2.0
// What the checkers found. A kernel repeats its faults for every thread, so reports of one kind at
// the same places are counted, not repeated.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "state.h"

namespace emu {

enum class Kind : uint8_t {
    kRace,           // two accesses that no barrier, fence or __syncwarp orders
    kBounds,         // memory that is not the kernel's to touch
    kUninitialised,  // a read of memory that nobody wrote
    kMisaligned,     // an address that is no multiple of the access's size
    kBarrier,        // threads of a block meet in different barriers
    kWarp,           // lanes disagree about a warp collective
    kDeadlock,       // threads wait for others that never come
    kLivelock,       // threads poll flags that nobody sets
    kTrap,           // the kernel called __trap
    kLimit,          // more of a resource than the hardware, or the emulation, has
};

// A line of code, known at once (barriers) or by the address of its machine code (accesses).
struct Place {
    Site site{};
    uintptr_t code = 0;

    static Place of(Site site) { return {site, 0}; }
    static Place of(uintptr_t code) { return {{}, code}; }
};

class ReportLog {
public:
    // Counts one more of a report that is already there. False when it is not.
    bool repeat(Kind kind, const Place& first, const Place& second);
    // The message names the places as {0} and {1}: they are looked up when the log is read, in one
    // go and on the host's stack, because asking the debug information costs milliseconds.
    void add(Kind kind, const Place& first, const Place& second, std::string message);
    // The reports as lines (see control.h), and forgets them.
    std::string take();

private:
    using PlaceKey = std::tuple<const char*, int, uintptr_t>;
    using Key = std::tuple<Kind, PlaceKey, PlaceKey>;
    struct Entry {
        Kind kind;
        Place first, second;
        std::string message;
        uint64_t count;
    };
    static Key key_of(Kind kind, const Place& first, const Place& second);

    std::vector<Entry> entries_;
    std::map<Key, size_t> index_;
};

extern ReportLog report_log;

// "file.cuh:12", without directories.
std::string text_of(const Site& site);
// "block 2 thread 37 (warp 1 lane 5)"
std::string name_of(const Thread& thread);

}  // namespace emu
