// SPDX-License-Identifier: Apache-2.0
//
// How large are the terms that each output is the sum of, and what does an error in the scores do to it? The formulas
// are the reference's with absolute values in place of the terms.
#include <algorithm>
#include <bit>
#include <cmath>
#include <vector>

#include "check/heads.hpp"

namespace tessera::check {
namespace {

using reference::Head;

constexpr double kOrdinaryLse = 16;          // below this, LSE gets no allowance
constexpr double kOrdinaryScore = 32;        // below this, weights get none
constexpr double kScoreError = 4 * 0x1p-24;  // of the sum of absolute values of a score
constexpr double kSlopeError = 4 * 0x1p-24;  // of 1 - tanh^2: a difference of numbers near 1 where the cap bites
constexpr double kSmallError = 0.1;          // a relative error of a weight up to which it may be linearised

/// The weights of one row and the errors that they may have.
struct Row {
    Range keys;
    std::vector<double> query;         // [head_dim]
    std::vector<double> weights;       // [len_kv], P without dropout
    std::vector<double> dots;          // [len_kv]
    std::vector<double> weight_error;  // [len_kv], absolute
    double score_size = 0;             // probability-weighted mean of the sums of absolute values
    bool defined = false;              // false: no key seen, or NaN; such a row has no allowance

    explicit Row(const Problem& p)
        : query(static_cast<std::size_t>(p.head_dim)),
          weights(static_cast<std::size_t>(p.len_kv)),
          dots(static_cast<std::size_t>(p.len_kv)),
          weight_error(static_cast<std::size_t>(p.len_kv)) {}

