// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/fa2/accumulators.cuh"
#include "cuda/fa2/inputs.cuh"
#include "cuda/tile/fragment.cuh"
#include "cuda/tile/warp_gemms.cuh"

namespace tessera::cuda::fa2 {

/// The loop over the key tiles. step() and run_full() give a row the same bits.
template <class T, Config kConfig>
struct Mainloop {
    static constexpr int kRowTiles = kConfig.row_tiles;
    static constexpr int kHeadDim = kConfig.head_dim;
    static constexpr bool kTwoStages = kConfig.stages == 2;
    using Scores = float[kRowTiles][kConfig.block_kv / 8][4];  // S, then P: [16 rows][8 keys][4]
    using Out = Accumulators<T, kConfig>;
    using Keys = typename Inputs<T, kConfig>::KeyLoader;

    const Inputs<T, kConfig> inputs;
    const Work& work;  // in shared memory, since registers are few
    const Scale scale;
    Queries<kHeadDim, kRowTiles, kConfig.q_in_registers> queries;  // when they are in registers

    /// Goes over all key tiles, in ascending order.
    __device__ __forceinline__ void run(Out& out) {
        const int count = work.tiles.count();
        if (count == 0) return;
        inputs.load_k(first_key(0), 0);
        if constexpr (kTwoStages) inputs.load_v(first_key(0), 0);
#pragma unroll 1
        for (int i = 0; i < count; ++i) {
            if (i == work.full_run.begin) i = run_full(i, out);
            if (i < count) step(i, out);
        }
    }

 private:
    __device__ __forceinline__ int first_key(int index) const { return (work.tiles.begin + index) * kConfig.block_kv; }
    __device__ static __forceinline__ int stage_of(int index) {
        return static_cast<int>(static_cast<unsigned>(index) % kConfig.stages);
    }

    /// Waits until the copies of all threads have arrived, and all threads are done with the previous tile.
    __device__ static __forceinline__ void wait_for_tile() {
        ptx::cp_async_wait<0>();
        __syncthreads();
    }

    /// Runs one key tile, with or without a mask.
    __device__ __forceinline__ void step(int index, Out& out) {
        const int stage = stage_of(index);
        const bool more = index + 1 < work.tiles.count();
        wait_for_tile();
        if constexpr (!kTwoStages) {
            inputs.load_v(first_key(index), 0);
        } else if (more) {
            inputs.load_k(first_key(index + 1), 1 - stage);
            inputs.load_v(first_key(index + 1), 1 - stage);
        }
        const bool visible = sees(first_key(index));
        Scores s;
        Rescaling rescaling[kRowTiles];
        if constexpr (kTwoStages) sanitize(index, stage);
        if (visible) {
            multiply_qk(s, stage, NothingBetween());
            online_softmax<true>(s, first_key(index), rescaling, out);
        }
        if constexpr (!kTwoStages) {
            wait_for_tile();
            if (more) inputs.load_k(first_key(index + 1), 0);
            sanitize(index, 0);
        }
        if (visible) exponentiate_and_multiply(s, first_key(index), stage, rescaling, out, NothingBetween());
    }

    /// Runs tiles from `index` to full_run.end, without a mask. Copies are issued between the mma: with two stages the
    /// next K and V during Q K^T; with one stage V during Q K^T, and the next K during P V. Returns the first tile that
    /// is left.
    __device__ __forceinline__ int run_full(int index, Out& out) {
#pragma unroll 1
        for (; index < work.full_run.end; ++index) {
            const int stage = stage_of(index);
            const bool more = index + 1 < work.tiles.count();
            wait_for_tile();
            const int key = first_key(index);
            const int next_key = key + kConfig.block_kv;
            typename Keys::Parts parts;
            Scores s;
            multiply_qk(s, stage, [&](int step) {
                constexpr int kSteps = kHeadDim / 16;
                constexpr int kForEach = kTwoStages ? kSteps / 2 : kSteps;  // steps for the copies of one tile
                if (kTwoStages && step == 0) parts = {inputs.k_tile(1 - stage), inputs.k(), next_key, more};
                if (kTwoStages && step == kForEach) parts = {inputs.v_tile(1 - stage), inputs.v(), next_key, more};
                if (!kTwoStages && step == 0) parts = {inputs.v_tile(0), inputs.v(), key, true};
                start<(Keys::kParts + kForEach - 1) / kForEach>(parts, step % kForEach);
            });
            ptx::cp_async_commit();
            Rescaling rescaling[kRowTiles];
            online_softmax<false>(s, key, rescaling, out);
            if constexpr (!kTwoStages) wait_for_tile();
            exponentiate_and_multiply(s, key, stage, rescaling, out, [&](int tile) {
                if constexpr (kTwoStages) return;
                if (tile == 0) parts = {inputs.k_tile(0), inputs.k(), next_key, more};
                constexpr int kSteps = kConfig.block_kv / 8;
                start<(Keys::kParts + kSteps - 1) / kSteps>(parts, tile);
            });
            if constexpr (!kTwoStages) ptx::cp_async_commit();
        }
        return index;
    }

