// SPDX-License-Identifier: Apache-2.0
//
// Lessons 0 to 4: the definition, and the bytes that standard attention moves and stores.
#include <fmt/format.h>

#include <cmath>

#include "learn/lesson.hpp"
#include "learn/setting.hpp"

namespace tessera::learn {

using schedule::Operation;

Exercise definition_row_exercise() {
    const walk::HandRow row = pencil_example().rows[1];
    return {
        .task =
            "Query 1 is (0, 1). Its scores are q . k = 1, 0, 0 and 2, and with the scale ln 2 a score s becomes "
            "2^s. What is the weight of key 3?",
        .value = row.p[3].value(),
        .answer = row.p[3].text(),
        .why = fmt::format("2^1, 2^0, 2^0 and 2^2 are 2, 1, 1 and 4. Their sum is 8, and 4 / 8 = {}.", row.p[3].text()),
        .mistakes = {{4, "That is 2^s. A weight is its share of the sum of the row."},
                     {2.0 / 3, "That is the share in the scores. The softmax takes 2^s first."}},
        .hint = "Write 2^s for each of the four keys, then add the four numbers up."};
}

Exercise scale_exercise() {
    walk::HandExample example;
    example.q[0] = {2, 0};  // twice the scale is twice the query
    const walk::HandRow row = walk::work_by_hand(example, Schedule::fa2, {}).rows[0];
    return {
        .kind = Kind::predict,
        .task =
            "Query 0 has the scores 0, 1, 2 and 0. The scale is doubled to 2 ln 2 = ln 4, so a score s becomes 4^s. "
            "What is the weight of key 2?",
        .value = row.p[2].value(),
        .answer = row.p[2].text(),
        .why = fmt::format("4^0, 4^1, 4^2 and 4^0 are 1, 4, 16 and 1; 16 / 22 = {}. With ln 2 it was 1/2: a larger "
                           "scale gives the largest score more of the weight.",
                           row.p[2].text()),
        .mistakes = {{0.5, "That is the weight with the scale ln 2."},
                     {16, "That is 4^s. A weight is its share of the sum of the row."}},
        .hint = "The four exponentials are 4^0, 4^1, 4^2 and 4^0.",
        .command = "the ten lines with scale = np.log(4), and print(P[0, 2])"};
}

Exercise definition_sizes_exercise() {
    return {
        .kind = Kind::explain,
        .task =
            "A text of 100,000 tokens runs through the ten lines, one head with d = 128. At which line does the "
            "memory run out, and does the caller want what that line makes?",
        .answer =
            "At the line of S: NumPy computes in numbers of 8 bytes, and 100,000 * 100,000 of them are 80 GB. E and P "
            "are as large. The caller wants O alone, 100,000 rows of 128 numbers. Most memory goes to arrays that "
            "nobody asked for.",
        .hint = "How many numbers does each line make?"};
}

namespace {

/// The bytes of S and P in standard attention: written and read, 4 and 2 bytes an element.
double matrices_of(const Problem& problem) {
    return dram_of(
        problem, Schedule::standard, {64, 64},
        {Operation::store_scores, Operation::load_scores, Operation::store_weights, Operation::load_weights});
}

}  // namespace

Exercise traffic_exercise() {
    const Problem problem = problem_of(2048, 1, 64);
    const double matrices = matrices_of(problem);
    const double rest = dram_of(problem, Schedule::standard, {64, 64},
                                {Operation::load_q, Operation::load_k, Operation::load_v, Operation::store_o});
    return {
        .task =
            "One head, N = 2048 queries and keys, head_dim 64. Standard attention writes the scores S to memory and "
            "reads them back (4 bytes each), then writes the weights P and reads them back (2 bytes each). How "
            "many MiB is that, for S and P together?",
        .unit = "MiB",
        .value = matrices / kMiB,
        .answer = fmt::format("{:g} MiB", matrices / kMiB),
        .why = fmt::format("2048 * 2048 = 2^22 elements, each 4 + 4 + 2 + 2 = 12 bytes. Q, K, V, O and the LSE, once "
                           "each, are {:.2f} MiB.",
                           rest / kMiB),
        .mistakes = {{matrices / kMiB / 2, "That counts one direction only: each element is written and read."},
                     {matrices / kMiB * 2 / 3, "Those are the bytes of S alone; P comes on top."},
                     {matrices / kMiB / 4, "That is N = 1024, the picture's: N * N counts."}},
        .hint = "How many bytes does one of the N x N pairs move, in both directions?"};
}

Exercise traffic_time_exercise() {
    const model::Machine& m = *model::find_machine("a100");
    const Problem problem = problem_of(4096, 16, 128);
    const double bytes = matrices_of(problem), ms = bytes / m.dram_gbs / 1e6;
    return {.kind = Kind::predict,
            .task = fmt::format("An A100 has {:.0f} TFLOP/s and an HBM of {:g} GB/s. 16 heads, N = 4096, 12 bytes a "
                                "score. How many ms does "
                                "the traffic of S and P take at least?",
                                m.peak_tflops(DType::bf16), m.dram_gbs.value),
            .unit = "ms",
            .value = ms,
            .tolerance = 0.02,
            .answer = fmt::format("{:.2f} ms", ms),
            .why = fmt::format(
                "16 * 4096^2 * 12 bytes = {:.2f} GB, and {:.2f} / {:g} = {:.2f} ms. The prediction of the command is "
                "longer, because no kernel reaches the full rate and the products take time too.",
                bytes / 1e9, bytes / 1e6, m.dram_gbs.value, ms),
            .mistakes = {{ms / 16, "That is one head; there are 16."}, {ms / 1000, "That is in seconds."}},
            .hint = "Bytes first: heads * N * N * 12. Then divide by the rate.",
            .command = "build/tessera roofline --device a100 --len 4096 --heads 16 --head-dim 128 --schedule standard"};
}

Exercise faster_cores_exercise() {
    return {.kind = Kind::explain,
            .task =
                "The next GPU has tensor cores that are twice as fast, and the same HBM. How much faster does standard "
                "attention become, and why?",
            .answer =
                "Hardly at all. It is memory-bound: its arithmetic intensity lies below the ridge, so the time is that "
                "of moving S and P. Faster tensor cores only wait longer, and the ridge moves further away.",
            .hint = "On which side of the ridge is standard attention?"};
}

Exercise scratchpad_exercise() {
    const model::Machine& m = *model::find_machine("a100");
    const double shared = m.cores * m.shared_bytes * m.rated_clock_ghz;  // GB/s
    return {
        .task = fmt::format(
            "An A100 has {:g} multiprocessors. The scratchpad of each gives {:g} bytes a clock, at {:g} GHz. Device "
            "memory gives {:g} GB/s for all together. How many times as fast are the scratchpads?",
            m.cores.value, m.shared_bytes.value, m.rated_clock_ghz.value, m.dram_gbs.value),
        .unit = "times",
        .value = shared / m.dram_gbs,
        .tolerance = 0.02,
        .answer = fmt::format("{:.2f} times", shared / m.dram_gbs),
        .why = fmt::format("{:g} * {:g} B * {:g} GHz = {:.0f} GB/s, and {:.0f} / {:g} = {:.2f}.", m.cores.value,
                           m.shared_bytes.value, m.rated_clock_ghz.value, shared, shared, m.dram_gbs.value,
                           shared / m.dram_gbs),
        .mistakes = {{shared / m.dram_gbs / m.cores, "That is the scratchpad of one multiprocessor."}},
        .hint = "Bytes a clock times clocks a second is bytes a second. Then count the multiprocessors."};
}

Exercise largest_scores_exercise() {
    const double bytes = h200().shared_kib * kKiB, n = std::floor(std::sqrt(bytes / 4));
    return {.task = fmt::format(
                "A scratchpad of {:g} KiB holds nothing but S of one head, 4 bytes an element. How many queries and as "
                "many keys may there be at most?",
                h200().shared_kib.value),
            .value = n,
            .tolerance = 3e-3,
            .answer = fmt::format("{:g}", n),
            .why = fmt::format("{:g} KiB are {:g} numbers of 4 bytes, and {:g}^2 = {:g} is the largest square below "
                               "that. A text of a few pages has thousands of tokens.",
                               bytes / kKiB, bytes / 4, n, n * n),
            .mistakes = {{std::floor(bytes / 4), "That is the number of elements; S has N * N of them."},
                         {std::floor(std::sqrt(bytes)), "An element takes 4 bytes."}},
            .hint = "How many numbers of 4 bytes are that? Then take the square root."};
}

Exercise scratchpad_not_cache_exercise() {
    return {.kind = Kind::explain,
            .task =
                "Suppose the scratchpad were a cache of the same size, filled by the hardware. Why would a kernel that "
                "passes long K and V by one tile of Q be worse off?",
            .answer =
                "A cache decides by recent use. The stream of K and V would push out Q and the sums, which are used "
                "again for every tile. A scratchpad keeps what the program put there until the program replaces it.",
            .hint = "Which data is used again, and which only passes by?"};
}

Exercise matrix_exercise() {
    const Problem problem = problem_of(32768, 16, 128);
    const double standard =
        static_cast<double>(schedule::footprint(workload_of(problem, Schedule::standard, {128, 64})).workspace);
    const double tensors =
        static_cast<double>(schedule::footprint(workload_of(problem, Schedule::fa2, {128, 64})).total());
    return {.task =
                "16 heads, N = 32768. Standard attention keeps the scores S of all heads, 4 bytes an element, and "
                "writes P in their place. How many GiB is that?",
            .unit = "GiB",
            .value = standard / kGiB,
            .answer = fmt::format("{:g} GiB", standard / kGiB),
            .why = fmt::format(
                "N * N = 2^30 elements a head, 4 bytes each, 16 heads. The tensors that the caller asked for, with "
                "head_dim 128 in 2 bytes, and the LSE are {:.2f} GiB: that is all that fa2 needs.",
                tensors / kGiB),
            .mistakes = {{standard / kGiB / 16, "That is one head."},
                         {standard / kGiB * 1.5, "P overwrites S and needs no memory of its own."}},
            .hint = "32768 is 2^15. How many elements has S of one head?"};
}

Exercise longer_exercise() {
    const double ms = predicted_ms(h200(), problem_of(8192, 16, 128), Schedule::fa2);
    const double longer = predicted_ms(h200(), problem_of(65536, 16, 128), Schedule::fa2);
    return {.kind = Kind::predict,
            .task = fmt::format(
                "fa2 takes {:.3f} ms at N = 8192. The text becomes 8 times as long, N = 65536. How many ms do you "
                "expect?",
                ms),
            .unit = "ms",
            .value = longer,
            .tolerance = 0.1,
            .answer = fmt::format("about {:.0f} ms", longer),
            .why = fmt::format("8 times the queries meet 8 times the keys: 64 * {:.3f} = {:.0f} ms. The model says "
                               "{:.1f} ms. Only the memory grows 8-fold.",
                               ms, 64 * ms, longer),
            .mistakes = {{8 * ms, "That would be linear. Each query also meets 8 times the keys."}},
            .hint = "How many times as many pairs of a query and a key are there?",
            .command = "build/tessera roofline --device h200 --len 65536 --heads 16 --head-dim 128 --schedule fa2"};
}

Exercise linear_exercise() {
    return {.kind = Kind::explain,
            .task =
                "A colleague says: \"FlashAttention makes attention linear in the length.\" What is right, and what "
                "is wrong?",
            .answer =
                "The memory beside Q, K, V and O becomes linear. The FLOP and the time stay quadratic, because every "
                "query still meets every key. Each pair costs less, since its score does not go to memory.",
            .hint = "Say it for the memory and for the time apart."};
}

Exercise reorder_exercise() {
    const auto workload = workload_of(problem_of(1024, 1, 64), Schedule::fa2, {128, 128});
    const double keys = bytes_of(workload, {Operation::load_k, Operation::load_v});
    return {
        .task =
            "One head, N = 1024, head_dim 64, 2 bytes an element, tiles of 128 queries and 128 keys, nothing hidden. "
            "fa2 takes one tile of queries after another, and for each it loads all of K and all of V. How many "
            "MiB of K and V does it load?",
        .unit = "MiB",
        .value = keys / kMiB,
        .answer = fmt::format("{:g} MiB", keys / kMiB),
        .why =
            "1024 / 128 = 8 tiles of queries, and K with V is 2 * 1024 * 64 * 2 bytes = 1/4 MiB. Standard attention "
            "over the same tiles loads K and V as often, and S and P are 12 MiB on top (lesson 1). The FLOP are the "
            "same.",
        .mistakes = {{keys / kMiB / 8, "That is K and V once; each of the 8 tiles of queries loads them."},
                     {keys / kMiB / 2, "That is K alone."}},
        .hint = "How many bytes are K and V together, once? How often are they loaded?"};
}

Exercise queries_loaded_exercise() {
    const auto workload = workload_of(problem_of(1024, 1, 64), Schedule::fa1, {128, 128});
    const double queries = bytes_of(workload, {Operation::load_q});
    return {.task =
                "fa1 solves this problem: for each tile of 128 keys it loops over all queries. How many MiB of Q does "
                "it load?",
            .unit = "MiB",
            .value = queries / kMiB,
            .answer = fmt::format("{:g} MiB", queries / kMiB),
            .why =
                "1024 / 128 = 8 tiles of keys, and Q is 1024 * 64 * 2 bytes = 1/8 MiB. That is half of fa2's K and V. "
                "But fa1 also moves O, m and l for each tile of keys, and lesson 11 counts those.",
            .mistakes = {{queries / kMiB / 8, "That is Q once; each of the 8 tiles of keys loads it."},
                         {queries / kMiB * 2, "Q is one matrix; K and V are two."}},
            .hint = "What is outside in fa1, and what passes by it?"};
}

Exercise last_digits_exercise() {
    return {
        .kind = Kind::explain,
        .task =
            "In fractions all schedules give the same O, and in floating point their last digits differ. Why is that "
            "no error of a schedule?",
        .answer =
            "A floating-point sum rounds after each addition, so it depends on the order, and a schedule is an "
            "order. Each result lies within the rounding error of the exact one; none of them is the right one.",
        .hint = "Is (a + b) + c the same number as a + (b + c) on a computer?"};
}

}  // namespace tessera::learn
