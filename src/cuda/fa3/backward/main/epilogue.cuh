// SPDX-License-Identifier: Apache-2.0
//
// The epilogue: dK and dV through shared memory to the tensors, or to the workspace with head splits or parts of
// queries.
#pragma once

#include "cuda/fa3/backward/common/store_gradient.cuh"
#include "cuda/fa3/backward/main/mainloop_128.cuh"
#include "cuda/fa3/backward/main/mainloop_64.cuh"
#include "cuda/fa3/backward/main/mainloop_wide.cuh"

namespace tessera::cuda::fa3::backward {

/// Adds the NaN and infinities that zero_nonfinite_queries() took out of dO to dV of the keys that their rows see. This
/// is rare and slow.
template <class T, Config kConfig>
__device__ __forceinline__ void restore_nonfinite(const ConsumerThread<T, kConfig>& c,
                                                  float (&dv)[kConfig.head_dim_v / 2]) {
    const ForwardParams& p = c.launch.params.forward;
    const Rows& d_o = c.launch.params.d_o;
    const KeyBlock<kConfig>& block = c.block();
    const int batch = p.cu_seqlens_q != nullptr ? 0 : block.batch;
#pragma unroll
    for (int i = 0; i < kConfig.head_dim_v / 2; ++i) {
        const int key = block.n * kConfig.block_kv + c.row() + 8 * row_of(i);
        const int column = column_of(i) + 2 * (c.lane() % 4);
        if (key >= block.schedule.len_kv() || column >= p.head_dim_v) continue;
        const int last = min(key - block.schedule.low, block.schedule.len_q - 1);
#pragma unroll 1
        for (int head = block.end_head - block.schedule.heads_per_split; head < block.end_head; ++head) {
            const T* values = reinterpret_cast<const T*>(d_o.data) + batch * d_o.batch + head * d_o.head +
                              block.first_q * d_o.row + column * d_o.column;
#pragma unroll 1
            for (int query = max(key - block.schedule.high, 0); query <= last; ++query) {
                const float value = static_cast<float>(values[query * d_o.row]);
                if (!isfinite(value)) dv[i] += value;
            }
        }
    }
}

/// The destination of this warp's rows of dK or dV.
template <class T, Config kConfig>
__device__ __forceinline__ GradientRows gradient_rows(const ConsumerThread<T, kConfig>& c, const Rows& rows,
                                                      const CUtensorMap& map, bool by_tma, int columns) {
    const KeyBlock<kConfig>& block = c.block();
    const int key = block.n * kConfig.block_kv + c.first_row() + 16 * c.warp();
    const bool ragged = c.launch.params.forward.cu_seqlens_q != nullptr;
    return {rows,
            map,
            by_tma,
            ragged ? 0 : block.batch,
            block.kv_head,
            block.first_kv + key,
            block.schedule.len_kv() - key,
            columns};
}

/// With head splits or parts of queries: the address in the workspace of dK or dV of this warpgroup's 64 keys,
/// [64 keys][kDim] of `splits`.
template <int kDim, class T, Config kConfig>
__device__ __forceinline__ float* split_gradient(const ConsumerThread<T, kConfig>& c, float* splits) {
    const Launch& launch = c.launch;
    const KeyBlock<kConfig>& block = c.block();
    const std::int64_t head = std::int64_t{block.split} * launch.params.forward.heads_kv + block.kv_head;
    const std::int64_t index = head * launch.blocks_kv +
                               first_block_kv(launch.params.forward, kConfig.block_kv, block.batch, block.first_kv) +
                               block.n;
    return splits + index * (kConfig.block_kv * kDim) + c.first_row() * kDim;
}

/// Stores accumulators times `factor` in accumulator layout. `adds`: to the sums of the earlier parts of the queries.
template <int kDim>
__device__ __forceinline__ void store_split(const float (&gradient)[kDim / 2], float factor, float* to, bool adds) {
    auto* out = reinterpret_cast<float4*>(to) + threadIdx.x % 128;
#pragma unroll
    for (int j = 0; j < kDim / 8; ++j) {
        float4 sum = make_float4(scaled(gradient[4 * j], factor), scaled(gradient[4 * j + 1], factor),
                                 scaled(gradient[4 * j + 2], factor), scaled(gradient[4 * j + 3], factor));
        if (adds) {
            const float4 earlier = out[128 * j];
            sum = make_float4(earlier.x + sum.x, earlier.y + sum.y, earlier.z + sum.z, earlier.w + sum.w);
        }
        out[128 * j] = sum;
    }
}

template <class T, Config kConfig>
__device__ __forceinline__ void store_dv(const ConsumerThread<T, kConfig>& c, float (&dv)[kConfig.head_dim_v / 2]) {
    const Launch& launch = c.launch;
    if (c.block().zeroed_do != 0) restore_nonfinite(c, dv);
    // P has not been multiplied by dropout's keep_scale, but in bf16 in general shapes (exponentiate_with_score_mod).
    constexpr bool kScaled = kFp16Scaled<T> || kConfig.scores == Scores::dropout;
    const float factor = kScaled ? launch.params.forward.keep_scale / kPScale<T> : 1.0F;
    if (c.block().schedule.sums_in_workspace()) {
        if (launch.params.dv.data == nullptr) return;
        return store_split<kConfig.head_dim_v>(
            dv, factor, split_gradient<kConfig.head_dim_v>(c, launch.workspace.split_dv), launch.part > 0);
    }
    const GradientRows to =
        gradient_rows(c, launch.params.dv, launch.maps.dv, launch.gradients.tma_dv, launch.params.forward.head_dim_v);
    PanelRows rows[kConfig.v_panels()];
    set_rows(rows, c.shared.v, c.first_row() + 16 * c.warp());
    if constexpr (kScaled) store_gradient<T, kConfig.head_dim_v>(dv, factor, to, rows, c.lane());
    else store_gradient<T, kConfig.head_dim_v>(dv, Unscaled{}, to, rows, c.lane());
}

/// Stores dK through the memory of K.
template <class T, Config kConfig>
__device__ __forceinline__ void store_dk(const ConsumerThread<T, kConfig>& c, const float (&dk)[kConfig.head_dim / 2]) {
    const Launch& launch = c.launch;
    const ForwardParams& p = launch.params.forward;
    const float factor = kFp16Scaled<T> ? p.scale / (c.ds_factor() * kPScale<T>) : p.scale;
    if (c.block().schedule.sums_in_workspace()) {
        if (launch.params.dk.data == nullptr) return;
        return store_split<kConfig.head_dim>(dk, factor, split_gradient<kConfig.head_dim>(c, launch.workspace.split_dk),
                                             launch.part > 0);
    }
    const GradientRows to = gradient_rows(c, launch.params.dk, launch.maps.dk, launch.gradients.tma_dk, p.head_dim);
    PanelRows rows[kConfig.qk_panels()];
    set_rows(rows, c.shared.k, c.first_row() + 16 * c.warp());
    store_gradient<T, kConfig.head_dim>(dk, factor, to, rows, c.lane());
}

/// Waits until no consumer warpgroup reads K and V.
template <Config kConfig>
__device__ __forceinline__ void sync_consumers() {
    ptx::named_barrier_sync(kEndBarrier, kConfig.threads() - 128);
}

/// The epilogue of a key block. The stores of dV overlap with the last dK.
template <class T, template <class, Config> class OfConsumer, Config kConfig>
__device__ __forceinline__ void store_gradients(OfConsumer<T, kConfig>& c) {
    ptx::named_barrier_sync(kWarpgroupBarrier + c.warpgroup, 128);  // only this warpgroup has read V of its keys
    store_dv(c, c.dv);
    wait_for_dk(c);
    sync_consumers<kConfig>();
    store_dk(c, c.dk);
    if (c.lane() == 0) ptx::tma_store_wait_read();
}
template <class T, Config kConfig>
__device__ __forceinline__ void store_gradients(DqConsumer<T, kConfig>& /*it has no gradient left*/) {
    sync_consumers<kConfig>();
}
template <class T, Config kConfig>
__device__ __forceinline__ void store_gradients(DvConsumer<T, kConfig>& c) {
    sync_consumers<kConfig>();
    store_dv(c, c.dv);
    if (c.lane() == 0) ptx::tma_store_wait_read();
}
template <class T, Config kConfig>
__device__ __forceinline__ void store_gradients(DkConsumer<T, kConfig>& c) {
    sync_consumers<kConfig>();
    store_dk(c, c.dk);
    if (c.lane() == 0) ptx::tma_store_wait_read();
}

}  // namespace tessera::cuda::fa3::backward
