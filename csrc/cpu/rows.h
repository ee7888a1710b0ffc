// SPDX-License-Identifier: Apache-2.0
// Host forms of the row kernels (cuda/rows.cuh). A pair is a (token, k) index, token * K + k; -1 in
// either map means "none".
#pragma once

#include <cstdint>
#include <vector>

#include "core/numeric.h"
#include "core/row_parts.h"

namespace topoep {

// out[i] = x[pair_of_row[i] / top_k], zero for -1. Rows are moved as bytes.
void expand_cpu(const void* x, int64_t row_bytes, const int64_t* pair_of_row, int64_t num_rows,
                int top_k, void* out);

// y[t] = sum over k, in order, of weights[t, k] * rows[row_of_pair[t, k]]. T is a type of
// core/numeric.h; weights and sums are in AccumulatorOf<T>.
template <class T>
void combine_cpu(const T* rows, const int64_t* row_of_pair, const AccumulatorOf<T>* weights,
                 int64_t num_tokens, int top_k, int64_t width, T* y);

// The gradients of combine: grad_rows[i] = weights[pair] * grad_y[token of pair], zero for rows
// that no pair uses, and grad_weights[pair] = rows[row] . grad_y[token].
template <class T>
void combine_backward_cpu(const T* grad_y, const T* rows, const int64_t* pair_of_row,
                          const int64_t* row_of_pair, const AccumulatorOf<T>* weights,
                          int64_t num_tokens, int64_t num_rows, int top_k, int64_t width,
                          T* grad_rows, AccumulatorOf<T>* grad_weights);

// packed[i] = the rows tensor_0[index[i]], tensor_1[index[i]], .. side by side, each part padded
// with zeros to 16 bytes (core/row_parts.h).
void pack_rows_cpu(const std::vector<RowPart>& parts, const int64_t* index, int64_t num_rows,
                   void* packed);

// The inverse: tensor_t[index[i]] = part t of packed[i].
void unpack_rows_cpu(const std::vector<RowPart>& parts, const int64_t* index, int64_t num_rows,
                     const void* packed);

// out[s] = out[s] + rows[order[offsets[s]]] + rows[order[offsets[s] + 1]] + .., added in that order
// in AccumulatorOf<T>, rounded once. Segments without rows are not touched.
template <class T>
void reduce_grads_cpu(T* out, const AccumulatorOf<T>* rows, const int64_t* offsets,
                      const int64_t* order, int64_t num_segments, int64_t width);

}  // namespace topoep
