// SPDX-License-Identifier: Apache-2.0
//
// The contract's table of special values, for every kernel: NaN goes where the mask lets it, and nowhere else.
#include <gtest/gtest.h>

#include <cfloat>
#include <cmath>
#include <limits>

#include "kernels/support.hpp"

namespace tessera::check {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
const double kNan = std::nan("");
constexpr double kPoisons[] = {std::numeric_limits<double>::quiet_NaN(), kInfinity, -kInfinity};

/// Every query sees the first keys only; the last `hidden` keys are out of sight.
Problem with_hidden_keys(DType dtype, std::int64_t hidden) {
    Problem p = make_problem(1, 40, 40 + hidden, 2, 1, 24, dtype);
    p.mask.causal = Causal::top_left;
    return p;
}

bool all_finite(const Tensor& t) {
    bool finite = true;
    for_each_element(t.view, [&](std::int64_t, const std::byte* e) {
        finite = finite && std::isfinite(load_as_double(e, t.view.dtype));
    });
    return finite;
}

TEST(special_values, rows_without_keys) {
    for (const DType dtype : kStorageTypes) {
        Problem p = make_problem(1, 150, 70, 2, 1, 24, dtype);
        p.mask.causal = Causal::bottom_right;  // the first 80 queries see nothing
        Attention a(p);
        a.dlse = Tensor(DType::fp32, {1, 2, 150});
        a.dlse.fill_value(1);
        for_each_kernel(Pass::forward, [&](const KernelInfo& kernel) {
            if (!a.forward(kernel)) return;
            for (std::int64_t i = 0; i < 80; ++i) {
                EXPECT_EQ(a.lse.get(0, 1, i), -kInfinity);
                for (std::int64_t c = 0; c < 24; ++c) ASSERT_EQ(a.o.get(0, i, 1, c), 0);
            }
        });
        a.prepare_backward();
        for_each_kernel(Pass::backward, [&](const KernelInfo& kernel) {
            if (!a.backward(kernel)) return;
            for (std::int64_t i = 0; i < 80 * 24; ++i) ASSERT_EQ(a.dq.get(0, i / 24, 0, i % 24), 0);
        });
        expect_right(a);
    }
}

TEST(special_values, nan_in_a_visible_key_value_or_query) {
    for (const DType dtype : kStorageTypes) {
        for (Tensor Attention::*which : {&Attention::q, &Attention::k, &Attention::v}) {
            Problem p = make_problem(1, 70, 70, 2, 2, 24, dtype);
            p.mask.causal = Causal::bottom_right;
            Attention a(p);
            (a.*which).set(kNan, 0, 33, 1, 5);
            expect_right(a);
            for_each_kernel(Pass::forward, [&](const KernelInfo& kernel) {
                if (!a.forward(kernel)) return;
                EXPECT_FALSE(std::isnan(a.o.get(0, 32, 1, 5)));  // sees up to key 32
                EXPECT_TRUE(std::isnan(a.o.get(0, 33, 1, 5)));
                EXPECT_FALSE(std::isnan(a.o.get(0, 33, 0, 5)));  // the other head
                EXPECT_EQ(std::isnan(a.lse.get(0, 1, 33)), which != &Attention::v);
            });
        }
    }
}

TEST(special_values, infinity_in_a_visible_value) {
    for (const DType dtype : kStorageTypes) {
        Attention a(make_problem(1, 30, 70, 1, 1, 16, dtype));
        a.q.scale_by(0.25);  // no weight so small that fp32 has none
        a.v.set(kInfinity, 0, 20, 0, 3);
        a.v.set(-kInfinity, 0, 50, 0, 4);
        a.v.set(kInfinity, 0, 10, 0, 5);
        a.v.set(-kInfinity, 0, 60, 0, 5);  // both signs: NaN
        expect_forward_right(a);
    }
}

TEST(special_values, nan_in_the_output_gradient) {
    for (const DType dtype : kStorageTypes) {
        Problem p = make_problem(1, 70, 70, 2, 2, 24, dtype);
        p.mask.causal = Causal::bottom_right;
        Attention a(p);
        a.d_o.set(kNan, 0, 40, 1, 7);
        expect_backward_right(a);
        Attention b(p);
        b.dlse = Tensor(DType::fp32, {1, 2, 70});
        b.dlse.fill_value(0.5);
        b.dlse.set(kNan, 0, 0, 12);
        expect_backward_right(b);
    }
}

/// What no query sees changes no bit, whatever it holds.
TEST(special_values, poison_out_of_sight_changes_nothing) {
    for (const DType dtype : kStorageTypes) {
        for (const std::int64_t hidden : {1, 30, 200}) {
            Attention clean(with_hidden_keys(dtype, hidden));
            clean.prepare_backward();
            for (const double poison : kPoisons) {
                for (Tensor Attention::*which : {&Attention::k, &Attention::v}) {
                    Attention a = clean;
                    for (std::int64_t j = 40; j < 40 + hidden; ++j) {
                        for (std::int64_t c = 0; c < 24; ++c) (a.*which).set(poison, 0, j, 0, c);
                    }
                    Attention b = clean;
                    for_each_kernel(Pass::forward, [&](const KernelInfo& kernel) {
                        if (!a.forward(kernel) || !b.forward(kernel)) return;
                        EXPECT_TRUE(a.o.same_bits(b.o) && a.lse.same_bits(b.lse)) << poison;
                    });
                    a.o = b.o = clean.o;
                    a.lse = b.lse = clean.lse;
                    for_each_kernel(Pass::backward, [&](const KernelInfo& kernel) {
                        if (!a.backward(kernel) || !b.backward(kernel)) return;
                        EXPECT_TRUE(a.dq.same_bits(b.dq) && a.dk.same_bits(b.dk) && a.dv.same_bits(b.dv)) << poison;
                    });
                }
            }
        }
    }
}

/// Poison that some queries see: the others do not change by a bit, wherever the key lies in its tile.
TEST(special_values, poison_stays_in_the_rows_that_see_it) {
    constexpr Mask kMasks[] = {{.causal = Causal::bottom_right, .window_left = 40}, {.causal = Causal::top_left}};
    for (const DType dtype : kStorageTypes) {
        for (const Mask& mask : kMasks) {
            Problem p = make_problem(1, 130, 130, 1, 1, 24, dtype);
            p.mask = mask;
            const Attention clean(p);
            Attention b = clean;
            for_each_kernel(Pass::forward, [&](const KernelInfo& kernel) {
                if (!b.forward(kernel)) return;
                for (const std::int64_t key : {0, 15, 20, 37, 60, 64, 127}) {
                    for (Tensor Attention::*which : {&Attention::k, &Attention::v}) {
                        Attention a = clean;
                        (a.*which).set(kPoisons[key % 3], 0, key, 0, 3);
                        ASSERT_TRUE(a.forward(kernel));
                        for (std::int64_t i = 0; i < 130; ++i) {
                            if (mask.bind(130, 130).visible(i, key)) continue;
                            ASSERT_EQ(a.lse.get(0, 0, i), b.lse.get(0, 0, i)) << "query " << i << ", key " << key;
                            for (std::int64_t c = 0; c < 24; ++c)
                                ASSERT_EQ(a.o.get(0, i, 0, c), b.o.get(0, i, 0, c)) << "query " << i << ", key " << key;
                        }
                    }
                }
            });
        }
    }
}

/// The same for gradients: those of queries that do not see the key.
TEST(special_values, poison_stays_in_the_gradients_that_see_it) {
    Problem p = make_problem(1, 130, 130, 1, 1, 24);
    p.mask = {.causal = Causal::bottom_right, .window_left = 40};
    Attention clean(p);
    clean.prepare_backward();
    for_each_kernel(Pass::backward, [&](const KernelInfo& kernel) {
        Attention b = clean;
        if (!b.backward(kernel)) return;
        for (const std::int64_t key : {0, 15, 20, 37, 60, 64, 127}) {
            for (Tensor Attention::*which : {&Attention::k, &Attention::v}) {
                Attention a = clean;
                (a.*which).set(kPoisons[key % 3], 0, key, 0, 3);
                a.prepare_backward();
                ASSERT_TRUE(a.backward(kernel));
                for (std::int64_t i = 0; i < 130; ++i) {
                    if (i >= key && i <= key + 40) continue;
                    for (std::int64_t c = 0; c < 24; ++c)
                        ASSERT_EQ(a.dq.get(0, i, 0, c), b.dq.get(0, i, 0, c)) << "query " << i << ", key " << key;
                }
                for (std::int64_t j = 0; j < 130; ++j) {
                    if (j >= key - 40 && j <= key + 40) continue;  // seen by a query that sees the key
                    for (std::int64_t c = 0; c < 24; ++c) {
                        ASSERT_EQ(a.dk.get(0, j, 0, c), b.dk.get(0, j, 0, c)) << "key " << j << ", poison " << key;
                        ASSERT_EQ(a.dv.get(0, j, 0, c), b.dv.get(0, j, 0, c)) << "key " << j << ", poison " << key;
                    }
                }
            }
        }
    });
}

TEST(special_values, infinite_scores) {
    for (const double score : {kInfinity, -kInfinity}) {
        Problem p = make_problem(1, 20, 90, 1, 1, 8);
        p.bias = p.bias_gradient = true;
        Attention a(p);
        a.bias.set(score, 0, 0, 7, 50);
        for (std::int64_t j = 0; j < 90; ++j) a.bias.set(score, 0, 0, 11, j);
        expect_right(a);
        for_each_kernel(Pass::forward, [&](const KernelInfo& kernel) {
            if (!a.forward(kernel)) return;
            EXPECT_EQ(std::isnan(a.lse.get(0, 0, 7)), score > 0);
            if (score < 0) EXPECT_EQ(a.lse.get(0, 0, 11), -kInfinity);
            else EXPECT_TRUE(std::isnan(a.lse.get(0, 0, 11)));
        });
    }
}

/// Frameworks mask with the lowest finite number: a row of nothing else is a uniform row, not NaN.
/// Rows whose scores are all -inf by the bias have no gradient, whatever comes back for their LSE.
TEST(special_values, lse_gradients_of_rows_of_minus_infinity) {
    for (const DType dtype : kStorageTypes) {
        for (const double poison : kPoisons) {
            Problem p = make_problem(1, 70, 130, 2, 1, 16, dtype);
            p.bias = true;
            Attention clean(p);
            for (std::int64_t i = 10; i < 20; ++i) {
                for (std::int64_t j = 0; j < 130; ++j) clean.bias.set(-kInfinity, 0, 1, i, j);
            }
            clean.dlse = Tensor(DType::fp32, {1, 2, 70});
            clean.dlse.fill_value(0.5);
            clean.prepare_backward();
            Attention dirty = clean;
            for (std::int64_t i = 10; i < 20; ++i) dirty.dlse.set(poison, 0, 1, i);
            for_each_kernel(Pass::backward, [&](const KernelInfo& kernel) {
                if (!clean.backward(kernel) || !dirty.backward(kernel)) return;
                for (Tensor Attention::*t : {&Attention::dq, &Attention::dk, &Attention::dv})
                    EXPECT_TRUE((dirty.*t).same_bits(clean.*t)) << poison;
                for (std::int64_t c = 0; c < 16; ++c) EXPECT_EQ(dirty.dq.get(0, 15, 1, c), 0);
                EXPECT_TRUE(all_finite(dirty.dk));
            });
        }
    }
}

TEST(special_values, lowest_finite_bias) {
    for (const double low : {-static_cast<double>(FLT_MAX), -1e30}) {
        Problem p = make_problem(1, 70, 130, 1, 1, 16);
        p.bias = p.bias_gradient = true;
        Attention a(p);
        for (std::int64_t i = 0; i < 70; ++i) {
            for (std::int64_t j = i == 13 ? 0 : 60; j < 130; ++j) a.bias.set(low, 0, 0, i, j);
        }
        expect_right(a);
        for_each_kernel(Pass::forward, [&](const KernelInfo& kernel) {
            if (!a.forward(kernel)) return;
            double mean = 0;
            for (std::int64_t j = 0; j < 130; ++j) mean += a.v.get(0, j, 0, 2) / 130;
            EXPECT_NEAR(a.o.get(0, 13, 0, 2), mean, 1e-5);
            EXPECT_NEAR(a.lse.get(0, 0, 13), low, std::abs(low) * 1e-6);
        });
    }
}

/// Finite in, finite out, whatever the sign and size of logits that fp32 can hold.
TEST(special_values, huge_finite_logits) {
    for (const double size : {1e3, 1e10, 1e30, 1e38}) {
        for (const double sign : {1.0, -1.0}) {
            Problem p = make_problem(1, 33, 100, 1, 1, 4);
            p.scale = 1;
            Attention a(p);
            a.q.fill_value(0);
            a.k.fill_value(0);
            for (std::int64_t i = 0; i < 33; ++i)
                a.q.set(sign * size * (1 + 0.01 * static_cast<double>(i)), 0, i, 0, 1);
            for (std::int64_t j = 0; j < 100; ++j) a.k.set(1 - 0.02 * static_cast<double>(j), 0, j, 0, 1);
            a.dlse = Tensor(DType::fp32, {1, 1, 33});
            a.dlse.fill_value(1);
            for_each_kernel(Pass::forward, [&](const KernelInfo& kernel) {
                if (!a.forward(kernel)) return;
                EXPECT_TRUE(all_finite(a.o) && all_finite(a.lse)) << sign * size;
                EXPECT_TRUE(a.check_forward().pass()) << sign * size << "\n" << a.check_forward().describe();
            });
            if (size > 1e36) continue;  // the true dK, a sum of multiples of Q, passes the largest fp32 number
            a.prepare_backward();
            for_each_kernel(Pass::backward, [&](const KernelInfo& kernel) {
                if (!a.backward(kernel)) return;
                EXPECT_TRUE(all_finite(a.dk) && all_finite(a.dv) && all_finite(a.dq)) << sign * size;
            });
        }
    }
}

/// The maximum that is subtracted and the score are rounded alike: equal maxima give weights of exactly 1.
TEST(special_values, repeated_huge_maxima) {
    for (const double size : {0x1p24, 0x1.fffffep28, 1.1e31, 3e38}) {
        Problem p = make_problem(1, 17, 64, 1, 1, 1);
        p.scale = 0.7;
        Attention a(p);
        a.q.fill_value(1);
        a.k.fill_value(size);
        for_each_kernel(Pass::forward, [&](const KernelInfo& kernel) {
            if (!a.forward(kernel)) return;
            double mean = 0;
            for (std::int64_t j = 0; j < 64; ++j) mean += a.v.get(0, j, 0, 0) / 64;
            for (std::int64_t i = 0; i < 17; ++i) {
                ASSERT_NEAR(a.o.get(0, i, 0, 0), mean, 1e-6) << size;
                ASSERT_NEAR(a.lse.get(0, 0, i), 0.7 * size, 2e-6 + size * 0x1p-20) << size;
            }
        });
    }
}

TEST(special_values, subnormal_inputs) {
    for (const DType dtype : kStorageTypes) {
        Attention a(make_problem(1, 40, 70, 1, 1, 16, dtype));
        const double small = dtype == DType::fp16 ? 0x1p-20 : 0x1p-130;
        for (Tensor* t : {&a.q, &a.k, &a.v, &a.d_o}) t->scale_by(small);
        expect_right(a);
    }
}

TEST(special_values, scale_zero_times_infinity_is_nan) {
    Problem p = make_problem(1, 10, 20, 1, 1, 8);
    p.scale = 0;
    Attention a(p);
    a.q.set(kInfinity, 0, 4, 0, 0);
    expect_forward_right(a);
}

}  // namespace
}  // namespace tessera::check
