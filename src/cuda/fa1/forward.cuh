// SPDX-License-Identifier: Apache-2.0
//
// FlashAttention (Dao, 2022), algorithm 1: K/V blocks outer, query tiles inner. O, m and l of every query live in
// memory: each key block reads, rescales and writes back all of them. The warps of a group split the keys of the block,
// so each has a part of every sum, and they add the parts through shared memory.
#pragma once

#include "cuda/fa1/combine.cuh"
#include "cuda/shared/start.cuh"
#include "cuda/tile/output.cuh"
#include "cuda/tile/score.cuh"
#include "cuda/tile/sink.cuh"
#include "cuda/tile/warp_gemms.cuh"

namespace tessera::cuda::fa1 {

/// The work of a CTA on one head, and what stays the same over its key blocks.
template <class T, Config kConfig>
struct Head {
    static constexpr int kHeadDim = kConfig.head_dim;
    const Launch& launch;
    const Work& work;
    const Shared<kConfig>& shared;
    const Band32 band;
    const HeadScores<T> scores;
    const int own;  // query tiles own, own + stride(), ... belong to the group

    __device__ Head(const Launch& launch, const Work& work, const Shared<kConfig>& shared)
        : launch(launch),
          work(work),
          shared(shared),
          band(work.band),
          scores(launch.params, work.sequence, work.batch, work.head),
          own(work.part * kConfig.groups + shared.group) {}

    __device__ __forceinline__ int stride() const { return launch.parts * kConfig.groups; }

    // The sources are computed for every use: the registers that would keep them are needed in between.
    __device__ static __forceinline__ Work this_block(const Launch& launch) {
        return {launch, static_cast<unsigned>(ptx::opaque(static_cast<int>(blockIdx.x))), kConfig.block_q()};
    }
    __device__ __forceinline__ Source queries() const {
        const Rows& rows = launch.params.q;
        const std::int64_t from = offset(rows, work.sequence.first_q, ptx::opaque(work.head));
        return source_of<T>(rows, from, work.sequence.len_q, launch.params.head_dim, launch.vector_q);
    }
    __device__ __forceinline__ Source keys(const Rows& rows, int dim, bool vector) const {
        const std::int64_t from = offset(rows, work.sequence.first_kv, ptx::opaque(work.head) / launch.params.group);
        return source_of<T>(rows, from, work.sequence.len_kv, dim, vector);
    }
    __device__ __forceinline__ Source k() const {
        return keys(launch.params.k, launch.params.head_dim, launch.vector_k);
    }
    __device__ __forceinline__ Source v() const {
        return keys(launch.params.v, launch.params.head_dim_v, launch.vector_v);
    }
    __device__ __forceinline__ std::int64_t offset(const Rows& rows, std::int64_t first_row, int head) const {
        return head_offset(rows, work.batch, first_row, head, sizeof(T));
    }
    /// The group's query tiles that see one of keys [begin, end).
    __device__ __forceinline__ QueryTiles tiles_of(int begin, int end) const {
        return {max(begin - band.high, 0), min(end - band.low, work.sequence.len_q), kConfig.block_q(), own, stride()};
    }
    /// O, m and l of a tile before this key block.
    __device__ __forceinline__ Stored<kConfig> stored_of(int first_key, int tile) const {
        const bool begun = first_key > max(band.first(tile * kConfig.block_q()), 0);  // it has seen keys before
        return {launch, work, shared, tile, begun};
    }
    /// Copies a tile of Q to shared memory, and prefetches its O, m and l to the L2.
    __device__ __forceinline__ void fetch(int first_key, int tile) const {
        stored_of(first_key, tile).prefetch(shared.lane);
        load<kConfig.block_q(), kHeadDim, kGroupThreads>(shared.q(), queries(), tile * kConfig.block_q(),
                                                         static_cast<int>(threadIdx.x) % kGroupThreads);
        ptx::cp_async_commit();
    }

