// SPDX-License-Identifier: Apache-2.0
//
// One attention call with its tensors, for tests that look at single bits and elements.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <map>
#include <numeric>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include "check/compare.hpp"
#include "check/generate.hpp"
#include "check/limits.hpp"
#include "check/packed.hpp"
#include "core/numeric.hpp"
#include "device/device_copy.hpp"
#include "kernels/tensor.hpp"
#include "printed.hpp"
#include "tessera/tessera.hpp"

namespace tessera::check {

/// Did a kernel run a call? If not, its device is not here, or it refused the call for a reason.
struct Ran {
    bool ran = false;
    bool no_device = false;
    std::string reason{};
    operator bool() const { return ran; }
};

/// How often each kernel was asked by an Attention, and ran. Printed at the end, and written to the test results.
struct Asked {
    int ran = 0;
    int refused = 0;
    int no_device = 0;
};
inline std::map<std::string, Asked>& asked() {
    static std::map<std::string, Asked> counts;
    return counts;
}
inline Ran noted(const KernelInfo& kernel, Ran ran) {
    Asked& counts = asked()[kernel.name];
    ++(ran ? counts.ran : ran.no_device ? counts.no_device : counts.refused);
    return ran;
}

/// How to run a kernel in a test.
struct Run {
    int threads = 1;
    std::optional<Tile> tile{};
    Execution how{};
};

namespace detail {

inline Tensor rows_tensor(const Problem& p, bool of_queries, std::int64_t dim) {
    const std::int64_t heads = of_queries ? p.heads_q : p.heads_kv;
    if (p.ragged) return {p.dtype, {of_queries ? p.total_q : p.total_kv, heads, dim}};
    return {p.dtype, {p.batch, of_queries ? p.len_q : p.len_kv, heads, dim}};
}

inline Tensor lse_tensor(const Problem& p) {
    if (p.ragged) return {DType::fp32, {p.heads_q, p.total_q}};
    return {DType::fp32, {p.batch, p.heads_q, p.len_q}};
}

inline Tensor cu_seqlens(const std::vector<std::int64_t>& lengths) {
    Tensor result(DType::int32, {static_cast<std::int64_t>(lengths.size()) + 1});
    std::int32_t sum = 0;
    *result.view.at<std::int32_t>(0) = 0;
    for (std::size_t b = 0; b < lengths.size(); ++b) {
        sum += static_cast<std::int32_t>(lengths[b]);
        *result.view.at<std::int32_t>(static_cast<std::int64_t>(b) + 1) = sum;
    }
    return result;
}

/// Fails if a kernel refuses a Problem that it has to take. Kernels of a GPU may refuse any tile: they have one.
inline void expect_refusal(const Ran& refused, const Problem& problem, const KernelInfo& kernel, const Run& run) {
    const bool of_gpu = needs_another_gpu(kernel, refused.reason) || (run.tile && kernel.backend == Backend::cuda);
    if (refused.no_device || of_gpu) return;
    if (const std::string expected = expected_refusal(kernel, problem);
        expected.empty() || refused.reason.find(expected) == std::string::npos) {
        ADD_FAILURE() << kernel.name << " refused " << problem.describe() << "\n" << refused.reason;
    }
}

/// A Plan, or why there is none.
inline std::optional<Plan> plan_for(const Problem& problem, const KernelInfo& kernel, const Run& run, Ran& refused) {
    try {
        return plan(problem, {.pass = kernel.pass, .kernel = kernel.name, .tile = run.tile, .threads = run.threads});
    } catch (const Error& e) {
        if (e.code() != ErrorCode::unsupported && e.code() != ErrorCode::device_unavailable) throw;
        refused = {.no_device = e.code() == ErrorCode::device_unavailable, .reason = e.what()};
        expect_refusal(refused, problem, kernel, run);
        return std::nullopt;
    }
}

}  // namespace detail

/// A Problem with tensors of its own, filled with N(0, 1).
struct Attention {
    Problem problem;
    Tensor q, k, v, bias, slopes, cu_q, cu_kv, d_o, dlse, sinks;  // inputs
    Tensor o, lse, dq, dk, dv, dbias, dsinks;                     // outputs
    Tensor o_residual;  // of keep_residual(): written and taken by the kernels that know it

    /// `lengths_*`: of the sequences of a ragged Problem.
    explicit Attention(const Problem& p, std::uint64_t seed = 1, const std::vector<std::int64_t>& lengths_q = {},
                       const std::vector<std::int64_t>& lengths_kv = {});

    ForwardArgs forward_args() const;
    BackwardArgs backward_args() const;

    /// Run on poisoned outputs; false when the kernel refuses the Problem, which fails the test unless it may
    /// (limits.hpp), or has no device here. The backward takes o and lse as they are.
    [[nodiscard]] Ran forward(const KernelInfo& kernel, const Run& run = {});
    [[nodiscard]] Ran backward(const KernelInfo& kernel, const Run& run = {});

    /// Keeps the residual of O in later calls. Until a forward has written it, it belongs to no O.
    void keep_residual();

