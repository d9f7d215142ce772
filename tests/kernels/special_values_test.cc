// SPDX-License-Identifier: Apache-2.0
//
// The contract's table of special values, for every kernel: NaN goes where the mask lets it, and nowhere else.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "kernels/support.hpp"

namespace tessera::check::special_values_test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
const double kNan = std::nan("");
constexpr double kPoisons[] = {std::numeric_limits<double>::quiet_NaN(), kInfinity, -kInfinity};

/// Runs over every dtype and every compiled head_dim.
class SpecialValues : public testing::TestWithParam<Storage> {};
INSTANTIATE_TEST_SUITE_P(Types, SpecialValues, testing::ValuesIn(storages()), name_of_storage);

/// Every query sees the first keys only; the last `hidden` keys are out of sight.
Problem with_hidden_keys(const Storage& storage, std::int64_t hidden) {
    Problem p = storage.problem(1, 40, 40 + hidden, 2, 1);
    p.mask.causal = Causal::top_left;
    return p;
}

TEST_P(SpecialValues, rows_without_keys) {
    Problem p = GetParam().problem(1, 150, 70, 2, 1);
    p.mask.causal = Causal::bottom_right;  // the first 80 queries see nothing
    Attention a(p);
    a.dlse = Tensor(DType::fp32, {1, 2, 150});
    a.dlse.fill_value(1);
    for_each_kernel(Pass::forward, [&](const KernelInfo& kernel) {
        if (!a.forward(kernel)) return;
        for (std::int64_t i = 0; i < 80; ++i) {
            EXPECT_EQ(a.lse.get(0, 1, i), -kInfinity);
            for (std::int64_t c = 0; c < p.head_dim_v; ++c) ASSERT_EQ(a.o.get(0, i, 1, c), 0);
        }
    });
    a.prepare_backward();
    for_each_kernel(Pass::backward, [&](const KernelInfo& kernel) {
        if (!a.backward(kernel)) return;
        for (std::int64_t i = 0; i < 80 * p.head_dim; ++i) ASSERT_EQ(a.dq.get(0, i / p.head_dim, 0, i % p.head_dim), 0);
    });
    expect_right(a);
}

TEST_P(SpecialValues, nan_in_a_visible_key_value_or_query) {
    for (Tensor Attention::*which : {&Attention::q, &Attention::k, &Attention::v}) {
        Problem p = GetParam().problem(1, 70, 70, 2, 2);
        p.mask.causal = Causal::bottom_right;
        Attention a(p);
        const std::int64_t column = p.head_dim_v - 3;  // in the last columns of what a tile holds
        (a.*which).set(kNan, 0, 33, 1, column);
        expect_right(a);
        for_each_kernel(Pass::forward, [&](const KernelInfo& kernel) {
            if (!a.forward(kernel)) return;
            EXPECT_FALSE(std::isnan(a.o.get(0, 32, 1, column)));  // sees up to key 32
            EXPECT_TRUE(std::isnan(a.o.get(0, 33, 1, column)));
            EXPECT_FALSE(std::isnan(a.o.get(0, 33, 0, column)));  // the other head
            EXPECT_EQ(std::isnan(a.lse.get(0, 1, 33)), which != &Attention::v);
        });
    }
}

TEST_P(SpecialValues, infinity_in_a_visible_value) {
    Attention a(GetParam().problem(1, 30, 70, 1, 1));
    a.q.scale_by(0.25);  // no weight so small that fp32 has none
    a.v.set(kInfinity, 0, 20, 0, 3);
    a.v.set(-kInfinity, 0, 50, 0, 4);
    a.v.set(kInfinity, 0, 10, 0, 5);
    a.v.set(-kInfinity, 0, 60, 0, 5);  // both signs: NaN
    expect_forward_right(a);
}

