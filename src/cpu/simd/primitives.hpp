// SPDX-License-Identifier: Apache-2.0
//
// The words of the lanes room, in which the schedules are written. Each word is one vectorised function, compiled for
// every instruction set and chosen at run time (Highway).
//
// The one layout decision: QUERIES LIE IN THE LANES. A tile of scores is kept transposed, S^T [block_kv, block_q], so
// that the maximum, the sum, exp, masks and the rescaling of O^T [head_dim_v, block_q] are plain vertical vector
// operations, and K and V are read row by row as they lie in memory, one broadcast scalar at a time
// (docs/decisions/queries-in-lanes.md). "Panel": block_q consecutive queries of one head, the unit of the lanes.
//
// All tiles are fp32. Rows of a tile start at multiples of kLanes floats; a row's lanes beyond the last query are
// padding: computed, never read back.
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

/// Name of the instruction set that the words run on: "AVX3", "AVX2", "NEON", ...
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
/// Both stores write +0 for -0: its sign would tell of products with hidden keys that underflowed.
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

/// C[m, n] from A[m, k] and B[k, n]. A is read as broadcast scalars at a[i * a_row + kk * a_k], so it may be a matrix
/// in any layout, transposed or not; B and C are tiles (n counts lanes, a multiple of kLanes). Each element sums its k
/// products in rising order with fused multiply-adds, and only then C: bits don't depend on how the tile is blocked.
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

/// Where a tile lies in the score matrix, for masks.
struct Place {
    Band band;
    std::int64_t q = 0;   ///< first query
    std::int64_t kv = 0;  ///< first key

    /// Of a tile's `keys`, counted from its first, those that some of the kLanes queries from `lane` on see. A mask is
    /// a band, so over the groups of lanes these ranges are a staircase.
    Range keys_of_lanes(std::int64_t lane, std::int64_t keys) const {
        const std::int64_t end = std::min(q + lane + kLanes, band.len_q);
        return within(band.kv_range(q + lane, end), kv, keys);
    }

    /// Of a tile's `queries`, counted from its first, those that see some of its keys [first, end).
    Range queries_of_keys(std::int64_t first, std::int64_t end, std::int64_t queries) const {
        return within(band.q_range(kv + first, kv + end), q, queries);
    }

 private:
    static Range within(const Range& range, std::int64_t first, std::int64_t count) {
        return {std::clamp<std::int64_t>(range.begin - first, 0, count),
                std::clamp<std::int64_t>(range.end - first, 0, count)};
    }
};

// The same product in a tile that the mask cuts, without the work on sub-tiles of kLanes queries that it hides. Bits
// are those of matmul(): what is left out would have added 0, so the factors of hidden pairs must be 0 and all others
// finite.

/// m runs over keys and n over queries: C in hidden sub-tiles keeps what it holds.
void matmul_visible_scores(const Product& product, const Place& place);

/// k runs over keys and n over queries; B is 0 where hidden.
void matmul_visible_keys(const Product& product, const Place& place);

/// m runs over keys and k over queries; A is 0 where hidden.
void matmul_visible_queries(const Product& product, const Place& place);

/// matmul_visible_keys where pairs that the band hides add nothing, not even 0 * NaN. Equal to it (+0 equals -0) when
/// all numbers are finite and hidden weights are 0; slow, for tiles that hold NaN or Inf.
void matmul_hidden_keys(const Product& product, const Place& place);

/// matmul_visible_queries in the same way.
void matmul_hidden_queries(const Product& product, const Place& place);

// ---- Scores -----------------------------------------------------------------------------------------------

/// What turns scaled dot products into scores, short of the mask.
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
void transform_scores(const ScoreRule& rule, const Place& place, std::int64_t keys, std::int64_t queries, float* s,
                      std::int64_t stride, float* scratch, float* cap_slope);

/// The mask: s[j, i] = value where the band hides key j from query i, or there is no such query. s: [keys, stride]
void fill_masked(const Place& place, std::int64_t keys, float* s, std::int64_t stride, float value);

/// Seed and rate of dropout, and the head it is for.
struct DropoutRule {
    std::uint64_t seed = 0;
    std::uint64_t threshold = 0;  ///< words under it are kept
    float kept = 1;               ///< factor of a kept weight, 1 / (1 - p)
    std::int64_t batch = 0;
    std::int64_t head = 0;
    bool active = false;
};

