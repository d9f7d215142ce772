// SPDX-License-Identifier: Apache-2.0
#include "walk/exact.hpp"

#include <cmath>

#include "core/batch.hpp"
#include "reference/head.hpp"
#include "tessera/error.hpp"

namespace tessera::walk {

ExactRow exact_row(const Problem& problem, const ForwardArgs& args, const Selection& selection) {
    const Sequence sequence = sequence_of(problem, args, selection.batch);
    if (selection.row < 0 || selection.row >= sequence.len_q)
        throw Error(ErrorCode::invalid_argument, "row", "expected a query of the sequence");
    std::vector<double> k(static_cast<std::size_t>(sequence.len_kv * problem.head_dim));
    std::vector<double> v(static_cast<std::size_t>(sequence.len_kv * problem.head_dim_v));
    std::vector<double> weights(static_cast<std::size_t>(sequence.len_kv));
    std::vector<double> q(static_cast<std::size_t>(problem.head_dim));
    const reference::Head head(problem, args, sequence, selection.head, k.data(), v.data());
    head.load_query(selection.row, q.data());
    ExactRow exact{.o = std::vector<double>(static_cast<std::size_t>(problem.head_dim_v))};
    exact.lse = head.softmax(selection.row, q.data(), weights.data(), nullptr);
    for (std::size_t j = 0; j < weights.size(); ++j) {
        const double weight = weights[j] * head.dropout_factor(selection.row, static_cast<std::int64_t>(j));
        for (std::size_t c = 0; c < exact.o.size(); ++c) exact.o[c] += weight * v[j * exact.o.size() + c];
    }
    return exact;
}

std::vector<double> estimate_of(const Trace& trace, const Step& step) {
    if (step.o.empty()) return {};
    const std::int64_t lane = trace.selection.row - trace.queries.begin;
    const bool is_divided = trace.plan.kernel->schedule != Schedule::fa2 || step.step == TileStep::finish;
    const double l = step.l.empty() || is_divided ? 1 : static_cast<double>(step.l[static_cast<std::size_t>(lane)]);
    std::vector<double> o;
    for (std::int64_t c = 0; c < step.o.columns; ++c)
        o.push_back(l == 0 ? 0 : static_cast<double>(step.o.at(lane, c)) / l);
    return o;
}

std::optional<double> error_of(const std::vector<double>& estimate, const ExactRow& exact) {
    double wrong = 0, whole = 0;
    for (std::size_t c = 0; c < estimate.size(); ++c) {
        wrong += (estimate[c] - exact.o[c]) * (estimate[c] - exact.o[c]);
        whole += exact.o[c] * exact.o[c];
    }
    if (!(whole > 0)) return std::nullopt;
    return std::sqrt(wrong / whole);
}

}  // namespace tessera::walk
