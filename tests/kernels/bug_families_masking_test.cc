// SPDX-License-Identifier: Apache-2.0
//
// Families of bugs that attention libraries really had: NaN, infinities and masks; zero, tiny and odd sizes. The
// numbers are those of the project's list of bugs; each name says where the family was seen.
#include <gtest/gtest.h>

#include <cfloat>
#include <cmath>
#include <limits>

#include "check/run_case.hpp"
#include "kernels/support.hpp"

namespace tessera::check::bug_families_masking_test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

bool all_finite(const Tensor& t) {
    bool finite = true;
    for_each_element(t.view, [&](std::int64_t, const std::byte* e) {
        finite = finite && std::isfinite(load_as_double(e, t.view.dtype));
    });
    return finite;
}

/// Once for each type of storage: most CUDA kernels take 16 bits only.
class bug_families_masking : public testing::TestWithParam<DType> {};
INSTANTIATE_TEST_SUITE_P(types, bug_families_masking, testing::ValuesIn(kStorageTypes),
                         [](const auto& which) { return std::string(name_of(which.param)); });

/// Runs a case on every kernel, between guard bands.
void expect_case_right(const Case& which) {
    CaseRunner runner(which);
    for (const KernelInfo& kernel : kernels()) {
        const Outcome outcome = runner.run(kernel);
        EXPECT_TRUE(outcome.pass()) << kernel.name << ": " << which.describe() << "\n" << outcome.report.describe();
    }
}

// flash-attention 334, 1052: columns past the end were not masked in the backward.
TEST_P(bug_families_masking, bug_1_3_tile_tails_at_every_size) {
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

// flash-attention 443
TEST(bug_families, bug_2_ragged_sequences_of_one_key) {
    for (const DType dtype : kStorageTypes) {
        const std::vector<std::int64_t> of_q{3, 1, 70};
        const std::vector<std::int64_t> of_kv{1, 1, 1};
        Attention a(make_ragged(of_q, of_kv, 2, 1, 40, dtype), 2, of_q, of_kv);
        expect_right(a);
    }
}

// cudnn-frontend 160, pytorch 139298: finite in, finite out, thousands of times, each kernel with its own LSE
TEST(bug_families, bug_6_soak) {
    const Random random(20260101);
    for (std::uint64_t i = 0; i < 400; ++i) {
        const auto draw = [&](std::uint64_t what, std::uint64_t high) {
            return static_cast<std::int64_t>(random.bits(i * 16 + what) % high) + 1;
        };
        Problem p = make_problem(1, draw(0, 40), draw(1, 90), 2, 1, draw(2, 20), kStorageTypes[i % 3]);
        if (i % 2 == 0) p.head_dim = p.head_dim_v = 8 * draw(2, 16);  // what TMA of a GPU takes
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

// flash-attention 1745, flashinfer 941, vllm 936: 0 * NaN in slots that no query sees
TEST_P(bug_families_masking, bug_7_poison_in_unused_rows) {
    const std::vector<std::int64_t> of_q{20, 30};
    const std::vector<std::int64_t> of_kv{33, 65};
    const Attention clean(make_ragged(of_q, of_kv, 2, 1, 24, GetParam()), 7, of_q, of_kv);
    // The window leaves the first keys of each sequence to nobody.
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

// pytorch 101967: the mask hides a key of NaN, the bias does not matter
TEST_P(bug_families_masking, bug_8_nan_key_behind_mask_and_bias) {
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

// pytorch 103963, 127055, 156487 and many more; 81: the same on the CPU, with left padding
TEST(bug_families, bug_10_81_left_padding_leaves_rows_empty) {
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

// pytorch 109517
TEST_P(bug_families_masking, bug_11_finfo_min_as_mask) {
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

// flashinfer 1178, 1050: whole tiles of -inf before and after the keys that count
TEST_P(bug_families_masking, bug_14_long_prefix_and_suffix_of_minus_infinity) {
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

// flash-attention (ROCm) b46c5875, a3a257c7: zero-length sequences, in the backward and beyond the end of memory
TEST_P(bug_families_masking, bug_15_17_zero_length_sequences) {
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

// flash-attention 1537, 1619: the path for one query per sequence, with sequences of none
TEST(bug_families, bug_20_ragged_decode_with_empty_sequences) {
    for (const DType dtype : kStorageTypes) {
        Case c{.id = "ragged_decode"};
        c.problem = make_problem(1, 0, 0, 8, 2, 64, dtype);
        c.problem.mask.causal = Causal::bottom_right;
        c.set_lengths({1, 0, 1, 1, 0}, {5, 80, 0, 300, 0});
        expect_case_right(c);
    }
}

// pytorch 141219 (SIGFPE), 92892
TEST_P(bug_families_masking, bug_22_empty_tensors) {
    for (std::int64_t which = 0; which < 5; ++which) {
        Case c{.id = "empty"};
        c.problem = make_problem(which == 0 ? 0 : 2, which == 1 ? 0 : 5, which == 2 ? 0 : 7, which == 3 ? 0 : 4,
                                 which == 3 ? 0 : 2, 8, GetParam());
        if (which == 4) c.problem.heads_q = 0;
        expect_case_right(c);
    }
}

// cuDNN 9.18.1: one key, where every gradient of a score is 0
TEST(bug_families, bug_23_one_key_backward) {
    for (const DType dtype : kStorageTypes) {
        Attention a(make_problem(2, 70, 1, 4, 2, 48, dtype));
        expect_right(a);
    }
}

// candle 3603: ragged causal batches of uneven lengths
TEST_P(bug_families_masking, bug_24_uneven_ragged_causal) {
    Case c{.id = "uneven"};
    c.problem = make_problem(1, 0, 0, 2, 1, 16, GetParam());
    c.problem.mask.causal = Causal::bottom_right;
    c.set_lengths({1, 473, 2, 65, 64, 63, 129}, {1, 473, 2, 65, 64, 63, 129});
    c.threads = 3;
    expect_case_right(c);
}

// sparkinfer 330: an instance that was never run. Every head_dim there is.
TEST(bug_families, bug_83_every_head_dim) {
    for (std::int64_t dim = 1; dim <= 256; dim += dim < 40 || dim > 250 ? 1 : dim % 8 == 0 ? 1 : dim % 8 == 1 ? 6 : 1) {
        Attention a(make_problem(1, 19, 21, 1, 1, dim, kStorageTypes[dim % 3]), static_cast<std::uint64_t>(dim));
        expect_right(a);
    }
}

}  // namespace
}  // namespace tessera::check::bug_families_masking_test
