// SPDX-License-Identifier: Apache-2.0
//
// Tests of the judge: slightly wrong results have to fail, right ones have to pass. All other tests here depend on
// this.
#include "check/compare.hpp"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <tuple>
#include <vector>

#include "check/case.hpp"
#include "check/compare_tensor.hpp"
#include "check/gold.hpp"
#include "check/guarded.hpp"
#include "check/rounding_noise.hpp"
#include "check/unfused.hpp"
#include "core/dropout.hpp"
#include "kernels/support.hpp"

namespace tessera::check::compare_test {
namespace {

const KernelInfo& reference_forward() { return kernels()[kernels().size() - 2]; }
const KernelInfo& reference_backward() { return kernels()[kernels().size() - 1]; }

Attention finished(DType dtype, std::int64_t len_kv = 200) {
    Attention a(make_problem(2, 160, len_kv, 2, 1, 32, dtype));
    EXPECT_TRUE(a.forward(reference_forward()));
    EXPECT_TRUE(a.backward(reference_backward()));
    return a;
}

const TensorReport& of(const Report& report, const std::string& name) {
    for (const TensorReport& t : report.tensors) {
        if (t.name == name) return t;
    }
    ADD_FAILURE() << "no " << name;
    return report.tensors.front();
}

TEST(Compare, right_results_pass) {
    for (const DType dtype : kStorageTypes) {
        const Attention a = finished(dtype);
        EXPECT_TRUE(a.check_forward().pass()) << a.check_forward().describe();
        EXPECT_TRUE(a.check_backward().pass()) << a.check_backward().describe();
    }
}

/// With one key dS is 0 but for the error of delta, so dQ is that error times K.
TEST(Compare, the_residual_of_o_is_granted_what_it_leaves_of_delta) {
    for (const auto& [rest, error, right] : {std::tuple{false, 2e-5, false}, {true, 2e-5, true}, {true, 1e-2, false}}) {
        Attention a = finished(DType::bf16, 1);
        if (rest) a.keep_residual();
        a.dq.fill_value(0);
        EXPECT_TRUE(of(a.check_backward(), "dq").pass);
        for (std::int64_t i = 0; i < a.problem.len_q; ++i) {
            for (std::int64_t c = 0; c < a.problem.head_dim; ++c) a.dq.set(error * a.k.get(0, 0, 0, c), 0, i, 0, c);
        }
        EXPECT_EQ(of(a.check_backward(), "dq").pass, right) << rest << " " << error;
    }
}

/// One key has almost all weight of a row and is dropped; another has hardly any weight and is kept. delta and dS come
/// from the second one alone, which may be too small for a kernel.
TEST(Compare, a_weight_too_small_to_be_held_may_be_lost_from_gradients) {
    for (const auto& [bias, right] : {std::pair{-70, true}, {-55, false}}) {
        Problem p = make_problem(1, 1, 2, 1, 1, 32, DType::bf16);
        p.bias = true;
        p.dropout = {.probability = 0.5, .seed = 0};
        const auto kept = [&](int key) {
            return dropout_word(p.dropout.seed, 0, 0, 0, key) < keep_threshold(p.dropout.probability);
        };
        while (kept(0) || !kept(1)) ++p.dropout.seed;
        Attention a(p);
        a.bias.set(0, 0, 0, 0, 0);
        a.bias.set(bias, 0, 0, 0, 1);
        ASSERT_TRUE(a.forward(reference_forward()));
        ASSERT_TRUE(a.backward(reference_backward()));
        EXPECT_TRUE(a.check_backward().pass()) << a.check_backward().describe();
        a.dq.fill_value(0);
        a.dk.fill_value(0);
        EXPECT_EQ(a.check_backward().pass(), right) << a.check_backward().describe();
    }
}

TEST(Compare, fp32_limit_is_two_in_a_million) {
    for (const auto& [factor, right] : {std::pair{1 + 1.8e-6, true}, {1 + 2.4e-6, false}, {1 - 2.4e-6, false}}) {
        Attention a = finished(DType::fp32);
        a.o.scale_by(factor);
        EXPECT_EQ(of(a.check_forward(), "o").pass, right) << factor;
    }
    for (const auto& [factor, right] : {std::pair{1 + 0.9e-5, true}, {1 + 1.2e-5, false}}) {
        for (Tensor Attention::*which : {&Attention::dq, &Attention::dk, &Attention::dv}) {
            Attention a = finished(DType::fp32);
            (a.*which).scale_by(factor);
            EXPECT_EQ(a.check_backward().pass(), right) << factor;
        }
    }
}

TEST(Compare, one_wrong_element_of_many_fails) {
    for (const DType dtype : kStorageTypes) {
        for (Tensor Attention::*which : {&Attention::o, &Attention::dq, &Attention::dk, &Attention::dv}) {
            Attention a = finished(dtype);
            Tensor& t = a.*which;
            t.set(t.get(1, 77, 0, 13) + 0.02, 1, 77, 0, 13);
            EXPECT_FALSE(a.check_forward().pass() && a.check_backward().pass()) << name_of(dtype);
        }
    }
}

TEST(Compare, lse_of_another_base_or_off_by_a_little_fails) {
    for (const DType dtype : kStorageTypes) {
        Attention a = finished(dtype);
        a.lse.scale_by(1.4426950408889634);
        EXPECT_FALSE(of(a.check_forward(), "lse").pass);
        Attention b = finished(dtype);
        b.lse.set(b.lse.get(1, 0, 9) + 2e-5, 1, 0, 9);
        EXPECT_FALSE(of(b.check_forward(), "lse").pass);
    }
}

TEST(Compare, nan_is_compared_exactly) {
    Attention a = finished(DType::fp32);
    a.o.set(std::nan(""), 0, 3, 1, 4);
    const Report report = a.check_forward();
    EXPECT_FALSE(of(report, "o").pass);
    EXPECT_EQ(of(report, "o").rule, "NaN or infinity");
    EXPECT_EQ(of(report, "o").worst.substr(0, 12), "[0, 3, 1, 4]");
    Attention b(make_problem(1, 20, 20, 1, 1, 8));
    b.k.set(std::nan(""), 0, 5, 0, 0);
    ASSERT_TRUE(b.forward(reference_forward()));
    EXPECT_TRUE(b.check_forward().pass());
    b.o.set(0, 0, 11, 0, 3);
    EXPECT_FALSE(b.check_forward().pass());
    Attention c = finished(DType::fp32);
    c.lse.set(-std::numeric_limits<double>::infinity(), 0, 0, 0);
    EXPECT_FALSE(of(c.check_forward(), "lse").pass);
}

/// Cuts the low bits off instead of rounding: every error points to zero.
TEST(Compare, truncation_to_bf16_is_a_bias) {
    Attention a = finished(DType::bf16);
    const ForwardGold gold(a.problem, a.forward_args());
    const auto* values = static_cast<const double*>(gold.o().data);
    for_each_element(a.o.view, [&](std::int64_t flat, std::byte* element) {
        const auto bits = std::bit_cast<std::uint32_t>(static_cast<float>(values[flat])) & 0xFFFF0000u;
        store_from_double(element, DType::bf16, std::bit_cast<float>(bits));
    });
    const TensorReport report = of(gold.compare(a.forward_args()), "o");
    EXPECT_FALSE(report.pass);
    EXPECT_EQ(report.rule, "bias outward");
}

/// The unfused computation is the yardstick: it passes, and a result with twice its error does not.
TEST(Compare, unfused_computation_is_the_yardstick) {
    for (const DType dtype : {DType::bf16, DType::fp16}) {
        Attention a(make_problem(2, 160, 20, 2, 1, 32, dtype));
        a.q.scale_by(
            0.25);  // larger scores, rounded as the unfused computation rounds them, break the rule per element
        const PackedCall<ForwardArgs> packed = pack(a.problem, a.forward_args());
        const ForwardGold gold(a.problem, a.forward_args());
        TensorGold unfused("o", a.o.view);
        add_unfused(packed, dtype, unfused);
        const auto* exact = static_cast<const double*>(gold.o().data);
        for (const double factor : {1.0, 2.0}) {
            for_each_element(a.o.view, [&](std::int64_t flat, std::byte* element) {
                const double error = unfused.unfused.data[static_cast<std::size_t>(flat)] - exact[flat];
                store_from_double(element, dtype, exact[flat] + factor * error);
            });
            ForwardArgs args = a.forward_args();
            args.lse = {};
            EXPECT_EQ(gold.compare(args).pass(), factor == 1) << factor << "\n" << gold.compare(args).describe();
        }
    }
}

/// Draws bf16 results from the right values and errors that the test makes up, and has them judged.
class Draws {
 public:
    explicit Draws(Attention& a) : a_(a), gold_(a.problem, a.forward_args()), unfused_("o", a.o.view) {
        add_unfused(pack(a.problem, a.forward_args()), a.problem.dtype, unfused_);
    }

