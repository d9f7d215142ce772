// SPDX-License-Identifier: Apache-2.0
#include "cpu/simd/isa.hpp"

#include <fmt/format.h>
#include <hwy/highway.h>

#include <cstdint>
#include <cstdlib>
#include <string_view>

namespace tessera::cpu::simd {
namespace {

struct Limit {
    Isa most = Isa::amx;
    std::optional<std::string> refusal;
};

/// Reads TESSERA_MAX_ISA, and has Highway choose no better instruction set.
Limit read_limit() {
    Limit limit;
    constexpr struct {
        std::string_view name;
        Isa isa;
    } kNames[] = {{"SSE4", Isa::sse4},
                  {"AVX2", Isa::avx2},
                  {"AVX3", Isa::avx3},
                  {"AVX512-BF16", Isa::avx512_bf16},
                  {"AMX", Isa::amx}};
    if (const char* text = std::getenv("TESSERA_MAX_ISA"); text != nullptr && *text != '\0') {
        limit.refusal = fmt::format("TESSERA_MAX_ISA: expected SSE4, AVX2, AVX3, AVX512-BF16 or AMX, got \"{}\"", text);
        for (const auto& [name, isa] : kNames) {
            if (name == text) limit = {isa, std::nullopt};
        }
    }
#if HWY_ARCH_X86
    // Better instruction sets have lower bits.
    if (limit.most == Isa::sse4) hwy::DisableTargets(HWY_SSE4 - 1);
    if (limit.most == Isa::avx2) hwy::DisableTargets(HWY_AVX2 - 1);
    const std::int64_t targets = hwy::SupportedTargets();
    hwy::GetChosenTarget().Update(targets);
    const bool has_sse4 = (targets & (HWY_SSE4 | (HWY_SSE4 - 1))) != 0;
    if (!limit.refusal && !has_sse4) limit.refusal = "needs a processor with SSE4.2";
#endif
    return limit;
}

// Initialized before main(), so that no kernel has run on better instructions. Read once: CPUID takes tens of
// microseconds on a virtual machine.
const Limit limit = read_limit();

}  // namespace

bool may_use(Isa isa) { return isa <= limit.most; }

std::optional<std::string> isa_refusal() { return limit.refusal; }

}  // namespace tessera::cpu::simd
