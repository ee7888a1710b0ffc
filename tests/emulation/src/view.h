// SPDX-License-Identifier: Apache-2.0
// What one thread knows of the others' past: the data structure behind happens-before.
//
// Every thread counts its clock, every block its epoch (one per barrier of the whole block). An
// access carries both as its stamp. A full vector clock would have an entry for each thread of the
// grid; since most knowledge is gained at block barriers, a view holds one entry for each block
// ("all it did before this epoch") and entries for single threads only beyond that.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

namespace emu {

struct Stamp {
    uint32_t epoch;
    uint32_t clock;
};

class View;
// Views never change once made, so that a fence can keep what it saw by keeping a pointer.
using ViewPtr = std::shared_ptr<const View>;

class View {
public:
    struct BlockEntry {
        uint32_t block;
        uint32_t epoch;  // accesses of earlier epochs are known
    };
    struct ThreadEntry {
        uint32_t thread;  // index in the grid
        Stamp stamp;      // accesses of earlier clocks are known
    };

    // Both lists in increasing order of block and thread.
    View(std::vector<BlockEntry> blocks, std::vector<ThreadEntry> threads)
        : blocks_(std::move(blocks)), threads_(std::move(threads)) {}

    // Whether the access that this thread of this block stamped is known.
    bool covers(uint32_t block, uint32_t thread, Stamp stamp) const;

    // All that either one knows; null stands for nothing known.
    static ViewPtr join(const ViewPtr& a, const ViewPtr& b, uint32_t threads_per_block);

private:
    std::vector<BlockEntry> blocks_;
    std::vector<ThreadEntry> threads_;
};

}  // namespace emu
