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
#include "cuda/tile/output.cuh"

namespace tessera::cuda::gradient {

template <class T, Config kConfig>
struct KeyLoop : KeyThread<T, kConfig> {
    using Base = KeyThread<T, kConfig>;
    using Base::add_special;
    using Base::element;
    using Base::elements;
    using Base::first_row;
    using Base::inputs;
    using Base::kHeadDim;
    using Base::kKeyTiles;
    using Base::kTiles;
    using Base::lane;
    using Base::makes_weights;
    using Base::multiply;
    using Base::sees;
    using Base::store_rounded;
    using Base::turns;
    using Base::unit_of;
    using Base::work;
    using typename Base::Scores;
    using typename Base::Sums;

    /// All steps. Returns whether any of them was masked.
    template <bool kWaits>
    __device__ __forceinline__ bool run(Sums& sums) const {
        const int count = work.own.count() * inputs.launch.params.forward.group;
        bool masked = false;
        if (count > 0) inputs.load_queries(0, 0);
#pragma unroll 1
        for (int i = 0; i < count; ++i) {
            const int stage = i % Config::kStages;
            ptx::cp_async_wait<0>();
            __syncthreads();
            if (i + 1 < count) inputs.load_queries(i + 1, 1 - stage);
            if constexpr (std::is_same_v<T, __half>) change_unit(i, sums);
            masked |= step<kWaits>(i, stage, sums);
        }
        if (count == 0) return false;
        __syncthreads();
        if (kWaits && work.adds_dq(inputs.launch)) turns().publish(Step(inputs.launch, work, count - 1));
        return masked;
    }

 private:
    /// From one head of a group to the next: dK is a sum over both.
    __device__ __forceinline__ void change_unit(int index, Sums& sums) const {
        if (index == 0 || index % work.own.count() != 0 || makes_weights()) return;
        const int head = Step(inputs.launch, work, index).head;
        const float change = unit_of(head) / unit_of(head - 1);
        multiply(sums, change);
    }

    template <bool kWaits>
    __device__ __forceinline__ bool step(int index, int stage, Sums& sums) const {
        const Step step(inputs.launch, work, index);
        const int first_query = step.tile * kBlockQ;
        const bool masked =
            first_query + kBlockQ > work.member.len_q ||
            !work.visible.full(first_query, first_query + kBlockQ, work.first_key, work.first_key + kConfig.block_kv());
        Scores s;
        const bool weights = makes_weights();
        {
            Queries<kHeadDim, kKeyTiles, false> rows(weights ? inputs.k_tile() : inputs.v_tile(), first_row(), lane());
            const auto columns =
                MatrixAddress<kHeadDim>::chunks_first(weights ? inputs.q_tile(stage) : inputs.do_tile(stage), lane());
            cuda::multiply_qk<T>(s, rows, columns);
        }
        const KeyScores<T, kConfig> scores{{inputs, work}};
        if (weights) scores.make_weights(s, step, stage, masked);
        else scores.make_ds(s, step, stage, masked);
        const bool cleaned = work.guarded && masked;
        if (cleaned) clean_queries(stage);
        {
            const auto rows =
                MatrixAddress<kHeadDim>::rows_first(weights ? inputs.do_tile(stage) : inputs.q_tile(stage), 0, lane());
            cuda::multiply_pv<T, kHeadDim>(sums, s, rows);
        }
        if (kWaits && work.adds_dq(inputs.launch)) {
            if (index > 0) turns().publish(Step(inputs.launch, work, index - 1));
            turns().wait(step);
        }
        __syncthreads();
        if (cleaned) restore_queries(s, index, stage, first_query, sums);
        if (work.adds_dq(inputs.launch)) KeyDq<T, kConfig>{{inputs, work}}.add(step, first_query, masked);
        return masked;
    }

    /// Takes Inf and NaN out of Q and dO, so that 0 times them is 0; all warps are done with the first products then.
    __device__ __forceinline__ void clean_queries(int stage) const {
        __syncthreads();
        clean<T, kBlockQ, kHeadDim, kConfig.threads()>(inputs.q_tile(stage));
        clean<T, kBlockQ, kHeadDim, kConfig.threads()>(inputs.do_tile(stage));
        __syncthreads();
    }

    /// Brings them back, and adds to sums what they are to the keys that their query sees. After a barrier of all
    /// threads.
    __device__ __forceinline__ void restore_queries(const Scores& s, int index, int stage, int first_query,
                                                    Sums& sums) const {
        inputs.load_queries(index, stage);
        const bool weights = makes_weights();
        char* const factors = weights ? inputs.weights() : inputs.ds();
        const char* const rows = weights ? inputs.do_tile(stage) : inputs.q_tile(stage);
        if (weights) {
#pragma unroll
            for (int m = 0; m < kKeyTiles; ++m) {
#pragma unroll
                for (int j = 0; j < kTiles; ++j) {
                    store_rounded(factors, s[m][j], first_row() + lane() / 4 + 16 * m, j);
                }
            }
        }
        ptx::cp_async_wait<0>();
        __syncthreads();
#pragma unroll 1
        for (int q = 0; q < kBlockQ; ++q) {
#pragma unroll
            for (int i = 0; i < 2 * kKeyTiles; ++i) {
                const int row = first_row() + lane() / 4 + 8 * i;
                if (!sees(first_query + q, work.first_key + row)) continue;
                const float factor = element(factors, row, q);
#pragma unroll
                for (int n = 0; n < kHeadDim / 8; ++n) {
                    add_special(sums[i / 2][n], i % 2, factor, elements(rows, q, 8 * n + lane() % 4 * 2));
                }
            }
        }
    }

 public:
    /// dV and dK of the pair's keys, rounded, by way of the shared memory of V and K. After a barrier of all threads.
    __device__ __forceinline__ void store_sums(const Sums& sums) const {
        const Launch& launch = inputs.launch;
        const ForwardParams& p = launch.params.forward;
        const bool weights = makes_weights();
        const Rows& rows = weights ? launch.params.dv : launch.params.dk;
        if (rows.data == nullptr) return;
        const float unit =
            weights ? p.keep_scale * (1 / kWeightUnit<T>) : p.scale / unit_of(work.kv_head * p.group + p.group - 1);
        float factor[kKeyTiles][2];
#pragma unroll
        for (int m = 0; m < kKeyTiles; ++m) factor[m][0] = factor[m][1] = unit;
        char* const tile = weights ? inputs.v_tile() : inputs.k_tile();
        stage<T, kHeadDim>(tile, sums, factor, first_row(), lane());
        __syncwarp();
        const std::int64_t offset = head_offset(rows, work.batch, work.member.first_kv, work.kv_head, sizeof(T));
        const Target target = target_of<T>(rows, offset, work.member.len_kv, weights ? p.head_dim_v : p.head_dim,
                                           weights ? launch.vector_dv : launch.vector_dk);
        store<kHeadDim, kConfig.keys_per_pair()>(tile, target, work.first_key, first_row(), lane());
    }
};

}  // namespace tessera::cuda::gradient
