// SPDX-License-Identifier: Apache-2.0
//
// The compiled shapes of the forward: block sizes, warpgroups, stages and registers. Plain C++. Measured times are
// ratios on an H200 (fa3/TRIED.md).
#pragma once

#include "cuda/fa3/host/score_mod.h"
#include "cuda/host/shape_list.hpp"

namespace tessera::cuda::fa3 {

/// One compiled shape of the kernel. Dimensions of a Problem are padded with zeros to the first shape that holds them.
struct Config {
    int head_dim;    ///< columns of Q and K: a multiple of 32
    int head_dim_v;  ///< columns of V and O: a multiple of 32, at most head_dim
    int block_kv;
    int consumers;  ///< consumer warpgroups, of 64 queries each
    int kv_stages;  ///< stages of K, and of V
    int q_stages;   ///< 2: the next Q tile is loaded while this one is computed, and O has its own shared memory
    Scores scores = Scores::plain;
    /// Keys up to which the shape is chosen, in calls with uneven tiles and in others; 0: no limit.
    int short_row = 0;
    int short_even_row = 0;
    /// Rows of a sequence up to which the shape is chosen in a ragged call, in the mean; 0: no limit. With PackGQA the
    /// rows of all heads of a tile count.
    int small_rows = 0;
    int ctas = 1;              ///< thread blocks of a multiprocessor
    bool masked_only = false;  ///< the shape is chosen for calls with a mask only
    bool cached = false;       ///< K and V are in slots or pages of a cache

    /// O has its own shared memory; else the epilogue's O aliases a stage of K and one of V (hand_stages_to_epilogue).
    constexpr bool own_o() const { return q_stages > 1; }
    /// Does each warpgroup's O fit into the shared memory that it gets?
    constexpr bool o_fits() const { return own_o() || (consumers == 2 && block_kv >= 64 && head_dim >= head_dim_v); }

    /// A warpgroup skips key blocks that its own 64 rows don't see, and tiles in which it has no rows. Its work then
    /// depends on which rows of a tile it has, so the row blocks rotate among the warpgroups. Warpgroups drift a few
    /// blocks apart, which takes four stages.
    constexpr bool skips_blocks() const { return own_o() && kv_stages >= 4 && consumers == 3; }

    /// Ping-pong scheduling: two warpgroups exponentiate one after the other, block by block, each beside the other's
    /// GEMMs. Untried in the general shapes.
    constexpr bool ping_pong() const { return consumers == 2 && scores != Scores::general; }

    /// May a call have sinks? They come in by a branch beside a running wgmma, which ptxas serializes in the kernel of
    /// three consumers.
    constexpr bool takes_sinks() const { return consumers < 3; }

