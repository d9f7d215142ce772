// SPDX-License-Identifier: Apache-2.0
//
// The gradient of a bias: dS = P (dP - delta), summed over the dimensions in which the bias has one element. A thread
// block owns a tile of 128 x 128 elements of the bias, in registers, and goes over all score tiles that it was added
// to, in a fixed order: each step computes S and dP of one tile anew. No two thread blocks share a sum.
//
//     producer     one thread decides the steps, and loads their Q, dO, K and V
//     consumers    two warpgroups, 64 queries each
#pragma once

#include "cuda/fa3/backward/common/fp16_scale.cuh"
#include "cuda/fa3/backward/common/mma.cuh"
#include "cuda/fa3/backward/common/pair.cuh"
#include "cuda/fa3/backward/common/wait.cuh"
#include "cuda/fa3/backward/launch.hpp"
#include "cuda/gradient/after/bias_task.cuh"
#include "cuda/shared/start.cuh"
#include "cuda/tile/fragment.cuh"
#include "cuda/tile/head_bias.cuh"
#include "cuda/tile/pipeline.cuh"
#include "cuda/tile/score.cuh"
#include "cuda/tile/sequence.cuh"
#include "cuda/tile/tma_copy.cuh"

namespace tessera::cuda::fa3::backward {

inline constexpr int kBiasTile = 128;  ///< queries and keys of a tile of the bias

/// A tile of scores that a tile of the bias was added to.
struct BiasStep {
    enum Kind { tile, store, end };  ///< store: the tile of the bias is complete; end: there is no other
    Kind kind = tile;
    gradient::BiasTask task;  ///< the tile of the bias
    Sequence sequence;
    Band32 band;
    int batch, head, query, key;  ///< query, key: the tile's first ones

    /// Are all pairs of 64 queries visible?
    __device__ __forceinline__ bool unmasked(int first) const {
        return first + 64 <= sequence.len_q && band.full(first, first + 64, key, key + kBiasTile);
    }
};

template <Config kConfig>
struct alignas(1024) BiasGradientShared {
    static constexpr int kStages = kConfig.head_dim <= 64 ? 2 : 1;
    static constexpr int kBlocks = kBiasTile / kConfig.block_q;
    static constexpr int kPitch = kBiasTile + 8;  ///< of the sums; no bank conflicts
    static_assert(kConfig.block_kv == kBiasTile);
    using PanelQ = std::uint16_t[kConfig.block_q][kPanelColumns];
    using PanelKv = std::uint16_t[kBiasTile][kPanelColumns];

    PanelQ q[kStages][kBlocks][kConfig.qk_panels()];
    PanelQ d_o[kStages][kBlocks][kConfig.v_panels()];
    PanelKv k[kStages][kConfig.qk_panels()];
    PanelKv v[kStages][kConfig.v_panels()];
    float sums[kBiasTile][kPitch];
    Ring<kStages> ring;
    BiasStep steps[kStages];
};

template <class T, Config kConfig>
struct BiasGradientConsumer {
    using Shared = BiasGradientShared<kConfig>;
    static constexpr bool kGeneral = kConfig.scores == Scores::general;

    const Launch& launch;
    Shared& shared;
    const int warpgroup;
    PipelineState<Shared::kStages> at{};
    float sums[kBiasTile / 2];           ///< a thread's pairs of 64 queries with the keys of the tile
    std::uint32_t pairs[kBiasTile / 4];  ///< by pairs: the bias of these pairs, as long as it is the same
    bool has_pairs;
    int steps;    ///< in sums
    bool stored;  ///< shared.sums has earlier steps

    /// Opaque: values derived from it are computed anew at each use, since registers are few.
    __device__ __forceinline__ static unsigned thread() {
        return static_cast<unsigned>(ptx::opaque(static_cast<int>(threadIdx.x)));
    }
    __device__ __forceinline__ static int lane() { return static_cast<int>(thread() % 32); }
    /// The thread's first row of its warpgroup's 64. column(): its first column of the tile.
    __device__ __forceinline__ static int row() {
        const unsigned own = thread();
        return static_cast<int>(own % 128 / 32 * 16 + own % 32 / 4);
    }
    __device__ __forceinline__ static int column() { return static_cast<int>(thread() % 4 * 2); }

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (float& sum : sums) sum = 0;
        steps = 0;
    }

