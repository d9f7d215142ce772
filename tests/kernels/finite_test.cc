// SPDX-License-Identifier: Apache-2.0
//
// Finite inputs give finite and right results, however large. Hidden elements can't reach a result by another way.
#include <limits>

#include "kernels/support.hpp"

namespace tessera::check::finite_test {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

/// The slope of a softcap at a hidden NaN is NaN itself; 0 * NaN must not reach dK or dQ.
TEST(Finite, hidden_nan_under_a_softcap_leaves_gradients_alone) {
    Problem p = make_problem(1, 1, 40, 1, 1, 8);
    p.softcap = 10;
    p.mask = {.window_left = 5, .window_right = 0};
    Attention a(p);
    for (std::int64_t c = 0; c < 8; ++c) a.k.set(kNan, 0, 3, 0, c);
    a.prepare_backward();
    for_each_kernel(Pass::backward, [&](const KernelInfo& kernel) {
        if (!a.backward(kernel)) return;  // what it may refuse: limits.hpp
        EXPECT_TRUE(a.check_backward().pass());
        for (std::int64_t j = 0; j < 40; ++j) EXPECT_TRUE(std::isfinite(a.dk.get(0, j, 0, 0))) << j;
    });
}

/// A mask by finfo.min makes all scores -FLT_MAX. The weights are 1 / n, but an fp32 LSE can't hold that sum.
TEST(Finite, gradients_of_rows_whose_lse_holds_no_sum) {
    for (const double bias : {-3.4e38, -1e30, 67108864.0, 1e6}) {
        Problem p = make_problem(1, 3, 130, 1, 1, 4);
        p.bias = true;
        Attention a(p);
        a.q.fill_value(0);
        a.bias.fill_value(bias);
        a.d_o.fill_value(1);
        a.prepare_backward();
        for_each_kernel(Pass::backward, [&](const KernelInfo& kernel) {
            if (!a.backward(kernel)) return;  // what it may refuse: limits.hpp
            // dV[j] = sum over 3 queries of P = 3 / 130
            for (std::int64_t j = 0; j < 130; ++j) ASSERT_NEAR(a.dv.get(0, j, 0, 0) / (3.0 / 130), 1, 1e-5) << bias;
        });
    }
}

class FiniteOf : public testing::TestWithParam<Storage> {};
INSTANTIATE_TEST_SUITE_P(Types, FiniteOf, testing::ValuesIn(storages()), name_of_storage);

/// The sum of the weights times V passes the largest float before it is divided; the result does not.
TEST_P(FiniteOf, values_near_the_largest_number) {
    Problem p = GetParam().problem(1, 70, 700, 2, 1);
    p.mask.causal = Causal::bottom_right;
    Attention a(p);
    const bool fp16 = p.dtype == DType::fp16;  // whose largest number is 65,504
    const double most = fp16 ? 6e4 : 3e38;
    a.q.scale_by(0.1);
    a.v.fill_value(fp16 ? 5e4 : 1e37);
    for (std::int64_t j = 0; j < 700; ++j) a.v.set(j % 2 ? -0.6 * most : most, 0, j, 0, 3);
    for_each_kernel(Pass::forward, [&](const KernelInfo& kernel) {
        if (!a.forward(kernel, {.threads = 3})) return;
        const double tolerance = p.dtype == DType::fp32 ? 1e-5 : 1e-2;
        for (std::int64_t i = 0; i < 70; ++i) {
            ASSERT_NEAR(a.o.get(0, i, 1, 0) / a.v.get(0, 0, 0, 0), 1, tolerance);
            ASSERT_TRUE(std::isfinite(a.o.get(0, i, 1, 3))) << i;
        }
    });
}

/// Weights whose sum is a bit over 1 must not take the largest number beyond itself.
TEST(Finite, values_that_are_the_largest_number) {
    for (const DType dtype : kStorageTypes) {
        const double largest = dtype == DType::fp32   ? static_cast<double>(std::numeric_limits<float>::max())
                               : dtype == DType::fp16 ? 65504.0
                                                      : 0x1.FEp127;
        Attention a(make_problem(1, 20, 70, 2, 1, 16, dtype));
        a.v.fill_value(largest);
        for (std::int64_t j = 0; j < 70; ++j) a.v.set(-largest, 0, j, 0, 5);
        for_each_kernel(Pass::forward, [&](const KernelInfo& kernel) {
            if (!a.forward(kernel)) return;
            for (std::int64_t i = 0; i < 20; ++i) {
                for (std::int64_t c = 0; c < 16; ++c)
                    ASSERT_NEAR(a.o.get(0, i, 1, c) / largest, c == 5 ? -1 : 1, 2e-6) << i << " " << c;
            }
        });
    }
}

/// With dropout a row of such values can exceed the largest number, and is then infinite.
TEST(Finite, results_beyond_the_largest_number_are_infinite) {
    Problem p = make_problem(1, 20, 40, 1, 1, 8);
    p.dropout = {0.5, 3};
    Attention a(p);
    a.v.fill_value(static_cast<double>(std::numeric_limits<float>::max()));
    Attention small = a;
    small.v.fill_value(1);
    for_each_kernel(Pass::forward, [&](const KernelInfo& kernel) {
        if (!a.forward(kernel) || !small.forward(kernel)) return;
        for (std::int64_t i = 0; i < 20; ++i) EXPECT_EQ(std::isinf(a.o.get(0, i, 0, 0)), small.o.get(0, i, 0, 0) > 1);
    });
}

/// The limit of docs/numerics.md: dP, and dS K before the scale, are held in fp32. Up to there gradients are finite.
TEST(Finite, gradients_up_to_the_largest_dp) {
    const auto run = [](double v, double d_o, double k, double scale, const auto& expect) {
        Problem p = make_problem(1, 3, 1, 1, 1, 16);
        p.scale = scale;
        Attention a(p);
        a.v.fill_value(v);
        a.d_o.fill_value(d_o);
        a.k.fill_value(k);
        a.prepare_backward();
        for_each_kernel(Pass::backward, [&](const KernelInfo& kernel) {
            if (a.backward(kernel)) expect(kernel, a.dq.get(0, 0, 0, 0));
        });
    };
    // One key: P is 1 and dS is 0, but for rounding.
    run(1e18, 1e18, 1, 1, [](const KernelInfo&, double dq) { EXPECT_LE(std::abs(dq), 1e-6 * 16e36); });
    run(1e20, 1e20, 1, 1, [](const KernelInfo& kernel, double dq) {
        EXPECT_EQ(std::isfinite(dq),
                  kernel.backend == Backend::reference);  // if not, docs/numerics.md promises too little
    });
}

/// An element that has to be summed again changes nothing in other elements of its row, nor in other rows.
TEST_P(FiniteOf, a_visible_infinity_changes_only_what_sees_it) {
    Problem p = GetParam().problem(1, 64, 300, 1, 1);
    p.mask.causal = Causal::bottom_right;
    Attention clean(p);
    Attention dirty(p);
    dirty.v.set(std::numeric_limits<double>::infinity(), 0, 260, 0, 2);  // seen by queries 24..63
    for_each_kernel(Pass::forward, [&](const KernelInfo& kernel) {
        if (!clean.forward(kernel) || !dirty.forward(kernel)) return;
        for (std::int64_t i = 0; i < 64; ++i) {
            for (std::int64_t c = 0; c < p.head_dim_v; ++c) {
                if (i >= 24 && c == 2) ASSERT_FALSE(std::isfinite(dirty.o.get(0, i, 0, c)));
                else ASSERT_EQ(dirty.o.get(0, i, 0, c), clean.o.get(0, i, 0, c)) << i << " " << c;
            }
        }
    });
}

/// The sign of a product that underflows to -0 must not depend on a hidden value.
TEST(Finite, the_sign_of_zero_does_not_tell_of_hidden_values) {
    Problem p = make_problem(1, 2, 3, 1, 1, 1);
    p.scale = 1;
    p.mask.causal = Causal::bottom_right;
    Attention a(p);
    a.q.fill_value(1);
    a.k.fill_value(0);
    a.k.set(-80, 0, 1, 0, 0);
    a.v.fill_value(0);
    a.v.set(-1e-20, 0, 1, 0, 0);
    for_each_kernel(Pass::forward, [&](const KernelInfo& kernel) {
        if (kernel.backend == Backend::reference) return;
        a.v.set(1, 0, 2, 0, 0);
        if (!a.forward(kernel)) return;
        const bool sign = std::signbit(a.o.get(0, 0, 0, 0));
        a.v.set(kNan, 0, 2, 0, 0);
        ASSERT_TRUE(a.forward(kernel));
        EXPECT_EQ(std::signbit(a.o.get(0, 0, 0, 0)), sign);
    });
}

/// The stride of a dimension of size 1 may be anything, since it is never stepped.
TEST(Finite, strides_of_size_one_may_be_anything) {
    Attention a(make_problem(1, 1, 1, 1, 1, 8));
    for (Tensor* t : {&a.q, &a.k, &a.v}) {
        t->view.strides[0] = std::numeric_limits<std::int64_t>::min();
        t->view.strides[1] = std::int64_t{1} << 62;
        t->view.strides[2] = std::numeric_limits<std::int64_t>::max();
    }
    a.o.view.strides[1] = std::numeric_limits<std::int64_t>::min();
    for_each_kernel(Pass::forward, [&](const KernelInfo& kernel) {
        if (!a.forward(kernel)) return;
        for (std::int64_t c = 0; c < 8; ++c) {
            EXPECT_NEAR(*(static_cast<const float*>(a.o.view.data) + c),
                        *(static_cast<const float*>(a.v.view.data) + c), 1e-6);
        }
    });
}

/// Sizes that no memory has are refused by the plan, not wrapped.
TEST(Finite, impossible_sizes_are_refused) {
    Problem p = make_problem(4294967295, 2097152, 2097152, 1, 1, 256);
    for (const Pass pass : {Pass::forward, Pass::backward}) {
        try {
            const Plan made = plan(p, {.pass = pass, .backend = Backend::cpu, .schedule = Schedule::standard});
            ADD_FAILURE() << made.workspace_bytes;
        } catch (const Error& e) {
            EXPECT_TRUE(e.code() == ErrorCode::unsupported || e.code() == ErrorCode::invalid_argument) << e.what();
        }
    }
}

/// Few heads, many empty rounds: a window over a long row costs what its visible tiles cost.
TEST(Finite, empty_rounds_are_not_walked) {
    Problem p = make_problem(1, 1, 1 << 18, 1, 1, 4);
    Attention a(p);
    a.prepare_backward();
    for_each_kernel(Pass::backward, [&](const KernelInfo& kernel) {
        if (kernel.schedule != Schedule::fa2 || kernel.backend != Backend::cpu) return;
        std::int64_t tasks = 0;
        const ParallelFor count = [&](std::int64_t n, int, const TaskBody& body) {
            tasks += n;
            for (std::int64_t t = 0; t < n; ++t) body(t, 0);
        };
        ASSERT_TRUE(a.backward(kernel, {.threads = 4, .how = {.parallel_for = count}}));
        EXPECT_LT(tasks, 3 * (1 << 18) / 64);
        EXPECT_TRUE(a.check_backward().pass());
    });
}

}  // namespace
}  // namespace tessera::check::finite_test