    double weight(std::int64_t j) const { return weights[static_cast<std::size_t>(j)]; }
    double error(std::int64_t j) const { return weight_error[static_cast<std::size_t>(j)]; }
    double dot(std::int64_t j) const { return dots[static_cast<std::size_t>(j)]; }
};

/// Share of a rounding's square that a weight takes: one so near 1 that it becomes 1 is off by what it lacks.
double share_rounded(double weight, double drop, DType dtype) {
    const double missing = (1 - weight) / (0.425 * unit_roundoff(dtype));  // 0.425 u: the mean rounding, chance.cc
    return drop == 1 ? std::min(1.0, missing * missing) : 1;
}

/// Sum of the absolute values that score (i, j) is made of.
double score_size(const Head& head, std::int64_t i, std::int64_t j, const Row& row) {
    const Problem& p = head.problem;
    double sum = 0;
    for (std::int64_t c = 0; c < p.head_dim; ++c) {
        sum += std::abs(row.query[static_cast<std::size_t>(c)] * head.k[j * p.head_dim + c]);
    }
    sum *= std::abs(p.effective_scale()) * head.score_slope(row.dot(j));
    if (p.softcap > 0) sum += p.softcap * std::abs(std::tanh(row.dot(j) / p.softcap));
    sum += std::abs(head.slope) * static_cast<double>(std::abs(i + head.member.len_kv - head.member.len_q - j));
    if (head.bias.data != nullptr) sum += std::abs(load_as_double(head.bias.at(i, j), head.bias.dtype));
    return std::isfinite(sum) ? sum : 0;
}

void load_row(const Head& head, std::int64_t i, Row& row) {
    head.load_query(i, row.query.data());
    const double lse = head.softmax(i, row.query.data(), row.weights.data(), row.dots.data());
    row.keys = head.band.row(i);
    row.defined = std::isfinite(lse);
    row.score_size = 0;
    std::fill(row.weight_error.begin(), row.weight_error.end(), 0.0);
    if (!row.defined) return;
    for (std::int64_t j = row.keys.begin; j < row.keys.end; ++j) {
        const double size = score_size(head, i, j, row);
        row.weight_error[static_cast<std::size_t>(j)] = size;
        row.score_size += row.weight(j) * size;
    }
    for (std::int64_t j = row.keys.begin; j < row.keys.end; ++j) {
        double& error = row.weight_error[static_cast<std::size_t>(j)];
        const double relative = kScoreError * (error + row.score_size);
        error = row.score_size <= kOrdinaryScore ? 0 : relative > kSmallError ? 1 : row.weight(j) * relative;
    }
}

/// Row i of the backward pass: what the gradients of its scores are made of.
struct GradientRow {
    std::vector<double> dp_size;  // [len_kv], |dropout| * sum_c |dO_c| |V_jc|
    double delta_size = 0;        // sum_j p_j dp_size_j + |dLSE|
    double delta_error = 0;       // what the score errors do to delta
    double stored_o = 0;          // sqrt(sum_c (dO_c O_c)^2): how rounding a stored O moves delta
    std::vector<double> ds;       // [len_kv], the gradient of the scores itself
    DType dtype;                  // what a kernel rounds to
    GradientRow(const Problem& p, DType rounded_to)
        : dp_size(static_cast<std::size_t>(p.len_kv)), ds(dp_size.size()), dtype(rounded_to) {}
};

void load_gradient_row(const Head& head, std::int64_t i, const HeadRows& d_o, const HeadRows& dlse, const Row& row,
                       GradientRow& g) {
    const Problem& p = head.problem;
    g.delta_size = dlse.data != nullptr ? std::abs(slot(dlse, i, 0)) : 0;
    g.delta_error = 0;
    double delta = dlse.data != nullptr ? -slot(dlse, i, 0) : 0;
    for (std::int64_t j = row.keys.begin; j < row.keys.end; ++j) {
        double sum = 0;
        double dp = 0;
        for (std::int64_t c = 0; c < p.head_dim_v; ++c) {
            const double term = slot(d_o, i, c) * head.v[j * p.head_dim_v + c];
            sum += std::abs(term);
            dp += term;
        }
        sum *= head.dropout_factor(i, j);
        dp *= head.dropout_factor(i, j);
        g.ds[static_cast<std::size_t>(j)] = dp;
        delta += row.weight(j) * dp;
        g.dp_size[static_cast<std::size_t>(j)] = sum;
        g.delta_size += row.weight(j) * sum;
        g.delta_error += row.error(j) * sum;
    }
    for (std::int64_t j = row.keys.begin; j < row.keys.end; ++j) {
        double& ds = g.ds[static_cast<std::size_t>(j)];
        ds = row.weight(j) * (ds - delta);
    }
    double squares = 0;
    for (std::int64_t c = 0; c < p.head_dim_v; ++c) {
        double o = 0;
        for (std::int64_t j = row.keys.begin; j < row.keys.end; ++j) {
            o += row.weight(j) * head.dropout_factor(i, j) * head.v[j * p.head_dim_v + c];
        }
        squares += std::pow(std::max(std::abs(o), smallest_normal(g.dtype)) * slot(d_o, i, c), 2);
    }
    g.stored_o = std::sqrt(squares);
}

/// Where the terms of one head go: rows of one gradient's magnitude, score, stored_o and rounded.
struct Target {
    HeadRows magnitude;
    HeadRows score;
    HeadRows stored_o;
    HeadRows rounded;

