// SPDX-License-Identifier: Apache-2.0
//
// The workspace of a backward, and what its kernels are launched with. Queries are counted in tiles of kBlockQ, those
// of a ragged batch by where a sequence's rows begin: a sequence never shares a tile with another one.
#pragma once

#include <cuda_runtime_api.h>

#include "core/arena.hpp"
#include "cuda/gradient/host/config.h"
#include "cuda/gradient/host/head_split.hpp"
#include "cuda/host/divider.hpp"
#include "cuda/tile/params.hpp"
#include "tessera/problem.hpp"

namespace tessera::cuda::gradient {

/// What the kernels that come after delta need of kBlockQ queries. An ordinary row has norm 0, and
/// P = exp2(scale * log2(e) * product - offset). Where |LSE| passes 256, P = exp2((S - max) * log2(e)) * norm, S and
/// max in units of the natural logarithm. A row without keys: offset +inf, the rest 0.
struct RowTile {
    float offset[kBlockQ];
    float delta[kBlockQ];  // sum of P dP, less dLSE
    float norm[kBlockQ];
    float max[kBlockQ];
};

/// What all kernels of one call count in.
struct Counts {
    int block_kv = 0;
    int q_tiles = 0;                 // tiles of queries of one sequence at most
    int key_blocks = 0;              // blocks of keys, likewise
    std::int64_t tiles_of_head = 0;  // tiles of queries of one head, over all sequences

    Counts(const Problem& p, int keys_of_block)
        : block_kv(keys_of_block),
          q_tiles(static_cast<int>((p.len_q + kBlockQ - 1) / kBlockQ)),
          key_blocks(static_cast<int>((p.len_kv + keys_of_block - 1) / keys_of_block)),
          // A ragged sequence begins anywhere in a tile, and may share its first one with the sequence before: one more
          // each.
          tiles_of_head(p.ragged ? p.total_q / kBlockQ + 1 + p.batch : p.batch * q_tiles) {}
};

/// How far the sums of dQ are. Zeroed before each call.
struct Progress {
    int ticket = 0;     // blocks of keys that have begun
    int broken = 0;     // cu_seqlens fall somewhere: nothing is waited for, whatever the result
    int some_left = 0;  // with the residual of O: rows are left to the kernel that sums delta
};

struct Workspace {
    RowTile* rows;       // [heads_q, tiles_of_head]
    float* dq;           // [2 sweeps, heads_q, tiles_of_head, kBlockQ, padded head_dim], in the order of DqTile
    Progress* progress;  // with `done` behind it
    int* done;           // [2 sweeps, heads_q, tiles_of_head]: the last block of keys that has added to the tile, + 1
    // In fp16:
    float* limits;  // [batch, heads_q]: over every |dS| of the head, or with the residual of O every |delta|; in the
                    // end the power of two that dS is held times
    float* do_squares;  // [batch, heads_q]: with the residual of O, over |row|^2 of dO
    float* v_squares;   // [batch, heads_kv]: and of V
    ShareSums shares;

    Workspace(Arena& arena, const Problem& p, const Counts& counts, int padded_dim, bool with_shares)
        : rows(arena.take<RowTile>(p.heads_q, counts.tiles_of_head)),
          dq(arena.take<float>(2, p.heads_q, counts.tiles_of_head, kBlockQ, padded_dim)),
          progress(arena.take<Progress>(1)),
          done(arena.take<int>(2, p.heads_q, counts.tiles_of_head)),
          limits(arena.take<float>(p.batch, p.heads_q)),
          do_squares(arena.take<float>(p.batch, p.heads_q)),
          v_squares(arena.take<float>(p.batch, p.heads_kv)),
          shares{.keys = p.ragged ? p.total_kv : p.batch * p.len_kv,
                 .heads_kv = static_cast<int>(p.heads_kv),
                 .dim = padded_dim} {
        if (!with_shares || p.heads_q == 0) return;
        const auto group = static_cast<int>(p.heads_q / p.heads_kv);
        shares.most = p.ragged ? ShareRule::most(p.mask, p.len_q, p.len_kv, shares.heads_kv, group)
                               : ShareRule::count(
                                     ShareRule::heads(p.mask.bind(p.len_q, p.len_kv), shares.heads_kv, group), group);
        if (shares.most > 1) shares.data = arena.take<float>(2, shares.most, p.heads_kv, shares.keys, padded_dim);
    }
};

/// What the kernel that sums shares is launched with.
struct SumSharesLaunch {
    static constexpr int kThreads = 256;
    static constexpr int kKeys = 64;  // of a tile

    BackwardParams params;
    ShareSums sums;
    int tiles = 0;           // of a head's keys
    bool vector_dk = false;  // written 16 bytes at a time
    bool vector_dv = false;
};

struct Launch {
    BackwardParams params;
    RowTile* rows = nullptr;
    float* dq = nullptr;
    Progress* progress = nullptr;
    int* done = nullptr;
    float* limits = nullptr;
    float* do_squares = nullptr;
    float* v_squares = nullptr;
    std::int64_t tiles_of_head = 0;
    int q_tiles = 0;
    int key_blocks = 0;
    bool vector_q = false;  // rows are read 16 bytes at a time: addresses, strides and sizes allow it
    bool vector_k = false;
    bool vector_v = false;
    bool vector_do = false;
    bool vector_dq = false;  // and written so
    bool vector_dk = false;
    bool vector_dv = false;
    Rows o_residual;               // what rounding took off O, a byte an element; null: delta is summed
    bool vector_residual = false;  // O, the bytes and dO are read eight elements at a time
    int parts = 1;                 // that blocks of keys start in
    ShareSums shares;              // of a group's heads
    // From a thread block's number to what it works on, without divisions: blocks of a part of a share, shares of a
    // part, shares of a kv head, kv heads.
    Divider by_blocks, by_shares, by_share, by_heads;

    TESSERA_HOST_DEVICE std::int64_t all_tiles() const { return params.forward.heads_q * tiles_of_head; }
    /// Of a head that has so many blocks of keys: how many are in a part.
    TESSERA_HOST_DEVICE int part_size(int blocks) const { return parts > 1 ? (blocks + kParts - 1) / kParts : blocks; }
    TESSERA_HOST_DEVICE std::int64_t heads() const { return params.forward.batch * params.forward.heads_kv; }
    /// Thread blocks that take a block of keys; some find none.
    TESSERA_HOST_DEVICE std::int64_t thread_blocks() const {
        return heads() * shares.most * parts * part_size(key_blocks);
    }
    /// Once all of the above is known.
    void set_dividers() {
        const auto divider = [](std::int64_t n) {
            return Divider(static_cast<int>(std::clamp(n, std::int64_t{1}, std::int64_t{1} << 30)));
        };
        by_blocks = divider(part_size(key_blocks));
        by_shares = divider(heads() * shares.most);
        by_share = divider(shares.most);
        by_heads = divider(params.forward.heads_kv);
    }
};

}  // namespace tessera::cuda::gradient
