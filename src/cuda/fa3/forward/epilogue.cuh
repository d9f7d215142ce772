// SPDX-License-Identifier: Apache-2.0
//
// The epilogue: O and LSE after the last block of keys, through shared memory and TMA where it can store them.
#pragma once

#include "cuda/fa3/forward/shared_storage.cuh"
#include "cuda/fa3/forward/softmax.cuh"
#include "cuda/fa3/forward/tile_scheduler.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/tile/residual.cuh"
#include "cuda/tile/sink.cuh"

namespace tessera::cuda::fa3 {

template <class T>
__device__ __forceinline__ T* element(const Rows& rows, int batch, int head, std::int64_t row, int column) {
    return reinterpret_cast<T*>(rows.data) + batch * rows.batch + head * rows.head + row * rows.row +
           column * rows.column;
}

/// Row of the tensor (varlen: over all sequences) of a query.
__device__ __forceinline__ std::int64_t tensor_row(const WorkTile& tile, int query) {
    return std::int64_t{tile.first_q} + query;
}

/// The data of a tile and of a thread's rows that the epilogue needs. It is copied beside the tile's last P V, after
/// which the tile's slot in the ring is released.
struct EpilogueTile {
    int batch, head;       ///< as in WorkTile
    int first_row;         ///< row of the tensor of the tile's first query
    int queries;           ///< rows of the tensor from there on
    int row;               ///< the thread's first row in the tile
    bool needs_slow_path;  ///< this warp's O is not stored by TMA alone (OutputStage::store)
    float inverse[2];      ///< factors of O: keep_scale / l
    float lse;             ///< LSE of the row that the thread writes (lse_target)
};

/// Address at which a thread writes LSE, or null. All four lanes of a quad hold both of its rows; the first lane writes
/// one and the second lane the other.
__device__ __forceinline__ float* lse_target(const ForwardParams& p, PackGqa pack, const EpilogueTile& tile, int lane) {
    const int row = tile.row + lane % 4 * 8;
    const int query = pack.query(row);
    if (p.lse.data == nullptr || lane % 4 > 1 || query >= tile.queries) return nullptr;
    return element<float>(p.lse, tile.batch, tile.head + pack.head(row), std::int64_t{tile.first_row} + query, 0);
}

/// Stores o_residual, the low-order bits that rounding takes off O; `o` is not yet rounded.
template <class T, int kCount>
__device__ __forceinline__ void store_residual(const float (&o)[kCount], const Launch& launch, const WorkTile& tile,
                                               int row, int lane) {
    ResidualTarget target =
        residual_target(launch.o_residual, tile.batch, tensor_row(tile, tile.q_begin), tile.head,
                        tile.q_end - tile.q_begin, launch.params.head_dim_v, launch.residual_by_vectors);
    target.shift = launch.pack.shift;
    target.head = launch.o_residual.head;
    cuda::store_residual<T, kCount / 4>(target, row, lane, [&](int columns, int e) { return o[4 * columns + e]; });
}

/// Stores the rows of a tile that sees no key: O = 0, LSE = -inf or the sink.
template <class T, Config kConfig>
__device__ __forceinline__ void store_empty_rows(const Launch& launch, const WorkTile& tile, int row, int lane) {
    const ForwardParams& p = launch.params;
    const EpilogueTile epilogue{tile.batch, tile.head, tile.first_q + tile.q_begin, tile.q_end - tile.q_begin, row};
    if (float* const to = lse_target(p, launch.pack, epilogue, lane))
        *to = with_sink_of(p, tile.head + launch.pack.head(row + lane % 4 * 8), -INFINITY).lse;
#pragma unroll 1  // rare, and in the middle of hot code: keep it small
    for (int own = row; own < row + 16; own += 8) {
        const int query = tile.q_begin + launch.pack.query(own);
        const int head = tile.head + launch.pack.head(own);
        if (query >= tile.q_end) continue;
        for (int column = lane % 4; column < p.head_dim_v; column += 4) {
            *element<T>(p.o, tile.batch, head, tensor_row(tile, query), column) = T(0.0F);
            if (launch.o_residual.data != nullptr) {
                *element<char>(launch.o_residual, tile.batch, head, tensor_row(tile, query), column) = 0;
            }
        }
    }
}

/// Stores O: each warp writes its 16 rows to shared memory and starts a TMA store of them. If O has its own shared
/// memory, the warp waits for this store only before the next tile's O.
template <Config kConfig>
struct OutputStage {
    /// Waits until TMA has read this warp's previous rows.
    __device__ __forceinline__ void wait(int lane) const {
        if (lane == 0) ptx::tma_store_wait_read();
        __syncwarp();
    }
    __device__ __forceinline__ void finish(int lane) const {
        if (lane == 0) ptx::tma_store_wait();
    }

