// SPDX-License-Identifier: Apache-2.0
//
// The mainloop for any scores (softcap, ALiBi, bias, dropout), and fa1's. Warps work in pairs on the same keys:
//
//   P warp       S^T = K Q^T,   P^T = exp2(S^T - LSE),     dV += P^T dO
//   dS warp     dP^T = V dO^T,  dS^T = P^T (dP^T - delta),  dK += dS^T Q
//
// Each warp holds one accumulator only. Keys are the rows of the GEMMs, so P and dS are multiplied with dO and Q from
// the registers in which they were computed. Then all warps compute dQ = dS K.
#pragma once

#include "cuda/gradient/main/dq_gemm.cuh"
#include "cuda/gradient/main/key_scale.cuh"
#include "cuda/gradient/main/transposed_scores.cuh"
#include "cuda/ptx/barrier.cuh"
#include "cuda/tile/output.cuh"

namespace tessera::cuda::gradient {

template <class T, Config kConfig>
struct MainloopWarpPairs {
    static constexpr int kHeadDim = kConfig.head_dim;
    static constexpr int kKeyTiles = kConfig.key_tiles;
    static constexpr int kParts = 2;  // parts of a query tile; registers hold S or dP of one part at a time
    static constexpr int kPartQueries = kBlockQ / kParts;
    static constexpr int kTiles = kPartQueries / 8;
    using Scores = float[kKeyTiles][kTiles][4];      // [16 keys][8 queries][4]
    using Sums = float[kKeyTiles][kHeadDim / 8][4];  // [16 keys][8 dims][4]: dV or dK
    using Scale = KeyScale<T, kKeyTiles>;

    const CtaTiles<T, kConfig> tiles;

    /// Does all work of the key block. `mutable_work`: the CTA's own.
    __device__ __forceinline__ void run_block(CtaWork& mutable_work) const {
        tiles.load_k();
        tiles.load_v();
        ptx::cp_async_commit();
        Sums sums;
        Scale scale;
        for (;;) {
            clear(sums);
            scale = Scale(is_p_warp());
            const bool any_masked = run(sums, scale);
            // Inf and NaN in hidden Q and dO are rare. Only if they reached the sums is the work done again without
            // them.
            if (tiles.work.sanitizes || !any_masked || !__syncthreads_or(any_nonfinite(sums))) break;
            if (threadIdx.x == 0) mutable_work.sanitizes = true;
            __syncthreads();
        }
        ptx::cp_async_wait<0>();
        __syncthreads();
        store_sums(sums, scale);
    }

 private:
    __device__ static __forceinline__ int pair() { return warp_number() % Config::kPairs; }
    __device__ static __forceinline__ bool is_p_warp() { return warp_number() < Config::kPairs; }
    __device__ static __forceinline__ int first_row() { return pair() * kConfig.keys_per_pair(); }

    /// All steps. Returns whether any of them was masked.
    __device__ __forceinline__ bool run(Sums& sums, Scale& scale) const {
        const CtaWork& work = tiles.work;
        const int count = work.steps();
        bool any_masked = false;
        if (count > 0) tiles.load_queries(0, 0);
#pragma unroll 1
        for (int i = 0; i < count; ++i) {
            const int stage = i % kConfig.stages;
            ptx::cp_async_wait<0>();
            __syncthreads();
            any_masked |= step(i, count, stage, sums, scale);
        }
        if (count == 0) return false;
        __syncthreads();
        if (work.adds_dq(tiles.launch)) tiles.dq_semaphore().release(Step(tiles.launch, work, count - 1));
        return any_masked;
    }

