// SPDX-License-Identifier: Apache-2.0
// An expert's weights are several tensors; a packed row holds the bytes of all of them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/hd.h"

namespace topoep {

constexpr int64_t kRowAlignment = 16;  // one vector load
constexpr int kMaxRowParts = 16;       // tensors per expert

struct RowPart {
    unsigned char* data;  // [rows, row_bytes], contiguous
    int64_t row_bytes;
    int64_t packed_offset;  // of this part in a packed row, a multiple of kRowAlignment
};

TOPOEP_HD int64_t padded_row_bytes(int64_t row_bytes) {
    return (row_bytes + kRowAlignment - 1) / kRowAlignment * kRowAlignment;
}

}  // namespace topoep
