// SPDX-License-Identifier: Apache-2.0
//
// The tile product. Registers hold kRows x kVectors accumulators; each step of k loads kVectors vectors of B and
// broadcasts kRows scalars of A: 24 multiply-adds for 10 loads on AVX-512 (6 x 4 vectors of 16), 12 for 8 on AVX2
// (6 x 2 of 8), so that the multiply-add units, not the load ports, are the limit (docs/decisions/queries-in-lanes.md).
#include "cpu/tile/tile.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/tile/matmul.cc"
#include <hwy/foreach_target.h>  // first: it compiles this file once for each target

#include <hwy/highway.h>

#include "cpu/tile/simd.hpp"

HWY_BEFORE_NAMESPACE();
namespace tessera::cpu::tile::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using D = hn::ScalableTag<float>;
using V = hn::Vec<D>;

constexpr std::int64_t kWidth = static_cast<std::int64_t>(hn::MaxLanes(D()));
constexpr int kMaxRows = 6;
// Vectors of B per step: as many as the register file takes beside kMaxRows rows of accumulators.
constexpr int kMaxVectors = HWY_ARCH_X86 && HWY_TARGET >= HWY_AVX2 ? 2 : 4;
static_assert(kLanes % (kWidth * (kWidth == kLanes ? 1 : kMaxVectors)) == 0, "a tile row is a whole number of blocks");

/// Stores one vector of A B into C. C is added last, after the k products: a long sum over tiles then rounds once a
/// tile, not once a product, and its error grows with the square root of the number of tiles.
HWY_INLINE void put(const Product& p, V sum, std::int64_t row, std::int64_t lane) {
    const D d;
    float* c = p.c + row * p.c_stride + lane;
    if (p.into == Into::add) sum = hn::Add(hn::Load(d, c), sum);
    if (p.into == Into::scaled_add) sum = hn::MulAdd(hn::Load(d, c), hn::Load(d, p.lane_scale + lane), sum);
    hn::Store(sum, d, c);
}

template <int kRows, int kVectors>
HWY_INLINE void block(const Product& p, std::int64_t row, std::int64_t lane) {
    const D d;
    const float* HWY_RESTRICT a = p.a + row * p.a_row;
    const float* HWY_RESTRICT b = p.b + lane;
    V sums[kRows][kVectors];
    TESSERA_UNROLL for (int r = 0; r < kRows; ++r) {
        TESSERA_UNROLL for (int v = 0; v < kVectors; ++v) sums[r][v] = hn::Zero(d);
    }
    for (std::int64_t k = 0; k < p.k; ++k) {
        V from_b[kVectors];
        TESSERA_UNROLL for (int v = 0; v < kVectors; ++v) from_b[v] = hn::Load(d, b + v * kWidth);
        TESSERA_UNROLL for (int r = 0; r < kRows; ++r) {
            const V from_a = hn::Set(d, a[r * p.a_row]);
            TESSERA_UNROLL for (int v = 0; v < kVectors; ++v) sums[r][v] = hn::MulAdd(from_a, from_b[v], sums[r][v]);
        }
        a += p.a_k;
        b += p.b_stride;
    }
    TESSERA_UNROLL for (int v = 0; v < kVectors; ++v) {
        TESSERA_UNROLL for (int r = 0; r < kRows; ++r) put(p, sums[r][v], row + r, lane + v * kWidth);
    }
}

/// All rows of a column block: full row blocks, then what is left.
template <int kVectors>
HWY_INLINE void column(const Product& p, std::int64_t lane) {
    std::int64_t row = 0;
    for (; row + kMaxRows <= p.m; row += kMaxRows) block<kMaxRows, kVectors>(p, row, lane);
    switch (p.m - row) {
        case 5: return block<5, kVectors>(p, row, lane);
        case 4: return block<4, kVectors>(p, row, lane);
        case 3: return block<3, kVectors>(p, row, lane);
        case 2: return block<2, kVectors>(p, row, lane);
        case 1: return block<1, kVectors>(p, row, lane);
        default: return;
    }
}

void Matmul(const Product& p) {
    std::int64_t lane = 0;
    for (; lane + kMaxVectors * kWidth <= p.n; lane += kMaxVectors * kWidth) column<kMaxVectors>(p, lane);
    // Only where one vector is a whole kLanes can fewer than kMaxVectors be left.
    if constexpr (kWidth == kLanes) {
        switch ((p.n - lane) / kWidth) {
            case 3: return column<3>(p, lane);
            case 2: return column<2>(p, lane);
            case 1: return column<1>(p, lane);
            default: return;
        }
    }
}

void MatmulHiddenKeys(const Product& p, const Place& place) {
    const D d;
    HWY_ALIGN float seen[kLanes];
    for (std::int64_t lane = 0; lane < p.n; lane += kWidth) {
        for (std::int64_t row = 0; row < p.m; ++row) {
            V sum = hn::Zero(d);
            for (std::int64_t k = 0; k < p.k; ++k) {
                for (std::int64_t i = 0; i < kWidth; ++i) {
                    seen[i] = place.band.visible(place.q + lane + i, place.kv + k) ? 1.0F : 0.0F;
                }
                const V next = hn::MulAdd(hn::Set(d, p.a[row * p.a_row + k * p.a_k]),
                                          hn::Load(d, p.b + k * p.b_stride + lane), sum);
                sum = hn::IfThenElse(hn::Ne(hn::Load(d, seen), hn::Zero(d)), next, sum);
            }
            put(p, sum, row, lane);
        }
    }
}

void MatmulHiddenQueries(const Product& p, const Place& place) {
    const D d;
    for (std::int64_t lane = 0; lane < p.n; lane += kWidth) {
        for (std::int64_t row = 0; row < p.m; ++row) {
            V sum = hn::Zero(d);
            for (std::int64_t k = 0; k < p.k; ++k) {
                if (!place.band.visible(place.q + k, place.kv + row)) continue;
                sum = hn::MulAdd(hn::Set(d, p.a[row * p.a_row + k * p.a_k]), hn::Load(d, p.b + k * p.b_stride + lane),
                                 sum);
            }
            put(p, sum, row, lane);
        }
    }
}

}  // namespace tessera::cpu::tile::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tessera::cpu::tile {

HWY_EXPORT(Matmul);
HWY_EXPORT(MatmulHiddenKeys);
HWY_EXPORT(MatmulHiddenQueries);

void matmul(const Product& product) { HWY_DYNAMIC_DISPATCH(Matmul)(product); }
void matmul_hidden_keys(const Product& product, const Place& place) {
    HWY_DYNAMIC_DISPATCH(MatmulHiddenKeys)(product, place);
}
void matmul_hidden_queries(const Product& product, const Place& place) {
    HWY_DYNAMIC_DISPATCH(MatmulHiddenQueries)(product, place);
}

}  // namespace tessera::cpu::tile
#endif
