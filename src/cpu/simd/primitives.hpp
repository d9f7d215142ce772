// SPDX-License-Identifier: Apache-2.0
//
// The primitives of the SIMD path, from which the schedules are built. Each primitive is one vectorised function,
// compiled for every instruction set and chosen at run time (Highway).
//
// The layout: QUERIES LIE IN THE LANES. A tile of scores is stored transposed, S^T [block_kv, block_q]. Maximum, sum,
// exp, masks and the rescaling of O^T [head_dim_v, block_q] are then plain vertical vector operations. K and V are read
// row by row as they lie in memory, one broadcast scalar at a time (docs/decisions/queries-in-lanes.md). A "panel" is a
// query block: block_q consecutive queries of one head, one per lane.
//
// All tiles are fp32. Rows of a tile start at multiples of kLanes floats. Lanes beyond the last query are padding: they
// are computed and never read.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "core/batch.hpp"
#include "tessera/mask.hpp"

namespace tessera::cpu::simd {

/// Row strides of tiles are multiples of this many floats (64 bytes) on every instruction set.
inline constexpr std::int64_t kLanes = 16;

constexpr std::int64_t padded(std::int64_t n) { return (n + kLanes - 1) / kLanes * kLanes; }

/// Name of the instruction set that the primitives run on: "AVX3", "AVX2", "NEON", ...
std::string target_name();

// ---- Between tensors (any dtype, any strides) and tiles ---------------------------------------------------

/// to[r, c] = from[first + r, c], columns dim..stride set to 0. to: [rows, stride]
void load_rows(const HeadRows& from, std::int64_t first, std::int64_t rows, std::int64_t dim, float* to,
               std::int64_t stride);

/// to[c, r] = scale * from[first + r, c], lanes rows..stride set to 0. to: [dim, stride]
void load_transposed(const HeadRows& from, std::int64_t first, std::int64_t rows, std::int64_t dim, float scale,
                     float* to, std::int64_t stride);

/// to[first + r, c] = scale * from[r, c]. from: [rows, stride]
void store_rows(const float* from, std::int64_t stride, std::int64_t rows, std::int64_t dim, float scale,
                const HeadRows& to, std::int64_t first);

/// to[first + r, c] = from[c, r] * lane_scale[r]. from: [dim, stride]
/// Both stores write +0 for -0, so the sign cannot reveal products with hidden keys that underflowed.
void store_transposed(const float* from, std::int64_t stride, std::int64_t rows, std::int64_t dim,
                      const float* lane_scale, const HeadRows& to, std::int64_t first);

/// Is every element of [rows, dim] finite?
bool all_finite(const float* matrix, std::int64_t stride, std::int64_t rows, std::int64_t dim);

// ---- The tile product -------------------------------------------------------------------------------------

enum class Into {
    overwrite,   ///< C = A B
    add,         ///< C += A B
    scaled_add,  ///< C = C * lane_scale + A B, lane_scale: [n]; the rescaling of O, fused
};

/// C[m, n] from A[m, k] and B[k, n]. A is read as broadcast scalars at a[i * a_row + kk * a_k], so any layout works,
/// transposed or not. B and C are tiles (n counts lanes, a multiple of kLanes). Each element sums its k products in
/// ascending order with fused multiply-adds and adds C last: the blocking of the tile changes no bits.
struct Product {
    std::int64_t m = 0;
    std::int64_t n = 0;
    std::int64_t k = 0;
    const float* a = nullptr;
    std::int64_t a_row = 0;
    std::int64_t a_k = 0;
    const float* b = nullptr;  // [k, b_stride]
    std::int64_t b_stride = 0;
    float* c = nullptr;  // [m, c_stride]
    std::int64_t c_stride = 0;
    Into into = Into::overwrite;
    const float* lane_scale = nullptr;
};

void matmul(const Product& product);

/// A tile's position in the score matrix, for masks.
struct TilePosition {
    Band band;
    std::int64_t q = 0;   ///< first query
    std::int64_t kv = 0;  ///< first key

