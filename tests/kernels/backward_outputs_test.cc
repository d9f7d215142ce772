// SPDX-License-Identifier: Apache-2.0
//
// Gradients that a caller does not want are left out, which changes no bit of the others. Every kernel's gradients
// describe what its forward does, in all dtypes.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "kernels/support.hpp"
#include "registry.hpp"

namespace tessera::check::backward_outputs_test {
namespace {

using Out = Tensor Attention::*;
constexpr Out kOutputs[] = {&Attention::dq, &Attention::dk, &Attention::dv};

std::vector<Problem> problems(DType dtype) {
    Problem grouped = make_problem(2, 150, 210, 4, 2, 40, dtype);
    grouped.mask = {.causal = Causal::bottom_right};
    Problem capped = make_problem(1, 70, 130, 2, 1, 64, dtype);
    capped.softcap = 3;
    capped.bias = capped.bias_gradient = true;
    return {grouped, capped};
}

/// Runs the backward into the `wanted` outputs. The others keep their poison.
bool run_wanted(Attention& a, const KernelInfo& kernel, const std::vector<Out>& wanted) {
    const Plan how = plan(a.problem, {.pass = Pass::backward, .kernel = kernel.name, .threads = 2});
    for (Tensor* out : {&a.dq, &a.dk, &a.dv, &a.dbias}) out->poison();
    BackwardArgs args = a.backward_args();
    for (auto [which, view] :
         {std::pair{&Attention::dq, &args.dq}, {&Attention::dk, &args.dk}, {&Attention::dv, &args.dv}}) {
        if (std::find(wanted.begin(), wanted.end(), which) == wanted.end()) *view = {};
    }
    device::run_on_host_tensors(how, args, [&](const BackwardArgs& on_device, std::span<std::byte> workspace) {
        tessera::backward(how, on_device, workspace, {});
    });
    return true;
}

TEST(BackwardOutputs, those_left_out_change_no_bit_of_the_others) {
    for (const DType dtype : {DType::fp32, DType::bf16, DType::fp16}) {
        for (const Problem& p : problems(dtype)) {
            Attention all(p);
            all.prepare_backward();
            for_each_kernel(Pass::backward, [&](const KernelInfo& kernel) {
                if (!all.backward(kernel, {.threads = 2})) return;
                for (const std::vector<Out>& wanted :
                     {std::vector<Out>{&Attention::dq}, {&Attention::dk, &Attention::dv}, {&Attention::dv}, {}}) {
                    Attention some = all;
                    ASSERT_TRUE(run_wanted(some, kernel, wanted));
                    Attention poisoned = all;
                    for (Tensor* out : {&poisoned.dq, &poisoned.dk, &poisoned.dv}) out->poison();
                    for (const Out out : kOutputs) {
                        const bool is_wanted = std::find(wanted.begin(), wanted.end(), out) != wanted.end();
                        const Attention& expected = is_wanted ? all : poisoned;
                        EXPECT_EQ((some.*out).memory, (expected.*out).memory) << p.describe() << ", output "
                                                                              << (out == kOutputs[0]   ? "dq"
                                                                                  : out == kOutputs[1] ? "dk"
                                                                                                       : "dv");
                    }
                    EXPECT_EQ(some.dbias.memory, all.dbias.memory) << p.describe();
                }
            });
        }
    }
}

/// The error that rounding makes in a sum of `count` numbers, relative to one of them.
double rounding(DType dtype, double count) {
    const double unit = dtype == DType::fp32 ? 0x1p-23 : dtype == DType::fp16 ? 0x1p-10 : 0x1p-7;
    return unit * std::sqrt(count);
}

/// LSE may be rounded below a score, by the last place of a large number. The weight is then cut to 1: with one query
/// and one key, dV is dO. (CUDA kernels use the largest score in rows whose LSE is large.)
TEST(BackwardOutputs, a_weight_is_at_most_1_where_lse_is_rounded_below_the_score) {
    for (const DType dtype : kStorageTypes) {
        for (const double root : {0x1p2, 0x1p4, 0x1p14, 0x1p50}) {
            if (dtype == DType::fp16 && root > 65504) continue;
            Problem p = make_problem(1, 1, 1, 1, 1, 8, dtype);
            p.scale = 1;
            Attention a(p);
            a.q.fill_value(0), a.k.fill_value(0);
            a.q.set(root, 0, 0, 0, 0), a.k.set(root, 0, 0, 0, 0);
            a.prepare_backward();
            *a.lse.view.at<float>(0, 0, 0) = std::nextafter(static_cast<float>(root * root), 0.0F);
            for_each_kernel(Pass::backward, [&](const KernelInfo& kernel) {
                if (kernel.backend == Backend::cuda || !a.backward(kernel)) return;
                EXPECT_TRUE(a.dv.same_bits(a.d_o)) << name_of(dtype) << ", score " << root * root;
            });
        }
    }
}

/// At scores of 2^20 an LSE in fp32 is off by up to 1/32, so P = exp(score - LSE) would be off by 3 %. The row's own
/// sum normalises it: three keys of one score have weights of 1/3, and dV is dO / 3.
TEST(BackwardOutputs, weights_of_large_scores_are_normalised_by_their_sum) {
    for (const DType dtype : kStorageTypes) {
        Problem p = make_problem(1, 1, 3, 1, 1, 8, dtype);
        p.scale = 1;
        Attention a(p);
        a.q.fill_value(0), a.k.fill_value(0);
        a.q.set(1024, 0, 0, 0, 0);
        for (std::int64_t j = 0; j < 3; ++j) a.k.set(1024, 0, j, 0, 0);
        a.prepare_backward();
        for_each_kernel(Pass::backward, [&](const KernelInfo& kernel) {
            if (!a.backward(kernel)) return;
            for (std::int64_t j = 0; j < 3; ++j) {
                for (std::int64_t c = 0; c < 8; ++c) {
                    const double expected = a.d_o.get(0, 0, 0, c) / 3;
                    ASSERT_NEAR(a.dv.get(0, j, 0, c), expected, 2 * rounding(dtype, 1) * std::abs(expected) + 1e-7)
                        << name_of(dtype) << ", key " << j << ", column " << c;
                }
            }
        });
    }
}

/// Without a score every visible key weighs the same, and dV is the mean of dO over the queries that see the key.
TEST(BackwardOutputs, dv_of_equal_weights_is_a_mean) {
    for (const DType dtype : {DType::fp32, DType::bf16, DType::fp16}) {
        Problem p = make_problem(1, 90, 90, 2, 1, 64, dtype);
        p.mask = {.causal = Causal::bottom_right};
        Attention a(p);
        a.q.fill_value(0);
        a.prepare_backward();
        for_each_kernel(Pass::backward, [&](const KernelInfo& kernel) {
            if (!a.backward(kernel)) return;
            for (std::int64_t j = 0; j < p.len_kv; ++j) {
                for (std::int64_t c = 0; c < p.head_dim; c += 7) {
                    double expected = 0;
                    double size = 0;
                    for (std::int64_t i = j; i < p.len_q; ++i) {
                        for (std::int64_t h = 0; h < 2; ++h) {
                            const double term = a.d_o.get(0, i, h, c) / static_cast<double>(i + 1);
                            expected += term;
                            size += std::abs(term);
                        }
                    }
                    ASSERT_NEAR(a.dv.get(0, j, 0, c), expected, 2 * rounding(dtype, 1) * size + 1e-7)
                        << p.describe() << ", key " << j << ", column " << c;
                }
            }
        });
    }
}

/// dS of a row sums to 0, so if all keys are equal, dQ is 0; with dLSE it is dLSE times that key.
TEST(BackwardOutputs, dq_of_equal_keys_is_that_of_dlse) {
    for (const DType dtype : {DType::fp32, DType::bf16, DType::fp16}) {
        for (const bool with_dlse : {false, true}) {
            Problem p = make_problem(1, 70, 130, 2, 2, 64, dtype);
            p.scale = 0.125;
            Attention a(p);
            for (std::int64_t j = 0; j < p.len_kv; ++j) {
                for (std::int64_t h = 0; h < 2; ++h) {
                    for (std::int64_t c = 0; c < p.head_dim; ++c) a.k.set(c % 2 == 0 ? 1.0 : -0.5, 0, j, h, c);
                }
            }
            if (with_dlse) {
                a.dlse = Tensor(DType::fp32, {1, 2, p.len_q});
                a.dlse.fill_value(3);
            }
            a.prepare_backward();
            for_each_kernel(Pass::backward, [&](const KernelInfo& kernel) {
                if (!a.backward(kernel)) return;
                for (std::int64_t i = 0; i < p.len_q; ++i) {
                    for (std::int64_t c = 0; c < p.head_dim; c += 3) {
                        const double expected = with_dlse ? 3 * 0.125 * (c % 2 == 0 ? 1.0 : -0.5) : 0;
                        const double expected_size = std::abs(expected);
                        // P is about 1 / 130 and dP up to 30: each dS is rounded, then 130 of them are added up.
                        const double of_sum = 0.125 * 4 * rounding(dtype, 130) * 30 / 130;
                        ASSERT_NEAR(a.dq.get(0, i, 1, c), expected, of_sum + rounding(dtype, 1) * expected_size + 1e-6)
                            << p.describe() << ", query " << i << ", column " << c;
                    }
                }
            });
        }
    }
}

/// Loss = sum O dO + sum LSE dLSE, by the forward of the same backend and schedule in fp32. Its difference along a
/// random direction equals that by the gradients.
TEST(BackwardOutputs, gradients_are_the_slope_of_the_same_schedules_forward) {
    Problem p = make_problem(1, 40, 75, 4, 2, 24);
    p.mask = {.causal = Causal::bottom_right, .window_left = 50};
    p.softcap = 4;
    p.alibi = true;
    p.dropout = {.probability = 0.2, .seed = 5};
    Attention a(p);
    a.dlse = Tensor(DType::fp32, {1, 4, p.len_q});
    fill(a.dlse.view, Fill::normal, 77);
    a.prepare_backward();
    for_each_kernel(Pass::backward, [&](const KernelInfo& kernel) {
        const auto& all = kernels();
        Attention other = a;
        const auto forward = std::find_if(all.begin(), all.end(), [&](const KernelInfo& k) {
            return k.pass == Pass::forward && k.backend == kernel.backend && k.schedule == kernel.schedule &&
                   other.forward(k);
        });
        if (forward == all.end() || !a.backward(kernel)) return;
        const auto loss = [&](Out which, const Tensor& direction, double step) {
            Attention moved = a;
            const Packed d = packed_copy(direction.view);
            for_each_element((moved.*which).view, [&](std::int64_t flat, std::byte* element) {
                const double from = load_as_double(element, DType::fp32);
                store_from_double(element, DType::fp32, from + step * d.data[static_cast<std::size_t>(flat)]);
            });
            EXPECT_TRUE(moved.forward(*forward));
            double sum = 0;
            const Packed o = packed_copy(moved.o.view), d_o = packed_copy(moved.d_o.view);
            const Packed lse = packed_copy(moved.lse.view), dlse = packed_copy(moved.dlse.view);
            for (std::size_t i = 0; i < o.data.size(); ++i) sum += o.data[i] * d_o.data[i];
            for (std::size_t i = 0; i < lse.data.size(); ++i) {
                if (std::isfinite(lse.data[i])) sum += lse.data[i] * dlse.data[i];
            }
            return sum;
        };
        for (const auto& [which, gradient] : {std::pair{&Attention::q, &Attention::dq},
                                              {&Attention::k, &Attention::dk},
                                              {&Attention::v, &Attention::dv}}) {
            Tensor direction = a.*gradient;
            fill(direction.view, Fill::normal, 99);
            double predicted = 0;
            const Packed g = packed_copy((a.*gradient).view), d = packed_copy(direction.view);
            for (std::size_t i = 0; i < g.data.size(); ++i) predicted += g.data[i] * d.data[i];
            constexpr double kStep = 1e-3;
            const double measured = (loss(which, direction, kStep) - loss(which, direction, -kStep)) / (2 * kStep);
            EXPECT_NEAR(measured, predicted, 3e-3 * std::max(10.0, std::abs(predicted)));
        }
    });
}

}  // namespace
}  // namespace tessera::check::backward_outputs_test
