// SPDX-License-Identifier: Apache-2.0
//
// The readers that read_name() asks one after the other. Each takes a normalised name, and says whether it knows it.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "diagnose/kernel_text.hpp"
#include "diagnose/name.hpp"

namespace tessera::diagnose {

using MaybeReading = std::optional<NameReading>;

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
MaybeReading read_other_attention(std::string_view name);
// name_none.cc: no attention
MaybeReading read_look_alike(std::string_view name);
MaybeReading read_plain_kernel(std::string_view name);
// name_elsewhere.cc: no attention, as far as words tell
MaybeReading read_linear_attention(std::string_view name);
MaybeReading read_elsewhere(std::string_view name);
// name_sure.cc
/// Lowers to unsure what only words say; `name` is normalised.
void keep_honest(NameReading& reading, std::string_view name);

/// A kernel of a family; `found` is the piece of the name that says so.
NameReading attention(Family family, Confidence confidence, std::string_view found,
                      KernelPass pass = KernelPass::forward);

/// "cutlass::bfloat16_t" as "bf16"; empty when it says nothing.
std::string dtype_in(std::string_view text);

}  // namespace tessera::diagnose
