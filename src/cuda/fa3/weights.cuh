// SPDX-License-Identifier: Apache-2.0
//
// From scores to weights: p = exp2(scale * s - m), its sum, and its 16-bit form, which is the A operand of P V.
//
// A warp issues an ex2 every 8 cycles at best, and everything else fits between: the fused multiply-adds of scores to
// come, the sums and the packing of weights that are done. The assembler does not find that order by itself, so the
// work is cut into chunks that it may not mix.
#pragma once

#include <cstdint>

#include "cuda/fa3/softmax.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/schedule.cuh"

namespace tessera::cuda::fa3 {

template <class T, int kCount, class Extra>
struct Weigher {
    static constexpr int kChunk = 8;  // exponentials
    static constexpr int kChunks = kCount / kChunk;
    static constexpr int kAhead = 3;  // chunks whose exponents are ready before their turn
    static_assert(kCount % kChunk == 0);

    float (&scores)[kCount];
    std::uint32_t (&p)[kCount / 8][4];
    const float (&subtract)[2];
    float scale_log2;
    int never;
    const Extra& extra;
    int first_key;
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
        extra.template drop<kPart * kChunk, kChunk>(scores, first_key);
#pragma unroll
        for (int i = kPart * kChunk; i < (kPart + 1) * kChunk; i += 2) {
            p[i / 8][i % 8 / 2] = ptx::pack<T>(scores[i], scores[i + 1]);
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
            ptx::schedule_fence<kPart>(never);
            run<kPart + 1>(beside);
        }
    }
};

/// Scores [2 rows][kCount / 2 columns] of this thread, from `first_key` on, become weights in p, and their sums are
/// added to the rows'. `never`: 0, of which the compiler knows nothing.
template <class T, int kCount, class Extra, class Beside>
__device__ __forceinline__ void weigh(float (&scores)[kCount], std::uint32_t (&p)[kCount / 8][4], RowState<T>& rows,
                                      float scale_log2, int never, const Extra& extra, int first_key,
                                      const Beside& beside) {
    Weigher<T, kCount, Extra> weigher{scores, p, rows.subtract, scale_log2, never, extra, first_key};
    weigher.template run<0>(beside);
#pragma unroll
    for (int r = 0; r < 2; ++r) rows.sum[r] += weigher.parts[r][0] + weigher.parts[r][1];
}

}  // namespace tessera::cuda::fa3
