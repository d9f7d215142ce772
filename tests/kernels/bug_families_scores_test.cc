// SPDX-License-Identifier: Apache-2.0
//
// Families of bugs that attention libraries had: LSE and merging, masks that are off by one, softcap, dropout,
// determinism. BUGS.md lists the families by the number at the end of a test's name.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "check/run_case.hpp"
#include "core/dropout.hpp"
#include "kernels/support.hpp"

namespace tessera::check::bug_families_scores_test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// Runs once for each dtype, since most CUDA kernels take 16 bits only.
class BugFamiliesScores : public testing::TestWithParam<DType> {};
INSTANTIATE_TEST_SUITE_P(Types, BugFamiliesScores, testing::ValuesIn(kStorageTypes),
                         [](const auto& which) { return std::string(name_of(which.param)); });

// With equal scores LSE = ln(keys) + score.
TEST(BugFamilies, lse_is_the_natural_logarithm_bug_38_39) {
    for (const DType dtype : kStorageTypes) {
        for (const std::int64_t keys : {1, 2, 64, 1000, 1537}) {
            Problem p = make_problem(1, 3, keys, 2, 1, 16, dtype);
            for (const double bias : {0.0, -2.5}) {  // 0: no bias, so that fa3 takes it, too
                p.bias = bias != 0;
                Attention a(p);
                a.q.fill_value(0);
                if (p.bias) a.bias.fill_value(bias);
                for_each_kernel(Pass::forward, [&](const KernelInfo& kernel) {
                    if (!a.forward(kernel)) return;
                    EXPECT_NEAR(a.lse.get(0, 1, 2), std::log(static_cast<double>(keys)) + bias, 6e-6)
                        << keys << " keys";
                });
            }
        }
    }
}

// +inf would break the merging of partial results.
TEST_P(BugFamiliesScores, lse_of_an_empty_row_is_minus_infinity_bug_40_41) {
    Problem p = make_problem(2, 70, 5, 2, 1, 16, GetParam());
    p.mask.causal = Causal::bottom_right;
    Attention a(p);
    for_each_kernel(Pass::forward, [&](const KernelInfo& kernel) {
        if (!a.forward(kernel)) return;
        for (std::int64_t i = 0; i < 65; ++i) ASSERT_EQ(a.lse.get(1, 1, i), -kInfinity);
        for (std::int64_t i = 65; i < 70; ++i) ASSERT_TRUE(std::isfinite(a.lse.get(1, 1, i)));
    });
}

/// Counts the visible keys of a query by equal scores: LSE = ln(count), and O = the mean of their codes.
void expect_keys_seen(const Problem& p, std::int64_t (*first)(const Problem&, std::int64_t),
                      std::int64_t (*last)(const Problem&, std::int64_t)) {
    Attention a(p);
    const double rounding = p.dtype == DType::fp32 ? 0 : p.dtype == DType::bf16 ? 0x1p-8 : 0x1p-11;  // of O
    a.q.fill_value(0);
    for (std::int64_t j = 0; j < p.len_kv; ++j) {
        for (std::int64_t c = 0; c < p.head_dim_v; ++c) a.v.set(static_cast<double>(j), 0, j, 0, c);
    }
    for_each_kernel(Pass::forward, [&](const KernelInfo& kernel) {
        if (!a.forward(kernel)) return;
        for (std::int64_t i = 0; i < p.len_q; ++i) {
            const std::int64_t low = std::max<std::int64_t>(first(p, i), 0);
            const std::int64_t high = std::min(last(p, i), p.len_kv - 1);
            const auto count = static_cast<double>(std::max<std::int64_t>(high - low + 1, 0));
            if (count == 0) {
                ASSERT_EQ(a.lse.get(0, 0, i), -kInfinity) << p.describe() << " query " << i;
                continue;
            }
            ASSERT_NEAR(a.lse.get(0, 0, i), std::log(count), 1e-5) << p.describe() << " query " << i;
            ASSERT_NEAR(a.o.get(0, i, 0, 0), 0.5 * static_cast<double>(low + high), 1e-3 + rounding * high)
                << p.describe() << " query " << i;
        }
    });
}

TEST_P(BugFamiliesScores, causal_diagonal_is_top_left_or_bottom_right_bug_46) {
    const auto zero = [](const Problem&, std::int64_t) { return std::int64_t{0}; };
    for (const std::int64_t q : {1, 5, 64, 65, 130}) {
        for (const std::int64_t kv : {1, 5, 64, 65, 130}) {
            Problem p = make_problem(1, q, kv, 1, 1, 8, GetParam());
            p.mask.causal = Causal::bottom_right;
            expect_keys_seen(p, zero, [](const Problem& r, std::int64_t i) { return i + r.len_kv - r.len_q; });
            p.mask.causal = Causal::top_left;
            expect_keys_seen(p, zero, [](const Problem&, std::int64_t i) { return i; });
        }
    }
}