    /// Fills in o and lse for a backward, by the reference: a wrong forward is not the backward's fault.
    void prepare_backward();

    Report check_forward() const { return check::check_forward(problem, forward_args()); }
    Report check_backward() const { return check::check_backward(problem, backward_args()); }
};

inline Attention::Attention(const Problem& p, std::uint64_t seed, const std::vector<std::int64_t>& lengths_q,
                            const std::vector<std::int64_t>& lengths_kv)
    : problem(p),
      q(detail::rows_tensor(p, true, p.head_dim)),
      k(detail::rows_tensor(p, false, p.head_dim)),
      v(detail::rows_tensor(p, false, p.head_dim_v)),
      d_o(detail::rows_tensor(p, true, p.head_dim_v)),
      o(detail::rows_tensor(p, true, p.head_dim_v)),
      lse(detail::lse_tensor(p)),
      dq(q),
      dk(k),
      dv(v) {
    fill(q.view, Fill::normal, seed * 16 + 1);
    fill(k.view, Fill::normal, seed * 16 + 2);
    fill(v.view, Fill::normal, seed * 16 + 3);
    fill(d_o.view, Fill::normal, seed * 16 + 4);
    if (p.bias) {
        bias = Tensor(DType::fp32, {p.batch, p.heads_q, p.len_q, p.len_kv});
        fill(bias.view, Fill::normal, seed * 16 + 5);
        if (p.bias_gradient) dbias = bias;
    }
    if (p.alibi) {
        slopes = Tensor(DType::fp32, {p.heads_q});
        for (std::int64_t h = 0; h < p.heads_q; ++h) slopes.set(std::exp2(-static_cast<double>(h % 8 + 1)), h);
    }
    if (p.sinks) {
        sinks = dsinks = Tensor(DType::fp32, {p.heads_q});
        fill(sinks.view, Fill::normal, seed * 16 + 6);
    }
    if (p.ragged) {
        cu_q = detail::cu_seqlens(lengths_q);
        cu_kv = detail::cu_seqlens(lengths_kv);
    }
}

inline ForwardArgs Attention::forward_args() const {
    return {.q = q.view,
            .k = k.view,
            .v = v.view,
            .bias = bias.view,
            .alibi_slopes = slopes.view,
            .cu_seqlens_q = cu_q.view,
            .cu_seqlens_kv = cu_kv.view,
            .o = o.view,
            .lse = lse.view,
            .o_residual = o_residual.view,
            .sinks = sinks.view};
}

inline BackwardArgs Attention::backward_args() const {
    return {.q = q.view,
            .k = k.view,
            .v = v.view,
            .bias = bias.view,
            .alibi_slopes = slopes.view,
            .cu_seqlens_q = cu_q.view,
            .cu_seqlens_kv = cu_kv.view,
            .o = o.view,
            .lse = lse.view,
            .d_o = d_o.view,
            .dlse = dlse.view,
            .dq = dq.view,
            .dk = dk.view,
            .dv = dv.view,
            .dbias = dbias.view,
            .o_residual = o_residual.view,
            .sinks = sinks.view,
            .dsinks = dsinks.view};
}

inline Ran Attention::forward(const KernelInfo& kernel, const Run& run) {
    Ran refused;
    const auto how = detail::plan_for(problem, kernel, run, refused);
    if (!how) return noted(kernel, refused);
    for (Tensor* out : {&o, &lse, &o_residual}) out->poison();
    ForwardArgs wanted = forward_args();
    if (!how->o_residual) wanted.o_residual = {};
    try {
        device::run_on_host_tensors(*how, wanted, [&](const ForwardArgs& args, std::span<std::byte> workspace) {
            tessera::forward(*how, args, workspace, run.how);
        });
    } catch (const Error& e) {  // a tensor whose strides the kernel does not take: fa3 alone may
        if (e.code() != ErrorCode::unsupported) throw;
        EXPECT_EQ(kernel.schedule, Schedule::fa3) << kernel.name << ": " << e.what();
        return noted(kernel, {.reason = e.what()});
    }
    return noted(kernel, {.ran = true});
}

inline Ran Attention::backward(const KernelInfo& kernel, const Run& run) {
    Ran refused;
    const auto how = detail::plan_for(problem, kernel, run, refused);
    if (!how) return noted(kernel, refused);
    for (Tensor* out : {&dq, &dk, &dv, &dbias, &dsinks}) out->poison();
    try {
        device::run_on_host_tensors(*how, backward_args(),
                                    [&](const BackwardArgs& args, std::span<std::byte> workspace) {
                                        tessera::backward(*how, args, workspace, run.how);
                                    });
    } catch (const Error& e) {  // as above
        if (e.code() != ErrorCode::unsupported) throw;
        EXPECT_EQ(kernel.schedule, Schedule::fa3) << kernel.name << ": " << e.what();
        return noted(kernel, {.reason = e.what()});
    }
    return noted(kernel, {.ran = true});
}

inline void Attention::keep_residual() {
    o_residual = problem.ragged
                     ? Tensor(DType::int8, {problem.total_q, problem.heads_q, problem.head_dim_v})
                     : Tensor(DType::int8, {problem.batch, problem.len_q, problem.heads_q, problem.head_dim_v});
}

inline void Attention::prepare_backward() {
    const Plan how = plan(problem, {.backend = Backend::reference, .threads = 1});
    ForwardArgs wanted = forward_args();
    wanted.o_residual = {};
    tessera::forward(how, wanted, Workspace(how));
}

/// A dense Problem; `q` x `kv` tokens, `heads_q` / `heads_kv` heads.
inline Problem make_problem(std::int64_t batch, std::int64_t q, std::int64_t kv, std::int64_t heads_q,
                            std::int64_t heads_kv, std::int64_t head_dim, DType dtype = DType::fp32) {
    return {.dtype = dtype,
            .batch = batch,
            .len_q = q,
            .len_kv = kv,
            .heads_q = heads_q,
            .heads_kv = heads_kv,
            .head_dim = head_dim,
            .head_dim_v = head_dim};
}

/// A ragged Problem of sequences with these lengths.
inline Problem make_ragged(const std::vector<std::int64_t>& lengths_q, const std::vector<std::int64_t>& lengths_kv,
                           std::int64_t heads_q, std::int64_t heads_kv, std::int64_t head_dim,
                           DType dtype = DType::fp32) {
    const auto longest = [](const std::vector<std::int64_t>& l) {
        return l.empty() ? 0 : *std::max_element(l.begin(), l.end());
    };
    Problem p = make_problem(static_cast<std::int64_t>(lengths_q.size()), longest(lengths_q), longest(lengths_kv),
                             heads_q, heads_kv, head_dim, dtype);
    p.ragged = true;
    p.total_q = std::accumulate(lengths_q.begin(), lengths_q.end(), std::int64_t{0});
    p.total_kv = std::accumulate(lengths_kv.begin(), lengths_kv.end(), std::int64_t{0});
    return p;
}

/// Calls f(kernel) for every kernel of a pass, with its name in failure messages.
template <class F>
void for_each_kernel(Pass pass, F&& f) {
    for (const KernelInfo& kernel : kernels()) {
        if (kernel.pass != pass) continue;
        SCOPED_TRACE(kernel.name);
        f(kernel);
    }
}

/// Runs the forward on every kernel (of a backend) and compares with the reference, NaN for NaN.
inline void expect_forward_right(Attention& a, const std::optional<Backend>& only = {}) {
    for_each_kernel(Pass::forward, [&](const KernelInfo& kernel) {
        if ((only && kernel.backend != *only) || !a.forward(kernel)) return;
        const Report report = a.check_forward();
        EXPECT_TRUE(report.pass()) << a.problem.describe() << "\n" << report.describe();
    });
}

/// Runs the backward on every kernel and compares with the reference, NaN for NaN.
inline void expect_backward_right(Attention& a) {
    a.prepare_backward();
    for_each_kernel(Pass::backward, [&](const KernelInfo& kernel) {
        if (!a.backward(kernel)) return;
        const Report report = a.check_backward();
        EXPECT_TRUE(report.pass()) << a.problem.describe() << "\n" << report.describe();
    });
}

inline void expect_right(Attention& a) {
    expect_forward_right(a);
    expect_backward_right(a);
}

/// Head dims of q and k, and of v.
struct Dims {
    std::int64_t qk, v;
};

/// A dtype and its head_dims: every compiled head_dim in 16 bits, and a padded one; fp32 once.
struct Storage {
    DType dtype;
    Dims dims;

