// SPDX-License-Identifier: Apache-2.0
//
// Compares the reader of kernels' names with names from public tables, traces and issues (names_public.tsv), whose
// expected readings were written down before the reader saw them. The "first" names showed which kinds were read wrong;
// the "second" ones were scored once, at the end. The "third" ones were collected a day later, and scored once before
// the reader was mended (toolkit/diagnose/TRIED.md).
#include <gtest/gtest.h>

#include "labelled_names.hpp"

namespace tessera::diagnose::names_public_test {
namespace {

std::vector<LabelledName> names_of_set(const std::string& set) { return labelled_names("names_public.tsv", set); }

void expect_no_confident_mistake(const std::string& set, std::size_t least) {
    const auto rows = names_of_set(set);
    ASSERT_GE(rows.size(), least);
    for (const LabelledName& row : rows) {
        const NameReading got = read_name(row.name);
        const std::string wrong = differences(row, got, Unsaid::not_scored);
        if (!wrong.empty()) {
            EXPECT_LT(got.confidence, Confidence::likely) << row.name << wrong;
        }
    }
}

TEST(PublicNames, of_the_first_set_are_read_without_a_confident_mistake) { expect_no_confident_mistake("first", 60); }
TEST(PublicNames, kept_apart_are_read_without_a_confident_mistake) { expect_no_confident_mistake("second", 30); }
TEST(PublicNames, of_the_third_set_are_read_without_a_confident_mistake) { expect_no_confident_mistake("third", 70); }
TEST(PublicNames, of_the_fourth_set_are_read_without_a_confident_mistake) { expect_no_confident_mistake("fourth", 20); }

/// Names of the third set that were taken for another family's, or for an attention.
TEST(PublicNames, of_relatives_are_not_taken_for_each_other) {
    const NameReading natten = read_name("natten::cuda::fna::FusedNeighborhoodAttentionBackwardKernel<");
    EXPECT_EQ(natten.family, Family::natten);
    EXPECT_EQ(natten.pass, KernelPass::backward);
    EXPECT_EQ(read_name("natten::cuda::reduction::kernel::ComputeDelta").role, Role::helper);
    EXPECT_EQ(read_name("cutlass::fmha::kernel::FmhaKernelBwdSumOdO").role, Role::helper);
    EXPECT_NE(
        read_name("kernel_cutlass_kernel_vllmv1attentionopsdeepseek_v4_opsdequant_gather_k_cutedslDequantGather").role,
        Role::attention);
    EXPECT_LT(read_name("mha_forward_kernel").confidence, Confidence::likely);
}

/// A name that its author shortened says what is left of it, and no more.
TEST(PublicNames, that_were_shortened_are_read_as_far_as_they_go) {
    const NameReading reading = read_name("fmhaSm103a...HQk576HV512HVPerCta256PagedKvDenseP32MultiCtasKv");
    EXPECT_EQ(reading.family, Family::trtllm);
    EXPECT_EQ(reading.arch, 103);
    EXPECT_EQ(reading.head_dim, 576);
    EXPECT_EQ(reading.exactness, Exactness::unknown) << "the dtype was left out";
    EXPECT_EQ(read_name("kernel_mha(unsigned int, float, float const*, Vec<__").family, Family::trtllm);
}

/// Every quote of the evidence stands in the name that it is about, or in its demangled form.
TEST(PublicNames, are_quoted_as_they_are) {
    for (const char* set : {"first", "second", "third", "fourth"}) {
        for (const LabelledName& row : names_of_set(set)) {
            for (const std::string& evidence : read_name(row.name).evidence) {
                const std::size_t end = evidence.find("\" in the name");
                if (evidence.empty() || evidence[0] != '"' || end == std::string::npos) continue;
                std::string quote = evidence.substr(1, end - 1);
                for (std::size_t gap = quote.find("..."); !quote.empty(); gap = quote.find("...")) {
                    const std::string piece = quote.substr(0, gap);
                    EXPECT_NE(row.name.find(piece), std::string::npos) << row.name << ": " << evidence;
                    quote = gap == std::string::npos ? "" : quote.substr(gap + 3);
                }
            }
        }
    }
}

TEST(PublicNames, say_what_is_not_exact) {
    for (const char* name : {"cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_fp8_knob_7_128x128x128",
                             "fmhaSm100fKernel_QkvE4m3OBfloat16H128PagedKvCausalP32VarSeqQ128Kv128PersistentContext",
                             "aiter::mla_a8w8_qh16_qseqlen1_gqaratio16", "_fwd_kernel_int8",
                             "void qk_int_sv_f8_attn_kernel<128, 64, 32, 64, 128, (DataType)1>"})
        EXPECT_EQ(read_name(name).exactness, Exactness::not_exact) << name;
    // A cache of 8 bits is rounded, but the kernel is exact over it.
    EXPECT_EQ(read_name("void flashinfer::BatchDecodeWithPagedKVCacheKernel<__nv_bfloat16, __nv_fp8_e4m3>").exactness,
              Exactness::unknown);
}

TEST(PublicNames, of_flash_attention_4_that_say_what_they_are_are_read) {
    const NameReading whole = read_name("flash_fwd_sm90_bf16_head_dim64_gqa_ratio2_tile192x128_causal");
    EXPECT_EQ(whole.family, Family::fa4);
    EXPECT_EQ(whole.confidence, Confidence::certain);
    EXPECT_EQ(whole.arch, 90);
    EXPECT_EQ(whole.head_dim, 64);
    EXPECT_EQ(whole.tile_q, 192);
    EXPECT_EQ(whole.tile_kv, 128);
    EXPECT_EQ(whole.dtype, "bf16");
    EXPECT_EQ(whole.mask, "causal");
    const NameReading cut = read_name("flash_bwd_sm100_bf16_head_dim12...");
    EXPECT_EQ(cut.family, Family::fa4);
    EXPECT_EQ(cut.pass, KernelPass::backward);
    EXPECT_EQ(cut.head_dim, 0) << "128 may be cut off";
    EXPECT_EQ(read_name("flash_fwd_kernel").family, Family::fa2);
}

TEST(PublicNames, of_operators_and_autograd_are_no_kernels) {
    for (const char* name : {"FusedAttnFuncBackward", "ScaledDotProductFlashAttentionBackward0", "_fMHABackward",
                             "aten::_scaled_dot_product_flash_attention", "flash_attn::_flash_attn_forward",
                             "autograd::engine::evaluate_function: FlashAttnFuncBackward"})
        EXPECT_EQ(read_name(name).role, Role::look_alike) << name;
    EXPECT_EQ(read_name("void cunn_SoftMaxBackward<4, float>").role, Role::softmax_backward);
    EXPECT_EQ(read_name("kernel_cutlass_kernel_flash_attncuteflash_bwd_sm90FlashAttentionBackwardSm90_object_at_").role,
              Role::attention);
}

}  // namespace
}  // namespace tessera::diagnose::names_public_test
