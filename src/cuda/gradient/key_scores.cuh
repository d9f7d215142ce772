// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/gradient/key_thread.cuh"
#include "cuda/gradient/transposed.cuh"
#include "cuda/host/constants.hpp"

namespace tessera::cuda::gradient {

/// From the two products of a step to P and dS: those of the weights warp, and of the scores warp that waits for it.
template <class T, Config kConfig>
struct KeyScores : KeyThread<T, kConfig> {
    using Base = KeyThread<T, kConfig>;
    using Base::first_row;
    using Base::inputs;
    using Base::kKeyTiles;
    using Base::kPartQueries;
    using Base::kTiles;
    using Base::lane;
    using Base::pair;
    using Base::sees;
    using Base::store_rounded;
    using Base::unit_of;
    using Base::work;
    using typename Base::Scores;

    /// S^T becomes P^T times kWeightUnit, without what falls to the dropout; handed over is P^T times the softcap's
    /// slope, with the sign bit where the dropout takes it.
    __device__ __forceinline__ void make_weights(Scores& s, const Step& step, int stage, int part, bool masked) const {
        const RowTile& rows = inputs.rows(stage);
        const bool nonfinite = __any_sync(0xFFFFFFFF, rows.norm[part * kPartQueries + lane()] != 0.0F);
        if (masked || nonfinite) make_weights<true>(s, step, rows, part, masked);
        else make_weights<false>(s, step, rows, part, false);
        ptx::named_barrier_arrive(barrier_of(part), 64);
    }

    /// dP^T becomes dS^T, in registers and, rounded, in shared memory: [keys][queries].
    __device__ __forceinline__ void make_ds(Scores& s, const Step& step, int stage, int part, bool masked) const {
        const RowTile& rows = inputs.rows(stage);
        const float held = unit_of(step.head) * (1 / kWeightUnit<T>);
        ptx::named_barrier_sync(barrier_of(part), 64);
        if (masked) make_ds<true>(s, step, rows, part, held);
        else make_ds<false>(s, step, rows, part, held);
    }

 protected:
    /// kNonfinite: some pairs are hidden, or some rows have large scores.
    template <bool kNonfinite>
    __device__ __forceinline__ void make_weights(Scores& s, const Step& step, const RowTile& rows, int part,
                                                 bool masked) const {
        const int column = part * kPartQueries + lane() % 4 * 2;
        const int first_query = step.tile * kBlockQ + column;
        const int first_key = work.first_key + first_row() + lane() / 4;
        const float factor = kConfig.general ? kLog2E : inputs.launch.params.forward.scale * kLog2E;
        KeptOfColumns kept[kKeyTiles];
        if constexpr (kConfig.general) draw(kept, step.head, first_query, first_key);
#pragma unroll
        for (int j = 0; j < kTiles; ++j) {
            const float2 offset = *reinterpret_cast<const float2*>(rows.offset + 8 * j + column);
#pragma unroll
            for (int m = 0; m < kKeyTiles; ++m) {
                float(&w)[4] = s[m][j];
                float slope[4] = {1, 1, 1, 1};
                const int query = first_query + 8 * j;
                const int key = first_key + 16 * m;
                if constexpr (kConfig.general) transform(w, slope, step.head, query, key, masked);
                if constexpr (kNonfinite) exponentiate_nonfinite(w, rows, 8 * j + column);
                else exponentiate(w, factor, offset);
                if (kNonfinite && masked) hide(w, query, key);
                float4 out = {w[0] * slope[0], w[1] * slope[1], w[2] * slope[2], w[3] * slope[3]};
                if constexpr (kConfig.general) drop(w, out, kept[m], j);
                *handed(m, part * kTiles + j) = out;
            }
        }
    }