    /// Moves the sums to shared memory. A thread has the same elements each time.
    __device__ __forceinline__ void flush() {
        constexpr float kUnscale = 1 / kPScale<T>;
        const int own_row = 64 * warpgroup + row(), own_column = column();
#pragma unroll
        for (int i = 0; i < kBiasTile / 2; i += 2) {
            auto& total = reinterpret_cast<float2&>(shared.sums[own_row + 8 * row_of(i)][own_column + column_of(i)]);
            const float2 own = {sums[i] * kUnscale, sums[i + 1] * kUnscale};
            total = stored ? make_float2(total.x + own.x, total.y + own.y) : own;
        }
        stored = true;
        clear();
    }

    __device__ __forceinline__ void run() {
        clear();
        stored = has_pairs = false;
#pragma unroll 1
        while (true) {
            wait_for(shared.ring.full[at.index()], at.phase());
            const BiasStep& step = shared.steps[at.index()];
            if (step.kind == BiasStep::end) return;
            if (step.kind == BiasStep::store) {
                store(step.task);
            } else {
                if (steps++ == gradient::kTilesOfBiasPart) flush();
                if (step.query + 64 * warpgroup < step.sequence.len_q) add(step);
            }
            __syncwarp();
            if (lane() == 0) shared.ring.consumer_release(at);
            at.advance();
        }
    }
    /// Writes a tile of the bias, and begins the next one: from registers if it is whole, has a sum for each element
    /// and can be written by pairs of neighbouring keys, else through shared memory.
    __device__ __forceinline__ void store(const gradient::BiasTask& task) {
        const ForwardParams& p = launch.params.forward;
        const int query = task.q_tiles.begin * kBiasTile, key = task.key_tiles.begin * kBiasTile;
        if (launch.dbias_by_pairs && !stored && query + kBiasTile <= p.len_q && key + kBiasTile <= p.len_kv) {
            store_pairs(task, query + 64 * warpgroup + row(), key + column());
            clear();
            has_pairs = false;
            return;
        }
        flush();
        constexpr int kThreads = 128 * Config::kConsumers;
        ptx::named_barrier_sync(kConsumersBarrier, kThreads);
        task.store<T, kBiasTile, kBiasTile>(launch.params.forward, launch.params.dbias, shared.sums[0], Shared::kPitch,
                                            static_cast<int>(threadIdx.x) - 128, kThreads);
        ptx::named_barrier_sync(kConsumersBarrier, kThreads);
        stored = has_pairs = false;
    }

