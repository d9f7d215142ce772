// SPDX-License-Identifier: Apache-2.0
//
// The primitives on AVX512-BF16. VDPBF16PS adds two products to each of 16 lanes. 8 x 2 accumulators take 16 of these
// for 10 loads.
#include <immintrin.h>

#include <hwy/base.h>
#include <cstring>
#include <limits>

#include "cpu/matrix/units.hpp"
#include "cpu/simd/exp.hpp"
#include "cpu/simd/simd.hpp"

HWY_PUSH_ATTRIBUTES("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma")
namespace tessera::cpu::matrix {
namespace {

#include "cpu/matrix/inl/parts-inl.hpp"
// These use parts-inl.hpp.
#include "cpu/matrix/inl/pack-inl.hpp"
#include "cpu/matrix/inl/store-inl.hpp"
// This uses pack-inl.hpp.
#include "cpu/matrix/inl/softmax-inl.hpp"

/// 8 rows of one row tile by kLanes pair tiles.
template <int kParts, bool kMirrored, int kLanes>
inline void half_block(const TileProduct& p, std::int64_t i, std::int64_t half, std::int64_t j) {
    constexpr int kRows = 8;
    float* c = p.c + (i * kTileRows + half * kRows) * p.c_stride + j * kTileRows;
    __m512 sums[kRows][kLanes];
    TESSERA_UNROLL for (int r = 0; r < kRows; ++r) {
        TESSERA_UNROLL for (int v = 0; v < kLanes; ++v) {
            sums[r][v] = p.add ? _mm512_load_ps(c + r * p.c_stride + v * kTileRows) : _mm512_setzero_ps();
        }
    }
    // One pass over k for all pairs of parts; with small_first two, the small products first.
    constexpr std::size_t kAll = std::size(kPairs<kParts>);
    const std::size_t before = kParts > 1 && p.small_first ? kAll - 1 : kAll;
    for (std::int64_t step = 0; step < (before < kAll ? 2 * p.k : p.k); ++step) {
        const std::int64_t k = step < p.k ? step : step - p.k;
        for (std::size_t pair = step < p.k ? 0 : before; pair < (step < p.k ? before : kAll); ++pair) {
            const PairOfParts parts = kMirrored ? mirrored_pair<kParts>(pair) : kPairs<kParts>[pair];
            const Bf16* a = tile_of(p.a, i, k) + parts.a * kTileElements + half * kRows * p.a_stride;
            const Bf16* b = tile_of(p.b, k, j) + parts.b * kTileElements;
            for (int d = 0; d < 16; ++d) {
                __m512bh from_b[kLanes];
                TESSERA_UNROLL for (int v = 0; v < kLanes; ++v) {
                    from_b[v] = from_bits(_mm512_load_si512(b + v * p.b.column_step + d * kTileDepth));
                }
                TESSERA_UNROLL for (int r = 0; r < kRows; ++r) {
                    std::int32_t two;
                    std::memcpy(&two, a + r * p.a_stride + 2 * d, sizeof two);
                    const __m512bh from_a = from_bits(_mm512_set1_epi32(two));
                    TESSERA_UNROLL for (int v = 0; v < kLanes; ++v) {
                        sums[r][v] = _mm512_dpbf16_ps(sums[r][v], from_a, from_b[v]);
                    }
                }
            }
        }
    }
    TESSERA_UNROLL for (int r = 0; r < kRows; ++r) {
        TESSERA_UNROLL for (int v = 0; v < kLanes; ++v) {
            _mm512_store_ps(c + r * p.c_stride + v * kTileRows, sums[r][v]);
        }
    }
}

template <int kParts, int kRows, int kLanes, class Between>
inline void block(const TileProduct& p, std::int64_t i, std::int64_t j, Between& between) {
    for (std::int64_t half = 0; half < 2 * kRows; ++half) {
        half_block<kParts, false, kLanes>(p, i + half / 2, half % 2, j);
    }
    for (std::size_t step = 0; step < static_cast<std::size_t>(p.k) * std::size(kPairs<kParts>); ++step) between();
}

#include "cpu/matrix/inl/multiply-inl.hpp"

/// Sums [16, 64] of a RowsProduct, in memory.
class RowSums {
 public:
    RowSums(float* c, std::int64_t stride, std::int64_t tiles) : tiles_(tiles) {
        product_.c = c;
        product_.c_stride = stride;
        product_.k = 1;
    }
    /// Not inlined: inside the packing loop the compiler spilled its sums to the stack.
    template <int kParts>
    HWY_NOINLINE void add(Bf16* p, Bf16* v) {
        product_.a = {p, 0, 0};
        product_.b = {v, 0, kParts * kTileElements};
        std::int64_t j = 0;
        for (; j + 2 <= tiles_; j += 2) {
            for (int half = 0; half < 2; ++half) half_block<kParts, true, 2>(product_, 0, half, j);
        }
        for (int half = 0; half < 2 && j < tiles_; ++half) half_block<kParts, true, 1>(product_, 0, half, j);
        product_.add = true;
    }
    void store() const {}

 private:
    TileProduct product_;
    std::int64_t tiles_;
};

#include "cpu/matrix/inl/rows-inl.hpp"

void no_setup() {}

}  // namespace

const Primitives kDotPrimitives = {.pack = pack,
                                   .multiply = multiply,
                                   .multiply_rows = multiply_rows,
                                   .weights = weights,
                                   .maximum = maximum,
                                   .multiply_beside_weights = multiply_beside_weights,
                                   .gradient = gradient,
                                   .add_weighted_sums = add_weighted_sums,
                                   .transpose = transpose_words,
                                   .store_columns = store_columns,
                                   .row_dots = row_dots,
                                   .begin = no_setup,
                                   .end = no_setup,
                                   .of_rows = &kDotRowPrimitives};

}  // namespace tessera::cpu::matrix
HWY_POP_ATTRIBUTES
