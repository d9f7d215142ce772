// SPDX-License-Identifier: Apache-2.0
//
// Families of bugs that attention libraries had: NaN, infinities and masks; zero, tiny and odd sizes. BUGS.md lists the
// families by the number at the end of a test's name.
#include <gtest/gtest.h>

#include <cfloat>
#include <cmath>
#include <limits>

#include "check/run_case.hpp"
#include "kernels/support.hpp"

namespace tessera::check::bug_families_masking_test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// Runs once for each dtype, since most CUDA kernels take 16 bits only.
class BugFamiliesMasking : public testing::TestWithParam<DType> {};
INSTANTIATE_TEST_SUITE_P(Types, BugFamiliesMasking, testing::ValuesIn(kStorageTypes),
                         [](const auto& which) { return std::string(name_of(which.param)); });

/// Runs a case on every kernel, between guard bands.
void expect_case_right(const Case& which) {
    CaseRunner runner(which);
    for (const KernelInfo& kernel : kernels()) {
        const Outcome outcome = runner.run(kernel);
        EXPECT_TRUE(outcome.pass()) << kernel.name << ": " << which.describe() << "\n" << outcome.report.describe();
    }
}

TEST_P(BugFamiliesMasking, keys_past_the_end_of_a_tile_count_for_nothing_bug_1_3) {
    for (std::int64_t q = 1; q <= 17; ++q) {
        for (std::int64_t kv = 1; kv <= 17; kv += q % 3 + 1) {
            for (const double size : {1.0, 3.0, 30.0}) {
                Attention a(make_problem(1, q, kv, 1, 1, 16, GetParam()), static_cast<std::uint64_t>(q * 17 + kv));
                a.q.scale_by(size);
                a.problem.mask.causal = kv % 2 == 0 ? Causal::bottom_right : Causal::none;
                expect_right(a);
            }
        }
    }
}

TEST(BugFamilies, ragged_sequences_of_one_key_bug_2) {
    for (const DType dtype : kStorageTypes) {
        const std::vector<std::int64_t> of_q{3, 1, 70};
        const std::vector<std::int64_t> of_kv{1, 1, 1};
        Attention a(make_ragged(of_q, of_kv, 2, 1, 40, dtype), 2, of_q, of_kv);
        expect_right(a);
    }
}

// Finite inputs give finite outputs in hundreds of calls. Each backward takes the LSE of its own forward.
TEST(BugFamilies, finite_inputs_of_random_calls_give_finite_results_bug_6) {
    const Random random(20260101);
    for (std::uint64_t i = 0; i < 400; ++i) {
        const auto draw = [&](std::uint64_t what, std::uint64_t high) {
            return static_cast<std::int64_t>(random.bits(i * 16 + what) % high) + 1;
        };
        Problem p = make_problem(1, draw(0, 40), draw(1, 90), 2, 1, draw(2, 20), kStorageTypes[i % 3]);
        if (i % 2 == 0) p.head_dim = p.head_dim_v = 8 * draw(2, 16);  // TMA needs a multiple of 8
        p.mask.causal = static_cast<Causal>(draw(3, 3) - 1);
        Attention a(p, i);
        a.q.scale_by(std::exp2(static_cast<double>(draw(4, 12)) - 6));
        for (const KernelInfo& forward : kernels()) {
            if (forward.pass != Pass::forward || !a.forward(forward)) continue;
            ASSERT_TRUE(all_finite(a.o)) << forward.name << " " << p.describe();
            for (const KernelInfo& backward : kernels()) {
                const bool pair = backward.backend == forward.backend && backward.schedule == forward.schedule;
                if (backward.pass != Pass::backward || !pair || !a.backward(backward)) continue;
                ASSERT_TRUE(all_finite(a.dq) && all_finite(a.dk) && all_finite(a.dv))
                    << backward.name << " " << p.describe();
            }
        }
    }
}

