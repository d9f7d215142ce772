// SPDX-License-Identifier: Apache-2.0
//
// dV = P^T dO and dK = dS^T Q. A CTA owns a key block of one kv head. For each query head of the group it goes over the
// queries that see its keys, 64 at once. The sums stay in registers and have a fixed order.
#pragma once

#include "cuda/gradient/main/key_scale.cuh"
#include "cuda/shared/start.cuh"
#include "cuda/standard/work.cuh"
#include "cuda/tile/output.cuh"
#include "cuda/tile/warp_gemms.cuh"

namespace tessera::cuda::standard {

/// A key block, and the queries that see one of its keys.
struct KeyBlock {
    const KeyGemmLaunch& launch;
    std::int64_t batch;
    int kv_head;
    int first_key;
    Sequence sequence;
    Band band;
    int first_step = 0;  // queries of steps [first_step, first_step + steps)
    int steps = 0;

    __device__ explicit KeyBlock(const KeyGemmLaunch& from)
        : launch(from),
          batch(blockIdx.x / from.key_blocks / from.forward.params.heads_kv),
          kv_head(static_cast<int>(blockIdx.x / from.key_blocks % from.forward.params.heads_kv)),
          first_key(static_cast<int>(blockIdx.x % from.key_blocks) * kKeysOfBlock),
          sequence(sequence_of(from.forward.params, batch)),
          band(from.forward.params.mask.bind(sequence.len_q, sequence.len_kv)) {
        if (first_key >= sequence.len_kv) return;
        const Range queries =
            band.q_range(first_key, min(std::int64_t{first_key} + kKeysOfBlock, std::int64_t{sequence.len_kv}));
        if (queries.empty()) return;
        first_step = static_cast<int>(queries.begin / kStepQueries);
        steps = static_cast<int>((queries.end + kStepQueries - 1) / kStepQueries) - first_step;
    }
    __device__ __forceinline__ int count() const { return steps * launch.forward.params.group; }
    __device__ __forceinline__ int first_query(int index) const { return (first_step + index % steps) * kStepQueries; }
    __device__ __forceinline__ Head head(int index) const {
        const ForwardParams& p = launch.forward.params;
        return Head(launch.forward, batch * p.heads_q + kv_head * p.group + index / steps);
    }
};

/// Shared memory of a CTA, for each stage a tile of P or dS, [2][64 queries][64 keys], and one of dO or Q; and the
/// copies into it.
template <class T, Config kConfig>
struct KeyTilesOf {
    static constexpr int kStages = kConfig.value_stages();
    static constexpr int kHalfBytes = kStepQueries * kBlockKv * 2;
    static_assert(2 * kHalfBytes == kConfig.p_bytes() && kConfig.block_q() == kKeysOfBlock);
    static_assert(kKeysOfBlock == 2 * kBlockKv);
    static_assert(kStepQueries == kConfig.block_kv());
    const KeyBlock& work;
    char* shared;

    __device__ __forceinline__ char* matrix_tile(int index) const {
        return shared + index % kStages * (kConfig.p_bytes() + kConfig.kv_bytes());
    }
    __device__ __forceinline__ char* rows_tile(int index) const { return matrix_tile(index) + kConfig.p_bytes(); }
    __device__ __forceinline__ Source rows(int index) const {
        const KeyGemmLaunch& l = work.launch;
        const int head = work.kv_head * l.forward.params.group + index / work.steps;
        const std::int64_t offset = head_offset(l.rows, work.batch, work.sequence.first_q, head, sizeof(T));
        return source_of<T>(l.rows, offset, work.sequence.len_q, l.dim, l.vector_rows);
    }

    /// Starts the copies of a step as one group. A group past the end is empty, so that the number in flight is known.
    __device__ __forceinline__ void load_step(int index) const {
        if (index < work.count()) {
            const int query = work.first_query(index);
            const Head head = work.head(index);
            const BlockRange written = head.tiles(query / kBlockQ * kBlockQ);
            for (int half = 0; half < 2; ++half) {
                if (work.launch.exact != nullptr) break;
                const int tile = work.first_key / kBlockKv + half;
                const Source from{.data = reinterpret_cast<const char*>(head.scores) +
                                          (written.contains(tile) ? tile * kBlockKv * std::int64_t{sizeof(T)} : 0),
                                  .row_bytes = work.launch.forward.pitch * std::int64_t{sizeof(float)},
                                  .column_bytes = sizeof(T),
                                  .rows = written.contains(tile) ? work.sequence.len_q : 0,
                                  .dim = kBlockKv,
                                  .vector = true};
                load<kStepQueries, kBlockKv, kConfig.threads()>(matrix_tile(index) + half * kHalfBytes, from, query);
            }
            load<kStepQueries, kConfig.head_dim, kConfig.threads()>(rows_tile(index), rows(index), query);
        }
        ptx::cp_async_commit();
    }