    /// Copies a block of K and V. All threads of the CTA take part.
    __device__ __forceinline__ void load_kv(int first_key) const {
        __syncthreads();                                                // all threads are done with the previous block
        const int thread = ptx::opaque(static_cast<int>(threadIdx.x));  // so that no address is kept in a register
        load<kConfig.block_kv, kHeadDim, kConfig.threads()>(shared.k(), k(), first_key, thread);
        load<kConfig.block_kv, kHeadDim, kConfig.threads()>(shared.v(), v(), first_key, thread);
        ptx::cp_async_commit();
        ptx::cp_async_wait<0>();
        __syncthreads();
        const int end = first_key + kConfig.block_kv;
        if (band.full(0, work.sequence.len_q, first_key, end)) return;
        if (clean<T, kConfig.block_kv, kHeadDim, kConfig.threads()>(shared.v())) shared.replaced() = true;
        __syncthreads();
    }

    /// Turns S of 16 rows and the warp's keys into P.
    template <bool kMasked, int kTiles>
    __device__ __forceinline__ void probabilities(float (&s)[kTiles][4], int row, int key, float2 (&ml)[2]) const {
        if constexpr (kConfig.general) {
            scores.template transform<kMasked>(s, band, row, key);
        } else {
#pragma unroll
            for (int j = 0; j < kTiles; ++j) {
#pragma unroll
                for (int e = 0; e < 4; ++e) s[j][e] = __fmul_rn(s[j][e], scores.params.scale);
            }
            if constexpr (kMasked) apply_mask(s, band, row, key);
        }
        exponentiate<T>(s, ml);
        if constexpr (kConfig.general) {
            if (scores.drops()) scores.drop(s, row, key, shared.lane);
        }
    }

    /// Computes O, m and l of the warp's own keys.
    template <bool kMasked>
    __device__ __forceinline__ void multiply(Parts<kConfig>& parts, int q_begin, int first_key) const {
        constexpr int kKeys = kConfig.keys_per_warp();
        constexpr int kRowBytes = kHeadDim * 2;
        const int warp_key = shared.warp * kKeys;
        const int lane = ptx::opaque(shared.lane);  // so that no address is kept between the steps
        float s[kConfig.row_tiles][kKeys / 8][4];   // S, then P: [16 rows][8 keys][4]
        Queries<kHeadDim, kConfig.row_tiles, false> queries(shared.q(), 0, lane);
        multiply_qk<T>(s, queries, MatrixAddress<kHeadDim>::chunks_first(shared.k() + warp_key * kRowBytes, lane));
#pragma unroll
        for (int m = 0; m < kConfig.row_tiles; ++m) {
            const int row = 16 * m + shared.lane / 4;  // row in the tile
            float2 ml[2];
            probabilities<kMasked>(s[m], q_begin + row, first_key + warp_key + shared.lane % 4 * 2, ml);
            if (shared.lane % 4 != 0) continue;
            shared.ml(shared.warp, row) = ml[0];
            shared.ml(shared.warp, row + 8) = ml[1];
        }
        const auto v = MatrixAddress<kHeadDim>::rows_first(shared.v(), warp_key, lane);
        multiply_pv<T, kHeadDim>(parts.o, s, v.swapped(2 * shared.warp));
    }

