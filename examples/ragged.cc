// SPDX-License-Identifier: Apache-2.0
//
// A ragged batch (varlen): three sequences of 100, 1 and 37 tokens, packed one after another without padding. Each gets
// the same bits as in a call of its own.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "tessera/tessera.hpp"

using tessera::DType, tessera::Problem, tessera::TensorView;

constexpr std::int64_t kHeadsQ = 4, kHeadsKv = 2, kDim = 64;
const std::vector<std::int64_t> kLengths = {100, 1, 37};

std::vector<float> normal(std::int64_t size, unsigned seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> draw;
    std::vector<float> numbers(static_cast<std::size_t>(size));
    for (float& x : numbers) x = draw(random);
    return numbers;
}

/// Runs one sequence alone, from row `first` on: q, o [1, len, heads_q, head_dim], k, v [1, len, heads_kv, head_dim].
std::vector<float> alone(std::vector<float>& q, std::vector<float>& k, std::vector<float>& v, std::int64_t first,
                         std::int64_t len) {
    Problem problem = Problem::dense(1, len, kHeadsQ, kDim);
    problem.heads_kv = kHeadsKv;
    problem.mask.causal = tessera::Causal::bottom_right;
    const tessera::Plan plan = tessera::plan(problem);
    const auto part = [&](std::vector<float>& data, std::int64_t heads) {
        return tessera::dense_view(data.data() + first * heads * kDim, DType::fp32, {1, len, heads, kDim});
    };
    std::vector<float> o(static_cast<std::size_t>(len * kHeadsQ * kDim));
    const TensorView out = tessera::dense_view(o.data(), DType::fp32, {1, len, kHeadsQ, kDim});
    tessera::forward(plan, {.q = part(q, kHeadsQ), .k = part(k, kHeadsKv), .v = part(v, kHeadsKv), .o = out},
                     tessera::Workspace(plan));
    return o;
}

int main() {
    std::vector<std::int32_t> first_rows = {
        0};  // [batch + 1]: sequence b has the rows first_rows[b] .. first_rows[b + 1] - 1
    Problem problem;
    problem.ragged = true;
    problem.batch = static_cast<std::int64_t>(kLengths.size());
    for (const std::int64_t len : kLengths) {
        first_rows.push_back(first_rows.back() + static_cast<std::int32_t>(len));
        problem.len_q = problem.len_kv = std::max(problem.len_q, len);  // upper bounds for plan()
    }
    problem.total_q = problem.total_kv = first_rows.back();
    problem.heads_q = kHeadsQ, problem.heads_kv = kHeadsKv;
    problem.head_dim = problem.head_dim_v = kDim;
    problem.mask.causal = tessera::Causal::bottom_right;

    std::vector<float> q = normal(problem.total_q * kHeadsQ * kDim, 1), o(q.size());
    std::vector<float> k = normal(problem.total_kv * kHeadsKv * kDim, 2),
                       v = normal(problem.total_kv * kHeadsKv * kDim, 3);
    const auto view = [&](std::vector<float>& data, std::int64_t heads) {  // [total, heads, head_dim]
        return tessera::dense_view(data.data(), DType::fp32, {problem.total_q, heads, kDim});
    };
    const TensorView rows =
        tessera::dense_view(first_rows.data(), DType::int32, {static_cast<std::int64_t>(first_rows.size())});
    const tessera::Plan plan = tessera::plan(problem);
    std::printf("%s\n", plan.describe().c_str());
    tessera::forward(plan,
                     {.q = view(q, kHeadsQ),
                      .k = view(k, kHeadsKv),
                      .v = view(v, kHeadsKv),
                      .cu_seqlens_q = rows,
                      .cu_seqlens_kv = rows,
                      .o = view(o, kHeadsQ)},
                     tessera::Workspace(plan));
    for (std::size_t b = 0; b < kLengths.size(); ++b) {
        const std::vector<float> expected = alone(q, k, v, first_rows[b], kLengths[b]);
        const float* const got = o.data() + first_rows[b] * kHeadsQ * kDim;
        if (std::memcmp(got, expected.data(), expected.size() * sizeof(float)) != 0) {
            std::printf("sequence %zu differs from itself alone\n", b);
            return 1;
        }
    }
    std::printf("every sequence has the bits that it has alone\n");
    return 0;
}
