// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>
#include <vector>

#include "check/gold.hpp"
#include "core/batch.hpp"
#include "reference/head.hpp"

namespace tessera::check {

/// Calls f(head, sequence, query_head) for every query head of every sequence, with k and v unpacked.
template <class Args, class F>
void for_each_head(const PackedCall<Args>& packed, F&& f) {
    const Problem& p = packed.problem;
    std::vector<double> k(static_cast<std::size_t>(p.len_kv * p.head_dim));
    std::vector<double> v(static_cast<std::size_t>(p.len_kv * p.head_dim_v));
    for (std::int64_t b = 0; b < p.batch; ++b) {
        const Sequence sequence = sequence_of(p, packed.call, b);
        for (std::int64_t h = 0; h < p.heads_q; ++h) {
            f(reference::Head(p, packed.call, sequence, h, k.data(), v.data()), sequence, h);
        }
    }
}

/// Returns the weight of the sink of a row with this LSE; 0 without sinks.
inline double sink_weight(const reference::Head& head, double lse) {
    return head.sink == -reference::kInfinity ? 0 : std::exp(head.sink - lse);
}

/// Returns an element of fp64 rows. Loops over columns use `packed_row` instead.
inline double& slot(const HeadRows& rows, std::int64_t row, std::int64_t column) {
    return *static_cast<double*>(rows.at(row, column));
}

/// Returns a row with contiguous columns. Every zero-filled tensor of a gold has such rows.
inline double* packed_row(const HeadRows& rows, std::int64_t row) { return static_cast<double*>(rows.at(row, 0)); }

}  // namespace tessera::check
