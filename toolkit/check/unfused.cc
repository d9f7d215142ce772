// SPDX-License-Identifier: Apache-2.0
#include "check/unfused.hpp"

#include <cmath>
#include <vector>

#include "check/heads.hpp"

namespace tessera::check {
namespace {

using reference::Head;

double rounded(double value, DType dtype) {
    return dtype == DType::bf16 ? to_double(from_double<Bf16>(value)) : to_double(from_double<Fp16>(value));
}

void round_all(Packed& tensor, DType dtype) {
    for (double& value : tensor.data) value = rounded(value, dtype);
}

/// Vectors of one row that every step uses, [len_kv] except the first two.
struct Row {
    std::vector<double> query;  // [head_dim]
    std::vector<double> d_o;    // [head_dim_v]
    std::vector<double> dots;   // rounded scores before the softcap
    std::vector<double> p;      // rounded weights, without dropout
    std::vector<double> ds;     // rounded gradient of the scores
    explicit Row(const Problem& problem)
        : query(static_cast<std::size_t>(problem.head_dim)),
          d_o(static_cast<std::size_t>(problem.head_dim_v)),
          dots(static_cast<std::size_t>(problem.len_kv)),
          p(dots.size()),
          ds(dots.size()) {}
};

/// Computes P of row i over its visible keys: 0 for a row that sees nothing, NaN for an undefined row.
void weights_of_row(const Head& head, std::int64_t i, DType dtype, Row& row) {
    const Range keys = head.band.row(i);
    head.load_query(i, row.query.data());
    double maximum = head.sink;
    for (std::int64_t j = keys.begin; j < keys.end; ++j) {
        const auto at = static_cast<std::size_t>(j);
        row.dots[at] = rounded(head.dot(row.query.data(), j), dtype);
        row.p[at] = head.score(i, j, row.dots[at]);
        maximum = std::fmax(maximum, row.p[at]);
    }
    if (maximum == -reference::kInfinity) maximum = 0;
    double sum = std::exp(head.sink - maximum);
    for (std::int64_t j = keys.begin; j < keys.end; ++j) {
        sum += row.p[static_cast<std::size_t>(j)] = std::exp(row.p[static_cast<std::size_t>(j)] - maximum);
    }
    for (std::int64_t j = keys.begin; j < keys.end; ++j) {
        double& p = row.p[static_cast<std::size_t>(j)];
        p = sum == 0 ? 0 : rounded(p / sum, dtype);
    }
}

/// Computes dS of row i over its visible keys.
void score_gradient(const Head& head, std::int64_t i, const HeadRows& d_o, const HeadRows& dlse, DType dtype,
                    Row& row) {
    const Problem& p = head.problem;
    const Range keys = head.band.row(i);
    double delta = dlse.data != nullptr && !keys.empty() ? -slot(dlse, i, 0) : 0;
    for (std::int64_t c = 0; c < p.head_dim_v; ++c) row.d_o[static_cast<std::size_t>(c)] = slot(d_o, i, c);
    for (std::int64_t j = keys.begin; j < keys.end; ++j) {
        double dp = 0;
        for (std::int64_t c = 0; c < p.head_dim_v; ++c)
            dp += row.d_o[static_cast<std::size_t>(c)] * head.v[j * p.head_dim_v + c];
        row.ds[static_cast<std::size_t>(j)] = head.dropout_factor(i, j) * rounded(dp, dtype);
        delta += row.p[static_cast<std::size_t>(j)] * row.ds[static_cast<std::size_t>(j)];
    }
    for (std::int64_t j = keys.begin; j < keys.end; ++j) {
        double& ds = row.ds[static_cast<std::size_t>(j)];
        ds = rounded(row.p[static_cast<std::size_t>(j)] * (ds - delta), dtype);
    }
}

/// Adds `factor` times `x` to a row [dim].
void add_scaled(const HeadRows& to, std::int64_t row, double factor, const double* x, std::int64_t dim) {
    double* const sums = packed_row(to, row);
    for (std::int64_t c = 0; c < dim; ++c) sums[c] += factor * x[c];
}

void add_row(const Head& head, std::int64_t i, DType dtype, const Row& row, const HeadRows& dq, const HeadRows& dk,
             const HeadRows& dv, const HeadRows& dbias) {
    const Problem& p = head.problem;
    const Range keys = head.band.row(i);
    for (std::int64_t j = keys.begin; j < keys.end; ++j) {
        const auto at = static_cast<std::size_t>(j);
        const double weight = rounded(row.p[at] * head.dropout_factor(i, j), dtype);
        const double dx = p.effective_scale() * row.ds[at] * head.score_slope(row.dots[at]);
        add_scaled(dv, j, weight, row.d_o.data(), p.head_dim_v);
        add_scaled(dk, j, dx, row.query.data(), p.head_dim);
        add_scaled(dq, i, dx, head.k + j * p.head_dim, p.head_dim);
        if (dbias.data != nullptr) slot(dbias, i, j) += row.ds[at];
    }
}

}  // namespace

void add_unfused(const PackedCall<ForwardArgs>& packed, DType dtype, TensorGold& o) {
    const Problem& p = packed.problem;
    o.unfused = packed_zeros(o.value.view);
    Row row(p);
    for_each_head(packed, [&](const Head& head, const Sequence& sequence, std::int64_t h) {
        const HeadRows out = head_rows(o.unfused.view, sequence, sequence.first_q, h);
        for (std::int64_t i = 0; i < sequence.len_q; ++i) {
            weights_of_row(head, i, dtype, row);
            const Range keys = head.band.row(i);
            for (std::int64_t j = keys.begin; j < keys.end; ++j) {
                const double weight = rounded(row.p[static_cast<std::size_t>(j)] * head.dropout_factor(i, j), dtype);
                add_scaled(out, i, weight, head.v + j * p.head_dim_v, p.head_dim_v);
            }
        }
    });
    round_all(o.unfused, dtype);
}

void add_unfused(const PackedCall<BackwardArgs>& packed, DType dtype, const Gradients& gradients) {
    const Problem& p = packed.problem;
    for (TensorGold* gold : {gradients.dq, gradients.dk, gradients.dv, gradients.dbias}) {
        if (gold != nullptr) gold->unfused = packed_zeros(gold->value.view);
    }
    Row row(p);
    for_each_head(packed, [&](const Head& head, const Sequence& sequence, std::int64_t h) {
        const HeadRows d_o = head_rows(packed.d_o.view, sequence, sequence.first_q, h);
        const HeadRows dlse = lse_rows(packed.dlse.view, sequence, h);
        const HeadRows dq = head_rows(gradients.dq->unfused.view, sequence, sequence.first_q, h);
        const HeadRows dk = head_rows(gradients.dk->unfused.view, sequence, sequence.first_kv, h / p.group());
        const HeadRows dv = head_rows(gradients.dv->unfused.view, sequence, sequence.first_kv, h / p.group());
        const HeadRows dbias =
            gradients.dbias != nullptr ? bias_rows(gradients.dbias->unfused.view, sequence.batch, h) : HeadRows{};
        for (std::int64_t i = 0; i < sequence.len_q; ++i) {
            weights_of_row(head, i, dtype, row);
            score_gradient(head, i, d_o, dlse, dtype, row);
            add_row(head, i, dtype, row, dq, dk, dv, dbias);
        }
    });
    for (TensorGold* gold : {gradients.dq, gradients.dk, gradients.dv, gradients.dbias}) {
        if (gold != nullptr) round_all(gold->unfused, dtype);
    }
}

}  // namespace tessera::check