TEST_P(BugFamiliesScores, window_ends_are_inclusive_bug_48_49) {
    for (const std::int64_t q : {1, 3, 70}) {
        for (const std::int64_t left : {0, 1, 63, 64, 65, 500}) {
            for (const std::int64_t right : {0, 1, 64}) {
                Problem p = make_problem(1, q, 140, 1, 1, 8, GetParam());
                p.mask = {.window_left = left, .window_right = right};
                expect_keys_seen(
                    p, [](const Problem& r, std::int64_t i) { return i + r.len_kv - r.len_q - r.mask.window_left; },
                    [](const Problem& r, std::int64_t i) { return i + r.len_kv - r.len_q + r.mask.window_right; });
            }
        }
    }
}

// With one key LSE is the capped score, in closed form.
TEST_P(BugFamiliesScores, softcap_has_its_closed_form_bug_50) {
    for (const double cap : {0.5, 8.0, 50.0}) {
        for (const double score : {-400.0, -7.0, -0.01, 0.0, 0.3, 20.0, 1e6}) {
            Problem p = make_problem(1, 1, 1, 1, 1, 1, GetParam());
            p.scale = 1;
            p.softcap = cap;
            Attention a(p);
            a.q.fill_value(score);
            a.k.fill_value(1);
            const double stored = a.q.get(0, 0, 0, 0);
            if (!std::isfinite(stored)) continue;  // fp16 does not hold 10^6
            for_each_kernel(Pass::forward, [&](const KernelInfo& kernel) {
                if (!a.forward(kernel)) return;
                const double capped = cap * std::tanh(stored / cap);
                EXPECT_NEAR(a.lse.get(0, 0, 0), capped, 2e-6 + std::abs(capped) * 0x1p-20)
                    << "cap " << cap << " score " << score;
            });
        }
    }
}

TEST(BugFamilies, softcap_in_the_backward_of_a_ragged_batch_bug_51) {
    for (const DType dtype : kStorageTypes) {
        const std::vector<std::int64_t> of_q{70, 0, 5, 33};
        const std::vector<std::int64_t> of_kv{65, 9, 1, 80};
        Problem p = make_ragged(of_q, of_kv, 4, 2, 32, dtype);
        p.softcap = 3;
        p.scale = 1;
        p.mask.causal = Causal::bottom_right;
        Attention a(p, 4, of_q, of_kv);
        expect_right(a);
    }
}

TEST(BugFamilies, alibi_slopes_must_be_fp32_bug_52) {
    Problem p = make_problem(1, 4, 4, 2, 2, 8, DType::fp16);
    p.alibi = true;
    Attention a(p);
    a.slopes = Tensor(DType::fp16, {2});
    a.slopes.fill_value(0.25);
    try {
        const Plan how = plan(p);
        forward(how, a.forward_args(), Workspace(how));
        ADD_FAILURE() << "fp16 slopes were accepted";
    } catch (const Error& e) {
        EXPECT_EQ(e.argument(), "alibi_slopes");
    }
}

/// Inputs that show the dropout mask in O: equal scores, and values that are one-hot for as many keys as there are
/// columns, from `first` on. Column j of O is then not 0 if key first + j was kept.
struct DropoutProbe {
    std::int64_t head_dim;  ///< 64 or 128, which all kernels with dropout take
    std::vector<std::int64_t> firsts;
};
const DropoutProbe kDropoutProbes[] = {{64, {0, 64, 128, 136}}, {128, {0, 72}}, {136, {64}}};

Attention dropout_probe(const Dropout& dropout, std::int64_t head_dim, std::int64_t first, DType dtype) {
    Problem p = make_problem(2, 150, 200, 2, 2, head_dim, dtype);
    p.dropout = dropout;
    Attention a(p);
    a.q.fill_value(0);
    a.v.fill_value(0);
    for (std::int64_t i = 0; i < 2 * 2 * head_dim; ++i) {
        const std::int64_t column = i % head_dim;
        a.v.set(1, i / head_dim / 2, first + column, i / head_dim % 2, column);
    }
    return a;
}

/// Expects every weight to be 0 or 1 / (keys * keep), according to its Philox word. Counts the kept ones by column.
void expect_philox(const Attention& a, std::int64_t first, std::vector<double>& kept_of_column) {
    const Problem& p = a.problem;
    const double keep = 1 - p.dropout.probability;
    const double rounding = p.dtype == DType::fp32 ? 1e-5 : 0x1p-7;  // of P and of O
    const KeepRule rule(p.dropout.seed, keep_threshold(p.dropout.probability));
    for (std::int64_t b = 0; b < p.batch; ++b) {
        for (std::int64_t h = 0; h < p.heads_q; ++h) {
            for (std::int64_t i = 0; i < p.len_q; ++i) {
                for (std::int64_t c = 0; c < p.head_dim; ++c) {
                    const int bit = bit_in_patch(i, first + c);
                    const bool kept =
                        (kept_weights(rule, dropout_patch(b, h, i, first + c), 1U << bit) >> bit & 1) != 0;
                    const double weight = a.o.get(b, i, h, c) * static_cast<double>(p.len_kv) * keep;
                    ASSERT_NEAR(weight, kept ? 1 : 0, kept ? rounding : 0)
                        << "batch " << b << ", head " << h << ", query " << i << ", key " << first + c;
                    kept_of_column[static_cast<std::size_t>(c)] += kept ? 1 : 0;
                }
            }
        }
    }
}