    /// The range of a tile's `keys`, counted from its first, that some of the kLanes queries from `lane` on see. A mask
    /// is a band, so over the groups of lanes these ranges form a staircase.
    Range keys_of_lanes(std::int64_t lane, std::int64_t keys) const {
        const std::int64_t end = std::min(q + lane + kLanes, band.len_q);
        return within(band.kv_range(q + lane, end), kv, keys);
    }

    /// The range of a tile's `queries`, counted from its first, that see some of its keys [first, end).
    Range queries_of_keys(std::int64_t first, std::int64_t end, std::int64_t queries) const {
        return within(band.q_range(kv + first, kv + end), q, queries);
    }

 private:
    static Range within(const Range& range, std::int64_t first, std::int64_t count) {
        return {std::clamp<std::int64_t>(range.begin - first, 0, count),
                std::clamp<std::int64_t>(range.end - first, 0, count)};
    }
};

// GEMMs of a tile that the mask cuts, without the work on hidden sub-tiles of kLanes queries. The bits are those of
// matmul(), since skipped products would have added 0: factors of hidden pairs must be 0, and all others finite.

/// m runs over keys and n over queries: C in hidden sub-tiles keeps what it holds.
void matmul_visible_scores(const Product& product, const TilePosition& position);

/// k runs over keys and n over queries; B is 0 where hidden.
void matmul_visible_keys(const Product& product, const TilePosition& position);

/// m runs over keys and k over queries; A is 0 where hidden.
void matmul_visible_queries(const Product& product, const TilePosition& position);

/// Like matmul_visible_keys, but pairs that the band hides add nothing, not even 0 * NaN. Both give equal results (+0
/// equals -0) when all numbers are finite and hidden weights are 0. Slow; meant for tiles that hold NaN or Inf.
void matmul_hidden_keys(const Product& product, const TilePosition& position);

/// Like matmul_visible_queries, with hidden pairs treated as in matmul_hidden_keys.
void matmul_hidden_queries(const Product& product, const TilePosition& position);

// ---- Scores -----------------------------------------------------------------------------------------------

/// The rule that turns dot products into scores; the mask comes separately.
struct ScoreRule {
    float scale = 1;            ///< still to be applied to the dot products (1: the query tile carries it all)
    float softcap = 0;          ///< 0: none
    float alibi = 0;            ///< slope; 0: none
    HeadRows bias{};            ///< [len_q, len_kv] of this head, may be absent
    std::int64_t diagonal = 0;  ///< len_kv - len_q