// A weight of 0 times NaN is NaN, so hidden keys and values must not be multiplied at all.
TEST_P(BugFamiliesMasking, nan_in_keys_that_no_query_sees_reaches_nothing_bug_7) {
    const std::vector<std::int64_t> of_q{20, 30};
    const std::vector<std::int64_t> of_kv{33, 65};
    const Attention clean(make_ragged(of_q, of_kv, 2, 1, 24, GetParam()), 7, of_q, of_kv);
    // No query sees the first keys of each sequence, by the window.
    Attention a = clean;
    a.problem.mask.window_left = 5;
    Attention b = a;
    for (const double poison : {std::nan(""), kInfinity, -kInfinity}) {
        for (Tensor Attention::*which : {&Attention::k, &Attention::v}) {
            Attention poisoned = a;
            for (std::int64_t j : {0, 1, 2, 3, 4, 5, 6, 33, 34, 40, 59}) {
                for (std::int64_t c = 0; c < 24; ++c) (poisoned.*which).set(poison, j, 0, c);
            }
            for_each_kernel(Pass::forward, [&](const KernelInfo& kernel) {
                if (!poisoned.forward(kernel) || !b.forward(kernel)) return;
                EXPECT_TRUE(poisoned.o.same_bits(b.o) && poisoned.lse.same_bits(b.lse)) << poison;
            });
        }
    }
}

// The mask hides a key of NaN, even if the bias adds something there.
TEST_P(BugFamiliesMasking, nan_key_behind_mask_and_bias_reaches_nothing_bug_8) {
    Problem p = make_problem(1, 40, 80, 1, 1, 16, GetParam());
    p.mask.causal = Causal::top_left;
    p.bias = true;
    Attention a(p);
    Attention b = a;
    for (std::int64_t j = 40; j < 80; ++j) a.k.set(std::nan(""), 0, j, 0, 3);
    for (std::int64_t i = 0; i < 40; ++i) {
        for (std::int64_t j = 40; j < 80; ++j) a.bias.set(j % 2 == 0 ? -kInfinity : std::nan(""), 0, 0, i, j);
    }
    for_each_kernel(Pass::forward, [&](const KernelInfo& kernel) {
        if (!a.forward(kernel) || !b.forward(kernel)) return;
        EXPECT_TRUE(a.o.same_bits(b.o) && a.lse.same_bits(b.lse));
    });
}

TEST(BugFamilies, left_padding_leaves_rows_empty_bug_10_81) {
    for (const DType dtype : kStorageTypes) {
        Problem p = make_problem(2, 90, 90, 2, 1, 24, dtype);
        p.mask.causal = Causal::bottom_right;
        p.bias = p.bias_gradient = true;
        Attention a(p);
        for (std::int64_t b = 0; b < 2; ++b) {
            for (std::int64_t i = 0; i < 2 * 90 * 90; ++i) {
                if (i % 90 < 30 + 40 * b) a.bias.set(-kInfinity, b, i / 8100, i / 90 % 90, i % 90);
            }
        }
        expect_right(a);
        for_each_kernel(Pass::forward, [&](const KernelInfo& kernel) {
            if (!a.forward(kernel)) return;
            EXPECT_EQ(a.lse.get(1, 1, 69), -kInfinity);
            EXPECT_EQ(a.o.get(1, 69, 1, 3), 0);
            EXPECT_TRUE(std::isfinite(a.lse.get(1, 1, 70)));
        });
    }
}

TEST_P(BugFamiliesMasking, lowest_finite_bias_as_a_mask_bug_11) {
    for (const double low : {-static_cast<double>(FLT_MAX), -1e30, -kInfinity}) {
        Problem p = make_problem(1, 40, 130, 1, 1, 16, GetParam());
        p.bias = p.bias_gradient = true;
        Attention a(p);
        for (std::int64_t i = 0; i < 40; ++i) {
            for (std::int64_t j = 0; j < 130; ++j) a.bias.set(j >= 3 * i ? low : 0, 0, 0, i, j);
        }
        expect_right(a);
    }
}

