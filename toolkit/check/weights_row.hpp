// SPDX-License-Identifier: Apache-2.0
//
// The weights of one row and their possible errors, for the allowances of magnitudes.cc.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <vector>

#include "check/heads.hpp"
#include "check/tolerances.hpp"

namespace tessera::check {

inline constexpr double kScoreError = kScoreRoundings * 0x1p-24;  // relative to the sum of absolute values of a score
inline constexpr double kSlopeError =
    kSlopeRoundings * 0x1p-24;  // error of 1 - tanh^2, a difference of numbers near 1 under a strong softcap

/// The weights of one row and their possible errors.
struct WeightsRow {
    Range keys;
    std::vector<double> query;         // [head_dim]
    std::vector<double> weights;       // [len_kv], P without dropout
    std::vector<double> dots;          // [len_kv]
    std::vector<double> weight_error;  // [len_kv], absolute
    std::vector<double> sizes;         // [len_kv], of the scores with an allowance, else 0
    double sink = 0;                   // the weight of the sink
    double score_size = 0;             // probability-weighted mean of the sums of absolute values
    bool defined = false;              // false: no key seen, or NaN; such a row has no allowance
    bool beyond = false;  // the largest score is outside fp32: +inf, or all scores are -inf, without a sink

    explicit WeightsRow(const Problem& p)
        : query(static_cast<std::size_t>(p.head_dim)),
          weights(static_cast<std::size_t>(p.len_kv)),
          dots(static_cast<std::size_t>(p.len_kv)),
          weight_error(static_cast<std::size_t>(p.len_kv)),
          sizes(static_cast<std::size_t>(p.len_kv)) {}

    double weight(std::int64_t j) const { return weights[static_cast<std::size_t>(j)]; }
    double error(std::int64_t j) const { return weight_error[static_cast<std::size_t>(j)]; }
    double dot(std::int64_t j) const { return dots[static_cast<std::size_t>(j)]; }
};

/// Returns the part of a rounding's square that a weight takes; a weight that rounds to 1 errs by 1 minus its value.
inline double rounded_fraction(double weight, double drop, DType dtype) {
    const double missing =
        (1 - weight) / (0.425 * unit_roundoff(dtype));  // 0.425 u: the mean rounding, rounding_noise.cc
    return drop == 1 ? std::min(1.0, missing * missing) : 1;
}

/// Returns the sum of the absolute values of the parts of score (i, j).
inline double score_size(const reference::Head& head, std::int64_t i, std::int64_t j, const WeightsRow& row) {
    const Problem& p = head.problem;
    double sum = std::transform_reduce(row.query.begin(), row.query.end(), head.k + j * p.head_dim, 0.0, std::plus<>(),
                                       [](double q, double k) { return std::abs(q * k); });
    sum *= std::abs(p.effective_scale()) * head.score_slope(row.dot(j));
    if (p.softcap > 0) sum += p.softcap * std::abs(std::tanh(row.dot(j) / p.softcap));
    sum += std::abs(head.slope) * static_cast<double>(std::abs(i + head.sequence.len_kv - head.sequence.len_q - j));
    if (head.bias.data != nullptr) sum += std::abs(load_as_double(head.bias.at(i, j), head.bias.dtype));
    return std::isfinite(sum) ? sum : 0;
}

inline void load_row(const reference::Head& head, std::int64_t i, WeightsRow& row) {
    head.load_query(i, row.query.data());
    const double lse = head.softmax(i, row.query.data(), row.weights.data(), row.dots.data());
    row.keys = head.band.row(i);
    row.defined = std::isfinite(lse);
    row.score_size = 0;
    row.beyond = false;
    std::fill(row.weight_error.begin(), row.weight_error.end(), 0.0);
    if (!row.defined) return;
    row.sink = sink_weight(head, lse);
    double largest = head.sink;
    for (std::int64_t j = row.keys.begin; j < row.keys.end; ++j)
        largest = std::max(largest, head.score(i, j, row.dot(j)));
    row.beyond = std::abs(largest) > std::numeric_limits<float>::max();
    for (std::int64_t j = row.keys.begin; j < row.keys.end; ++j) {
        const double size = score_size(head, i, j, row);
        row.weight_error[static_cast<std::size_t>(j)] = size;
        row.score_size += row.weight(j) * size;
    }
    for (std::int64_t j = row.keys.begin; j < row.keys.end; ++j) {
        double& error = row.weight_error[static_cast<std::size_t>(j)];
        const double size = error;
        const double relative = kScoreError * (size + row.score_size);
        const bool ordinary = row.score_size <= kOrdinaryScore && size <= kOrdinaryScore;
        row.sizes[static_cast<std::size_t>(j)] = ordinary ? 0 : size;
        error = ordinary ? 0 : relative > kFreeWeight ? 1 : row.weight(j) * relative;
    }
}

inline double sum_of_squares(const double* row, std::int64_t size) {
    return std::transform_reduce(row, row + size, 0.0, std::plus<>(), [](double x) { return x * x; });
}

/// The sum of squares of each row of [rows, dim].
inline std::vector<double> sums_of_squares(const double* rows, std::int64_t count, std::int64_t dim) {
    std::vector<double> sums(static_cast<std::size_t>(count));
    for (std::int64_t j = 0; j < count; ++j) sums[static_cast<std::size_t>(j)] = sum_of_squares(rows + j * dim, dim);
    return sums;
}

}  // namespace tessera::check
