// SPDX-License-Identifier: Apache-2.0
//
// Computes the sizes of the terms that each output sums, and the effect of an error in the scores. The formulas are the
// reference's with absolute values in place of the terms.
#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <numeric>
#include <optional>
#include <tuple>
#include <vector>

#include "check/weights_row.hpp"

namespace tessera::check {
namespace {

using reference::Head;

/// Row i of the backward pass: the parts of the gradients of its scores.
struct GradientRow {
    std::vector<double> d_o;      // [head_dim_v]
    std::vector<double> dp_size;  // [len_kv], |dropout| * sum_c |dO_c| |V_jc|
    double delta_size = 0;        // sum_j p_j dp_size_j + |dLSE|
    double largest = 0;           // largest |dS| by the sizes of its parts
    double delta = 0;             // sum_j p_j dp_j - dLSE
    double delta_error = 0;       // effect of the errors of the weights on delta
    std::vector<double> errors;   // [len_kv], of the weights: the row's, or all of a weight that is too small
    std::vector<double> ds;       // [len_kv], the gradient of the scores
    DType dtype;                  // the dtype that a kernel rounds to
    double o_error;               // error of O relative to its size, as it enters delta
    GradientRow(const Problem& p, DType rounded_to, double error_of_o)
        : d_o(static_cast<std::size_t>(p.head_dim_v)),
          dp_size(static_cast<std::size_t>(p.len_kv)),
          errors(dp_size.size()),
          ds(dp_size.size()),
          dtype(rounded_to),
          o_error(error_of_o) {}
};

void load_gradient_row(const Head& head, std::int64_t i, const HeadRows& d_o, const HeadRows& dlse,
                       const WeightsRow& row, GradientRow& g) {
    const Problem& p = head.problem;
    g.delta_size = dlse.data != nullptr ? std::abs(slot(dlse, i, 0)) : 0;
    g.largest = 0;
    g.delta_error = 0;
    double& delta = g.delta;
    delta = dlse.data != nullptr ? -slot(dlse, i, 0) : 0;
    const double held = kFlushedWeight * std::reduce(row.weights.begin(), row.weights.end(), row.sink,
                                                     [](double a, double b) { return std::max(a, b); });
    for (std::int64_t c = 0; c < p.head_dim_v; ++c) g.d_o[static_cast<std::size_t>(c)] = slot(d_o, i, c);
    for (std::int64_t j = row.keys.begin; j < row.keys.end; ++j) {
        const double* const v = head.v + j * p.head_dim_v;
        const double drop = head.dropout_factor(i, j);
        const double sum = drop * std::transform_reduce(g.d_o.begin(), g.d_o.end(), v, 0.0, std::plus<>(),
                                                        [](double a, double b) { return std::abs(a * b); });
        const double dp = drop * std::transform_reduce(g.d_o.begin(), g.d_o.end(), v, 0.0);
        g.ds[static_cast<std::size_t>(j)] = dp;
        delta += row.weight(j) * dp;
        g.dp_size[static_cast<std::size_t>(j)] = sum;
        g.delta_size += row.weight(j) * sum;
        g.largest = std::max(g.largest, row.weight(j) * sum);
        const double error = row.weight(j) < held ? std::max(row.error(j), row.weight(j)) : row.error(j);
        g.errors[static_cast<std::size_t>(j)] = error;
        g.delta_error += (error + g.o_error * row.weight(j)) * sum;
    }
    for (std::int64_t j = row.keys.begin; j < row.keys.end; ++j) {
        double& ds = g.ds[static_cast<std::size_t>(j)];
        ds = row.weight(j) * (ds - delta);
    }
    g.largest += g.delta_size;
}

/// The rows of one gradient that receive the terms of one head.
struct Target {
    TensorGold& gold;
    RoundingsByValue& by_value;
    HeadRows value;
    HeadRows magnitude;
    HeadRows score;
    HeadRows subnormal;
    HeadRows rounded;

