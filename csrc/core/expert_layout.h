// SPDX-License-Identifier: Apache-2.0
// One expert as the wire sees it: the rows of its tensors one behind the other, each padded to
// whole vectors. The packed row is cut into shards and chunks without regard to where tensors
// begin, so any number of tensors of any size is moved by the same code.
#pragma once

#include <cstdint>

#include "core/hd.h"
#include "core/row_parts.h"

namespace topoep {

// Units are bytes for weights and elements for gradients. Eight elements are 16 bytes of bfloat16
// and 32 of float32: chunk borders keep vectors whole in every type.
constexpr int64_t kByteAlignment = kRowAlignment;
constexpr int64_t kElementAlignment = 8;

struct ExpertLayout {
    int num_tensors = 0;
    int64_t row_units[kMaxRowParts] = {};  // of one expert in tensor t
    int64_t begin[kMaxRowParts + 1] = {};  // of tensor t in the packed row; begin[num_tensors]:
                                           // units of the whole packed row
    TOPOEP_HD int64_t total() const { return begin[num_tensors]; }
};

inline ExpertLayout make_expert_layout(int num_tensors, const int64_t* row_units,
                                       int64_t alignment) {
    ExpertLayout layout{};
    layout.num_tensors = num_tensors;
    for (int t = 0; t < num_tensors; ++t) {
        layout.row_units[t] = row_units[t];
        layout.begin[t + 1] =
            layout.begin[t] + (row_units[t] + alignment - 1) / alignment * alignment;
    }
    return layout;
}

// How a packed row is cut: shard g goes over rail g, in chunks.
struct ShardCut {
    int64_t total;
    int64_t shard;  // of every rail but the last ones, which may be short or empty
    int64_t chunk;

    TOPOEP_HD int64_t shard_begin(int rail) const { return rail * shard; }
    TOPOEP_HD int64_t shard_length(int rail) const {
        const int64_t left = total - shard_begin(rail);
        return left < 0 ? 0 : left < shard ? left : shard;
    }
    TOPOEP_HD int num_chunks(int rail) const {
        return static_cast<int>((shard_length(rail) + chunk - 1) / chunk);
    }
    TOPOEP_HD int64_t chunk_begin(int rail, int index) const {
        return shard_begin(rail) + index * chunk;
    }
    TOPOEP_HD int64_t chunk_length(int rail, int index) const {
        const int64_t left = shard_length(rail) - index * chunk;
        return left < chunk ? left : chunk;
    }
};

TOPOEP_HD ShardCut cut_into_shards(int64_t total, int num_rails, int64_t chunk, int64_t alignment) {
    const int64_t even = (total + num_rails - 1) / num_rails;
    return {total, (even + alignment - 1) / alignment * alignment, chunk};
}

}  // namespace topoep
