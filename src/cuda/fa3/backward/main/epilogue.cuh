// SPDX-License-Identifier: Apache-2.0
//
// dK and dV on their way out, through the shared memory that K and V were in.
#pragma once

#include "cuda/fa3/backward/main/mainloop_128.cuh"
#include "cuda/fa3/backward/main/mainloop_64.cuh"
#include "cuda/fa3/backward/main/mainloop_wide.cuh"

namespace tessera::cuda::fa3::backward {

/// + 0: whether a -0 met more products of weight 0 must not show.
__device__ __forceinline__ float scaled(float x, float factor) { return fmaf(x, factor, 0.0F); }
/// No factor: sums that begin with 0 are no -0.
struct Unscaled {};
__device__ __forceinline__ float scaled(float x, Unscaled /*unused*/) { return x; }

/// Where a warp's 16 rows of a gradient go.
struct GradientRows {
    const Rows& rows;
    const CUtensorMap& map;
    bool by_tma;
    int batch, head;
    int row;    ///< of the tensor (ragged: over all sequences)
    int count;  ///< of the 16 rows, how many the tensor or the sequence has; may be 0 or less
    int columns;
};

/// A warp's 16 rows of a panel in shared memory.
using PanelRows = std::uint16_t (*)[kPanelColumns];

/// Those of panels that lie one after the other.
template <class Panel, int kPanels>
__device__ __forceinline__ void set_rows(PanelRows (&rows)[kPanels], Panel (&panels)[kPanels], int first) {
#pragma unroll
    for (int i = 0; i < kPanels; ++i) rows[i] = &panels[i][first];
}

/// Stores 16 rows of accumulators times `factor`, [16][kDim]; `panels`: nobody else uses them.
template <class T, int kDim, class Factor, int kPanels>
__device__ __forceinline__ void store_gradient(const float (&gradient)[kDim / 2], Factor factor, const GradientRows& to,
                                               const PanelRows (&panels)[kPanels], int lane) {
    if (to.rows.data == nullptr || to.count <= 0) return;
    if (!to.by_tma || to.count < 16) {
        T* out = reinterpret_cast<T*>(to.rows.data) + to.batch * to.rows.batch + to.head * to.rows.head +
                 to.row * to.rows.row;
#pragma unroll
        for (int i = 0; i < kDim / 2; ++i) {
            const int row = lane / 4 + 8 * row_of(i);
            const int column = column_of(i) + 2 * (lane % 4);
            if (row < to.count && column < to.columns) {
                out[row * to.rows.row + column * to.rows.column] = T(scaled(gradient[i], factor));
            }
        }
        return;
    }
    const int matrix_row = lane % 8 + lane / 8 % 2 * 8;
#pragma unroll
    for (int j = 0; j < kDim / 8; j += 2) {  // 16 columns at a time
        std::uint32_t packed[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            packed[i] =
                ptx::pack<T>(scaled(gradient[4 * j + 2 * i], factor), scaled(gradient[4 * j + 2 * i + 1], factor));
        }
        ptx::stmatrix_x4(ptx::shared_address(*panels[j / 8]) + swizzled(matrix_row, j % 8 + lane / 16), packed[0],
                         packed[1], packed[2], packed[3]);
    }
    ptx::fence_proxy_async();
    __syncwarp();
    if (lane != 0) return;
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
        ptx::tma_store_4d(panels[panel], to.map, panel * kPanelColumns, to.row, to.head, to.batch);
    }
    ptx::tma_store_commit();
}

