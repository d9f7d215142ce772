// SPDX-License-Identifier: Apache-2.0
//
// decode_block() in fp64 with the roundings that docs/decode-block.md promises, and the judge of its phases. Each phase
// is judged by what the call itself gave to it: the new keys by x, O and LSE by the cache, out by O.
#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "kernels/decode_block_case.hpp"

namespace tessera::decode_block_case {

using Numbers = std::vector<double>;

inline double to_dtype(double value, DType dtype) {
    if (dtype == DType::bf16) return to_double(from_double<Bf16>(value));
    return static_cast<float>(value);
}
/// Half the distance of 1 to the next number.
inline double unit_of(DType dtype) { return dtype == DType::bf16 ? 0x1p-8 : 0x1p-24; }

/// Results of one row before their own rounding.
struct Row {
    Numbers q;  ///< [heads_q, head_dim], rounded
    Numbers k;  ///< [heads_kv, head_dim]
    Numbers v;
};

inline Numbers product(const Tensor& w, const Tensor& bias, const Numbers& x) {
    const std::int64_t inputs = w.view().shape[1];
    Numbers y(static_cast<std::size_t>(w.view().shape[0]));
    for (std::size_t i = 0; i < y.size(); ++i) {
        const auto output = static_cast<std::int64_t>(i);
        for (std::int64_t c = 0; c < inputs; ++c) y[i] += w.at(output, c) * x[static_cast<std::size_t>(c)];
        if (bias.view().given()) y[i] += bias.at(output);
    }
    return y;
}

/// The QK norm and the rotary embedding of one head, as append() defines them.
inline void transform(const Block& block, const Tensor& weights, std::int64_t position, double* head) {
    const DecodeBlockProblem& p = block.problem;
    if (p.qk_norm) {
        double squares = 0;
        for (std::int64_t c = 0; c < p.head_dim; ++c) squares += head[c] * head[c];
        const double root = std::sqrt(squares / static_cast<double>(p.head_dim) + p.norm_eps);
        for (std::int64_t c = 0; c < p.head_dim; ++c) head[c] *= weights.at(c) / root;
    }
    if (p.rotary_dim == 0) return;
    // A key without a place is not written, and its query is turned as at the nearest position.
    position = std::clamp<std::int64_t>(position, 0, block.cos.view().shape[0] - 1);
    for (std::int64_t n = 0; n < p.rotary_dim / 2; ++n) {
        const std::int64_t a = p.rotary_interleaved ? 2 * n : n, b = a + (p.rotary_interleaved ? 1 : p.rotary_dim / 2);
        const double cos = block.cos.at(position, n), sin = block.sin.at(position, n), first = head[a];
        head[a] = first * cos - head[b] * sin;
        head[b] = first * sin + head[b] * cos;
    }
}

inline Row row_of(const Block& block, std::int64_t b) {
    const DecodeBlockProblem& p = block.problem;
    Numbers normed(static_cast<std::size_t>(p.hidden));
    double squares = 0;
    for (std::int64_t i = 0; i < p.hidden; ++i) squares += block.x.at(b, i) * block.x.at(b, i);
    const double root = std::sqrt(squares / static_cast<double>(p.hidden) + p.norm_eps);
    for (std::int64_t i = 0; i < p.hidden; ++i)
        normed[static_cast<std::size_t>(i)] = to_dtype(block.x.at(b, i) / root * block.norm.at(i), p.dtype);
    Numbers qkv = product(block.w_qkv, block.b_qkv, normed);
    const bool changed = p.qk_norm || p.rotary_dim > 0;
    const std::int64_t turned = (p.heads_q + p.heads_kv) * p.head_dim;
    if (changed) {
        for (std::int64_t i = 0; i < turned; ++i) {
            double& value = qkv[static_cast<std::size_t>(i)];
            value = to_dtype(value, p.dtype);
        }
    }
    for (std::int64_t h = 0; h < p.heads_q + p.heads_kv; ++h) {
        transform(block, h < p.heads_q ? block.q_norm : block.k_norm, block.position(b), qkv.data() + h * p.head_dim);
    }
    Row row;
    const auto of_q = qkv.begin() + p.heads_q * p.head_dim, of_k = qkv.begin() + turned;
    for (auto value = qkv.begin(); value != of_q; ++value) row.q.push_back(to_dtype(*value, p.dtype));
    row.k.assign(of_q, of_k);
    row.v.assign(of_k, qkv.end());
    return row;
}

/// Expects results that are the exact numbers rounded once, but for the error of an fp32 sum: their RMSE is near that
/// of correct rounding, and no element is more than a neighbour off. `earlier_rounding`: the exact numbers come from
/// rounded ones, a few of which may be the other neighbour of a number near the middle between two.
inline void expect_rounded(const Numbers& results, const Numbers& exact, DType dtype, bool earlier_rounding,
                           const std::string& what) {
    double errors = 0, unavoidable = 0, squares = 0;
    for (std::size_t i = 0; i < exact.size(); ++i) {
        const double error = results[i] - exact[i], least = to_dtype(exact[i], dtype) - exact[i];
        errors += error * error;
        unavoidable += least * least;
        squares += exact[i] * exact[i];
    }
    const auto n = static_cast<double>(exact.size());
    const double rms = std::sqrt(squares / n);
    for (std::size_t i = 0; i < exact.size(); ++i) {
        const double slack = 2e-5 + (earlier_rounding ? 8 * unit_of(dtype) : 0);
        const double limit = 3 * unit_of(dtype) * std::abs(exact[i]) + slack * rms;
        ASSERT_LE(std::abs(results[i] - exact[i]), limit) << what << ", element " << i << ": " << results[i];
    }
    const double more = earlier_rounding ? 1.2 : 1.1;
    EXPECT_LE(std::sqrt(errors / n), more * std::sqrt(unavoidable / n) + 2e-6 * rms) << what;
}

/// One query head by what the cache holds.
inline void expect_attention(const Block& block, const Row& row, std::int64_t b, std::int64_t h) {
    const DecodeBlockProblem& p = block.problem;
    const std::int64_t first = block.first(b), end = block.end(b), kv = h / (p.heads_q / p.heads_kv);
    Numbers scores;
    double maximum = p.sinks ? block.sinks.at(h) : -test::kInfinity;
    for (std::int64_t j = first; j < end; ++j) {
        const auto [at, in] = block.place(b, j);
        double score = 0;
        for (std::int64_t c = 0; c < p.head_dim; ++c)
            score += row.q[static_cast<std::size_t>(h * p.head_dim + c)] * block.k_cache.at(at, in, kv, c);
        score *= p.scale.value_or(1 / std::sqrt(static_cast<double>(p.head_dim)));
        if (p.softcap > 0) score = p.softcap * std::tanh(score / p.softcap);
        scores.push_back(score);
        maximum = std::max(maximum, score);
    }
    if (first >= end) {
        EXPECT_EQ(block.lse.at(b, h), p.sinks ? block.sinks.at(h) : -test::kInfinity);
        for (std::int64_t c = 0; c < p.head_dim; ++c) ASSERT_EQ(block.o.at(b, h, c), 0);
        return;
    }
    double sum = p.sinks ? std::exp(block.sinks.at(h) - maximum) : 0;
    for (const double score : scores) sum += std::exp(score - maximum);
    // q may be a neighbour of the reference's where a sum is close to the middle between two numbers.
    const double slack = p.dtype == DType::bf16 ? 4e-3 : 2e-5;
    EXPECT_NEAR(block.lse.at(b, h), maximum + std::log(sum), slack) << "sequence " << b << ", head " << h;
    for (std::int64_t c = 0; c < p.head_dim; ++c) {
        double o = 0, terms = 0;
        for (std::int64_t j = first; j < end; ++j) {
            const auto [at, in] = block.place(b, j);
            const double term =
                std::exp(scores[static_cast<std::size_t>(j - first)] - maximum) / sum * block.v_cache.at(at, in, kv, c);
            o += term;
            terms += std::abs(term);
        }
        ASSERT_NEAR(block.o.at(b, h, c), o, (slack + 4 * unit_of(p.dtype)) * terms + 1e-30)
            << "sequence " << b << ", head " << h << ", column " << c;
    }
}

/// Expects that the call has written the new keys and nothing else to the cache, and O, LSE and out from it. `before`:
/// the tensors before the call.
inline void expect_right(const Block& block, const Block& before) {
    const DecodeBlockProblem& p = block.problem;
    Tensor k_expected = before.k_cache, v_expected = before.v_cache;
    const auto columns = static_cast<std::size_t>(p.heads_q * p.head_dim);
    for (std::int64_t b = 0; b < p.batch; ++b) {
        const Row row = row_of(before, b);
        if (block.writes(b)) {
            Numbers k, v;
            const auto [at, in] = block.place(b, block.length(b));
            for (std::int64_t h = 0; h < p.heads_kv; ++h) {
                for (std::int64_t c = 0; c < p.head_dim; ++c) {
                    k.push_back(block.k_cache.at(at, in, h, c));
                    v.push_back(block.v_cache.at(at, in, h, c));
                    k_expected.set(k.back(), at, in, h, c);
                    v_expected.set(v.back(), at, in, h, c);
                }
            }
            // They come from the normed x, which is rounded.
            expect_rounded(k, row.k, p.dtype, true, fmt::format("new keys of sequence {}", b));
            expect_rounded(v, row.v, p.dtype, true, fmt::format("new values of sequence {}", b));
        }
        for (std::int64_t h = 0; h < p.heads_q; ++h) expect_attention(block, row, b, h);
        Numbers o(columns), out;
        for (std::size_t i = 0; i < columns; ++i) {
            const auto column = static_cast<std::int64_t>(i);
            o[i] = block.o.at(b, column / p.head_dim, column % p.head_dim);
        }
        Numbers exact = product(before.w_o, before.b_o, o);
        const Tensor& residual = before.with_residual ? before.residual : before.x;
        for (std::int64_t i = 0; i < p.hidden; ++i) {
            exact[static_cast<std::size_t>(i)] += residual.at(b, i);
            out.push_back(block.out.at(b, i));
        }
        expect_rounded(out, exact, p.dtype, false, fmt::format("out of sequence {}", b));
    }
    EXPECT_EQ(block.k_cache.bytes(), k_expected.bytes()) << "rows of k_cache that are not new";
    EXPECT_EQ(block.v_cache.bytes(), v_expected.bytes()) << "rows of v_cache that are not new";
}

}  // namespace tessera::decode_block_case
