// SPDX-License-Identifier: Apache-2.0
//
// Identities of attention that need no reference: each one breaks under some plausible bug, in every kernel alike.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "kernels/support.hpp"

namespace tessera::check::identities_test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

double largest_difference(const Tensor& a, const Tensor& b) {
    const Packed x = packed_copy(a.view);
    const Packed y = packed_copy(b.view);
    double largest = 0;
    for (std::size_t i = 0; i < x.data.size(); ++i) largest = std::max(largest, std::abs(x.data[i] - y.data[i]));
    return largest;
}

TEST(Identities, values_of_one_give_one) {
    for (const DType dtype : kStorageTypes) {
        Attention a(make_problem(1, 100, 333, 2, 1, 40, dtype));
        a.v.fill_value(1);
        for_each_kernel(Pass::forward, [&](const KernelInfo& kernel) {
            if (!a.forward(kernel)) return;
            const Packed o = packed_copy(a.o.view);
            for (const double x : o.data) ASSERT_NEAR(x, 1, dtype == DType::fp32 ? 2e-6 : 0);
        });
    }
}

/// Every query matches one key so well that all other weights are 0: O is exactly a permutation of V.
TEST(Identities, codes_in_v_come_out_where_the_keys_say) {
    constexpr std::int64_t kLen = 700;
    for (const DType dtype : kStorageTypes) {
        Attention a(make_problem(1, 90, kLen, 2, 1, 64, dtype));
        const Random random(3);
        for (std::int64_t j = 0; j < kLen; ++j) {
            for (std::int64_t c = 0; c < 64; ++c)
                a.k.set(random.bits(static_cast<std::uint64_t>(j * 64 + c)) % 2 == 0 ? 1 : -1, 0, j, 0, c);
        }
        const auto match = [](std::int64_t i, std::int64_t h) { return (i * 229 + h * 31 + 5) % kLen; };
        for (std::int64_t i = 0; i < 90; ++i) {
            for (std::int64_t h = 0; h < 2; ++h) {
                for (std::int64_t c = 0; c < 64; ++c) a.q.set(40 * a.k.get(0, match(i, h), 0, c), 0, i, h, c);
            }
        }
        fill(a.v.view, Fill::index_coded, 0);
        for_each_kernel(Pass::forward, [&](const KernelInfo& kernel) {
            if (!a.forward(kernel)) return;
            for (std::int64_t i = 0; i < 90; ++i) {
                for (std::int64_t h = 0; h < 2; ++h) {
                    for (std::int64_t c = 0; c < 64; ++c) {
                        ASSERT_EQ(a.o.get(0, i, h, c), index_code(match(i, h), c)) << "query " << i << " head " << h;
                    }
                }
            }
        });
    }
}

TEST(Identities, order_of_keys_does_not_matter) {
    const Problem p = make_problem(1, 60, 601, 2, 1, 32);
    Attention a(p);
    Attention b = a;
    for (std::int64_t j = 0; j < p.len_kv; ++j) {
        const std::int64_t to = (j * 7 + 3) % p.len_kv;
        for (std::int64_t c = 0; c < p.head_dim; ++c) {
            b.k.set(a.k.get(0, j, 0, c), 0, to, 0, c);
            b.v.set(a.v.get(0, j, 0, c), 0, to, 0, c);
        }
    }
    for_each_kernel(Pass::forward, [&](const KernelInfo& kernel) {
        if (!a.forward(kernel) || !b.forward(kernel)) return;
        EXPECT_LE(largest_difference(a.o, b.o), 2e-6);
        EXPECT_LE(largest_difference(a.lse, b.lse), 4e-6);
        EXPECT_TRUE(b.check_forward().pass()) << b.check_forward().describe();
    });
}

/// O and LSE of the keys [0, split) and [split, len). An empty part contributes nothing.
struct Part {
    double o = 0;
    double lse = -kInfinity;
};

Part merged(const Part& a, const Part& b) {
    const double top = std::max(a.lse, b.lse);
    if (top == -kInfinity) return {};
    const double wa = std::exp(a.lse - top);
    const double wb = std::exp(b.lse - top);
    return {(wa * a.o + wb * b.o) / (wa + wb), top + std::log(wa + wb)};
}

