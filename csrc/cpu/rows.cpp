// SPDX-License-Identifier: Apache-2.0
#include "cpu/rows.h"

#include <algorithm>
#include <cstring>

namespace topoep {

void expand_cpu(const void* x, int64_t row_bytes, const int64_t* pair_of_row, int64_t num_rows,
                int top_k, void* out) {
    const auto* source = static_cast<const unsigned char*>(x);
    auto* target = static_cast<unsigned char*>(out);
    for (int64_t i = 0; i < num_rows; ++i, target += row_bytes) {
        if (pair_of_row[i] < 0) {
            std::memset(target, 0, row_bytes);
        } else {
            std::memcpy(target, source + pair_of_row[i] / top_k * row_bytes, row_bytes);
        }
    }
}

template <class T>
void combine_cpu(const T* rows, const int64_t* row_of_pair, const AccumulatorOf<T>* weights,
                 int64_t num_tokens, int top_k, int64_t width, T* y) {
    using Sum = AccumulatorOf<T>;
    std::vector<Sum> sums(width);
    for (int64_t t = 0; t < num_tokens; ++t) {
        std::fill(sums.begin(), sums.end(), Sum{0});
        for (int64_t pair = t * top_k; pair < (t + 1) * top_k; ++pair) {
            if (row_of_pair[pair] < 0) {
                continue;
            }
            const T* row = rows + row_of_pair[pair] * width;
            const Sum weight = weights[pair];
            for (int64_t d = 0; d < width; ++d) {
                sums[d] = multiply_add(weight, widen(row[d]), sums[d]);
            }
        }
        for (int64_t d = 0; d < width; ++d) {
            y[t * width + d] = Narrow<T>::from(sums[d]);
        }
    }
}

namespace {

template <class T>
AccumulatorOf<T> dot(const T* a, const T* b, int64_t width) {
    using Sum = AccumulatorOf<T>;
    Sum lanes[kDotLanes] = {};
    for (int64_t run = 0; run * kDotRun < width; ++run) {
        Sum& sum = lanes[run % kDotLanes];
        const int64_t end = std::min<int64_t>((run + 1) * kDotRun, width);
        for (int64_t d = run * kDotRun; d < end; ++d) {
            sum = multiply_add(widen(a[d]), widen(b[d]), sum);
        }
    }
    for (int distance = kDotLanes / 2; distance > 0; distance /= 2) {
        for (int lane = 0; lane < distance; ++lane) {
            lanes[lane] += lanes[lane + distance];
        }
    }
    return lanes[0];
}

}  // namespace

template <class T>
void combine_backward_cpu(const T* grad_y, const T* rows, const int64_t* pair_of_row,
                          const int64_t* row_of_pair, const AccumulatorOf<T>* weights,
                          int64_t num_tokens, int64_t num_rows, int top_k, int64_t width,
                          T* grad_rows, AccumulatorOf<T>* grad_weights) {
    using Sum = AccumulatorOf<T>;
    for (int64_t i = 0; i < num_rows; ++i) {
        const int64_t pair = pair_of_row[i];
        T* grad_row = grad_rows + i * width;
        const Sum weight = pair < 0 ? Sum{0} : weights[pair];
        const T* source = grad_y + (pair < 0 ? 0 : pair / top_k) * width;
        for (int64_t d = 0; d < width; ++d) {
            grad_row[d] = Narrow<T>::from(pair < 0 ? Sum{0} : weight * widen(source[d]));
        }
    }
    for (int64_t pair = 0; pair < num_tokens * top_k; ++pair) {
        grad_weights[pair] = row_of_pair[pair] < 0 ? Sum{0}
                                                   : dot(rows + row_of_pair[pair] * width,
                                                         grad_y + pair / top_k * width, width);
    }
}

void pack_rows_cpu(const std::vector<RowPart>& parts, const int64_t* index, int64_t num_rows,
                   void* packed) {
    auto* target = static_cast<unsigned char*>(packed);
    for (int64_t i = 0; i < num_rows; ++i) {
        for (const RowPart& part : parts) {
            const int64_t padding = padded_row_bytes(part.row_bytes) - part.row_bytes;
            std::memcpy(target, part.data + index[i] * part.row_bytes, part.row_bytes);
            std::memset(target + part.row_bytes, 0, padding);
            target += part.row_bytes + padding;
        }
    }
}

void unpack_rows_cpu(const std::vector<RowPart>& parts, const int64_t* index, int64_t num_rows,
                     const void* packed) {
    const auto* source = static_cast<const unsigned char*>(packed);
    for (int64_t i = 0; i < num_rows; ++i) {
        for (const RowPart& part : parts) {
            std::memcpy(part.data + index[i] * part.row_bytes, source, part.row_bytes);
            source += padded_row_bytes(part.row_bytes);
        }
    }
}

template <class T>
void reduce_grads_cpu(T* out, const AccumulatorOf<T>* rows, const int64_t* offsets,
                      const int64_t* order, int64_t num_segments, int64_t width) {
    using Sum = AccumulatorOf<T>;
    std::vector<Sum> sums(width);
    for (int64_t s = 0; s < num_segments; ++s) {
        if (offsets[s] == offsets[s + 1]) {
            continue;
        }
        for (int64_t d = 0; d < width; ++d) {
            sums[d] = widen(out[s * width + d]);
        }
        for (int64_t i = offsets[s]; i < offsets[s + 1]; ++i) {
            const Sum* row = rows + order[i] * width;
            for (int64_t d = 0; d < width; ++d) {
                sums[d] += row[d];
            }
        }
        for (int64_t d = 0; d < width; ++d) {
            out[s * width + d] = Narrow<T>::from(sums[d]);
        }
    }
}

#define TOPOEP_INSTANTIATE(T)                                                                   \
    template void combine_cpu(const T*, const int64_t*, const AccumulatorOf<T>*, int64_t, int,  \
                              int64_t, T*);                                                     \
    template void combine_backward_cpu(const T*, const T*, const int64_t*, const int64_t*,      \
                                       const AccumulatorOf<T>*, int64_t, int64_t, int, int64_t, \
                                       T*, AccumulatorOf<T>*);                                  \
    template void reduce_grads_cpu(T*, const AccumulatorOf<T>*, const int64_t*, const int64_t*, \
                                   int64_t, int64_t);
TOPOEP_INSTANTIATE(float)
TOPOEP_INSTANTIATE(double)
TOPOEP_INSTANTIATE(Float16)
TOPOEP_INSTANTIATE(BFloat16)
#undef TOPOEP_INSTANTIATE

}  // namespace topoep
