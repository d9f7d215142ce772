// SPDX-License-Identifier: Apache-2.0
//
// A whole attention call for the tests: a Problem and every tensor of its forward and its backward.
#pragma once

#include <array>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "core/tensors.hpp"
#include "tessera/tessera.hpp"

namespace tessera::test {

/// The inputs of a Case besides its Problem.
struct CaseOptions {
    std::vector<std::int64_t> cu_q{};  ///< ragged
    std::vector<std::int64_t> cu_kv{};
    DType cu_dtype = DType::int32;
    std::array<std::int64_t, 4> bias_shape{};  ///< zeros: the full one
    bool slopes_per_batch = false;
    double deviation = 1;
    std::uint64_t seed = 1;
};

inline Tensor cu_tensor(const std::vector<std::int64_t>& cu, DType dtype) {
    Tensor result(dtype, {static_cast<std::int64_t>(cu.size())});
    for (std::size_t i = 0; i < cu.size(); ++i) {
        const auto at = static_cast<std::int64_t>(i);
        if (dtype == DType::int32) *result.view().at<std::int32_t>(at) = static_cast<std::int32_t>(cu[i]);
        else *result.view().at<std::int64_t>(at) = cu[i];
    }
    return result;
}

/// Sets the fields of a ragged Problem from lengths; `longest_*` are the bounds.
inline void set_ragged(Problem& p, CaseOptions& options, const std::vector<std::int64_t>& lens_q,
                       const std::vector<std::int64_t>& lens_kv) {
    options.cu_q = options.cu_kv = {0};
    p.ragged = true;
    p.batch = static_cast<std::int64_t>(lens_q.size());
    p.len_q = p.len_kv = 0;
    for (const std::int64_t n : lens_q) options.cu_q.push_back(options.cu_q.back() + n), p.len_q = std::max(p.len_q, n);
    for (const std::int64_t n : lens_kv)
        options.cu_kv.push_back(options.cu_kv.back() + n), p.len_kv = std::max(p.len_kv, n);
    p.total_q = options.cu_q.back();
    p.total_kv = options.cu_kv.back();
}

/// Every tensor is filled with normal random values, ALiBi slopes with positive ones.
struct Case {
    Problem problem;
    CaseOptions options;
    Tensor q, k, v, bias, alibi_slopes, cu_seqlens_q, cu_seqlens_kv, sinks;
    Tensor o, lse, d_o, dlse, dq, dk, dv, dbias, dsinks;

    explicit Case(const Problem& p, const CaseOptions& wanted = {}) : problem(p), options(wanted) {
        q = rows(p.total_q, p.len_q, p.heads_q, p.head_dim);
        k = rows(p.total_kv, p.len_kv, p.heads_kv, p.head_dim);
        v = rows(p.total_kv, p.len_kv, p.heads_kv, p.head_dim_v);
        o = d_o = rows(p.total_q, p.len_q, p.heads_q, p.head_dim_v);
        dq = q, dk = k, dv = v;
        const DType lse_dtype = p.dtype == DType::fp64 ? DType::fp64 : DType::fp32;
        lse = p.ragged ? Tensor(lse_dtype, {p.heads_q, p.total_q}) : Tensor(lse_dtype, {p.batch, p.heads_q, p.len_q});
        dlse = lse;
        if (p.bias) {
            const auto& s = options.bias_shape;
            bias = s[0] > 0 ? Tensor(lse_dtype, {s[0], s[1], s[2], s[3]})
                            : Tensor(lse_dtype, {p.batch, p.heads_q, p.len_q, p.len_kv});
        }
        if (p.bias_gradient) dbias = bias;
        if (p.alibi) {
            alibi_slopes =
                options.slopes_per_batch ? Tensor(DType::fp32, {p.batch, p.heads_q}) : Tensor(DType::fp32, {p.heads_q});
        }
        if (p.sinks) {
            sinks = Tensor(DType::fp32, {p.heads_q});
            dsinks = Tensor(lse_dtype, {p.heads_q});
        }
        if (p.ragged) {
            cu_seqlens_q = cu_tensor(options.cu_q, options.cu_dtype);
            cu_seqlens_kv = cu_tensor(options.cu_kv, options.cu_dtype);
        }
        fill_inputs();
    }

