// SPDX-License-Identifier: Apache-2.0
//
// The primitives of the matrix path, for processors that multiply bf16 matrices. The layout stays queries-in-lanes
// (simd/primitives.hpp), and scores and sums stay fp32. Only GEMM operands are packed, into tiles of 1 KiB:
//
//   row tile   [16 rows][32 deep]            left operand, row-major
//   pair tile  [16 pairs][16 lanes][2]       right operand: rows 2p and 2p + 1 of a [32 deep, 16 lanes] matrix, lane by
//                                            lane beside each other
//
// The MMA of a row tile and a pair tile adds 32 products to each of 16 x 16 fp32 sums. It is one TDPBF16PS of AMX, or
// 256 VDPBF16PS of AVX512-BF16. The primitives are compiled once for each of the two units
// (docs/decisions/bf16-tiles.md).
//
// A number of more than bf16's 8 bits is packed as a sum of PARTS: fp32 as three, each of 8 bits. The parts of a tile
// lie one after another, and a GEMM of two such matrices takes six MMAs of parts (docs/decisions/fp32-in-parts.md).
#pragma once

#include <cstdint>
#include <span>

#include "core/batch.hpp"
#include "core/numeric.hpp"

namespace tessera::cpu::matrix {

inline constexpr std::int64_t kTileRows = 16;       // also the lanes of a pair tile
inline constexpr std::int64_t kTileDepth = 32;      // products that one MMA adds to an element
inline constexpr std::int64_t kTileElements = 512;  // elements of a row tile or pair tile, per part

/// The number of bf16 parts of an element of this type; 0: such tensors aren't packed.
constexpr int parts_of(DType dtype) { return dtype == DType::bf16 ? 1 : dtype == DType::fp32 ? 3 : 0; }

/// The hardware that multiplies bf16 tiles.
enum class Unit {
    none,  ///< none that beats fp32: the SIMD path does all
    dot,   ///< AVX512-BF16, where it is faster than fp32: AMD, from Zen 4
    amx,   ///< AMX-BF16
};

/// "AMX", "AVX512-BF16", or "" for none.
const char* name_of(Unit unit);

/// The unit of this processor. AMX counts when the operating system grants its registers.
Unit unit();

/// Is packing tensors of this type faster than the SIMD path? bf16 on any unit; fp32, which takes six MMAs, on AMX
/// only.
bool packing_pays(DType dtype);

/// Selects another unit, which the processor must have, until the next call. With `pack_fp32` it takes fp32 too. For
/// tests only; not while kernels run.
void set_unit_for_test(Unit unit, bool pack_fp32);
/// Does this processor have that unit?
bool has_unit(Unit unit);

/// Tiles of a packed matrix. Tile (i, j) begins at data + i * row_step + j * column_step elements; its further parts
/// follow at distances of kTileElements.
struct Tiles {
    Bf16* data = nullptr;
    std::int64_t row_step = 0;
    std::int64_t column_step = 0;
};

/// The packed form of a matrix M [rows, dim].
enum class Form {
    rows,          ///< row tiles of M: tiles [rows / 16][dim / 32]
    columns,       ///< row tiles of M^T: tiles [dim / 16][rows / 32]
    row_pairs,     ///< pair tiles of M: tiles [rows / 32][dim / 16]
    column_pairs,  ///< pair tiles of M^T: tiles [dim / 32][rows / 16]
};

/// Packs rows first .. first + rows of a matrix, in parts_of(its type). Tiles are padded with 0 beyond rows and dim.
/// NaN and infinity become 0 for fp32, and for bf16 with `finite_only`; so do fp32 elements from 2^127 on, which parts
/// can't hold (unpackable()). Returns whether no element became 0 for that.
struct PackJob {
    HeadRows from;
    std::int64_t first = 0;
    std::int64_t rows = 0;
    std::int64_t dim = 0;
    Form form = Form::rows;
    Tiles to;
    bool finite_only = false;
    float scale = 1;           ///< multiplies fp32 elements before they are split
    bool from_memory = false;  ///< the matrix is in no cache: rows are prefetched in memory order
};

/// Is x packed as 0, so that the caller must add its products?
constexpr bool unpackable(float x) { return !(x < 0x1p127F && x > -0x1p127F); }

/// Prefetches rows [begin, end) of contiguous elements in memory order. Packing and tile loads read them in another
/// order, which the hardware prefetcher does not follow.
inline void fetch_rows(const HeadRows& x, std::int64_t begin, std::int64_t end, std::int64_t dim) {
    constexpr std::int64_t kLine = 64;
    for_each_run(x, begin, end - begin, [&](const void* address, std::int64_t, std::int64_t rows) {
        const auto* at = static_cast<const char*>(address);
        for (std::int64_t row = 0; row < rows; ++row, at += x.row_stride * size_of(x.dtype)) {
            for (std::int64_t byte = 0; byte < dim * size_of(x.dtype); byte += kLine) __builtin_prefetch(at + byte);
        }
    });
}

/// C[16 * m, 16 * n] fp32 = or += A B, for m x k row tiles and k x n pair tiles in `parts`. Each element adds its
/// 32-deep products one after another to C or 0: a long GEMM has the same bits in one call and in several that add.
struct TileProduct {
    int parts = 1;  ///< 1 or 3, of A and of B
    std::int64_t m = 0;
    std::int64_t n = 0;
    std::int64_t k = 0;
    Tiles a;
    Tiles b;
    float* c = nullptr;  // [16 * m, c_stride]
    std::int64_t c_stride = 0;
    bool add = false;
    /// For numbers in parts: the MMAs of smaller parts are added first, so that few roundings apply to the whole sum.
    /// This takes more loads, and the bits depend on k.
    bool small_first = false;
    float* maximum = nullptr;  ///< [16 * n] or null: takes the maximum of itself and every row of C
    /// Elements between rows of a left tile: bf16 rows can be used where they lie. For one part only.
    std::int64_t a_stride = kTileDepth;
};

/// C[16, dim rounded up to 16] = P V for the 16 queries of a lane tile. P is transposed into row tiles, which costs
/// less than transposing V. V is packed on the fly as pair tiles. The bits are those of C^T = V^T P.
struct RowsProduct {
    int parts = 1;       ///< bf16 parts of P, and of V
    Bf16* p = nullptr;   ///< [keys / 32] pair tiles [32 keys, 16 queries]; afterwards row tiles
    PackJob v;           ///< at least one row of V, in row_pairs; v.to.data: room for kRowsBuffer rows of tiles
    float* c = nullptr;  // [16, c_stride]
    std::int64_t c_stride = 0;
};
inline constexpr std::int64_t kRowsBuffer = 2;

/// P = exp(scale * s - m) for one block of keys, with m its maximum and l its sum. exp(-offset) * P goes to pair tiles
/// [keys / 32][lanes / 16]; rows beyond the keys are 0.
struct WeightsJob {
    const float* s = nullptr;  // [keys, lanes]
    std::int64_t keys = 0;
    std::int64_t lanes = 0;
    float scale = 1;                 ///< positive
    const float* maximum = nullptr;  // [lanes], the maximum of s
    float* m = nullptr;              // [lanes]
    float* l = nullptr;              // [lanes]
    int parts = 1;                   ///< bf16 parts of P
    Bf16* p = nullptr;               // pair tiles, lane tiles next to each other
    const float* offset = nullptr;   ///< [lanes] or null: 0
    const float* factors = nullptr;  ///< [keys, lanes] or null; dropout: 1 where P is kept, else 0
    float* rounded_l = nullptr;      ///< [lanes], with factors in one part: the sum of exp(-offset) * P without them
};

/// P = exp(scale * s - lse) and dS = P * (dP - delta), packed for the GEMMs of the backward. Rows beyond the keys, up
/// to a multiple of 32, are 0.
struct GradientJob {
    const float* s = nullptr;   // [keys, lanes]
    const float* dp = nullptr;  // [keys, lanes]
    std::int64_t keys = 0;
    std::int64_t lanes = 0;  ///< a multiple of 32
    float scale = 1;
    const float* lse = nullptr;        // [lanes], +inf: no weight
    const float* delta = nullptr;      // [lanes]
    const float* norm = nullptr;       ///< [lanes] or null: factors of P
    const float* factors = nullptr;    ///< [keys, lanes] or null; dropout: 1 where P is kept, else 0
    float kept = 1;                    ///< factor of a kept dP; that of P comes after the sum
    const float* cap_slope = nullptr;  ///< [keys, lanes] or null: the softcap's derivative
    const float* visible = nullptr;    ///< [keys, lanes] or null: where it is 0, P and dS are 0
    int parts = 1;                     ///< bf16 parts of P and dS
    Tiles p_rows;                      ///< [keys / 16][lanes / 32]
    Tiles ds_rows;                     ///< likewise
    Tiles ds_pairs;                    ///< [keys / 32][lanes / 16]
};

struct RowPrimitives;

/// The primitives of one unit.
struct Primitives {
    bool (*pack)(const PackJob&);
    void (*multiply)(const TileProduct&);
    /// Returns whether all of V could be packed.
    bool (*multiply_rows)(const RowsProduct&);
    void (*weights)(const WeightsJob&);
    /// maximum[i] = the largest of itself and the scores of lane i. s: [keys, lanes]
    void (*maximum)(const float* s, std::int64_t keys, std::int64_t lanes, float* maximum);
    /// GEMMs and weights of independent data, interleaved: the matrix unit multiplies while the vector unit takes exp.
    void (*multiply_beside_weights)(std::span<const TileProduct>, const WeightsJob&);
    void (*gradient)(const GradientJob&);
    /// weights[i] += sum over keys of P, products[i] += sum over keys of P * dP, as in simd/primitives.hpp. For one
    /// part only. The job's delta and cap_slope are ignored.
    void (*add_weighted_sums)(const GradientJob&, double* weights, double* products);
    /// Transposes 16 x 16 words of 32 bits, also in place. This turns pair tiles into row tiles and back. Strides are
    /// in words.
    void (*transpose)(const void* from, std::int64_t from_stride, void* to, std::int64_t to_stride);
    /// to[first + i, c] = from[c, i] * lane_scale[i] in bf16 or fp32, +0 for -0. Returns whether all are finite.
    /// from: [dim rounded up to 16, stride]; lane_scale: [rows rounded up to 16]
    bool (*store_columns)(const float* from, std::int64_t stride, std::int64_t rows, std::int64_t dim,
                          const float* lane_scale, const HeadRows& to, std::int64_t first);
    /// sums[i] = sum over c of a[first + i, c] * b[first + i, c], bf16 or fp32 rows of `dim` elements
    void (*row_dots)(const HeadRows& a, const HeadRows& b, std::int64_t first, std::int64_t rows, std::int64_t dim,
                     float* sums);
    /// A thread may use the primitives between begin and end; on AMX these set up and release the tile registers.
    void (*begin)();
    void (*end)();
    /// The primitives for few queries (few_queries.hpp); null: none.
    const RowPrimitives* of_rows = nullptr;
};

/// The primitives of unit(); null when there is none.
const Primitives* primitives_of_unit();

/// A task's use of the primitives, from begin() to end().
class Session {
 public:
    explicit Session(const Primitives& primitives) : primitives_(primitives) { primitives_.begin(); }
    ~Session() { primitives_.end(); }
    Session(const Session&) = delete;
    Session& operator=(const Session&) = delete;

 private:
    const Primitives& primitives_;
};

}  // namespace tessera::cpu::matrix
