// SPDX-License-Identifier: Apache-2.0
//
// The second kernel: rows of S become rows of P, in place, and the LSE. A CTA has one row; a thread has four keys in
// every 512, whatever the mask, so that the bits of a row do not depend on its place in the call.
//
// P is exp(S - m), not yet divided by its sum l: the third kernel divides O. A row is therefore read once, and small
// elements of long rows do not underflow in fp16.
#pragma once

#include "cuda/ptx/math.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/standard/work.cuh"
#include "cuda/tile/dropout_mask.cuh"
#include "cuda/tile/fragment.cuh"
#include "cuda/tile/sink.cuh"
#include "cuda/tile/softmax.cuh"

namespace tessera::cuda::standard {

/// Reduces over all threads of the CTA. `parts`: one float of shared memory for each warp.
template <class Combine>
__device__ __forceinline__ float block_reduce(float value, float* parts, const Combine& combine) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
        value = combine(value, __shfl_xor_sync(kAllLanes, value, distance));
    }
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = value;
    __syncthreads();
    float all = parts[0];
#pragma unroll
    for (int warp = 1; warp < kSoftmaxThreads / 32; ++warp) all = combine(all, parts[warp]);
    return all;
}

/// A row of S. Its first kKeys keys are copied to shared memory, the rest is read from global memory each time.
template <int kKeys>
struct ScoreRow {
    const float* global;  // key 0
    float* cached;        // shared memory, from key `first` on
    int first;            // `begin` rounded down to a multiple of kKeysAtOnce
    int begin;            // the first kernel has written keys [begin, end)
    int end;

    __device__ __forceinline__ bool is_cached(int key) const { return key - first < kKeys; }

    /// Calls body(key, exists) for the thread's keys, four at a time. All threads make as many calls.
    template <class Body>
    __device__ __forceinline__ void for_each(const Body& body) const {
        for (int step = first; step < end; step += kKeysAtOnce) {
            const int key = step + static_cast<int>(threadIdx.x) * kKeysPerThread;
            body(key, key >= begin && key < end);
        }
    }
    __device__ __forceinline__ void cache() const {
        for_each([&](int key, bool exists) {
            if (exists && is_cached(key))
                ptx::cp_async_16(ptx::shared_address(cached + key - first), global + key, true);
        });
        ptx::cp_async_commit();
        ptx::cp_async_wait<0>();
    }
    __device__ __forceinline__ float4 read(int key) const {
        return *reinterpret_cast<const float4*>(is_cached(key) ? cached + key - first : global + key);
    }
};

/// Elements of P that dropout drops become 0; p has four neighbouring keys.
__device__ __forceinline__ void drop(float (&p)[kKeysPerThread], const ForwardParams& params, const Head& head,
                                     int query, int key) {
    const std::uint32_t kept =
        kept_keys<kKeysPerThread>(params.keep, head.batch, static_cast<int>(head.head), query, key);
#pragma unroll
    for (int i = 0; i < kKeysPerThread; ++i) {
        if ((kept >> i & 1) == 0) p[i] = 0;
    }
}

/// Turns S into P, in 16 bits over the first half of the row, and returns the thread's part of l. Both carry a factor
/// 2^-kExponentOffset, which cancels in O.
template <class T>
__device__ __forceinline__ float exponentiate(const ForwardParams& params, const Head& head,
                                              const ScoreRow<kKeysCached>& row, T* p_row, int query, float m) {
    float sum = 0;
    row.for_each([&](int key, bool exists) {
        float p[kKeysPerThread] = {};
        if (exists) {
            const float4 s = row.read(key);
            const float scores[kKeysPerThread] = {s.x, s.y, s.z, s.w};
#pragma unroll
            for (int i = 0; i < kKeysPerThread; ++i) {
                p[i] = ptx::exp2_approx((scores[i] - m) * kLog2E - kExponentOffset<T>);
                sum += p[i];
            }
            if (params.drops()) drop(p, params, head, query, key);
        }
        if (!row.is_cached(key)) __syncthreads();  // all threads have read the elements that are overwritten
        if (exists) *reinterpret_cast<uint2*>(p_row + key) = {ptx::pack<T>(p[0], p[1]), ptx::pack<T>(p[2], p[3])};
    });
    return sum;
}

template <class T>
__global__ void __launch_bounds__(kSoftmaxThreads) softmax_kernel(const __grid_constant__ Launch launch) {
    extern __shared__ __align__(16) float cached[];
    __shared__ float parts[2][kSoftmaxThreads / 32];
    const ForwardParams& params = launch.params;
    const QueryWork work(params);
    const Head head(launch, work.pair);
    const int query = work.query;
    if (query >= head.sequence.len_q) return;
    const BlockRange tiles = head.tiles(query / kBlockQ * kBlockQ);
    const int begin = tiles.begin * kBlockKv;
    float* scores = head.scores + query * launch.pitch;
    const ScoreRow<kKeysCached> row{scores, cached, begin / kKeysAtOnce * kKeysAtOnce, begin, tiles.end * kBlockKv};

    row.cache();
    float m = -INFINITY;
    row.for_each([&](int key, bool exists) {
        if (!exists) return;
        const float4 s = row.read(key);
        m = fmaxf(fmaxf(fmaxf(m, s.x), fmaxf(s.y, s.z)), s.w);
    });
    m = block_reduce(m, parts[0], [](float a, float b) { return fmaxf(a, b); });
    if (m == -INFINITY) m = 0;  // no visible key: exp(-inf - 0) = 0
    float l = exponentiate(params, head, row, reinterpret_cast<T*>(scores), query, m);
    l = block_reduce(l, parts[1], [](float a, float b) { return a + b; });

    if (threadIdx.x != 0) return;
    const WithSink with = with_sink_of(params, head.head, m + logf(l * exp2f(kExponentOffset<T>)));
    head.factors[query] = l == 0 ? 0 : params.keep_scale / l * with.factor;
    if (params.lse.data == nullptr) return;
    const Rows& lse = params.lse;
    const std::int64_t offset = head_offset(lse, head.batch, head.sequence.first_q, head.head, sizeof(float));
    auto* to = reinterpret_cast<float*>(lse.data + offset);
    to[query * lse.row] = with.lse;
}

template <class T>
cudaError_t start_softmax(const Launch& launch, cudaStream_t stream) {
    const std::int64_t keys = (launch.pitch + kKeysAtOnce - 1) / kKeysAtOnce * kKeysAtOnce;
    const std::size_t bytes = sizeof(float) * static_cast<std::size_t>(keys < kKeysCached ? keys : kKeysCached);
    const auto kernel = softmax_kernel<T>;
    const cudaError_t status =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
    if (status != cudaSuccess) return status;
    const std::int64_t blocks = query_blocks(launch.params);
    kernel<<<static_cast<unsigned>(blocks), kSoftmaxThreads, bytes, stream>>>(launch);
    return cudaGetLastError();
}

}  // namespace tessera::cuda::standard
