// SPDX-License-Identifier: Apache-2.0
//
// The second kernel: rows of S become rows of P, in place; LSE. A thread block has one row, each thread four keys in
// every 512, whatever the mask: what a row gets does not depend on where in the call it stands.
//
// P is exp(S - m), not yet divided by its sum l: the third kernel divides O. So a row is read once, and small weights
// of long rows don't fall under what fp16 can hold.
#pragma once

#include "cuda/ptx/math.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/standard/work.cuh"
#include "cuda/tile/kept_weights.cuh"
#include "cuda/tile/softmax.cuh"

namespace tessera::cuda::standard {

/// Over all threads of the block. `parts`: one float of shared memory for each warp.
template <class Combine>
__device__ __forceinline__ float block_reduce(float value, float* parts, const Combine& combine) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
        value = combine(value, __shfl_xor_sync(0xFFFFFFFF, value, distance));
    }
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = value;
    __syncthreads();
    float all = parts[0];
#pragma unroll
    for (int warp = 1; warp < kSoftmaxThreads / 32; ++warp) all = combine(all, parts[warp]);
    return all;
}

/// A row of S: what fits, kKeys of them, waits in shared memory, where every thread finds its own keys.
template <int kKeys>
struct ScoreRow {
    const float* global;  // key 0
    float* held;          // key first
    int first;            // of the keys that the kernels wrote, in whole steps of kKeysAtOnce
    int begin;            // the keys that the kernels wrote
    int end;

    __device__ __forceinline__ bool is_held(int key) const { return key - first < kKeys; }

    /// Calls body(key) for the thread's keys, four at a time; all threads take every step together.
    template <class Body>
    __device__ __forceinline__ void for_each(const Body& body) const {
        for (int step = first; step < end; step += kKeysAtOnce) {
            const int key = step + static_cast<int>(threadIdx.x) * kKeysPerThread;
            body(key, key >= begin && key < end);
        }
    }
    __device__ __forceinline__ void hold() const {
        for_each([&](int key, bool wanted) {
            if (wanted && is_held(key)) ptx::cp_async_16(ptx::shared_address(held + key - first), global + key, true);
        });
        ptx::cp_async_commit();
        ptx::cp_async_wait<0>();
    }
    __device__ __forceinline__ float4 read(int key) const {
        return *reinterpret_cast<const float4*>(is_held(key) ? held + key - first : global + key);
    }
};

/// Weights that dropout takes become 0; keys are four in a row.
__device__ __forceinline__ void drop(float (&p)[kKeysPerThread], const ForwardParams& params, const Head& head,
                                     int query, int key) {
    const std::uint32_t kept =
        kept_keys<kKeysPerThread>(params.keep, head.batch, static_cast<int>(head.head), query, key);
#pragma unroll
    for (int i = 0; i < kKeysPerThread; ++i) {
        if ((kept >> i & 1) == 0) p[i] = 0;
    }
}

/// Turns S into P, in 16 bits over the first half of the row; returns the thread's share of l. Both are
/// 2^-kExponentOffset times their value.
template <class T>
__device__ __forceinline__ float exponentiate(const ForwardParams& params, const Head& head,
                                              const ScoreRow<kKeysHeld>& row, T* weights, int query, float m) {
    float sum = 0;
    row.for_each([&](int key, bool wanted) {
        float p[kKeysPerThread] = {};
        if (wanted) {
            const float4 s = row.read(key);
            const float scores[kKeysPerThread] = {s.x, s.y, s.z, s.w};
#pragma unroll
            for (int i = 0; i < kKeysPerThread; ++i) {
                p[i] = ptx::exp2_approx((scores[i] - m) * kLog2E - kExponentOffset<T>);
                sum += p[i];
            }
            if (params.drops()) drop(p, params, head, query, key);
        }
        if (!row.is_held(key)) __syncthreads();  // what is written over has been read
        if (wanted) *reinterpret_cast<uint2*>(weights + key) = {ptx::pack<T>(p[0], p[1]), ptx::pack<T>(p[2], p[3])};
    });
    return sum;
}

template <class T>
__global__ void __launch_bounds__(kSoftmaxThreads) softmax_kernel(const __grid_constant__ Launch launch) {
    extern __shared__ __align__(16) float held[];
    __shared__ float parts[2][kSoftmaxThreads / 32];
    const ForwardParams& params = launch.params;
    const QueryWork work(params);
    const Head head(launch, work.pair);
    const int query = work.query;
    if (query >= head.sequence.len_q) return;
    const KeyTiles tiles = head.tiles(query / kBlockQ * kBlockQ);
    const int begin = tiles.first * kBlockKv;
    float* scores = head.scores + query * launch.pitch;
    const ScoreRow<kKeysHeld> row{scores, held, begin / kKeysAtOnce * kKeysAtOnce, begin, tiles.end * kBlockKv};

    row.hold();
    float m = -INFINITY;
    row.for_each([&](int key, bool wanted) {
        if (!wanted) return;
        const float4 s = row.read(key);
        m = fmaxf(fmaxf(fmaxf(m, s.x), fmaxf(s.y, s.z)), s.w);
    });
    m = block_reduce(m, parts[0], [](float a, float b) { return fmaxf(a, b); });
    if (m == -INFINITY) m = 0;  // nothing visible: exp(-inf - 0) is the 0 that is wanted
    float l = exponentiate(params, head, row, reinterpret_cast<T*>(scores), query, m);
    l = block_reduce(l, parts[1], [](float a, float b) { return a + b; });

    if (threadIdx.x != 0) return;
    head.factors[query] = l == 0 ? 0 : params.keep_scale / l;
    if (params.lse.data == nullptr) return;
    const Rows& lse = params.lse;
    const std::int64_t offset = head_offset(lse, head.batch, head.sequence.first_q, head.head, sizeof(float));
    auto* to = reinterpret_cast<float*>(lse.data + offset);
    to[query * lse.row] = m + logf(l * exp2f(kExponentOffset<T>));
}

template <class T>
cudaError_t start_softmax(const Launch& launch, cudaStream_t stream) {
    const std::int64_t held = (launch.pitch + kKeysAtOnce - 1) / kKeysAtOnce * kKeysAtOnce;
    const std::size_t bytes = sizeof(float) * static_cast<std::size_t>(held < kKeysHeld ? held : kKeysHeld);
    const auto kernel = softmax_kernel<T>;
    const cudaError_t status =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
    if (status != cudaSuccess) return status;
    const std::int64_t blocks = query_blocks(launch.params);
    kernel<<<static_cast<unsigned>(blocks), kSoftmaxThreads, bytes, stream>>>(launch);
    return cudaGetLastError();
}

}  // namespace tessera::cuda::standard
