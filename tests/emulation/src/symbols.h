// SPDX-License-Identifier: Apache-2.0
// From addresses of machine code to source lines, and what else the loaded library tells of itself.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace emu {

// The source lines of return addresses in this library. Needs addr2line; without it every line is
// "?".
class SourceLines {
public:
    // Asks about all that are not known yet, with one run of addr2line.
    void look_up(const std::vector<uintptr_t>& return_addresses);
    // "file.cuh:12", or "?".
    std::string find(uintptr_t return_address) const;

private:
    std::map<uintptr_t, std::string> known_;
};

// The parts of this library in memory: where kernels' constants and static variables are.
struct Segment {
    uintptr_t begin;
    uintptr_t end;
    bool writable;
};
const std::vector<Segment>& library_segments();

}  // namespace emu