    ForwardArgs forward_args() const {
        return {.q = q,
                .k = k,
                .v = v,
                .bias = bias,
                .alibi_slopes = alibi_slopes,
                .cu_seqlens_q = cu_seqlens_q,
                .cu_seqlens_kv = cu_seqlens_kv,
                .o = o,
                .lse = lse,
                .sinks = sinks};
    }
    BackwardArgs backward_args() const {
        return {.q = q,
                .k = k,
                .v = v,
                .bias = bias,
                .alibi_slopes = alibi_slopes,
                .cu_seqlens_q = cu_seqlens_q,
                .cu_seqlens_kv = cu_seqlens_kv,
                .o = o,
                .lse = lse,
                .d_o = d_o,
                .dlse = dlse,
                .dq = dq,
                .dk = dk,
                .dv = dv,
                .dbias = dbias,
                .sinks = sinks,
                .dsinks = dsinks};
    }

    /// Run the kernel of that name on outputs that are filled with NaN.
    void run_forward(const std::string& kernel = "reference.forward", int threads = 1) {
        for (Tensor* out : {&o, &lse}) fill(*out, kNan);
        const Plan how = plan(problem, {.pass = Pass::forward, .kernel = kernel, .threads = threads});
        forward(how, forward_args(), Workspace(how));
    }
    void run_backward(const std::string& kernel = "reference.backward", int threads = 1) {
        for (Tensor* out : {&dq, &dk, &dv, &dbias, &dsinks}) fill(*out, kNan);
        const Plan how = plan(problem, {.pass = Pass::backward, .kernel = kernel, .threads = threads});
        backward(how, backward_args(), Workspace(how));
    }

    std::int64_t len_q_of(std::int64_t b) const { return problem.ragged ? length(options.cu_q, b) : problem.len_q; }
    std::int64_t len_kv_of(std::int64_t b) const { return problem.ragged ? length(options.cu_kv, b) : problem.len_kv; }

    /// Index of (sequence, its row, head, column) in q, o and their gradients, and in k, v and theirs.
    Index in_q(std::int64_t b, std::int64_t row, std::int64_t head, std::int64_t column) const {
        return index(options.cu_q, b, row, head, column);
    }
    Index in_kv(std::int64_t b, std::int64_t row, std::int64_t head, std::int64_t column) const {
        return index(options.cu_kv, b, row, head, column);
    }
    Index in_lse(std::int64_t b, std::int64_t head, std::int64_t row) const {
        return problem.ragged ? Index{head, options.cu_q[static_cast<std::size_t>(b)] + row, 0, 0}
                              : Index{b, head, row, 0};
    }
    Index in_bias(std::int64_t b, std::int64_t head, std::int64_t i, std::int64_t j) const {
        Index at{b, head, i, j};
        for (std::size_t d = 0; d < 4; ++d) at[d] = bias.view().shape[d] == 1 ? 0 : at[d];
        return at;
    }

 private:
    Tensor rows(std::int64_t total, std::int64_t len, std::int64_t heads, std::int64_t dim) const {
        if (problem.ragged) return Tensor(problem.dtype, {total, heads, dim});
        return Tensor(problem.dtype, {problem.batch, len, heads, dim});
    }
    void fill_inputs() {
        std::mt19937_64 random(options.seed);
        for (Tensor* t : {&q, &k, &v, &d_o, &dlse}) fill_normal(*t, random, options.deviation);
        if (problem.bias) fill_normal(bias, random);
        if (problem.alibi) {
            std::uniform_real_distribution<double> slope(0.05, 0.5);
            for_each_index(alibi_slopes, [&](const Index& i) { alibi_slopes.set(slope(random), i); });
        }
        if (!problem.sinks) return;
        // Multiples of 2^-10, to which a test can add others without rounding.
        std::uniform_int_distribution<int> sink(-1024, 2048);
        for_each_index(sinks, [&](const Index& i) { sinks.set(sink(random) * 0x1p-10, i); });
    }
    static std::int64_t length(const std::vector<std::int64_t>& cu, std::int64_t b) {
        return cu[static_cast<std::size_t>(b) + 1] - cu[static_cast<std::size_t>(b)];
    }
    Index index(const std::vector<std::int64_t>& cu, std::int64_t b, std::int64_t row, std::int64_t head,
                std::int64_t c) const {
        return problem.ragged ? Index{cu[static_cast<std::size_t>(b)] + row, head, c, 0} : Index{b, row, head, c};
    }
};

}  // namespace tessera::test
