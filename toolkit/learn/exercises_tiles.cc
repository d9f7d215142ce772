// SPDX-License-Identifier: Apache-2.0
//
// Lessons 5 to 10: tiles, the online softmax, the backward, the mask.
#include <fmt/format.h>

#include <algorithm>

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
                     {kib - config.q_bytes() / kKiB, "Right so far; now the multiple of 16 below it."}},
        .hint = "Take Q off first. Then count the bytes that one key takes in all four places."};
}

Exercise tile_traffic_exercise() {
    const double kib = walked_bytes(Schedule::fa2, {128, 64}) / kKiB;
    return {.kind = Kind::predict,
            .task =
                "N = 1024, head_dim 64, 4 bytes an element. A tile of 64 queries moved 544.2 KiB: K and V are 512 KiB, "
                "and each query adds a row of Q, a row of O and its LSE. How many KiB does a tile of 128 queries move?",
            .unit = "KiB",
            .value = kib,
            .tolerance = 2e-3,
            .answer = fmt::format("{:.1f} KiB", kib),
            .why = fmt::format("A query adds 2 * 64 * 4 + 4 = 516 bytes, and 512 KiB + 128 * 516 bytes = {:.1f} KiB. "
                               "That is twice the work for 6 % more bytes.",
                               kib),
            .mistakes = {{2 * walked_bytes(Schedule::fa2, {64, 64}) / kKiB,
                          "K and V pass once for the whole tile, however many queries it has."}},
            .hint = "K and V stay what they are. How many bytes come with one more query?",
            .command = "build/tessera walk --len 1024 --schedule fa2 --tile 128,64"};
}

Exercise tall_tile_exercise() {
    return {
        .kind = Kind::explain,
        .task =
            "The scratchpad has room for 64 more rows. Which saves more traffic in fa2: 64 more queries in the tile, "
            "or 64 more keys? Why?",
        .answer =
            "More queries. All of K and V pass once for each tile of queries, so fewer tiles of queries mean fewer "
            "passes. The number of keys in a tile only says in how many portions the same bytes come.",
        .hint = "How often is K loaded in all, and on which of the two sizes does that depend?"};
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
                     {fresh.value(), "The old sum was thrown away: it shrinks, and stays."}},
        .hint = "First the new m. Then r = 2^(old m - new m), which the old sum is multiplied by."};
}

Exercise order_of_keys_exercise() {
    const walk::Hand hand = stream_scores({6, 2, 4, 3}, 2);
    const walk::HandStep& first = hand.steps[0];
    const walk::HandStep& last = hand.steps[1];
    return {
        .kind = Kind::predict,
        .task =
            "Scores 6, 2, 4, 3 come in tiles of two, with base 2. The largest comes first. What is l after the "
            "second tile?",
        .value = last.l.value(),
        .answer = last.l.text(),
        .why = fmt::format("After the first tile m = 6 and l = {}. m stays, so the rescale is 1, and the second tile "
                           "adds 1/4 + 1/8: l = {}. In any other order l ends at the same number.",
                           first.l.text(), last.l.text()),
        .mistakes = {{(last.l - first.l).value(), "That is the second tile alone."}},
        .hint = "Does m rise in the second tile?",
        .command =
            "build/tessera walk --by-hand --numbers 'q 1 0; k 6 0, 2 0, 4 0, 3 0; v 1 0, 1 0, 1 0, 1 0' "
            "--tile 1,2"};
}

Exercise any_maximum_exercise() {
    return {
        .kind = Kind::explain,
        .task =
            "O / l comes out right for any m that l and O share. Why then take the largest score, and not simply "
            "m = 0?",
        .answer =
            "In exact arithmetic m cancels. On a computer exp(s - m) must be a number of the format: with m = 0 a "
            "large score overflows, and if all scores are far below 0, all exponentials become 0 and O / l is 0 / 0. "
            "With the largest score every exponential is at most 1 and one of them is 1.",
        .hint = "What is exp(1000) in fp32? What is exp(-1000)?"};
}

namespace {

walk::Hand with_last_value(std::array<std::int64_t, walk::kHandDim> value) {
    walk::HandExample example;
    example.v[3] = value;
    return walk::work_by_hand(example, Schedule::fa2, {});
}

}  // namespace

Exercise one_tile_exercise() {
    const walk::Hand hand = with_last_value({0, 8});
    const walk::HandStep& last = hand.steps[3];  // row 1, the second tile of keys
    return {
        .task =
            "Row 1, q = (0, 1), with another value: that of key 3 is (0, 8). After keys 0 and 1 the row has m = 1, "
            "l = 3/2 and O = (4, 2). Keys 2 and 3 give s = 0 and 2; their values are (2, 2) and (0, 8). What is the "
            "second element of O at the end, after the division by l?",
        .value = hand.rows[1].o[1].value(),
        .answer = hand.rows[1].o[1].text(),
        .why = fmt::format(
            "m rises to {}, rescale {}. l = {} * {} + 1/4 + 1 = {}. O = {} * 2 + 1/4 * 2 + 1 * 8 = {}, and {} / {} "
            "= {}.",
            *last.m, last.rescale.text(), last.rescale.text(), last.old_l.text(), last.l.text(), last.rescale.text(),
            last.o[1].text(), last.o[1].text(), last.l.text(), hand.rows[1].o[1].text()),
        .mistakes = {{last.o[1].value(), "That is O before the division by l."},
                     {(last.old_o[1] + last.add_o[1]).value(), "O was not rescaled, and not divided by l."},
                     {((last.old_o[1] + last.add_o[1]) / last.l).value(), "O was not rescaled when m rose."},
                     {hand.rows[1].o[0].value(), "That is the first element."}},
        .hint = "First the new m and the rescale; then l; then O; the division comes last."};
}