/// Adds the NaN and infinities that were taken out of dO to dV of the keys that those rows see. Rare, and slow.
template <class T, Config kConfig>
__device__ __forceinline__ void restore_lost(const ConsumerThread<T, kConfig>& c, float (&dv)[kConfig.head_dim_v / 2]) {
    const ForwardParams& p = c.launch.params.forward;
    const Rows& d_o = c.launch.params.d_o;
    const KeyBlock<kConfig>& block = c.block();
    const int batch = p.cu_seqlens_q != nullptr ? 0 : block.batch;
#pragma unroll
    for (int i = 0; i < kConfig.head_dim_v / 2; ++i) {
        const int key = block.n * kConfig.block_kv + c.row() + 8 * row_of(i);
        const int column = column_of(i) + 2 * (c.lane() % 4);
        if (key >= block.blocks.len_kv || column >= p.head_dim_v) continue;
        const int last = min(key - block.blocks.low, block.blocks.len_q - 1);
#pragma unroll 1
        for (int head = block.end_head - block.blocks.share_heads; head < block.end_head; ++head) {
            const T* values = reinterpret_cast<const T*>(d_o.data) + batch * d_o.batch + head * d_o.head +
                              block.first_q * d_o.row + column * d_o.column;
#pragma unroll 1
            for (int query = max(key - block.blocks.high, 0); query <= last; ++query) {
                const float value = static_cast<float>(values[query * d_o.row]);
                if (!isfinite(value)) dv[i] += value;
            }
        }
    }
}

/// Where this warp's rows of dK or dV go.
template <class T, Config kConfig>
__device__ __forceinline__ GradientRows gradient_rows(const ConsumerThread<T, kConfig>& c, const Rows& rows,
                                                      const CUtensorMap& map, bool by_tma, int columns) {
    const KeyBlock<kConfig>& block = c.block();
    const int key = block.n * kConfig.block_kv + c.first_row() + 16 * c.warp();
    const bool ragged = c.launch.params.forward.cu_seqlens_q != nullptr;
    return {
        rows,   map, by_tma, ragged ? 0 : block.batch, block.kv_head, block.first_kv + key, block.blocks.len_kv - key,
        columns};
}

/// Where dK or dV of this warpgroup's 64 keys go, if the block has a share of the group: [64 keys][kDim] of `shares`.
template <int kDim, class T, Config kConfig>
__device__ __forceinline__ float* own_share(const ConsumerThread<T, kConfig>& c, float* shares) {
    const Launch& launch = c.launch;
    const KeyBlock<kConfig>& block = c.block();
    const std::int64_t head = std::int64_t{block.share} * launch.params.forward.heads_kv + block.kv_head;
    const std::int64_t place = head * launch.blocks_kv +
                               first_block_kv(launch.params.forward, kConfig.block_kv, block.batch, block.first_kv) +
                               block.n;
    return shares + place * (kConfig.block_kv * kDim) + c.first_row() * kDim;
}

/// Accumulators times `factor`, as they lie.
template <int kDim>
__device__ __forceinline__ void store_share(const float (&gradient)[kDim / 2], float factor, float* to) {
    auto* out = reinterpret_cast<float4*>(to) + threadIdx.x % 128;
#pragma unroll
    for (int j = 0; j < kDim / 8; ++j) {
        out[128 * j] = make_float4(scaled(gradient[4 * j], factor), scaled(gradient[4 * j + 1], factor),
                                   scaled(gradient[4 * j + 2], factor), scaled(gradient[4 * j + 3], factor));
    }
}

template <class T, Config kConfig>
__device__ __forceinline__ void store_dv(const ConsumerThread<T, kConfig>& c, float (&dv)[kConfig.head_dim_v / 2]) {
    const Launch& launch = c.launch;
    if (c.block().lost != 0) restore_lost(c, dv);
    // In fp16 weights come without what dropout multiplies them by.
    const float factor = kHeld<T> ? launch.params.forward.keep_scale / kWeightUnit<T> : 1.0F;
    if (c.block().blocks.shares > 1) {
        if (launch.params.dv.data == nullptr) return;
        return store_share<kConfig.head_dim_v>(dv, factor, own_share<kConfig.head_dim_v>(c, launch.workspace.dv));
    }
    const GradientRows to =
        gradient_rows(c, launch.params.dv, launch.dv, launch.store_dv_by_tma, launch.params.forward.head_dim_v);
    PanelRows rows[kConfig.v_panels()];
    set_rows(rows, c.shared.v, c.first_row() + 16 * c.warp());
    if constexpr (kHeld<T>) store_gradient<T, kConfig.head_dim_v>(dv, factor, to, rows, c.lane());
    else store_gradient<T, kConfig.head_dim_v>(dv, Unscaled{}, to, rows, c.lane());
}

