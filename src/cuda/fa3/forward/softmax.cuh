// SPDX-License-Identifier: Apache-2.0
//
// Online softmax on the accumulators of wgmma, with conditional rescaling: a thread holds two rows (r = 0, 1), a quad
// of threads a whole row. A block of scores goes through these, in this order:
//
//     apply_mask                        hidden pairs, where there are any
//     OnlineSoftmax::needs_rescale      does a score exceed its row's m by more than that row's rescale threshold?
//     OnlineSoftmax::rescale            if so: the new m and l, and the factor that O has to be multiplied by
//     OnlineSoftmax::count_near_max, set_rescale_threshold    the threshold, after a row's first block
//     exponentiate                      P = exp2(S - m), and l
//
// Scores stay elements of Q K^T: the scale is part of the exponent's multiply-add.
#pragma once

#include <cfloat>
#include <cmath>
#include <cstdint>

#include "cuda/fa3/forward/shared_storage.cuh"
#include "cuda/host/constants.hpp"
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/order.cuh"
#include "cuda/tile/exponent_offset.cuh"
#include "cuda/tile/fragment.cuh"

namespace tessera::cuda::fa3 {

/// Sets scores of pairs that are not visible to -inf. `query`: queries of the thread's rows.
template <int kCount>
__device__ __forceinline__ void apply_mask(float (&scores)[kCount], const Band32& band, const int (&query)[2],
                                           int first_key, int lane) {
    const int key = first_key + 2 * (lane % 4);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const std::uint32_t visible =
            columns_before(band.last(query[r]) + 1 - key) & ~columns_before(band.first(query[r]) - key);
#pragma unroll
        for (int i = 0; i < kCount / 2; ++i) {
            float& score = scores[i / 2 * 4 + 2 * r + i % 2];
            if ((visible & 1U << i) == 0) score = -INFINITY;
        }
    }
}

/// Conditional (lazy) rescaling: scores that exceed m by less than a threshold leave m alone, so that O is rescaled in
/// few blocks only. P may then exceed 1, and the division by l makes up for it. The threshold of a row is at most
/// 2^kRescaleThreshold. It is that large if many scores of the row's first block are near the maximum, so that none
/// weighs much. If one score outweighs the others, the threshold is 1: that score has P = 1, which 16 bits hold
/// exactly.
inline constexpr int kRescaleThreshold = 8;

template <class T>
inline constexpr float kExponentOffset = cuda::kExponentOffset<T, kRescaleThreshold>;

/// The quad's four threads hold a row's scores in 16 parts; the largest score of each part is known.
inline constexpr int kPartsOfThread = 4;

/// Maximum m and sum l of two rows. A row's values depend on that row alone. m is kept in units of kUnit * log2: with
/// 4, the largest and the lowest float are scores like any others (frameworks mask by a bias of -FLT_MAX), while with 1
/// those over 2.36e38 overflow. No other bit depends on kUnit, a power of two.
template <class T, int kUnit>
struct OnlineSoftmax {
    float row_max[2] = {-INFINITY, -INFINITY};  ///< m; up to kRescaleThreshold under the largest score
    float row_sum[2] = {0, 0};                  ///< l, this thread's part until finish()
    float subtract[2];                          ///< P = exp2(score * scale - subtract)
    /// The largest score that leaves m alone, as bits: scores over 0 have the order of their bits as integers.
    int threshold[2] = {};
    /// The thresholds don't hold: a row of this warp has met no key yet, or has large scores or a threshold under 0.
    bool always_rescale = true;
    // From rescale() to set_rescale_threshold():
    bool threshold_is_due = true;
    bool first[2];                     ///< this is the row's first key block
    float largest[2][kPartsOfThread];  ///< the largest scores of this thread's parts of the block
    float near_max[2];                 ///< how many scores are near the row's maximum, in this thread's parts

    /// Does a block of scores, [2 rows][kCount / 2 columns], need rescale()? Uniform over the warp.
    template <int kCount>
    __device__ __forceinline__ bool needs_rescale(const float (&scores)[kCount]) const;

    /// The online softmax: raises m to the block's maximum if that exceeds the threshold, and rescales l to it. O has
    /// to be multiplied by `factor`.
    template <int kCount>
    __device__ __forceinline__ void rescale(float (&scores)[kCount], float scale_log2, float unscale,
                                            float (&factor)[2]);

    /// The second half of rescale(): sets the threshold of rows whose first block it was, for the next needs_rescale().
    /// Both calls run under a GEMM, and a tile's last block needs neither. The block, of kBlockKv keys, begins at
    /// `first_key`; `query`: queries of the thread's rows.
    template <int kBlockKv>
    __device__ __forceinline__ void count_near_max(const WorkTile& tile, const int (&query)[2], int first_key,
                                                   float scale_log2);
    __device__ __forceinline__ void set_rescale_threshold(float unscale);