    bool trivial() const { return scale == 1 && softcap == 0 && alibi == 0 && bias.data == nullptr; }
};

/// Applies the rule to s: [keys, stride]. `scratch`: another tile of that size, used when there is a bias.
/// `cap_slope`, when given, receives 1 - tanh^2, the derivative of the softcap.
void transform_scores(const ScoreRule& rule, const TilePosition& position, std::int64_t keys, std::int64_t queries,
                      float* s, std::int64_t stride, float* scratch, float* cap_slope);

/// The mask: s[j, i] = value where the band hides key j from query i, or there is no such query. s: [keys, stride]
void fill_masked(const TilePosition& position, std::int64_t keys, float* s, std::int64_t stride, float value);

/// Seed and rate of dropout, and the head it is for.
struct DropoutRule {
    std::uint64_t seed = 0;
    std::uint64_t threshold = 0;  ///< random 32-bit words under it are kept
    float kept = 1;               ///< factor of a kept weight, 1 / (1 - p)
    std::int64_t batch = 0;
    std::int64_t head = 0;
    bool active = false;
};

/// factors[j, i] = rule.kept or 0. factors: [keys, stride]
void dropout_factors(const DropoutRule& rule, const TilePosition& position, std::int64_t keys, float* factors,
                     std::int64_t stride);

/// x *= y, both [rows, stride].
void multiply(float* x, const float* y, std::int64_t rows, std::int64_t stride);

/// x += y, both [rows, stride].
void add(float* x, const float* y, std::int64_t rows, std::int64_t stride);

/// total += sum, sum = 0: ends one part of a long sum before the next begins. Both [rows, stride].
void move_to_total(float* sum, double* total, std::int64_t rows, std::int64_t stride);

/// sum += total, rounded once. `sum` holds the last part of a long sum, `total` all earlier ones. Both [rows, stride].
void add_total(float* sum, const double* total, std::int64_t rows, std::int64_t stride);

/// x[r, i] *= lane_scale[i]. x: [rows, stride]
void scale_lanes(float* x, const float* lane_scale, std::int64_t rows, std::int64_t stride);

// ---- Softmax ----------------------------------------------------------------------------------------------

// `cut`: the tile's position if the mask cuts it, else null. With it, the primitives skip the keys that none of a group
// of kLanes queries sees.

/// Running state of a panel's rows: maximum m and sum l of exp(s - m); arrays of `lanes` floats.
struct RowState {
    float* m = nullptr;
    float* l = nullptr;
};

/// m = -inf, l = 0: a row that has seen no key.
void clear_state(const RowState& state, std::int64_t lanes);

/// One step of the online softmax (FlashAttention paper, Algorithm 1, lines 10-12) for the scores of `keys` more keys.
/// Replaces s by exp(s - m_new), updates m and l, and stores the rescale factors exp(m_old - m_new) of earlier sums in
/// `rescale` [lanes]. Hidden scores, -inf, become 0, in cut tiles too. `before`: number of the row's keys that precede
/// s, a multiple of 4. Long sums are cut at fixed multiples from the row's first key, so the start of s changes no
/// bits.
void online_softmax(float* s, std::int64_t keys, std::int64_t lanes, std::int64_t stride, const RowState& state,
                    float* rescale, const TilePosition* cut = nullptr, std::int64_t before = 0);

/// Long rows are summed in blocks of this many keys, from the row's first key on.
inline constexpr std::int64_t kSumKeys = 16384;

/// Merges the partial result (state, o) of other keys into (into, into_o), each relative to its own maximum. This is
/// the exact merge of split K/V. o: [dim, stride]
void merge(const RowState& into, float* into_o, const RowState& state, const float* o, std::int64_t dim,
           std::int64_t lanes, std::int64_t stride);

/// merge() for O [lanes, stride] with queries as rows, and only for `queries`.
void merge_rows(const RowState& into, float* into_o, const RowState& state, const float* o, const Range& queries,
                std::int64_t stride);

/// inverse[i] = 1 / l[i], or 0 for a row that saw no key.
void invert_sums(const RowState& state, std::int64_t lanes, float* inverse);

/// Ends the softmax of `queries` rows. It adds the sinks of the queries from `first` on to the state, if there are any,
/// and fills factors[i], which turns the sum over the keys into O: 1 / l, or 0 for a row that saw neither a key nor a
/// sink. sinks: [len_q], may be absent; state and factors: [lanes]
void finish_softmax(const RowState& state, const HeadRows& sinks, std::int64_t first, std::int64_t queries,
                    std::int64_t lanes, float* factors);

/// LSE = m + log(l), -inf for a row that saw no key, to rows first.. of `to` (fp32 or fp64); nothing when it is absent.
void store_lse(const RowState& state, std::int64_t rows, const HeadRows& to, std::int64_t first);

/// s = exp(s - lse): recomputes P from the scores and the LSE of the forward. `lse` of an empty row is +inf here.
void weights_from_lse(float* s, const float* lse, std::int64_t keys, std::int64_t lanes, std::int64_t stride,
                      const TilePosition* cut = nullptr);

/// weights[i] += sum over keys of p, products[i] += sum over keys of p * x. Each tile is summed in fp32 and then added
/// in fp64, which keeps the accuracy of one tile for rows of any length. p, x: [keys, stride]; masked pairs must be 0
/// in both.
void add_weighted_sums(const float* p, const float* x, std::int64_t keys, std::int64_t lanes, std::int64_t stride,
                       double* weights, double* products);

/// dp = p * (dp - delta): the gradient of the scores (FlashAttention paper, appendix B.2). p, dp: [keys, stride]
void softmax_gradient(const float* p, float* dp, const float* delta, std::int64_t keys, std::int64_t lanes,
                      std::int64_t stride, const TilePosition* cut = nullptr);

}  // namespace tessera::cpu::simd
