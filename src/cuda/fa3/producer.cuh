// SPDX-License-Identifier: Apache-2.0
//
// The producer warpgroup: one warp starts copies of Q, K and V tiles, three look for NaN and infinities in V.
#pragma once

#include "cuda/fa3/shared.cuh"
#include "cuda/fa3/work.cuh"
#include "cuda/ptx/tma.cuh"

namespace tessera::cuda::fa3 {

/// Starts the copy of a tile: slabs of `rows` rows from row `row` of (head, batch).
template <class Slab, int kSlabs>
__device__ __forceinline__ void copy_in(Slab (&slabs)[kSlabs], const CUtensorMap& map, int row, int head, int batch,
                                        ptx::Mbarrier& full, ptx::CacheHint hint) {
#pragma unroll
    for (int s = 0; s < kSlabs; ++s) ptx::tma_load_4d(slabs[s], map, s * kSlabColumns, row, head, batch, full, hint);
}

/// Runs on one thread. K goes one block ahead of V, as the consumers take them; Q comes after the first K.
template <Config kConfig>
__device__ __forceinline__ void produce(const Launch& launch, Shared<kConfig>& shared) {
    RingPosition<kConfig.q_stages> q;
    RingPosition<kConfig.kv_stages> k, v;
    TileSource source{launch, shared.tiles};
    for (int index = source.next(); index != kNoTile; index = source.next()) {
        const Work<kConfig.block_q(), kConfig.block_kv> work(launch, index);
        if (!work.has_keys()) continue;
        const bool ragged = launch.params.cu_seqlens_q != nullptr;
        const int batch = ragged ? 0 : work.batch;
        const int kv_head = work.head / launch.params.group;
        const auto load_k = [&](int n) {
            k.wait_empty(shared.k_ring);
            ptx::mbarrier_arrive_expect(shared.k_ring.full[k.stage()], sizeof(shared.k[0]));
            copy_in(shared.k[k.stage()], launch.k, work.first_kv + n * kConfig.block_kv, kv_head, batch,
                    shared.k_ring.full[k.stage()], ptx::CacheHint::evict_last);
            k.advance();
        };
        const auto load_v = [&](int n) {
            v.wait_empty(shared.v_ring);
            ptx::mbarrier_arrive_expect(shared.v_ring.full[v.stage()], sizeof(shared.v[0]));
            copy_in(shared.v[v.stage()], launch.v, work.first_kv + n * kConfig.block_kv, kv_head, batch,
                    shared.v_ring.full[v.stage()], ptx::CacheHint::evict_last);
            v.advance();
        };
        load_k(work.n_end - 1);
        q.wait_empty(shared.q_ring);
        ptx::mbarrier_arrive_expect(shared.q_ring.full[q.stage()], sizeof(shared.q[0]));
        for (int w = 0; w < kConfig.consumers; ++w) {
            copy_in(shared.q[q.stage()][w], launch.q, work.first_q + work.q_begin + 64 * w, work.head, batch,
                    shared.q_ring.full[q.stage()], ptx::CacheHint::evict_first);
        }
        q.advance();
        for (int n = work.n_end - 2; n >= work.n_begin; --n) {
            load_k(n);
            load_v(n + 1);
        }
        load_v(work.n_begin);
    }
}

/// Does a packed pair of 16-bit floats hold a NaN or infinity? kExponent: the exponent bits of one.
__device__ __forceinline__ bool exponent_full(std::uint32_t pair, std::uint32_t exponent) {
    return (pair & exponent) == exponent || (pair & (exponent << 16)) == (exponent << 16);
}

/// A hidden weight is 0, but 0 * NaN is NaN: in blocks where some row does not see some key, non-finite elements of V
/// are set to 0 before they are multiplied. The consumers put them back into the rows that see them (restore_lost).
template <class T, Config kConfig>
__device__ __forceinline__ void guard(const Launch& launch, Shared<kConfig>& shared, int thread) {
    constexpr std::uint32_t kExponent = std::is_same_v<T, __half> ? 0x7C00 : 0x7F80;
    constexpr int kChunks = sizeof(shared.v[0]) / sizeof(uint4);
    RingPosition<kConfig.kv_stages> v;
    TileReader reader{shared.tiles};
    const int lane = thread % 32;
    for (int index = reader.next(lane); index != kNoTile; index = reader.next(lane)) {
        const Work<kConfig.block_q(), kConfig.block_kv> work(launch, index);
        if (!work.has_keys()) continue;
        for (int n = work.n_end - 1; n >= work.n_begin; --n, v.advance()) {
            v.wait_full(shared.v_ring);  // also where there is nothing to do, to stay in step with the ring
            if (!work.partial(n)) {
                if (lane == 0) v.release(shared.v_ring);
                continue;
            }
            auto* chunks = reinterpret_cast<uint4*>(shared.v[v.stage()]);
            bool found = false;
            for (int i = thread; i < kChunks; i += 32 * kGuardWarps) {
                uint4 c = chunks[i];
                if (!exponent_full(c.x, kExponent) && !exponent_full(c.y, kExponent) &&
                    !exponent_full(c.z, kExponent) && !exponent_full(c.w, kExponent)) {
                    continue;
                }
                found = true;
                auto* element = reinterpret_cast<std::uint16_t*>(&chunks[i]);
                for (int e = 0; e < 8; ++e) {
                    if ((element[e] & kExponent) == kExponent) element[e] = 0;
                }
            }
            const bool dirty = __any_sync(0xFFFFFFFF, found);
            ptx::fence_proxy_async();
            __syncwarp();
            if (lane == 0) {
                shared.v_dirty[v.stage()][thread / 32] = dirty;
                ptx::mbarrier_arrive(shared.v_clean[v.stage()]);
                v.release(shared.v_ring);
            }
        }
    }
}

}  // namespace tessera::cuda::fa3
