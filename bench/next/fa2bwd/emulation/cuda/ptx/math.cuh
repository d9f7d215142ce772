// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "emu.hpp"
namespace tessera::cuda::ptx {
template <class T>
T opaque(T v) {
    return v;
}
inline float exp2_approx(float x) { return std::exp2(x); }
inline float reciprocal_approx(float x) { return 1 / x; }
inline float log2_approx(float x) { return std::log2(x); }
template <class T>
T rounded(float x) {
    if constexpr (std::is_same_v<T, __half>) return __float2half_rn(x);
    else return __float2bfloat16_rn(x);
}
template <class T>
float number(T x) {
    if constexpr (std::is_same_v<T, __half>) return __half2float(x);
    else return __bfloat162float(x);
}
template <class T>
std::uint32_t pack(float low, float high) {
    T a[2] = {rounded<T>(low), rounded<T>(high)};
    std::uint32_t p;
    std::memcpy(&p, a, 4);
    return p;
}
template <class T>
float unpack(std::uint32_t p, int half) {
    T a[2];
    std::memcpy(a, &p, 4);
    return number<T>(a[half]);
}
}  // namespace tessera::cuda::ptx
