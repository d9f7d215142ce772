// SPDX-License-Identifier: Apache-2.0
//
// Forward and backward on generated numbers: 2 sequences of 384 tokens, 8 query heads over 2 kv heads, causal. The
// library chooses the kernels; the backend `reference` (fp64) measures their errors.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
#include <random>
#include <vector>

#include "tessera/tessera.hpp"

using Numbers = std::vector<float>;
using tessera::Problem, tessera::TensorView;

constexpr std::int64_t kBatch = 2, kLen = 384, kHeadsQ = 8, kHeadsKv = 2, kDim = 64;

TensorView of_queries(Numbers& data) {
    return tessera::dense_view(data.data(), tessera::DType::fp32, {kBatch, kLen, kHeadsQ, kDim});
}
TensorView of_keys(Numbers& data) {
    return tessera::dense_view(data.data(), tessera::DType::fp32, {kBatch, kLen, kHeadsKv, kDim});
}

struct Inputs {
    Numbers q, k, v, d_o;
};
struct Results {
    Numbers o = Numbers(kBatch * kLen * kHeadsQ * kDim), dq = o;
    Numbers dk = Numbers(kBatch * kLen * kHeadsKv * kDim), dv = dk;
    Numbers lse = Numbers(kBatch * kHeadsQ * kLen);
};

Results attention(const Problem& problem, Inputs& in, tessera::PlanOptions options) {
    Results out;
    const TensorView lse = tessera::dense_view(out.lse.data(), tessera::DType::fp32, {kBatch, kHeadsQ, kLen});
    const TensorView q = of_queries(in.q), k = of_keys(in.k), v = of_keys(in.v), o = of_queries(out.o);

    options.pass = tessera::Pass::forward;
    const tessera::Plan forward = plan(problem, options);
    tessera::forward(forward, {.q = q, .k = k, .v = v, .o = o, .lse = lse}, tessera::Workspace(forward));

    options.pass = tessera::Pass::backward;
    const tessera::Plan backward = plan(problem, options);
    tessera::BackwardArgs args{.q = q, .k = k, .v = v, .o = o, .lse = lse, .d_o = of_queries(in.d_o)};
    args.dq = of_queries(out.dq), args.dk = of_keys(out.dk), args.dv = of_keys(out.dv);
    tessera::backward(backward, args, tessera::Workspace(backward));

    std::printf("%s\n%s\n", forward.describe().c_str(), backward.describe().c_str());
    return out;
}

double relative_rmse(const Numbers& got, const Numbers& expected) {
    double error = 0, norm = 0;
    for (std::size_t i = 0; i < got.size(); ++i) {
        error += std::pow(double{got[i]} - double{expected[i]}, 2);
        norm += std::pow(double{expected[i]}, 2);
    }
    return std::sqrt(error / norm);
}

int main() {
    Problem problem = Problem::dense(kBatch, kLen, kHeadsQ, kDim);
    problem.heads_kv = kHeadsKv;
    problem.mask.causal = tessera::Causal::bottom_right;

    const Results blank;
    Inputs in{blank.o, blank.dk, blank.dk, blank.o};  // the shapes of q, k, v and dO
    auto normal = [random = std::mt19937(1), n = std::normal_distribution<float>()]() mutable { return n(random); };
    for (Numbers* x : {&in.q, &in.k, &in.v, &in.d_o}) std::generate(x->begin(), x->end(), std::ref(normal));

    const Results got = attention(problem, in, {});
    const Results expected = attention(problem, in, {.backend = tessera::Backend::reference});
    const double o = relative_rmse(got.o, expected.o), dq = relative_rmse(got.dq, expected.dq);
    const double dk = relative_rmse(got.dk, expected.dk), dv = relative_rmse(got.dv, expected.dv);
    std::printf("relative RMSE against the reference: O %.1e, dQ %.1e, dK %.1e, dV %.1e\n", o, dq, dk, dv);
    return o <= 2e-6 && std::max({dq, dk, dv}) <= 1e-5 ? 0 : 1;
}
