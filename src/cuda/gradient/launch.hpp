// SPDX-License-Identifier: Apache-2.0
//
// The workspace of a backward pass, and the arguments of its kernels. Queries are counted in tiles of kBlockQ. The
// tiles of a ragged batch are numbered by where a sequence's rows begin; two sequences never share a tile.
#pragma once

#include <cuda_runtime_api.h>

#include "core/arena.hpp"
#include "cuda/backward/host/head_split.hpp"
#include "cuda/gradient/host/config.h"
#include "cuda/gradient/host/dq_order.hpp"
#include "cuda/host/divider.hpp"
#include "cuda/host/query_parts.hpp"
#include "cuda/host/work_list.hpp"
#include "cuda/tile/params.hpp"
#include "tessera/problem.hpp"

namespace tessera::cuda::gradient {

/// Row data of kBlockQ queries, from the delta kernels. An ordinary row has norm 0, and
/// P = exp2(scale * log2(e) * (Q K^T) - offset). A row with |LSE| over 256 has P = exp2((S - max) * log2(e)) * norm,
/// with S and max in units of the natural logarithm. A row without keys has offset +inf, and its other members are 0.
/// In fp32 offset is 0 and P = exp(S - max) * norm; in an ordinary row max is the LSE and norm 1.
struct RowTile {
    float offset[kBlockQ];
    float delta[kBlockQ];  // sum of P dP, minus dLSE
    float norm[kBlockQ];
    float max[kBlockQ];
};

/// RowTile::norm of a row that a kernel of delta from O has left to the kernel that sums P dP.
inline constexpr float kRowLeft = -1;

/// Numbers of tiles and blocks that all kernels of a call share.
struct Counts {
    int block_kv = 0;
    int q_tiles = 0;     // query tiles of a sequence of a dense call; ragged: 0 if no sequence may have any
    int key_blocks = 0;  // key blocks of a sequence of a dense call
    std::int64_t all_key_blocks = 0;  // key blocks of one head, over all sequences, at most
    std::int64_t tiles_of_head = 0;   // query tiles of one head, over all sequences

    Counts(const Problem& p, int keys_of_block)
        : block_kv(keys_of_block),
          q_tiles(static_cast<int>((p.len_q + kBlockQ - 1) / kBlockQ)),
          key_blocks(static_cast<int>((p.len_kv + keys_of_block - 1) / keys_of_block)),
          all_key_blocks(p.ragged ? p.total_kv / keys_of_block + p.batch : p.batch * key_blocks),
          // A ragged sequence may begin inside a tile, which then counts twice: one more tile per sequence.
          tiles_of_head(p.ragged ? p.total_q / kBlockQ + 1 + p.batch : p.batch * q_tiles) {}
};

/// Counters of one call, zeroed before it.
struct Counters {
    int next_cta = 0;   // dense: key blocks that have been taken, see take_key_block()
    int rows_left = 0;  // 1: a kernel of delta from O has left rows (kRowLeft)
};

/// Partial dK and dV of the splits of a group's heads (HeadSplit).
struct PartialSums {
    float* data = nullptr;  // [2: dK, dV][max_splits][heads_kv][keys][dim]
    int max_splits = 1;     // the most splits of any sequence
    std::int64_t keys = 0;  // keys of all sequences
    int heads_kv = 0;
    int dim = 0;  // padded

    TESSERA_HOST_DEVICE float* row(bool dv, int split, int kv_head, std::int64_t key) const {
        return data + (((std::int64_t{dv} * max_splits + split) * heads_kv + kv_head) * keys + key) * dim;
    }
};

struct Workspace {
    RowTile* rows;       // [heads_q, tiles_of_head]
    float* dq;           // [2 accumulators, heads_q, tiles_of_head, kBlockQ * padded head_dim], laid out as DqTile
    Counters* counters;  // all that follows is zeroed together with it
    int* dq_semaphores;  // [2 accumulators, heads_q, tiles_of_head]: DqSemaphore
    // In fp16:
    float* ds_scales;   // [batch, heads_q]: a bound of |dS| of the head, or with o_residual of |delta|; in the end
                        // the scale of dS
    float* do_squares;  // [batch, heads_q]: with o_residual, the largest |row|^2 of dO
    float* v_squares;   // [batch, heads_kv]: likewise of V
    PartialSums partial;
    int query_parts = 1;  // of any sequence, at most
    // Ragged calls only (cuda/host/work_list.hpp):
    ListedSequence* list = nullptr;  // [list_items]
    std::int64_t list_items = 0;     // its capacity
    int* next_numbers = nullptr;     // [query_parts]: as Counters::next_cta

