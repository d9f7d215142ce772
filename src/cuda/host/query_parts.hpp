// SPDX-License-Identifier: Apache-2.0
//
// The parts in which the backward goes through the queries of a long sequence. Plain C++.
//
// dK and dV are sums over all queries, in the accumulators of MMAs. A tensor core truncates each addition, so the error
// of a sum of like terms grows with their number: 1,000,003 equal terms ended 0.6 % too small in one accumulator of
// wgmma, and 0.3 % in one of mma.sync (H200). So a main kernel goes through the queries of one part only, and is
// launched once for each part. It adds its sums to those of the earlier parts in memory.
#pragma once

#include <cstdint>

#include "tessera/dtype.hpp"
#include "tessera/mask.hpp"

namespace tessera::cuda {

struct QueryParts {
    /// The most terms of one accumulator, queries times the heads that are summed. The error of such a sum of like
    /// terms is 4e-4 in bf16 and 2e-4 in fp16. Sums of fp32 tensors are rounded to nearest, once for a tile of queries.
    static constexpr int kMaxTerms = 65'536;
    static constexpr int kMaxTermsFp16 = 32'768;
    static constexpr int max_terms(DType dtype) { return dtype == DType::fp16 ? kMaxTermsFp16 : kMaxTerms; }
    static constexpr int kMultiple = 1024;  ///< of queries in a part: tiles of any kernel end there

    int queries = 0;  ///< in each part but the last
    int count = 1;

    /// `heads`: query heads that a CTA sums over. The parts depend on the sequence alone, so it has the same bits in
    /// any batch.
    TESSERA_HOST_DEVICE static constexpr QueryParts of(std::int64_t len_q, std::int64_t heads, int max_terms) {
        const std::int64_t own_heads = heads < 1 ? 1 : heads;
        QueryParts parts;
        parts.queries = static_cast<int>(len_q);
        if (len_q * own_heads <= max_terms) return parts;
        const std::int64_t fitting = max_terms / own_heads / kMultiple;
        parts.queries = static_cast<int>((fitting < 1 ? 1 : fitting) * kMultiple);
        parts.count = static_cast<int>((len_q + parts.queries - 1) / parts.queries);
        return parts;
    }
    TESSERA_HOST_DEVICE constexpr int begin(int part) const { return part * queries; }
};

}  // namespace tessera::cuda