    /// One step. Returns whether some pairs are not visible.
    __device__ __forceinline__ bool step(int index, int count, int stage, Sums& sums, Scale& scale) const {
        const CtaWork& work = tiles.work;
        const Step step(tiles.launch, work, index);
        const int first_query = step.tile * kBlockQ;
        const bool masked =
            first_query + kBlockQ > work.sequence.len_q ||
            !work.band32.full(first_query, first_query + kBlockQ, work.first_key, work.first_key + kConfig.block_kv());
        const bool sanitizes = work.sanitizes && masked;
#pragma unroll 1
        for (int part = 0; part < kParts; ++part) {
            Scores s;
            compute_scores(s, step, stage, part, masked);
            if constexpr (Scale::kFp16) {
                if (!is_p_warp()) scale.rescale(s, sums, tiles.ds_scale(step.head));
            }
            if (sanitizes) replace_nonfinite_queries(stage);
            const auto rows = MatrixAddress<kHeadDim>::rows_first(
                is_p_warp() ? tiles.do_tile(stage) : tiles.q_tile(stage), part * kPartQueries, lane_number());
            cuda::multiply_pv<T, kHeadDim>(sums, s, rows);
            if (sanitizes) add_nonfinite_queries(s, index, stage, part, first_query, sums);
            // The next copies start here, where the two warps of a pair do different work, not after the barrier.
            if (part == 0 && index + 1 < count) tiles.load_queries(index + 1, (stage + 1) % kConfig.stages);
        }
        if (work.adds_dq(tiles.launch)) {
            const DqSemaphore semaphore = tiles.dq_semaphore();
            if (index > 0) semaphore.release(Step(tiles.launch, work, index - 1));
            semaphore.acquire(step);
        }
        __syncthreads();
        if (work.adds_dq(tiles.launch)) DqGemm<T, kConfig>{tiles}.add(step, first_query, masked);
        return masked;
    }

    /// The warp's S^T or dP^T of a part of the queries, and P^T or dS^T in its place.
    __device__ __forceinline__ void compute_scores(Scores& s, const Step& step, int stage, int part,
                                                   bool masked) const {
        const bool p_warp = is_p_warp();
        Queries<kHeadDim, kKeyTiles, false> rows(p_warp ? tiles.k_tile() : tiles.v_tile(), first_row(), lane_number());
        auto columns =
            MatrixAddress<kHeadDim>::chunks_first(p_warp ? tiles.q_tile(stage) : tiles.do_tile(stage), lane_number());
        columns.move(part * kPartQueries * kHeadDim * 2);
        cuda::multiply_qk<T>(s, rows, columns);
        if (p_warp) compute_p(s, step, stage, part, masked);
        else compute_ds(s, step, stage, part, masked);
    }

    /// S^T becomes P^T times kPScale, 0 where dropout drops it. The dS warp is handed P^T times the slope of
    /// the softcap, with the sign bit set where dropout drops it.
    __device__ __forceinline__ void compute_p(Scores& s, const Step& step, int stage, int part, bool masked) const {
        const RowTile& rows = tiles.rows(stage);
        const bool large = any_lane(rows.norm[part * kPartQueries + lane_number()] != 0.0F);
        if (masked || large) compute_p<true>(s, step, rows, part, masked);
        else compute_p<false>(s, step, rows, part, false);
        ptx::named_barrier_arrive(barrier_of(part), 64);
    }
    /// compute_p() of a tile. kPredicates: some pairs are hidden, or some rows have a large |LSE|.
    template <bool kPredicates>
    __device__ __forceinline__ void compute_p(Scores& s, const Step& step, const RowTile& rows, int part,
                                              bool masked) const {
        const int column = part * kPartQueries + lane_number() % 4 * 2;
        const int first_query = step.tile * kBlockQ + column;
        const int first_key = tiles.work.first_key + first_row() + lane_number() / 4;
        const float scale = kConfig.general ? 1.0F : tiles.launch.params.forward.scale;
        DropoutBitsTransposed kept[kKeyTiles];
        if constexpr (kConfig.general) draw_dropout(kept, step.head, first_query, first_key);
#pragma unroll
        for (int j = 0; j < kTiles; ++j) {
            const float2 offset = *reinterpret_cast<const float2*>(rows.offset + 8 * j + column);
#pragma unroll
            for (int m = 0; m < kKeyTiles; ++m) {
                float(&p)[4] = s[m][j];
                float slope[4] = {1, 1, 1, 1};
                const int query = first_query + 8 * j;
                const int key = first_key + 16 * m;
                if constexpr (kConfig.general) transform(p, slope, step.head, query, key, masked);
                if constexpr (kPredicates) exponentiate_large<T>(p, scale, rows, 8 * j + column);
                else exponentiate<T>(p, scale * kLog2E, offset);
                if (kPredicates && masked) zero_hidden(p, query, key);
                float4 out = {p[0] * slope[0], p[1] * slope[1], p[2] * slope[2], p[3] * slope[3]};
                if constexpr (kConfig.general) drop(p, out, kept[m], j);
                *handed_over(m, part * kTiles + j) = out;
            }
        }
    }

