// SPDX-License-Identifier: Apache-2.0
//
// The instruction sets that the CPU kernels may use: those of the processor, up to TESSERA_MAX_ISA.
#pragma once

#include <optional>
#include <string>

namespace tessera::cpu::simd {

/// Instruction sets of x86-64; each includes all earlier ones. The last two are matrix units. Other processors report
/// `sse4`.
enum class Isa { sse4, avx2, avx3, avx512_bf16, amx };

/// May kernels use it where the processor has it? The environment variable TESSERA_MAX_ISA (SSE4, AVX2, AVX3,
/// AVX512-BF16 or AMX; AVX3 is AVX-512) sets the most, for comparisons and tests. It is read once, at the start.
bool may_use(Isa isa);

/// The reason why the CPU kernels cannot run: a processor without SSE4.2, or a TESSERA_MAX_ISA that is none of these.
std::optional<std::string> isa_refusal();

}  // namespace tessera::cpu::simd
