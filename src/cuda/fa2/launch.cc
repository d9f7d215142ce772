// SPDX-License-Identifier: Apache-2.0
#include "cuda/fa2/launch.hpp"

#include <algorithm>

namespace tessera::cuda::fa2 {
namespace {

constexpr std::int64_t kVectorBytes = 16;
constexpr std::int64_t kElementBytes = 2;

bool whole_vectors(std::int64_t stride) { return stride * kElementBytes % kVectorBytes == 0; }

bool takes_vectors(const Rows& rows, int head_dim) {
    return rows.column == 1 && head_dim % 8 == 0 && reinterpret_cast<std::uintptr_t>(rows.data) % kVectorBytes == 0 &&
           whole_vectors(rows.batch) && whole_vectors(rows.row) && whole_vectors(rows.head);
}

/// Causal tiles are of different lengths: those of several heads are mixed, longest first, as long as the heads' K and
/// V fit three fifths of the L2. Without a diagonal, heads come one after the other.
int heads_together(const ForwardParams& p, std::int64_t l2_bytes) {
    const Band band = p.mask.bind(p.len_q, p.len_kv);
    if (band.high >= p.len_kv - 1) return 1;
    const std::int64_t kv_bytes = std::int64_t{p.len_kv} * (p.head_dim + p.head_dim_v) * kElementBytes;
    const std::int64_t kv_heads = std::max<std::int64_t>(l2_bytes * 3 / 5 / std::max<std::int64_t>(kv_bytes, 1), 1);
    return static_cast<int>(std::min(kv_heads * p.group, p.batch * p.heads_q));
}

}  // namespace

Launch make_launch(const ForwardParams& params, int block_q, std::int64_t l2_bytes) {
    return {.params = params,
            .q_blocks = (params.len_q + block_q - 1) / block_q,
            .heads_together = heads_together(params, l2_bytes),
            .vector_q = takes_vectors(params.q, params.head_dim),
            .vector_k = takes_vectors(params.k, params.head_dim),
            .vector_v = takes_vectors(params.v, params.head_dim_v),
            .vector_o = takes_vectors(params.o, params.head_dim_v)};
}

}  // namespace tessera::cuda::fa2
