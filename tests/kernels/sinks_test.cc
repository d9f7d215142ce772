// SPDX-License-Identifier: Apache-2.0
//
// A sink is a key without a value: attention with sinks equals attention over one more key, of which the bias is the
// sink and the row of V is 0. Every kernel that takes sinks is compared with the reference over that key.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <utility>

#include "kernels/support.hpp"

namespace tessera::check::sinks_test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

const KernelInfo& reference(Pass pass) {
    for (const KernelInfo& kernel : kernels()) {
        if (kernel.backend == Backend::reference && kernel.pass == pass) return kernel;
    }
    throw Error(ErrorCode::internal, "", "expected a reference");
}

/// Returns the call with a first key that stands for the sinks. Under a bottom-right mask it is visible to all queries
/// that see another one.
Attention with_one_more_key(const Attention& a) {
    Problem p = a.problem;
    p.len_kv += 1;
    p.sinks = false;
    p.bias = p.bias_gradient = true;
    Attention more(p);
    more.q = a.q;
    more.d_o = a.d_o;
    more.dlse = a.dlse;
    more.bias = Tensor(DType::fp32, {1, p.heads_q, 1, p.len_kv});
    more.dbias = more.bias;
    for (std::int64_t h = 0; h < p.heads_q; ++h) more.bias.set(a.sinks.get(h), 0, h, 0, 0);
    for (std::int64_t b = 0; b < p.batch; ++b) {
        for (std::int64_t j = 0; j < p.len_kv; ++j) {
            for (std::int64_t h = 0; h < p.heads_kv; ++h) {
                for (std::int64_t c = 0; c < p.head_dim; ++c) {
                    more.k.set(j == 0 ? 0 : a.k.get(b, j - 1, h, c), b, j, h, c);
                    more.v.set(j == 0 ? 0 : a.v.get(b, j - 1, h, c), b, j, h, c);
                }
            }
        }
    }
    return more;
}

void expect_near(const Tensor& got, const Tensor& expected, double tolerance) {
    const Packed x = packed_copy(got.view);
    const Packed y = packed_copy(expected.view);
    ASSERT_EQ(x.data.size(), y.data.size());
    for (std::size_t i = 0; i < x.data.size(); ++i)
        ASSERT_NEAR(x.data[i], y.data[i], tolerance * (1 + std::abs(y.data[i]))) << i;
}

/// Calls: queries, keys, query heads, kv heads. The first two have few queries, the last has rows of several blocks.
struct Size {
    std::int64_t q, kv, heads_q, heads_kv;
};
constexpr Size kSizes[] = {{1, 600, 8, 2}, {5, 70, 4, 4}, {130, 150, 6, 2}, {17, 1100, 2, 1}};

Attention with_sinks(const Size& s, DType dtype) {
    Problem p = make_problem(2, s.q, s.kv, s.heads_q, s.heads_kv, 64, dtype);
    p.mask.causal = Causal::bottom_right;
    p.sinks = true;
    Attention a(p);
    a.dlse = a.lse;
    fill(a.dlse.view, Fill::normal, 9);
    a.sinks.set(6, 0);
    a.sinks.set(-kInfinity, 1);
    return a;
}

TEST(Sinks, forward_is_that_of_one_more_key_without_a_value) {
    for (const Size& size : kSizes) {
        for (const DType dtype : kStorageTypes) {
            Attention a = with_sinks(size, dtype);
            Attention more = with_one_more_key(a);
            ASSERT_TRUE(more.forward(reference(Pass::forward)));
            for_each_kernel(Pass::forward, [&](const KernelInfo& kernel) {
                if (!a.forward(kernel)) return;
                SCOPED_TRACE(a.problem.describe());
                expect_near(a.o, more.o, dtype == DType::fp32 ? 2e-6 : dtype == DType::fp16 ? 2e-3 : 1.6e-2);
                expect_near(a.lse, more.lse, 2e-6);
            });
        }
    }
}