/// Through the memory of K; or, where the next block's K may be on its way to that, through the warpgroup's share of
/// the next dS, and memory that is there for the columns over 64.
template <class T, Config kConfig>
__device__ __forceinline__ void store_dk(const ConsumerThread<T, kConfig>& c, const float (&dk)[kConfig.head_dim / 2]) {
    const Launch& launch = c.launch;
    const ForwardParams& p = launch.params.forward;
    const float factor = kHeld<T> ? p.scale / (c.unit() * kWeightUnit<T>) : p.scale;
    if (c.block().blocks.shares > 1) {
        if (launch.params.dk.data == nullptr) return;
        return store_share<kConfig.head_dim>(dk, factor, own_share<kConfig.head_dim>(c, launch.workspace.dk));
    }
    const GradientRows to = gradient_rows(c, launch.params.dk, launch.dk, launch.store_dk_by_tma, p.head_dim);
    PanelRows rows[kConfig.qk_panels()];
    const int row = c.first_row() + 16 * c.warp();
    if constexpr (kConfig.goes_on()) {
        static_assert(kConfig.qk_panels() == 2);
        rows[0] = &c.shared.ds[c.steps % Config::kStages][c.warpgroup][16 * c.warp()];
        rows[1] = &c.shared.dk_rest[row];
    } else {
        set_rows(rows, c.shared.k, row);
    }
    store_gradient<T, kConfig.head_dim>(dk, factor, to, rows, c.lane());
}

/// When nobody reads K and V any more.
template <Config kConfig>
__device__ __forceinline__ void meet_at_the_end() {
    ptx::named_barrier_sync(kEndBarrier, kConfig.threads() - 128);
}

/// dV goes out beside the last dK.
template <class T, template <class, Config> class OfConsumer, Config kConfig>
__device__ __forceinline__ void store_gradients(OfConsumer<T, kConfig>& c) {
    ptx::named_barrier_sync(kWarpgroupBarrier + c.warpgroup, 128);  // V of these keys was read by this warpgroup alone
    store_dv(c, c.dv);
    end_steps(c);
    if constexpr (kConfig.goes_on()) {
        store_dk(c, c.dk);
        if (c.lane() != 0) return;
        ptx::tma_store_wait_read<1>();  // dV has left shared memory; dK is waited for in begin_steps()
        ptx::mbarrier_arrive(c.shared.on.v_empty);
    } else {
        meet_at_the_end<kConfig>();
        store_dk(c, c.dk);
        if (c.lane() == 0) ptx::tma_store_wait_read();
    }
}
template <class T, Config kConfig>
__device__ __forceinline__ void store_gradients(QueriesConsumer<T, kConfig>& /*its dQ is out*/) {
    meet_at_the_end<kConfig>();
}
template <class T, Config kConfig>
__device__ __forceinline__ void store_gradients(WeightsConsumer<T, kConfig>& c) {
    meet_at_the_end<kConfig>();
    store_dv(c, c.dv);
    if (c.lane() == 0) ptx::tma_store_wait_read();
}
template <class T, Config kConfig>
__device__ __forceinline__ void store_gradients(ScoresConsumer<T, kConfig>& c) {
    meet_at_the_end<kConfig>();
    store_dk(c, c.dk);
    if (c.lane() == 0) ptx::tma_store_wait_read();
}

}  // namespace tessera::cuda::fa3::backward