    template <class RowsOf>
    Target(TensorGold& tensor, RowsOf rows_of)
        : gold(tensor),
          by_value(gold.by_value),
          value(rows_of(gold.value.view)),
          magnitude(rows_of(gold.magnitude.view)),
          score(rows_of(gold.score.view)),
          subnormal(rows_of(gold.subnormal.view)),
          rounded(rows_of(gold.rounded.view)) {}
};

/// Marks elements without a promise.
void set_free(const Target& target, std::int64_t row, std::int64_t column, std::int64_t count) {
    const double* const first = &slot(target.value, row, column);
    std::fill_n(target.gold.free.begin() + (first - target.gold.value.data.data()), count, true);
}

/// A factor of the terms of a row: its value, the size of its parts, and its possible error.
struct Factor {
    double value, size, error;
};

/// Adds the terms `factor` times `x` [dim] to a row of a tensor.
void add_terms(const Target& to, std::int64_t row, const Factor& factor, const double* x, std::int64_t dim) {
    double* const magnitude = packed_row(to.magnitude, row);
    double* const rounded = packed_row(to.rounded, row);
    const double square = factor.value * factor.value;
    for (std::int64_t c = 0; c < dim; ++c) magnitude[c] += factor.size * std::abs(x[c]);
    for (std::int64_t c = 0; c < dim; ++c) rounded[c] += square * (x[c] * x[c]);
    if (factor.error == 0) return;  // ordinary scores
    double* const score = packed_row(to.score, row);
    for (std::int64_t c = 0; c < dim; ++c) score[c] += factor.error * std::abs(x[c]);
}

/// True if all keys are copies of one (stride 0).
bool keys_are_copies(const Head& head, const Range& keys) {
    const std::int64_t dim = head.problem.head_dim;
    for (std::int64_t j = keys.begin + 1; j < keys.end; ++j) {
        if (!std::equal(head.k + j * dim, head.k + (j + 1) * dim, head.k + keys.begin * dim)) return false;
    }
    return keys.size() > 1;
}

/// Adds the errors of equal elements of dS, which round alike. If their keys are copies too, the errors add up in each
/// element of dQ: n of them count n^2 times, of which add_terms() counted n.
void add_copied_terms(const Target& dq, std::int64_t row, const std::vector<double>& values, const double* key,
                      std::int64_t dim) {
    std::map<float, double> counts;  // fp32, so that the order of a sum in fp64 does not separate copies
    for (const double value : values) counts[static_cast<float>(value)] += 1;
    double more = 0;
    for (const auto& [value, count] : counts) more += (count * count - count) * static_cast<double>(value) * value;
    double* const rounded = packed_row(dq.rounded, row);
    for (std::int64_t c = 0; c < dim; ++c) rounded[c] += more * (key[c] * key[c]);
}

void add_gradient_row(const Head& head, std::int64_t i, const std::vector<double>& k_squares, const WeightsRow& row,
                      const GradientRow& g, const Target& dq, const Target& dk, const Target& dv, const Target* dbias) {
    const Problem& p = head.problem;
    const double scale = std::abs(p.effective_scale());
    const double query_squares = sum_of_squares(row.query.data(), p.head_dim);
    const double d_o_squares = sum_of_squares(g.d_o.data(), p.head_dim_v);
    std::vector<double> values;  // dS with the slope of the softcap
    for (std::int64_t j = row.keys.begin; j < row.keys.end; ++j) {
        const double terms = g.dp_size[static_cast<std::size_t>(j)] + g.delta_size;
        const double ds = g.ds[static_cast<std::size_t>(j)];
        const double ds_size = row.weight(j) * terms;
        const double error = g.errors[static_cast<std::size_t>(j)];
        const double ds_error = error * terms + row.weight(j) * g.delta_error;
        const double slope = scale * head.score_slope(row.dot(j));
        // The error of 1 - tanh^2 is its own rounding plus 2 / softcap times the error of a large score.
        const double by_score =
            p.softcap > 0 ? 2 / p.softcap * kScoreError * row.sizes[static_cast<std::size_t>(j)] : 0;
        const double slope_error = p.softcap > 0 ? scale * (kSlopeError + by_score) : 0;
        const Factor dx{ds * slope, ds_size * slope, ds_error * slope + ds_size * slope_error};
        values.push_back(dx.value);
        add_terms(dq, i, dx, head.k + j * p.head_dim, p.head_dim);
        add_terms(dk, j, dx, row.query.data(), p.head_dim);
        dq.by_value.add(dx.value, dx.value * dx.value * k_squares[static_cast<std::size_t>(j)]);
        dk.by_value.add(dx.value, dx.value * dx.value * query_squares);
        const double drop = head.dropout_factor(i, j);
        const double root_of_fraction = std::sqrt(rounded_fraction(row.weight(j), drop, g.dtype));
        const Factor weight{root_of_fraction * row.weight(j) * drop, row.weight(j) * drop, error * drop};
        add_terms(dv, j, weight, g.d_o.data(), p.head_dim_v);
        dv.by_value.add(row.weight(j), weight.value * weight.value * d_o_squares);
        if (dbias == nullptr) continue;
        slot(dbias->magnitude, i, j) += ds_size;
        slot(dbias->score, i, j) += ds_error;
        slot(dbias->rounded, i, j) += ds * ds;
        dbias->by_value.add(ds, ds * ds);
    }
    if (keys_are_copies(head, row.keys)) {
        add_copied_terms(dq, i, values, head.k + row.keys.begin * p.head_dim, p.head_dim);
    }
}

/// Adds the term of a row to the gradient of its sink, which is that of a score with dP = 0.
void add_sink_term(const WeightsRow& row, const GradientRow& g, const Target& dsink) {
    const double relative = row.score_size > kOrdinaryLse ? kScoreError * row.score_size : 0;
    const double error = relative > kFreeWeight ? 1 : row.sink * relative;
    slot(dsink.magnitude, 0, 0) += row.sink * g.delta_size;
    slot(dsink.score, 0, 0) += error * std::abs(g.delta) + row.sink * g.delta_error;
}

/// Adds the loss in fp16: every dS of the head may be off by `lost`, as small ones are subnormal beside the largest.
void add_subnormal_gradients(const Head& head, double lost, const Target& dq, const Target& dk, const Target* dbias) {
    const Problem& p = head.problem;
    const double factor = lost * std::abs(p.effective_scale());
    const auto size_of = [](double x) { return std::isfinite(x) ? std::abs(x) : 0; };
    std::vector<double> query(static_cast<std::size_t>(p.head_dim));
    for (std::int64_t i = 0; i < head.sequence.len_q; ++i) {
        head.load_query(i, query.data());
        double* const of_query = packed_row(dq.subnormal, i);
        const Range keys = head.band.row(i);
        for (std::int64_t j = keys.begin; j < keys.end; ++j) {
            const double* const key = head.k + j * p.head_dim;
            double* const of_key = packed_row(dk.subnormal, j);
            for (std::int64_t c = 0; c < p.head_dim; ++c) of_query[c] += factor * size_of(key[c]);
            for (std::int64_t c = 0; c < p.head_dim; ++c)
                of_key[c] += factor * size_of(query[static_cast<std::size_t>(c)]);
            if (dbias != nullptr) slot(dbias->subnormal, i, j) += lost;
        }
    }
}

/// The sums of the rows of V: [len_kv] each.
struct ValueSums {
    std::vector<double> plain, squares;
    ValueSums(const Head& head, std::int64_t len) : squares(sums_of_squares(head.v, len, head.problem.head_dim_v)) {
        const std::int64_t dim = head.problem.head_dim_v;
        for (std::int64_t j = 0; j < len; ++j) plain.push_back(std::reduce(head.v + j * dim, head.v + (j + 1) * dim));
    }
};

/// Adds row i of O: the sizes of its terms, and the effect of rounding each weight on the sums of all elements.
/// `signs` [head_dim_v] holds 1 or -1 per element. `draw` is the first row whose weights round alike.
void add_output_row(const Head& head, std::int64_t i, const ValueSums& v_sums, const WeightsRow& row, DType dtype,
                    const std::vector<double>& signs, std::size_t draw, const Target& to) {
    const std::int64_t dim = head.problem.head_dim_v;
    if (row.keys.empty()) return;
    bool ordinary = true;  // no kept weight has an allowance, so compare_tensor() includes the row in the bias of O
    for (std::int64_t j = row.keys.begin; j < row.keys.end; ++j)
        ordinary = ordinary && (row.error(j) == 0 || head.dropout_factor(i, j) == 0);
    const auto largest = std::max_element(row.weights.begin() + row.keys.begin, row.weights.begin() + row.keys.end);
    const double top = *largest;
    double* const subnormal = packed_row(to.subnormal, i);
    for (std::int64_t j = row.keys.begin; j < row.keys.end; ++j) {
        const auto at = static_cast<std::size_t>(j);
        const double* const v = head.v + j * dim;
        const double drop = head.dropout_factor(i, j);
        const double kept = row.weight(j) * drop;
        const double root_of_fraction = std::sqrt(rounded_fraction(row.weight(j), drop, dtype));
        // M includes the terms of dropped keys.
        const Factor weight{root_of_fraction * kept, row.weight(j) * (drop > 0 ? drop : 1), row.error(j) * drop};
        add_terms(to, i, weight, v, dim);
        if (dtype == DType::fp16) {
            const double lost = kSubnormalWeight * top * drop;
            for (std::int64_t c = 0; c < dim; ++c) subnormal[c] += lost * std::abs(v[c]);
        }
        const double sum = ordinary ? kept * v_sums.plain[at] : 0;
        const double outward = ordinary ? kept * std::transform_reduce(signs.begin(), signs.end(), v, 0.0) : 0;
        if (j == largest - row.weights.begin()) to.by_value.add_largest(draw, row.weight(j), sum, outward);
        else to.by_value.add(row.weight(j) / top, weight.value * weight.value * v_sums.squares[at], sum, outward);
    }
}

}  // namespace

void add_magnitudes(const PackedCall<ForwardArgs>& packed, TensorGold& o, TensorGold& lse) {
    const Problem& p = packed.problem;
    WeightsRow row(p);
    o.draws.resize(o.value.data.size() / static_cast<std::size_t>(o.row_size()));
    std::iota(o.draws.begin(), o.draws.end(), std::size_t{0});
    using Query = std::tuple<std::int64_t, std::int64_t, std::vector<double>>;  // sequence, KV head, values
    std::map<Query, std::size_t> first_rows;
    for_each_head(packed, [&](const Head& head, const Sequence& sequence, std::int64_t h) {
        const auto of_queries = [&](const TensorView& t) { return head_rows(t, sequence, sequence.first_q, h); };
        const Target to(o, of_queries);
        const Target to_lse(lse, [&](const TensorView& t) { return lse_rows(t, sequence, h); });
        const ValueSums v_sums(head, sequence.len_kv);
        std::vector<double> signs(static_cast<std::size_t>(p.head_dim_v));
        for (std::int64_t i = 0; i < sequence.len_q; ++i) {
            load_row(head, i, row);
            if (!row.defined) continue;
            if (row.beyond && packed.dtype != DType::fp64) {
                set_free(to, i, 0, p.head_dim_v);
                set_free(to_lse, i, 0, 1);
                continue;
            }
            if (row.score_size > kOrdinaryLse) slot(to_lse.score, i, 0) = kScoreError * row.score_size;
            const double* const o_row = packed_row(to.value, i);
            for (std::size_t c = 0; c < signs.size(); ++c) signs[c] = o_row[c] < 0 ? -1 : 1;
            const auto at = static_cast<std::size_t>(o_row - o.value.data.data()) / signs.size();
            if (o.has_copies)
                o.draws[at] = first_rows.emplace(Query{sequence.batch, h / p.group(), row.query}, at).first->second;
            add_output_row(head, i, v_sums, row, packed.dtype, signs, o.draws[at], to);
        }
    });
}

void add_magnitudes(const PackedCall<BackwardArgs>& packed, const Gradients& gradients, bool with_residual) {
    const Problem& p = packed.problem;
    WeightsRow row(p);
    GradientRow g(p, packed.dtype, with_residual ? kResidualOfO * unit_roundoff(packed.dtype) : 0);
    for_each_head(packed, [&](const Head& head, const Sequence& sequence, std::int64_t h) {
        const auto of_queries = [&](const TensorView& t) { return head_rows(t, sequence, sequence.first_q, h); };
        const auto of_keys = [&](const TensorView& t) {
            return head_rows(t, sequence, sequence.first_kv, h / p.group());
        };
        const auto of_bias = [&](const TensorView& t) { return bias_rows(t, sequence.batch, h); };
        const Target dq(*gradients.dq, of_queries);
        const Target dk(*gradients.dk, of_keys);
        const Target dv(*gradients.dv, of_keys);
        std::optional<Target> dbias;
        if (gradients.dbias != nullptr) dbias.emplace(*gradients.dbias, of_bias);
        std::optional<Target> dsink;
        if (gradients.dsinks != nullptr)
            dsink.emplace(*gradients.dsinks, [&](const TensorView& t) { return sink_rows(t, h); });
        const HeadRows d_o = of_queries(packed.d_o.view);
        const HeadRows dlse = lse_rows(packed.dlse.view, sequence, h);
        const std::vector<double> k_squares = sums_of_squares(head.k, sequence.len_kv, p.head_dim);
        double largest = 0;  // largest dS
        for (std::int64_t i = 0; i < sequence.len_q; ++i) {
            load_row(head, i, row);
            if (!row.defined) continue;
            if (row.beyond && packed.dtype != DType::fp64) {
                set_free(dq, i, 0, p.head_dim);
                for (std::int64_t j = row.keys.begin; j < row.keys.end; ++j) {
                    set_free(dk, j, 0, p.head_dim);
                    set_free(dv, j, 0, p.head_dim_v);
                    if (dbias) set_free(*dbias, i, j, 1);
                }
                if (dsink) set_free(*dsink, 0, 0, 1);
                continue;
            }
            load_gradient_row(head, i, d_o, dlse, row, g);
            add_gradient_row(head, i, k_squares, row, g, dq, dk, dv, dbias ? &*dbias : nullptr);
            if (dsink) add_sink_term(row, g, *dsink);
            largest = std::max(largest, g.largest);
        }
        if (packed.dtype == DType::fp16 && std::isfinite(largest))
            add_subnormal_gradients(head, kSubnormalGradient * largest, dq, dk, dbias ? &*dbias : nullptr);
    });
}

}  // namespace tessera::check
