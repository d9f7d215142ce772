// SPDX-License-Identifier: Apache-2.0
//
// The exponential of the words, once for each target that a file is compiled for (Highway).
#if defined(TESSERA_CPU_TILE_EXP_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef TESSERA_CPU_TILE_EXP_INL_HPP
#undef TESSERA_CPU_TILE_EXP_INL_HPP
#else
#define TESSERA_CPU_TILE_EXP_INL_HPP
#endif

#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace tessera::cpu::lanes::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Highway numbers its targets from the best down; on x86 those before AVX2 round a product before they add to it.
constexpr bool kFusedMultiplyAdd = !HWY_ARCH_X86 || HWY_TARGET <= HWY_AVX2;

/// exp(x) for x <= 0, to 4e-7 relative, 2e-7 for results over 2^-20; exp(0) is exactly 1, exp(-inf) exactly 0, NaN
/// stays NaN. Results under 2^-126 are 0: they could not change a sum that holds a 1, and subnormal numbers are slow.
///
/// x = n ln 2 + r, |r| <= ln 2 / 2;  exp(r) = 1 + r P(r), P the degree-4 minimax polynomial of (exp(r) - 1) / r for
/// relative error (fitted in fp64); 2^n is made from the exponent field.
template <class V>
HWY_INLINE V exp_of_nonpositive(V x) {
    const hn::DFromV<V> d;
    const hn::RebindToSigned<hn::DFromV<V>> di;
    const V smallest = hn::Set(d, -87.33654F);  // ln 2^-126
    // Adding 1.5 * 2^23 rounds to an integer, which then stands in the lowest bits; with 127 more it is the exponent
    // field of 2^n.
    const V magic = hn::Set(d, 12582912.0F + 127.0F);
    const V n_in_low_bits = hn::MulAdd(x, hn::Set(d, 1.44269504F), magic);
    const V n = hn::Sub(n_in_low_bits, magic);
    V r;
    if constexpr (kFusedMultiplyAdd) {
        r = hn::NegMulAdd(n, hn::Set(d, 0.693147181F), x);
    } else {  // ln 2 in two parts, the first short enough for an exact product
        r = hn::NegMulAdd(n, hn::Set(d, 0.693145752F), x);
        r = hn::NegMulAdd(n, hn::Set(d, 1.42860677e-6F), r);
    }
    V p = hn::MulAdd(hn::Set(d, 0x1.0fa7d8p-7F), r, hn::Set(d, 0x1.573ad0p-5F));
    p = hn::MulAdd(p, r, hn::Set(d, 0x1.555a6ep-3F));
    p = hn::MulAdd(p, r, hn::Set(d, 0x1.fffdc4p-2F));
    p = hn::MulAdd(p, r, hn::Set(d, 0x1.fffff6p-1F));
    p = hn::MulAdd(p, r, hn::Set(d, 1.0F));
    // A product, not a sum of exponent fields: n of a NaN is any integer, and only a product keeps the NaN.
    const V power = hn::BitCast(d, hn::ShiftLeft<23>(hn::BitCast(di, n_in_low_bits)));
    return hn::IfThenElse(hn::Lt(x, smallest), hn::Zero(d), hn::Mul(p, power));
}

}  // namespace tessera::cpu::lanes::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