    /// Reads dS of the warp's keys in fp32, [16 keys][8 queries][4], for queries of the step from `first` on. It is 0
    /// where nothing was written.
    template <int kTiles>
    __device__ __forceinline__ void read_exact(float (&s)[kConfig.row_tiles][kTiles][4], int index, int first,
                                               int first_row, int lane) const {
        const Head head = work.head(index);
        const int query = work.first_query(index) + first + lane % 4 * 2;
        const int key = work.first_key + first_row + lane / 4;
        const float* const from = work.launch.exact + (head.scores - work.launch.forward.scores) + key;
        const bool written = head.tiles(query / kBlockQ * kBlockQ).contains((work.first_key + first_row) / kBlockKv);
#pragma unroll
        for (int m = 0; m < kConfig.row_tiles; ++m) {
#pragma unroll
            for (int j = 0; j < kTiles; ++j) {
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const int row = query + 8 * j + e % 2;
                    const bool exists = written && row < work.sequence.len_q;
                    s[m][j][e] = exists ? from[row * work.launch.forward.pitch + 16 * m + e / 2 * 8] : 0.0F;
                }
            }
        }
    }

    /// Adds the products of Inf and NaN in dO or Q to the warp's rows in shared memory, for keys that their query sees.
    __device__ __forceinline__ void restore(char* tile, int first_row, int lane) const {
        constexpr int kChunks = kConfig.head_dim / kChunk;
        const int column = lane % kChunks * kChunk;
        const Band32 band(work.band);
#pragma unroll 1
        for (int row = first_row + lane / kChunks; row < first_row + kConfig.rows_per_warp(); row += 32 / kChunks) {
            auto* at = reinterpret_cast<uint4*>(tile + chunk_offset<kConfig.head_dim>(row, column / kChunk));
            uint4 chunk = *at;
            const int key = work.first_key + row;
#pragma unroll 1
            for (int index = 0; index < work.count(); ++index) {
                const Head head = work.head(index);
                const Source from = rows(index);
                const int begin = work.first_query(index);
#pragma unroll 1
                for (int query = begin; query < min(begin + kStepQueries, work.sequence.len_q); ++query) {
                    if (!band.sees(query, key)) continue;
                    const float* const of_query = head.scores + query * work.launch.forward.pitch;
                    const auto factor = static_cast<float>(reinterpret_cast<const T*>(of_query)[key]);
                    add_nonfinite<T>(chunk, from.elements(query, column), factor);
                }
            }
            *at = chunk;
        }
    }
};

/// Adds step `index`, whose tiles have arrived, to the sums of a warp's keys, [16 keys][8 dims][4].
template <class T, Config kConfig>
__device__ __forceinline__ void multiply_step(float (&sums)[kConfig.row_tiles][kConfig.head_dim / 8][4],
                                              const KeyTilesOf<T, kConfig>& inputs, int index, int first_row,
                                              int lane) {
    const char* half = inputs.matrix_tile(index) + first_row / kBlockKv * inputs.kHalfBytes;
    const MatrixAddress<kBlockKv> matrix(half, lane / 16 * 8 + lane % 8, first_row % kBlockKv / kChunk + lane / 8 % 2);
    const auto rows = MatrixAddress<kConfig.head_dim>::rows_first(inputs.rows_tile(index), 0, lane);
#pragma unroll
    for (int step = 0; step < kStepQueries / 16; ++step) {
        std::uint32_t a[kConfig.row_tiles][4];  // A fragments: 16 keys x 16 queries
#pragma unroll
        for (int m = 0; m < kConfig.row_tiles; ++m) ptx::ldmatrix_x4_trans(a[m], matrix.at(16 * step, 2 * m));
        add_rows_of_v<T, kConfig.head_dim>(sums, a, rows, step);
    }
}