/// A call on some of the keys, through views into the whole.
bool forward_keys(Attention& part, const Attention& whole, std::int64_t begin, std::int64_t end,
                  const KernelInfo& kernel) {
    part = whole;
    part.problem.len_kv = end - begin;
    for (Tensor* t : {&part.k, &part.v}) {
        t->view.data = static_cast<std::byte*>(t->view.data) + begin * t->view.strides[1] * size_of(t->view.dtype);
        t->view.shape[1] = end - begin;
    }
    return part.forward(kernel);
}

TEST(Identities, split_and_merged_is_whole) {
    const Problem p = make_problem(1, 5, 260, 2, 1, 24);
    Attention whole(p);
    Attention left = whole;
    Attention right = whole;
    for_each_kernel(Pass::forward, [&](const KernelInfo& kernel) {
        if (!whole.forward(kernel)) return;
        for (const std::int64_t split : {0, 1, 2, 63, 64, 65, 100, 128, 255, 256, 259, 260}) {
            ASSERT_TRUE(forward_keys(left, whole, 0, split, kernel));
            ASSERT_TRUE(forward_keys(right, whole, split, p.len_kv, kernel));
            for (std::int64_t i = 0; i < p.len_q * p.heads_q; ++i) {
                const std::int64_t row = i / p.heads_q;
                const std::int64_t h = i % p.heads_q;
                for (std::int64_t c = 0; c < p.head_dim; ++c) {
                    const Part both = merged({left.o.get(0, row, h, c), left.lse.get(0, h, row)},
                                             {right.o.get(0, row, h, c), right.lse.get(0, h, row)});
                    ASSERT_NEAR(both.o, whole.o.get(0, row, h, c), 3e-6) << "split " << split;
                    ASSERT_NEAR(both.lse, whole.lse.get(0, h, row), 5e-6) << "split " << split;
                }
            }
        }
    });
}

TEST(Identities, merging_nothing_with_nothing_is_nothing) {
    Attention empty(make_problem(1, 3, 0, 1, 1, 8));
    for_each_kernel(Pass::forward, [&](const KernelInfo& kernel) {
        if (!empty.forward(kernel)) return;
        for (std::int64_t i = 0; i < 3; ++i) {
            const Part none{empty.o.get(0, i, 0, 0), empty.lse.get(0, 0, i)};
            EXPECT_EQ(merged(none, none).o, 0);
            EXPECT_EQ(merged(none, none).lse, -kInfinity);
            EXPECT_EQ(merged(none, {2.5, 1.0}).o, 2.5);
        }
    });
}

TEST(Identities, constant_bias_shifts_lse_only) {
    const Problem plain = make_problem(1, 70, 200, 2, 1, 32);
    Problem shifted = plain;
    shifted.bias = true;
    for (const double constant : {-30.0, 0.5, 12.0}) {
        Attention a(plain);
        Attention b(shifted);
        b.bias.fill_value(constant);
        for_each_kernel(Pass::forward, [&](const KernelInfo& kernel) {
            if (!a.forward(kernel) || !b.forward(kernel)) return;
            EXPECT_LE(largest_difference(a.o, b.o), 5e-6);
            for (std::int64_t i = 0; i < 140; ++i) {
                ASSERT_NEAR(b.lse.get(0, i / 70, i % 70) - a.lse.get(0, i / 70, i % 70), constant, 4e-6 + 0x1p-19 * 40);
            }
        });
    }
}

/// The gradient of a softmax sums to 0 over each row; dbias shows it. dLSE adds P, which sums to 1.
TEST(Identities, score_gradients_sum_to_zero) {
    Problem p = make_problem(1, 50, 170, 2, 1, 32);
    p.bias = p.bias_gradient = true;
    for (const bool with_dlse : {false, true}) {
        Attention a(p);
        if (with_dlse) {
            a.dlse = Tensor(DType::fp32, {1, 2, 50});
            a.dlse.fill_value(3);
        }
        a.prepare_backward();
        for_each_kernel(Pass::backward, [&](const KernelInfo& kernel) {
            if (!a.backward(kernel)) return;
            for (std::int64_t h = 0; h < 2; ++h) {
                for (std::int64_t i = 0; i < p.len_q; ++i) {
                    double sum = 0;
                    for (std::int64_t j = 0; j < p.len_kv; ++j) sum += a.dbias.get(0, h, i, j);
                    ASSERT_NEAR(sum, with_dlse ? 3 : 0, 2e-5) << "head " << h << " query " << i;
                }
            }
        });
    }
}