    /// error(value, unfused error, number of the element) makes the error before the last rounding.
    template <class F>
    TensorReport judged(F error) {
        const auto* values = static_cast<const double*>(gold_.o().data);
        for_each_element(a_.o.view, [&](std::int64_t flat, std::byte* element) {
            const double noise = unfused_.unfused.data[static_cast<std::size_t>(flat)] - values[flat];
            store_from_double(element, DType::bf16, values[flat] + error(values[flat], noise, flat));
        });
        ForwardArgs args = a_.forward_args();
        args.lse = {};
        return of(gold_.compare(args), "o");
    }

 private:
    Attention& a_;
    ForwardGold gold_;
    TensorGold unfused_;
};

double root_mean_square(const std::vector<double>& all) {
    double squares = 0;
    for (const double x : all) squares += x * x;
    return std::sqrt(squares / static_cast<double>(all.size()));
}

/// Noise that makes the RMSE 1.2 times the unfused one, and 1.0 times for comparison. With small scores the unfused
/// computation is about as exact as any, so the margin is smallest.
TEST(Compare, a_fifth_more_noise_than_unfused_fails) {
    for (const double scale : {0.01, 0.05}) {
        Attention a(make_problem(1, 1024, 256, 2, 2, 32, DType::bf16));
        a.problem.scale = scale;
        Draws draws(a);
        const Random random(77);
        for (const double factor : {1.0, 1.2}) {
            std::vector<double> noises;
            draws.judged([&](double, double noise, std::int64_t) { return noises.emplace_back(noise), noise; });
            const double more = std::sqrt(factor * factor - 1) * root_mean_square(noises);
            const TensorReport report = draws.judged([&](double, double noise, std::int64_t flat) {
                return noise + more * random.normal(static_cast<std::uint64_t>(flat));
            });
            EXPECT_EQ(report.pass, factor == 1) << scale << " " << report.rule << " " << report.used();
        }
    }
}

/// With larger scores the unfused computation rounds S to more than a kernel has to: its noise is refused.
TEST(Compare, noise_of_unfused_scores_fails) {
    Attention a(make_problem(1, 1024, 256, 2, 2, 32, DType::bf16));
    Draws draws(a);
    const TensorReport report = draws.judged([&](double, double noise, std::int64_t) { return noise; });
    EXPECT_FALSE(report.pass);
    EXPECT_EQ(report.rule.substr(0, 16), "rmse / roundings");
    EXPECT_TRUE(draws.judged([&](double, double noise, std::int64_t) { return noise / 2; }).pass);
}

/// If weights or results are rounded toward zero instead of to nearest, all errors have one direction.
TEST(Compare, rounding_toward_zero_fails_in_few_rows_too) {
    for (const std::int64_t rows : {40, 160}) {
        Attention a(make_problem(1, rows, 20, 2, 1, 32, DType::bf16));
        Draws draws(a);
        const auto toward_zero = [](double value, double, std::int64_t) {
            const auto bits = std::bit_cast<std::uint32_t>(static_cast<float>(value)) & 0xFFFF0000u;
            return std::bit_cast<float>(bits) - value;
        };
        const TensorReport report = draws.judged(toward_zero);
        EXPECT_FALSE(report.pass) << rows;
        EXPECT_EQ(report.rule, "bias outward");
        const auto nearest = [](double, double, std::int64_t) { return 0.0; };
        EXPECT_TRUE(draws.judged(nearest).pass) << rows;
    }
}

/// Four copies of each query, in all of Q: the verdict is that of the rows, however often each is counted.
TEST(Compare, copies_of_rows_do_not_change_the_verdict) {
    Attention rows(make_problem(1, 40, 64, 2, 1, 32, DType::bf16));
    Attention copies(make_problem(1, 160, 64, 2, 1, 32, DType::bf16));
    copies.k = rows.k;
    copies.v = rows.v;
    for (std::int64_t i = 0; i < 160; ++i) {
        for (std::int64_t h = 0; h < 2; ++h) {
            for (std::int64_t c = 0; c < 32; ++c) copies.q.set(rows.q.get(0, i % 40, h, c), 0, i, h, c);
        }
    }
    Draws of_rows(rows);
    Draws of_copies(copies);
    const Random random(3);
    for (const double deviation : {0.0, 0.3e-3, 0.6e-3, 1e-3, 2e-3, 4e-3}) {
        for (const double shift : {0.0, 1e-4, 3e-4, 1e-3}) {
            const auto error = [&](double, double, std::int64_t flat) {  // flat counts within 40 rows of 2 x 32
                return shift + deviation * random.normal(static_cast<std::uint64_t>(flat % (40 * 64)));
            };
            const TensorReport one = of_rows.judged(error);
            const TensorReport four = of_copies.judged(error);
            EXPECT_EQ(one.pass, four.pass) << deviation << " " << shift;
            EXPECT_NEAR(one.used(), four.used(), 0.1 * one.used());  // blocks of 64 rows hold other copies
        }
    }
}

/// Equal columns of V give elements of O that round alike: the sum of 16 of them has 16 times the error of one. For
/// different columns it is 4 times.
TEST(Compare, copies_of_columns_round_alike) {
    const Tensor like(DType::bf16, {1, 1, 1, 16});
    TensorGold columns("o", like.view, DType::bf16);
    TensorGold copies("o", like.view, DType::bf16);
    for (std::size_t c = 0; c < 16; ++c) {
        columns.value.data[c] = 1 + 0.01 * static_cast<double>(c);
        copies.value.data[c] = 1.01;
    }
    const auto deviation = [](const TensorGold& gold) {
        return RoundingNoise(gold, DType::bf16, DType::bf16).deviation_of_sum({0}, true);
    };
    const double one = 0x1p-8 / std::sqrt(3.0);  // half a step, evenly spread
    EXPECT_NEAR(deviation(columns), 4 * one, 1e-12);
    EXPECT_NEAR(deviation(copies), 16 * one, 1e-12);
}

/// A typical bug of masks is a key more or less at the diagonal.
TEST(Compare, mask_off_by_one_fails) {
    for (const DType dtype : kStorageTypes) {
        Problem right = make_problem(1, 160, 200, 2, 1, 32, dtype);
        right.mask.causal = Causal::bottom_right;
        Attention a(right);
        a.problem.mask = {.window_right = 1};
        ASSERT_TRUE(a.forward(reference_forward()));
        ASSERT_TRUE(a.backward(reference_backward()));
        a.problem = right;
        const Report forward_report = a.check_forward();
        EXPECT_FALSE(of(forward_report, "o").pass);
        EXPECT_FALSE(of(forward_report, "lse").pass);
        EXPECT_FALSE(a.check_backward().pass());
    }
}

/// A kernel must not fold the scale into Q and round it to bf16 with Q.
TEST(Compare, lse_from_prescaled_bf16_queries_fails) {
    Attention a(make_problem(1, 64, 64, 1, 1, 64, DType::bf16));
    a.problem.scale = 0.3;
    Attention prescaled = a;
    prescaled.q.scale_by(0.3);
    prescaled.problem.scale = 1;
    ASSERT_TRUE(prescaled.forward(reference_forward()));
    a.lse = prescaled.lse;
    EXPECT_FALSE(of(a.check_forward(), "lse").pass);
}

TEST(Guarded, tells_gaps_and_bands) {
    GuardedTensor t(DType::bf16, {3, 4, 5}, Layout::random, 11);
    fill(t.view(), Fill::normal, 1);
    t.snapshot();
    EXPECT_TRUE(t.unchanged(true));
    *static_cast<std::uint16_t*>(static_cast<void*>(t.view().at<std::uint16_t>(1, 2, 3))) = 7;
    EXPECT_FALSE(t.unchanged(true));
    EXPECT_TRUE(t.unchanged(false));
    GuardedTensor packed(DType::fp32, {3, 4}, Layout::bshd, 0);
    packed.snapshot();
    packed.view().at<float>(0, 0)[12] = 1;  // one past the end
    EXPECT_FALSE(packed.unchanged(false));
    GuardedWorkspace workspace(100);
    EXPECT_TRUE(workspace.bands_unchanged());
    workspace.span().data()[100] = std::byte{0};
    EXPECT_FALSE(workspace.bands_unchanged());
}

TEST(Generate, same_numbers_everywhere) {
    const Random random(42);
    EXPECT_EQ(random.bits(0), Random(42).bits(0));
    EXPECT_NE(random.bits(0), random.bits(1));
    EXPECT_NE(random.bits(0), Random(42, 1).bits(0));
    Tensor packed(DType::fp32, {2, 30, 4, 8});
    fill(packed.view, Fill::normal, 5);
    Tensor strided(DType::fp32, {2, 4, 30, 8});
    const TensorView seen = transposed(strided.view, 1, 2);
    fill(seen, Fill::normal, 5);
    EXPECT_EQ(packed_copy(packed.view).data, packed_copy(seen).data);
    double sum = 0;
    double squares = 0;
    for (std::uint64_t i = 0; i < 100'000; ++i) {
        const double x = random.normal(i);
        sum += x;
        squares += x * x;
    }
    EXPECT_NEAR(sum / 1e5, 0, 0.015);
    EXPECT_NEAR(squares / 1e5, 1, 0.02);
    Tensor outliers(DType::fp32, {1, 1000, 10, 10});
    fill(outliers.view, Fill::outliers, 9);
    std::int64_t large = 0;
    for (const double x : packed_copy(outliers.view).data) large += std::abs(x) > 6;
    EXPECT_GT(large, 25);  // about 55 of the 100 outliers
    EXPECT_LT(large, 90);
}

TEST(Cases, are_reproduced_by_their_number) {
    for (const std::uint64_t index : {0u, 7u, 149u}) {
        const Case a = random_case(3, index);
        const auto b = find_case(3, std::to_string(index));
        ASSERT_TRUE(b.has_value());
        EXPECT_EQ(a.describe(), b->describe());
    }
    EXPECT_NE(random_case(3, 1).describe(), random_case(4, 1).describe());
    EXPECT_FALSE(find_case(3, "no such case").has_value());
    for (const Case& c : corner_cases()) {
        EXPECT_NO_THROW(c.problem.validate()) << c.id;
        ASSERT_TRUE(find_case(0, c.id).has_value());
        EXPECT_EQ(find_case(0, c.id)->describe(), c.describe());
        EXPECT_EQ(to_command(c, "k"), "tessera check --kernel k --seed " + std::to_string(c.seed) + " --case " + c.id);
    }
    for (std::uint64_t index = 0; index < 2000; ++index)
        ASSERT_NO_THROW(random_case(1, index).problem.validate()) << index;
}

}  // namespace
}  // namespace tessera::check::compare_test