    /// Starts the next kCount parts of a copy.
    template <int kCount>
    __device__ static __forceinline__ void start(typename Keys::Parts& parts, int step) {
#pragma unroll
        for (int part = step * kCount; part < min((step + 1) * kCount, Keys::kParts); ++part) parts.start(part);
    }

    /// Replaces Inf and NaN in a tile of V by 0 in the second run, unless all queries see the whole tile.
    __device__ __forceinline__ void sanitize(int index, int stage) const {
        if (!work.sanitizes || work.tiles.full(work.tiles.begin + index)) return;
        clean<T, kConfig.block_kv, kHeadDim, kConfig.threads()>(inputs.v_tile(stage));
        __syncthreads();
    }

    /// True if a row of the warp sees a key of the tile. Warps without such a row keep the bits of their rows.
    __device__ __forceinline__ bool sees(int first_key) const {
        const int first_query = work.q_begin + Position::of_thread<kConfig>().first_row;
        return work.band.first(first_query) < first_key + kConfig.block_kv &&
               work.band.last(first_query + kConfig.rows_per_warp() - 1) >= first_key;
    }

    /// S = Q K^T. `between`(i) is called in step i of 16 dims.
    template <class Between>
    __device__ __forceinline__ void multiply_qk(Scores& s, int stage, const Between& between) {
        const Position position = Position::of_thread<kConfig>();
        const auto k = MatrixAddress<kHeadDim>::chunks_first(inputs.k_tile(stage), position.lane);
        if constexpr (kConfig.q_in_registers) {
            cuda::multiply_qk<T>(s, queries, k, between);
        } else {
            decltype(queries) again(inputs.shared, position.first_row, position.lane);
            cuda::multiply_qk<T>(s, again, k, between);
        }
    }

    /// Turns Q K^T into scores, raises m to their maximum, and rescales O and l to it.
    template <bool kMasked>
    __device__ __forceinline__ void online_softmax(Scores& s, int first_key, Rescaling (&rescaling)[kRowTiles],
                                                   Out& out) const {
        score<kMasked>(s, first_key);
        OnlineSoftmax<T> rows[kRowTiles];
        bool large = false;
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
            rows[m] = out.rows(m);
            rescaling[m] = rows[m].update_max(rows[m].maxima(s[m]), scale);
            large |= rescaling[m].any_large();
        }
        if (any_lane(large)) {
#pragma unroll
            for (int m = 0; m < kRowTiles; ++m) rows[m].subtract(s[m], scale, rescaling[m]);
        }
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
            rows[m].rescale(rescaling[m]);
            out.set_rows(m, rows[m]);
            if (any_lane(rescaling[m].any())) out.rescale(m, rescaling[m]);  // times 1 changes nothing
        }
    }

    /// Built where it is used, since registers are few in the loop.
    __device__ __forceinline__ HeadScores<T> head() const {
        return {inputs.launch.params, work.sequence, work.batch, work.head, work.scores};
    }

    template <bool kMasked>
    __device__ __forceinline__ void score(Scores& s, int first_key) const {
        if constexpr (!kMasked && !kConfig.general) return;
        const Position position = Position::of_thread<kConfig>();
        const int query = work.q_begin + position.row();
        const int key = first_key + position.column();
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
            if constexpr (kConfig.general) head().template transform<kMasked>(s[m], work.band, query + 16 * m, key);
            else apply_mask(s[m], work.band, query + 16 * m, key);
        }
    }

    /// Turns S into P, and O += P V. The exponentials of a step of 16 keys overlap with the mma of the previous step.
    /// `between`(i) is called before columns 8 * i ... of P.
    template <class Between>
    __device__ __forceinline__ void exponentiate_and_multiply(Scores& s, int first_key, int stage,
                                                              const Rescaling (&rescaling)[kRowTiles], Out& out,
                                                              const Between& between) {
        float part[kRowTiles][2] = {};
        DropoutBits kept[kRowTiles];
        const int lane = Position::of_thread<kConfig>().lane;
        const auto v = MatrixAddress<kHeadDim>::rows_first(inputs.v_tile(stage), 0, lane);
        multiply_pv<T, kHeadDim>(out.o, s, v, [&](int tile) {
#pragma unroll
            for (int m = 0; m < kRowTiles; ++m) {
                OnlineSoftmax<T>::exponentiate(s[m][tile], rescaling[m], part[m]);
                if constexpr (kConfig.general) drop(s[m][tile], kept[m], m, first_key, tile);
            }
            between(tile);
        });
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
            OnlineSoftmax<T> rows = out.rows(m);
            rows.add(part[m]);
            out.set_rows(m, rows);
        }
    }

    /// Elements of P of 16 rows x 8 keys that dropout drops become 0. `kept` is drawn for 64 keys at once.
    __device__ __forceinline__ void drop(float (&p)[4], DropoutBits& kept, int m, int first_key, int tile) const {
        const HeadScores<T> scores = head();
        if (!scores.drops()) return;
        const Position position = Position::of_thread<kConfig>();
        const int query = work.q_begin + position.row() + 16 * m;
        if (tile % 8 == 0) kept = scores.draw(query, first_key + 8 * tile, position.lane);
        HeadScores<T>::drop(p, kept, tile % 8);
    }
};

}  // namespace tessera::cuda::fa2