    Problem problem(std::int64_t batch, std::int64_t q, std::int64_t kv, std::int64_t heads_q,
                    std::int64_t heads_kv) const {
        Problem p = make_problem(batch, q, kv, heads_q, heads_kv, dims.qk, dtype);
        p.head_dim_v = dims.v;
        return p;
    }
};

inline std::vector<Storage> storages() {
    std::vector<Storage> all{{DType::fp32, {24, 24}}, {DType::fp32, {64, 64}}};
    for (const DType dtype : {DType::bf16, DType::fp16}) {
        for (const Dims dims : {Dims{24, 24}, {64, 64}, {96, 96}, {128, 128}, {192, 128}, {192, 192}, {256, 256}}) {
            all.push_back({dtype, dims});
        }
    }
    return all;
}

/// "bf16_192x128"
inline std::string name_of(const Storage& storage) {
    return std::string(name_of(storage.dtype)) + "_" + std::to_string(storage.dims.qk) + "x" +
           std::to_string(storage.dims.v);
}
inline std::string name_of_storage(const testing::TestParamInfo<Storage>& which) { return name_of(which.param); }
inline void PrintTo(const Storage& storage, std::ostream* out) { *out << name_of(storage); }

inline constexpr DType kStorageTypes[] = {DType::fp32, DType::bf16, DType::fp16};

}  // namespace tessera::check