TEST_P(BugFamiliesScores, dropout_keeps_what_it_says_bug_53) {
    for (const double probability : {0.1, 0.5, 0.9}) {
        for (const DropoutProbe& probe : kDropoutProbes) {
            for (const std::int64_t first : probe.firsts) {
                Attention a = dropout_probe({probability, 1234567890123456789u}, probe.head_dim, first, GetParam());
                for_each_kernel(Pass::forward, [&](const KernelInfo& kernel) {
                    if (!a.forward(kernel)) return;
                    std::vector<double> kept(static_cast<std::size_t>(probe.head_dim), 0);
                    ASSERT_NO_FATAL_FAILURE(expect_philox(a, first, kept)) << a.problem.describe();
                    // Chi-square over the keys. Its bounds are exceeded once in 10,000 seeds.
                    const double n = 600;
                    const double keep = 1 - probability;
                    double chi_square = 0;
                    for (const double count : kept) {
                        chi_square += (count - n * keep) * (count - n * keep) / (n * keep * (1 - keep));
                    }
                    const auto degrees = static_cast<double>(probe.head_dim);
                    EXPECT_NEAR(chi_square, degrees, 4 * std::sqrt(2 * degrees) + 4);
                });
            }
        }
    }
}

// The backward has the forward's mask, and another seed gives another mask.
TEST_P(BugFamiliesScores, dropout_in_the_backward_and_by_the_seed_bug_53) {
    Problem p = make_problem(2, 70, 90, 4, 2, 24, GetParam());
    p.dropout = {.probability = 0.4, .seed = 99};
    p.mask.causal = Causal::bottom_right;
    Attention a(p);
    expect_right(a);
    Attention b = a;
    b.problem.dropout.seed = 100;
    for_each_kernel(Pass::forward, [&](const KernelInfo& kernel) {
        if (!a.forward(kernel) || !b.forward(kernel)) return;
        EXPECT_FALSE(a.o.same_bits(b.o));
        EXPECT_TRUE(a.lse.same_bits(b.lse));  // LSE is of the weights before dropout
    });
}

// A row of 1600 keys spans more than three blocks of 512 keys.
TEST(BugFamilies, long_rows_do_not_depend_on_neighbours_bug_69) {
    Problem one = make_problem(1, 3, 1600, 4, 2, 32, DType::bf16);
    one.mask.causal = Causal::bottom_right;
    Problem many = one;
    many.batch = 5;
    Attention alone(one, 3);
    Attention among(many, 8);
    for (auto which : {&Attention::q, &Attention::k, &Attention::v}) {
        Tensor& to = among.*which;
        const Tensor& from = alone.*which;
        std::copy(from.memory.begin(), from.memory.end(),
                  to.memory.begin() + static_cast<std::ptrdiff_t>(3 * from.memory.size()));
    }
    for_each_kernel(Pass::forward, [&](const KernelInfo& kernel) {
        if (!alone.forward(kernel)) return;
        for (const int threads : {1, 2, 7}) {
            ASSERT_TRUE(among.forward(kernel, {.threads = threads}));
            const auto first = among.o.memory.begin() + static_cast<std::ptrdiff_t>(3 * alone.o.memory.size());
            EXPECT_TRUE(std::equal(alone.o.memory.begin(), alone.o.memory.end(), first)) << threads << " threads";
        }
    });
}

// The call is GQA, ragged and windowed at once.
TEST(BugFamilies, backward_is_deterministic_bug_71) {
    const std::vector<std::int64_t> of_q{200, 0, 65, 300};
    const std::vector<std::int64_t> of_kv{300, 20, 64, 200};
    Problem p = make_ragged(of_q, of_kv, 6, 2, 24);
    p.mask = {.causal = Causal::bottom_right, .window_left = 100};
    Attention a(p, 5, of_q, of_kv);
    a.prepare_backward();
    for_each_kernel(Pass::backward, [&](const KernelInfo& kernel) {
        if (!a.backward(kernel)) return;
        const int repeats = kernel.backend == Backend::reference ? 2 : 30;
        for (int repeat = 0; repeat < repeats; ++repeat) {
            Attention again = a;
            ASSERT_TRUE(again.backward(kernel, {.threads = 1 + repeat % 4}));
            ASSERT_TRUE(again.dq.same_bits(a.dq) && again.dk.same_bits(a.dk) && again.dv.same_bits(a.dv))
                << "run " << repeat;
        }
    });
}

}  // namespace
}  // namespace tessera::check::bug_families_scores_test
