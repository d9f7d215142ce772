// SPDX-License-Identifier: Apache-2.0
//
// The tile GEMM. Registers hold kRows x kVectors accumulators; each step of k loads kVectors vectors of B and
// broadcasts kRows scalars of A. This takes 10 loads for 24 multiply-adds on AVX-512 (6 x 4 vectors of 16), 8 for 12 on
// AVX2 (6 x 2 of 8). The multiply-add units, not the load ports, are therefore the limit
// (docs/decisions/queries-in-lanes.md).
#include <algorithm>

#include "cpu/simd/primitives.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/simd/matmul.cc"
#include <hwy/foreach_target.h>  // first: it compiles this file once for each target

#include <hwy/highway.h>

#include "cpu/simd/simd.hpp"

HWY_BEFORE_NAMESPACE();
namespace tessera::cpu::simd::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using D = hn::ScalableTag<float>;
using V = hn::Vec<D>;

constexpr std::int64_t kWidth = static_cast<std::int64_t>(hn::MaxLanes(D()));
constexpr int kMaxRows = 6;
// Vectors of B per step: as many as fit in the register file beside kMaxRows rows of accumulators.
constexpr int kMaxVectors = HWY_ARCH_X86 && HWY_TARGET >= HWY_AVX2 ? 2 : 4;
static_assert(kLanes % (kWidth * (kWidth == kLanes ? 1 : kMaxVectors)) == 0, "a tile row is a whole number of blocks");

/// Stores a block of A B into C. C is added last, after the k products. A long sum over tiles then rounds once per
/// tile, and its error grows with the square root of the number of tiles.
template <int kRows, int kVectors>
HWY_INLINE void add_to_c(const Product& p, const V (&sums)[kRows][kVectors], std::int64_t row, std::int64_t lane) {
    const D d;
    // Read once, since the compiler must assume that a store to C changes the Product.
    float* HWY_RESTRICT c = p.c + row * p.c_stride + lane;
    const std::int64_t stride = p.c_stride;
    const float* HWY_RESTRICT lane_scale = p.lane_scale;
    switch (p.into) {
        case Into::overwrite:
            TESSERA_UNROLL for (int r = 0; r < kRows; ++r) {
                TESSERA_UNROLL for (int v = 0; v < kVectors; ++v) hn::Store(sums[r][v], d, c + r * stride + v * kWidth);
            }
            return;
        case Into::add:
            TESSERA_UNROLL for (int r = 0; r < kRows; ++r) {
                TESSERA_UNROLL for (int v = 0; v < kVectors; ++v) {
                    float* at = c + r * stride + v * kWidth;
                    hn::Store(hn::Add(hn::Load(d, at), sums[r][v]), d, at);
                }
            }
            return;
        case Into::scaled_add:
            TESSERA_UNROLL for (int r = 0; r < kRows; ++r) {
                TESSERA_UNROLL for (int v = 0; v < kVectors; ++v) {
                    float* at = c + r * stride + v * kWidth;
                    hn::Store(hn::MulAdd(hn::Load(d, at), hn::Load(d, lane_scale + lane + v * kWidth), sums[r][v]), d,
                              at);
                }
            }
            return;
    }
}

