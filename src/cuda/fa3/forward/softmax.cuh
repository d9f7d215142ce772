// SPDX-License-Identifier: Apache-2.0
//
// Online softmax on the accumulators of wgmma: a thread holds two rows (r = 0, 1), a quad of threads a whole row. A
// block of scores goes through these, in this order:
//
//     apply_mask                        hidden pairs, where there are any
//     OnlineSoftmax::needs_rescale      does some score exceed its row's m by more than that row's slack? If so:
//     OnlineSoftmax::rescale            m, l, and by what O has to be multiplied
//     OnlineSoftmax::count_near, set_limits    the slack, after a row's first block
//     exponentiate                      P = exp2(S - m), and l
//
// Scores stay products of Q and K: the scale is part of the exponent's multiply-add.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/fa3/forward/shared_storage.cuh"
#include "cuda/host/constants.hpp"
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/order.cuh"
#include "cuda/tile/exponent_offset.cuh"

namespace tessera::cuda::fa3 {

/// Element 4 * j + 2 * r + e of an accumulator is row r, column 8 * j + 2 * (lane % 4) + e.
constexpr int row_of(int element) { return element / 2 % 2; }
constexpr int column_of(int element) { return element / 4 * 8 + element % 2; }

/// Scores of pairs that are not visible become -inf. `query`: of the thread's rows.
template <int kCount>
__device__ __forceinline__ void apply_mask(float (&scores)[kCount], const Visibility& seen, const int (&query)[2],
                                           int first_key, int lane) {
    const int key = first_key + 2 * (lane % 4);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const std::uint32_t visible = columns_before(min(query[r] + seen.high, seen.last_key) + 1 - key) &
                                      ~columns_before(query[r] + seen.low - key);
#pragma unroll
        for (int i = 0; i < kCount / 2; ++i) {
            float& score = scores[i / 2 * 4 + 2 * r + i % 2];
            if ((visible & 1U << i) == 0) score = -INFINITY;
        }
    }
}

/// Slack: a maximum m is left alone by scores that are a little over it, so that O is rescaled in few blocks only; the
/// division by l makes up for weights over 1. A little: where many scores of the row's first block are near the
/// maximum, so that none of them weighs much; a score that outweighs the others is to have weight 1, which 16 bits hold
/// exactly. And never over 2^kMostSlack.
inline constexpr int kMostSlack = 8;

template <class T>
inline constexpr float kExponentOffset = cuda::kExponentOffset<T, kMostSlack>;

/// A row's scores in a quad of threads, in 16 parts: of each part the largest is known.
inline constexpr int kPartsOfThread = 4;

/// Maximum m and sum l of two rows. What a row gets depends on that row alone.
template <class T>
struct OnlineSoftmax {
    float max[2] = {-INFINITY, -INFINITY};  ///< in units of log2 (scaled); up to kMostSlack under the largest so far
    float sum[2] = {0, 0};                  ///< this thread's share until finish()
    float subtract[2];                      ///< weight = exp2(score * scale - subtract)
    /// Bits of the largest score that leaves the maximum alone: scores over 0 compare like their bits.
    int limit[2] = {};
    /// Limits don't hold: a row of this warp has met no key yet, or has large scores or a limit under 0.
    bool rescales_all = true;
    // From rescale() to set_limits():
    bool limits_are_due = true;
    bool first[2];                     ///< the block was the row's first
    float largest[2][kPartsOfThread];  ///< the largest scores of this thread's parts of it
    float near[2];                     ///< so many scores are near its maximum, in this thread's parts

    /// Has a block of scores, [2 rows][kCount / 2 columns], to be given to rescale()? The same for all lanes of the
    /// warp.
    template <int kCount>
    __device__ __forceinline__ bool needs_rescale(const float (&scores)[kCount]) const;

    /// The online softmax: brings the maxima up to those of a block, where it takes that, and l to them; O has to be
    /// multiplied by `factor`.
    template <int kCount>
    __device__ __forceinline__ void rescale(float (&scores)[kCount], float scale_log2, float unscale,
                                            float (&factor)[2]);