    /// dP^T becomes dS^T, in registers and, rounded, in shared memory: [keys][queries].
    __device__ __forceinline__ void compute_ds(Scores& s, const Step& step, int stage, int part, bool masked) const {
        const RowTile& rows = tiles.rows(stage);
        const float scale = tiles.ds_scale(step.head) * (1 / kPScale<T>);
        ptx::named_barrier_sync(barrier_of(part), 64);
        if (masked) compute_ds<true>(s, step, rows, part, scale);
        else compute_ds<false>(s, step, rows, part, scale);
    }
    template <bool kMasked>
    __device__ __forceinline__ void compute_ds(Scores& s, const Step& step, const RowTile& rows, int part,
                                               float scale) const {
        const int column = part * kPartQueries + lane_number() % 4 * 2;
        const int row = first_row() + lane_number() / 4;
        const float factor = tiles.launch.params.forward.keep_scale * scale;  // factor of a dP that dropout keeps
#pragma unroll
        for (int j = 0; j < kTiles; ++j) {
            const float2 delta = *reinterpret_cast<const float2*>(rows.delta + 8 * j + column);
#pragma unroll
            for (int m = 0; m < kKeyTiles; ++m) {
                float(&ds)[4] = s[m][j];
                const float4 from_p_warp = *handed_over(m, part * kTiles + j);
                const float p[4] = {from_p_warp.x, from_p_warp.y, from_p_warp.z, from_p_warp.w};
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const float d = (e % 2 == 0 ? delta.x : delta.y) * scale;
                    const bool dropped = kConfig.general && __float_as_int(p[e]) < 0;
                    ds[e] = fabsf(p[e]) * (dropped ? -d : fmaf(ds[e], factor, -d));
                }
                if constexpr (kMasked) {
                    zero_hidden(ds, step.tile * kBlockQ + 8 * j + column, tiles.work.first_key + row + 16 * m);
                }
                store_rounded<T>(tiles.ds_tile(), ds, row + 16 * m, part * kTiles + j);
            }
        }
    }

    __device__ static __forceinline__ int barrier_of(int part) { return 1 + part * Config::kPairs + pair(); }

    /// Shared memory of four elements of P^T on their way from one warp of the pair to the other.
    __device__ __forceinline__ float4* handed_over(int m, int tile) const {
        const int slot = ((pair() * kKeyTiles + m) * (kBlockQ / 8) + tile) * 32 + lane_number();
        return reinterpret_cast<float4*>(tiles.p_tile()) + slot;
    }

