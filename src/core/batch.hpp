// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "tessera/attention.hpp"
#include "tessera/mask.hpp"
#include "tessera/problem.hpp"

namespace tessera {

/// Entry `index` of a cu_seqlens tensor (int32 or int64).
inline std::int64_t cu_seqlen(const TensorView& cu_seqlens, std::int64_t index) {
    return cu_seqlens.dtype == DType::int32 ? *cu_seqlens.at<const std::int32_t>(index)
                                            : *cu_seqlens.at<const std::int64_t>(index);
}

/// One sequence: its lengths and where its rows begin in a ragged tensor.
struct Sequence {
    std::int64_t batch = 0;
    std::int64_t first_q = 0;   ///< first row of this sequence in a ragged q; 0 when dense
    std::int64_t first_kv = 0;  ///< the same in a ragged k; in a cache: its left padding
    std::int64_t len_q = 0;
    std::int64_t len_kv = 0;
    std::int64_t slot = 0;  ///< index of its keys in a dense k or in the slots of a cache
};

/// Do the sequences of this Problem have lengths of their own?
inline bool own_lengths(const Problem& problem) { return problem.ragged || problem.kv_lengths; }

inline Sequence sequence_of(const Problem& problem, const TensorView& cu_q, const TensorView& cu_kv,
                            std::int64_t batch) {
    if (!problem.ragged) return {batch, 0, 0, problem.len_q, problem.len_kv, batch};
    const std::int64_t q = cu_seqlen(cu_q, batch);
    const std::int64_t kv = cu_seqlen(cu_kv, batch);
    return {batch, q, kv, cu_seqlen(cu_q, batch + 1) - q, cu_seqlen(cu_kv, batch + 1) - kv, batch};
}

/// Sequence `batch` of a forward call, whose K and V may be a cache.
inline Sequence sequence_of(const Problem& problem, const ForwardArgs& args, std::int64_t batch) {
    if (!problem.kv_lengths) return sequence_of(problem, args.cu_seqlens_q, args.cu_seqlens_kv, batch);
    Sequence result{.batch = batch, .len_q = problem.len_q, .slot = batch};
    if (problem.ragged) {
        result.first_q = cu_seqlen(args.cu_seqlens_q, batch);
        result.len_q = cu_seqlen(args.cu_seqlens_q, batch + 1) - result.first_q;
    }
    const auto entry = [&](const TensorView& t) { return std::int64_t{*t.at<const std::int32_t>(batch)}; };
    const std::int64_t end = std::clamp<std::int64_t>(entry(args.kv_lengths), 0, problem.len_kv);
    if (args.left_padding.given()) result.first_kv = std::clamp<std::int64_t>(entry(args.left_padding), 0, end);
    result.len_kv = end - result.first_kv;
    if (args.cache_batch_index.given()) result.slot = entry(args.cache_batch_index);
    return result;
}
inline Sequence sequence_of(const Problem& problem, const BackwardArgs& args, std::int64_t batch) {
    return sequence_of(problem, args.cu_seqlens_q, args.cu_seqlens_kv, batch);
}

/// The pages of the rows of one sequence in a cache. Row r is row (first + r) % size of page number (first + r) / size.
struct Pages {
    const std::int32_t* table = nullptr;  ///< null: the rows are not in pages
    std::int64_t table_step = 0;
    std::int64_t count = 0;   ///< of the cache
    std::int64_t size = 1;    ///< rows of a page
    std::int64_t stride = 0;  ///< elements from page to page
    std::int64_t first = 0;   ///< rows before row 0: left padding

    /// The page of the cache that has this page number of the sequence. An entry that names no page, which only rows
    /// that the mask hides may have, gives page 0: a tile may load such rows.
    std::int64_t page(std::int64_t number) const {
        const std::int64_t entry = table[number * table_step];
        return entry >= 0 && entry < count ? entry : 0;
    }
};

/// The rows of one head of one sequence: element (row, column), whatever the layout. `data` is null when the tensor was
/// not given, whatever pointer its view has.
struct HeadRows {
    char* data = nullptr;
    DType dtype = DType::fp32;
    std::int64_t row_stride = 0;  ///< in elements
    std::int64_t column_stride = 0;
    Pages pages{};

