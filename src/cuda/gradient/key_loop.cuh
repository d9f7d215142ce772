// SPDX-License-Identifier: Apache-2.0
//
// The step of the backward: a block of keys meets a tile of queries. Keys are the rows of the products, so that P and
// dS are multiplied with dO and Q from the registers that they were made in. Warps work in pairs, on the same keys:
//
//   weights warp     S^T = K Q^T,   P^T = exp2(S^T - LSE),     dV += P^T dO
//   scores warp     dP^T = V dO^T,  dS^T = P^T (dP^T - delta),  dK += dS^T Q
//
// so that one accumulator is all that a warp holds, whichever it is. Then all warps make dQ = dS K.
#pragma once

#include "cuda/gradient/key_dq.cuh"
#include "cuda/gradient/key_scores.cuh"
#include "cuda/gradient/key_units.cuh"
#include "cuda/tile/output.cuh"

namespace tessera::cuda::gradient {

template <class T, Config kConfig>
struct KeyLoop : KeyThread<T, kConfig> {
    using Base = KeyThread<T, kConfig>;
    using Base::add_nonfinite;
    using Base::element;
    using Base::elements;
    using Base::first_row;
    using Base::inputs;
    using Base::kHeadDim;
    using Base::kKeyTiles;
    using Base::kPartQueries;
    using Base::kParts;
    using Base::kTiles;
    using Base::lane;
    using Base::makes_weights;
    using Base::sees;
    using Base::store_rounded;
    using Base::turns;
    using Base::unit_of;
    using Base::work;
    using typename Base::Scores;
    using typename Base::Sums;
    using Units = KeyUnits<T, kKeyTiles>;

    /// Everything that the block of keys has to do. `to_change`: `work`.
    __device__ __forceinline__ void run_block(KeyWork& to_change) const {
        inputs.load_k();
        inputs.load_v();
        ptx::cp_async_commit();
        Sums sums;
        Units units;
        for (;;) {
            Base::clear(sums);
            units = Units(makes_weights());
            const bool masked = run(sums, units);
            // Hidden Inf and NaN of Q and dO are rare: only when some have come through is the work done again without
            // them.
            if (work.guarded || !masked || !__syncthreads_or(Base::poisoned(sums))) break;
            if (threadIdx.x == 0) to_change.guarded = true;
            __syncthreads();
        }
        ptx::cp_async_wait<0>();
        __syncthreads();
        store_sums(sums, units);
    }

 private:
    /// All steps. Returns whether any of them was masked.
    __device__ __forceinline__ bool run(Sums& sums, Units& units) const {
        const int count = work.own.count() * work.heads;
        bool masked = false;
        if (count > 0) inputs.load_queries(0, 0);
#pragma unroll 1
        for (int i = 0; i < count; ++i) {
            const int stage = i % kConfig.stages;
            ptx::cp_async_wait<0>();
            __syncthreads();
            masked |= step(i, count, stage, sums, units);
        }
        if (count == 0) return false;
        __syncthreads();
        if (work.adds_dq(inputs.launch)) turns().publish(Step(inputs.launch, work, count - 1));
        return masked;
    }

    __device__ __forceinline__ bool step(int index, int count, int stage, Sums& sums, Units& units) const {
        const Step step(inputs.launch, work, index);
        const int first_query = step.tile * kBlockQ;
        const bool masked =
            first_query + kBlockQ > work.sequence.len_q ||
            !work.visible.full(first_query, first_query + kBlockQ, work.first_key, work.first_key + kConfig.block_kv());
        const bool cleaned = work.guarded && masked;
#pragma unroll 1
        for (int part = 0; part < kParts; ++part) {
            Scores s;
            make_scores(s, step, stage, part, masked);
            if constexpr (Units::kHeld) {
                if (!makes_weights()) units.hold(s, sums, unit_of(step.head));
            }
            if (cleaned) clean_queries(stage);
            const auto rows = MatrixAddress<kHeadDim>::rows_first(
                makes_weights() ? inputs.do_tile(stage) : inputs.q_tile(stage), part * kPartQueries, lane());
            cuda::multiply_pv<T, kHeadDim>(sums, s, rows);
            if (cleaned) restore_queries(s, index, stage, part, first_query, sums);
            // Here, where the two warps of a pair are at different work, and not after the barrier.
            if (part == 0 && index + 1 < count) inputs.load_queries(index + 1, (stage + 1) % kConfig.stages);
        }
        if (work.adds_dq(inputs.launch)) {
            if (index > 0) turns().publish(Step(inputs.launch, work, index - 1));
            turns().wait(step);
        }
        __syncthreads();
        if (work.adds_dq(inputs.launch)) KeyDq<T, kConfig>{{inputs, work}}.add(step, first_query, masked);
        return masked;
    }