    template <class RowsOf>
    Target(const TensorGold& gold, RowsOf rows_of)
        : magnitude(rows_of(gold.magnitude.view)),
          score(rows_of(gold.score.view)),
          stored_o(rows_of(gold.stored_o.view)),
          rounded(rows_of(gold.rounded.view)) {}
};

void add_gradient_row(const Head& head, std::int64_t i, const HeadRows& d_o, const Row& row, const GradientRow& g,
                      const Target& dq, const Target& dk, const Target& dv, const Target* dbias) {
    const Problem& p = head.problem;
    const double scale = std::abs(p.effective_scale());
    double delta_on_dbias = 0;
    std::vector<double> delta_on_dq(static_cast<std::size_t>(p.head_dim));
    for (std::int64_t j = row.keys.begin; j < row.keys.end; ++j) {
        const double terms = g.dp_size[static_cast<std::size_t>(j)] + g.delta_size;
        const double ds_size = row.weight(j) * terms;
        const double ds_error = row.error(j) * terms + row.weight(j) * g.delta_error;
        const double ds_stored = row.weight(j) * g.stored_o;
        const double slope = scale * head.score_slope(row.dot(j));
        const double dx = g.ds[static_cast<std::size_t>(j)] * slope;
        const double slope_error = p.softcap > 0 ? scale * kSlopeError : 0;
        for (std::int64_t c = 0; c < p.head_dim; ++c) {
            const double k = head.k[j * p.head_dim + c];
            const double q = row.query[static_cast<std::size_t>(c)];
            slot(dq.magnitude, i, c) += ds_size * slope * std::abs(k);
            slot(dq.score, i, c) += (ds_error * slope + ds_size * slope_error) * std::abs(k);
            slot(dq.rounded, i, c) += std::pow(dx * k, 2);
            delta_on_dq[static_cast<std::size_t>(c)] += ds_stored * slope * k;
            slot(dk.magnitude, j, c) += ds_size * slope * std::abs(q);
            slot(dk.score, j, c) += (ds_error * slope + ds_size * slope_error) * std::abs(q);
            slot(dk.rounded, j, c) += std::pow(dx * q, 2);
            slot(dk.stored_o, j, c) += std::pow(ds_stored * slope * q, 2);
        }
        const double drop = head.dropout_factor(i, j);
        const double share = share_rounded(row.weight(j), drop, g.dtype);
        for (std::int64_t c = 0; c < p.head_dim_v; ++c) {
            slot(dv.magnitude, j, c) += row.weight(j) * drop * std::abs(slot(d_o, i, c));
            slot(dv.rounded, j, c) += share * std::pow(row.weight(j) * drop * slot(d_o, i, c), 2);
            slot(dv.score, j, c) += row.error(j) * drop * std::abs(slot(d_o, i, c));
        }
        if (dbias == nullptr) continue;
        slot(dbias->magnitude, i, j) += ds_size;
        slot(dbias->score, i, j) += ds_error;
        slot(dbias->rounded, i, j) += std::pow(g.ds[static_cast<std::size_t>(j)], 2);
        // The errors of one row have one cause: in a bias that all keys share they add up, they do not cancel.
        if (dbias->stored_o.column_stride != 0) slot(dbias->stored_o, i, j) += ds_stored * ds_stored;
        delta_on_dbias += ds_stored;
    }
    if (dbias != nullptr && dbias->stored_o.column_stride == 0) {
        slot(dbias->stored_o, i, 0) += delta_on_dbias * delta_on_dbias;
    }
    for (std::int64_t c = 0; c < p.head_dim; ++c) {
        slot(dq.stored_o, i, c) = std::pow(delta_on_dq[static_cast<std::size_t>(c)], 2);
    }
}

/// The entry of a row of one head in the tensor's causes.
std::uint64_t& cause_of(TensorGold& gold, const HeadRows& rounded, std::int64_t row) {
    const auto at = (&slot(rounded, row, 0) - gold.rounded.data.data()) / gold.row_size();
    gold.cause.resize(gold.rounded.data.size() / static_cast<std::size_t>(gold.row_size()));
    return gold.cause[static_cast<std::size_t>(at)];
}

class Hash {
 public:
    Hash(std::int64_t batch, std::int64_t head) { add(batch), add(head); }
    void add(std::int64_t x) {
        state_ = (state_ ^ static_cast<std::uint64_t>(x)) * 0x9E3779B97F4A7C15u;
        state_ ^= state_ >> 29;
    }
    void add(const double* row, std::int64_t count) {
        for (std::int64_t c = 0; c < count; ++c) add(std::bit_cast<std::int64_t>(row[c]));
    }
    std::uint64_t value() const { return state_; }

