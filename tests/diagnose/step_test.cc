// SPDX-License-Identifier: Apache-2.0
//
// The whole step: how busy the GPU is, stalls, first calls, repeated K and V.
#include "diagnose/step.hpp"

#include <gtest/gtest.h>

#include "diagnose/advice.hpp"
#include "diagnose/call_inputs.hpp"
#include "diagnose/slowed_clock.hpp"
#include "traces.hpp"

namespace tessera::diagnose::step_test {
namespace {

Diagnosis diagnosis_of(const TraceText& text) {
    Trace trace = read_trace_bytes(text.text(), "t");
    return diagnose(trace);
}

/// `calls` calls of SDPA of `us` each, with a GEMM of the same length after each, and the GPU waiting `gap_us`.
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

/// Two GPUs that take turns are half busy each, though one of them always runs.
TEST(Steps, count_each_gpu_for_itself) {
    TraceText trace;
    for (int i = 0; i < 60; ++i) trace.process(1, i % 2).at(1000 + 100 * i).kernel(kFlashForward, 80);
    const Diagnosis d = diagnosis_of(trace);
    EXPECT_EQ(d.clock.gpus, 2);
    EXPECT_NEAR(d.clock.busy(), 0.4, 0.01);
    EXPECT_TRUE(d.clock.host_bound());
    EXPECT_FALSE(d.clock.paused());
}

/// One long pause of a GPU that is busy otherwise is no step that waits for the host.
TEST(Steps, tell_a_pause_from_a_step_that_waits) {
    TraceText trace;
    for (int i = 0; i < 60; ++i) trace.kernel(kFlashForward, 100).gap(i == 30 ? 9000 : 0);
    const StepClock clock = diagnosis_of(trace).clock;
    EXPECT_TRUE(clock.host_bound());
    EXPECT_TRUE(clock.paused());
    EXPECT_EQ(clock.pauses, 1);
    EXPECT_NEAR(clock.longest_pause_us, 9001, 1e-6);
    EXPECT_GT(clock.busy_between_pauses(), 0.95);
    EXPECT_FALSE(diagnosis_of(step(40, 10, 300)).clock.paused());
}

/// Kernels run from 1000 us on, one after another.
TEST(Steps, count_what_runs_within_marked_steps) {
    TraceText trace;
    trace.step(4, 1000, 1200).step(5, 1200, 1500).step(6, 1500, 1600);
    trace.sdpa(900, 950).kernel(kFlashForward, 99, 910).gap(300);  // 1000 to 1099
    trace.sdpa(960, 990).kernel(kFlashForward, 99, 970);           // 1400 to 1499
    trace.kernel(kGemm, 400);                                      // 1500 to 1900, of which 100 are in a step
    const MarkedSteps steps = diagnosis_of(trace).steps;
    EXPECT_EQ(steps.count, 3);
    EXPECT_DOUBLE_EQ(steps.us, 600);
    EXPECT_DOUBLE_EQ(steps.median_us, 200);
    EXPECT_DOUBLE_EQ(steps.longest_us, 300);
    EXPECT_EQ(steps.longest, 5);
    EXPECT_NEAR(steps.attention_us, 198, 1e-9);
    EXPECT_NEAR(steps.busy_us, 298, 1e-9);
}

/// One step that compiles does not make the others idle.
TEST(Steps, of_another_length_are_counted_apart) {
    TraceText trace;
    trace.step(0, 0, 1000).step(1, 1000, 1100).step(2, 1100, 1200).step(3, 1200, 1300);
    trace.sdpa(900, 950).kernel(kFlashForward, 99, 910).kernel(kGemm, 99).kernel(kGemm, 99);
    const MarkedSteps steps = diagnosis_of(trace).steps;
    EXPECT_EQ(steps.outliers, 1);
    EXPECT_EQ(steps.longest, 0);
    EXPECT_DOUBLE_EQ(steps.usual_us, 300);
    EXPECT_NEAR(steps.usual_busy_us, 297, 1e-9);
    EXPECT_NEAR(steps.usual_attention_us, 99, 1e-9);
}

TEST(Steps, that_overlap_are_left_out) {
    TraceText trace;
    trace.step(1, 1000, 1200).step(1, 1100, 1300).sdpa(900, 950).kernel(kFlashForward, 50, 910);
    EXPECT_EQ(diagnosis_of(trace).steps.count, 0);
    EXPECT_EQ(diagnosis_of(step(3, 10, 0)).steps.count, 0) << "none are marked";
}

/// A capped clock makes every kernel longer by one factor; one slow kernel is something else.
TEST(Steps, find_a_clock_that_all_kernels_imply) {
    const std::string efficient = "fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel)";
    Call stated;
    stated.torch = Version{2, 11, 0};
    const auto trace_of = [&](double flash_us, double efficient_us) {
        TraceText trace;
        trace.sdpa(0, 50).kernel(kFlashForward, flash_us, 10);
        trace.sdpa(100, 150).kernel(efficient, efficient_us, 110);
        return diagnosis_of(trace);
    };
    const Diagnosis first = trace_of(1000, 1000);
    ASSERT_EQ(first.kinds.size(), 2U);
    std::vector<double> predicted;
    for (const AttentionKind& kind : first.kinds) {
        const auto advice = advise(first, kind, stated);
        ASSERT_TRUE(advice);
        predicted.push_back(1000 * advice->ways.baseline.predicted_ms);
    }
    const bool flash_first = first.kinds[0].reading.family == Family::fa2;
    const double flash = predicted[flash_first ? 0 : 1], other = predicted[flash_first ? 1 : 0];
    ASSERT_GT(flash, 0);
    ASSERT_GT(other, 0);
    EXPECT_FALSE(slowed_clock(trace_of(flash, other), stated)) << "as predicted";
    EXPECT_FALSE(slowed_clock(trace_of(1.6 * flash, other), stated)) << "one kernel alone";
    EXPECT_FALSE(slowed_clock(trace_of(1.6 * flash, 3 * other), stated)) << "different factors";
    const auto slowed = slowed_clock(trace_of(1.6 * flash, 1.7 * other), stated);
    ASSERT_TRUE(slowed);
    EXPECT_EQ(slowed->machine, "h200");
    EXPECT_NEAR(slowed->least, 1.6, 1e-3);
    EXPECT_NEAR(slowed->most, 1.7, 1e-3);
    EXPECT_NEAR(slowed->ghz, slowed->usual_ghz / 1.65, 0.01);
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

/// The trace's dropout reaches the prediction beside the measured time, and a factor without it is an upper bound.
TEST(Steps, predict_calls_with_dropout_without_its_time_and_say_so) {
    const std::string efficient =
        "fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel<1>::Params)";
    const auto advice_at = [&](double us) {
        TraceText trace;
        trace.sdpa(0, 50, false, "0.10000000000000001").kernel(efficient, us, 10);
        const Diagnosis d = diagnosis_of(trace);
        Call stated;
        stated.torch = Version{2, 11, 0};
        return *advise(d, d.kinds.at(0), stated);
    };
    const Baseline predicted = advice_at(1).ways.baseline;
    EXPECT_EQ(predicted.not_modelled, "dropout");
    EXPECT_GE(predicted.predicted_error, 1);
    const Ways slow = advice_at(8000 * predicted.predicted_ms).ways;
    ASSERT_NE(slow.first(), nullptr) << "eight times the prediction is more than dropout";
    EXPECT_TRUE(slow.first()->gain.at_most);
    EXPECT_EQ(slow.first()->gain.not_modelled, "dropout");
    for (const Way& way : advice_at(1000 * predicted.predicted_ms).ways.all) {
        if (way.gain.backend == SdpBackend::flash) {
            EXPECT_FALSE(way.gain.faster) << "1.9 times without the time of dropout may be nothing with it";
        }
    }
}

/// Arguments that SDPA does not have are read from the operator and from the kernel's name; no other kernel is
/// compared.
TEST(Steps, compare_no_kernel_with_what_sdpa_lacks) {
    const auto beyond = [](const char* op, const std::string& scalars, const std::string& kernel,
                           const char* k = "4096") {
        TraceText trace;
        trace
            .op(op, 0, 50,
                fmt::format(R"("Input Dims":[[2,4096,16,128],[2,{0},16,128],[2,{0},16,128],[],[],[],[],[],[],[],[]],)"
                            R"("Input type":["c10::BFloat16","c10::BFloat16","c10::BFloat16"],"Concrete Inputs":{1})",
                            k, scalars))
            .kernel(kernel, 500, 10);
        const Diagnosis d = diagnosis_of(trace);
        Call stated;
        stated.torch = Version{2, 11, 0};
        const std::string text = beyond_sdpa(d.kinds.at(0));
        EXPECT_EQ(advise(d, d.kinds.at(0), stated).has_value(), text.empty());
        return text;
    };
    const char* op = "flash_attn::_flash_attn_forward";
    const auto scalars = [](const char* causal, const char* left, const char* softcap) {
        return fmt::format(R"(["","","","0.","0.088","{}","{}","-1","{}","","False"])", causal, left, softcap);
    };
    EXPECT_EQ(beyond(op, scalars("True", "-1", "0."), kFlashForward), "");
    EXPECT_EQ(beyond(op, scalars("True", "1024", "0."), kFlashForward), "a window");
    EXPECT_EQ(beyond(op, scalars("True", "-1", "30."), kFlashForward), "softcap");
    EXPECT_EQ(beyond(op, scalars("True", "-1", "0."), kFlashForward, "8192"), "");  // causal_lower_right
    std::string name = kFlashForward;
    name.replace(name.rfind("false, true, false, false, true"), 31, "false, true, true, true, true");
    EXPECT_EQ(beyond(op, scalars("True", "-1", "0."), name), "a window, ALiBi");
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