Exercise rescales_exercise() {
    walk::HandExample example;
    example.tile = {1, 1};
    const walk::Hand hand = walk::work_by_hand(example, Schedule::fa2, {});
    const auto rises = std::count_if(hand.steps.begin(), hand.steps.end(), [](const walk::HandStep& step) {
        return step.row == 0 && step.old_m && *step.m > *step.old_m;
    });
    return {.kind = Kind::predict,
            .task =
                "Row 0 has the scores 0, 1, 2, 0. Its keys come one at a time instead of two at a time. How many times "
                "does m rise? (The first key does not count.)",
            .value = static_cast<double>(rises),
            .answer = fmt::format("{}", rises),
            .why =
                "m goes 0, 1, 2, 2. With tiles of two it rose once, from 1 to 2. Larger tiles rescale less often, and "
                "O / l is the same.",
            .mistakes = {{3, "At the last key m stays, and the first key does not count."},
                         {1, "That is with tiles of two keys."}},
            .hint = "Write m after each key.",
            .command = "build/tessera walk --by-hand --tile 1,1"};
}

Exercise late_division_exercise() {
    return {
        .kind = Kind::explain,
        .task =
            "You could divide O by l after each tile of keys, so that O is right at any time. Why may the division "
            "wait until the end, and what would an early one cost?",
        .answer =
            "O and l are rescaled by the same factor, so their quotient is right whenever it is taken. Dividing in "
            "each tile costs a division for each element of O there, and the next tile must first multiply O by the "
            "old l again.",
        .hint = "What must happen to a divided O before p v of the next tile can be added?"};
}

Exercise weight_again_exercise() {
    const walk::HandRow row = pencil_example().rows[1];
    return {
        .task =
            "Row 1 of the example kept m = 2 and l = 2, so to base 2 its LSE is m + log2 l = 3. Its score with key 0 "
            "is s = 1. What is the weight of key 0?",
        .value = row.p[0].value(),
        .answer = row.p[0].text(),
        .why = fmt::format("2^(s - LSE) = 2^(1 - 3) = {}. No other key of the row was needed.", row.p[0].text()),
        .mistakes = {{0.5, "That is 2^(s - m). The LSE has the division by l in it."},
                     {4, "The sign is turned: it is s - LSE."}},
        .hint = "P = exp(S - LSE), here to base 2."};
}

Exercise stored_weights_exercise() {
    const Problem problem = problem_of(4096, 1, 128);
    const double weights = dram_of(problem, Schedule::standard, {64, 64}, {schedule::Operation::store_weights});
    const double lse = 4.0 * 4096;
    return {
        .task =
            "N = 4096. P would take 2 bytes a weight, the LSE takes 4 bytes a row. How many times as many bytes is "
            "P?",
        .unit = "times",
        .value = weights / lse,
        .answer = fmt::format("{:g} times", weights / lse),
        .why = fmt::format("P has N weights in each row: 4096 * 2 / 4 = {:g}. At twice the length it is twice that.",
                           weights / lse),
        .mistakes = {{4096, "A weight takes 2 bytes, an LSE 4."}},
        .hint = "Compare one row: how many weights has it, and how many LSEs?"};
}

Exercise recompute_exercise() {
    return {
        .kind = Kind::explain,
        .task =
            "Imagine a GPU with slow tensor cores: its ridge is 20 FLOP per byte, a tenth of an H200's. Is making a "
            "weight again (256 FLOP) still cheaper there than fetching its 2 bytes? Would you store P?",
        .answer =
            "No: 2 bytes take the time of 40 FLOP there, so fetching is faster. But P would still need memory that "
            "grows with N * N, and the forward would have to write it. For long texts one recomputes even there.",
        .hint = "How many FLOP fit into the time of one byte?"};
}

Exercise score_gradient_exercise() {
    const walk::HandRow row = pencil_example().rows[3];
    return {
        .task =
            "Row 3 of the page's example kept m = 2 and l = 2, and D = 3/2. Its dO is (0, 1). Key 3 has s = 0 and the "
            "value (8, -4). What is dS = P (dP - D) for key 3?",
        .value = row.ds[3].value(),
        .answer = row.ds[3].text(),
        .why = fmt::format("P = 2^(0 - 2) / 2 = {}. dP = dO . v = {}. {} * ({} - 3/2) = {}.", row.p[3].text(),
                           row.dp[3].text(), row.p[3].text(), row.dp[3].text(), row.ds[3].text()),
        .mistakes = {{(row.ds[3] * row.l).value(), "P was not divided by l."},
                     {(row.p[3] * row.dp[3]).value(), "D was not taken off."}},
        .hint = "P from s, m and l; dP = dO . v; then the formula."};
}

