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
    const Gain gain = diagnose::gain(call, SdpBackend::fa3, Pass::forward, {});
    EXPECT_EQ("", gain.missing);
    EXPECT_DOUBLE_EQ(expected, gain.predicted_ms);
    EXPECT_EQ("fa3 of flash-attention", gain.kernel);
    EXPECT_EQ(0, gain.call_factor);
    EXPECT_TRUE(gain.caveats.empty()) << gain.caveats.front();
}

TEST(Gain, of_a_step_is_amdahls) {
    const Call call = big_call();
    const double predicted = gain(call, SdpBackend::flash, Pass::forward, {}).predicted_ms;
    const Gain half = gain(call, SdpBackend::flash, Pass::forward, {predicted * 2, 10, predicted * 40});
    EXPECT_NEAR(2, half.call_factor, 1e-12);
    EXPECT_NEAR(40.0 / 30, half.step_factor, 1e-12);
}

TEST(Gain, says_why_there_is_none) {
    Call call = big_call();
    EXPECT_EQ("the model has no constants for FA4 kernels", gain(call, SdpBackend::fa4, Pass::forward, {}).missing);
    call.gpu.name = "NVIDIA A100-SXM4-80GB";
    EXPECT_NE("", gain(call, SdpBackend::fa3, Pass::forward, {}).missing);
    const Gain elsewhere = gain(call, SdpBackend::flash, Pass::forward, {});
    EXPECT_EQ("", elsewhere.missing);
    ASSERT_FALSE(elsewhere.caveats.empty());
    EXPECT_NE(std::string::npos, elsewhere.caveats.front().find("not compared with measurements on a100"))
        << elsewhere.caveats.front();
    call.gpu.name = "Imaginary 9000";
    EXPECT_NE(std::string::npos, gain(call, SdpBackend::flash, Pass::forward, {}).missing.find("Imaginary"));
    call = big_call();
    call.k.shape.reset();
    EXPECT_NE("", gain(call, SdpBackend::flash, Pass::forward, {}).missing);
}

TEST(Gain, faster_backends_depend_on_the_gpu) {
    using enum SdpBackend;
    EXPECT_EQ((std::vector{fa3, cudnn}), faster_than(flash, {"NVIDIA H200", 90, false}));
    EXPECT_EQ((std::vector{flash, efficient}), faster_than(math, {"NVIDIA A100", 80, false}));
    EXPECT_TRUE(faster_than(fa3, {"NVIDIA H200", 90, false}).empty());
}

}  // namespace
}  // namespace tessera::diagnose::gain_test
