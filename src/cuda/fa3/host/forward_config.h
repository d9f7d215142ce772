// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/host/shape_list.hpp"

namespace tessera::cuda::fa3 {

/// What a score goes through besides scale and mask.
enum class Scores {
    plain,    ///< nothing
    capped,   ///< softcap
    alibi,    ///< ALiBi; scales of any sign
    dropout,  ///< nothing; some of the weights are dropped
    general,  ///< several of these, and scales of 0 and less
};

/// One compiled shape of the kernel. Dimensions of a Problem are padded with zeros to the next shape that holds them.
struct Config {
    int head_dim;    ///< of Q and K: a multiple of 32
    int head_dim_v;  ///< of V and O: a multiple of 32, at most head_dim
    int block_kv;
    int consumers;  ///< warpgroups of 64 queries each
    int kv_stages;  ///< of K and of V
    int q_stages;   ///< 2: the next Q tile arrives while this one is worked on, and O has shared memory of its own
    Scores scores = Scores::plain;
    /// Keys up to which the shape is chosen, in calls whose tiles take different times, and in others; 0: no limit.
    int short_row = 0;
    int short_even_row = 0;
    bool masked_only = false;  ///< for calls with a mask
    /// Two thread blocks, a cluster, work on two tiles of queries that see the same keys: each brings half of K and V
    /// to both.
    bool pairs = false;
    /// Of pairs: the two tiles are the same queries of two heads that share K and V, and whoever is free takes the next
    /// two (TileScheduler).
    bool pairs_of_heads = false;

    /// O has shared memory of its own; else it leaves through a stage of K and one of V (Producer::lend_stages).
    constexpr bool own_o() const { return q_stages > 1; }
    /// There is room for each warpgroup's O.
    constexpr bool o_fits() const { return own_o() || (consumers == 2 && block_kv >= 64 && head_dim >= head_dim_v); }

    /// A warpgroup goes through the blocks of keys that its own 64 rows see, skips those that only others see, and
    /// whole tiles in which it has no rows. Under masks and at the ends of rows that is less for some than for others,
    /// so the slices of a tile go round among the warpgroups. One warpgroup is then a few blocks ahead of another,
    /// which takes stages.
    constexpr bool skips_blocks() const { return own_o() && kv_stages >= 4 && consumers == 3; }

    /// Two warpgroups exponentiate one after the other, block by block. Not in the general shapes, in which it
    /// was not tried.
    constexpr bool takes_turns() const { return consumers == 2 && scores != Scores::general; }

    /// Rows of K and V that a thread block brings at once: of a pair, each half of a block, to both.
    constexpr int kv_box() const { return pairs ? block_kv / 2 : block_kv; }

    /// Panels of 64 columns in shared memory; zeros past head_dim.
    constexpr int qk_panels() const { return (head_dim + 63) / 64; }
    constexpr int v_panels() const { return (head_dim_v + 63) / 64; }
    constexpr int block_q() const { return 64 * consumers; }
    constexpr int threads() const { return 128 * (consumers + 1); }
    /// Of a thread at launch, and after the producer has given up what the consumers take, in steps of 8.
    constexpr int launch_registers() const { return 65536 / threads() / 8 * 8; }
    constexpr int producer_registers() const { return consumers == 3 ? 32 : scores == Scores::general ? 56 : 40; }
    constexpr int consumer_registers() const { return consumers == 3 ? 160 : scores == Scores::general ? 224 : 232; }
    /// The consumers would wait forever for more.
    constexpr bool registers_fit() const {
        return producer_registers() + consumers * consumer_registers() <= (consumers + 1) * launch_registers();
    }
};

/// The compiled shapes (cuda/host/shape_list.hpp), as types: what __global__ functions can be templates of.
struct HeadDim64 {
    static constexpr Config kConfig{
        .head_dim = 64, .head_dim_v = 64, .block_kv = 128, .consumers = 3, .kv_stages = 4, .q_stages = 2};
};
/// For short rows: the ends of tiles are shorter with registers for them, and two warpgroups take turns. And for long
/// causal rows of so few heads that tiles of 192 queries leave multiprocessors idle (wants_short). The same bits as
/// HeadDim64.
struct HeadDim64Short {
    static constexpr Config kConfig{
        .head_dim = 64,
        .head_dim_v = 64,
        .block_kv = 128,
        .consumers = 2,
        .kv_stages = 4,
        .q_stages = 2,
        .short_row = 1024,       // measured, under a causal mask: 1,024 keys 1.05 of HeadDim64, 1,536 0.97
        .short_even_row = 512};  // measured: 197 keys 1.18, 512 1.01, 768 0.97
};
struct HeadDim96 {
    static constexpr Config kConfig{
        .head_dim = 96, .head_dim_v = 96, .block_kv = 128, .consumers = 2, .kv_stages = 2, .q_stages = 2};
};
struct HeadDim128 {
    static constexpr Config kConfig{
        .head_dim = 128, .head_dim_v = 128, .block_kv = 128, .consumers = 2, .kv_stages = 2, .q_stages = 2};
};
/// Without a mask. Half of the bytes come from L2. The same bits as HeadDim128.
struct HeadDim128Pairs {
    static constexpr Config kConfig{.head_dim = 128,
                                    .head_dim_v = 128,
                                    .block_kv = 128,
                                    .consumers = 2,
                                    .kv_stages = 2,
                                    .q_stages = 2,
                                    .pairs = true};
};
/// Under a causal mask, of heads that share K and V. The same bits as HeadDim128.
struct HeadDim128HeadPairs {
    static constexpr Config kConfig{.head_dim = 128,
                                    .head_dim_v = 128,
                                    .block_kv = 128,
                                    .consumers = 2,
                                    .kv_stages = 2,
                                    .q_stages = 2,
                                    .pairs = true,
                                    .pairs_of_heads = true};
};
struct HeadDim192V128 {
    static constexpr Config kConfig{
        .head_dim = 192, .head_dim_v = 128, .block_kv = 128, .consumers = 2, .kv_stages = 2, .q_stages = 1};
};
struct HeadDim192 {
    static constexpr Config kConfig{
        .head_dim = 192, .head_dim_v = 192, .block_kv = 96, .consumers = 2, .kv_stages = 2, .q_stages = 1};
};
/// Under a mask: a causal tile of 128 queries ends on a block's edge, and has 64 keys too many, not 160 in two tiles.
/// Measured, beside blocks of 80 keys: 512 causal keys 1.07, 1,024 1.02, 2,048 1.01, 16,384 0.99; without a mask 0.97
/// to 1.00. The bits of a row are not those of the other shape: a mask may decide between them, a length may not.
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
/// The same shape for other scores, and for rows of all lengths.
constexpr Config with(Scores scores, Config config) {
    config.scores = scores;
    config.short_row = config.short_even_row = 0;
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
/// Shapes that do more to a score have shorter blocks: registers for it.
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
using Shapes =
    ShapeList<HeadDim64Short, HeadDim64, HeadDim96, HeadDim128Pairs, HeadDim128HeadPairs, HeadDim128, HeadDim192V128,
              HeadDim192, HeadDim256Masked, HeadDim256, HeadDim64Capped, HeadDim128Capped, HeadDim64Alibi,
              HeadDim128Alibi, HeadDim64Dropout, HeadDim128Dropout, HeadDim64General, HeadDim128General>;

}  // namespace tessera::cuda::fa3