    /// The second half of rescale(), which nothing waits for before the next needs_rescale(): of rows whose first block
    /// it was, how far over m later scores may be. To be called under a product; behind a tile's last block not at all.
    /// The block, of kBlockKv keys, begins at `first_key`; `query`: of the thread's rows.
    template <int kBlockKv>
    __device__ __forceinline__ void count_near(const WorkTile& tile, const int (&query)[2], int first_key,
                                               float scale_log2);
    __device__ __forceinline__ void set_limits(float unscale);

    /// Sums over the quad.
    __device__ __forceinline__ void finish() {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            sum[r] += __shfl_xor_sync(kAllLanes, sum[r], 1);
            sum[r] += __shfl_xor_sync(kAllLanes, sum[r], 2);
        }
    }
    /// After finish(): the natural logarithm of the row's sum of exponentials; -inf for a row without keys.
    __device__ __forceinline__ float lse(int r) const {
        return (max[r] + ptx::log2_approx(sum[r] * kExponentOffsetFactor<T, kMostSlack>)) * kLn2;
    }
    __device__ __forceinline__ float inverse_sum(int r) const {
        return sum[r] == 0.0F ? 0.0F : ptx::reciprocal_approx(sum[r]);
    }

 private:
    /// Of these rows the scale is no part of the exponent's multiply-add: rescale() subtracts m, rounded as m was.
    __device__ __forceinline__ bool large(int r) const { return max[r] != -INFINITY && fabsf(max[r]) >= kLargeScore; }
    __device__ __forceinline__ float finite_max(int r) const { return max[r] == -INFINITY ? 0.0F : max[r]; }
};

template <class T>
template <int kCount>
__device__ __forceinline__ bool OnlineSoftmax<T>::needs_rescale(const float (&scores)[kCount]) const {
    constexpr int kChains = 4;  // so that no maximum waits for the one before
    bool over = rescales_all;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        int chain[kChains];
#pragma unroll
        for (int i = 0; i < kCount / 4; ++i) {
            const int low = __float_as_int(scores[4 * i + 2 * r]);
            const int high = __float_as_int(scores[4 * i + 2 * r + 1]);
            chain[i % kChains] = i < kChains ? ::max(low, high) : __vimax3_s32(chain[i % kChains], low, high);
        }
        over |= __vimax3_s32(chain[0], chain[1], ::max(chain[2], chain[3])) > limit[r];
    }
    return __any_sync(kAllLanes, over);
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

__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, 1));
    return fmaxf(x, __shfl_xor_sync(kAllLanes, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(kAllLanes, x, 1);
    return x + __shfl_xor_sync(kAllLanes, x, 2);
}

/// How many scores of a row's first block are near its maximum m: the largest ones of this thread's parts count from 1
/// at m to 0 at a 16th of its weight. (All scores would tell a little more, and cost 110 instructions more.)
__device__ __forceinline__ float near_maximum(const float (&largest)[kPartsOfThread], float m, float scale_log2) {
    float near = 0;
#pragma unroll
    for (const float score : largest) near += __saturatef(fmaf(score, scale_log2 / 4, 1 - m / 4));
    return near;
}

template <class T>
template <int kCount>
__device__ __forceinline__ void OnlineSoftmax<T>::rescale(float (&scores)[kCount], float scale_log2, float unscale,
                                                          float (&factor)[2]) {
    largest_of_parts(scores, largest);
    // Both rows at each step, and no branches between: a shuffle takes as long as 25 instructions.
    float block_max[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        block_max[r] = quad_max(fmaxf(fmaxf(largest[r][0], largest[r][1]), fmaxf(largest[r][2], largest[r][3])));
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const float before = max[r];
        first[r] = before == -INFINITY;
        const bool raise = first[r] | large(r) | (block_max[r] > __int_as_float(limit[r]));
        // Rounded as the subtraction will round it: m is what is subtracted, to the last bit, in O, l and LSE.
        const float raised =
            fmaxf(before, __fmul_rn(block_max[r], scale_log2)) + kExponentOffset<T> - kExponentOffset<T>;
        max[r] = raise ? raised : before;
        limit[r] = raise ? __float_as_int(block_max[r]) : limit[r];
        // Nothing visible yet: exp2(-inf - 0) is the 0 that is wanted.
        factor[r] = ptx::exp2_approx(before - finite_max(r));
        sum[r] = __fmul_rn(sum[r], factor[r]);  // never one operation with the addition behind it
        subtract[r] = (large(r) ? 0.0F : finite_max(r)) + kExponentOffset<T>;
    }
    limits_are_due = true;
    if (!__any_sync(kAllLanes, large(0) | large(1))) return;
    // Rows that are not large stay as they are, to the last bit. exponentiate() will scale once more.
    float times[2], minus[2], back[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        times[r] = large(r) ? scale_log2 : 1.0F;
        minus[r] = large(r) ? max[r] : 0.0F;
        back[r] = large(r) ? unscale : 1.0F;
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        scores[i] = (__fmul_rn(scores[i], times[row_of(i)]) - minus[row_of(i)]) * back[row_of(i)];
    }
}

/// The room is up to 2^kMostSlack where near-by scores are many, and none where one outweighs the others.
template <class T>
template <int kBlockKv>
__device__ __forceinline__ void OnlineSoftmax<T>::count_near(const WorkTile& tile, const int (&query)[2], int first_key,
                                                             float scale_log2) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        // Of a block that the row sees a part of, the rest is taken to be like that part.
        const int begin = ::max(query[r] + tile.low - first_key, 0);
        const int end = ::min(::min(query[r] + tile.high, tile.last_key) + 1 - first_key, kBlockKv);
        const float more = __fdividef(0.75F * kBlockKv, static_cast<float>(end - begin));
        near[r] = near_maximum(largest[r], finite_max(r), scale_log2) * more;
    }
}