    /// `query`, `key`: those of the thread's first sum.
    __device__ __forceinline__ void store_pairs(const gradient::BiasTask& task, int query, int key) const {
        constexpr float kUnscale = 1 / kPScale<T>;
        const BiasGradient& dbias = launch.params.dbias;
        char* const first = dbias.data + 2 * (task.batches.begin * dbias.batch + task.heads.begin * dbias.head +
                                              query * dbias.row + key);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            auto* const row = reinterpret_cast<std::uint32_t*>(first + 16 * r * dbias.row);
#pragma unroll
            for (int j = 0; j < kBiasTile / 8; ++j) {
                const int i = 4 * j + 2 * r;
                row[4 * j] = ptx::pack<T>(sums[i] * kUnscale, sums[i + 1] * kUnscale);
            }
        }
    }

    /// One of the thread's two rows in a step: RowStats of its query, and its bias at key 0.
    struct OwnRow {
        int query;
        float minus_lse, delta, inverse_sum;
        const char* bias;
    };
    /// Adds dS of a step.
    __device__ __forceinline__ void add(const BiasStep& step) {
        const ForwardParams& p = launch.params.forward;
        const int first_query = step.query + 64 * warpgroup;
        const std::int64_t block = std::int64_t{step.head} * launch.blocks_q +
                                   first_block_q(p, kConfig.block_q, step.batch, step.sequence.first_q) +
                                   first_query / kConfig.block_q;
        const RowStats& stats =
            launch.workspace.stats[block * kConfig.row_stats() + first_query % kConfig.block_q / Config::kRows];
        OwnRow rows[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int own = row() + 8 * r, slot = RowStats::slot(own), query = first_query + own;
            rows[r] = {query, stats.minus_lse[slot], stats.delta[slot], stats.inverse_sum[slot],
                       bias_row(p.bias, step.batch, step.head, min(query, p.len_q - 1))};
        }
        const int stage = at.index(), row_of_block = 64 * warpgroup % kConfig.block_q;
        auto& q_panels = shared.q[stage][64 * warpgroup / kConfig.block_q];
        auto& do_panels = shared.d_o[stage][64 * warpgroup / kConfig.block_q];
        const Operands operands{uniform(row_descriptor(q_panels[0][row_of_block])),
                                uniform(row_descriptor(do_panels[0][row_of_block]))};
        const bool plain =
            step.unmasked(first_query) && !any_lane(rows[0].inverse_sum != 0 || rows[1].inverse_sum != 0);
        // Elements take more registers than pairs, and so fewer keys at a time.
        if (launch.bias_by_pairs && step.key + kBiasTile <= p.len_kv) {
            if (!has_pairs) load_pairs(rows, step.key + column());
            has_pairs = launch.one_bias_a_tile;
#pragma unroll
            for (int first = 0; first < kBiasTile; first += 64) {
                add_keys<64, true>(step, operands, rows, first, plain);
            }
        } else {
#pragma unroll
            for (int first = 0; first < kBiasTile; first += 32) add_keys<32, false>(step, operands, rows, first, plain);
        }
    }
    /// Descriptors of the warpgroup's Q and dO.
    struct Operands {
        std::uint64_t q, d_o;
    };
    /// `key`: the thread's first.
    __device__ __forceinline__ void load_pairs(const OwnRow (&rows)[2], int key) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const char* const from = rows[r].bias + 2 * std::int64_t{key};
#pragma unroll
            for (int j = 0; j < kBiasTile / 8; ++j) pairs[2 * j + r] = bias_pair(from, 8 * j);
        }
    }
    /// Adds dS of kKeys keys, from the tile's key `first` on.
    template <int kKeys, bool kByPairs>
    __device__ __forceinline__ void add_keys(const BiasStep& step, const Operands& operands, const OwnRow (&rows)[2],
                                             int first, bool plain) {
        constexpr int kPairs = kKeys / 2;
        const ForwardParams& p = launch.params.forward;
        float s[kPairs], dp[kPairs], bias[kPairs];
        start_query_scores<T, kConfig, kConfig.head_dim, kKeys>(
            s, operands.q, uniform(row_descriptor(shared.k[at.index()][0][first])));
        start_query_scores<T, kConfig, kConfig.head_dim_v, kKeys>(
            dp, operands.d_o, uniform(row_descriptor(shared.v[at.index()][0][first])));
        const int key = step.key + first + column();
        if constexpr (!kByPairs) {
#pragma unroll
            for (int i = 0; i < kPairs; ++i) {
                bias[i] = bias_element<T>(p.bias, rows[row_of(i)].bias, min(key + column_of(i), p.len_kv - 1));
            }
        }
        ptx::wgmma_wait<0>();
        ptx::warpgroup_fence_operand(s);
        ptx::warpgroup_fence_operand(dp);
#pragma unroll
        for (int i = 0; i < kPairs; i += 2) {
            if constexpr (kByPairs) {
                const float2 own = unpack_bias<T>(pairs[(first / 2 + i) / 2]);
                bias[i] = own.x, bias[i + 1] = own.y;
            }
            if constexpr (!kGeneral) {
                s[i] = fmaf(s[i], p.scale, bias[i]);
                s[i + 1] = fmaf(s[i + 1], p.scale, bias[i + 1]);
            }
        }
        if constexpr (kGeneral) modify(s, dp, bias, step, rows[0].query, key);
        auto& own_sums = reinterpret_cast<float(&)[kPairs]>(sums[first / 2]);
        if (plain) {
#pragma unroll
            for (int i = 0; i < kPairs; ++i) {
                const OwnRow& row = rows[row_of(i)];
                const float probability_of_pair = ptx::exp2_approx(fmaf(s[i], kLog2E, row.minus_lse));
                own_sums[i] = fmaf(probability_of_pair, dp[i] - row.delta, own_sums[i]);
            }
        } else {
#pragma unroll
            for (int i = 0; i < kPairs; ++i) {
                const OwnRow& row = rows[row_of(i)];
                const float probability_of_pair =
                    probability<kConfig.scores>(s[i], launch, row.minus_lse, row.inverse_sum);
                const bool visible = row.query < step.sequence.len_q && step.band.sees(row.query, key + column_of(i));
                if (visible) own_sums[i] = fmaf(probability_of_pair, dp[i] - row.delta, own_sums[i]);
            }
        }
    }
    /// General shapes: the scores with their other modifications, and dP after dropout. `query`, `key`: those of the
    /// thread's element 0.
    template <int kPairs>
    __device__ __forceinline__ void modify(float (&s)[kPairs], float (&dp)[kPairs], const float (&bias)[kPairs],
                                           const BiasStep& step, int query, int key) const {
        const ForwardParams& p = launch.params.forward;
        ScoreInputs others(p, step.batch, step.head);
        others.bias = nullptr;
        const HeadScores<T> head(p, step.sequence, step.batch, step.head, others);
        head.template transform<false>(reinterpret_cast<float(&)[kPairs / 4][4]>(s), Band32{}, query, key);
#pragma unroll
        for (int i = 0; i < kPairs; ++i) s[i] += bias[i];
        if (!head.drops()) return;
        const DropoutBits kept = head.draw(query, key, lane());
#pragma unroll
        for (int i = 0; i < kPairs; ++i) dp[i] = kept(i / 4, i % 4) ? dp[i] * p.keep_scale : 0.0F;
    }
};

