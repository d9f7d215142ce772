// SPDX-License-Identifier: Apache-2.0
//
// Lessons 5 to 9: tiles, the online softmax, the backward, the mask.
#include <fmt/format.h>

#include "cuda/fa2/host/config.h"
#include "learn/lesson.hpp"
#include "learn/setting.hpp"

namespace tessera::learn {

Exercise tile_size_exercise() {
    const double kib = h200().shared_kib;
    cuda::fa2::Config config = cuda::fa2::HeadDim128::kConfig;
    config.rows_in_shared = false;
    int block = 0;
    for (config.block_kv = 16; config.shared_bytes() <= kib * kKiB; config.block_kv += 16) block = config.block_kv;
    config.stages = 1;
    int single = 0;
    for (config.block_kv = 16; config.shared_bytes() <= kib * kKiB; config.block_kv += 16) single = config.block_kv;
    config.stages = 2, config.block_kv = block;
    return {
        .task = fmt::format(
            "head_dim 128, 2 bytes an element. The scratchpad holds a tile of 128 queries, and K and V tiles twice: "
            "while one pair is worked on, the next one arrives. It has {:g} KiB. What is the largest tile of keys, "
            "in multiples of 16?",
            kib),
        .unit = "keys",
        .value = static_cast<double>(block),
        .answer = fmt::format("{} keys", block),
        .why = fmt::format(
            "Q takes 128 * 128 * 2 bytes = {} KiB and leaves {:g}. A key takes 2 (K and V) * 2 (twice) * 128 * 2 "
            "bytes = 1 KiB. With {} keys the tile takes {} KiB; 16 more do not fit.",
            config.q_bytes() / 1024, kib - config.q_bytes() / kKiB, block, config.shared_bytes() / 1024),
        .mistakes = {{static_cast<double>(single), "That counts one pair of K and V; there are two."},
                     {kib - config.q_bytes() / kKiB, "Right so far; now the multiple of 16 below it."}}};
}

Exercise running_maximum_exercise() {
    const walk::Hand hand = stream_scores({1, 3, 2, 5}, 2);
    const walk::HandStep& first = hand.steps[0];
    const walk::HandStep& second = hand.steps[1];
    const walk::Fraction fresh = second.l - second.rescale * first.l;
    return {
        .task =
            "Scores 1, 3, 2, 5 come in tiles of two, with base 2: weights are 2^(s - m). After the first tile m = 3 "
            "and l = 5/4. What is l after the second tile?",
        .value = second.l.value(),
        .answer = second.l.text(),
        .why = fmt::format(
            "m rises from {} to {}, so what was summed shrinks by 2^({} - {}) = {}: {} * {} = {}. The new tile adds "
            "{}.",
            *first.m, *second.m, *first.m, *second.m, second.rescale.text(), second.rescale.text(), first.l.text(),
            (second.rescale * first.l).text(), fresh.text()),
        .mistakes = {{(first.l + fresh).value(), "The old sum was left as it was: it belongs to the old maximum."},
                     {fresh.value(), "The old sum was thrown away: it shrinks, and stays."}}};
}

Exercise one_tile_exercise() {
    const walk::Hand hand = walk::work_by_hand(pencil_example(), Schedule::fa2, {});
    const walk::HandStep& last = hand.steps[3];  // row 1, the second tile of keys
    return {
        .task =
            "The page follows row 0. Now row 1, q = (0, 1): after keys 0 and 1 it has m = 1, l = 3/2 and O = (4, 2). "
            "Keys 2 and 3 give s = 0 and 2; their v are (2, 2) and (8, -4). What is the first element of O at the "
            "end, after the division by l?",
        .value = hand.rows[1].o[0].value(),
        .answer = hand.rows[1].o[0].text(),
        .why = fmt::format(
            "m rises to {}, rescale {}. l = {} * {} + 1/4 + 1 = {}. O = {} * 4 + 1/4 * 2 + 1 * 8 = {}, and {} / {} "
            "= {}.",
            *last.m, last.rescale.text(), last.rescale.text(), last.old_l.text(), last.l.text(), last.rescale.text(),
            last.o[0].text(), last.o[0].text(), last.l.text(), hand.rows[1].o[0].text()),
        .mistakes = {{last.o[0].value(), "That is O before the division by l."},
                     {(last.old_o[0] + last.add_o[0]).value(), "O was not rescaled, and not divided by l."},
                     {((last.old_o[0] + last.add_o[0]) / last.l).value(), "O was not rescaled when m rose."}}};
}

Exercise backward_exercise() {
    const walk::Hand hand = walk::work_by_hand(pencil_example(), Schedule::fa2, {});
    const walk::HandRow& row = hand.rows[0];
    return {.task =
                "Row 0 of the page's example kept m = 2 and l = 2, and D = dO . O = 5/2. For key 3, s = 0 and dO . v = "
                "8. What is dS = P (dO . v - D)?",
            .value = row.ds[3].value(),
            .answer = row.ds[3].text(),
            .why = fmt::format("P = 2^(0 - 2) / 2 = {}, recomputed from s, m and l. {} * (8 - 5/2) = {}.",
                               row.p[3].text(), row.p[3].text(), row.ds[3].text()),
            .mistakes = {{(row.ds[3] * row.l).value(), "P was not divided by l."},
                         {(row.p[3] * row.dp[3]).value(), "D was not taken off."}}};
}

Exercise causal_exercise() {
    Problem problem = problem_of(2048, 1, 128);
    problem.mask.causal = Causal::bottom_right;
    const schedule::Cost cost = schedule::cost(workload_of(problem, Schedule::fa2, {128, 128}));
    const std::int64_t run = cost.full + cost.partial;
    return {.task =
                "N = 2048 queries and keys, causal, tiles of 128 x 128: a square of 16 x 16 tiles. How many tiles must "
                "run?",
            .unit = "tiles",
            .value = static_cast<double>(run),
            .answer = fmt::format("{} tiles", run),
            .why = fmt::format(
                "Below the diagonal 16 * 15 / 2 = {} tiles are full; the {} on the diagonal are partial and run with "
                "the mask; {} above it are skipped. {} of 256 is {:.1f} %.",
                cost.full, cost.partial, cost.skipped, run, static_cast<double>(run) / 2.56),
            .mistakes = {{128, "Half of 256 counts half of the diagonal; all of its tiles run."},
                         {static_cast<double>(cost.full), "Those are the full ones; the diagonal runs too."},
                         {256, "Those are all; tiles above the diagonal hold nothing visible."}}};
}

}  // namespace tessera::learn