template <int kRows, int kVectors>
HWY_INLINE void block(const Product& p, std::int64_t row, std::int64_t lane) {
    const D d;
    // One pointer serves four rows, by offsets of one, two and three strides. This saves general-purpose registers.
    constexpr int kGroups = (kRows + 3) / 4;
    const std::int64_t stride = p.a_row;
    const float* HWY_RESTRICT a[kGroups];
    TESSERA_UNROLL for (int g = 0; g < kGroups; ++g) a[g] = p.a + (row + 4 * g) * stride;
    const float* HWY_RESTRICT b = p.b + lane;
    V sums[kRows][kVectors];
    TESSERA_UNROLL for (int r = 0; r < kRows; ++r) {
        TESSERA_UNROLL for (int v = 0; v < kVectors; ++v) sums[r][v] = hn::Zero(d);
    }
    for (std::int64_t k = 0; k < p.k; ++k) {
        V from_b[kVectors];
        TESSERA_UNROLL for (int v = 0; v < kVectors; ++v) from_b[v] = hn::Load(d, b + v * kWidth);
        TESSERA_UNROLL for (int r = 0; r < kRows; ++r) {
            const V from_a = hn::Set(d, a[r / 4][r % 4 * stride]);
            TESSERA_UNROLL for (int v = 0; v < kVectors; ++v) sums[r][v] = hn::MulAdd(from_a, from_b[v], sums[r][v]);
        }
        TESSERA_UNROLL for (int g = 0; g < kGroups; ++g) a[g] += p.a_k;
        b += p.b_stride;
    }
    add_to_c<kRows, kVectors>(p, sums, row, lane);
}

/// Rows of a block that is few vectors wide. Each multiply-add waits for the previous one of its row, so narrow blocks
/// need more rows in flight. Decoding has one vector of queries.
template <int kVectors>
inline constexpr int kTallRows = kVectors == 1   ? 16
                                 : kVectors == 2 ? 12
                                                 : kMaxRows;

/// All rows of a column block: full row blocks, then the remainder.
template <int kVectors>
HWY_INLINE void column(const Product& p, std::int64_t lane) {
    std::int64_t row = 0;
    if constexpr (kVectors < kMaxVectors) {
        for (; row + kTallRows<kVectors> <= p.m; row += kTallRows<kVectors>)
            block<kTallRows<kVectors>, kVectors>(p, row, lane);
    }
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
    // Fewer than kMaxVectors vectors can remain only if one vector is kLanes wide.
    if constexpr (kWidth == kLanes) {
        switch ((p.n - lane) / kWidth) {
            case 3: return column<3>(p, lane);
            case 2: return column<2>(p, lane);
            case 1: return column<1>(p, lane);
            default: return;
        }
    }
}

/// Rows `rows` and lanes `lanes` of C, from steps `steps` of k.
HWY_INLINE void matmul_part(const Product& p, const Range& rows, const Range& lanes, const Range& steps) {
    Product part = p;
    part.m = rows.size();
    part.n = lanes.size();
    part.k = steps.size();
    part.a += rows.begin * p.a_row + steps.begin * p.a_k;
    part.b += steps.begin * p.b_stride + lanes.begin;
    part.c += rows.begin * p.c_stride + lanes.begin;
    if (p.lane_scale != nullptr) part.lane_scale += lanes.begin;
    Matmul(part);
}

void MatmulVisibleScores(const Product& p, const TilePosition& position) {
    const auto lanes_of = [&](std::int64_t key) {
        const Range seeing = position.queries_of_keys(key, key + 1, p.n);
        return Range{seeing.begin / kLanes * kLanes, padded(seeing.end)};
    };
    for (std::int64_t key = 0, end = 0; key < p.m; key = end) {
        // Keys that the same lanes see go together.
        const Range lanes = lanes_of(key);
        for (end = key + 1; end < p.m && lanes_of(end) == lanes;) ++end;
        matmul_part(p, {key, end}, lanes, {0, p.k});
    }
}

void MatmulVisibleKeys(const Product& p, const TilePosition& position) {
    for (std::int64_t lane = 0, end = 0; lane < p.n; lane = end) {
        // Lanes that see the same keys go together.
        const Range keys = position.keys_of_lanes(lane, p.k);
        for (end = lane + kLanes; end < p.n && position.keys_of_lanes(end, p.k) == keys;) end += kLanes;
        matmul_part(p, {0, p.m}, {lane, end}, keys);
    }
}