TEST(Sinks, gradients_are_those_of_one_more_key_without_a_value) {
    for (const Size& size : kSizes) {
        Attention a = with_sinks(size, DType::fp32);
        Attention more = with_one_more_key(a);
        more.prepare_backward();
        ASSERT_TRUE(more.backward(reference(Pass::backward)));
        a.prepare_backward();
        for_each_kernel(Pass::backward, [&](const KernelInfo& kernel) {
            if (!a.backward(kernel)) return;
            SCOPED_TRACE(a.problem.describe());
            expect_near(a.dq, more.dq, 1e-5);
            for (std::int64_t h = 0; h < a.problem.heads_q; ++h) {
                const double expected = more.dbias.get(0, h, 0, 0);
                EXPECT_NEAR(a.dsinks.get(h), expected, 1e-5 * (1 + std::abs(expected))) << h;
            }
            EXPECT_EQ(a.dsinks.get(1), 0) << "of a sink of -inf";
        });
    }
}

TEST(Sinks, results_are_within_the_limits) {
    for (const Size& size : kSizes) {
        for (const DType dtype : kStorageTypes) {
            Attention a = with_sinks(size, dtype);
            expect_right(a);
        }
    }
}

/// exp(sink) beside exp(the largest score) overflows fp32, or is 0.
TEST(Sinks, far_above_and_below_the_scores) {
    for (const DType dtype : kStorageTypes) {
        Attention a = with_sinks(kSizes[2], dtype);
        for (const auto& [head, sink] : {std::pair(0, 300.0), {1, -300.0}, {2, 95.0}, {3, 1e4}})
            a.sinks.set(sink, head);
        expect_right(a);
    }
}

TEST(Sinks, of_minus_infinity_leave_the_forward_as_it_is_without) {
    for (const Size& size : kSizes) {
        for (const DType dtype : kStorageTypes) {
            Attention a = with_sinks(size, dtype);
            a.sinks.fill_value(-kInfinity);
            Attention without = a;
            without.problem.sinks = false;
            without.sinks = {};
            for_each_kernel(Pass::forward, [&](const KernelInfo& kernel) {
                if (!a.forward(kernel) || !without.forward(kernel)) return;
                EXPECT_TRUE(a.lse.same_bits(without.lse));
                expect_near(a.o, without.o, dtype == DType::fp32 ? 1e-6 : dtype == DType::fp16 ? 1e-3 : 8e-3);
            });
        }
    }
}

TEST(Sinks, a_query_without_a_key_has_o_0_and_lse_sink) {
    for (const DType dtype : kStorageTypes) {
        Problem p = make_problem(1, 200, 70, 4, 2, 64, dtype);
        p.mask.causal = Causal::bottom_right;
        p.sinks = true;
        Attention a(p);
        a.dlse = a.lse;
        fill(a.dlse.view, Fill::normal, 9);
        for_each_kernel(Pass::forward, [&](const KernelInfo& kernel) {
            if (!a.forward(kernel)) return;
            for (std::int64_t h = 0; h < 4; ++h) {
                for (std::int64_t i = 0; i < 130; ++i) {
                    ASSERT_EQ(a.lse.get(0, h, i), a.sinks.get(h)) << h << " " << i;
                    for (std::int64_t c = 0; c < 64; ++c) ASSERT_EQ(a.o.get(0, i, h, c), 0);
                }
            }
        });
        expect_backward_right(a);
    }
}

/// One thread and several, alone and in a larger batch: sums of fixed order.
TEST(Sinks, gradients_have_the_same_bits_on_any_number_of_threads) {
    for (const DType dtype : kStorageTypes) {
        Attention a = with_sinks(kSizes[2], dtype);
        a.prepare_backward();
        for_each_kernel(Pass::backward, [&](const KernelInfo& kernel) {
            Attention three = a;
            if (!a.backward(kernel) || !three.backward(kernel, {.threads = 3})) return;
            EXPECT_TRUE(a.dsinks.same_bits(three.dsinks));
        });
    }
}

TEST(Sinks, that_are_nan_make_their_head_nan) {
    for (const DType dtype : kStorageTypes) {
        Attention a = with_sinks(kSizes[1], dtype);
        a.sinks.set(std::nan(""), 2);
        for_each_kernel(Pass::forward, [&](const KernelInfo& kernel) {
            if (!a.forward(kernel)) return;
            const Report report = a.check_forward();
            EXPECT_TRUE(report.pass()) << report.describe();
            EXPECT_TRUE(std::isnan(a.o.get(0, 4, 2, 0)) && std::isnan(a.lse.get(0, 2, 4)));
            EXPECT_TRUE(std::isfinite(a.o.get(0, 4, 3, 0)));
        });
    }
}

}  // namespace
}  // namespace tessera::check::sinks_test