TEST_P(SpecialValues, nan_in_the_output_gradient) {
    Problem p = GetParam().problem(1, 70, 70, 2, 2);
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

/// Keys and values that no query sees change no bit, whatever they hold.
TEST_P(SpecialValues, poison_out_of_sight_changes_nothing) {
    for (const std::int64_t hidden : {1, 30, 200}) {
        Attention clean(with_hidden_keys(GetParam(), hidden));
        clean.prepare_backward();
        for (const double poison : kPoisons) {
            for (Tensor Attention::*which : {&Attention::k, &Attention::v}) {
                Attention a = clean;
                const std::int64_t columns = (a.*which).view.shape[3];
                for (std::int64_t j = 40; j < 40 + hidden; ++j) {
                    for (std::int64_t c = 0; c < columns; ++c) (a.*which).set(poison, 0, j, 0, c);
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

/// If some queries see poison, no bit of the others changes, wherever the key lies in its tile.
TEST_P(SpecialValues, poison_stays_in_the_rows_that_see_it) {
    constexpr Mask kMasks[] = {{.causal = Causal::bottom_right, .window_left = 40}, {.causal = Causal::top_left}};
    for (const Mask& mask : kMasks) {
        Problem p = GetParam().problem(1, 130, 130, 1, 1);
        p.mask = mask;
        const Attention clean(p);
        Attention b = clean;
        for_each_kernel(Pass::forward, [&](const KernelInfo& kernel) {
            if (!b.forward(kernel)) return;
            const Packed expected = packed_copy(b.o.view);
            for (const std::int64_t key : {0, 15, 20, 37, 60, 64, 127}) {
                for (Tensor Attention::*which : {&Attention::k, &Attention::v}) {
                    Attention a = clean;
                    (a.*which).set(kPoisons[key % 3], 0, key, 0, (a.*which).view.shape[3] - 1);
                    ASSERT_TRUE(a.forward(kernel));
                    const Packed got = packed_copy(a.o.view);
                    for (std::int64_t i = 0; i < 130; ++i) {
                        if (mask.bind(130, 130).visible(i, key)) continue;
                        ASSERT_EQ(a.lse.get(0, 0, i), b.lse.get(0, 0, i)) << "query " << i << ", key " << key;
                        const auto begin = static_cast<std::ptrdiff_t>(i * p.head_dim_v);
                        ASSERT_TRUE(std::equal(got.data.begin() + begin, got.data.begin() + begin + p.head_dim_v,
                                               expected.data.begin() + begin))
                            << "query " << i << ", key " << key;
                    }
                }
            }
        });
    }
}

/// If some queries see poison, no bit of the other queries' gradients changes.
TEST(SpecialValuesOnce, poison_stays_in_the_gradients_that_see_it) {
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

TEST_P(SpecialValues, infinite_scores) {
    for (const double score : {kInfinity, -kInfinity}) {
        Problem p = GetParam().problem(1, 20, 90, 1, 1);
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

/// Rows whose scores are all -inf by the bias have no gradient, whatever comes back for their LSE.
TEST(SpecialValuesOnce, lse_gradients_of_rows_of_minus_infinity) {
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

/// A key of the short sequence is NaN. The bias serves all sequences: its gradient is NaN only in the rows that this
/// sequence has. Summed over queries or keys, a key of weight 0 adds 0.
TEST(SpecialValuesOnce, bias_gradients_of_rows_that_only_others_have) {
    for (const DType dtype : kStorageTypes) {
        for (const double poison : kPoisons) {
            Problem p = make_ragged({3, 40}, {5, 70}, 2, 1, 24, dtype);
            p.bias = p.bias_gradient = true;
            Attention a(p, 1, {3, 40}, {5, 70});
            a.k.set(poison, 2, 0, 7);
            for (const std::int64_t len_kv : {std::int64_t{70}, std::int64_t{1}}) {
                a.bias = Tensor(DType::fp32, {1, 2, 40, len_kv});
                fill(a.bias.view, Fill::normal, 3);
                a.dbias = a.bias;
                expect_backward_right(a);
                for (std::int64_t i = 3; i < 40; ++i) ASSERT_TRUE(std::isfinite(a.dbias.get(0, 1, i, 0))) << poison;
            }
        }
        Problem p = make_problem(1, 7, 70, 1, 1, 24, dtype);
        p.bias = p.bias_gradient = true;
        Attention a(p);
        a.q.fill_value(-1);
        a.k.set(kInfinity, 0, 30, 0, 7);  // every score of this key is -inf
        a.bias = Tensor(DType::fp32, {1, 1, 1, 70});
        a.dbias = a.bias;
        expect_backward_right(a);
        EXPECT_EQ(a.dbias.get(0, 0, 0, 30), 0);
    }
}

/// Equal products round to the same side, but the error of their sum must not grow with head_dim. (This runs on the
/// CPU. Gradients take P from the reference's LSE, which rounds differently, and only the tolerance of 16 bits covers
/// that.)
TEST(SpecialValuesOnce, inputs_that_are_all_alike) {
    for (const DType dtype : kStorageTypes) {
        for (const std::int64_t head_dim : {96, 128, 192, 216, 256}) {
            for (const auto& [q, k] : {std::pair{1.0, 1.0}, {1.0, 4.0}, {1.1, 1.0}, {1.1, 1.3}}) {
                Attention a(make_problem(1, 20, 33, 1, 1, head_dim, dtype));
                a.q.fill_value(q);
                a.k.fill_value(k);
                expect_forward_right(a, Backend::cpu);
                if (dtype != DType::fp32) expect_backward_right(a);
            }
        }
    }
}

TEST_P(SpecialValues, subnormal_inputs) {
    Attention a(GetParam().problem(1, 40, 70, 1, 1));
    const double small = GetParam().dtype == DType::fp16 ? 0x1p-20 : 0x1p-130;
    for (Tensor* t : {&a.q, &a.k, &a.v, &a.d_o}) t->scale_by(small);
    expect_right(a);
}

TEST_P(SpecialValues, scale_zero_times_infinity_is_nan) {
    Problem p = GetParam().problem(1, 10, 20, 1, 1);
    p.scale = 0;
    Attention a(p);
    a.q.set(kInfinity, 0, 4, 0, 0);
    expect_forward_right(a);
}

}  // namespace
}  // namespace tessera::check::special_values_test