    /// Sums l over the quad.
    __device__ __forceinline__ void finish() {
#pragma unroll
        for (int r = 0; r < 2; ++r) row_sum[r] = quad_sum(row_sum[r]);
    }
    /// After finish(): LSE of the row, by the natural logarithm; -inf for a row without keys.
    __device__ __forceinline__ float lse(int r) const {
        const float log2_sum = ptx::log2_approx(row_sum[r] * kExponentOffsetFactor<T, kRescaleThreshold>);
        const float found = (row_max[r] + log2_sum / kUnit) * (kLn2 * kUnit);
        // A row of the lowest floats has keys: rounding does not make it one without.
        return kUnit > 1 && row_max[r] != -INFINITY && found < -FLT_MAX ? -FLT_MAX : found;
    }
    __device__ __forceinline__ float inverse_sum(int r) const {
        return row_sum[r] == 0.0F ? 0.0F : ptx::reciprocal_approx(row_sum[r]);
    }

 private:
    /// In rows with such large scores the scale is no part of the exponent's multiply-add: rescale() subtracts m,
    /// rounded as m was.
    __device__ __forceinline__ bool large(int r) const {
        return row_max[r] != -INFINITY && fabsf(row_max[r]) >= kLargeScore / kUnit;
    }
    __device__ __forceinline__ float finite_max(int r) const { return row_max[r] == -INFINITY ? 0.0F : row_max[r]; }
};

template <class T, int kUnit>
template <int kCount>
__device__ __forceinline__ bool OnlineSoftmax<T, kUnit>::needs_rescale(const float (&scores)[kCount]) const {
    constexpr int kChains = 4;  // independent chains of maxima, for latency
    bool over = always_rescale;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        int chain[kChains];
#pragma unroll
        for (int i = 0; i < kCount / 4; ++i) {
            const int low = __float_as_int(scores[4 * i + 2 * r]);
            const int high = __float_as_int(scores[4 * i + 2 * r + 1]);
            chain[i % kChains] = i < kChains ? ::max(low, high) : __vimax3_s32(chain[i % kChains], low, high);
        }
        over |= __vimax3_s32(chain[0], chain[1], ::max(chain[2], chain[3])) > threshold[r];
    }
    return any_lane(over);
}

/// The largest scores of this thread's parts of both rows.
template <int kCount>
__device__ __forceinline__ void largest_of_parts(const float (&scores)[kCount], float (&largest)[2][kPartsOfThread]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        const int of_row = i / 4 * 2 + i % 2;
        float& part = largest[row_of(i)][of_row % kPartsOfThread];
        part = of_row < kPartsOfThread ? scores[i] : fmaxf(part, scores[i]);
    }
}

/// How many scores of a row's first block are near its maximum m. The largest of each part counts, from 1 at m down to
/// 0 where P is a 16th. (All scores would be a little more exact, at 110 instructions more.)
__device__ __forceinline__ float count_near_max_of_parts(const float (&largest)[kPartsOfThread], float quarter_of_m,
                                                         float scale_log2) {
    float near = 0;
#pragma unroll
    for (const float score : largest) near += __saturatef(fmaf(score, scale_log2 / 4, 1 - quarter_of_m));
    return near;
}

template <class T, int kUnit>
template <int kCount>
__device__ __forceinline__ void OnlineSoftmax<T, kUnit>::rescale(float (&scores)[kCount], float scale_log2,
                                                                 float unscale, float (&factor)[2]) {
    largest_of_parts(scores, largest);
    // Both rows at each step, without branches: a shuffle takes as long as 25 instructions.
    float block_max[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        block_max[r] = quad_max(fmaxf(fmaxf(largest[r][0], largest[r][1]), fmaxf(largest[r][2], largest[r][3])));
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const float previous_max = row_max[r];
        first[r] = previous_max == -INFINITY;
        const bool raise = first[r] | large(r) | (block_max[r] > __int_as_float(threshold[r]));
        // Rounded as the subtraction rounds it, so that O, l and LSE use the same m to the last bit.
        const float new_max = fmaxf(previous_max, __fmul_rn(block_max[r], scale_log2 / kUnit)) +
                              kExponentOffset<T> / kUnit - kExponentOffset<T> / kUnit;
        row_max[r] = raise ? new_max : previous_max;
        threshold[r] = raise ? __float_as_int(block_max[r]) : threshold[r];
        // With no visible key so far, exp2(-inf - 0) gives the right factor, 0.
        factor[r] = ptx::exp2_approx((previous_max - finite_max(r)) * kUnit);
        row_sum[r] = __fmul_rn(row_sum[r], factor[r]);  // never fused with the addition after it
        subtract[r] = (large(r) ? 0.0F : finite_max(r) * kUnit) + kExponentOffset<T>;
    }
    threshold_is_due = true;
    if (!any_lane(large(0) | large(1))) return;
    // Rows that are not large keep their scores to the last bit. exponentiate() scales once more.
    float times[2], minus[2], back[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        times[r] = large(r) ? scale_log2 / kUnit : 1.0F;
        minus[r] = large(r) ? row_max[r] : 0.0F;
        back[r] = large(r) ? unscale * kUnit : 1.0F;
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        scores[i] = (__fmul_rn(scores[i], times[row_of(i)]) - minus[row_of(i)]) * back[row_of(i)];
    }
}

