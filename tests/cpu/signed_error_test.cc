// SPDX-License-Identifier: Apache-2.0
//
// The signed error of bf16 forwards, on every matrix unit of this processor: the rounding of weights that rows have in
// common must not be biased.
#include <cmath>
#include <vector>

#include "kernels/support.hpp"
#include "units.hpp"

namespace tessera::cpu::matrix::signed_error_test {
namespace {

using check::Attention;

void copy(const check::Tensor& from, check::Tensor& to) {
    for (std::int64_t i = 0; i < from.view.size(); ++i) {
        store_from_double(to.memory.data() + i * size_of(to.view.dtype), to.view.dtype,
                          load_as_double(from.memory.data() + i * size_of(from.view.dtype), from.view.dtype));
    }
}

/// Mean of sign(O) * error in RMS errors.
double signed_error(const Attention& a, const Attention& right) {
    double sum = 0, squares = 0;
    for (std::int64_t i = 0; i < a.o.view.size(); ++i) {
        const double gold = load_as_double(right.o.memory.data() + i * 4, DType::fp32);
        const double error = load_as_double(a.o.memory.data() + i * 2, DType::bf16) - gold;
        sum += gold < 0 ? -error : error;
        squares += error * error;
    }
    const auto n = static_cast<double>(a.o.view.size());
    return sum / n / std::sqrt(squares / n);
}

struct Inputs {
    const char* name;
    Problem problem;
    bool like_keys = false;
};

std::vector<Inputs> setups() {
    Problem p = check::make_problem(2, 66, 66, 3, 3, 64, DType::bf16);
    std::vector<Inputs> all = {{"plain", p}};
    p.scale = 1.7;
    p.softcap = 0.5;
    all.push_back({"saturated softcap: weights are 1 or 1 / e", p});
    Problem few = check::make_problem(16, 8, 66, 3, 3, 64, DType::bf16);  // queries as rows
    few.scale = 1.7;
    few.softcap = 0.5;
    all.push_back({"saturated softcap, few queries", few});
    p = check::make_problem(2, 66, 66, 3, 3, 64, DType::bf16);
    p.alibi = true;
    all.push_back({"ALiBi, all keys alike", p, true});
    p.dropout = {.probability = 0.3, .seed = 7};
    all.push_back({"ALiBi, all keys alike, dropout", p, true});
    p.alibi = false;
    p.scale = 0;
    all.push_back({"scale 0, dropout", p});
    return all;
}

/// The bias over 20 seeds, in standard deviations of their mean.
double sigmas(const Inputs& setup, const KernelInfo& kernel) {
    constexpr int kSeeds = 20;
    double sum = 0, squares = 0;
    for (std::uint64_t seed = 1; seed <= kSeeds; ++seed) {
        Attention a(setup.problem, seed);
        for (std::int64_t b = 0; setup.like_keys && b < setup.problem.batch; ++b) {
            for (std::int64_t j = 1; j < setup.problem.len_kv; ++j) {
                for (std::int64_t h = 0; h < setup.problem.heads_kv; ++h) {
                    for (std::int64_t c = 0; c < setup.problem.head_dim; ++c) a.k.set(a.k.get(b, 0, h, c), b, j, h, c);
                }
            }
        }
        Problem in_fp32 = setup.problem;
        in_fp32.dtype = DType::fp32;
        Attention right(in_fp32, seed);
        copy(a.q, right.q);
        copy(a.k, right.k);
        copy(a.v, right.v);
        right.prepare_backward();  // by the reference
        EXPECT_TRUE(a.forward(kernel));
        const double mean = signed_error(a, right);
        sum += mean;
        squares += mean * mean;
    }
    const double mean = sum / kSeeds;
    const double deviation = std::sqrt((squares / kSeeds - mean * mean) * kSeeds / (kSeeds - 1));
    return mean / (deviation / std::sqrt(kSeeds));
}

TEST(SignedError, is_noise_where_rows_share_few_weights) {
    for (const Unit chosen : {Unit::none, Unit::dot, Unit::amx}) {
        if (!has_unit(chosen)) continue;
        const OnlyUnit only(chosen);
        check::for_each_kernel(Pass::forward, [&](const KernelInfo& kernel) {
            if (kernel.backend != Backend::cpu) return;
            for (const Inputs& setup : setups()) {
                EXPECT_LT(std::abs(sigmas(setup, kernel)), 5) << setup.name << ", unit " << static_cast<int>(chosen);
            }
        });
    }
}

}  // namespace
}  // namespace tessera::cpu::matrix::signed_error_test
