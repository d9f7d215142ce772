// SPDX-License-Identifier: Apache-2.0
//
// Text as people paste it from threads: logs, trees of modules, drawn tables, tables of AMD's profilers.
#include <gtest/gtest.h>

#include <algorithm>

#include "diagnose/diagnosis.hpp"
#include "tessera/error.hpp"
#include "traces.hpp"

namespace tessera::diagnose::pasted_test {
namespace {

Diagnosis diagnosis_of(const std::string& text) {
    Trace trace = read_trace_bytes(text, "t");
    return diagnose(trace);
}

const std::string kSplit = "void flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<128, 64, 128, 4, fals...";

/// vLLM's layerwise profile: modules repeat the time of the rows under them, also the one named Attention.
TEST(Pasted, trees_of_modules_count_their_leaves) {
    const Diagnosis d = diagnosis_of(
        "name                                | cuda_time_us | pct_cuda_... | invocations    \n"
        "===================================================================================\n"
        "LlamaForCausalLM                    |      3178.00 |        97.33 |            1.00\n"
        "|- LlamaModel                       |      3178.00 |        97.33 |            1.00\n"
        "|-- VocabParallelEmbedding(weight=bfloat16[128256, 4096]) | 59.00 | 0.18 |  1.00\n"
        "|--- void at::native::(anonymous namespace)::indexSelectLargeIndex<c10::BFloa... | 59.00 | 0.18 | 1.00\n"
        "|-- LlamaDecoderLayer               |      3119.00 |        97.13 |           32.00\n"
        "|--- Attention                      |      3119.00 |         9.49 |           32.00\n"
        "|---- " +
        kSplit +
        " | 2900.00 | 8.88 | 32.00\n"
        "|---- void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16, __nv_bfloat16, (v... | 219.00 | 1.27 | "
        "32.00\n");
    EXPECT_EQ(d.tool, "vLLM's layerwise profile");
    EXPECT_DOUBLE_EQ(d.gpu_us, 59 + 2900 + 219);
    ASSERT_EQ(d.kinds.size(), 1U);
    EXPECT_EQ(d.kinds[0].calls, 32);
    EXPECT_DOUBLE_EQ(d.kinds[0].us, 2900);
    EXPECT_EQ(d.kinds[0].kernels.at(0).name, kSplit);
    EXPECT_TRUE(d.notes.empty());
}

TEST(Pasted, lines_of_autotuning_are_candidates) {
    const std::string options =
        " BLOCKS_ARE_CONTIGUOUS=False, BLOCK_M1=32, FLOAT32_PRECISION=\"'ieee'\", num_warps=8\n";
    const Diagnosis d = diagnosis_of("[rank0]:  triton_flex_attention_backward_16 6.9023 ms 100.0%" + options +
                                     "[rank0]:  triton_flex_attention_backward_18 7.2956 ms 94.6%" + options);
    ASSERT_EQ(d.kinds.size(), 1U);
    EXPECT_EQ(d.kinds[0].reading.family, Family::flex);
    EXPECT_EQ(d.kinds[0].calls, 2);
    EXPECT_FALSE(d.timed);
    ASSERT_EQ(d.notes.size(), 1U);
    EXPECT_NE(d.notes[0].find("autotuning: 2"), std::string::npos);
}

TEST(Pasted, lines_of_a_log_are_no_json) {
    for (const char* prefix : {"[rank3]: ", "[default0]:"}) {
        const Diagnosis d = diagnosis_of(prefix + kFlashForward + "\n");
        ASSERT_EQ(d.kinds.size(), 1U) << prefix;
        EXPECT_EQ(d.kinds[0].reading.family, Family::fa2) << prefix;
        EXPECT_EQ(d.kinds[0].kernels.at(0).name, kFlashForward) << prefix;
    }
    EXPECT_EQ(diagnosis_of("[12:04:33] " + kFlashForward).kinds.size(), 1U);
    for (const char* json : {"[1, 2, 3]", "[]", "[", "[\"a\"]"}) EXPECT_THROW(diagnosis_of(json), Error) << json;
}

TEST(Pasted, tables_of_rocprof_have_times) {
    const std::string kernel = "_ZN7ck_tile6kentryILi2ENS_13FmhaFwdKernelINS_...";
    const Diagnosis sums = diagnosis_of(
        "\"Name\",\"Calls\",\"TotalDurationNs\",\"AverageNs\",\"Percentage\",\"MinNs\",\"MaxNs\",\"StdDev\"\n\"" +
        kernel + "\",40,35230000,880750,20.9,871000,900000,7000\n");
    EXPECT_EQ(sums.tool, "rocprof");
    EXPECT_DOUBLE_EQ(sums.gpu_us, 35230);
    EXPECT_EQ(sums.kinds.at(0).calls, 40);
    const Diagnosis runs = diagnosis_of(
        "\"Kind\",\"Agent_Id\",\"Queue_Id\",\"Kernel_Id\",\"Kernel_Name\",\"Correlation_Id\",\"Start_Timestamp\","
        "\"End_Timestamp\"\n"
        "\"KERNEL_DISPATCH\",4,1,12,\"" +
        kernel + "\",7,1000000,1881000\n");
    EXPECT_EQ(runs.tool, "rocprof");
    EXPECT_DOUBLE_EQ(runs.gpu_us, 881);
}

TEST(Pasted, drawn_tables_are_read_as_markdown) {
    const Diagnosis d = diagnosis_of(
        "┌────────────────────────────┬───────┬──────────┐\n"
        "│ kernel                     │ calls │ avg      │\n"
        "├────────────────────────────┼───────┼──────────┤\n"
        "│ kernel_unified_attention_2d│   896 │ 5.10 us  │\n"
        "└────────────────────────────┴───────┴──────────┘\n");
    ASSERT_EQ(d.kinds.size(), 1U);
    EXPECT_EQ(d.kinds[0].calls, 896);
    EXPECT_NEAR(d.gpu_us, 896 * 5.1, 1e-6);
    EXPECT_TRUE(d.unknown.empty());
    // Numbers alone are no kernels, nor are titles.
    EXPECT_THROW(
        diagnosis_of("┌──────────┬───────┐\n│ KV depth │ µs    │\n├──────────┼───────┤\n│ 4,096    │  558  │\n"),
        Error);
    const Diagnosis titled = diagnosis_of("| Part | % of compute |\n|---|---|\n| " + kFlashForward + " | 44.3% |\n");
    EXPECT_EQ(titled.runs, 1);
}

/// In a table the operators say which backend ran, though the kernels of the math path have no names of their own.
TEST(Pasted, operators_of_a_table_name_the_backend) {
    const std::string rule =
        "----------------------------------------------  ------------  ------------  ------------\n";
    const Diagnosis d = diagnosis_of(
        rule + "                                          Name     Self CUDA    CUDA total    # of Calls\n" + rule +
        "      aten::_scaled_dot_product_attention_math       0.000us      38.912ms            10\n"
        "                       ampere_sgemm_128x128_tn      10.501ms      10.501ms            10\n");
    EXPECT_EQ(d.tool, "PyTorch profiler's table");
    ASSERT_EQ(d.backends_of_operators.size(), 1U);
    EXPECT_NE(d.backends_of_operators[0].find("math path ran"), std::string::npos);
    EXPECT_NE(d.backends_of_operators[0].find("10 calls"), std::string::npos);
}

TEST(Pasted, logs_of_nsight_compute_are_no_lost_numbers) {
    const Diagnosis d = diagnosis_of(
        "==PROF== Connected to process 12345 (/usr/bin/python3.11)\n"
        "\"ID\",\"Kernel Name\",\"Metric Name\",\"Metric Unit\",\"Metric Value\"\n\"0\",\"" +
        kFlashForward + "\",\"gpu__time_duration.sum\",\"us\",\"181.25\"\n");
    EXPECT_DOUBLE_EQ(d.gpu_us, 181.25);
    EXPECT_TRUE(d.notes.empty());
}

/// The kernel that combines splits belongs to the decode of its library, not to another kernel in Triton.
TEST(Pasted, helpers_belong_to_their_library) {
    const Diagnosis d = diagnosis_of("_mla_prefill_fwd\n_fwd_grouped_kernel_stage1\n_fwd_kernel_stage2\n");
    ASSERT_EQ(d.kinds.size(), 2U);
    for (const AttentionKind& kind : d.kinds) {
        const bool decodes = kind.kernels.size() == 2;
        EXPECT_EQ(kind.reading.library.empty(), !decodes);
    }
}

}  // namespace
}  // namespace tessera::diagnose::pasted_test
