// SPDX-License-Identifier: Apache-2.0
// pack_rows and unpack_rows_: the bytes of an expert, which are rows of several tensors, to and
// from one row of a send or receive buffer (core/row_parts.h).
//
// Launch shape: a block of 256 threads per (row, tile of 16 KB of the packed row), striding up to 8
// blocks per SM. Parts begin at multiples of 16 bytes in the packed row, and tiles are cut there
// too, so a tensor whose rows are multiples of 16 bytes moves by 16-byte loads throughout.
#pragma once

#include <cstdint>

#include "core/row_parts.h"
#include "cuda/compat.cuh"
#include "cuda/copy.cuh"
#include "cuda/grid.cuh"

namespace topoep {

constexpr int kPackThreads = 256;
constexpr int kPackBlocksPerSm = 8;
constexpr int64_t kPackTileBytes = 16 * 1024;

struct RowParts {
    int count;
    RowPart parts[kMaxRowParts];
};

enum class PackDirection { kPack, kUnpack };

// Copies the bytes [begin, end) of packed row `row` to or from the parts they belong to.
template <PackDirection kDirection>
__device__ void move_tile(const RowParts& parts, int64_t index, unsigned char* packed_row,
                          int64_t begin, int64_t end) {
    const int thread = static_cast<int>(threadIdx.x);
    for (int i = 0; i < parts.count; ++i) {
        const RowPart& part = parts.parts[i];
        const int64_t part_end = part.packed_offset + padded_row_bytes(part.row_bytes);
        const int64_t from = begin > part.packed_offset ? begin : part.packed_offset;
        const int64_t to = end < part_end ? end : part_end;
        if (from >= to) {
            continue;
        }
        const int64_t in_part = from - part.packed_offset;
        const int64_t data_end = part.packed_offset + part.row_bytes;
        const int64_t data_bytes = (to < data_end ? to : data_end) - from;
        unsigned char* data = part.data + index * part.row_bytes + in_part;
        if (kDirection == PackDirection::kUnpack) {
            copy_bytes(data, packed_row + from, data_bytes, thread, kPackThreads);
            continue;
        }
        copy_bytes(packed_row + from, data, data_bytes, thread, kPackThreads);
        for (int64_t d = from + data_bytes + thread; d < to; d += kPackThreads) {
            packed_row[d] = 0;  // padding
        }
    }
}

template <PackDirection kDirection>
__global__ void __launch_bounds__(kPackThreads, 1)
    pack_kernel(RowParts parts, const int64_t* index, int64_t num_rows, int64_t packed_bytes,
                unsigned char* packed) {
    const int64_t tiles_per_row = (packed_bytes + kPackTileBytes - 1) / kPackTileBytes;
    for (int64_t tile = blockIdx.x; tile < num_rows * tiles_per_row; tile += gridDim.x) {
        const int64_t row = tile / tiles_per_row;
        const int64_t begin = tile % tiles_per_row * kPackTileBytes;
        const int64_t end =
            begin + kPackTileBytes < packed_bytes ? begin + kPackTileBytes : packed_bytes;
        move_tile<kDirection>(parts, index[row], packed + row * packed_bytes, begin, end);
    }
}

template <PackDirection kDirection>
const char* launch_pack(const RowParts& parts, const int64_t* index, int64_t num_rows,
                        int64_t packed_bytes, int num_sms, void* packed, Stream stream) {
    const int64_t num_tiles = num_rows * ((packed_bytes + kPackTileBytes - 1) / kPackTileBytes);
    const LaunchShape shape =
        strided_shape(num_tiles, 1, kPackThreads, int64_t{num_sms} * kPackBlocksPerSm);
    return launch(pack_kernel<kDirection>, shape, stream, parts, index, num_rows, packed_bytes,
                  static_cast<unsigned char*>(packed));
}

}  // namespace topoep