    bool paged() const { return pages.table != nullptr; }
    void* at(std::int64_t row, std::int64_t column) const {
        std::int64_t offset = row * row_stride;
        if (paged()) {
            const std::int64_t in_cache = pages.first + row;
            offset = pages.page(in_cache / pages.size) * pages.stride + in_cache % pages.size * row_stride;
        }
        return data + (offset + column * column_stride) * size_of(dtype);
    }
    /// How many rows from this one on lie row_stride apart.
    std::int64_t run(std::int64_t row) const {
        if (!paged()) return std::numeric_limits<std::int64_t>::max();
        return pages.size - (pages.first + row) % pages.size;
    }
};

/// Calls body(address, index, count) for rows [first, first + rows) in ascending order, `count` rows at a time: the
/// first is at `address`, each further one row_stride after it. `index` is the number of the first one, from 0.
template <class Body>
void for_each_run(const HeadRows& x, std::int64_t first, std::int64_t rows, const Body& body) {
    for (std::int64_t i = 0; i < rows;) {
        const std::int64_t count = std::min(rows - i, x.run(first + i));
        body(x.at(first + i, 0), i, count);
        i += count;
    }
}

/// Stride of a dimension; 0 for one of size 1, which is never stepped and may have any stride.
inline std::int64_t step(const TensorView& t, std::size_t dimension) {
    return t.shape[dimension] == 1 ? 0 : t.strides[dimension];
}

/// Was the tensor given, and are there elements to point at? No offset may be added to the null of an empty tensor.
inline bool has_elements(const TensorView& t) { return t.given() && t.data != nullptr; }

/// Rows of a [batch, len, heads, dim] or ragged [total, heads, dim] tensor; `first` is the sequence's first ragged row.
inline HeadRows head_rows(const TensorView& t, const Sequence& sequence, std::int64_t first, std::int64_t head) {
    if (!has_elements(t)) return {};
    auto* base = static_cast<char*>(t.data);
    if (t.rank == 3) {
        return {base + (first * step(t, 0) + head * step(t, 1)) * size_of(t.dtype), t.dtype, step(t, 0), step(t, 2)};
    }
    return {base + (sequence.batch * step(t, 0) + head * step(t, 2)) * size_of(t.dtype), t.dtype, step(t, 1),
            step(t, 3)};
}

/// The keys of a head as rows of K or V, row 0 the first that counts: in slots or pages of a cache too.
inline HeadRows cache_rows(const Problem& problem, const TensorView& t, const TensorView& table, const Sequence& m,
                           std::int64_t head) {
    if (!has_elements(t)) return {};
    auto* base = static_cast<char*>(t.data) + head * step(t, 2) * size_of(t.dtype);
    HeadRows rows{base, t.dtype, step(t, 1), step(t, 3)};
    if (problem.page_size == 0) {
        rows.data += (m.slot * step(t, 0) + m.first_kv * step(t, 1)) * size_of(t.dtype);
        return rows;
    }
    rows.pages = {.table = table.at<const std::int32_t>(m.batch),
                  .table_step = step(table, 1),
                  .count = t.shape[0],
                  .size = problem.page_size,
                  .stride = step(t, 0),
                  .first = m.first_kv};
    return rows;
}

/// Rows of K, or of V, of one kv head of a sequence.
inline HeadRows key_rows(const Problem& problem, const ForwardArgs& args, const TensorView& t, const Sequence& m,
                         std::int64_t head) {
    return problem.kv_lengths ? cache_rows(problem, t, args.page_table, m, head) : head_rows(t, m, m.first_kv, head);
}
inline HeadRows key_rows(const Problem&, const BackwardArgs&, const TensorView& t, const Sequence& m,
                         std::int64_t head) {
    return head_rows(t, m, m.first_kv, head);
}

/// The LSE entries of one head: [batch, heads, len] or ragged [heads, total]; one column.
inline HeadRows lse_rows(const TensorView& t, const Sequence& sequence, std::int64_t head) {
    if (!has_elements(t)) return {};
    auto* base = static_cast<char*>(t.data);
    if (t.rank == 2) {
        return {base + (head * step(t, 0) + sequence.first_q * step(t, 1)) * size_of(t.dtype), t.dtype, step(t, 1), 0};
    }
    return {base + (sequence.batch * step(t, 0) + head * step(t, 1)) * size_of(t.dtype), t.dtype, step(t, 2), 0};
}

/// The [len_q, len_kv] matrix of a bias (or dbias) for one head: sizes 1 are broadcast by stride 0.
inline HeadRows bias_rows(const TensorView& t, std::int64_t batch, std::int64_t head) {
    if (!has_elements(t)) return {};
    auto* base = static_cast<char*>(t.data) + (batch * step(t, 0) + head * step(t, 1)) * size_of(t.dtype);
    return {base, t.dtype, step(t, 2), step(t, 3)};
}

/// The sink of each query of one head, one column: [heads_q], or [heads, len_q] where query heads are stacked as rows
/// (stack_heads.hpp).
inline HeadRows sink_rows(const TensorView& t, std::int64_t head) {
    if (!has_elements(t)) return {};
    auto* base = static_cast<char*>(t.data) + head * step(t, 0) * size_of(t.dtype);
    return {base, t.dtype, t.rank == 2 ? step(t, 1) : 0, 0};
}

/// ALiBi slope of one head: [heads_q] or [batch, heads_q]; 0 without ALiBi.
inline float alibi_slope(const TensorView& t, std::int64_t batch, std::int64_t head) {
    if (!t.given()) return 0.0F;
    return t.rank == 1 ? *t.at<const float>(head) : *t.at<const float>(batch, head);
}

}  // namespace tessera