    __device__ __forceinline__ TransposedScores<T> scores(int head) const {
        const ForwardParams& p = tiles.launch.params.forward;
        const CtaWork& work = tiles.work;
        return {p, ScoreInputs(p, work.batch, head), work.sequence.len_kv - work.sequence.len_q,
                static_cast<std::uint32_t>(work.batch), static_cast<std::uint32_t>(head)};
    }
    __device__ __forceinline__ void transform(float (&s)[4], float (&slope)[4], int head, int query, int key,
                                              bool masked) const {
        const TransposedScores<T> scores = this->scores(head);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            if (masked && !tiles.sees(query + e % 2, key + e / 2 * 8)) continue;  // its bias may not exist
            const Scored scored = scores.transform(s[e], query + e % 2, key + e / 2 * 8);
            s[e] = scored.score;
            slope[e] = scored.slope;
        }
    }
    __device__ __forceinline__ void zero_hidden(float (&x)[4], int query, int key) const {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            if (!tiles.sees(query + e % 2, key + e / 2 * 8)) x[e] = 0;
        }
    }
    __device__ __forceinline__ void draw_dropout(DropoutBitsTransposed (&kept)[kKeyTiles], int head, int query,
                                                 int key) const {
        const TransposedScores<T> scores = this->scores(head);
        if (!scores.drops()) return;
#pragma unroll
        for (int m = 0; m < kKeyTiles; ++m) kept[m] = scores.draw(query, key + 16 * m, lane_number());
    }
    __device__ static __forceinline__ void drop(float (&p)[4], float4& out, const DropoutBitsTransposed& kept,
                                                int tile) {
        float* handed[4] = {&out.x, &out.y, &out.z, &out.w};
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            if (kept(tile, e)) continue;
            p[e] = 0;
            *handed[e] = __int_as_float(__float_as_int(*handed[e]) | static_cast<int>(0x80000000));
        }
    }

    /// Replaces Inf and NaN in Q and dO by 0, so that P = 0 times them is 0, once all warps have S and dP.
    __device__ __forceinline__ void replace_nonfinite_queries(int stage) const {
        __syncthreads();
        clean<T, kBlockQ, kHeadDim, kConfig.threads()>(tiles.q_tile(stage));
        clean<T, kBlockQ, kHeadDim, kConfig.threads()>(tiles.do_tile(stage));
        __syncthreads();
    }
    /// Loads Q and dO again, and adds the products of their Inf and NaN to the keys that their query sees.
    __device__ __forceinline__ void add_nonfinite_queries(const Scores& s, int index, int stage, int part,
                                                          int first_query, Sums& sums) const {
        __syncthreads();
        tiles.load_queries(index, stage);
        const bool p_warp = is_p_warp();
        char* const factors = p_warp ? tiles.p_tile() : tiles.ds_tile();
        const char* const rows = p_warp ? tiles.do_tile(stage) : tiles.q_tile(stage);
        if (p_warp) {
#pragma unroll
            for (int m = 0; m < kKeyTiles; ++m) {
#pragma unroll
                for (int j = 0; j < kTiles; ++j) {
                    store_rounded<T>(factors, s[m][j], first_row() + lane_number() / 4 + 16 * m, part * kTiles + j);
                }
            }
        }
        ptx::cp_async_wait<0>();
        __syncthreads();
#pragma unroll 1
        for (int q = part * kPartQueries; q < (part + 1) * kPartQueries; ++q) {
#pragma unroll
            for (int i = 0; i < 2 * kKeyTiles; ++i) {
                const int row = first_row() + lane_number() / 4 + 8 * i;
                if (!tiles.sees(first_query + q, tiles.work.first_key + row)) continue;
                const float factor = element<T>(factors, row, q);
#pragma unroll
                for (int n = 0; n < kHeadDim / 8; ++n) {
                    const float2 x = two_elements<T, kHeadDim>(rows, q, 8 * n + lane_number() % 4 * 2);
                    add_if_nonfinite(sums[i / 2][n], i % 2, factor, x);
                }
            }
        }
        __syncthreads();
    }

    /// Writes dV or dK of the pair's keys. A CTA with all heads and queries writes them rounded, through the shared
    /// memory of V or K, after a barrier of all threads. A CTA with a split of the heads, or a part of the queries,
    /// writes them unrounded to the workspace.
    __device__ __forceinline__ void store_sums(const Sums& sums, const Scale& scale) const {
        const Launch& launch = tiles.launch;
        const CtaWork& work = tiles.work;
        const ForwardParams& p = launch.params.forward;
        const bool p_warp = is_p_warp();
        const Rows& rows = p_warp ? launch.params.dv : launch.params.dk;
        if (rows.data == nullptr) return;
        float factor[kKeyTiles][2];
        scale.factors(factor, p_warp ? p.keep_scale : p.scale);
        if (work.sums_in_workspace()) {
            float* const to = tiles.partial_row(p_warp, first_row() + lane_number() / 4) + lane_number() % 4 * 2;
#pragma unroll
            for (int i = 0; i < 2 * kKeyTiles; ++i) {
                if (work.first_key + first_row() + lane_number() / 4 + 8 * i >= work.sequence.len_kv) continue;
#pragma unroll
                for (int n = 0; n < kHeadDim / 8; ++n) {
                    store_partial(to + 8 * i * kHeadDim + 8 * n, sums[i / 2][n], i % 2, factor[i / 2][i % 2],
                                  work.part > 0);
                }
            }
            return;
        }
        char* const tile = p_warp ? tiles.v_tile() : tiles.k_tile();
        stage<T, kHeadDim>(tile, sums, factor, first_row(), lane_number());
        __syncwarp();
        const std::int64_t offset = head_offset(rows, work.batch, work.sequence.first_kv, work.kv_head, sizeof(T));
        const Target target = target_of<T>(rows, offset, work.sequence.len_kv, p_warp ? p.head_dim_v : p.head_dim,
                                           p_warp ? launch.vector_dv : launch.vector_dk);
        store<kHeadDim, kConfig.keys_per_pair()>(tile, target, work.first_key, first_row(), lane_number());
    }
};

}  // namespace tessera::cuda::gradient
