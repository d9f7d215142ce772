// SPDX-License-Identifier: Apache-2.0
//
// What happens to O and LSE after the last block of keys.
#pragma once

#include "cuda/fa3/shared.cuh"
#include "cuda/fa3/softmax.cuh"
#include "cuda/fa3/tile_scheduler.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/tile/rest.cuh"

namespace tessera::cuda::fa3 {

template <class T>
__device__ __forceinline__ T* element(const Rows& rows, int batch, int head, std::int64_t row, int column) {
    return reinterpret_cast<T*>(rows.data) + batch * rows.batch + head * rows.head + row * rows.row +
           column * rows.column;
}

/// Row of the tensor (ragged: over all members) of a query.
__device__ __forceinline__ std::int64_t tensor_row(const WorkTile& tile, int query) {
    return std::int64_t{tile.first_q} + query;
}

template <class T>
__device__ __forceinline__ void store_lse(const ForwardParams& p, const WorkTile& tile, const OnlineSoftmax<T>& rows,
                                          const ThreadRows& own, int lane) {
    // All four lanes of a quad hold both rows: the first writes one, the second the other.
    const int r = lane % 4;
    const int query = r == 0 ? own.query[0] : own.query[1];
    if (p.lse.data == nullptr || r > 1 || query >= tile.q_end) return;
    const int head = r == 0 ? own.head[0] : own.head[1];
    const float lse = r == 0 ? rows.lse(0) : rows.lse(1);
    *element<float>(p.lse, tile.batch, head, tensor_row(tile, query), 0) = lse;
}

/// What rounding takes off O, for those who keep it; o as it is rounded. Heads are not stacked then.
template <class T, int kCount>
__device__ __forceinline__ void store_rest(const float (&o)[kCount], const Launch& launch, const WorkTile& tile,
                                           int row, int lane) {
    const RestTarget target = rest_target(launch.o_rest, tile.batch, tile.first_q, tile.head, tile.q_end,
                                          launch.params.head_dim_v, launch.rest_by_vectors);
    cuda::store_rest<T, kCount / 4>(target, tile.q_begin + row, lane,
                                    [&](int columns, int e) { return o[4 * columns + e]; });
}

/// Rows of a tile that sees no key: O = 0, LSE = -inf.
template <class T, Config kConfig>
__device__ __forceinline__ void store_empty_rows(const Launch& launch, const WorkTile& tile, int row, int lane) {
    const ForwardParams& p = launch.params;
    const ThreadRows own(tile, launch.stack, row);
    store_lse(p, tile, OnlineSoftmax<T>{}, own, lane);
    for (int r = 0; r < 2; ++r) {
        if (own.query[r] >= tile.q_end) continue;
        for (int column = lane % 4; column < p.head_dim_v; column += 4) {
            *element<T>(p.o, tile.batch, own.head[r], tensor_row(tile, own.query[r]), column) = T(0.0F);
            if (launch.o_rest.data != nullptr) {
                *element<char>(launch.o_rest, tile.batch, own.head[r], tensor_row(tile, own.query[r]), column) = 0;
            }
        }
    }
}

/// O on its way out: each warp lays its 16 rows down in shared memory and starts a store of them. Where O has memory of
/// its own, nobody waits for that store before the next tile's O.
template <Config kConfig>
struct OutputStage {
    /// The copy engine has read what this warp laid down before.
    __device__ __forceinline__ void wait(int lane) const {
        if (lane == 0) ptx::tma_store_wait_read();
        __syncwarp();
    }
    __device__ __forceinline__ void finish(int lane) const {
        if (lane == 0) ptx::tma_store_wait();
    }

