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
    /// terms is 4e-4 in bf16 and 2e-4 in fp16. In fp32 the sums of 32 or 64 queries are added up by additions
    /// that round to nearest.
    static constexpr int kMaxTerms = 65'536;
    static constexpr int kMaxTermsFp16 = 32'768;
    static constexpr int max_terms(DType dtype) { return dtype == DType::fp16 ? kMaxTermsFp16 : kMaxTerms; }
    static constexpr int kMultiple = 1024;  ///< of queries in a part: tiles of any kernel end there

    int len_q;    ///< queries of the sequence
    int queries;  ///< in each part but the last

    /// The queries of a part in which a CTA sums over `heads` query heads.
    TESSERA_HOST_DEVICE static constexpr int fitting(int heads, int max_terms) {
        const int multiples = max_terms / (heads < 1 ? 1 : heads) / kMultiple;
        return (multiples < 1 ? 1 : multiples) * kMultiple;
    }
    /// `of_part`: depends on the shape of the sequence alone, so that it has the same bits in any batch.
    TESSERA_HOST_DEVICE constexpr QueryParts(int of_len_q, int of_part) : len_q(of_len_q), queries(of_part) {}
    TESSERA_HOST_DEVICE constexpr bool is_one() const { return len_q <= queries; }
    TESSERA_HOST_DEVICE constexpr int count() const { return is_one() ? 1 : (len_q - 1) / queries + 1; }
    /// The first query of a part; len_q past the last part.
    TESSERA_HOST_DEVICE constexpr int begin(int part) const {
        const unsigned first = static_cast<unsigned>(part) * static_cast<unsigned>(queries);
        return first < static_cast<unsigned>(len_q) ? static_cast<int>(first) : len_q;
    }
};

}  // namespace tessera::cuda
