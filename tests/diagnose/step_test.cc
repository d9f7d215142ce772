// SPDX-License-Identifier: Apache-2.0
//
// The whole step: how busy the GPU is, stalls, first calls, repeated K and V.
#include "diagnose/step.hpp"

#include <gtest/gtest.h>

#include "diagnose/advice.hpp"
#include "diagnose/call_inputs.hpp"
#include "traces.hpp"

namespace tessera::diagnose::step_test {
namespace {

Diagnosis diagnosis_of(const TraceText& text) {
    Trace trace = read_trace_bytes(text.text(), "t");
    return diagnose(trace);
}

/// `calls` calls of SDPA of `us` each, with a GEMM of the same length behind each, and the GPU waiting `gap_us`.
TraceText step(int calls, double us, double gap_us) {
    TraceText trace;
    for (int i = 0; i < calls; ++i) {
        const double at = 100.0 * i;
        trace.sdpa(at, at + 50).kernel(kFlashForward, us, at + 10).kernel(kGemm, us, at + 60).gap(gap_us);
    }
    return trace;
}

TEST(Steps, tell_a_busy_gpu_from_one_that_waits) {
    const Diagnosis busy = diagnosis_of(step(40, 100, 0));
    EXPECT_FALSE(busy.clock.host_bound());
    EXPECT_GT(busy.clock.busy(), 0.95);
    const Diagnosis idle = diagnosis_of(step(40, 10, 300));
    EXPECT_TRUE(idle.clock.host_bound());
    EXPECT_LT(idle.clock.busy(), 0.1);
    EXPECT_NEAR(idle.clock.attention_us, 400, 1e-6);
    EXPECT_FALSE(diagnosis_of(step(3, 10, 300)).clock.host_bound()) << "a few kernels are no step";
}

TEST(Steps, count_kernels_that_overlap_once) {
    Trace trace;
    trace.ordered = true;
    trace.add(KernelRun{.start_us = 0, .us = 10});
    trace.add(KernelRun{.stream = 1, .start_us = 5, .us = 10});
    trace.add(KernelRun{.start_us = 25, .us = 5});
    const StepClock clock = clock_of(trace, {true, false, false});
    EXPECT_DOUBLE_EQ(clock.clock_us, 30);
    EXPECT_DOUBLE_EQ(clock.busy_us, 20);
    EXPECT_DOUBLE_EQ(clock.attention_us, 10);
}

/// One stall of 90 ms among 30 runs of 0.6 ms.
TEST(Steps, name_outliers_and_count_calls_at_the_median) {
    TraceText trace;
    for (int i = 0; i < 30; ++i) {
        const double at = 100.0 * i;
        trace.sdpa(at, at + 50).kernel(kFlashForward, i == 7 ? 90'000 : 600, at + 10);
    }
    const Diagnosis d = diagnosis_of(trace);
    ASSERT_EQ(d.kinds.size(), 1U);
    ASSERT_EQ(d.kinds[0].shapes.size(), 1U);
    const Spread& spread = d.kinds[0].shapes[0].spread;
    EXPECT_EQ(spread.runs, 30);
    EXPECT_EQ(spread.outliers, 1);
    EXPECT_NEAR(spread.median_us, 600, 1e-3);
    EXPECT_NEAR(spread.worst_us, 90'000, 1);
    Call stated;
    stated.torch = Version{2, 11, 0};
    const auto advice = advise(d, d.kinds[0], stated);
    ASSERT_TRUE(advice);
    EXPECT_NEAR(advice->ways.baseline.ms, 0.6, 1e-3);
}

TEST(Steps, show_first_calls_on_the_host) {
    TraceText trace;
    for (int i = 0; i < 10; ++i) {
        const double at = 500'000.0 * i;
        trace.sdpa(at, at + (i == 0 ? 440'000 : 60)).kernel(kFlashForward, 38, at + 30);
    }
    const Diagnosis d = diagnosis_of(trace);
    ASSERT_EQ(d.kinds.size(), 1U);
    EXPECT_EQ(d.kinds[0].host.runs, 10);
    EXPECT_NEAR(d.kinds[0].host.worst_us, 440'000, 1);
    EXPECT_NEAR(d.kinds[0].host.median_us, 60, 1);
}

constexpr const char* kInterleave =
    R"("Input Dims":[[2,4,4096,128],[],[],[]],"Input type":["c10::BFloat16","Scalar","Scalar",""],)"
    R"("Concrete Inputs":["","4","1",""])";
constexpr const char* kExpand =
    R"("Input Dims":[[2,4,1,4096,128],[],[]],"Input type":["c10::BFloat16","ScalarList","Scalar"],)"
    R"("Concrete Inputs":["","[2, 4, 4, 4096, 128]","False"])";

TEST(Steps, find_keys_that_were_repeated_before_the_call) {
    for (const auto& [op, inputs] :
         {std::pair{"aten::repeat_interleave", kInterleave}, std::pair{"aten::expand", kExpand}}) {
        TraceText trace;
        trace.op(op, 10, 20, inputs).op(op, 21, 30, inputs).sdpa(40, 90).kernel(kFlashForward, 100, 60);
        const Diagnosis d = diagnosis_of(trace);
        ASSERT_EQ(d.kinds.size(), 1U);
        EXPECT_EQ(d.kinds[0].repeats.calls, 1) << op;
        EXPECT_EQ(d.kinds[0].repeats.times, 4) << op;
        EXPECT_EQ(d.kinds[0].repeats.heads_kv, 4) << op;
    }
    // The repeated tensor has other heads than the call's K.
    TraceText other;
    other.op("aten::repeat_interleave", 10, 20,
             R"("Input Dims":[[2,4,4096,128],[],[],[]],"Concrete Inputs":["","2","1",""])");
    other.sdpa(40, 90).kernel(kFlashForward, 100, 60);
    EXPECT_EQ(diagnosis_of(other).kinds.at(0).repeats.calls, 0);
}

/// FlashAttention-4's wrapper is a node of autograd, which has shapes; FlexAttention's launch has Q, K and V first.
TEST(Steps, have_shapes_of_flash_attention_4_and_flex_attention) {
    TraceText trace;
    trace.op("FlashAttnFunc", 0, 50,
             R"("Input Dims":[[2,4096,16,128],[2,4096,4,128],[2,4096,4,128]],)"
             R"("Input type":["c10::BFloat16","c10::BFloat16","c10::BFloat16"])");
    trace.kernel("kernel_cutlass_kernel_flash_attncuteflash_fwd_sm90FlashAttentionForwardSm90_object_at__tensor0", 100,
                 10);
    trace.op("triton_tem_fused_flex_attention_0", 60, 90,
             R"("Input Dims":[[2,16,256,64],[2,16,256,64],[2,16,256,64],[2,16,256]],)"
             R"("Input type":["c10::BFloat16","c10::BFloat16","c10::BFloat16","float"])");
    trace.kernel("triton_tem_fused_flex_attention_0", 95, 70);
    const Diagnosis d = diagnosis_of(trace);
    ASSERT_EQ(d.kinds.size(), 2U);
    ASSERT_EQ(d.kinds[0].shapes.size(), 1U);
    EXPECT_EQ(d.kinds[0].shapes[0].call.q.shape, (Sizes{2, 16, 4096, 128}));
    EXPECT_EQ(d.kinds[0].shapes[0].call.k.shape, (Sizes{2, 4, 4096, 128}));
    ASSERT_EQ(d.kinds[1].shapes.size(), 1U);
    EXPECT_EQ(d.kinds[1].shapes[0].call.q.shape, (Sizes{2, 16, 256, 64}));
}

/// A GEMM of attention by hand gives batch x heads as one number, and no mask: the advice says what it took them for.
TEST(Steps, list_what_was_assumed_beside_what_was_read) {
    TraceText trace;
    const auto inputs = [](const char* dims) {
        return fmt::format(R"("Input Dims":{},"Input type":["c10::BFloat16","c10::BFloat16"])", dims);
    };
    trace.op("aten::bmm", 0, 20, inputs("[[32,512,64],[32,64,512]]")).kernel(kGemm, 10, 5);
    trace.op("aten::_softmax", 30, 40, inputs("[[32,512,512],[]]")).kernel(kSoftmax, 10, 35);
    trace.op("aten::bmm", 50, 60, inputs("[[32,512,512],[32,512,64]]")).kernel(kGemm, 10, 55);
    const Diagnosis d = diagnosis_of(trace);
    ASSERT_EQ(d.kinds.size(), 1U);
    ASSERT_EQ(d.kinds[0].reading.family, Family::eager);
    ASSERT_EQ(d.kinds[0].shapes.size(), 1U);
    EXPECT_EQ(text_of(d.kinds[0].shapes[0].call), "batch x heads 32, len 512, head_dim 64, bf16");
    Call stated;
    stated.torch = Version{2, 11, 0};
    const auto advice = advise(d, d.kinds[0], stated);
    ASSERT_TRUE(advice);
    std::string assumed;
    for (const std::string& text : advice->explanation.assumed) assumed += text + "; ";
    EXPECT_NE(assumed.find("batch 1: the trace gives batch x heads as one number, 32"), std::string::npos) << assumed;
    EXPECT_NE(assumed.find("no mask"), std::string::npos) << assumed;
}

/// One kernel's words are not printed for a group whose other names lack them.
TEST(Steps, print_evidence_of_a_part_of_the_names_as_that) {
    TraceText trace;
    const std::string kept =
        "fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel<1>::Params)";
    const std::string other =
        "fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel<2>::Params)";
    const std::string impl =
        "attention_kernel_batched_impl_aligned_64x128_sm80(PyTorchMemEffAttention::AttentionKernel<3>::Params)";
    trace.kernel(kept, 10).kernel(other, 10).kernel(impl, 10);
    const Diagnosis d = diagnosis_of(trace);
    bool parted = false;
    for (const AttentionKind& kind : d.kinds) {
        for (const std::string& evidence : kind.reading.evidence) {
            if (evidence.find("fmha_cutlassF") == std::string::npos) continue;
            for (const KernelSum& kernel : kind.kernels) {
                const bool has = kernel.name.find("fmha_cutlassF") != std::string::npos;
                parted = parted || !has;
                EXPECT_TRUE(has || evidence.find("of its") != std::string::npos) << kernel.name << ": " << evidence;
            }
        }
    }
    EXPECT_TRUE(parted) << "the kernels were not grouped, so that nothing was tested";
}

}  // namespace
}  // namespace tessera::diagnose::step_test
