// SPDX-License-Identifier: Apache-2.0
//
// causal_lower_right of torch.nn.attention.bias: the steps of its class are taken here a second time.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "diagnose/advice.hpp"
#include "diagnose/call_inputs.hpp"
#include "diagnose/calls.hpp"
#include "diagnose/cure.hpp"
#include "diagnose/drawn_calls.hpp"
#include "diagnose/gain.hpp"
#include "diagnose/traces.hpp"
#include "diagnose/ways.hpp"
#include "long_run.hpp"

namespace tessera::diagnose::causal_bias_test {
namespace {

using enum SdpBackend;

bool runs(const Call& call, SdpBackend backend) { return verdict_of(call, backend).standing == Standing::could_run; }

/// The calls that CausalBias._dispatch makes, one after the other, until one runs.
Explanation by_hand(Call c) {
    c.causal_lower_right = false;
    const auto len = [](const Operand& t) { return (*t.shape)[t.shape->size() - 2]; };
    if (len(c.q) == len(c.k)) {
        c.is_causal = true;
        return explain(c);
    }
    const bool four = c.q.shape->size() == 4 && c.k.shape->size() == 4 && c.v.shape->size() == 4;
    for (const SdpBackend backend : {flash, efficient}) {  // they are asked of tensors as they are, never unsqueezed
        Explanation direct;
        direct.taken = backend;
        if (four && runs(c, backend)) return direct;
    }
    set_mask(c, {len(c.q), len(c.k)});
    c.mask.requires_grad = false;
    return explain(c);
}

TEST(CausalBias, is_dispatched_as_its_class_does) {
    std::mt19937 random(static_cast<std::mt19937::result_type>(random_seed(20261201)));
    int asked = 0, square = 0, masked = 0, raised = 0;
    const int times = long_run() ? 10 : 1;
    for (int question = 0; question < 4000 * times; ++question) {
        Call call = question % 2 == 0 ? cures::drawn(random) : cures::drawn_at_the_edges(random);
        if (call.mask_kind != MaskKind::none || call.nested == true) continue;
        call.is_causal = false;
        call.causal_lower_right = true;
        const bool dtypes_differ = call.q.element != call.k.element || call.q.element != call.v.element;
        const Explanation got = explain(call), expected = by_hand(call);
        ++asked;
        square += expected.order.empty()
                      ? 0
                      : (*call.q.shape)[call.q.shape->size() - 2] == (*call.k.shape)[call.k.shape->size() - 2];
        masked += expected.order.empty() ? 0 : 1;
        raised += got.raises ? 1 : 0;
        if (dtypes_differ) {
            EXPECT_TRUE(got.raises) << question;
            continue;
        }
        EXPECT_EQ(got.taken, expected.taken) << question << " " << text_of(call);
        EXPECT_EQ(got.aborts, expected.aborts) << question << " " << text_of(call);
        EXPECT_EQ(got.raises.has_value(), expected.raises.has_value()) << question << " " << text_of(call);
    }
    EXPECT_GT(asked, 1500 * times);
    EXPECT_GT(square, 300 * times);
    EXPECT_GT(masked, 500 * times);
    EXPECT_GT(raised, 50 * times);
}

Call lower_right(const Version& torch, std::int64_t head_dim = 64) {
    Call call = known_call(torch);
    set_shapes(call, {2, 8, 256, head_dim}, {2, 8, 1024, head_dim}, {2, 8, 1024, head_dim});
    call.causal_lower_right = true;
    return call;
}

/// cuDNN comes first in 2.11 on an H200, and is not asked.
TEST(CausalBias, asks_flash_before_cudnn) {
    const Explanation e = explain(lower_right({2, 11, 0}));
    EXPECT_EQ(e.taken, flash);
    EXPECT_EQ(e.order, (std::vector{flash, efficient, cudnn, math}));
    for (const Verdict& verdict : e.verdicts) {
        if (verdict.backend != cudnn) continue;
        EXPECT_EQ(verdict.standing, Standing::could_run);
    }
}

TEST(CausalBias, falls_to_the_memory_efficient_kernels_and_then_to_a_bool_tensor) {
    EXPECT_EQ(explain(lower_right({2, 11, 0}, 320)).taken, efficient) << "head_dim over 256";
    Call fp32 = lower_right({2, 11, 0});
    set_elements(fp32, Element::fp32);
    EXPECT_EQ(explain(fp32).taken, efficient);
    Call wide_v = lower_right({2, 11, 0}, 192);
    set_shapes(wide_v, {2, 8, 256, 192}, {2, 8, 1024, 192}, {2, 8, 1024, 128});
    EXPECT_EQ(explain(wide_v).taken, efficient) << "v of another head_dim";
    Call grouped = wide_v;  // flash refuses the head_dims, the memory-efficient kernels of 2.11 grouped heads
    set_shapes(grouped, {2, 8, 256, 192}, {2, 2, 1024, 192}, {2, 2, 1024, 128});
    grouped.enable_gqa = true;
    const Explanation e = explain(grouped);
    EXPECT_EQ(e.taken, cudnn);
    EXPECT_NE(std::find_if(e.remarks.begin(), e.remarks.end(),
                           [](const std::string& remark) { return remark.find("bool tensor") != std::string::npos; }),
              e.remarks.end());
    grouped.torch = Version{2, 8, 0};
    EXPECT_EQ(explain(grouped).taken, math);
    grouped.torch = Version{2, 14, 0};
    EXPECT_EQ(explain(grouped).taken, efficient);
}

TEST(CausalBias, is_is_causal_with_equal_lengths) {
    Call call = lower_right({2, 11, 0});
    set_shapes(call, {2, 8, 512, 64}, {2, 8, 512, 64}, {2, 8, 512, 64});
    EXPECT_EQ(explain(call).taken, cudnn);
}

TEST(CausalBias, checks_dtypes_and_is_causal_by_itself) {
    Call call = lower_right({2, 11, 0});
    call.k.element = Element::fp32;
    ASSERT_TRUE(explain(call).raises);
    EXPECT_STREQ(explain(call).raises->type, "ValueError");
    EXPECT_EQ(explain(call).raises->error,
              "Expected query, key, and value to have the same dtype, but got query.dtype: torch.float16, key.dtype: "
              "torch.float32, and value.dtype: torch.float16 instead.");
    call = lower_right({2, 11, 0});
    call.is_causal = true;
    ASSERT_TRUE(explain(call).raises);
    EXPECT_STREQ(explain(call).raises->name, "bias-and-is-causal");
    const Cure cure = cure_for(call, flash);
    ASSERT_TRUE(cure.found);
    EXPECT_EQ(cure.changes.at(0).name, "not-causal");
    call.q.shape.reset();
    call.is_causal = false;
    EXPECT_FALSE(explain(call).taken);
}

/// Flash computes half of the pairs; cuDNN, which sdpa_kernel selects, reads a mask of all of them.
TEST(CausalBias, is_predicted_as_each_kernel_gets_it) {
    Call call = lower_right({2, 11, 0}, 128);
    set_shapes(call, {2, 16, 4096, 128}, {2, 16, 8192, 128}, {2, 16, 8192, 128});
    const Ways ways = ways_of(call, flash, Pass::forward, {});
    Call none = call;
    none.causal_lower_right = false;
    const double full = baseline_of(none, flash, Pass::forward, {}).ms;
    EXPECT_LT(ways.baseline.ms, 0.9 * full);
    EXPECT_GT(ways.baseline.ms, 0.65 * full) << "three quarters of the pairs";
    const auto of = [&](SdpBackend backend) {
        return *std::find_if(ways.all.begin(), ways.all.end(),
                             [&](const Way& way) { return way.gain.backend == backend; });
    };
    ASSERT_TRUE(of(cudnn).cure.found);
    EXPECT_EQ(of(cudnn).cure.changes.at(0).name, "select");
    const auto& caveats = of(cudnn).gain.caveats;
    EXPECT_NE(std::find(caveats.begin(), caveats.end(), "of the mask, the time of its bytes alone"), caveats.end());
    EXPECT_NE(std::find(caveats.begin(), caveats.end(), "causal_lower_right becomes a bool tensor of all pairs there"),
              caveats.end());
    ASSERT_EQ(of(fa3).cure.changes.size(), 1U);
    EXPECT_EQ(of(fa3).cure.changes[0].name, "activate-fa3");
}

/// The operators that its class calls, as PyTorch's profiler writes them.
TEST(CausalBias, is_read_from_a_trace) {
    const std::string dims =
        R"({"dims":[[1,8,256,64],[1,8,1024,64],[1,8,1024,64],[],[],[],[]],"types":["c10::Half","c10::Half","c10::Half"],)";
    const auto call = call_of_inputs("aten::_scaled_dot_product_flash_attention",
                                     dims + R"("scalars":["","","","0.","True","False","0.125"]})");
    ASSERT_TRUE(call);
    EXPECT_TRUE(call->causal_lower_right);
    EXPECT_EQ(call->is_causal, false);
    EXPECT_NE(text_of(*call).find("causal_lower_right"), std::string::npos);
    const std::string heads_last =
        R"({"dims":[[1,256,8,64],[1,1024,8,64],[1,1024,8,64],[],[],[],[],[],[],[],[],[]],)"
        R"("types":["c10::Half","c10::Half","c10::Half"],"scalars":["","","","","","","","","0.",)";
    for (const char* type : {"0", "1", "2"}) {
        const auto efficient_call =
            call_of_inputs("aten::_efficient_attention_forward", heads_last + "\"" + type + R"(","False","0.125"]})");
        ASSERT_TRUE(efficient_call);
        EXPECT_EQ(efficient_call->causal_lower_right, type[0] == '2') << type;
        EXPECT_EQ(efficient_call->is_causal, type[0] == '1') << type;
    }
    // with is_causal from the first key on, scaled_dot_product_attention never asks flash
    const auto sdpa = call_of_inputs("aten::scaled_dot_product_attention",
                                     dims + R"("scalars":["","","","","0.","True","","False"]})");
    ASSERT_TRUE(sdpa);
    EXPECT_FALSE(sdpa->causal_lower_right);
    EXPECT_EQ(sdpa->is_causal, true);
}

}  // namespace
}  // namespace tessera::diagnose::causal_bias_test
