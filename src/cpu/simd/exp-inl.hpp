// SPDX-License-Identifier: Apache-2.0
//
// The exponential, compiled once for each target of a file (Highway).
#if defined(TESSERA_CPU_TILE_EXP_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef TESSERA_CPU_TILE_EXP_INL_HPP
#undef TESSERA_CPU_TILE_EXP_INL_HPP
#else
#define TESSERA_CPU_TILE_EXP_INL_HPP
#endif

#include <hwy/highway.h>

#include "cpu/simd/exp.hpp"

HWY_BEFORE_NAMESPACE();
namespace tessera::cpu::simd::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Highway numbers its targets from the best down. On x86 the targets older than AVX2 have no FMA, so they round the
// product before the addition.
constexpr bool kFusedMultiplyAdd = !HWY_ARCH_X86 || HWY_TARGET <= HWY_AVX2;

/// min(x, 0); NaN stays NaN.
template <class V>
HWY_INLINE V at_most_zero(V x) {
    const V zero = hn::Zero(hn::DFromV<V>());
    if constexpr (HWY_ARCH_X86) return hn::Min(zero, x);   // returns the second operand if one is NaN
    else return hn::IfThenElse(hn::Gt(x, zero), zero, x);  // NEON's minimum would drop the NaN
}

/// exp(x) for x <= 0 (exp.hpp). Results under 2^-126 are flushed to 0: a sum that holds a 1 would not change, and
/// subnormal numbers are slow. 2^n is built in the exponent field.
template <class V>
HWY_INLINE V exp_of_nonpositive(V x) {
    const hn::DFromV<V> d;
    const hn::RebindToSigned<hn::DFromV<V>> di;
    // The added 127 is the exponent bias: the lowest bits then hold the exponent field of 2^n.
    const V rounder = hn::Set(d, exp::kRounder + 127.0F);
    const V n_in_low_bits = hn::MulAdd(x, hn::Set(d, exp::kLog2E), rounder);
    const V n = hn::Sub(n_in_low_bits, rounder);
    V r;
    if constexpr (kFusedMultiplyAdd) {
        r = hn::NegMulAdd(n, hn::Set(d, exp::kLn2), x);
    } else {  // ln 2 in two parts, the first short enough for an exact product
        r = hn::NegMulAdd(n, hn::Set(d, 0.693145752F), x);
        r = hn::NegMulAdd(n, hn::Set(d, 1.42860677e-6F), r);
    }
    V p = hn::MulAdd(hn::Set(d, exp::kPolynomial[0]), r, hn::Set(d, exp::kPolynomial[1]));
    p = hn::MulAdd(p, r, hn::Set(d, exp::kPolynomial[2]));
    p = hn::MulAdd(p, r, hn::Set(d, exp::kPolynomial[3]));
    p = hn::MulAdd(p, r, hn::Set(d, exp::kPolynomial[4]));
    p = hn::MulAdd(p, r, hn::Set(d, 1.0F));
    // Multiplying by 2^n keeps a NaN; adding to the exponent field would not.
    const V power = hn::BitCast(d, hn::ShiftLeft<23>(hn::BitCast(di, n_in_low_bits)));
    return hn::IfThenElse(hn::Lt(x, hn::Set(d, exp::kLowest)), hn::Zero(d), hn::Mul(p, power));
}

}  // namespace tessera::cpu::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