/// One thread: the steps, in a fixed order, and their loads.
template <Config kConfig>
struct BiasGradientProducer {
    using Shared = BiasGradientShared<kConfig>;

    const Launch& launch;
    Shared& shared;
    PipelineState<Shared::kStages> at{};

    __device__ __forceinline__ void run() {
        const ForwardParams& p = launch.params.forward;
        const int q_count = (p.len_q + kBiasTile - 1) / kBiasTile, key_count = (p.len_kv + kBiasTile - 1) / kBiasTile;
        const std::int64_t tasks = gradient::bias_tasks(p, launch.params.dbias, q_count, key_count);
        const bool none = p.cu_seqlens_q != nullptr && launch.workspace.state->cu_seqlens_decreased != 0;
#pragma unroll 1
        for (std::int64_t i = blockIdx.x; i < tasks; i += gridDim.x) {
            BiasStep step{.task =
                              gradient::BiasTask(p, launch.params.dbias, static_cast<unsigned>(i), q_count, key_count)};
            if (!none) load_task(step);
            pass(step, BiasStep::store);
        }
        pass(BiasStep{}, BiasStep::end);
    }

 private:
    /// The steps of a tile of the bias that have visible pairs.
    __device__ __forceinline__ void load_task(BiasStep& step) {
        const ForwardParams& p = launch.params.forward;
#pragma unroll 1
        for (step.batch = step.task.batches.begin; step.batch < step.task.batches.end; ++step.batch) {
            step.sequence = sequence_of(p, step.batch);
            step.band = Band32(p.mask.bind(step.sequence.len_q, step.sequence.len_kv));
#pragma unroll 1
            for (step.head = step.task.heads.begin; step.head < step.task.heads.end; ++step.head) {
#pragma unroll 1
                for (int m = step.task.q_tiles.begin; m < step.task.q_tiles.end; ++m) load_query_tile(step, m);
            }
        }
    }
    __device__ __forceinline__ void load_query_tile(BiasStep& step, int m) {
        step.query = m * kBiasTile;
        const int q_end = min(step.query + kBiasTile, step.sequence.len_q);
        if (step.query >= q_end || !step.band.any(step.query, q_end)) return;
#pragma unroll 1
        for (int n = step.task.key_tiles.begin; n < step.task.key_tiles.end; ++n) {
            step.key = n * kBiasTile;
            const bool visible =
                step.key <= step.band.last(q_end - 1) && step.key + kBiasTile > step.band.first(step.query);
            if (visible) load(step);
        }
    }