 private:
    std::uint64_t state_ = 0x243F6A8885A308D3u;
};

/// Rows whose weights are in proportion round them alike: copies of a query, copies of a key under one bias, also when
/// one row sees more keys than the other. The key of the largest weight and three ratios to it tell.
std::uint64_t cause_of_weights(const Row& row, std::int64_t batch, std::int64_t head) {
    constexpr double kSame = 0x1p24;  // steps of a ratio's logarithm: fp64 noise stays within one
    constexpr double kCounts = 1e-30;
    if (row.keys.empty()) return 0;
    const auto begin = row.weights.begin();
    const auto top = std::max_element(begin + row.keys.begin, begin + row.keys.end);
    Hash hash(batch, head);
    hash.add(top - begin);
    int ratios = 0;
    for (std::int64_t j = row.keys.begin; j < row.keys.end && ratios < 3; ++j) {
        if (begin + j == top || row.weight(j) < kCounts * *top) continue;
        hash.add(std::llround(std::log(row.weight(j) / *top) * kSame));
        ++ratios;
    }
    return hash.value();
}

/// Gradients: dQ rounds alike for copies of a query with its dO, dK for copies of a key with its value, dV for copies
/// of a key.
void add_causes(const Head& head, const Member& member, const HeadRows& d_o, const Gradients& gradients,
                const HeadRows& dq, const HeadRows& dk, const HeadRows& dv) {
    const Problem& p = head.problem;
    std::vector<double> query(static_cast<std::size_t>(p.head_dim));
    for (std::int64_t i = 0; i < member.len_q; ++i) {
        Hash hash(member.batch, head.head);
        head.load_query(i, query.data());
        hash.add(query.data(), p.head_dim);
        for (std::int64_t c = 0; c < p.head_dim_v; ++c) hash.add(std::bit_cast<std::int64_t>(slot(d_o, i, c)));
        cause_of(*gradients.dq, dq, i) = hash.value();
    }
    for (std::int64_t j = 0; j < member.len_kv; ++j) {
        Hash hash(member.batch, head.head / p.group());
        hash.add(head.k + j * p.head_dim, p.head_dim);
        cause_of(*gradients.dv, dv, j) = hash.value();
        hash.add(head.v + j * p.head_dim_v, p.head_dim_v);
        cause_of(*gradients.dk, dk, j) = hash.value();
    }
}

}  // namespace

void add_magnitudes(const PackedCall<ForwardArgs>& packed, TensorGold& o, TensorGold& lse) {
    const Problem& p = packed.problem;
    Row row(p);
    for_each_head(packed, [&](const Head& head, const Member& member, std::int64_t h) {
        const HeadRows magnitude = head_rows(o.magnitude.view, member, member.first_q, h);
        const HeadRows score = head_rows(o.score.view, member, member.first_q, h);
        const HeadRows rounded = head_rows(o.rounded.view, member, member.first_q, h);
        const HeadRows lse_score = lse_rows(lse.score.view, member, h);
        for (std::int64_t i = 0; i < member.len_q; ++i) {
            load_row(head, i, row);
            if (!row.defined) continue;
            cause_of(o, rounded, i) = cause_of_weights(row, member.batch, h);
            if (row.score_size > kOrdinaryLse) slot(lse_score, i, 0) = kScoreError * row.score_size;
            for (std::int64_t j = row.keys.begin; j < row.keys.end; ++j) {
                const double drop = head.dropout_factor(i, j);
                const double share = share_rounded(row.weight(j), drop, packed.dtype);
                for (std::int64_t c = 0; c < p.head_dim_v; ++c) {
                    const double v = std::abs(head.v[j * p.head_dim_v + c]);
                    slot(magnitude, i, c) += row.weight(j) * drop * v;
                    slot(score, i, c) += row.error(j) * drop * v;
                    slot(rounded, i, c) += share * std::pow(row.weight(j) * drop * v, 2);
                }
            }
        }
    });
}

void add_magnitudes(const PackedCall<BackwardArgs>& packed, const Gradients& gradients) {
    const Problem& p = packed.problem;
    Row row(p);
    GradientRow g(p, packed.dtype);
    for_each_head(packed, [&](const Head& head, const Member& member, std::int64_t h) {
        const auto of_queries = [&](const TensorView& t) { return head_rows(t, member, member.first_q, h); };
        const auto of_keys = [&](const TensorView& t) { return head_rows(t, member, member.first_kv, h / p.group()); };
        const auto of_bias = [&](const TensorView& t) { return bias_rows(t, member.batch, h); };
        const Target dq(*gradients.dq, of_queries);
        const Target dk(*gradients.dk, of_keys);
        const Target dv(*gradients.dv, of_keys);
        const HeadRows d_o = of_queries(packed.d_o.view);
        const HeadRows dlse = lse_rows(packed.dlse.view, member, h);
        add_causes(head, member, d_o, gradients, dq.rounded, dk.rounded, dv.rounded);
        for (std::int64_t i = 0; i < member.len_q; ++i) {
            load_row(head, i, row);
            if (!row.defined) continue;
            load_gradient_row(head, i, d_o, dlse, row, g);
            if (gradients.dbias == nullptr) {
                add_gradient_row(head, i, d_o, row, g, dq, dk, dv, nullptr);
            } else {
                const Target dbias(*gradients.dbias, of_bias);
                add_gradient_row(head, i, d_o, row, g, dq, dk, dv, &dbias);
            }
        }
    });
}

}  // namespace tessera::check
