// SPDX-License-Identifier: Apache-2.0
//
// The tiles of the kernels of fp32 multiply-adds, and the scores of all fp32 kernels: every product is an FMA of fp32
// numbers, every exponential is accurate. 16 x 16 threads; a thread has queries 16 apart and keys 16 apart of a score
// tile.
#pragma once

#include "cuda/gradient/workspace.cuh"
#include "cuda/tile/score.cuh"
#include "cuda/tile/sequence.cuh"

namespace tessera::cuda::gradient {

template <ConfigFp32 kConfig>
struct TileFp32 {
    static constexpr int kHeadDim = kConfig.head_dim;
    static constexpr int kBlockKv = kConfig.block_kv;
    static constexpr int kThreads = 256;
    static constexpr int kQueries = kBlockQ / 16;   // queries of a thread
    static constexpr int kKeys = kBlockKv / 16;     // keys of a thread
    static constexpr int kColumns = kHeadDim / 16;  // columns of a thread: four in every 64
    static constexpr int kRow = kHeadDim + 4;       // floats from one row to the next, padded against bank conflicts
    static constexpr int kRowOfScores = kBlockKv + 4;
    static constexpr int kFloats = kConfig.floats();
    static constexpr int kFloatsOfScores = kBlockQ * kRowOfScores;
    using Scores = float[kQueries][kKeys];

    float* q;
    float* d_o;
    float* k;
    float* v;

    __device__ explicit TileFp32(char* memory)
        : q(reinterpret_cast<float*>(memory)),
          d_o(q + kBlockQ * kRow),
          k(d_o + kBlockQ * kRow),
          v(k + kBlockKv * kRow) {}

    __device__ static __forceinline__ int row() { return static_cast<int>(threadIdx.x) / 16; }
    __device__ static __forceinline__ int column() { return static_cast<int>(threadIdx.x) % 16; }
    __device__ static __forceinline__ float4 vector(const float* from) {
        return *reinterpret_cast<const float4*>(from);
    }

    /// Loads rows [first_row, first_row + kRows) of a head; rows and columns that do not exist become 0.
    template <int kRows>
    __device__ static void load(float* to, const Rows& rows, std::int64_t offset, int first_row, int row_count,
                                int dim) {
        const auto* from = reinterpret_cast<const float*>(rows.data + offset);
        for (int i = static_cast<int>(threadIdx.x); i < kRows * kHeadDim; i += kThreads) {
            const int at = first_row + i / kHeadDim;
            const int column = i % kHeadDim;
            const bool exists = at < row_count && column < dim;
            to[i / kHeadDim * kRow + column] = exists ? from[at * rows.row + column * rows.column] : 0.0F;
        }
    }
    __device__ void load_queries(const BackwardParams& p, const Sequence& sequence, std::int64_t batch, int head,
                                 int first) const {
        const ForwardParams& f = p.forward;
        load<kBlockQ>(q, f.q, head_offset(f.q, batch, sequence.first_q, head, 4), first, sequence.len_q, f.head_dim);
        load<kBlockQ>(d_o, p.d_o, head_offset(p.d_o, batch, sequence.first_q, head, 4), first, sequence.len_q,
                      f.head_dim_v);
    }
    __device__ void load_keys(const ForwardParams& f, const Sequence& sequence, std::int64_t batch, int kv_head,
                              int first) const {
        load<kBlockKv>(k, f.k, head_offset(f.k, batch, sequence.first_kv, kv_head, 4), first, sequence.len_kv,
                       f.head_dim);
        load<kBlockKv>(v, f.v, head_offset(f.v, batch, sequence.first_kv, kv_head, 4), first, sequence.len_kv,
                       f.head_dim_v);
    }

    /// s = the products of query rows and key rows: Q K^T, dO V^T.
    __device__ static void multiply(Scores& s, const float* queries, const float* keys) {
#pragma unroll
        for (auto& scores : s) {
#pragma unroll
            for (float& score : scores) score = 0;
        }
#pragma unroll 4
        for (int d = 0; d < kHeadDim; d += 4) {
            float4 b[kKeys];
#pragma unroll
            for (int j = 0; j < kKeys; ++j) b[j] = vector(keys + (column() + 16 * j) * kRow + d);
#pragma unroll
            for (int i = 0; i < kQueries; ++i) {
                const float4 a = vector(queries + (row() + 16 * i) * kRow + d);
#pragma unroll
                for (int j = 0; j < kKeys; ++j) {
                    s[i][j] = fmaf(a.x, b[j].x, s[i][j]);
                    s[i][j] = fmaf(a.y, b[j].y, s[i][j]);
                    s[i][j] = fmaf(a.z, b[j].z, s[i][j]);
                    s[i][j] = fmaf(a.w, b[j].w, s[i][j]);
                }
            }
        }
    }
};

/// Scale, softcap, ALiBi, bias, mask and dropout of one head, in fp32.
struct ScoresFp32 {
    const ForwardParams& params;
    const Sequence& sequence;
    const Band32& band;
    const std::int64_t batch;
    const int head;
    const ScoreInputs inputs;

    __device__ ScoresFp32(const ForwardParams& p, const Sequence& of, const Band32& its_band, std::int64_t in_batch,
                          int of_head)
        : params(p), sequence(of), band(its_band), batch(in_batch), head(of_head), inputs(p, in_batch, of_head) {}

    __device__ __forceinline__ bool sees(int query, int key) const {
        return query < sequence.len_q && band.sees(query, key);
    }

    /// The score of a visible pair, in units of the natural logarithm. `slope`: the derivative of the softcap.
    __device__ float score(float product, int query, int key, float& slope) const {
        float s = __fmul_rn(product, params.scale);
        slope = 1;
        if (params.softcap > 0) {
            const float t = tanhf(s / params.softcap);
            s = params.softcap * t;
            slope = (1 - t) * (1 + t);
        }
        if (inputs.slope != 0) {
            const int distance = abs(query + sequence.len_kv - sequence.len_q - key);
            s = fmaf(-inputs.slope, static_cast<float>(distance), s);
        }
        if (inputs.bias) {
            s += reinterpret_cast<const float*>(inputs.bias)[query * params.bias.row + key * params.bias.column];
        }
        return s;
    }

    /// The factor of P by the dropout: 0, or 1 / (1 - probability).
    __device__ float dropout(int query, int key) const {
        return is_kept(params.keep, batch, head, query, key) ? params.keep_scale : 0.0F;
    }
};

/// P of a visible pair. In fp32 every row has a norm: 1 where `max` is the LSE of the forward.
__device__ __forceinline__ float probability_fp32(const RowTile& rows, int row, float score) {
    return expf(score - rows.max[row]) * rows.norm[row];
}

}  // namespace tessera::cuda::gradient