// Whole tiles of -inf stand before and after the keys that count.
TEST_P(BugFamiliesMasking, long_prefix_and_suffix_of_minus_infinity_bug_14) {
    Problem p = make_problem(1, 5, 1600, 1, 1, 16, GetParam());
    p.bias = true;
    Attention a(p);
    for (std::int64_t i = 0; i < 5; ++i) {
        for (std::int64_t j = 0; j < 1600; ++j) a.bias.set(j == 800 + 90 * i ? 0.5 : -kInfinity, 0, 0, i, j);
    }
    expect_right(a);
    for_each_kernel(Pass::forward, [&](const KernelInfo& kernel) {
        if (!a.forward(kernel)) return;
        for (std::int64_t i = 0; i < 5; ++i) EXPECT_EQ(a.o.get(0, i, 0, 2), a.v.get(0, 800 + 90 * i, 0, 2));
    });
}

TEST_P(BugFamiliesMasking, zero_length_sequences_bug_15_17) {
    for (const auto& of_q : std::vector<std::vector<std::int64_t>>{{0, 7, 0}, {5, 0, 70}, {0, 0, 0}}) {
        for (const auto& of_kv : std::vector<std::vector<std::int64_t>>{{9, 0, 3}, {0, 65, 0}, {0, 0, 0}}) {
            Case c{.id = "zero_length"};
            c.problem = make_problem(1, 0, 0, 4, 2, 24, GetParam());
            c.set_lengths(of_q, of_kv);
            c.dlse = true;
            c.threads = 2;
            expect_case_right(c);
        }
    }
}

// Some kernels have a separate path for one query per sequence. Some sequences here have none.
TEST(BugFamilies, ragged_decode_with_empty_sequences_bug_20) {
    for (const DType dtype : kStorageTypes) {
        Case c{.id = "ragged_decode"};
        c.problem = make_problem(1, 0, 0, 8, 2, 64, dtype);
        c.problem.mask.causal = Causal::bottom_right;
        c.set_lengths({1, 0, 1, 1, 0}, {5, 80, 0, 300, 0});
        expect_case_right(c);
    }
}

TEST_P(BugFamiliesMasking, empty_tensors_are_calls_like_others_bug_22) {
    for (std::int64_t which = 0; which < 5; ++which) {
        Case c{.id = "empty"};
        c.problem = make_problem(which == 0 ? 0 : 2, which == 1 ? 0 : 5, which == 2 ? 0 : 7, which == 3 ? 0 : 4,
                                 which == 3 ? 0 : 2, 8, GetParam());
        if (which == 4) c.problem.heads_q = 0;
        expect_case_right(c);
    }
}

// With one key every gradient of a score is 0.
TEST(BugFamilies, backward_of_one_key_bug_23) {
    for (const DType dtype : kStorageTypes) {
        Attention a(make_problem(2, 70, 1, 4, 2, 48, dtype));
        expect_right(a);
    }
}

TEST_P(BugFamiliesMasking, ragged_causal_batches_of_uneven_lengths_bug_24) {
    Case c{.id = "uneven"};
    c.problem = make_problem(1, 0, 0, 2, 1, 16, GetParam());
    c.problem.mask.causal = Causal::bottom_right;
    c.set_lengths({1, 473, 2, 65, 64, 63, 129}, {1, 473, 2, 65, 64, 63, 129});
    c.threads = 3;
    expect_case_right(c);
}

// Every head_dim runs, so every compiled instance does.
TEST(BugFamilies, every_head_dim_is_right_bug_83) {
    for (std::int64_t dim = 1; dim <= 256; dim += dim < 40 || dim > 250 ? 1 : dim % 8 == 0 ? 1 : dim % 8 == 1 ? 6 : 1) {
        Attention a(make_problem(1, 19, 21, 1, 1, dim, kStorageTypes[dim % 3]), static_cast<std::uint64_t>(dim));
        expect_right(a);
    }
}

}  // namespace
}  // namespace tessera::check::bug_families_masking_test
