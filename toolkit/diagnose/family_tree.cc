// SPDX-License-Identifier: Apache-2.0
#include "diagnose/family_tree.hpp"

namespace tessera::diagnose {
namespace {

constexpr Relative kRelatives[] = {
    {"standard", "", "Attention written out", "2017-06", "any framework", "scores and weights go through memory",
     "void cunn_SoftMaxForwardReg<float, float, float>", Family::eager},
    {"efficient", "standard", "Memory-efficient attention", "2022", "xFormers, PyTorch",
     "keys in blocks, scores stay on the chip (CUTLASS)", "fmha_cutlassF_f16_aligned_64x128_rf_sm80",
     Family::mem_efficient},
    {"fa1", "standard", "FlashAttention", "2022-05", "flash-attn 0.2 to 1.0",
     "online softmax over tiles; the backward recomputes", "fmha_fwd_loop_kernel<FMHA_kernel_traits<256, 64, 16, 1, 4,",
     Family::fa1},
    {"triton", "fa1", "Triton's fused attention", "2022", "Triton's tutorials, many libraries",
     "FlashAttention in a language of tiles", "_attn_fwd", Family::triton},
    {"flex", "triton", "FlexAttention", "2024-08", "PyTorch 2.5, torch.compile",
     "masks and scores as Python functions, compiled in", "triton_tem_fused_flex_attention_0", Family::flex},
    {"vllm-triton", "triton", "Unified attention", "2025", "vLLM", "paged keys, prefill and decode in one kernel",
     "kernel_unified_attention_2d", Family::triton},
    {"aotriton", "triton", "AOTriton", "2024", "PyTorch on ROCm", "compiled ahead of time", "attn_fwd",
     Family::aotriton},
    {"fa2", "fa1", "FlashAttention-2", "2023-07", "flash-attn 2",
     "queries in the outer loop, fewer divisions, more parallel",
     "void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4,", Family::fa2},
    {"fa2-torch", "fa2", "FlashAttention-2 in PyTorch", "2024-01", "PyTorch 2.2", "a copy in another namespace",
     "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128,", Family::fa2},
    {"fa2-split", "fa2", "Flash-Decoding", "2023-10", "flash-attn 2.2", "keys are split among blocks, then combined",
     "void flash::flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<128, 64,", Family::fa2},
    {"cudnn", "fa1", "cuDNN's attention", "2023-04", "cuDNN 8.9", "closed; generated per shape, with wgmma on Hopper",
     "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_", Family::cudnn},
    {"fmha-v2", "fa1", "TensorRT's fmha v2", "2023", "TensorRT-LLM", "compiled per shape",
     "fmha_v2_flash_attention_fp16_64_32_S_qkv_128_causal_sm86_kernel_nl", Family::trtllm},
    {"trtllm-gen", "fmha-v2", "TRT-LLM's generated kernels", "2025", "TensorRT-LLM, FlashInfer",
     "Blackwell; all fields in the name", "fmhaSm100fKernel_QkvBfloat16OBfloat16H128PagedKvCausalP32VarSeqQ128",
     Family::trtllm},
    {"ck", "fa2", "Composable Kernel", "2024", "flash-attn on ROCm", "FlashAttention-2 on AMD's GPUs",
     "void ck_tile::kentry<256, 1, ck_tile::FmhaFwdKernel<", Family::ck},
    {"aiter", "ck", "AITER", "2025", "AITER; vLLM, SGLang on AMD", "in assembly for AMD's MI300 and later",
     "aiter::fmha_fwd_hd128_bf16_causal", Family::aiter},
    {"flashinfer", "fa2", "FlashInfer", "2024", "FlashInfer, vLLM, SGLang",
     "paged and ragged keys, compiled at run time", "void flashinfer::BatchPrefillWithPagedKVCacheKernel<",
     Family::flashinfer},
    {"sage", "fa2", "SageAttention", "2024-10", "sageattention", "int8 MMA: not exact",
     "qk_int8_sv_f8_accum_f32_attn_inst_buf", Family::sage},
    {"fa3", "fa2", "FlashAttention-3", "2024-07", "flash_attn_interface",
     "Hopper: TMA, wgmma, warp specialization, fp8",
     "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<", Family::fa3},
    {"flashmla", "fa3", "FlashMLA", "2025-02", "DeepSeek; vLLM, SGLang", "decoding of latent attention",
     "void flash::flash_fwd_splitkv_mla_kernel<", Family::flashmla},
    {"fa4", "fa3", "FlashAttention-4", "2025-08", "flash-attn-4",
     "Blackwell, in CuTe DSL; part of the exponentials by polynomials",
     "kernel_cutlass_kernel_flash_attncuteflash_fwd_sm100FlashAttentionForwardSm100", Family::fa4},
};

constexpr const char* kPyTorch = "checked in PyPI's wheels of PyTorch 2.4 to 2.15";
constexpr const char* kSource = "its source in 2026, not checked again";

constexpr Chooser kChoosers[] = {
    {"PyTorch SDPA", "2.4 to 2.15", "fa2-torch, efficient, cudnn, standard, fa3, fa4",
     "flash, efficient, math, cuDNN; cuDNN first on 9.x and 10.x from 2.10 with cuDNN after 9.15; sdpa_kernel(); "
     "activate_flash_attention_impl(\"FA3\") from 2.11, (\"FA4\") from 2.10",
     kPyTorch},
    {"PyTorch SDPA on ROCm", "2026", "aotriton, ck, standard",
     "flash and memory-efficient both end in AOTriton, or in Composable Kernel after "
     "preferred_rocm_fa_library(\"ck\"); "
     "there is no cuDNN; some GPUs need TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL=1",
     kSource},
    {"FlexAttention", "PyTorch 2.5", "flex, fa4", "flex; BACKEND=\"FLASH\" takes FA4", kSource},
    {"xFormers", "2025 (since 2026-04 in mslk)", "fa3, fa2, fa2-torch, efficient, triton, ck",
     "FA3, flash, CUTLASS; split-K first for few queries; CK on ROCm", kSource},
    {"transformers", "5", "fa2-torch, efficient, cudnn, standard, fa2, fa3, fa4, flex",
     "attn_implementation: sdpa (default), eager, flash_attention_2, _3, _4, flex_attention", kSource},
    {"vLLM", "2026", "fa2, fa3, fa4, flashinfer, trtllm-gen, vllm-triton, flex, flashmla",
     "FA4 from 10.0 on, FA3 on 9.0, else FA2; Blackwell asks FlashInfer first; --attention-backend", kSource},
    {"SGLang", "2026", "fa3, flashinfer, fa4, triton, flashmla, trtllm-gen, standard",
     "fa3 on Hopper, else flashinfer; --attention-backend", kSource},
    {"Transformer Engine", "2026", "cudnn, fa2, fa3, fa4, standard",
     "before Hopper flash, cuDNN, unfused; from Hopper cuDNN, flash, unfused; NVTE_FLASH_ATTN, NVTE_FUSED_ATTN",
     kSource},
    {"FlashInfer", "2026", "flashinfer, fa3, trtllm-gen",
     "its FA3 kernels on sm90a without a custom mask, else its FA2 kernels; backend=", kSource},
    {"JAX", "2026", "cudnn, standard", "jax.nn.dot_product_attention: implementation=\"cudnn\" or \"xla\"",
     "its documentation"},
};

}  // namespace

std::span<const Relative> relatives() { return kRelatives; }

std::span<const Chooser> choosers() { return kChoosers; }

}  // namespace tessera::diagnose
