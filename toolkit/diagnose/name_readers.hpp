// SPDX-License-Identifier: Apache-2.0
//
// The readers that read_name() calls in order. Each takes a normalised name and returns a reading, or none.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "diagnose/kernel_text.hpp"
#include "diagnose/name.hpp"

namespace tessera::diagnose {

using MaybeReading = std::optional<NameReading>;

// name_operator.cc
MaybeReading read_operator(std::string_view name);
// name_pallas_mlx.cc
MaybeReading read_pallas(std::string_view name);
MaybeReading read_mlx(std::string_view name);
// name_fa2.cc
MaybeReading read_fa1(std::string_view name);
MaybeReading read_fa2(std::string_view name);
// name_fa3.cc
MaybeReading read_fa3(std::string_view name);
MaybeReading read_fa4(std::string_view name);
// name_nvidia.cc
MaybeReading read_cudnn(std::string_view name);
MaybeReading read_trtllm_gen(std::string_view name);
MaybeReading read_tensorrt(std::string_view name);
MaybeReading read_cutlass_fmha(std::string_view name);
// name_libraries.cc
MaybeReading read_mem_efficient(std::string_view name);
MaybeReading read_flashinfer(std::string_view name);
MaybeReading read_flashmla(std::string_view name);
MaybeReading read_sage(std::string_view name);
MaybeReading read_sage_helper(std::string_view name);
MaybeReading read_tessera(std::string_view name);
// name_triton.cc
MaybeReading read_flex(std::string_view name);
MaybeReading read_triton(std::string_view name);
MaybeReading read_amd(std::string_view name);
// name_other.cc
MaybeReading read_paged(std::string_view name);
MaybeReading read_ggml(std::string_view name);
MaybeReading read_natten(std::string_view name);
MaybeReading read_other_attention(std::string_view name);
// name_none.cc: kernels that are no attention
MaybeReading read_look_alike(std::string_view name);
MaybeReading read_plain_kernel(std::string_view name);
// name_elsewhere.cc: kernels whose words indicate no attention
MaybeReading read_linear_attention(std::string_view name);
MaybeReading read_elsewhere(std::string_view name);
// name_sure.cc
/// Lowers the confidence to unsure if only words support the reading; `name` is normalised.
void limit_confidence(NameReading& reading, std::string_view name);

// name_evidence.cc
/// Rewrites the quotes in the evidence: each quotes what stands in `name`, or in its demangled and normalised form. A
/// quote may list alternatives, "a / b", and leave gaps, "fmhaSm...Kernel_Q".
void quote_only_the_name(NameReading& reading, std::string_view name, std::string_view normalised_name);

/// The reading of a family's kernel; `found` is the piece of the name that indicates it, as quote_only_the_name() takes
/// it.
NameReading attention(Family family, Confidence confidence, std::string_view found,
                      KernelPass pass = KernelPass::forward);

/// Translates "cutlass::bfloat16_t" to "bf16"; empty if the text names no dtype.
std::string dtype_in(std::string_view text);

}  // namespace tessera::diagnose
