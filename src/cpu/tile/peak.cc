// SPDX-License-Identifier: Apache-2.0
#include "cpu/tile/peak.hpp"

#include <vector>

#include "cpu/tile/packed.hpp"
#include "cpu/tile/tile.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/tile/peak.cc"
#include <hwy/foreach_target.h>  // first: it compiles this file once for each target

#include <hwy/highway.h>

#include "cpu/tile/simd.hpp"

HWY_BEFORE_NAMESPACE();
namespace tessera::cpu::tile::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using D = hn::ScalableTag<float>;
using V = hn::Vec<D>;

constexpr int kChains = 12;  // more than latency times rate of every core, fewer than the registers of AVX2

double MultiplyAdds(std::int64_t rounds, float* sink) {
    const D d;
    V sums[kChains];
    TESSERA_UNROLL for (int i = 0; i < kChains; ++i) sums[i] = hn::Set(d, static_cast<float>(i));
    const V a = hn::Load(d, sink);
    for (std::int64_t round = 0; round < rounds; ++round) {
        TESSERA_UNROLL for (int i = 0; i < kChains; ++i) sums[i] = hn::MulAdd(a, sums[i], a);
    }
    V all = sums[0];
    TESSERA_UNROLL for (int i = 1; i < kChains; ++i) all = hn::Add(all, sums[i]);
    hn::Store(all, d, sink);
    return 2.0 * kChains * static_cast<double>(hn::Lanes(d)) * static_cast<double>(rounds);
}

float Read(const float* from, std::int64_t count) {
    const D d;
    const auto width = static_cast<std::int64_t>(hn::Lanes(d));
    V sums[8];
    TESSERA_UNROLL for (V& sum : sums) sum = hn::Zero(d);
    for (std::int64_t at = 0; at + 8 * width <= count; at += 8 * width) {
        TESSERA_UNROLL for (int i = 0; i < 8; ++i) sums[i] = hn::Add(sums[i], hn::LoadU(d, from + at + i * width));
    }
    V all = sums[0];
    TESSERA_UNROLL for (int i = 1; i < 8; ++i) all = hn::Add(all, sums[i]);
    return hn::GetLane(hn::SumOfLanes(d, all));
}

}  // namespace tessera::cpu::tile::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tessera::cpu::tile {

HWY_EXPORT(MultiplyAdds);
HWY_EXPORT(Read);

double peak_multiply_adds(std::int64_t rounds) {
    alignas(64) float sink[kLanes] = {};
    return HWY_DYNAMIC_DISPATCH(MultiplyAdds)(rounds, sink);
}

float peak_read(const float* from, std::int64_t count) { return HWY_DYNAMIC_DISPATCH(Read)(from, count); }

double peak_tile_products(std::int64_t rounds) {
    const PackedWords* words = packed_words();
    if (words == nullptr) return 0;
    constexpr std::int64_t kDepth = 8;  // 16 KiB of left and of right tiles
    struct alignas(64) Memory {
        Bf16 a[2 * kDepth * kTileElements] = {};
        Bf16 b[2 * kDepth * kTileElements] = {};
        float c[32 * 32] = {};
    };
    Memory memory;
    const PackedSession session(*words);
    for (std::int64_t round = 0; round < rounds; ++round) {
        words->multiply({.m = 2,
                         .n = 2,
                         .k = kDepth,
                         .a = {memory.a, kDepth * kTileElements, kTileElements},
                         .b = {memory.b, 2 * kTileElements, kTileElements},
                         .c = memory.c,
                         .c_stride = 32});
    }
    return 2.0 * 32 * 32 * kDepth * kTileDepth * static_cast<double>(rounds);
}

double peak_exponentials(std::int64_t rounds) {
    constexpr std::int64_t kKeys = 64;
    alignas(64) float s[kKeys * kLanes] = {};
    alignas(64) float lse[kLanes] = {};
    for (std::int64_t round = 0; round < rounds; ++round) weights_from_lse(s, lse, kKeys, kLanes, kLanes);
    return static_cast<double>(kKeys * kLanes * rounds);
}

}  // namespace tessera::cpu::tile
#endif
