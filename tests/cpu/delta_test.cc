// SPDX-License-Identifier: Apache-2.0
//
// Gradients in bf16 and fp16 if V, K or dO has a mean. delta = rowsum(dO * O) with rounded O is then far too inexact:
// RMSE up to 30 times that of the unfused computation, whose delta sums its own weights
// (docs/decisions/delta-of-rounded-output.md).
#include <cmath>
#include <functional>
#include <utility>

#include "kernels/rounded_output.hpp"
#include "units.hpp"

namespace tessera::check::delta_test {
namespace {

using namespace rounded_output;

/// Runs f() on the SIMD path and on every matrix unit of this processor, with the unit in messages.
void on_every_unit(const std::function<void()>& f) {
    using cpu::matrix::Unit;
    for (const Unit unit : {Unit::none, Unit::dot, Unit::amx}) {
        if (!cpu::matrix::has_unit(unit)) continue;
        SCOPED_TRACE(testing::Message() << "unit " << static_cast<int>(unit));
        const cpu::matrix::OnlyUnit only(unit);
        f();
    }
}

class RoundedOutput : public testing::TestWithParam<std::tuple<DType, const char*>> {};

TEST_P(RoundedOutput, does_not_spoil_gradients_of_inputs_with_a_mean) {
    const auto [dtype, feature] = GetParam();
    for (const Inputs& inputs : kInputs) {
        SCOPED_TRACE(inputs.name);
        Attention a = make_call(feature, dtype, inputs);
        a.prepare_backward();
        const UnfusedRatios ratios(a);
        on_every_unit([&] {
            for_each_kernel(Pass::backward, [&](const KernelInfo& kernel) {
                if (kernel.backend != Backend::cpu) return;
                ASSERT_TRUE(a.backward(kernel, {.threads = 2}));
                ratios.expect_kept(a);
            });
        });
    }
}

INSTANTIATE_TEST_SUITE_P(Cpu, RoundedOutput,
                         testing::Combine(testing::ValuesIn(kRoundedTypes),
                                          testing::Values("plain", "causal", "window", "grouped", "dropout", "softcap",
                                                          "bias", "dlse", "short", "ragged")),
                         [](const auto& which) {
                             return std::string(name_of(std::get<0>(which.param))) + "_" + std::get<1>(which.param);
                         });

/// Delta sums over the keys that the row sees, in one order.
TEST(SummedDelta, takes_no_bit_from_hidden_keys_nor_from_threads) {
    for (const DType dtype : kRoundedTypes) {
        Problem p = make_problem(1, 130, 300, 2, 1, 24, dtype);
        p.mask = {.causal = Causal::bottom_right, .window_left = 100};
        Attention clean(p);
        shift(clean.v, 1);
        clean.prepare_backward();
        Attention dirty(clean);
        constexpr std::int64_t kHidden = 250;  // hidden from queries 0 .. 79; no query sees keys 0 .. 69
        for (std::int64_t c = 0; c < 24; ++c) {
            for (const std::int64_t key : {std::int64_t{3}, kHidden}) {
                dirty.k.set(std::nan(""), 0, key, 0, c);
                dirty.v.set(std::nan(""), 0, key, 0, c);
            }
        }
        on_every_unit([&] {
            for_each_kernel(Pass::backward, [&](const KernelInfo& kernel) {
                if (kernel.backend != Backend::cpu) return;
                ASSERT_TRUE(clean.backward(kernel) && dirty.backward(kernel, {.threads = 3}));
                for (std::int64_t i = 0; i < 80; ++i) {
                    for (std::int64_t h = 0; h < 2; ++h) {
                        ASSERT_EQ(clean.dq.get(0, i, h, 5), dirty.dq.get(0, i, h, 5)) << i << " " << h;
                    }
                }
                EXPECT_TRUE(std::isnan(dirty.dq.get(0, 80, 0, 5)));
                const Tensor once = clean.dq;
                ASSERT_TRUE(clean.backward(kernel, {.threads = 5}));
                EXPECT_TRUE(clean.dq.same_bits(once));
            });
        });
    }
}

}  // namespace
}  // namespace tessera::check::delta_test
