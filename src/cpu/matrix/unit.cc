// SPDX-License-Identifier: Apache-2.0
//
// Detection of the unit that multiplies bf16 tiles on this processor.
#include "cpu/matrix/primitives.hpp"

#include <atomic>

#include "cpu/simd/isa.hpp"

#if defined(__x86_64__)
#include <cpuid.h>
#include "cpu/matrix/units.hpp"
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace tessera::cpu::matrix {
namespace {

#if defined(__x86_64__)

struct Registers {
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
};

Registers cpuid(unsigned leaf, unsigned subleaf) {
    Registers r;
    if (__get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx) == 0) return {};
    return r;
}

bool bit(unsigned word, int index) { return (word >> index & 1U) != 0; }

/// AVX512 F, DQ, BW, VL and BF16. Compilers' own check includes that the operating system saves the registers.
bool has_avx512_bf16() {
    return simd::may_use(simd::Isa::avx512_bf16) && __builtin_cpu_supports("avx512f") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && bit(cpuid(7, 1).eax, 5);
}

/// Is VDPBF16PS faster than fp32? On AMD from Zen 4 on it does twice the multiply-adds (2.0 times measured on Zen 5,
/// 2026-11). On Intel it splits into four operations and loses, so the CPUID bit alone doesn't count.
bool dot_beats_fp32() {
    const Registers vendor = cpuid(0, 0);
    const bool amd = vendor.ebx == 0x68747541 && vendor.edx == 0x69746E65 && vendor.ecx == 0x444D4163;  // AuthenticAMD
    return amd && has_avx512_bf16();
}

/// Asks Linux for the tile registers, which it grants per process.
bool tile_registers_granted() {
#if defined(__linux__)
    constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
    constexpr long kTileData = 18;
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
    return false;
#endif
}

bool has_amx() {
    static const bool has = [] {
        const unsigned features = cpuid(7, 0).edx;
        return simd::may_use(simd::Isa::amx) && bit(features, 22) && bit(features, 24) && has_avx512_bf16() &&
               tile_registers_granted();
    }();
    return has;
}

Unit best_unit() { return has_amx() ? Unit::amx : dot_beats_fp32() ? Unit::dot : Unit::none; }

#else

Unit best_unit() { return Unit::none; }

#endif

struct Choice {
    std::atomic<Unit> unit{best_unit()};
    std::atomic<bool> pack_fp32{unit == Unit::amx};
};

Choice& choice() {
    static Choice choice;
    return choice;
}

}  // namespace

const char* name_of(Unit unit) { return unit == Unit::amx ? "AMX" : unit == Unit::dot ? "AVX512-BF16" : ""; }

Unit unit() { return choice().unit.load(std::memory_order_relaxed); }

bool packing_pays(DType dtype) {
    if (unit() == Unit::none || parts_of(dtype) == 0) return false;
    return dtype == DType::bf16 || choice().pack_fp32.load(std::memory_order_relaxed);
}

void set_unit_for_test(Unit unit, bool pack_fp32) {
    choice().unit.store(unit, std::memory_order_relaxed);
    choice().pack_fp32.store(pack_fp32, std::memory_order_relaxed);
}

bool has_unit([[maybe_unused]] Unit unit) {
    if (unit == Unit::none) return true;
#if defined(__x86_64__)
    return unit == Unit::amx ? has_amx() : has_avx512_bf16();
#else
    return false;
#endif
}

const Primitives* primitives_of_unit() {
#if defined(__x86_64__)
    switch (unit()) {
        case Unit::amx: return &kAmxPrimitives;
        case Unit::dot: return &kDotPrimitives;
        case Unit::none: return nullptr;
    }
#endif
    return nullptr;
}

}  // namespace tessera::cpu::matrix