    /// Swizzle panels of 64 columns in shared memory, with zeros past head_dim.
    constexpr int qk_panels() const { return (head_dim + 63) / 64; }
    constexpr int v_panels() const { return (head_dim_v + 63) / 64; }
    constexpr int block_q() const { return 64 * consumers; }
    constexpr int threads() const { return 128 * (consumers + 1); }
    /// Threads that issue loads: in the cached shapes a warp, whose lanes read the page table.
    constexpr int producer_threads() const { return cached ? 32 : 1; }
    /// Does a dynamic tile scheduler take the tiles of a ragged call from a list (cuda/host/work_list.hpp)? With three
    /// consumers the producer has no registers for it: causal calls would be 2 % slower.
    constexpr bool takes_list() const { return !cached && consumers < 3; }
    constexpr bool takes_bias() const { return scores == Scores::bias || scores == Scores::general; }
    /// Does the producer need registers for a page table or the general path?
    constexpr bool large_producer() const { return cached || scores == Scores::general; }
    /// Registers of a thread at launch, and after setmaxnreg moved some from the producer to the consumers; multiples
    /// of 8.
    constexpr int launch_registers() const { return 65536 / (ctas * threads()) / 8 * 8; }
    constexpr int producer_registers() const { return consumers == 3 ? 32 : large_producer() ? 56 : 40; }
    constexpr int consumer_registers() const {
        return consumers == 3 ? 160 : consumers == 1 ? 216 : large_producer() ? 224 : 232;
    }
    /// With more registers than the thread block has, setmaxnreg.inc would wait forever.
    constexpr bool registers_fit() const {
        return producer_registers() + consumers * consumer_registers() <= (consumers + 1) * launch_registers();
    }
};

/// The compiled shapes (cuda/host/shape_list.hpp), as types: __global__ functions are templates of them.
struct HeadDim64 {
    static constexpr Config kConfig{
        .head_dim = 64, .head_dim_v = 64, .block_kv = 128, .consumers = 3, .kv_stages = 4, .q_stages = 2};
};
/// For short rows: two consumers have registers for a shorter tile transition, and ping-pong. It also runs long causal
/// rows if there are so few heads that tiles of 192 queries leave multiprocessors idle (wants_short). Same bits as
/// HeadDim64.
struct HeadDim64Short {
    static constexpr Config kConfig{
        .head_dim = 64,
        .head_dim_v = 64,
        .block_kv = 128,
        .consumers = 2,
        .kv_stages = 4,
        .q_stages = 2,
        .short_row = 1024,       // speed beside HeadDim64, causal: 1,024 keys 1.05, 1,536 0.97
        .short_even_row = 512};  // speed beside HeadDim64: 197 keys 1.18, 512 1.01, 768 0.97
};
/// For few rows a sequence (wants_small_tiles): tiles of 64 queries, two thread blocks on a multiprocessor, of which
/// one computes while the other waits. Same bits as HeadDim64.
struct HeadDim64Small {
    static constexpr Config kConfig{
        .head_dim = 64,
        .head_dim_v = 64,
        .block_kv = 128,
        .consumers = 1,
        .kv_stages = 2,
        .q_stages = 2,
        .small_rows = 320,  // speed beside HeadDim64Short: 64 rows 1.4, 128 1.13, 256 1.04, 512 0.98
        .ctas = 2};
};
struct HeadDim96 {
    static constexpr Config kConfig{
        .head_dim = 96, .head_dim_v = 96, .block_kv = 128, .consumers = 2, .kv_stages = 2, .q_stages = 2};
};
struct HeadDim128 {
    static constexpr Config kConfig{
        .head_dim = 128, .head_dim_v = 128, .block_kv = 128, .consumers = 2, .kv_stages = 2, .q_stages = 2};
};
/// Likewise. Same bits as HeadDim128.
struct HeadDim128Small {
    static constexpr Config kConfig{.head_dim = 128,
                                    .head_dim_v = 128,
                                    .block_kv = 128,
                                    .consumers = 1,
                                    .kv_stages = 1,
                                    .q_stages = 2,
                                    .small_rows = 160,  // speed beside HeadDim128: 64 rows 1.15, 128 1.00, 256 0.95
                                    .ctas = 2};
};
struct HeadDim192V128 {
    static constexpr Config kConfig{
        .head_dim = 192, .head_dim_v = 128, .block_kv = 128, .consumers = 2, .kv_stages = 2, .q_stages = 1};
};
struct HeadDim192 {
    static constexpr Config kConfig{
        .head_dim = 192, .head_dim_v = 192, .block_kv = 96, .consumers = 2, .kv_stages = 2, .q_stages = 1};
};
/// For calls with a mask. A causal tile of 128 queries ends on the edge of a block of 64 keys, so fewer hidden pairs
/// are computed than with blocks of 80. Speed beside those: 512 causal keys 1.06, 1,024 1.02, from 2,048 on 0.99 to
/// 1.00. The bits differ from HeadDim256: a mask may choose between the two, a length may not.
struct HeadDim256Masked {
    static constexpr Config kConfig{.head_dim = 256,
                                    .head_dim_v = 256,
                                    .block_kv = 64,
                                    .consumers = 2,
                                    .kv_stages = 2,
                                    .q_stages = 1,
                                    .masked_only = true};
};
struct HeadDim256 {
    static constexpr Config kConfig{
        .head_dim = 256, .head_dim_v = 256, .block_kv = 80, .consumers = 2, .kv_stages = 2, .q_stages = 1};
};
/// Returns the shape with another score modification, for rows of all lengths.
constexpr Config with(Scores scores, Config config) {
    config.scores = scores;
    config.short_row = config.short_even_row = config.small_rows = 0;
    return config;
}
struct HeadDim64Capped {
    static constexpr Config kConfig = with(Scores::capped, HeadDim64Short::kConfig);
};
struct HeadDim128Capped {
    static constexpr Config kConfig = with(Scores::capped, HeadDim128::kConfig);
};
struct HeadDim64Alibi {
    static constexpr Config kConfig = with(Scores::alibi, HeadDim64Short::kConfig);
};
struct HeadDim128Alibi {
    static constexpr Config kConfig = with(Scores::alibi, HeadDim128::kConfig);
};
struct HeadDim64Dropout {
    static constexpr Config kConfig = with(Scores::dropout, HeadDim64Short::kConfig);
};
struct HeadDim128Dropout {
    static constexpr Config kConfig = with(Scores::dropout, HeadDim128::kConfig);
};
/// The general path has shorter blocks, which leaves registers for it.
struct HeadDim64General {
    static constexpr Config kConfig{.head_dim = 64,
                                    .head_dim_v = 64,
                                    .block_kv = 64,
                                    .consumers = 2,
                                    .kv_stages = 4,
                                    .q_stages = 1,
                                    .scores = Scores::general};
};
struct HeadDim128General {
    static constexpr Config kConfig{.head_dim = 128,
                                    .head_dim_v = 128,
                                    .block_kv = 64,
                                    .consumers = 2,
                                    .kv_stages = 4,
                                    .q_stages = 1,
                                    .scores = Scores::general};
};
/// Returns the shape with a bias: blocks as in the general path, since the bias of a block takes registers, and a
/// second stage of Q, so that tiles overlap.
constexpr Config with_bias(Config config) {
    config.scores = Scores::bias;
    config.q_stages = 2;
    return config;
}
struct HeadDim64Bias {
    static constexpr Config kConfig = with_bias(HeadDim64General::kConfig);
};
struct HeadDim128Bias {
    static constexpr Config kConfig = with_bias(HeadDim128General::kConfig);
};
/// Returns the shape for keys in a cache, for rows of all lengths. It has the bits of that shape without a cache.
constexpr Config in_cache(Config config) {
    config.short_row = config.short_even_row = config.small_rows = 0;
    config.masked_only = false;
    config.cached = true;
    return config;
}
struct HeadDim64Cached {
    static constexpr Config kConfig = in_cache(HeadDim64Short::kConfig);
};
struct HeadDim128Cached {
    static constexpr Config kConfig = in_cache(HeadDim128::kConfig);
};
struct HeadDim256Cached {
    static constexpr Config kConfig = in_cache(HeadDim256Masked::kConfig);
};
using Shapes =
    ShapeList<HeadDim64Small, HeadDim64Short, HeadDim64, HeadDim96, HeadDim128Small, HeadDim128, HeadDim192V128,
              HeadDim192, HeadDim256Masked, HeadDim256, HeadDim64Capped, HeadDim128Capped, HeadDim64Alibi,
              HeadDim128Alibi, HeadDim64Dropout, HeadDim128Dropout, HeadDim64Bias, HeadDim128Bias, HeadDim64General,
              HeadDim128General, HeadDim64Cached, HeadDim128Cached, HeadDim256Cached>;

}  // namespace tessera::cuda::fa3
