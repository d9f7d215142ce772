// SPDX-License-Identifier: Apache-2.0
//
// The primitives on AMX. TDPBF16PS multiplies a row tile by a pair tile and adds to 16 x 16 fp32 sums in 16 cycles. 2 x
// 2 sums, 2 left and 2 right tiles fill the eight tile registers. This needs one load per MMA, and 14 loads for the 24
// MMAs of fp32 in three parts.
//
// The tile intrinsics take register numbers as literals and do not tell the compiler which memory they access. Fences
// around the primitives keep it from moving other accesses across.
#include <immintrin.h>

#include <hwy/base.h>
#include <atomic>
#include <cstring>
#include <limits>

#include "cpu/matrix/units.hpp"
#include "cpu/simd/exp.hpp"
#include "cpu/simd/simd.hpp"

HWY_PUSH_ATTRIBUTES("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,amx-tile,amx-bf16")
namespace tessera::cpu::matrix {
namespace {

inline void compiler_fence() { std::atomic_signal_fence(std::memory_order_seq_cst); }

/// Tile registers: 0 1 / 2 3 hold the sums, 4 5 left operands, 6 7 right operands.
template <int kRows, int kLanes>
inline void load_sums(const float* c, std::int64_t stride) {
    const std::int64_t bytes = stride * 4;
    _tile_loadd(0, c, bytes);
    if constexpr (kLanes > 1) _tile_loadd(1, c + 16, bytes);
    if constexpr (kRows > 1) _tile_loadd(2, c + 16 * stride, bytes);
    if constexpr (kRows > 1 && kLanes > 1) _tile_loadd(3, c + 16 * stride + 16, bytes);
}

template <int kRows, int kLanes>
inline void clear_sums() {
    _tile_zero(0);
    if constexpr (kLanes > 1) _tile_zero(1);
    if constexpr (kRows > 1) _tile_zero(2);
    if constexpr (kRows > 1 && kLanes > 1) _tile_zero(3);
}

template <int kRows, int kLanes>
inline void store_sums(float* c, std::int64_t stride) {
    const std::int64_t bytes = stride * 4;
    _tile_stored(0, c, bytes);
    if constexpr (kLanes > 1) _tile_stored(1, c + 16, bytes);
    if constexpr (kRows > 1) _tile_stored(2, c + 16 * stride, bytes);
    if constexpr (kRows > 1 && kLanes > 1) _tile_stored(3, c + 16 * stride + 16, bytes);
}

/// Adds the products of parts kPairs<kParts>[kAt] up to [kEnd].
template <int kParts, int kRows, int kLanes, std::size_t kAt, std::size_t kEnd, bool kFirst, class Between>
inline void add_products(const TileProduct& p, const Bf16* a, const Bf16* b, Between& between) {
    constexpr std::int64_t kRowBytes = 64;
    const std::int64_t a_row_bytes = kParts == 1 ? 2 * p.a_stride : kRowBytes;
    constexpr PairOfParts kPair = kPairs<kParts>[kAt];
    constexpr PairOfParts kBefore = kFirst ? PairOfParts{-1, -1} : kPairs<kParts>[kFirst ? 0 : kAt - 1];
    constexpr bool kNewA = kBefore.a != kPair.a;
    constexpr bool kNewB = kBefore.b != kPair.b;
    const Bf16* part_a = a + kPair.a * kTileElements;
    const Bf16* part_b = b + kPair.b * kTileElements;
    if constexpr (kNewA) _tile_loadd(4, part_a, a_row_bytes);
    if constexpr (kNewB) _tile_loadd(6, part_b, kRowBytes);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (kLanes > 1) {
        if constexpr (kNewB) _tile_loadd(7, part_b + p.b.column_step, kRowBytes);
        _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (kRows > 1) {
        if constexpr (kNewA) _tile_loadd(5, part_a + p.a.row_step, a_row_bytes);
        _tile_dpbf16ps(2, 5, 6);
    }
    if constexpr (kRows > 1 && kLanes > 1) _tile_dpbf16ps(3, 5, 7);
    between();
    if constexpr (kAt + 1 < kEnd) {
        add_products<kParts, kRows, kLanes, kAt + 1, kEnd, false>(p, a, b, between);
    }
}

/// add_products() over all of k.
template <int kParts, int kRows, int kLanes, std::size_t kAt, std::size_t kEnd, class Between>
inline void add_all(const TileProduct& p, std::int64_t i, std::int64_t j, Between& between) {
    const Bf16* a = p.a.data + i * p.a.row_step;
    const Bf16* b = p.b.data + j * p.b.column_step;
    for (std::int64_t k = 0; k < p.k; ++k) {
        add_products<kParts, kRows, kLanes, kAt, kEnd, true>(p, a, b, between);
        a += p.a.column_step;
        b += p.b.row_step;
    }
}

template <int kParts, int kRows, int kLanes, class Between>
inline void block(const TileProduct& p, std::int64_t i, std::int64_t j, Between& between) {
    float* c = p.c + i * kTileRows * p.c_stride + j * kTileRows;
    compiler_fence();
    if (p.add) load_sums<kRows, kLanes>(c, p.c_stride);
    else clear_sums<kRows, kLanes>();
    constexpr std::size_t kAll = std::size(kPairs<kParts>);
    if (kParts > 1 && p.small_first) {
        add_all<kParts, kRows, kLanes, 0, kAll - 1>(p, i, j, between);
        add_all<kParts, kRows, kLanes, kAll - 1, kAll>(p, i, j, between);
    } else {
        add_all<kParts, kRows, kLanes, 0, kAll>(p, i, j, between);
    }
    store_sums<kRows, kLanes>(c, p.c_stride);
    compiler_fence();
}

#include "cpu/matrix/inl/parts-inl.hpp"
// These use parts-inl.hpp.
#include "cpu/matrix/inl/pack-inl.hpp"
#include "cpu/matrix/inl/softmax-inl.hpp"
#include "cpu/matrix/inl/store-inl.hpp"
// This uses softmax-inl.hpp.
#include "cpu/matrix/inl/multiply-inl.hpp"

/// Sums [16, 64] of a RowsProduct in the first four tile registers; the parts of the left operand come next, then the
/// right.
class RowSums {
 public:
    RowSums(float* c, std::int64_t stride, std::int64_t tiles) : c_(c), stride_(stride), tiles_(tiles) {
        compiler_fence();
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    template <int kParts>
    void add(const Bf16* p, const Bf16* v) {
        constexpr std::int64_t kBytes = 64;
        compiler_fence();
        _tile_loadd(4, p, kBytes);
        if constexpr (kParts > 1) {
            _tile_loadd(5, p + kTileElements, kBytes);
            _tile_loadd(6, p + 2 * kTileElements, kBytes);
        }
        add_tile<kParts, 0>(v);
        if (tiles_ > 1) add_tile<kParts, 1>(v + kParts * kTileElements);
        if (tiles_ > 2) add_tile<kParts, 2>(v + 2 * kParts * kTileElements);
        if (tiles_ > 3) add_tile<kParts, 3>(v + 3 * kParts * kTileElements);
        compiler_fence();
    }
    void store() const {
        const std::int64_t bytes = stride_ * 4;
        _tile_stored(0, c_, bytes);
        if (tiles_ > 1) _tile_stored(1, c_ + 16, bytes);
        if (tiles_ > 2) _tile_stored(2, c_ + 32, bytes);
        if (tiles_ > 3) _tile_stored(3, c_ + 48, bytes);
        compiler_fence();
    }

 private:
    template <int kParts, int kTile, std::size_t kAt = 0>
    static void add_tile(const Bf16* v) {
        constexpr PairOfParts kPair = mirrored_pair<kParts>(kAt);
        if constexpr (kAt == 0 || mirrored_pair<kParts>(kAt == 0 ? 0 : kAt - 1).b != kPair.b) {
            _tile_loadd(7, v + kPair.b * kTileElements, 64);
        }
        multiply<kTile, kPair.a>();
        if constexpr (kAt + 1 < std::size(kPairs<kParts>)) add_tile<kParts, kTile, kAt + 1>(v);
    }
    /// Register numbers must be literals.
    template <int kTile, int kPart>
    static void multiply() {
        if constexpr (kTile == 0 && kPart == 0) _tile_dpbf16ps(0, 4, 7);
        if constexpr (kTile == 0 && kPart == 1) _tile_dpbf16ps(0, 5, 7);
        if constexpr (kTile == 0 && kPart == 2) _tile_dpbf16ps(0, 6, 7);
        if constexpr (kTile == 1 && kPart == 0) _tile_dpbf16ps(1, 4, 7);
        if constexpr (kTile == 1 && kPart == 1) _tile_dpbf16ps(1, 5, 7);
        if constexpr (kTile == 1 && kPart == 2) _tile_dpbf16ps(1, 6, 7);
        if constexpr (kTile == 2 && kPart == 0) _tile_dpbf16ps(2, 4, 7);
        if constexpr (kTile == 2 && kPart == 1) _tile_dpbf16ps(2, 5, 7);
        if constexpr (kTile == 2 && kPart == 2) _tile_dpbf16ps(2, 6, 7);
        if constexpr (kTile == 3 && kPart == 0) _tile_dpbf16ps(3, 4, 7);
        if constexpr (kTile == 3 && kPart == 1) _tile_dpbf16ps(3, 5, 7);
        if constexpr (kTile == 3 && kPart == 2) _tile_dpbf16ps(3, 6, 7);
    }

    float* c_;
    std::int64_t stride_;
    std::int64_t tiles_;
};

#include "cpu/matrix/inl/rows-inl.hpp"

/// The operand of LDTILECFG: palette 1, all eight registers with 16 rows of 64 bytes.
struct alignas(64) TileConfig {
    std::uint8_t palette = 1;
    std::uint8_t start_row = 0;
    std::uint8_t reserved[14] = {};
    std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static_assert(sizeof(TileConfig) == 64);
constexpr TileConfig kConfig{};

void configure() { _tile_loadconfig(&kConfig); }
void release() { _tile_release(); }

}  // namespace

const Primitives kAmxPrimitives = {.pack = pack,
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
                                   .begin = configure,
                                   .end = release};

}  // namespace tessera::cpu::matrix
HWY_POP_ATTRIBUTES
