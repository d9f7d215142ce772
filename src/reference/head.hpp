// SPDX-License-Identifier: Apache-2.0
//
// The definition of attention for one query head of one sequence, in fp64 and element by element. Everything that
// docs/numerics.md says about scores, masks and dropout is written here once, as plainly as it can be.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <limits>

#include "core/batch.hpp"
#include "core/dropout.hpp"
#include "core/numeric.hpp"
#include "tessera/problem.hpp"

namespace tessera::reference {

inline constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// Arrays of one head in fp64, packed: q [len_q, head_dim] is read in place, k and v are unpacked once per task.
struct Head {
    const Problem& problem;
    Sequence sequence;
    std::int64_t head = 0;  ///< query head
    Band band;
    double slope = 0;          ///< ALiBi
    double sink = -kInfinity;  ///< -inf: none
    HeadRows bias;             ///< [len_q, len_kv], may be absent
    HeadRows q;
    double* k = nullptr;  ///< [len_kv, head_dim]
    double* v = nullptr;  ///< [len_kv, head_dim_v]

    template <class Args>
    Head(const Problem& p, const Args& args, const Sequence& m, std::int64_t query_head, double* k_memory,
         double* v_memory)
        : problem(p),
          sequence(m),
          head(query_head),
          band(p.mask.bind(m.len_q, m.len_kv)),
          slope(alibi_slope(args.alibi_slopes, m.batch, query_head)),
          bias(bias_rows(args.bias, m.batch, query_head)),
          q(head_rows(args.q, m, m.first_q, query_head)),
          k(k_memory),
          v(v_memory) {
        const std::int64_t kv_head = query_head / p.group();
        unpack(key_rows(p, args, args.k, m, kv_head), m.len_kv, p.head_dim, k);
        unpack(key_rows(p, args, args.v, m, kv_head), m.len_kv, p.head_dim_v, v);
        const HeadRows sinks = sink_rows(args.sinks, query_head);
        if (sinks.data != nullptr) sink = load_as_double(sinks.at(0, 0), sinks.dtype);
    }

    static void unpack(const HeadRows& rows, std::int64_t len, std::int64_t dim, double* out) {
        for (std::int64_t row = 0; row < len; ++row) {
            for (std::int64_t c = 0; c < dim; ++c) out[row * dim + c] = load_as_double(rows.at(row, c), rows.dtype);
        }
    }

    /// scale * q_i . k_j, the argument of the softcap. `q_row` is query i in fp64.
    double dot(const double* q_row, std::int64_t j) const {
        double sum = 0;
        for (std::int64_t c = 0; c < problem.head_dim; ++c) sum += q_row[c] * k[j * problem.head_dim + c];
        return problem.effective_scale() * sum;
    }

    /// Score of query i and key j from its scaled dot product: softcap, then ALiBi, then bias.
    double score(std::int64_t i, std::int64_t j, double dot) const {
        double s = problem.softcap > 0 ? problem.softcap * std::tanh(dot / problem.softcap) : dot;
        if (slope != 0) s -= slope * static_cast<double>(std::abs(i + sequence.len_kv - sequence.len_q - j));
        if (bias.data != nullptr) s += load_as_double(bias.at(i, j), bias.dtype);
        return s;
    }

    /// d score / d dot: the derivative of the softcap, 1 - tanh^2.
    double score_slope(double dot) const {
        if (problem.softcap == 0) return 1;
        const double t = std::tanh(dot / problem.softcap);
        return 1 - t * t;
    }

    /// The factor of dropout for the weight of (i, j): 0, or 1 / (1 - probability).
    double dropout_factor(std::int64_t i, std::int64_t j) const {
        const double p = problem.dropout.probability;
        if (p == 0) return 1;
        return is_kept(i, j) ? 1 / (1 - p) : 0;
    }

    /// Is the weight's word under the threshold? Its bits are drawn from the top, until they differ from those of the
    /// largest word that is kept.
    bool is_kept(std::int64_t i, std::int64_t j) const {
        const std::uint64_t last = keep_threshold(problem.dropout.probability) - 1;
        const DropoutPatch patch = dropout_patch(sequence.batch, head, i, j);
        for (int n = 0; n < dropout::kBits; n += dropout::kBitsOfBlock) {
            const PhiloxBlock block =
                philox4x32(patch.counter(static_cast<std::uint32_t>(n / dropout::kBitsOfBlock)), problem.dropout.seed);
            for (int bit = 0; bit < dropout::kBitsOfBlock; ++bit) {
                const std::uint64_t drawn = block[static_cast<std::size_t>(bit)] >> bit_in_patch(i, j) & 1;
                const std::uint64_t of_last = last >> (dropout::kBits - 1 - n - bit) & 1;
                if (drawn != of_last) return drawn < of_last;
            }
        }
        return true;
    }

    void load_query(std::int64_t i, double* q_row) const {
        for (std::int64_t c = 0; c < problem.head_dim; ++c) q_row[c] = load_as_double(q.at(i, c), q.dtype);
    }

    /// Fills weights[j] = softmax over the visible keys of row i and the sink (0 elsewhere) and, when asked, the scaled
    /// dot products. Returns the LSE: the sink, or -inf without one, for a row that sees no key; NaN when a visible
    /// score or the sink is NaN or +inf.
    double softmax(std::int64_t i, const double* q_row, double* weights, double* dots) const {
        const Range keys = band.row(i);
        double maximum = std::isnan(sink) ? -kInfinity : sink;
        bool poisoned = std::isnan(sink) || sink == kInfinity;
        for (std::int64_t j = 0; j < sequence.len_kv; ++j) weights[j] = 0;
        for (std::int64_t j = keys.begin; j < keys.end; ++j) {
            const double x = dot(q_row, j);
            if (dots != nullptr) dots[j] = x;
            weights[j] = score(i, j, x);
            poisoned = poisoned || std::isnan(weights[j]) || weights[j] == kInfinity;
            maximum = std::fmax(maximum, weights[j]);
        }
        const double shift = maximum == -kInfinity ? 0 : maximum;
        double sum = std::exp(sink - shift);
        for (std::int64_t j = keys.begin; j < keys.end; ++j) sum += weights[j] = std::exp(weights[j] - shift);
        for (std::int64_t j = keys.begin; j < keys.end; ++j) {
            weights[j] = poisoned ? std::nan("") : sum == 0 ? 0 : weights[j] / sum;
        }
        return poisoned ? std::nan("") : shift + std::log(sum);
    }
};

}  // namespace tessera::reference
