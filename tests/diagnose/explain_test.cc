// SPDX-License-Identifier: Apache-2.0
//
// The backend that PyTorch takes: cases from public threads, limits of the checks, and answers when little is known.
#include <gtest/gtest.h>

#include <string>

#include "diagnose/calls.hpp"
#include "diagnose/rules.hpp"
#include "tessera/error.hpp"

namespace tessera::diagnose::explain_test {
namespace {

std::string taken(const Call& call) {
    const Explanation explanation = explain(call);
    return explanation.aborts ? "none" : explanation.taken ? name_of(*explanation.taken) : "unknown";
}

Verdict verdict(const Call& call, SdpBackend backend) {
    for (const Verdict& v : explain(call).verdicts) {
        if (v.backend == backend) return v;
    }
    return {};
}

Call on(const Version& torch, int capability) {
    Call call = known_call(torch);
    call.gpu.capability = capability;
    return call;
}

TEST(Explain, the_order_follows_the_release) {
    EXPECT_EQ("flash", taken(on({2, 4, 0}, 90)));
    EXPECT_EQ("cuDNN", taken(on({2, 5, 0}, 90)));
    EXPECT_EQ("flash", taken(on({2, 5, 0}, 80)));
    EXPECT_EQ("flash", taken(on({2, 5, 1}, 90)));
    EXPECT_EQ("flash", taken(on({2, 9, 1}, 90)));
    EXPECT_EQ("flash", taken(on({2, 10, 0}, 90))) << "its wheel brings cuDNN 9.10";
    EXPECT_EQ("cuDNN", taken(on({2, 11, 0}, 90)));
    EXPECT_EQ("cuDNN", taken(on({2, 15, 0}, 100)));
    EXPECT_EQ("flash", taken(on({2, 15, 0}, 80)));
    EXPECT_EQ("flash", taken(on({2, 15, 0}, 89)));
}

TEST(Explain, a_version_of_cudnn_decides) {
    Call call = on({2, 10, 0}, 90);
    call.cudnn = 91501;
    EXPECT_EQ("cuDNN", taken(call));
    call.cudnn = 91500;
    EXPECT_EQ("flash", taken(call));
    call.cudnn = 91501;
    call.gpu.capability = 101;
    EXPECT_EQ("flash", taken(call)) << "10.1 needs a PyTorch that was built for CUDA 13";
    call.cuda = 13000;
    EXPECT_EQ("cuDNN", taken(call));
}

TEST(Explain, a_mask_means_efficient_and_grouped_heads_with_one_mean_math) {
    Call call = on({2, 8, 0}, 90);
    set_mask(call, {512, 512});
    EXPECT_EQ("memory-efficient", taken(call));
    set_shapes(call, {2, 8, 512, 64}, {2, 2, 512, 64}, {2, 2, 512, 64});
    call.enable_gqa = true;
    EXPECT_EQ("math", taken(call));
    call.torch = Version{2, 14, 0};
    EXPECT_EQ("memory-efficient", taken(call)) << "2.14 has grouped heads there, and this cuDNN is older than 9.15";
}

TEST(Explain, head_dims_of_cudnn) {
    const auto refused = [](const Version& torch, int capability, std::int64_t qk, std::int64_t v, int cudnn) {
        Call call = on(torch, capability);
        set_shapes(call, {2, 8, 512, qk}, {2, 8, 512, qk}, {2, 8, 512, v});
        call.cudnn = cudnn;
        return verdict(call, SdpBackend::cudnn).standing == Standing::refused;
    };
    EXPECT_TRUE(refused({2, 7, 0}, 90, 136, 136, 90501));
    EXPECT_FALSE(refused({2, 8, 0}, 90, 256, 256, 90501));
    EXPECT_TRUE(refused({2, 8, 0}, 90, 256, 256, 90500));
    EXPECT_TRUE(refused({2, 9, 0}, 90, 256, 256, 90900));
    EXPECT_TRUE(refused({2, 9, 0}, 80, 256, 256, 91002));
    EXPECT_TRUE(refused({2, 10, 0}, 100, 192, 128, 91900));
    EXPECT_FALSE(refused({2, 11, 0}, 100, 192, 128, 91100));
    EXPECT_TRUE(refused({2, 11, 0}, 100, 192, 192, 91900));
    EXPECT_FALSE(refused({2, 14, 0}, 100, 256, 256, 92400));
    EXPECT_TRUE(refused({2, 14, 0}, 107, 256, 256, 92500));
    EXPECT_TRUE(refused({2, 14, 0}, 90, 256, 256, 92200));
}

TEST(Explain, gpus_of_a_release) {
    const auto refused = [](const Version& torch, int capability) {
        return verdict(on(torch, capability), SdpBackend::flash).standing == Standing::refused;
    };
    EXPECT_TRUE(refused({2, 6, 0}, 120));
    EXPECT_FALSE(refused({2, 7, 0}, 120));
    EXPECT_TRUE(refused({2, 7, 0}, 121));
    EXPECT_FALSE(refused({2, 8, 0}, 121));
}

TEST(Explain, what_is_unknown_stays_unknown_unless_it_does_not_matter) {
    Call call = on({2, 11, 0}, 90);
    call.gpu.capability.reset();
    EXPECT_EQ("unknown", taken(call));
    const Verdict flash = verdict(call, SdpBackend::flash);
    EXPECT_EQ(Standing::unknown, flash.standing);
    ASSERT_FALSE(flash.wanting.empty());
    EXPECT_EQ("the GPU's compute capability", flash.wanting.front());

    set_mask(call, {512, 512});
    EXPECT_EQ(Standing::refused, verdict(call, SdpBackend::flash).standing) << "a mask keeps flash out on any GPU";

    call = Call{};  // not even a release
    EXPECT_EQ("unknown", taken(call));
    EXPECT_TRUE(explain(call).order.empty());
    call.enabled = Enabled{.flash = false, .efficient = false, .math = true, .cudnn = false};
    EXPECT_EQ("math", taken(call)) << "nothing else is left, whatever the release";
}

/// FA3 goes through flash's checks and its own: a field that both want is said once.
TEST(Explain, a_field_that_is_wanting_is_said_once) {
    Call call = on({2, 11, 0}, 90);
    call.gpu.capability.reset();
    EXPECT_EQ((std::vector<std::string>{"the GPU's compute capability"}), verdict(call, SdpBackend::fa3).wanting);
}

TEST(Explain, without_the_math_path_a_call_may_abort) {
    Call call = on({2, 8, 0}, 90);
    call.enabled->math = false;
    set_elements(call, Element::fp64);
    EXPECT_EQ("none", taken(call));
    set_elements(call, Element::fp32);
    EXPECT_EQ("memory-efficient", taken(call));
}

TEST(Explain, unbatched_inputs_pass_from_2_14_on) {
    Call call = on({2, 13, 0}, 80);
    set_shapes(call, {8, 512, 64}, {8, 512, 64}, {8, 512, 64});
    EXPECT_EQ("math", taken(call));
    call.torch = Version{2, 14, 0};
    EXPECT_EQ("flash", taken(call));
}

TEST(Explain, fa3_is_refused_as_flash_is_and_takes_fp8) {
    Call call = on({2, 11, 0}, 90);
    EXPECT_EQ(Standing::could_run, verdict(call, SdpBackend::fa3).standing);
    set_mask(call, {512, 512});
    EXPECT_STREQ("flash-mask", verdict(call, SdpBackend::fa3).refusals.front()->name);
    call = on({2, 11, 0}, 90);
    set_elements(call, Element::fp8_e4m3);
    EXPECT_EQ(Standing::refused, verdict(call, SdpBackend::flash).standing);
    EXPECT_EQ(Standing::could_run, verdict(call, SdpBackend::fa3).standing);
}

TEST(Explain, refuses_what_the_table_does_not_hold) {
    EXPECT_THROW(explain(Call{.torch = Version{2, 3, 1}}), Error);
    EXPECT_THROW(explain(Call{.torch = Version{2, 16, 0}}), Error);
}

TEST(Explain, defaults_are_assumed_in_words) {
    std::vector<std::string> assumed;
    const Call call = assume_defaults(Call{.torch = Version{2, 11, 0}, .dropout = 0.5}, assumed);
    EXPECT_EQ(91900, *call.cudnn);
    EXPECT_EQ(0.5, *call.dropout);
    EXPECT_FALSE(call.mask_kind.has_value());
    EXPECT_EQ("cuDNN 9.19.0, as PyPI's wheel of 2.11 has it", assumed.front());
}

}  // namespace
}  // namespace tessera::diagnose::explain_test