template <class T>
__device__ __forceinline__ void OnlineSoftmax<T>::set_limits(float unscale) {
    bool all = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const float room = fminf(fmaxf(__log2f(quad_sum(near[r])) * 1.25F, 0.0F), float{kMostSlack});
        limit[r] = !first[r] ? limit[r] : __float_as_int((finite_max(r) + room) * unscale);
        all |= limit[r] < 0 || large(r) || max[r] == -INFINITY;
    }
    rescales_all = __any_sync(kAllLanes, all);
    limits_are_due = false;
}

/// From scores to weights: p = exp2(scale * s - m), its sum, and its 16-bit form, which is the A operand of P V.
///
/// A warp issues an ex2 every 8 cycles at best, and everything else fits between: the fused multiply-adds of scores to
/// come, the sums and the packing of weights that are done. ptxas does not find that order by itself, so the
/// work is cut into chunks that it may not mix (ptx/order.cuh).
template <class T, int kCount, class Extra>
struct Exponentials {
    static constexpr int kChunk = 8;  // exponentials
    static constexpr int kChunks = kCount / kChunk;
    static constexpr int kAhead = 3;  // chunks whose exponents are ready before their turn
    static_assert(kCount % kChunk == 0);

    float (&scores)[kCount];
    std::uint32_t (&p)[kCount / 8][4];
    const float (&subtract)[2];
    float scale_log2;
    ptx::IssueOrder order;
    const Extra& extra;
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
            p[i / 8][i % 8 / 2] = extra.drop(ptx::pack<T>(scores[i], scores[i + 1]), i);
        }
    }

    /// Chunk kPart and all after it. `beside`() is done in the shadow of the last one.
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

/// Scores [2 rows][kCount / 2 columns] of this thread become weights in p, and their sums are added to the rows'; what
/// `extra` drops is part of the sums only. `beside`() is done in the shadow of the last ones.
template <class T, int kCount, class Extra, class Beside>
__device__ __forceinline__ void exponentiate(float (&scores)[kCount], std::uint32_t (&p)[kCount / 8][4],
                                             OnlineSoftmax<T>& rows, float scale_log2, ptx::IssueOrder order,
                                             const Extra& extra, const Beside& beside) {
    Exponentials<T, kCount, Extra> exponentials{scores, p, rows.subtract, scale_log2, order, extra};
    exponentials.template run<0>(beside);
#pragma unroll
    for (int r = 0; r < 2; ++r) rows.sum[r] += exponentials.parts[r][0] + exponentials.parts[r][1];
}

}  // namespace tessera::cuda::fa3
