// SPDX-License-Identifier: Apache-2.0
//
// Compares the reader of kernels' names with the labelled corpus (names.tsv). It was written with the "known" names.
// "held-out" names were found in public logs afterwards and are only scored. The reader knows only some of the "open"
// names.
#include "diagnose/name.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <random>

#include "diagnose/kernel_text.hpp"
#include "diagnose/name_words.hpp"
#include "labelled_names.hpp"

namespace tessera::diagnose::name_test {
namespace {

std::vector<LabelledName> corpus(const std::string& set) { return labelled_names("names.tsv", set); }

std::string difference(const LabelledName& row, const NameReading& got) {
    return differences(row, got, Unsaid::scored);
}

TEST(KernelNames, reads_every_known_name) {
    const auto rows = corpus("known");
    ASSERT_GE(rows.size(), 40U);
    for (const LabelledName& row : rows) EXPECT_EQ(difference(row, read_name(row.name)), "") << row.name;
}

/// Held-out names that were first read wrong are moved to "known" (docs/which.md), so this test guards against getting
/// worse.
TEST(KernelNames, reads_held_out_names_without_a_confident_mistake) {
    const auto rows = corpus("held-out");
    ASSERT_GE(rows.size(), 50U);
    int right = 0;
    for (const LabelledName& row : rows) {
        const NameReading got = read_name(row.name);
        const std::string wrong = difference(row, got);
        if (wrong.empty()) ++right;
        else EXPECT_LT(got.confidence, Confidence::likely) << row.name << wrong;
    }
    EXPECT_GE(right, 0.98 * static_cast<double>(rows.size()));
    RecordProperty("right", right);
}

/// The reader must not guess an unknown name with confidence: neither its family, nor whether it is attention.
TEST(KernelNames, guesses_no_open_name) {
    const auto rows = corpus("open");
    ASSERT_GE(rows.size(), 10U);
    for (const LabelledName& row : rows) {
        const NameReading got = read_name(row.name);
        const bool guessed = got.role != Role::unknown && got.confidence >= Confidence::likely;
        EXPECT_FALSE(guessed && difference(row, got) != "") << row.name << difference(row, got);
    }
}

/// Tools cut names anywhere. The rest may say less, but must not name another family with confidence.
TEST(KernelNames, never_takes_a_cut_name_for_another_family) {
    for (const char* set : {"known", "held-out"}) {
        for (const LabelledName& row : corpus(set)) {
            for (std::size_t length = 1; length < row.name.size(); length += length < 80 ? 1 : 7) {
                for (const char* end : {"", "..."}) {
                    const NameReading got = read_name(row.name.substr(0, length) + end);
                    const bool same = name_of(got.family) == row.family || got.family == Family::unknown;
                    EXPECT_TRUE(same || got.confidence < Confidence::certain)
                        << row.name.substr(0, length) << end << ": " << name_of(got.family);
                }
            }
        }
    }
}

TEST(KernelNames, are_split_into_words) {
    using Words = std::vector<std::string>;
    EXPECT_EQ(words_of("BatchPrefillWithPagedKVCache_v2"),
              (Words{"batch", "prefill", "with", "paged", "kv", "cache", "v"}));
    EXPECT_EQ(words_of("_attn_bwd_dkdv2MLAKernel"), (Words{"attn", "bwd", "dkdv", "mla", "kernel"}));
    EXPECT_EQ(words_of(""), Words{});
    EXPECT_EQ(function_of("a::b::f_kernel<c::d>(e::g)"), "f_kernel");
    EXPECT_EQ(function_of("_fwd_kernel_0d1d2d3de"), "_fwd_kernel");
    EXPECT_EQ(function_of("kernel_cutlass_kernel_a_object_at__tensorptrf16"), "kernel_cutlass_kernel_a");
}

/// An identifier that only ends like a kernel of a table is another's.
TEST(KernelNames, know_where_an_identifier_begins) {
    EXPECT_EQ(read_name("sparse_attn_fwd_kernel").family, Family::flashmla);
    EXPECT_NE(read_name("_my_sparse_attn_fwd_kernel").family, Family::flashmla);
    EXPECT_EQ(read_name("pytorch_flash::flash_fwd_kernel").family, Family::fa2);
    EXPECT_NE(read_name("my_flash_fwd_kernel").family, Family::fa2);
}

/// Words that attention shares with other kernels of a server count only beside what they work on.
TEST(KernelNames, reads_words_by_what_stands_beside_them) {
    EXPECT_EQ(read_name("_paged_decode_reduce_kernel").role, Role::helper);
    EXPECT_EQ(read_name("_v4_paged_decode_indices_kernel").role, Role::look_alike);
    EXPECT_EQ(read_name("image_decode_kernel").role, Role::unknown);
    EXPECT_EQ(read_name("_moe_sparse_decode_kernel").family, Family::unknown);
    EXPECT_EQ(read_name("_dequantize_k_cache_kernel").role, Role::look_alike);
    EXPECT_EQ(read_name("loop_convert_fusion").role, Role::elementwise);
    EXPECT_EQ(read_name("gemm_fusion_dot_76").role, Role::gemm);
}

/// Words that anybody may use in a name say what a kernel does, but never for certain.
TEST(KernelNames, is_never_sure_of_words_alone) {
    for (const char* name :
         {"image_sort_kernel", "swizzle_row_scaling_kernel", "grpo_bwd_kernel", "_mhc_post_kernel", "my_matmul",
          "triton_kernel_of_mine", "void x::topk_kernel<4>(int)", "_dequantize_k_cache_kernel",
          "sparse_prefill_block_table", "my_fused_gemm_kernel", "void x::gemm::pool_kernel<float>(float*)",
          "triton_tem_fused_conv_relu_3", "rope_kernel", "block_sparse_attention", "my_fna_kernel", "my_masked_softmax",
          "triton_bmm_pool_mean", "void bwd_attend_prep_ker<64>(bwd_prep_globals<64>)",
          "void masked_multihead_attention_page_selector_compute<float>(int)"})
        EXPECT_LT(read_name(name).confidence, Confidence::likely) << name;
    EXPECT_EQ(read_name("swizzle_row_scaling_kernel").role, Role::other);
    EXPECT_EQ(read_name("grpo_bwd_kernel").role, Role::other);
    EXPECT_EQ(read_name("some_kernel").role, Role::unknown);
}

/// Names that only one library writes are read with confidence, for attention and for kernels beside it.
TEST(KernelNames, is_sure_of_names_that_only_one_library_has) {
    for (const char* name :
         {"nvjet_tst_192x192_64x4_2x1_v_bz_coopB_TNN", "ampere_sgemm_128x64_tn", "triton_tem_fused_addmm_t_view_9",
          "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_32x3_tn_align8>(T1::Params)",
          "void vllm::reshape_and_cache_flash_kernel<float>(float)", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL",
          "void at::native::(anonymous namespace)::cunn_SoftMaxForward<4, float>(float*)", "_hstu_attn_fwd",
          "triton_tem_fused_flex_attention_split_transpose",
          "fmha_v2_flash_attention_fp16_64_128_S_q_k_v_256_custom_mask_sm87_kernel"})
        EXPECT_GE(read_name(name).confidence, Confidence::likely) << name;
}

/// If the words of a name and the reader of a family disagree, neither is believed.
TEST(KernelNames, doubts_a_family_whose_words_say_otherwise) {
    const NameReading longer = read_name("flash_attn_ext_vec_combine_partials");
    EXPECT_LT(longer.confidence, Confidence::likely);
    EXPECT_LT(read_name("flash_attn_tile_hdim96").confidence, Confidence::likely);
    EXPECT_GE(read_name("flash_attn_tile<96, 96, 4, 8>").confidence, Confidence::likely);
}

/// Linear attentions share their words with attention.
TEST(KernelNames, tells_linear_attention_from_attention) {
    for (const char* name : {"chunk_oja_bwd_kernel_dA", "chunk_dplr_bwd_kernel_dv", "parallel_rebased_fwd_kernel",
                             "chunk_gsa_fwd_k_kernel_inter", "void x::Sm90FusedGdrFwdKernel<float>(float*)",
                             "selective_state_update_kernel_simple"})
        EXPECT_EQ(read_name(name).role, Role::look_alike) << name;
    EXPECT_EQ(read_name("parallel_path_fwd_kernel").family, Family::triton);
    EXPECT_EQ(read_name("_chunked_prefill_attn_fwd_kernel").role, Role::attention);
    for (const char* name : {"chunk_softmax_kernel", "intra_softmax_fwd", "my::chunk_copy_kernel", "inter_kernel"}) {
        for (const std::string& evidence : read_name(name).evidence)
            EXPECT_EQ(evidence.find("linear attention"), std::string::npos) << name;
    }
}

/// A word that others use too says nothing alone, and a longer word that holds it nothing at all.
TEST(KernelNames, wants_company_for_short_words) {
    for (const char* name : {"gdr_copy", "wy_kernel", "ttt_table"})
        EXPECT_NE(read_name(name).role, Role::look_alike) << name;
    EXPECT_EQ(read_name("chunk_ttt_fwd").role, Role::look_alike);
    EXPECT_EQ(read_name("_compress_attn_fwd_kernel").role, Role::attention);
    EXPECT_EQ(read_name("_attn_compress_kernel").role, Role::look_alike);
    EXPECT_NE(read_name("_gemma_rmsnorm_kernel").role, Role::gemm);
    EXPECT_EQ(read_name("_gemm_kernel").role, Role::gemm);
    EXPECT_EQ(read_name("void x::compute_grouped_gemm_args<float>(int)").role, Role::other);
    EXPECT_EQ(read_name("triton_poi_fused_cat_fmha_v3_fwd_mul_1").role, Role::look_alike);
}

/// A tool may cut a name inside of the word that distinguishes a helper from its kernel.
TEST(KernelNames, knows_a_helper_that_is_cut) {
    const NameReading helper = read_name("void cutlass::device_kernel<flash::FlashAttnFwdCombi...");
    EXPECT_EQ(helper.role, Role::helper);
    EXPECT_LT(read_name("void cutlass::device_kernel<flash::FlashAttnFwd...").confidence, Confidence::likely);
    for (const char* name :
         {"void cutlass::device_kernel<flash::FlashAttnFwdPostprocess<cutlass::bfloat16_t, 64, 128> >",
          "void cutlass::device_kernel<flash::FlashAttnBwdDkvPost..."})
        EXPECT_EQ(read_name(name).role, Role::helper) << name;
    EXPECT_TRUE(cut_inside("a::f_long_na...", "f_long_name", 6));
    EXPECT_FALSE(cut_inside("a::f_l...", "f_long_name", 6));
    EXPECT_FALSE(cut_inside("a::f_long_na", "f_long_name", 6));
}

/// In a kernel that only moves keys and values, "mla" names the contents of the cache.
TEST(KernelNames, tells_a_latent_cache_from_latent_attention) {
    EXPECT_EQ(read_name("flatten_kv_cache_mla_fp8_kernel").role, Role::look_alike);
    EXPECT_EQ(read_name("_cat_and_cache_mla_kernel").role, Role::look_alike);
    EXPECT_EQ(read_name("_mla_prefill_kernel").role, Role::attention);
    EXPECT_EQ(read_name("kn_get_mla_metadata_v1_2").family, Family::aiter);
}

TEST(KernelNames, is_one_spelling_for_all_tools) {
    EXPECT_EQ(normalised("void f<(int)128, (bool)1, (bool)0>(T1)"), "f<128,true,false>(T1)");
    EXPECT_EQ(normalised("void <unnamed>::f<128u, 2ul, true> (int)"), "f<128,2,true>(int)");
    EXPECT_EQ(normalised("void (anonymous namespace)::f<(x::Mode)1>(unsigned int)"), "f<1>(unsigned int)");
    EXPECT_EQ(normalised("_ZN1a1fILi128ELb1EEEvv"), "a::f<128,true>()");
    EXPECT_EQ(normalised("_ZN13pytorch_flash16flash_fwd_kernelI23Flash_fwd_kernel_traitsILi128ELb1E"),
              "pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128,true...");
    EXPECT_EQ(normalised("   "), "");
}

struct ReleaseCase {
    const char* name;
    const char* release;
};
void PrintTo(const ReleaseCase& of, std::ostream* out) { *out << of.name << " is of " << of.release; }

class Releases : public testing::TestWithParam<ReleaseCase> {};

TEST_P(Releases, follow_from_the_number_of_switches) {
    EXPECT_EQ(read_name(GetParam().name).release, GetParam().release) << GetParam().name;
}

constexpr const char* kSeven =
    "void flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4, false, false, cutlass::half_t>, "
    "false, true, false, false, true, true, false>(Flash_fwd_params)";

INSTANTIATE_TEST_SUITE_P(
    Fa2, Releases,
    testing::Values(
        ReleaseCase{"flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4>, false, true, true, true, "
                    "false>(Flash_fwd_params)",
                    "2.0.0 to 2.2.5"},
        ReleaseCase{"flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4>, false, true, false, true, true, "
                    "false>(Flash_fwd_params)",
                    "2.3.x"},
        ReleaseCase{kSeven, "2.4.0 to 2.5.9"},
        ReleaseCase{"flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4>, false, true, false, false, true, true, "
                    "false, false>(Flash_fwd_params)",
                    "2.6.0 to 2.7.3"},
        ReleaseCase{"flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4>, false, true, false, false, "
                    "true, true, false, false>(flash::Flash_fwd_params)",
                    "2.7.4 or later"},
        ReleaseCase{
            "flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4, 0, 0, cutlass::bfloat16_t>, 0, 1, 0, "
            "0, 1, 1, 0, 0>(flash::Flash_fwd_params)",
            "2.7.4 or later"},
        ReleaseCase{
            "flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4>, true, false, true>(Flash_fwd_params)",
            "2.1.2 to 2.1.x"},
        ReleaseCase{"flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<64, 128, 128, 8>, false, "
                    "true, false, false, true, true>(Flash_bwd_params)",
                    "2.4.0 to 2.6.1"},
        ReleaseCase{"flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<64, 128, 128, 8>, false, "
                    "true, false, false, true, true, false>(Flash_bwd_params)",
                    "2.6.2 to 2.7.3"}));

TEST(KernelNames, reads_the_switches_of_fa2) {
    const NameReading causal = read_name(kSeven);
    EXPECT_EQ(causal.mask, "causal");
    EXPECT_EQ(causal.tile_q, 128);
    EXPECT_EQ(causal.tile_kv, 128);
    EXPECT_EQ(causal.dtype, "fp16");
    const NameReading all = read_name(
        "void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 64, 4, false, false, cutlass::bfloat16_t>, "
        "true, "
        "false, true, true, false, false, true, false>(flash::Flash_fwd_params)");
    EXPECT_EQ(all.mask, "window");
    EXPECT_EQ(all.features, (std::vector<std::string>{"dropout", "ALiBi", "softcap"}));
}

TEST(KernelNames, reads_the_switches_of_fa3) {
    const auto name = [](const char* switches) {
        return std::string(
                   "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<"
                   "flash::CollectiveMainloopFwdSm90<2, cute::tuple<cute::C<1>, cute::C<1>, cute::C<1> >, "
                   "cute::tuple<cute::C<128>, cute::C<128>, cute::C<192> >, ") +
               switches + "> > > >";
    };
    const NameReading mla =
        read_name(name("128, cutlass::bfloat16_t, float, cutlass::arch::Sm90, true, false, true, true, "
                       "true, true, true, true, true, true, true, false"));
    EXPECT_EQ(mla.head_dim, 192);
    EXPECT_EQ(mla.head_dim_v, 128);
    EXPECT_EQ(mla.mask, "causal");
    EXPECT_EQ(mla.features, (std::vector<std::string>{"softcap", "varlen", "paged keys", "appends to the cache",
                                                      "second Q", "packs query heads", "keys split"}));
    EXPECT_EQ(mla.release, "2.7.3 to March 2026");
    const NameReading first =
        read_name(name("cutlass::half_t, float, cutlass::arch::Sm90, false, true, false, false, "
                       "false, false, true, true, false, false, false"));
    EXPECT_EQ(first.release, "2.7.3");
    EXPECT_EQ(first.mask, "window");
    EXPECT_TRUE(first.features.empty());
}

TEST(KernelNames, flags_what_is_not_exact) {
    EXPECT_EQ(read_name("qk_int8_sv_f8_accum_f32_attn_inst_buf").exactness, Exactness::not_exact);
    EXPECT_EQ(read_name(kSeven).exactness, Exactness::exact);
    EXPECT_EQ(read_name("void flash::flash_fwd_block_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4> >").exactness,
              Exactness::not_exact);
}

/// Inductor names the pointwise kernels beside an attention after it.
TEST(KernelNames, is_not_taken_in_by_inductor) {
    const NameReading beside = read_name("triton_poi_fused__scaled_dot_product_flash_attention_clone_transpose_2");
    EXPECT_EQ(beside.role, Role::look_alike);
    EXPECT_EQ(read_name("triton_per_fused_flex_attention_backward_mul_sum_1").role, Role::helper);
    EXPECT_EQ(read_name("triton_per_fused__softmax__to_copy_masked_fill_1").role, Role::softmax);
    EXPECT_EQ(read_name("triton_per_fused__safe_softmax__scaled_dot_product_attention_1").role, Role::softmax);
}

TEST(KernelNames, survives_fifty_thousand_damaged_names) {
    auto rows = corpus("known");
    std::mt19937_64 random(20261122);
    const auto below = [&](std::size_t bound) { return static_cast<std::size_t>(random() % bound); };
    const std::string pieces[] = {
        "<",    ">",       "(",        ")",   ",",    "::", "_Z", "N", "E", "I", "Lb1E", "999999999999",
        "true", "(bool)1", "cute::C<", "_sm", "\xff", "x"};
    std::int64_t read = 0;
    for (int i = 0; i < 50'000; ++i) {
        std::string name = rows[below(rows.size())].name;
        for (std::size_t edit = below(4) + 1; edit > 0; --edit) {
            const std::size_t at = below(name.size() + 1);
            switch (below(4)) {
                case 0: name.insert(at, pieces[below(std::size(pieces))]); break;
                case 1: name.erase(at, below(20)); break;
                case 2: name.resize(at); break;
                default: name += rows[below(rows.size())].name.substr(0, below(60)); break;
            }
        }
        const NameReading got = read_name(name);
        read += got.role != Role::unknown ? 1 : 0;
        ASSERT_GE(got.arch, 0) << name;
        ASSERT_GE(got.head_dim, 0) << name;
    }
    EXPECT_GT(read, 20'000);
}

/// Found by tests/fuzz/fuzz_name.
TEST(KernelNames, takes_no_sign_for_a_size) {
    EXPECT_EQ(read_name("fmha_v2_flash_attention_fp16_fp32_-4_128_S_q_k_v_256_custom_mask_sm87_kernel").tile_q, 0);
}

TEST(KernelNames, bounds_a_name_of_any_length) {
    EXPECT_LE(normalised(std::string(std::size_t{1} << 22, '<')).size(), kLongestName);
    EXPECT_EQ(read_name(std::string(std::size_t{1} << 20, '1')).family, Family::unknown);
}

}  // namespace
}  // namespace tessera::diagnose::name_test
