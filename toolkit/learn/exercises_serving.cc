// SPDX-License-Identifier: Apache-2.0
//
// Lessons 17 to 21: decoding, caches, fp8, Blackwell, sinks.
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
                     {(first.o[0] + second.o[0]).value(), "Each O was divided by its own l; weigh them first."}}};
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
        .mistakes = {
            {static_cast<double>(tokens) * sizes.token_bytes() / kMiB,
             "Those are the tokens: a page that is begun takes its whole place."},
            {all / sizes.layers, "That is one layer."},
            {static_cast<double>(pages), "That is the number of pages; how large is one?"},
            {all * sizes.heads_q / sizes.heads_kv, "Only the heads of keys are cached, not the heads of queries."}}};
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
                     {std::exp2(rounded - kNumber), "The error of the key's number is multiplied by the query's."}}};
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
                      "The new weights are relative to the m that stays, so one of them is above 1."}}};
}

Exercise sink_exercise() {
    const walk::Hand hand = walk::work_by_hand(pencil_example(), Schedule::fa2, {});
    const walk::HandRow& row = hand.rows[0];
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
                     {(raw / (row.l + Fraction(kSink))).value(), "The sink is a score: it adds 2^(sink - m) to l."}}};
}

}  // namespace tessera::learn
