// SPDX-License-Identifier: Apache-2.0
//
// Tensor maps: TMA descriptors, by which Hopper's TMA addresses a tensor.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <optional>
#include <string>

#include "cuda/tile/params.hpp"
#include "tessera/dtype.hpp"
#include "tessera/problem.hpp"

namespace tessera::cuda {

/// Sizes of a [batch, len, heads, dim] tensor (varlen: batch 1, len = total).
struct RowsShape {
    std::int64_t batch = 0;
    std::int64_t len = 0;
    std::int64_t heads = 0;
    std::int64_t dim = 0;
};

/// Why TMA can't address this tensor of 16-bit elements, "expected ..., got ..."; empty when it can. TMA wants the
/// address and all strides aligned to 16 bytes.
std::optional<std::string> refuse_tma(const Rows& rows, const RowsShape& shape);

/// A map of coordinates (dim, len, heads, batch) whose box is 64 columns x `box_rows` rows, 128-byte swizzle. Reads
/// outside of the tensor give zeros, writes are dropped. refuse_tma() must accept the tensor.
/// Throws Error(internal) when the driver does not make the map.
CUtensorMap tensor_map(const Rows& rows, const RowsShape& shape, DType dtype, int box_rows);

/// A map of coordinates (dim, heads, len, batch): its box is 64 columns x `box_heads` heads x `box_rows` rows, and the
/// heads of a row lie together in it (PackGQA).
CUtensorMap tensor_map_of_heads(const Rows& rows, const RowsShape& shape, DType dtype, int box_heads, int box_rows);

/// Shapes of a call's tensors as TMA sees them; dO has the shape of O. `cached`: slots or pages of the cache, if the
/// keys are in one.
struct TensorShapes {
    RowsShape q, k, v, o;
    explicit TensorShapes(const Problem& p, std::int64_t cached = 0) {
        const std::int64_t batch = p.ragged ? 1 : p.batch;
        const std::int64_t len_q = p.ragged ? p.total_q : p.len_q;
        const std::int64_t batch_kv = p.kv_lengths ? cached : batch;
        const std::int64_t len_kv = p.page_size > 0 ? p.page_size : p.ragged && !p.kv_lengths ? p.total_kv : p.len_kv;
        q = {batch, len_q, p.heads_q, p.head_dim};
        k = {batch_kv, len_kv, p.heads_kv, p.head_dim};
        v = {batch_kv, len_kv, p.heads_kv, p.head_dim_v};
        o = {batch, len_q, p.heads_q, p.head_dim_v};
    }
};

}  // namespace tessera::cuda