    template <bool kMasked>
    __device__ __forceinline__ void make_ds(Scores& s, const Step& step, const RowTile& rows, int part,
                                            float held) const {
        const int column = part * kPartQueries + lane() % 4 * 2;
        const int row = first_row() + lane() / 4;
        const float unit = inputs.launch.params.forward.keep_scale * held;
#pragma unroll
        for (int j = 0; j < kTiles; ++j) {
            const float2 delta = *reinterpret_cast<const float2*>(rows.delta + 8 * j + column);
#pragma unroll
            for (int m = 0; m < kKeyTiles; ++m) {
                float(&ds)[4] = s[m][j];
                const float4 handed = *this->handed(m, part * kTiles + j);
                const float w[4] = {handed.x, handed.y, handed.z, handed.w};
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const float d = (e % 2 == 0 ? delta.x : delta.y) * held;
                    const bool dropped = kConfig.general && __float_as_int(w[e]) < 0;
                    ds[e] = fabsf(w[e]) * (dropped ? -d : fmaf(ds[e], unit, -d));
                }
                if constexpr (kMasked) {
                    hide(ds, step.tile * kBlockQ + 8 * j + column, work.first_key + row + 16 * m);
                }
                store_rounded(inputs.ds(), ds, row + 16 * m, part * kTiles + j);
            }
        }
    }

    __device__ static __forceinline__ int barrier_of(int part) { return 1 + part * Config::kPairs + pair(); }

    /// Where four weights lie on their way from one warp to the other.
    __device__ __forceinline__ float4* handed(int m, int tile) const {
        const int place = ((pair() * kKeyTiles + m) * (kBlockQ / 8) + tile) * 32 + lane();
        return reinterpret_cast<float4*>(inputs.weights()) + place;
    }

    __device__ __forceinline__ TransposedScores<T> scores(int head) const {
        const ForwardParams& p = inputs.launch.params.forward;
        return {p, ScoreInputs(p, work.batch, head), work.sequence.len_kv - work.sequence.len_q,
                static_cast<std::uint32_t>(work.batch), static_cast<std::uint32_t>(head)};
    }

    __device__ __forceinline__ void transform(float (&s)[4], float (&slope)[4], int head, int query, int key,
                                              bool masked) const {
        const TransposedScores<T> scores = this->scores(head);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            if (masked && !sees(query + e % 2, key + e / 2 * 8)) continue;  // its bias may not be there
            const Scored scored = scores.transform(s[e], query + e % 2, key + e / 2 * 8);
            s[e] = scored.score;
            slope[e] = scored.slope;
        }
    }

    __device__ static __forceinline__ void exponentiate(float (&s)[4], float factor, const float2& offset) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            s[e] = ptx::exp2_approx(fmaf(s[e], factor, kWeightExponent<T> - (e % 2 == 0 ? offset.x : offset.y)));
        }
    }

    /// Some rows of the tile have large scores: those are rounded as the maximum is before they are subtracted.
    __device__ __forceinline__ void exponentiate_nonfinite(float (&s)[4], const RowTile& rows, int column) const {
        const float scale = kConfig.general ? 1.0F : inputs.launch.params.forward.scale;
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int row = column + e % 2;
            if (rows.norm[row] == 0.0F) {
                s[e] = ptx::exp2_approx(fmaf(s[e], scale * kLog2E, kWeightExponent<T> - rows.offset[row]));
            } else {
                const float below = __fadd_rn(__fmul_rn(s[e], scale), -rows.max[row]);
                s[e] = ptx::exp2_approx(fmaf(below, kLog2E, kWeightExponent<T>)) * rows.norm[row];
            }
        }
    }

    __device__ __forceinline__ void hide(float (&x)[4], int query, int key) const {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            if (!sees(query + e % 2, key + e / 2 * 8)) x[e] = 0;
        }
    }

    __device__ __forceinline__ void draw(KeptOfColumns (&kept)[kKeyTiles], int head, int query, int key) const {
        const TransposedScores<T> scores = this->scores(head);
        if (!scores.drops()) return;
#pragma unroll
        for (int m = 0; m < kKeyTiles; ++m) kept[m] = scores.draw(query, key + 16 * m, lane());
    }

    __device__ static __forceinline__ void drop(float (&w)[4], float4& out, const KeptOfColumns& kept, int tile) {
        float* handed[4] = {&out.x, &out.y, &out.z, &out.w};
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            if (kept(tile, e)) continue;
            w[e] = 0;
            *handed[e] = __int_as_float(__float_as_int(*handed[e]) | static_cast<int>(0x80000000));
        }
    }
};

}  // namespace tessera::cuda::gradient