template <class T, int kUnit>
template <int kBlockKv>
__device__ __forceinline__ void OnlineSoftmax<T, kUnit>::count_near_max(const WorkTile& tile, const int (&query)[2],
                                                                        int first_key, float scale_log2) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        // Keys that the row doesn't see are counted like those that it sees.
        const int begin = ::max(query[r] + tile.low - first_key, 0);
        const int end = ::min(::min(query[r] + tile.high, tile.last_key) + 1 - first_key, kBlockKv);
        const float more = __fdividef(0.75F * kBlockKv, static_cast<float>(end - begin));
        near_max[r] = count_near_max_of_parts(largest[r], finite_max(r) * (kUnit / 4.0F), scale_log2) * more;
    }
}

template <class T, int kUnit>
__device__ __forceinline__ void OnlineSoftmax<T, kUnit>::set_rescale_threshold(float unscale) {
    bool all = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        // log2 of the threshold: 0 for one score near the maximum, more for many.
        const float log2_threshold =
            fminf(fmaxf(__log2f(quad_sum(near_max[r])) * 1.25F, 0.0F), float{kRescaleThreshold});
        threshold[r] =
            !first[r] ? threshold[r] : __float_as_int((finite_max(r) + log2_threshold / kUnit) * (unscale * kUnit));
        all |= threshold[r] < 0 || large(r) || row_max[r] == -INFINITY;
    }
    always_rescale = any_lane(all);
    threshold_is_due = false;
}

/// From scores to probabilities: P = exp2(scale * S - m), its row sums, and its 16-bit form, the A operand of P V.
///
/// A warp issues an ex2 every 8 cycles at best, and everything else fits between: the multiply-adds of later scores,
/// the sums and the packing of finished probabilities. ptxas does not find that order by itself, so the work is cut
/// into chunks that it may not mix (ptx/order.cuh).
template <class T, int kCount, class Mod>
struct Exponentials {
    static constexpr int kChunk = 8;  // exponentials
    static constexpr int kChunks = kCount / kChunk;
    static constexpr int kAhead = 3;  // chunks whose exponents are ready early
    static_assert(kCount % kChunk == 0);

    float (&scores)[kCount];
    std::uint32_t (&p)[kCount / 8][4];
    const float (&subtract)[2];
    float scale_log2;
    ptx::IssueOrder order;
    const Mod& score_mod;
    float parts[2][2];  // two partial sums a row: short chains, and small rounding errors over long rows

    template <int kBegin, int kEnd>
    __device__ __forceinline__ void exponents() {
#pragma unroll
        for (int i = kBegin * kChunk; i < min(kEnd, kChunks) * kChunk; ++i) {
            scores[i] = fmaf(scores[i], scale_log2, -subtract[row_of(i)]);
        }
    }
    template <int kPart>
    __device__ __forceinline__ void exponentials() {
#pragma unroll
        for (int i = kPart * kChunk; i < (kPart + 1) * kChunk; ++i) scores[i] = ptx::exp2_approx(scores[i]);
    }
    template <int kPart>
    __device__ __forceinline__ void sum_and_pack() {
#pragma unroll
        for (int i = kPart * kChunk; i < (kPart + 1) * kChunk; ++i) {
            float& part = parts[row_of(i)][i % 2];
            part = i < 4 ? scores[i] : part + scores[i];
        }
#pragma unroll
        for (int i = kPart * kChunk; i < (kPart + 1) * kChunk; i += 2) {
            p[i / 8][i % 8 / 2] = score_mod.drop(ptx::pack<T>(scores[i], scores[i + 1]), i);
        }
    }

    /// Chunk kPart and all after it. `beside`() runs in the shadow of the last one.
    template <int kPart, class Beside>
    __device__ __forceinline__ void run(const Beside& beside) {
        if constexpr (kPart == 0) exponents<0, kAhead + 1>();
        else exponents<kPart + kAhead, kPart + kAhead + 1>();
        if constexpr (kPart < kChunks) exponentials<kPart>();
        if constexpr (kPart > 0) sum_and_pack<kPart - 1>();
        if constexpr (kPart == kChunks - 1) beside();
        if constexpr (kPart < kChunks) {
            order.template fence<kPart>();
            run<kPart + 1>(beside);
        }
    }
};

/// Scores [2 rows][kCount / 2 columns] of this thread become probabilities in p, and their sums are added to l. Dropped
/// probabilities count in the sums only. `beside`() runs in the shadow of the last exponentials.
template <class T, int kUnit, int kCount, class Mod, class Beside>
__device__ __forceinline__ void exponentiate(float (&scores)[kCount], std::uint32_t (&p)[kCount / 8][4],
                                             OnlineSoftmax<T, kUnit>& rows, float scale_log2, ptx::IssueOrder order,
                                             const Mod& score_mod, const Beside& beside) {
    Exponentials<T, kCount, Mod> exponentials{scores, p, rows.subtract, scale_log2, order, score_mod};
    exponentials.template run<0>(beside);
#pragma unroll
    for (int r = 0; r < 2; ++r) rows.row_sum[r] += exponentials.parts[r][0] + exponentials.parts[r][1];
}

}  // namespace tessera::cuda::fa3