Exercise value_gradient_exercise() {
    const walk::Hand hand = pencil_example();
    return {.kind = Kind::predict,
            .task =
                "After queries 0 and 1, dV of key 2 is (1/2, 1/8). Rows 2 and 3 have P = 1/4 and 1/2 for this key, and "
                "their dO are (1, 1) and (0, 1). What is the first element of dV when the column is done?",
            .value = hand.dv[2][0].value(),
            .answer = hand.dv[2][0].text(),
            .why = fmt::format("dV += P^T dO: 1/2 + 1/4 * 1 + 1/2 * 0 = {}. The second element is {}.",
                               hand.dv[2][0].text(), hand.dv[2][1].text()),
            .mistakes = {{hand.dv[2][1].value(), "That is the second element."},
                         {1.25, "The first element of row 3's dO is 0."}},
            .hint = "Each row adds its P times its dO.",
            .command = "build/tessera walk --by-hand --backward"};
}

Exercise row_sum_exercise() {
    return {
        .kind = Kind::explain,
        .task = "Add up dS of row 0 over its four keys. Which number comes out, and why must it come out in every row?",
        .answer =
            "0. The same number added to all scores of a row changes no weight, so the loss does not change in that "
            "direction. In the formula: the sum of P dP is D, and the sum of P D is D too, because P sums to 1.",
        .hint = "What happens to the softmax of a row if all its scores grow by 1?"};
}

Exercise causal_exercise() {
    Problem problem = problem_of(1024, 1, 128);
    problem.len_kv = 4096;
    const auto tiles = [&](Causal causal) {
        problem.mask.causal = causal;
        return schedule::cost(workload_of(problem, Schedule::fa2, {128, 128}));
    };
    const schedule::Cost early = tiles(Causal::top_left), cost = tiles(Causal::bottom_right);
    const std::int64_t run = cost.full + cost.partial;
    return {.task =
                "1024 queries and 4096 keys, causal, aligned bottom-right, tiles of 128 x 128: 8 x 32 tiles. How many "
                "tiles must run?",
            .unit = "tiles",
            .value = static_cast<double>(run),
            .answer = fmt::format("{} tiles", run),
            .why = fmt::format(
                "The last tile of queries meets all 32 tiles of keys, and each one above it meets one less: 25 + 26 + "
                "... + 32 = {}. {} are full, {} on the diagonal are partial, {} are skipped.",
                run, cost.full, cost.partial, cost.skipped),
            .mistakes = {{static_cast<double>(early.full + early.partial),
                          "That is top-left: bottom-right lets the "
                          "last query see every key."},
                         {static_cast<double>(cost.full), "Those are the full ones; the diagonal runs too."},
                         {256, "Those are all; tiles above the diagonal hold nothing visible."}},
            .hint = "Begin with the last tile of queries: which keys does the last query see?"};
}

Exercise causal_row_exercise() {
    const Band band = Mask{.causal = Causal::bottom_right}.bind(1500, 1500);
    int full = 0;
    for (std::int64_t key = 0; key < 1500; key += 64)
        full += band.coverage(640, 704, key, std::min<std::int64_t>(key + 64, 1500)) == Coverage::full ? 1 : 0;
    return {
        .kind = Kind::predict,
        .task =
            "1500 queries and keys, causal, tiles of 64 x 64. Query 700 is in the tile of queries 640 to 703. How "
            "many tiles of keys are full for it?",
        .unit = "tiles",
        .value = static_cast<double>(full),
        .answer = fmt::format("{} tiles", full),
        .why = fmt::format("Keys 0 to 639 are visible to all of its queries: 640 / 64 = {}. The tile of keys 640 to "
                           "703 is partial, and the 13 after it are skipped.",
                           full),
        .mistakes = {{static_cast<double>(full) + 1, "The tile on the diagonal is partial."}},
        .hint = "Up to which key does the first query of the tile see?",
        .command =
            "build/tessera walk examples/data/kjv-layer2.safetensors --layout bhsd --causal bottom-right "
            "--scale 0.125 --tile 64,64 --row 700"};
}

Exercise alignment_exercise() {
    return {
        .kind = Kind::explain,
        .task =
            "A model has 1000 tokens in its cache and computes one new query, with a causal mask. What happens with "
            "top-left alignment, and what with bottom-right?",
        .answer =
            "Top-left takes the query for the first one, so it sees key 0 alone, and the text is forgotten. "
            "Bottom-right takes it for the last one, so it sees all 1000 keys, as it should.",
        .hint = "Which row of the square of 1000 queries is the one query?"};
}

}  // namespace tessera::learn