    template <class T, class Slab, int kSlabs>
    __device__ __forceinline__ void store(const float (&o)[kConfig.head_dim_v / 2], const Launch& launch,
                                          const WorkTile& tile, Slab (&slabs)[kSlabs], int row, int lane) const {
        const int warp_row = row - lane / 4;  // first of the warp's 16 rows in the tile
        const int slab_row = warp_row % 64;
        const int matrix_row = slab_row + lane % 8 + (lane / 8 % 2) * 8;
#pragma unroll
        for (int j = 0; j < kConfig.head_dim_v / 8; j += 2) {  // 16 columns at a time
            const auto slab = ptx::shared_address(slabs[j / 8]);
            ptx::stmatrix_x4(slab + swizzled(matrix_row, j % 8 + lane / 16), ptx::pack<T>(o[4 * j], o[4 * j + 1]),
                             ptx::pack<T>(o[4 * j + 2], o[4 * j + 3]), ptx::pack<T>(o[4 * j + 4], o[4 * j + 5]),
                             ptx::pack<T>(o[4 * j + 6], o[4 * j + 7]));
        }
        const bool ragged = launch.params.cu_seqlens_q != nullptr;
        const bool whole = !ragged || tile.q_begin + launch.stack.query(warp_row + 16) <= tile.q_end;
        if (tile.dirty) restore_lost<T>(slabs, launch, tile, warp_row, lane);
        // For the copy engine, which reads these rows, or writes K or V here once this memory is given back.
        ptx::fence_proxy_async();
        if (!launch.store_by_copy_engine || !whole) return copy_out<T>(slabs, launch, tile, warp_row, lane);
        __syncwarp();
        if (lane != 0) return;
        const int first_row = static_cast<int>(tensor_row(tile, tile.q_begin + launch.stack.query(warp_row)));
#pragma unroll
        for (int slab = 0; slab < kConfig.v_slabs(); ++slab) {
            ptx::tma_store_4d(&slabs[slab][slab_row], launch.o, slab * kSlabColumns, tile.head, first_row,
                              ragged ? 0 : tile.batch);
        }
        ptx::tma_store_commit();
    }

 private:
    /// What follows is rare, and loops over shared memory: written out on registers it was more than half of the
    /// kernel's code, which short rows waited for.

    /// A Piece at column `column` of row `row` of the warpgroup.
    template <class Piece, class Slab, int kSlabs>
    __device__ __forceinline__ static Piece& piece(Slab (&slabs)[kSlabs], int row, int column) {
        auto* slab = reinterpret_cast<char*>(slabs[column / kSlabColumns]);
        return *reinterpret_cast<Piece*>(slab + swizzled(row % 64, column % kSlabColumns / 8) +
                                         column % 8 * static_cast<int>(sizeof(std::uint16_t)));
    }

    /// Adds the NaN and infinities that the guard took out of V to the rows that see them. Slow.
    template <class T, class Slab, int kSlabs>
    __device__ __forceinline__ static void restore_lost(Slab (&slabs)[kSlabs], const Launch& launch,
                                                        const WorkTile& tile, int warp_row, int lane) {
        const ForwardParams& p = launch.params;
        __syncwarp();
#pragma unroll 1
        for (int i = lane; i < 16 * p.head_dim_v; i += 32) {
            const int column = i / 16;
            const int row = warp_row + i % 16;
            const int query = tile.q_begin + launch.stack.query(row);
            T& o = piece<T>(slabs, row, column);
            const T* value = element<T>(p.v, tile.batch, tile.kv_head, tile.first_kv, column);
            const int last = min(query + tile.high, tile.last_key);
#pragma unroll 1
            for (int key = max(query + tile.low, 0); key <= last; ++key) {
                const float v = static_cast<float>(value[key * p.v.row]);
                if (!isfinite(v)) o = T(static_cast<float>(o) + v);
            }
        }
    }

    /// The rows of a ragged member's end, or of an O that the copy engine can't write.
    template <class T, class Slab, int kSlabs>
    __device__ __forceinline__ static void copy_out(Slab (&slabs)[kSlabs], const Launch& launch, const WorkTile& tile,
                                                    int warp_row, int lane) {
        const ForwardParams& p = launch.params;
        const int step = launch.store_by_copy_engine ? 8 : 1;  // columns; rows of 16 bytes, or any
        const int pieces = p.head_dim_v / step;
        __syncwarp();
#pragma unroll 1
        for (int i = lane; i < 16 * pieces; i += 32) {
            const int row = warp_row + i / pieces;
            const int column = i % pieces * step;
            const int query = tile.q_begin + launch.stack.query(row);
            if (query >= tile.q_end) return;
            T* to = element<T>(p.o, tile.batch, tile.head + launch.stack.head(row), tensor_row(tile, query), column);
            if (step == 8) *reinterpret_cast<uint4*>(to) = piece<uint4>(slabs, row, column);
            else *to = piece<T>(slabs, row, column);
        }
    }
};

}  // namespace tessera::cuda::fa3