void MatmulVisibleQueries(const Product& p, const TilePosition& position) {
    constexpr std::int64_t kColumn = kMaxVectors * kWidth;
    for (std::int64_t lane = 0; lane < p.n; lane += kColumn) {
        const Range lanes{lane, std::min(p.n, lane + kColumn)};
        for (std::int64_t key = 0; key < p.m; key += kMaxRows) {
            const Range keys{key, std::min(p.m, key + kMaxRows)};
            matmul_part(p, keys, lanes, position.queries_of_keys(keys.begin, keys.end, p.k));
        }
    }
}

void MatmulHiddenKeys(const Product& p, const TilePosition& position) {
    const D d;
    const hn::RebindToSigned<D> di;
    for (std::int64_t lane = 0; lane < p.n; lane += kWidth) {
        const auto query = hn::Iota(di, static_cast<std::int32_t>(lane));
        for (std::int64_t row = 0; row < p.m; ++row) {
            V sum = hn::Zero(d);
            for (std::int64_t k = 0; k < p.k; ++k) {
                // Lane i is query position.q + i, visible to the key when key - high <= query <= key - low.
                const auto limit = [&](std::int64_t q) {
                    return static_cast<std::int32_t>(q - position.q < -1    ? -1
                                                     : q - position.q > p.n ? p.n
                                                                            : q - position.q);
                };
                const auto lowest = hn::Set(di, limit(position.kv + k - position.band.high));
                const auto highest = hn::Set(di, limit(position.kv + k - position.band.low));
                const auto hidden = hn::Or(hn::Lt(query, lowest), hn::Gt(query, highest));
                const V a = hn::Set(d, p.a[row * p.a_row + k * p.a_k]);
                const V next = hn::MulAdd(a, hn::Load(d, p.b + k * p.b_stride + lane), sum);
                sum = hn::IfThenElse(hn::RebindMask(d, hidden), sum, next);
            }
            const V one[1][1] = {{sum}};
            add_to_c<1, 1>(p, one, row, lane);
        }
    }
}

void MatmulHiddenQueries(const Product& p, const TilePosition& position) {
    const D d;
    for (std::int64_t lane = 0; lane < p.n; lane += kWidth) {
        for (std::int64_t row = 0; row < p.m; ++row) {
            V sum = hn::Zero(d);
            for (std::int64_t k = 0; k < p.k; ++k) {
                if (!position.band.visible(position.q + k, position.kv + row)) continue;
                sum = hn::MulAdd(hn::Set(d, p.a[row * p.a_row + k * p.a_k]), hn::Load(d, p.b + k * p.b_stride + lane),
                                 sum);
            }
            const V one[1][1] = {{sum}};
            add_to_c<1, 1>(p, one, row, lane);
        }
    }
}

}  // namespace tessera::cpu::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tessera::cpu::simd {

HWY_EXPORT(Matmul);
HWY_EXPORT(MatmulVisibleScores);
HWY_EXPORT(MatmulVisibleKeys);
HWY_EXPORT(MatmulVisibleQueries);
HWY_EXPORT(MatmulHiddenKeys);
HWY_EXPORT(MatmulHiddenQueries);

void matmul(const Product& product) { HWY_DYNAMIC_DISPATCH(Matmul)(product); }
void matmul_visible_scores(const Product& product, const TilePosition& position) {
    HWY_DYNAMIC_DISPATCH(MatmulVisibleScores)(product, position);
}
void matmul_visible_keys(const Product& product, const TilePosition& position) {
    HWY_DYNAMIC_DISPATCH(MatmulVisibleKeys)(product, position);
}
void matmul_visible_queries(const Product& product, const TilePosition& position) {
    HWY_DYNAMIC_DISPATCH(MatmulVisibleQueries)(product, position);
}
void matmul_hidden_keys(const Product& product, const TilePosition& position) {
    HWY_DYNAMIC_DISPATCH(MatmulHiddenKeys)(product, position);
}
void matmul_hidden_queries(const Product& product, const TilePosition& position) {
    HWY_DYNAMIC_DISPATCH(MatmulHiddenQueries)(product, position);
}

}  // namespace tessera::cpu::simd
#endif