    /// One query tile and one key block, lines 8 to 13 of the algorithm. `next`: the group's next tile, if it is below
    /// `end`.
    __device__ __forceinline__ void step(int first_key, int tile, int next, int end) const {
        const int q_begin = tile * kConfig.block_q();
        ptx::cp_async_wait<0>();
        shared.sync();  // Q has arrived, and all warps are done with the exchange of the last step
        Parts<kConfig> parts;
        if (band.full(q_begin, q_begin + kConfig.block_q(), first_key, first_key + kConfig.block_kv)) {
            multiply<false>(parts, q_begin, first_key);
        } else {
            multiply<true>(parts, q_begin, first_key);
        }

        const Stored<kConfig> stored = stored_of(first_key, ptx::opaque(tile));
        Old<kConfig> old[kConfig.rounds()];
        old[0].read(stored, 0);
        Combination combination{.ml = stored.read_ml(shared.lane % kConfig.block_q())};
        Combination rows[kConfig.row_tiles][2];
        parts.send(shared, 0);
#pragma unroll
        for (int round = 0; round < kConfig.rounds(); ++round) {
            const int unit = round * kConfig.units_at_once();
            const bool last = round + 1 == kConfig.rounds();
            if (!last) old[round + 1].read(stored, unit + kConfig.units_at_once());
            shared.sync();  // all warps have sent their sums, and have read Q
            if (round == 0) {
                if (next < end) fetch(first_key, next);
                combine_rows(combination, rows, stored);
            }
            parts.combine(shared, unit, old[round], rows, stored);
            if (last) break;
            shared.sync();  // all warps have received theirs
            parts.send(shared, unit + kConfig.units_at_once());
        }
    }

