// SPDX-License-Identifier: Apache-2.0
#include "cuda/pack.cuh"

#include <algorithm>

#include "cuda/launchers.h"

namespace topoep::cuda {
namespace {

RowParts to_row_parts(const std::vector<RowPart>& parts) {
    RowParts result{};
    result.count = static_cast<int>(parts.size());
    std::copy(parts.begin(), parts.end(), result.parts);
    return result;
}

}  // namespace

const char* pack_rows(const std::vector<RowPart>& parts, const int64_t* index, int64_t num_rows,
                      int64_t packed_bytes, const DeviceLimits& limits, void* packed,
                      cudaStream_t stream) {
    return launch_pack<PackDirection::kPack>(to_row_parts(parts), index, num_rows, packed_bytes,
                                             limits.num_sms, packed, stream);
}

const char* unpack_rows(const std::vector<RowPart>& parts, const int64_t* index, int64_t num_rows,
                        int64_t packed_bytes, const DeviceLimits& limits, const void* packed,
                        cudaStream_t stream) {
    // One kernel serves both directions; this one only reads the packed rows.
    return launch_pack<PackDirection::kUnpack>(to_row_parts(parts), index, num_rows, packed_bytes,
                                               limits.num_sms, const_cast<void*>(packed), stream);
}

}  // namespace topoep::cuda
