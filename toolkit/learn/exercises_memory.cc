// SPDX-License-Identifier: Apache-2.0
//
// Lessons 1 to 4: the bytes that standard attention moves and stores.
#include <fmt/format.h>

#include "learn/lesson.hpp"
#include "learn/setting.hpp"

namespace tessera::learn {

using schedule::Operation;

Exercise traffic_exercise() {
    const Problem problem = problem_of(1024, 1, 64);
    const auto moved = [&](std::initializer_list<Operation> operations) {
        return dram_of(problem, Schedule::standard, {64, 64}, operations);
    };
    const double matrices =
        moved({Operation::store_scores, Operation::load_scores, Operation::store_weights, Operation::load_weights});
    const double rest = moved({Operation::load_q, Operation::load_k, Operation::load_v, Operation::store_o});
    return {
        .task =
            "One head, N = 1024 queries and keys, head_dim 64. Standard attention writes the scores S to memory and "
            "reads them back (4 bytes each), then writes the weights P and reads them back (2 bytes each). How "
            "many MiB is that, for S and P together?",
        .unit = "MiB",
        .value = matrices / kMiB,
        .answer = fmt::format("{:g} MiB", matrices / kMiB),
        .why = fmt::format("1024 * 1024 = 2^20 elements, each 4 + 4 + 2 + 2 = 12 bytes. Q, K, V, O and the LSE, once "
                           "each, are {:.2f} MiB.",
                           rest / kMiB),
        .mistakes = {{matrices / kMiB / 2, "That counts one direction only: each element is written and read."},
                     {matrices / kMiB * 2 / 3, "Those are the bytes of S alone; P comes on top."}}};
}

Exercise scratchpad_exercise() {
    const model::Machine& m = h200();
    const double shared = m.cores * m.shared_bytes * m.rated_clock_ghz;  // GB/s
    return {
        .task = fmt::format(
            "An H200 has {:g} multiprocessors. The scratchpad of each gives {:g} bytes a clock, at {:g} GHz. Device "
            "memory gives {:g} GB/s for all together. How many times as fast are the scratchpads?",
            m.cores.value, m.shared_bytes.value, m.rated_clock_ghz.value, m.dram_gbs.value),
        .unit = "times",
        .value = shared / m.dram_gbs,
        .tolerance = 0.02,
        .answer = fmt::format("{:.2f} times", shared / m.dram_gbs),
        .why = fmt::format("{:g} * {:g} B * {:g} GHz = {:.0f} GB/s, and {:.0f} / {:g} = {:.2f}.", m.cores.value,
                           m.shared_bytes.value, m.rated_clock_ghz.value, shared, shared, m.dram_gbs.value,
                           shared / m.dram_gbs),
        .mistakes = {{shared / m.dram_gbs / m.cores, "That is the scratchpad of one multiprocessor."}}};
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
                         {standard / kGiB * 1.5, "P overwrites S and needs no memory of its own."}}};
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
                     {keys / kMiB / 2, "That is K alone."}}};
}

}  // namespace tessera::learn
