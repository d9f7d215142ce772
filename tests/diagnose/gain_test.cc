// SPDX-License-Identifier: Apache-2.0
#include "diagnose/gain.hpp"

#include <gtest/gtest.h>

#include "diagnose/calls.hpp"
#include "model/predict.hpp"

namespace tessera::diagnose::gain_test {
namespace {

Call big_call() {
    Call call = known_call({2, 8, 0});
    set_shapes(call, {4, 16, 4096, 128}, {4, 16, 4096, 128}, {4, 16, 4096, 128});
    call.is_causal = true;
    return call;
}

TEST(Gain, is_what_the_model_predicts_for_the_better_kernel) {
    const Call call = big_call();
    std::string missing;
    const Problem problem = *problem_of(call, missing);
    EXPECT_EQ(Causal::top_left, problem.mask.causal);
    const double expected =
        model::predict(problem, Schedule::fa3, Pass::forward, *model::find_machine("h200"), {.by = "flash-attention"})
            .ms;
    const Gain gain = diagnose::gain(call, SdpBackend::fa3, Pass::forward, {}, {});
    EXPECT_EQ("", gain.missing);
    EXPECT_DOUBLE_EQ(expected, gain.predicted_ms);
    EXPECT_LT(gain.kernel_ms, gain.predicted_ms) << "a profiler shows a kernel without its launch";
    EXPECT_GT(gain.error, 0);
    EXPECT_EQ("fa3 of flash-attention", gain.kernel);
    EXPECT_EQ(0, gain.call_factor);
    EXPECT_TRUE(gain.caveats.empty()) << gain.caveats.front();
}

TEST(Gain, of_a_step_is_amdahls) {
    const Call call = big_call();
    const double kernel = gain(call, SdpBackend::flash, Pass::forward, {}, {}).kernel_ms;
    const Measured measured{kernel * 2, 10, kernel * 40};
    const Gain half = gain(call, SdpBackend::flash, Pass::forward,
                           baseline_of(call, SdpBackend::math, Pass::forward, measured), measured);
    EXPECT_NEAR(2, half.call_factor, 1e-12);
    EXPECT_NEAR(40.0 / 30, half.step_factor, 1e-12);
    EXPECT_TRUE(half.faster);
}

TEST(Gain, says_why_there_is_none) {
    Call call = big_call();
    const auto asked = [&](SdpBackend backend) { return gain(call, backend, Pass::forward, {}, {}); };
    EXPECT_EQ("the model has no constants for FA4 kernels on h200", asked(SdpBackend::fa4).missing);
    call.gpu.name = "NVIDIA A10";
    EXPECT_NE("", asked(SdpBackend::fa3).missing);
    const Gain elsewhere = asked(SdpBackend::flash);
    EXPECT_EQ("", elsewhere.missing);
    ASSERT_FALSE(elsewhere.caveats.empty());
    EXPECT_NE(std::string::npos, elsewhere.caveats.front().find("not compared with measurements on a10"))
        << elsewhere.caveats.front();
    EXPECT_GE(elsewhere.error, 0.3) << "a card without rows has a wide bar";
    call.gpu.name = "Imaginary 9000";
    EXPECT_NE(std::string::npos, asked(SdpBackend::flash).missing.find("Imaginary"));
    call = big_call();
    call.k.shape.reset();
    EXPECT_NE("", asked(SdpBackend::flash).missing);
}

/// A backend on a GPU has the kernel that cuDNN and PyTorch have there.
TEST(Gain, asks_for_the_kernel_of_the_gpu) {
    Call call = big_call();
    const auto kernel = [&](SdpBackend backend) { return gain(call, backend, Pass::forward, {}, {}).kernel; };
    EXPECT_EQ("fa3 of cudnn", kernel(SdpBackend::cudnn));
    call.gpu = {"NVIDIA A100-SXM4-80GB", 80, false};
    EXPECT_EQ("fa2 of cudnn", kernel(SdpBackend::cudnn));
    EXPECT_EQ("", kernel(SdpBackend::fa4));
    call.gpu = {"NVIDIA B200", 100, false};
    EXPECT_EQ("fa3 of flash-attention", kernel(SdpBackend::fa4));
    EXPECT_EQ("fa3 of cudnn", kernel(SdpBackend::cudnn));
}

/// A caveat says what the bar was compared with.
TEST(Gain, says_what_the_prediction_was_compared_with) {
    Call call = big_call();
    const auto caveat = [&](const char* gpu, int capability) {
        call.gpu = {gpu, capability, false};
        const Gain gain = diagnose::gain(call, SdpBackend::cudnn, Pass::forward, {}, {});
        return gain.caveats.empty() ? gain.missing : gain.caveats.front();
    };
    EXPECT_NE(caveat("NVIDIA H100 80GB HBM3", 90).find("and compared with some measurements on h100"),
              std::string::npos);
    EXPECT_NE(caveat("NVIDIA B200", 100).find("and compared with published tables of b200"), std::string::npos);
    EXPECT_NE(caveat("NVIDIA A10", 86).find("not compared with measurements on a10"), std::string::npos);
    set_shapes(call, {4, 16, 1, 128}, {4, 16, 4096, 128}, {4, 16, 4096, 128});
    call.is_causal = false;
    EXPECT_EQ(caveat("NVIDIA B200", 100).find("published tables"), std::string::npos) << "they have no decoding";
}

/// The memory-efficient kernels took 1.87 times FlashAttention-2's time in the traces of an H200. The math path is
/// predicted where the model has it, and has a lower bound elsewhere.
TEST(Gain, a_baseline_has_a_source) {
    Call call = big_call();
    const Baseline efficient = baseline_of(call, SdpBackend::efficient, Pass::forward, {});
    EXPECT_NEAR(efficient.ms / baseline_of(call, SdpBackend::flash, Pass::forward, {}).ms, 1.87, 0.3);
    EXPECT_EQ("predicted as PyTorch's memory-efficient kernel", efficient.source);
    // math_causal of tests/diagnose/traces took 15.8 ms for 32 heads of 4,096 tokens.
    set_shapes(call, {1, 32, 4096, 128}, {1, 32, 4096, 128}, {1, 32, 4096, 128});
    const Baseline math = baseline_of(call, SdpBackend::math, Pass::forward, {});
    EXPECT_FALSE(math.at_least);
    EXPECT_LT(math.ms, 15.8 * (1 + math.error));
    EXPECT_GT(math.ms, 15.8 / (1 + math.error));
    EXPECT_EQ("predicted as PyTorch's math path", math.source);
    call.torch = Version{2, 4, 0};  // multiplies in 16 bits
    const Baseline bound = baseline_of(call, SdpBackend::math, Pass::forward, {});
    EXPECT_TRUE(bound.at_least);
    EXPECT_GT(bound.ms, 0.5);
    EXPECT_LT(bound.ms, 15.8);
    call = big_call();
    // new_math_groups took 0.07485 ms: the model does not count the fixed costs of so short kernels.
    set_shapes(call, {2, 8, 384, 64}, {2, 8, 384, 64}, {2, 8, 384, 64});
    const Baseline brief = baseline_of(call, SdpBackend::math, Pass::forward, {});
    EXPECT_TRUE(brief.at_least);
    EXPECT_LT(brief.ms, 0.07485);
    call = big_call();
    call.mask_kind = MaskKind::floating;
    EXPECT_TRUE(baseline_of(call, SdpBackend::math, Pass::forward, {}).at_least);
    call.q.element = Element::fp32;
    EXPECT_EQ(0, baseline_of(call, SdpBackend::efficient, Pass::forward, {}).ms) << "the model has 16 bits alone";
}

/// Every field of a call that costs time reaches the Problem, or the prediction says that it lacks the time.
TEST(Gain, leaves_nothing_out_silently) {
    Call call = big_call();
    call.dropout = 0.1;
    std::string missing;
    EXPECT_DOUBLE_EQ(problem_of(call, missing)->dropout.probability, 0.1);
    using enum SdpBackend;
    for (const SdpBackend backend : {flash, cudnn, efficient}) {
        const Gain gain = diagnose::gain(call, backend, Pass::forward, {}, {});
        EXPECT_EQ(gain.not_modelled, "dropout") << name_of(backend);
        EXPECT_GE(gain.error, 1) << name_of(backend);
        ASSERT_FALSE(gain.caveats.empty());
        EXPECT_EQ(gain.caveats.back(), "without the cost of dropout") << name_of(backend);
        EXPECT_EQ(baseline_of(call, backend, Pass::forward, {}).not_modelled, "dropout") << name_of(backend);
    }
    EXPECT_NE(diagnose::gain(call, fa3, Pass::forward, {}, {}).missing.find("dropout"), std::string::npos);
    call = big_call();
    call.deterministic = true;
    EXPECT_EQ(gain(call, flash, Pass::backward, {}, {}).not_modelled, "the fixed order of deterministic sums");
    EXPECT_EQ(gain(call, flash, Pass::forward, {}, {}).not_modelled, "");
    call = big_call();
    set_mask(call, {4096, 4096}, MaskKind::floating);
    call.mask.requires_grad = true;
    EXPECT_EQ(gain(call, efficient, Pass::backward, {}, {}).not_modelled, "the mask's gradient");
    call = big_call();
    set_shapes(call, {1, 16, 4096, 128}, {4, 1, 4096, 128}, {4, 1, 4096, 128});
    const Problem broadcast = *problem_of(call, missing);
    EXPECT_EQ(broadcast.batch, 4);
    EXPECT_EQ(broadcast.heads_kv, 1);
    call = big_call();
    for (const auto set :
         {+[](Call& c) { c.packed = true; }, +[](Call& c) { c.nested = true; },
          +[](Call& c) { c.beyond_sdpa = {"softcap"}; }, +[](Call& c) { c.q.element = Element::fp8_e4m3; }}) {
        Call other = call;
        set(other);
        missing.clear();
        EXPECT_FALSE(problem_of(other, missing));
        EXPECT_NE(missing, "");
    }
}

/// A predicted kernel that lacks the time of dropout is faster only beyond its wide bar, and by at most its factor if
/// what runs was measured.
TEST(Gain, of_a_call_with_dropout_needs_more_than_its_wide_bar) {
    Call call = big_call();
    call.dropout = 0.1;
    const double kernel = gain(call, SdpBackend::flash, Pass::forward, {}, {}).kernel_ms;
    const auto measured_at = [&](double ms) {
        const Measured measured{ms, 1, ms};
        return gain(call, SdpBackend::flash, Pass::forward,
                    baseline_of(call, SdpBackend::math, Pass::forward, measured), measured);
    };
    EXPECT_FALSE(measured_at(1.9 * kernel).faster);
    EXPECT_TRUE(measured_at(2.5 * kernel).faster);
    EXPECT_TRUE(measured_at(2.5 * kernel).at_most);
    const Baseline predicted = baseline_of(call, SdpBackend::efficient, Pass::forward, {});
    EXPECT_FALSE(gain(call, SdpBackend::flash, Pass::forward, predicted, {}).faster) << "both lack it";
    call.dropout = 0;
    EXPECT_TRUE(
        gain(call, SdpBackend::flash, Pass::forward, baseline_of(call, SdpBackend::efficient, Pass::forward, {}), {})
            .faster);
}

/// The memory-efficient kernel reads the mask for each head: 4 * 16 heads * 4,096^2 * 2 bytes, at the rate of the L2 if
/// half of it holds the mask.
TEST(Gain, counts_the_bytes_of_a_mask) {
    Call call = big_call();
    call.is_causal = false;
    const auto ms = [&] { return baseline_of(call, SdpBackend::efficient, Pass::forward, {}).ms; };
    const double without = ms();
    set_mask(call, {1, 1, 1, 4096}, MaskKind::floating);
    const double in_l2 = ms();
    set_mask(call, {4, 16, 4096, 4096}, MaskKind::floating);
    const double in_memory = ms();
    const double bytes = 64.0 * 4096 * 4096 * 2;
    EXPECT_GT(in_l2 - without, bytes / 12e9);
    EXPECT_LT(in_l2 - without, bytes / 6e9);
    EXPECT_GT(in_memory - without, bytes / 4.8e9);
    EXPECT_LT(in_memory - without, bytes / 3e9);
    call.mask.strides = Sizes{0, 0, 4096, 1};  // expanded from one matrix of 32 MiB, which is over half of the L2
    EXPECT_DOUBLE_EQ(ms(), in_memory);
    call.mask.strides = Sizes{0, 0, 0, 1};
    EXPECT_DOUBLE_EQ(ms(), in_l2);
    const Gain cudnn = gain(call, SdpBackend::cudnn, Pass::forward, {}, {});
    EXPECT_EQ(cudnn.caveats.back(), "of the mask, the time of its bytes alone");
    EXPECT_GE(cudnn.error, 0.5);
}

}  // namespace
}  // namespace tessera::diagnose::gain_test