    /// Computes the factors of the tile's rows. Each lane computes those of one row, from the row's old m and l, and
    /// receives those of its own rows, [16 rows][2]. One warp writes m and l back.
    __device__ __forceinline__ void combine_rows(Combination& of_lane, Combination (&rows)[kConfig.row_tiles][2],
                                                 const Stored<kConfig>& stored) const {
        const int row = shared.lane % kConfig.block_q();
        float2 of_warps[kWarps];
#pragma unroll
        for (int w = 0; w < kWarps; ++w) of_warps[w] = shared.ml(partner(shared.warp, w), row);
        of_lane.set(of_lane.ml, of_warps);
        if (shared.warp == 0) stored.ml[row] = of_lane.ml;
#pragma unroll
        for (int m = 0; m < kConfig.row_tiles; ++m) {
#pragma unroll
            for (int r = 0; r < 2; ++r) rows[m][r] = of_lane.of_lane(16 * m + 8 * r + shared.lane / 4);
        }
    }
};

/// The epilogue of one query tile: rounds O, and writes O and LSE.
template <class T, Config kConfig>
__device__ __forceinline__ void finish(const Head<T, kConfig>& head, int tile) {
    const Shared<kConfig>& shared = head.shared;
    const ForwardParams& p = head.launch.params;
    const Sequence& sequence = head.work.sequence;
    const int q_begin = tile * kConfig.block_q();
    const bool begun = head.band.any(q_begin, min(q_begin + kConfig.block_q(), sequence.len_q));
    const Stored<kConfig> stored(head.launch, head.work, shared, tile, begun);
    const auto with_sink_of_row = [&](int row) {
        const float2 ml = stored.read_ml(row);
        return with_sink_of(p, head.work.head, finite_max(ml.x) + logf(ml.y * exp2f(kExponentOffset<T>)));
    };
    const auto factor = [&](int row) {
        return p.sinks == nullptr ? p.keep_scale : p.keep_scale * with_sink_of_row(row).factor;
    };
#pragma unroll
    for (int unit = 0; unit < kConfig.units(); ++unit) {
        constexpr int kUnitsOfRows = kConfig.head_dim / 64;
        const int row = unit / kUnitsOfRows * 16 + shared.lane / 4;
#pragma unroll
        for (int t = 0; t < 2; ++t) {
            const float4 o = stored.read_o(unit, t);
            const float factors[2] = {factor(row), factor(row + 8)};
            const int chunk = unit % kUnitsOfRows * 8 + 2 * shared.warp + t;
            const auto to = [&](int r) {
                char* at = shared.q() + chunk_offset<kConfig.head_dim>(row + 8 * r, chunk) + shared.lane % 4 * 4;
                return reinterpret_cast<std::uint32_t*>(at);
            };
            *to(0) = ptx::pack<T>(o.x * factors[0], o.y * factors[0]);
            *to(1) = ptx::pack<T>(o.z * factors[1], o.w * factors[1]);
        }
    }
    shared.sync();
    const Target target = target_of<T>(p.o, head.offset(p.o, sequence.first_q, head.work.head), sequence.len_q,
                                       p.head_dim_v, head.launch.vector_o);
    constexpr int kRows = kConfig.block_q() / kWarps;
    if (shared.replaced()) {
        restore<T, kConfig.head_dim, kRows>(shared.q(), head.v(), head.band, q_begin, shared.warp * kRows, shared.lane);
    }
    store<kConfig.head_dim, kRows>(shared.q(), target, q_begin, shared.warp * kRows, shared.lane);
    const int row = shared.lane + 32 * shared.warp;
    if (p.lse.data != nullptr && row < kConfig.block_q() && q_begin + row < sequence.len_q) {
        const std::int64_t offset =
            head_offset(p.lse, head.work.batch, sequence.first_q, head.work.head, sizeof(float));
        reinterpret_cast<float*>(p.lse.data + offset)[(q_begin + row) * p.lse.row] = with_sink_of_row(row).lse;
    }
    shared.sync();  // all warps have read the tile in shared memory
}

/// The loops of the algorithm, over key blocks, then over the query tiles that see them.
template <class T, Config kConfig>
__device__ __forceinline__ void attend(const Launch& launch, const Shared<kConfig>& shared) {
    const Work work = Head<T, kConfig>::this_block(launch);
    const Head<T, kConfig> head(launch, work, shared);
    const Range keys = work.band.kv_range(0, work.sequence.len_q);
    const int end = static_cast<int>(keys.end);
    const int first_block = static_cast<int>(keys.begin) / kConfig.block_kv;
    for (int first_key = first_block * kConfig.block_kv; first_key < end; first_key += kConfig.block_kv) {
        const QueryTiles tiles = head.tiles_of(first_key, min(first_key + kConfig.block_kv, work.sequence.len_kv));
        if (tiles.begin < tiles.end) head.fetch(first_key, tiles.begin);
        head.load_kv(first_key);
        for (int tile = tiles.begin; tile < tiles.end; tile += head.stride()) {
            head.step(first_key, tile, tile + head.stride(), tiles.end);
        }
    }
}

/// The epilogue of all query tiles.
template <class T, Config kConfig>
__device__ __forceinline__ void finish(const Launch& launch, const Shared<kConfig>& shared) {
    const Work work = Head<T, kConfig>::this_block(launch);
    const Head<T, kConfig> head(launch, work, shared);
    const QueryTiles tiles(0, work.sequence.len_q, kConfig.block_q(), head.own, head.stride());
    for (int tile = tiles.begin; tile < tiles.end; tile += head.stride()) finish(head, tile);
}

template <class T, class Shape>
__global__ void __launch_bounds__(Shape::kConfig.threads(), 1) forward_kernel(const __grid_constant__ Launch launch) {
    constexpr Config kConfig = Shape::kConfig;
    extern __shared__ __align__(128) char memory[];
    const Shared<kConfig> shared(memory);
    if (threadIdx.x == 0) shared.replaced() = false;

    attend<T>(launch, shared);
    __syncthreads();  // one warp of the group writes m and l, all read them
    finish<T>(launch, shared);
}

template <class T, class Shape>
cudaError_t start_forward(const Launch& launch, cudaStream_t stream) {
    static_assert(Shapes::kHas<Shape>, "not in the list of config.h");
    constexpr Config kConfig = Shape::kConfig;
    const std::int64_t blocks = launch.params.batch * launch.params.heads_q * launch.parts;
    return start(forward_kernel<T, Shape>, blocks, kConfig.threads(), kConfig.shared_bytes(), launch, stream);
}

}  // namespace tessera::cuda::fa1