    /// The first product of the warp, and what it makes of it, for a part of the queries.
    __device__ __forceinline__ void make_scores(Scores& s, const Step& step, int stage, int part, bool masked) const {
        const bool weights = makes_weights();
        Queries<kHeadDim, kKeyTiles, false> rows(weights ? inputs.k_tile() : inputs.v_tile(), first_row(), lane());
        auto columns =
            MatrixAddress<kHeadDim>::chunks_first(weights ? inputs.q_tile(stage) : inputs.do_tile(stage), lane());
        columns.move(part * kPartQueries * kHeadDim * 2);
        cuda::multiply_qk<T>(s, rows, columns);
        const KeyScores<T, kConfig> scores{{inputs, work}};
        if (weights) scores.make_weights(s, step, stage, part, masked);
        else scores.make_ds(s, step, stage, part, masked);
    }

    /// Takes Inf and NaN out of Q and dO, so that 0 times them is 0; all warps are done with the first products then.
    __device__ __forceinline__ void clean_queries(int stage) const {
        __syncthreads();
        clean<T, kBlockQ, kHeadDim, kConfig.threads()>(inputs.q_tile(stage));
        clean<T, kBlockQ, kHeadDim, kConfig.threads()>(inputs.do_tile(stage));
        __syncthreads();
    }

    /// Brings them back, and adds to sums what they are to the keys that their query sees.
    __device__ __forceinline__ void restore_queries(const Scores& s, int index, int stage, int part, int first_query,
                                                    Sums& sums) const {
        __syncthreads();
        inputs.load_queries(index, stage);
        const bool weights = makes_weights();
        char* const factors = weights ? inputs.weights() : inputs.ds();
        const char* const rows = weights ? inputs.do_tile(stage) : inputs.q_tile(stage);
        if (weights) {
#pragma unroll
            for (int m = 0; m < kKeyTiles; ++m) {
#pragma unroll
                for (int j = 0; j < kTiles; ++j) {
                    store_rounded(factors, s[m][j], first_row() + lane() / 4 + 16 * m, part * kTiles + j);
                }
            }
        }
        ptx::cp_async_wait<0>();
        __syncthreads();
#pragma unroll 1
        for (int q = part * kPartQueries; q < (part + 1) * kPartQueries; ++q) {
#pragma unroll
            for (int i = 0; i < 2 * kKeyTiles; ++i) {
                const int row = first_row() + lane() / 4 + 8 * i;
                if (!sees(first_query + q, work.first_key + row)) continue;
                const float factor = element(factors, row, q);
#pragma unroll
                for (int n = 0; n < kHeadDim / 8; ++n) {
                    add_nonfinite(sums[i / 2][n], i % 2, factor, elements(rows, q, 8 * n + lane() % 4 * 2));
                }
            }
        }
        __syncthreads();
    }

    /// dV and dK of the pair's keys, rounded, by way of the shared memory of V and K. After a barrier of all threads.
    __device__ __forceinline__ void store_sums(const Sums& sums, const Units& units) const {
        const Launch& launch = inputs.launch;
        const ForwardParams& p = launch.params.forward;
        const bool weights = makes_weights();
        const Rows& rows = weights ? launch.params.dv : launch.params.dk;
        if (rows.data == nullptr) return;
        float factor[kKeyTiles][2];
        units.factors(factor, weights ? p.keep_scale : p.scale);
        if (work.shares > 1) {
            float* const to = this->share_row(weights, first_row() + lane() / 4) + lane() % 4 * 2;
#pragma unroll
            for (int i = 0; i < 2 * kKeyTiles; ++i) {
                if (work.first_key + first_row() + lane() / 4 + 8 * i >= work.sequence.len_kv) continue;
#pragma unroll
                for (int n = 0; n < kHeadDim / 8; ++n) {
                    Base::put_two(to + 8 * i * kHeadDim + 8 * n, sums[i / 2][n], i % 2, factor[i / 2][i % 2]);
                }
            }
            return;
        }
        char* const tile = weights ? inputs.v_tile() : inputs.k_tile();
        stage<T, kHeadDim>(tile, sums, factor, first_row(), lane());
        __syncwarp();
        const std::int64_t offset = head_offset(rows, work.batch, work.sequence.first_kv, work.kv_head, sizeof(T));
        const Target target = target_of<T>(rows, offset, work.sequence.len_kv, weights ? p.head_dim_v : p.head_dim,
                                           weights ? launch.vector_dv : launch.vector_dk);
        store<kHeadDim, kConfig.keys_per_pair()>(tile, target, work.first_key, first_row(), lane());
    }
};

}  // namespace tessera::cuda::gradient