    /// `details`() gives the EpilogueTile, `tile` is read on the slow path only.
    template <class T, class Panel, int kPanels, class Details>
    __device__ __forceinline__ void store(const float (&o)[kConfig.head_dim_v / 2], const Launch& launch, int row,
                                          const WorkTile& tile, Panel (&panels)[kPanels], int lane,
                                          const Details& details) const {
        const int warp_row = row - lane / 4;  // first of the warp's 16 rows in the tile
        const int panel_row = warp_row % 64;
        const int matrix_row = panel_row + lane % 8 + (lane / 8 % 2) * 8;
#pragma unroll
        for (int j = 0; j < kConfig.head_dim_v / 8; j += 2) {  // 16 columns at a time
            const auto panel = ptx::shared_address(panels[j / 8]);
            ptx::stmatrix_x4(panel + swizzled(matrix_row, j % 8 + lane / 16), ptx::pack<T>(o[4 * j], o[4 * j + 1]),
                             ptx::pack<T>(o[4 * j + 2], o[4 * j + 3]), ptx::pack<T>(o[4 * j + 4], o[4 * j + 5]),
                             ptx::pack<T>(o[4 * j + 6], o[4 * j + 7]));
        }
        const EpilogueTile epilogue = details();
        if (epilogue.needs_slow_path) {
            if (tile.v_is_sanitized) restore_nonfinite<T>(panels, launch, tile, warp_row, lane);
            if (!tma_can_store(launch, tile, warp_row)) {
                ptx::fence_proxy_async();  // K or V may be written here once this stage is returned
                return store_predicated<T>(panels, launch, tile, warp_row, lane);
            }
        }
        ptx::fence_proxy_async();  // for TMA, which reads these rows
        __syncwarp();
        if (lane != 0) return;
        const bool ragged = launch.params.cu_seqlens_q != nullptr;
        const int first_row = epilogue.first_row + launch.pack.query(warp_row);
#pragma unroll
        for (int panel = 0; panel < kConfig.v_panels(); ++panel) {
            ptx::tma_store_4d(&panels[panel][panel_row], launch.o, panel * kPanelColumns, epilogue.head, first_row,
                              ragged ? 0 : epilogue.batch);
        }
        ptx::tma_store_commit();
    }
    /// Can TMA store the warp's 16 rows from `warp_row` on?
    __device__ __forceinline__ static bool tma_can_store(const Launch& launch, const WorkTile& tile, int warp_row) {
        const bool ragged = launch.params.cu_seqlens_q != nullptr;
        return launch.store_by_tma & (!ragged | (tile.q_begin + launch.pack.query(warp_row + 16) <= tile.q_end));
    }

 private:
    // The slow path is rare and loops over shared memory. Unrolled over registers it would be more than half of the
    // kernel's code, whose loading short rows wait for.

    /// A Piece at column `column` of row `row` of the warpgroup.
    template <class Piece, class Panel, int kPanels>
    __device__ __forceinline__ static Piece& piece(Panel (&panels)[kPanels], int row, int column) {
        auto* panel = reinterpret_cast<char*>(panels[column / kPanelColumns]);
        return *reinterpret_cast<Piece*>(panel + swizzled(row % 64, column % kPanelColumns / 8) +
                                         column % 8 * static_cast<int>(sizeof(std::uint16_t)));
    }

    /// Adds the NaN and infinities that sanitize_v() took out of V to the rows that see them.
    template <class T, class Panel, int kPanels>
    __device__ __forceinline__ static void restore_nonfinite(Panel (&panels)[kPanels], const Launch& launch,
                                                             const WorkTile& tile, int warp_row, int lane) {
        const ForwardParams& p = launch.params;
        __syncwarp();
#pragma unroll 1
        for (int i = lane; i < 16 * p.head_dim_v; i += 32) {
            const int column = i / 16;
            const int row = warp_row + i % 16;
            const int query = tile.q_begin + launch.pack.query(row);
            T& o = piece<T>(panels, row, column);
            const T* value = element<T>(p.v, tile.batch, tile.kv_head, tile.first_kv, column);
            const int last = tile.band().last(query);
#pragma unroll 1
            for (int key = max(tile.band().first(query), 0); key <= last; ++key) {
                float v = 0;
                if constexpr (kConfig.cached) v = cached_value<T>(launch, tile, key, column);
                else v = static_cast<float>(value[key * p.v.row]);
                if (!isfinite(v)) o = T(static_cast<float>(o) + v);
            }
        }
    }

    /// An element of V in a cache; 0 where its page does not exist.
    template <class T>
    __device__ __forceinline__ static float cached_value(const Launch& launch, const WorkTile& tile, int key,
                                                         int column) {
        const Cache& cache = launch.cache;
        int row = tile.first_kv + key;
        std::int64_t at = tile.batch;
        if (cache.pages != nullptr) {
            const int number = cache.page_size.quotient(row);
            row -= number * cache.page_size.divisor();
            at = cache.pages[at * cache.pages_batch + number * cache.pages_step];
            if (at < 0 || at >= cache.count) return 0;
        } else if (cache.slots != nullptr) {
            at = cache.slots[at * cache.slots_step];
        }
        const Rows& v = launch.params.v;
        return static_cast<float>(*reinterpret_cast<const T*>(
            v.data + 2 * (at * v.batch + tile.kv_head * v.head + row * v.row + column * v.column)));
    }

    /// Predicated stores: the rows at the end of a varlen sequence, or an O that TMA can't address.
    template <class T, class Panel, int kPanels>
    __device__ __forceinline__ static void store_predicated(Panel (&panels)[kPanels], const Launch& launch,
                                                            const WorkTile& tile, int warp_row, int lane) {
        const ForwardParams& p = launch.params;
        const int step = launch.store_by_tma ? 8 : 1;  // columns: 16 bytes, or one element
        const int pieces = p.head_dim_v / step;
        __syncwarp();
#pragma unroll 1
        for (int i = lane; i < 16 * pieces; i += 32) {
            const int row = warp_row + i / pieces;
            const int column = i % pieces * step;
            const int query = tile.q_begin + launch.pack.query(row);
            if (query >= tile.q_end) return;
            T* to = element<T>(p.o, tile.batch, tile.head + launch.pack.head(row), tensor_row(tile, query), column);
            if (step == 8) *reinterpret_cast<uint4*>(to) = piece<uint4>(panels, row, column);
            else *to = piece<T>(panels, row, column);
        }
    }
};

}  // namespace tessera::cuda::fa3
