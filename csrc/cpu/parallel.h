// SPDX-License-Identifier: Apache-2.0
// How the host forms use more than one thread: the caller brings the thread pool (torch's, through
// the bindings), so that this layer starts no threads of its own.
#pragma once

#include <cstdint>
#include <functional>

namespace topoep {

// Calls body(begin, end) on parts of [0, count) that together cover it, perhaps at the same time.
using ParallelFor =
    std::function<void(int64_t count, const std::function<void(int64_t, int64_t)>& body)>;

inline void serial_for(int64_t count, const std::function<void(int64_t, int64_t)>& body) {
    body(0, count);
}

}  // namespace topoep
