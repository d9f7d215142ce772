// SPDX-License-Identifier: Apache-2.0
//
// Lessons 17 to 22: decoding, caches, fp8, Blackwell, sinks, megakernels.
#include <fmt/format.h>

#include <cmath>

#include "learn/lesson.hpp"
#include "learn/serving.hpp"
#include "learn/setting.hpp"

namespace tessera::learn {

using walk::Fraction;

Exercise merge_exercise() {
    const std::vector<std::int64_t> first_scores = {0, 1}, second_scores = {3, 1}, values = {0, 4};
    const walk::HandRow first = row_over(first_scores, values), second = row_over(second_scores, values);
    const walk::HandRow whole = row_over({0, 1, 3, 1}, {0, 4, 0, 4});
    const auto sum = [](const walk::HandRow& row) { return row.l * Fraction(std::int64_t{1} << *row.m); };
    const Fraction all = sum(first) + sum(second);
    return {
        .task = fmt::format(
            "Two workers share the keys of one query, with base 2: weights are 2^(s - m). The first returns m = {}, l "
            "= {} and O = {}, the second m = {}, l = {} and O = {}. Each O is already divided by its own l. What is O "
            "over all keys?",
            *first.m, first.l.text(), first.o[0].text(), *second.m, second.l.text(), second.o[0].text()),
        .value = whole.o[0].value(),
        .answer = whole.o[0].text(),
        .why = fmt::format(
            "The sums of 2^s are 2^{} * {} = {} and 2^{} * {} = {}, together {}. So O = {} * {} + {} * {} = {}.",
            *first.m, first.l.text(), sum(first).text(), *second.m, second.l.text(), sum(second).text(), all.text(),
            (sum(first) / all).text(), first.o[0].text(), (sum(second) / all).text(), second.o[0].text(),
            whole.o[0].text()),
        .mistakes = {{((first.l * first.o[0] + second.l * second.o[0]) / (first.l + second.l)).value(),
                      "Each l is relative to its own m: first multiply it by 2^m."},
                     {((first.o[0] + second.o[0]) * Fraction(1, 2)).value(),
                      "That is the mean. The part with the larger sum of exponentials has more weight."},
                     {(first.o[0] + second.o[0]).value(), "Each O was divided by its own l; weigh them first."}},
        .hint = "What is the sum of 2^s over the keys of each worker, from its m and l?"};
}

Exercise parts_cost_exercise() {
    const CacheSizes sizes;
    constexpr double kKeys = 512, kBytesOfFp32 = 4;
    const auto group = static_cast<double>(sizes.heads_q / sizes.heads_kv), dim = static_cast<double>(sizes.head_dim);
    const double part = group * (dim + 1) * kBytesOfFp32 * 2, keys = kKeys * dim * 2 * 2;
    return {
        .task = fmt::format(
            "A part has {:g} keys. Its K and V are in bf16, with head_dim {:g}, and {:g} queries share them. For each "
            "query the part writes O and an LSE in fp32, and the merge reads them. How many percent of the bytes of K "
            "and V are that?",
            kKeys, dim, group),
        .unit = "percent",
        .value = 100 * part / keys,
        .tolerance = 0.03,
        .answer = fmt::format("{:.2f} percent", 100 * part / keys),
        .why = fmt::format("{:g} * ({:g} + 1) * 4 bytes, written and read: {:g}. K and V: {:g} * {:g} * 2 * 2 = {:g}. "
                           "Twice as many keys in a part would halve it.",
                           group, dim, part, kKeys, dim, keys),
        .mistakes = {{50 * part / keys, "That counts one direction: O and the LSE are written and read."},
                     {100 * part / keys / group, "Each query of the group has its own O."},
                     {200 * part / keys, "K and V are both read: twice head_dim numbers for each key."}},
        .hint =
            "Count both in bytes: (head_dim + 1) numbers of 4 bytes for each query, and 2 head_dim numbers of 2 bytes "
            "for each key."};
}

Exercise why_split_exercise() {
    return {.kind = Kind::explain,
            .task =
                "A GPU has 132 multiprocessors. One sequence of 32,768 keys is decoded, with 8 heads of keys. Why does "
                "splitting the keys make it faster, although the same bytes are read and some are written on top?",
            .answer =
                "Without a split there is one thread block for each head of keys, so 8 multiprocessors read and "
                "the others stand still. A few multiprocessors cannot ask for bytes as fast as the memory could "
                "deliver them. With 16 parts for each head, 128 of them read at once.",
            .hint = "Who reads, and what limits how fast one multiprocessor can read?"};
}

Exercise pages_exercise() {
    const CacheSizes sizes;
    const std::int64_t lengths[] = {1000, 300, 5000};
    constexpr std::int64_t kPage = 256;
    std::int64_t pages = 0, tokens = 0;
    std::string counts;
    for (const std::int64_t len : lengths) {
        const std::int64_t own = (len + kPage - 1) / kPage;
        counts += fmt::format("{}{}", counts.empty() ? "" : " + ", own);
        pages += own, tokens += len;
    }
    const double page_mib = static_cast<double>(kPage) * sizes.token_bytes() / kMiB;
    const double all = static_cast<double>(pages) * page_mib;
    return {
        .task = fmt::format(
            "Three conversations have {}, {} and {} tokens. The model is that of the page: {:g} KiB of cache a token. "
            "Pages have {} tokens. How many MiB of pages are in use?",
            lengths[0], lengths[1], lengths[2], sizes.token_bytes() / kKiB, kPage),
        .unit = "MiB",
        .value = all,
        .answer = fmt::format("{:g} MiB", all),
        .why = fmt::format(
            "{} = {} pages, each {} * {:g} KiB = {:g} MiB. The tokens alone are {:.1f} MiB: only the last page of "
            "each conversation has empty places.",
            counts, pages, kPage, sizes.token_bytes() / kKiB, page_mib,
            static_cast<double>(tokens) * sizes.token_bytes() / kMiB),
        .mistakes = {{static_cast<double>(tokens) * sizes.token_bytes() / kMiB,
                      "Those are the tokens: a page that is begun takes its whole place."},
                     {static_cast<double>(pages), "That is the number of pages; how large is one?"},
                     {all * sizes.heads_q / sizes.heads_kv,
                      "Only the heads of keys are cached, not the heads of queries."}},
        .hint = "How many pages does each conversation take? The last one may be half empty."};
}

Exercise group_exercise() {
    const CacheSizes sizes;
    const model::Machine& m = h200();
    const double ridge = m.matrix_flop * m.cores * m.rated_clock_ghz / m.dram_gbs;
    const double queries = std::ceil(ridge);
    return {
        .task = fmt::format(
            "In decoding, one query does 1 FLOP for each byte of the cache. An H200 is at its ridge with {:.1f} FLOP a "
            "byte. How many heads of queries would have to share a head of keys before its tensor cores are the limit?",
            ridge),
        .unit = "heads",
        .value = queries,
        .tolerance = 0.005,
        .answer = fmt::format("{:g} heads", queries),
        .why =
            fmt::format("Each query that uses the same byte adds 1 FLOP, so {:g} of them. The model of the page has "
                        "{:g}. In MLA all heads, often 128 of them, use a cached vector as key and as value. That is "
                        "nearly 2 FLOP a byte for each head, so MLA is past the ridge.",
                        queries, static_cast<double>(sizes.heads_q / sizes.heads_kv)),
        .mistakes = {{std::ceil(ridge / 4),
                      "One query does 1 FLOP a byte, not 4: a pair of K and V numbers has 4 bytes."}},
        .hint = "How many FLOP a byte do n queries do that share the byte?"};
}

Exercise page_size_exercise() {
    return {.kind = Kind::explain,
            .task = "What speaks for small pages, and what for large ones?",
            .answer =
                "Small pages leave fewer empty places, since only the last page of a sequence is partly empty, and "
                "shared beginnings match more often. Large pages need fewer look-ups, and their keys lie "
                "together, so that the memory moves long pieces.",
            .hint = "Think of the last page of a sequence, and of the reads of the kernel."};
}

Exercise fp8_exercise() {
    constexpr double kOutlier = 40, kNumber = 1.1;
    const double rounded = nearest_e4m3(kNumber);
    const double error = kOutlier * (rounded - kNumber);
    return {
        .task = fmt::format(
            "A key's number {:g} becomes {:g} in e4m3. The query has the outlier {:g} in that place, which e4m3 holds "
            "exactly; nothing else is rounded. With base 2, so that a weight is 2^(s - m): by which factor is the "
            "weight of this key wrong?",
            kNumber, rounded, kOutlier),
        .unit = "times",
        .value = std::exp2(error),
        .tolerance = 0.01,
        .answer = fmt::format("{:.3g} times", std::exp2(error)),
        .why = fmt::format(
            "The score is wrong by {:g} * ({:g} - {:g}) = {:.3g}, and the weight by 2^{:.3g}. Without the outlier, "
            "with 1 in its place, it would be 2^{:g} = {:.3f}.",
            kOutlier, rounded, kNumber, error, error, rounded - kNumber, std::exp2(rounded - kNumber)),
        .mistakes = {{error, "That is how far the score is off; the weight is 2 to the power of it."},
                     {rounded / kNumber, "That is the factor on the key's number; the query multiplies the error."},
                     {std::exp2(rounded - kNumber), "The error of the key's number is multiplied by the query's."}},
        .hint = "By how much is the score wrong? It is a product of the query's number and the key's error."};
}

Exercise spacing_exercise() {
    constexpr double kNumber = 100;
    const double spacing = nearest_e4m3(64 * 1.1) - 64;
    return {
        .task = fmt::format("How far apart are the numbers of e4m3 near {:g}?", kNumber),
        .value = spacing,
        .answer = fmt::format("{:g}", spacing),
        .why = fmt::format("{:g} lies between 2^6 = 64 and 2^7 = 128, and there are 2^3 = 8 numbers in between: 64 / "
                           "8 = {:g}. So the rounding error is at most {:g}.",
                           kNumber, spacing, spacing / 2),
        .mistakes = {{spacing / 2, "That is the largest rounding error, half of the distance."},
                     {0.125, "That is the distance between 1 and 2; it doubles with each power of two."}},
        .hint = "Between which powers of two does it lie? The three bits after the point cut that into eight."};
}

Exercise outlier_exercise() {
    return {
        .kind = Kind::explain,
        .task =
            "q is turned by a random orthogonal matrix before it is rounded to fp8, and k by the same one. Why does "
            "q . k stay what it is, and why does the error become smaller?",
        .answer =
            "An orthogonal matrix R has R^T R = I, so (R q) . (R k) = q . k. An outlier of q becomes many "
            "numbers of middle size, so no rounding error of k is multiplied by a large number, and the "
            "errors in the places have different signs and cancel in part.",
        .hint = "What does a rotation do to the length of a vector, and to its largest number?"};
}

Exercise lazy_rescale_exercise() {
    const walk::Hand hand = stream_scores({1, 3, 2, 5}, 2);
    const walk::HandStep &first = hand.steps[0], &second = hand.steps[1];
    const Fraction rise(std::int64_t{1} << (*second.m - *first.m));
    const Fraction kept = second.l * rise;  // relative to the old maximum
    return {
        .task = fmt::format(
            "Lesson 6 once more: scores 1, 3, 2, 5 in tiles of two, with base 2. After the first tile m = {} and l = "
            "{}. FlashAttention-4 keeps m while it would rise by less than 8. So m stays {} in the second tile. What "
            "is l after it?",
            *first.m, first.l.text(), *first.m),
        .value = kept.value(),
        .answer = kept.text(),
        .why = fmt::format(
            "{} + 2^(2 - {}) + 2^(5 - {}) = {}: nothing is rescaled, and one weight is above 1. Lesson 6 had m = {} "
            "and l = {}. Both mean the same sum: 2^{} * {} = 2^{} * {}.",
            first.l.text(), *first.m, *first.m, kept.text(), *second.m, second.l.text(), *first.m, kept.text(),
            *second.m, second.l.text()),
        .mistakes = {{second.l.value(), "That is l with m = 5, the true maximum. Here m stays as it was."},
                     {(kept - first.l).value(), "That is the second tile alone; the old l stays, unchanged."},
                     {(first.l + Fraction(9, 8)).value(),
                      "The new weights are relative to the m that stays, so one of them is above 1."}},
        .hint = "Each new weight is 2^(s - m) with the old m. Is there anything to rescale?"};
}

Exercise polynomial_exercise() {
    const TileClocks clocks = tile_clocks("b200", 64);
    const double share = 1 - clocks.gemms / clocks.exponentials;
    return {
        .task = fmt::format(
            "A B200 with head_dim 64: a tile of 128 x 128 takes {:g} clocks of products and {:g} of exponentials. What "
            "share of the exponentials must become polynomials, on other units, so that the exponential unit takes no "
            "longer than the products?",
            clocks.gemms, clocks.exponentials),
        .value = share,
        .answer = fmt::format("{:g}", share),
        .why = fmt::format(
            "{:g} of {:g} clocks may stay, so {:g} of the work has to go. Smaller heads are worse: products "
            "shrink with head_dim, exponentials do not.",
            clocks.gemms, clocks.exponentials, share),
        .mistakes = {{clocks.exponentials / clocks.gemms, "That is how many times as long they take."}},
        .hint = "How many clocks of exponentials fit beside the products?"};
}

Exercise stale_exercise() {
    return {.kind = Kind::explain,
            .task =
                "A kernel that takes the largest score of each tile for m, without looking at the m before, is called "
                "wrong (a stale maximum). FA4 keeps an m that is not the largest score, and is right. What is the "
                "difference?",
            .answer =
                "Any m is right in exact arithmetic if l and O are relative to the same m. FA4 bounds the distance: "
                "a weight is at most 2^8, which fp32 holds. An m that follows each tile may fall by any amount, "
                "and then the rescale exp(old m - new m) overflows.",
            .hint = "What is the largest number that each of them can compute?"};
}

Exercise sink_exercise() {
    const walk::HandRow row = pencil_example().rows[0];
    constexpr std::int64_t kSink = 1;
    const Fraction raw = row.o[0] * row.l;
    const Fraction added(1, std::int64_t{1} << (*row.m - kSink));
    const Fraction l = row.l + added;
    return {
        .task = fmt::format(
            "Row 0 of lesson 7 ended with m = {}, l = {} and, before the division, {} as the first element of O. Its "
            "head has a sink of {}, with base 2. What is the first element of O after the division?",
            *row.m, row.l.text(), raw.text(), kSink),
        .value = (raw / l).value(),
        .answer = (raw / l).text(),
        .why = fmt::format(
            "The sink adds 2^({} - {}) = {} to l and nothing to O: {} / ({} + {}) = {}. Without it, O was {}.", kSink,
            *row.m, added.text(), raw.text(), row.l.text(), added.text(), (raw / l).text(), row.o[0].text()),
        .mistakes = {{row.o[0].value(), "That is without the sink: it joins l."},
                     {(raw / (row.l + Fraction(2))).value(), "l is relative to m, so the sink adds 2^(sink - m)."},
                     {(raw / (row.l + Fraction(kSink))).value(), "The sink is a score: it adds 2^(sink - m) to l."}},
        .hint = "What does the sink add to l, relative to m? What does it add to O?"};
}

Exercise window_exercise() {
    Problem problem = problem_of(2048, 1, 128);
    problem.mask.causal = Causal::bottom_right;
    const auto run_of = [&] {
        const schedule::Cost cost = schedule::cost(workload_of(problem, Schedule::fa2, {128, 128}));
        return static_cast<double>(cost.full + cost.partial);
    };
    const double causal = run_of();
    problem.mask.window_left = 255;
    const double run = run_of();
    return {
        .task = fmt::format(
            "N = 2048 queries and keys, causal, tiles of 128 x 128: {:g} of 256 tiles run. With a window, each query "
            "sees itself and the 255 keys before it. How many tiles run now?",
            causal),
        .unit = "tiles",
        .value = run,
        .answer = fmt::format("{:g} tiles", run),
        .why =
            fmt::format("A row of tiles meets its own tile and the two before it: 16 * 3, less 3 that would lie before "
                        "the first key: {:g}. It is linear in N now.",
                        run),
        .mistakes = {{48, "The first two rows have fewer tiles before them."},
                     {31, "256 keys are two tiles wide, but they are not aligned: a row of tiles meets three."},
                     {32, "256 keys are two tiles wide, but they are not aligned: a row of tiles meets three."}},
        .hint = "Which keys does the first query of a row of tiles see, and which the last?"};
}

Exercise dropout_exercise() {
    return {
        .kind = Kind::explain,
        .task =
            "Dropout drops each weight with probability p = 1/2. A kernel divides by the sum of the weights that stay, "
            "instead of by l and by 1 - p. What is wrong with that? Take a row with the weights 9/10 and 1/10.",
        .answer =
            "O is not the same in the mean. If only the second key stays, it gets the whole weight. Over the three "
            "equally likely cases in which a key stays, the first key gets (9/10 + 1 + 0) / 3 = 19/30 and not 9/10. If "
            "no key stays, O is 0 / 0. With l from before dropout and 1 - p, each weight is right in the mean.",
        .hint = "Which keys may stay, and what does the first key get in each case?"};
}

Exercise block_floor_exercise() {
    const BlockSizes sizes{.hidden = 4096, .heads_q = 32, .heads_kv = 8, .head_dim = 128, .keys = 1024};
    constexpr double kRate = 4800;
    const double weights = sizes.weight_bytes() / 1e6, cache = sizes.cache_bytes() / 1e6;
    const auto time = [](double megabytes) { return megabytes / kRate * 1000; };
    return {
        .task = fmt::format(
            "A layer of an 8B model in bf16: hidden size {}, {} heads of queries and {} of keys, of {} each. One "
            "sequence of {} tokens is decoded on a GPU that reads {:g} GB/s. How many microseconds do the weights and "
            "the cache of one attention block take at least?",
            sizes.hidden, sizes.heads_q, sizes.heads_kv, sizes.head_dim, sizes.keys, kRate),
        .unit = "microseconds",
        .value = time(weights + cache),
        .tolerance = 0.02,
        .answer = fmt::format("{:.1f} microseconds", time(weights + cache)),
        .why = fmt::format(
            "The weights of Q, K, V and of the output are (32 + 8 + 8) * 128 * 4096 + 4096 * 4096 numbers of 2 bytes: "
            "{:.2f} MB. K and V of the tokens: 1024 * 8 * 128 * 2 * 2 bytes, {:.2f} MB. Together {:.2f} MB.",
            weights, cache, weights + cache),
        .mistakes = {{time(weights), "The cache is read too."},
                     {time(cache), "The weights are read too, for each token again."},
                     {time((weights + cache) / 2), "A number in bf16 has 2 bytes."}},
        .hint = "Which matrices has the block, and how many numbers has each? Then K and V of all tokens."};
}

Exercise removed_gaps_exercise() {
    const MeasuredBlock block;
    const double removed = block.chain - block.launch, above = block.chain - block.floor;
    return {
        .task = fmt::format(
            "Measured on an H200: five kernels take {:g} microseconds for the block of the 1B model, one launch takes "
            "{:g}, and reading its bytes takes {:g}. How many percent of the time above the bytes does the one launch "
            "remove?",
            block.chain, block.launch, block.floor),
        .unit = "percent",
        .value = 100 * removed / above,
        .tolerance = 0.03,
        .answer = fmt::format("{:.0f} percent", 100 * removed / above),
        .why = fmt::format(
            "{:g} - {:g} = {:.1f} microseconds above the bytes, of which {:g} - {:g} = {:.1f} go. About half of the "
            "rest is the waiting of thread blocks for each other.",
            block.chain, block.floor, above, block.chain, block.launch, removed),
        .mistakes = {{100 * removed / block.chain, "That is the share of the whole time; the bytes can't be removed."},
                     {100 * block.launch / block.chain, "That is what is left of the whole time."}},
        .hint = "How much time lies above the bytes with five kernels, and how much of it is gone with one launch?"};
}

Exercise resident_exercise() {
    return {.kind = Kind::explain,
            .task =
                "A GPU has 132 multiprocessors, and one thread block of a megakernel fits on each. Somebody starts it "
                "with 264 thread blocks: those with a low number compute Q, K and V, those with a high number wait for "
                "them. It works. With the order reversed it hangs. Why, and what follows for a library?",
            .answer =
                "A thread block that is on a multiprocessor stays until it ends. If the first 132 wait for results of "
                "the others, those never start, since no multiprocessor becomes free. CUDA promises no order of "
                "thread blocks, so the first version works by luck. All thread blocks that wait for each other have "
                "to be on the GPU at once: the library starts no more than fit (a cooperative launch checks it), or "
                "refuses.",
            .hint = "When does a multiprocessor take the next thread block?"};
}

}  // namespace tessera::learn