    Workspace(Arena& arena, const Problem& p, const Counts& counts, int padded_dim, bool splits_heads,
              bool takes_blocks)
        : rows(arena.take<RowTile>(p.heads_q, counts.tiles_of_head)),
          dq(arena.take<float>(2, p.heads_q, counts.tiles_of_head, kBlockQ, padded_dim)),
          counters(arena.take<Counters>(1)),
          dq_semaphores(arena.take<int>(2, p.heads_q, counts.tiles_of_head)),
          ds_scales(arena.take<float>(p.batch, p.heads_q)),
          do_squares(arena.take<float>(p.batch, p.heads_q)),
          v_squares(arena.take<float>(p.batch, p.heads_kv)),
          partial{.keys = p.ragged ? p.total_kv : p.batch * p.len_kv,
                  .heads_kv = static_cast<int>(p.heads_kv),
                  .dim = padded_dim} {
        if (p.heads_q == 0) return;
        // The bounds of a ragged call may lie far beyond its tensors.
        const std::int64_t len_q = p.ragged ? std::min(p.len_q, p.total_q) : p.len_q;
        const std::int64_t len_kv = p.ragged ? std::min(p.len_kv, p.total_kv) : p.len_kv;
        const auto group = static_cast<int>(p.heads_q / p.heads_kv);
        int heads = group;  // of a CTA, at most
        if (splits_heads && p.ragged) {
            partial.max_splits = HeadSplit::max_splits(p.mask, len_q, len_kv, group);
        } else if (splits_heads) {
            heads = HeadSplit::heads_per_split(p.mask.bind(p.len_q, p.len_kv), group);
            partial.max_splits = HeadSplit::num_splits(heads, group);
        }
        query_parts =
            QueryParts(static_cast<int>(len_q), QueryParts::fitting(heads, QueryParts::max_terms(p.dtype))).count();
        if (p.ragged && takes_blocks) {
            list_items = counts.all_key_blocks * partial.max_splits;
            list = arena.take<ListedSequence>(list_items);
            next_numbers = arena.take<int>(query_parts);
        }
        if (partial.max_splits == 1 && (query_parts == 1 || p.dtype == DType::fp32)) return;
        partial.data = arena.take<float>(2, partial.max_splits, p.heads_kv, partial.keys, padded_dim);
    }
};

/// Arguments of dkdv_reduce_kernel.
struct DkdvReduceLaunch {
    static constexpr int kThreads = 256;
    static constexpr int kKeys = 64;  // keys of a tile

    BackwardParams params;
    PartialSums partial;
    bool splits_heads = false;  // some sequence has head splits
    int max_terms = 0;          // QueryParts::max_terms
    int tiles = 0;              // key tiles of a head; ragged: of all its sequences
    bool vector_dk = false;     // written 16 bytes at a time
    bool vector_dv = false;
};

/// Arguments of all other kernels.
struct Launch {
    BackwardParams params;
    RowTile* rows = nullptr;
    float* dq = nullptr;
    Counters* counters = nullptr;
    int* dq_semaphores = nullptr;
    float* ds_scales = nullptr;
    float* do_squares = nullptr;
    float* v_squares = nullptr;
    std::int64_t tiles_of_head = 0;
    int q_tiles = 0;
    int key_blocks = 0;
    bool vector_q = false;  // rows are read 16 bytes at a time: addresses, strides and sizes allow it
    bool vector_k = false;
    bool vector_v = false;
    bool vector_do = false;
    bool vector_dq = false;  // rows are written 16 bytes at a time
    bool vector_dk = false;
    bool vector_dv = false;
    Rows o_residual;                 // low-order bits of O, a byte an element; null: none
    bool vector_residual = false;    // O, its residual and dO are read eight elements at a time; fp32: O and dO four
    int segments = 1;                // segments of a head's key blocks (host/dq_order.hpp)
    PartialSums partial;             // dK and dV of each split of a group's heads
    int query_parts = 1;             // launches of the main kernel (cuda/host/query_parts.hpp)
    int part = 0;                    // the part of the queries that this launch has
    int max_terms = 0;               // QueryParts::max_terms
    int* next_cta = nullptr;         // the counter of this launch
    ListedSequence* list = nullptr;  // ragged: the list of its work, and its capacity
    int list_items = 0;
    // Dividers to decode the number of a CTA: by the key blocks of a segment; the splits of all heads; the splits of a
    // head; the kv heads.
    Divider block_divider, segment_divider, split_divider, kv_head_divider;
    bool delta_from_output = false;  // fp32 without dropout: delta = dO . O - dLSE

    TESSERA_HOST_DEVICE std::int64_t all_tiles() const { return params.forward.heads_q * tiles_of_head; }
    TESSERA_HOST_DEVICE std::int64_t kv_heads() const { return params.forward.batch * params.forward.heads_kv; }
    /// CTAs of the main kernel; some find no key block.
    TESSERA_HOST_DEVICE std::int64_t ctas() const {
        if (list != nullptr) return std::int64_t{list_items} * params.forward.heads_kv;
        return kv_heads() * partial.max_splits * segments * segment_size(segments, key_blocks);
    }
    /// To be called when all of the above is set.
    void set_dividers() {
        const auto divider = [](std::int64_t n) {
            return Divider(static_cast<int>(std::clamp(n, std::int64_t{1}, std::int64_t{1} << 30)));
        };
        block_divider = divider(segment_size(segments, key_blocks));
        segment_divider = divider(kv_heads() * partial.max_splits);
        split_divider = divider(partial.max_splits);
        kv_head_divider = divider(params.forward.heads_kv);
    }
};

}  // namespace tessera::cuda::gradient