    __device__ __forceinline__ void pass(const BiasStep& step, BiasStep::Kind kind) {
        wait_for(shared.ring.empty[at.index()], at.phase() ^ 1);
        shared.steps[at.index()] = step;
        shared.steps[at.index()].kind = kind;
        ptx::mbarrier_arrive(shared.ring.full[at.index()]);
        at.advance();
    }
    __device__ __forceinline__ void load(const BiasStep& step) {
        wait_for(shared.ring.empty[at.index()], at.phase() ^ 1);
        shared.steps[at.index()] = step;
        ptx::Mbarrier& full = shared.ring.full[at.index()];
        ptx::mbarrier_arrive_expect(
            full, sizeof(shared.q[0]) + sizeof(shared.d_o[0]) + sizeof(shared.k[0]) + sizeof(shared.v[0]));
        const ForwardParams& p = launch.params.forward;
        const int batch = p.cu_seqlens_q != nullptr ? 0 : step.batch;
        const int kv_head = step.head / p.group;
        constexpr auto kHint = ptx::CacheHint::evict_last;
        for (int m = 0; m < Shared::kBlocks; ++m) {
            const int row = static_cast<int>(step.sequence.first_q) + step.query + m * kConfig.block_q;
            copy_in(shared.q[at.index()][m], launch.maps.q, row, step.head, batch, full, kHint);
            copy_in(shared.d_o[at.index()][m], launch.maps.d_o, row, step.head, batch, full, kHint);
        }
        const int row = static_cast<int>(step.sequence.first_kv) + step.key;
        copy_in(shared.k[at.index()], launch.maps.k, row, kv_head, batch, full, kHint);
        copy_in(shared.v[at.index()], launch.maps.v, row, kv_head, batch, full, kHint);
        at.advance();
    }
};

template <class T, class Shape>
__global__ void __launch_bounds__(Config::kThreads, 1) bias_gradient_kernel(const __grid_constant__ Launch launch) {
    constexpr Config kConfig = Shape::kConfig;
    extern __shared__ __align__(1024) unsigned char memory[];
    auto& shared = *reinterpret_cast<BiasGradientShared<kConfig>*>(memory);
    if (threadIdx.x == 0) {
        shared.ring.init(4 * Config::kConsumers);
        ptx::fence_mbarrier_init();
    }
    __syncthreads();
    const int warpgroup = uniform(static_cast<int>(threadIdx.x) / 128);
    if (warpgroup == 0) {
        ptx::setmaxnreg_dec<Config::kDeltaProducerRegisters>();
        if (threadIdx.x == 0) BiasGradientProducer<kConfig>{launch, shared}.run();
        return;
    }
    ptx::setmaxnreg_inc<Config::kDeltaConsumerRegisters>();
    BiasGradientConsumer<T, kConfig>{launch, shared, warpgroup - 1}.run();
}

template <class T, class Shape>
cudaError_t launch_bias_gradient(const Launch& launch, cudaStream_t stream) {
    static_assert(ShapesTakingBias::kHas<Shape> && Shape::kConfig.takes_bias());
    constexpr int kBytes = sizeof(BiasGradientShared<Shape::kConfig>);
    static_assert(kBytes <= 227 * 1024);
    const ForwardParams& p = launch.params.forward;
    const std::int64_t tasks = gradient::bias_tasks(p, launch.params.dbias, (p.len_q + kBiasTile - 1) / kBiasTile,
                                                    (p.len_kv + kBiasTile - 1) / kBiasTile);
    if (tasks == 0) return cudaSuccess;
    return start(bias_gradient_kernel<T, Shape>, std::min<std::int64_t>(tasks, launch.multiprocessors),
                 Config::kThreads, kBytes, launch, stream);
}

}  // namespace tessera::cuda::fa3::backward