/// factors[j, i] = rule.kept or 0. factors: [keys, stride]
void dropout_factors(const DropoutRule& rule, const Place& place, std::int64_t keys, float* factors,
                     std::int64_t stride);

/// x *= y, both [rows, stride].
void multiply(float* x, const float* y, std::int64_t rows, std::int64_t stride);

/// x += y, both [rows, stride].
void add(float* x, const float* y, std::int64_t rows, std::int64_t stride);

/// A long sum is made in parts: total += sum, sum = 0, before the next part begins. Both [rows, stride].
void move_to_total(float* sum, double* total, std::int64_t rows, std::int64_t stride);

/// sum += total, rounded once: the last part and all before it. Both [rows, stride].
void add_total(float* sum, const double* total, std::int64_t rows, std::int64_t stride);

/// x[r, i] *= lane_scale[i]. x: [rows, stride]
void scale_lanes(float* x, const float* lane_scale, std::int64_t rows, std::int64_t stride);

// ---- Softmax ----------------------------------------------------------------------------------------------

// `cut`: where the tile lies, when the mask cuts it. The words then leave alone, for each kLanes queries, the keys that
// none of them sees; null: the mask leaves all keys.

/// Running state of a panel's rows: maximum m and sum l of exp(s - m); arrays of `lanes` floats.
struct RowState {
    float* m = nullptr;
    float* l = nullptr;
};

/// m = -inf, l = 0: a row that has seen no key.
void clear_state(const RowState& state, std::int64_t lanes);

/// One step of the online softmax (FlashAttention paper, Algorithm 1, lines 10-12): takes the scores of `keys` more
/// keys, replaces s by exp(s - m_new), updates m and l, and tells in `rescale` [lanes] what earlier sums relative to
/// the old maximum must be multiplied by: exp(m_old - m_new). Hidden scores, -inf, become 0, of a cut tile too.
/// `before`: keys of the rows that lie before s, a multiple of 4. Long sums are made of blocks that begin at multiples
/// of their size, from the row's first key on: where s begins changes no bit.
void online_softmax(float* s, std::int64_t keys, std::int64_t lanes, std::int64_t stride, const RowState& state,
                    float* rescale, const Place* cut = nullptr, std::int64_t before = 0);

/// A sum over this many keys or more is made of sums over so many each, from the row's first key on.
inline constexpr std::int64_t kSumKeys = 16384;

/// Folds the partial result (state, o) of other keys into (into, into_o), both relative to their own maximum: the exact
/// merge of split K/V, which rescales both. o: [dim, stride]
void merge(const RowState& into, float* into_o, const RowState& state, const float* o, std::int64_t dim,
           std::int64_t lanes, std::int64_t stride);

/// The same of O [lanes, stride] with queries as rows, and only for those queries of it.
void merge_rows(const RowState& into, float* into_o, const RowState& state, const float* o, const Range& queries,
                std::int64_t stride);

/// inverse[i] = 1 / l[i], or 0 for a row that saw no key.
void invert_sums(const RowState& state, std::int64_t lanes, float* inverse);

/// LSE = m + log(l), -inf for a row that saw no key, to rows first.. of `to` (fp32 or fp64); nothing when it is absent.
void store_lse(const RowState& state, std::int64_t rows, const HeadRows& to, std::int64_t first);

/// s = exp(s - lse): the weights again, from the scores and the LSE of the forward. `lse` of an empty row is +inf here.
void weights_from_lse(float* s, const float* lse, std::int64_t keys, std::int64_t lanes, std::int64_t stride,
                      const Place* cut = nullptr);

/// weights[i] += sum over keys of p, products[i] += sum over keys of p * x. A tile is summed in fp32 and then added, so
/// that rows of any length keep the accuracy of one tile. p, x: [keys, stride]; masked pairs must be 0 in both.
void add_weighted_sums(const float* p, const float* x, std::int64_t keys, std::int64_t lanes, std::int64_t stride,
                       double* weights, double* products);

/// dp = p * (dp - delta): the gradient of the scores (FlashAttention paper, appendix B.2). p, dp: [keys, stride]
void softmax_gradient(const float* p, float* dp, const float* delta, std::int64_t keys, std::int64_t lanes,
                      std::int64_t stride, const Place* cut = nullptr);

}  // namespace tessera::cpu::simd
