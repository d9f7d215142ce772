// SPDX-License-Identifier: Apache-2.0
//
// The sinks in the backward. A sink has the weight P_sink = exp(sink - LSE) in each row of its head and no value, so
// its gradient is that of a score with dP = 0: the sum over the rows of -P_sink * delta.
#pragma once

#include <cmath>

#include "core/numeric.hpp"
#include "cpu/steps/call.hpp"

namespace tessera::cpu {

/// The numbers of a row of queries that the gradient of its sink is computed from.
struct SinkRow {
    float lse;    ///< or what weights are computed with in its place, if norm is not 1; +inf for a row without weights
    float norm;   ///< factor of all weights of the row
    float delta;  ///< rowsum(P * dP) - dLSE
};

/// exp(sink - lse) of query i, the weight of its sink before it is multiplied by the row's norm; 0 without sinks.
inline double sink_weight(const HeadRows& sinks, std::int64_t i, float lse) {
    if (sinks.data == nullptr) return 0;
    const auto sink = static_cast<double>(*static_cast<const float*>(sinks.at(i, 0)));
    return std::exp(sink - static_cast<double>(lse));
}
inline double sink_weight(const Head& head, std::int64_t i, float lse) { return sink_weight(head.sinks, i, lse); }

/// Writes dsinks, where it is wanted. row_of(head, i): the SinkRow of query i. One task sums a head in fp64, over the
/// sequences and their queries in ascending order.
template <class RowOf>
void store_sink_gradients(const BackwardCall& call, const RowOf& row_of) {
    const Problem& p = call.plan.problem;
    if (!call.args.dsinks.given()) return;
    call.parallel_for(p.heads_q, worthwhile_threads(call.plan), [&](std::int64_t h, int) {
        double sum = 0;
        for (std::int64_t b = 0; b < p.batch; ++b) {
            const Head head(p, call.args, sequence_of(call, b), h);
            for (std::int64_t i = 0; i < head.sequence.len_q; ++i) {
                const SinkRow row = row_of(head, i);
                sum -= sink_weight(head, i, row.lse) * static_cast<double>(row.norm) * static_cast<double>(row.delta);
            }
        }
        const HeadRows out = sink_rows(call.args.dsinks, h);
        store_from_double(out.at(0, 0), out.dtype, sum);
    });
}

}  // namespace tessera::cpu