/// multiply_step() for fp16, from dS in fp32: dS is multiplied by the scale of its key before it is rounded.
template <class T, Config kConfig>
__device__ __forceinline__ void multiply_exact(float (&sums)[kConfig.row_tiles][kConfig.head_dim / 8][4],
                                               gradient::KeyScale<T, kConfig.row_tiles>& scales,
                                               const KeyTilesOf<T, kConfig>& inputs, int index, int first_row,
                                               int lane) {
    constexpr int kAtOnce = 16;  // queries, since registers are few
#pragma unroll 1
    for (int first = 0; first < kStepQueries; first += kAtOnce) {
        float ds[kConfig.row_tiles][kAtOnce / 8][4];
        inputs.read_exact(ds, index, first, first_row, lane);
        scales.rescale(ds, sums, 1.0F);
        multiply_pv<T, kConfig.head_dim>(
            sums, ds, MatrixAddress<kConfig.head_dim>::rows_first(inputs.rows_tile(index), first, lane));
    }
}

template <class T, class Shape>
__global__ void __launch_bounds__(Shape::kConfig.threads(), Shape::kConfig.blocks_per_sm)
    key_gemm_kernel(const __grid_constant__ KeyGemmLaunch launch) {
    constexpr Config kConfig = Shape::kConfig;
    constexpr int kHeadDim = kConfig.head_dim;
    extern __shared__ __align__(128) char memory[];
    const KeyBlock work(launch);
    if (work.first_key >= work.sequence.len_kv) return;
    const KeyTilesOf<T, kConfig> inputs{work, memory};
#pragma unroll
    for (int i = 0; i + 1 < kConfig.value_stages(); ++i) inputs.load_step(i);

    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int first_row = static_cast<int>(threadIdx.x) / 32 * kConfig.rows_per_warp();
    const Band32 band(work.band);
    float sums[kConfig.row_tiles][kHeadDim / 8][4] = {};  // [16 keys][8 dims][4]
    gradient::KeyScale<T, kConfig.row_tiles> scales(launch.exact == nullptr);
    bool replaced = false;  // Inf or NaN in dO or Q were replaced by 0
    for (int index = 0; index < work.count(); ++index) {
        ptx::cp_async_wait<kConfig.value_stages() - 2>();
        __syncthreads();  // the step has arrived for all threads, and all have read the previous one
        inputs.load_step(index + kConfig.value_stages() - 1);
        const int query = work.first_query(index);
        if (!band.full(query, query + kStepQueries, work.first_key, work.first_key + kKeysOfBlock)) {
            replaced |=
                __syncthreads_or(clean<T, kStepQueries, kHeadDim, kConfig.threads()>(inputs.rows_tile(index))) != 0;
        }
        if (gradient::KeyScale<T, 1>::kFp16 && launch.exact != nullptr) {
            multiply_exact<T, kConfig>(sums, scales, inputs, index, first_row, lane);
        } else {
            multiply_step<T, kConfig>(sums, inputs, index, first_row, lane);
        }
    }
    ptx::cp_async_wait<0>();
    __syncthreads();  // the sums are staged over the tiles of other warps
    float factor[kConfig.row_tiles][2];
    scales.factors(factor, launch.factor);
    stage<T, kHeadDim>(memory, sums, factor, first_row, lane);
    __syncwarp();
    if (replaced) inputs.restore(memory, first_row, lane);
    __syncwarp();
    const std::int64_t offset = head_offset(launch.to, work.batch, work.sequence.first_kv, work.kv_head, sizeof(T));
    const Target target = target_of<T>(launch.to, offset, work.sequence.len_kv, launch.dim, launch.vector_to);
    store<kHeadDim, kConfig.rows_per_warp()>(memory, target, work.first_key, first_row, lane);
}

template <class T, class Shape>
cudaError_t start_key_gemm(const KeyGemmLaunch& launch, cudaStream_t stream) {
    static_assert(Shapes::kHas<Shape>, "not in the list of config.h");
    constexpr Config kConfig = Shape::kConfig;
    static_assert(kConfig.value_shared_bytes() >= kConfig.q_bytes(), "the sums are staged in the tiles");
    const ForwardParams& p = launch.forward.params;
    const std::int64_t blocks = p.batch * p.heads_kv * launch.key_blocks;
    return start(key_gemm_kernel<T, Shape>, blocks, kConfig.threads(), kConfig.value_shared_bytes(), launch, stream);
}

}  // namespace tessera::cuda::standard
