// SPDX-License-Identifier: Apache-2.0
// Views are sorted lists: they are joined far more often than one entry is looked up, and a join is
// then one merge.
#include "view.h"

#include <algorithm>

namespace emu {
namespace {

// Merges two lists that are sorted by key(entry); entries of equal key become the later of the two.
template <class Entry, class Key, class Later>
std::vector<Entry> merge(const std::vector<Entry>& a, const std::vector<Entry>& b, Key key,
                         Later later) {
    std::vector<Entry> merged;
    merged.reserve(a.size() + b.size());
    auto left = a.begin();
    auto right = b.begin();
    while (left != a.end() && right != b.end()) {
        if (key(*left) == key(*right)) {
            merged.push_back(later(*left, *right) ? *left : *right);
            ++left;
            ++right;
        } else if (key(*left) < key(*right)) {
            merged.push_back(*left++);
        } else {
            merged.push_back(*right++);
        }
    }
    merged.insert(merged.end(), left, a.end());
    merged.insert(merged.end(), right, b.end());
    return merged;
}

template <class Entry, class Key>
const Entry* find(const std::vector<Entry>& entries, uint32_t wanted, Key key) {
    auto found =
        std::lower_bound(entries.begin(), entries.end(), wanted,
                         [&](const Entry& entry, uint32_t value) { return key(entry) < value; });
    return found != entries.end() && key(*found) == wanted ? &*found : nullptr;
}

uint32_t block_of(const View::BlockEntry& entry) {
    return entry.block;
}
uint32_t thread_of(const View::ThreadEntry& entry) {
    return entry.thread;
}

}  // namespace

bool View::covers(uint32_t block, uint32_t thread, Stamp stamp) const {
    const BlockEntry* whole_block = find(blocks_, block, block_of);
    if (whole_block != nullptr && stamp.epoch < whole_block->epoch) {
        return true;
    }
    const ThreadEntry* one_thread = find(threads_, thread, thread_of);
    return one_thread != nullptr && stamp.clock < one_thread->stamp.clock;
}

ViewPtr View::join(const ViewPtr& a, const ViewPtr& b, uint32_t threads_per_block) {
    if (a == nullptr || a == b) {
        return b;
    }
    if (b == nullptr) {
        return a;
    }
    std::vector<BlockEntry> blocks =
        merge(a->blocks_, b->blocks_, block_of,
              [](const BlockEntry& x, const BlockEntry& y) { return x.epoch >= y.epoch; });
    std::vector<ThreadEntry> threads = merge(
        a->threads_, b->threads_, thread_of,
        [](const ThreadEntry& x, const ThreadEntry& y) { return x.stamp.clock >= y.stamp.clock; });
    // A barrier of the whole block has since told more than these entries do. Without this, a view
    // would grow to an entry for every thread that ever released anything.
    auto outdated = [&](const ThreadEntry& entry) {
        const BlockEntry* whole = find(blocks, entry.thread / threads_per_block, block_of);
        return whole != nullptr && entry.stamp.epoch < whole->epoch;
    };
    threads.erase(std::remove_if(threads.begin(), threads.end(), outdated), threads.end());
    return std::make_shared<const View>(std::move(blocks), std::move(threads));
}

}  // namespace emu