/// The weights of a row sum to 1, so dV sums to dO over the tokens, column by column.
TEST(Identities, dv_sums_to_do) {
    const Problem p = make_problem(1, 120, 90, 2, 1, 32);
    Attention a(p);
    a.prepare_backward();
    for_each_kernel(Pass::backward, [&](const KernelInfo& kernel) {
        if (!a.backward(kernel)) return;
        for (std::int64_t c = 0; c < p.head_dim; ++c) {
            double of_v = 0;
            double of_o = 0;
            for (std::int64_t j = 0; j < p.len_kv; ++j) of_v += a.dv.get(0, j, 0, c);
            for (std::int64_t i = 0; i < p.len_q * 2; ++i) of_o += a.d_o.get(0, i / 2, i % 2, c);
            ASSERT_NEAR(of_v, of_o, 3e-5) << "column " << c;
        }
    });
}

/// Loss = sum O dO + sum LSE dLSE in fp64. Its difference along a random direction equals that by the gradients.
TEST(Identities, gradients_are_finite_differences) {
    Problem p = make_problem(2, 7, 9, 4, 2, 5, DType::fp64);
    p.mask = {.causal = Causal::bottom_right, .window_left = 6};
    p.softcap = 2;
    p.alibi = true;
    p.bias = p.bias_gradient = true;
    p.dropout = {.probability = 0.3, .seed = 11};
    Attention a(p);
    a.dlse = Tensor(DType::fp32, {2, 4, 7});
    fill(a.dlse.view, Fill::normal, 77);
    const KernelInfo& forward_kernel = kernels()[kernels().size() - 2];
    const KernelInfo& backward_kernel = kernels()[kernels().size() - 1];
    a.lse = Tensor(DType::fp64, {2, 4, 7});
    ASSERT_TRUE(a.forward(forward_kernel));
    ASSERT_TRUE(a.backward(backward_kernel));
    const auto loss = [&](double step, Tensor Attention::*which, const Tensor& direction) {
        Attention moved = a;
        const Packed d = packed_copy(direction.view);
        for_each_element((moved.*which).view, [&](std::int64_t flat, std::byte* element) {
            const DType dtype = (moved.*which).view.dtype;
            store_from_double(element, dtype,
                              load_as_double(element, dtype) + step * d.data[static_cast<std::size_t>(flat)]);
        });
        EXPECT_TRUE(moved.forward(forward_kernel));
        const Packed o = packed_copy(moved.o.view);
        const Packed d_o = packed_copy(moved.d_o.view);
        const Packed lse = packed_copy(moved.lse.view);
        const Packed dlse = packed_copy(moved.dlse.view);
        double sum = 0;
        for (std::size_t i = 0; i < o.data.size(); ++i) sum += o.data[i] * d_o.data[i];
        for (std::size_t i = 0; i < lse.data.size(); ++i)
            sum += std::isfinite(lse.data[i]) ? lse.data[i] * dlse.data[i] : 0;
        return sum;
    };
    const auto expect_slope = [&](Tensor Attention::*which, Tensor Attention::*gradient, double step,
                                  double tolerance) {
        Tensor direction = a.*gradient;
        fill(direction.view, Fill::normal, 99);
        double predicted = 0;
        const Packed g = packed_copy((a.*gradient).view);
        const Packed d = packed_copy(direction.view);
        for (std::size_t i = 0; i < g.data.size(); ++i) predicted += g.data[i] * d.data[i];
        const double measured = (loss(step, which, direction) - loss(-step, which, direction)) / (2 * step);
        EXPECT_NEAR(measured, predicted, tolerance * std::max(1.0, std::abs(predicted)));
    };
    expect_slope(&Attention::q, &Attention::dq, 1e-5, 1e-8);
    expect_slope(&Attention::k, &Attention::dk, 1e-5, 1e-8);
    expect_slope(&Attention::v, &Attention::dv, 1e-5, 1e-8);
    expect_slope(&Attention::bias, &Attention::dbias, 1e-2, 1e-3);  // the bias is fp32
}

}  // namespace
}  // namespace tessera::check::identities_test
