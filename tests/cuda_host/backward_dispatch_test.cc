// SPDX-License-Identifier: Apache-2.0
//
// The launch order of cuda.fa3.backward (cuda/fa3/host/backward_dispatch.hpp, numbering.hpp, and key_block_list.hpp of
// ragged calls): every key block has one number, no CTA waits for one that starts later, and the cost model starts the
// same CTAs in the same order. No GPU is needed.
#include "cuda/fa3/host/backward_dispatch.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <map>
#include <numeric>
#include <random>
#include <set>
#include <tuple>
#include <vector>

#include "cuda/fa3/host/key_block_list.hpp"
#include "cuda/host/work_list.hpp"
#include "model/dq_order.hpp"

namespace tessera::backward_dispatch_test {
namespace {

namespace fa3 = cuda::fa3::backward;

using Lengths = std::vector<std::pair<std::int64_t, std::int64_t>>;

struct Case {
    Problem problem;
    Lengths lengths;  ///< of each sequence
};

class Cases {
 public:
    explicit Cases(unsigned seed) : random_(seed) {}

    Case next() {
        Case c;
        Problem& p = c.problem;
        p.dtype = one_of({0, 1}) == 0 ? DType::bf16 : DType::fp16;
        p.batch = one_of({1, 1, 2, 3, 7, 16});
        p.heads_kv = one_of({1, 2, 4, 8, 16, 32});
        p.heads_q = p.heads_kv * one_of({1, 1, 1, 2, 3, 4, 8, 16});
        p.head_dim = one_of({40, 64, 72, 128, 160, 192, 256});
        p.head_dim_v = p.head_dim == 192 ? one_of({128, 192}) : p.head_dim;
        p.len_kv = length();
        p.len_q = one_of({0, 1, 2}) == 0 ? length() : p.len_kv;
        p.mask.causal = one_of({0, 1, 2}) == 0 ? Causal::none
                        : one_of({0, 1}) == 0  ? Causal::top_left
                                               : Causal::bottom_right;
        if (one_of({0, 1, 2, 3}) == 0) p.mask.window_left = length();
        if (p.head_dim <= 128 && one_of({0, 1, 2, 3}) == 0) p.softcap = 30;
        c.lengths.assign(static_cast<std::size_t>(p.batch), {p.len_q, p.len_kv});
        if (one_of({0, 1, 2}) == 0) make_ragged(c);
        return c;
    }

 private:
    std::int64_t one_of(std::initializer_list<std::int64_t> values) {
        return *(values.begin() + static_cast<std::ptrdiff_t>(random_() % values.size()));
    }
    std::int64_t length() {
        const std::int64_t whole = one_of({1, 64, 128, 512, 640, 1024, 2048, 4096, 8192});
        return one_of({0, 1}) == 0 ? whole : 1 + static_cast<std::int64_t>(random_() % static_cast<unsigned>(whole));
    }
    void make_ragged(Case& c) {
        Problem& p = c.problem;
        p.ragged = true;
        p.total_q = p.total_kv = 0;
        const bool square = one_of({0, 1}) == 0;
        for (auto& [len_q, len_kv] : c.lengths) {
            if (one_of({0, 1, 2, 3, 4, 5, 6, 7}) == 0) {
                len_q = len_kv = 0;
                continue;
            }
            len_kv = 1 + static_cast<std::int64_t>(random_() % static_cast<unsigned>(p.len_kv));
            len_q = square ? std::min(len_kv, p.len_q)
                           : 1 + static_cast<std::int64_t>(random_() % static_cast<unsigned>(p.len_q));
            p.total_q += len_q;
            p.total_kv += len_kv;
        }
    }

    std::mt19937 random_;
};

std::string describe(const Case& c) {
    std::string text = c.problem.describe();
    if (!c.problem.ragged) return text;
    for (const auto& [len_q, len_kv] : c.lengths) text += " " + std::to_string(len_q) + "x" + std::to_string(len_kv);
    return text;
}

/// Calls ask(schedule) as the kernel does for a sequence.
template <class Ask>
void ask_sequence(const Case& c, std::size_t sequence, const Ask& ask) {
    const Problem& p = c.problem;
    const auto [len_q, len_kv] = c.lengths[sequence];
    const auto of = [&, len_q = len_q, len_kv = len_kv](auto schedule) {
        schedule.set(p.mask, static_cast<int>(len_q), static_cast<int>(len_kv), static_cast<int>(p.group()));
        ask(schedule);
    };
    const fa3::Config& config = fa3::config_of(p);
    if (config.splits_dv_dk()) of(fa3::BlockSchedule<64, 64>{});
    else if (config.block_q == 128) of(fa3::BlockSchedule<128, 128>{});
    else of(fa3::BlockSchedule<64, 128>{});
}

/// The list that list_kernel makes of a ragged call (cuda/tile/work_list.cuh), where sequences of one
/// class of length keep their order; and the number that its counter begins at.
struct List {
    std::vector<cuda::ListedSequence> items;
    unsigned first_number;
};
List list_of(const Case& c) {
    const Problem& p = c.problem;
    std::vector<int> items(c.lengths.size()), order(c.lengths.size());
    std::iota(order.begin(), order.end(), 0);
    for (std::size_t b = 0; b < items.size(); ++b) {
        ask_sequence(c, b, [&](const auto& schedule) { items[b] = fa3::items_of(schedule); });
    }
    const auto class_of = [&](int b) {
        const auto [len_q, len_kv] = c.lengths[static_cast<std::size_t>(b)];
        return cuda::length_class(static_cast<int>(len_q), static_cast<int>(len_kv));
    };
    std::ranges::stable_sort(order, [&](int a, int b) { return class_of(a) > class_of(b); });
    const auto room = static_cast<int>(fa3::list_items(p));
    int first = room - std::accumulate(items.begin(), items.end(), 0);
    EXPECT_GE(first, 0) << "the list has no room for its items: " << describe(c);
    List list{std::vector<cuda::ListedSequence>(static_cast<std::size_t>(room)),
              static_cast<unsigned>(first) * static_cast<unsigned>(p.heads_kv)};
    for (const int b : order) {
        const auto [len_q, len_kv] = c.lengths[static_cast<std::size_t>(b)];
        const cuda::ListedSequence own{b, first, 0, 0, static_cast<int>(len_q), static_cast<int>(len_kv), {}};
        const int count = items[static_cast<std::size_t>(b)];
        std::fill_n(list.items.begin() + first, count, own);
        first += count;
    }
    return list;
}

/// The key blocks that KeyBlock::decode_listed() finds for the numbers of a ragged launch, in order.
std::vector<model::KeyBlockStart> starts_of_list(const Case& c) {
    const Problem& p = c.problem;
    const fa3::KeyBlockNumbering numbering = fa3::key_block_numbering(p);
    const List list = list_of(c);
    std::vector<model::KeyBlockStart> starts;
    for (unsigned number = list.first_number; number < numbering.count; ++number) {
        const auto own = static_cast<int>(number);
        const cuda::ListedSequence sequence =
            list.items[static_cast<std::size_t>(numbering.by_listed_heads.quotient(own))];
        const int index = own - sequence.first_item * static_cast<int>(p.heads_kv);
        ask_sequence(c, static_cast<std::size_t>(sequence.batch), [&](const auto& schedule) {
            const cuda::PlacedKeyBlock placed =
                fa3::place_key_block(schedule, static_cast<int>(p.heads_kv) * schedule.head_splits, index,
                                     !p.mask.trivial(), fa3::config_of(p).splits_dv_dk());
            starts.push_back(
                {sequence.batch, placed.head / schedule.head_splits, placed.head % schedule.head_splits, placed.n});
        });
    }
    return starts;
}

/// The key blocks that KeyBlock::decode() finds for the numbers of a launch, in order. Numbers without one are left
/// out.
std::vector<model::KeyBlockStart> starts_of_launch(const Case& c) {
    if (c.problem.ragged) return starts_of_list(c);
    const fa3::KeyBlockNumbering numbering = fa3::key_block_numbering(c.problem);
    const bool splits_dv_dk = fa3::config_of(c.problem).splits_dv_dk();
    std::vector<model::KeyBlockStart> starts;
    for (unsigned number = 0; number < numbering.count; ++number) {
        const fa3::KeyBlockNumber own = numbering.decode(number);
        ask_sequence(c, static_cast<std::size_t>(own.batch), [&](const auto& schedule) {
            const int n = splits_dv_dk
                              ? own.segment * numbering.segment_size + own.index
                              : schedule.key_block(own.segment, own.index, numbering.segments, numbering.segment_size);
            if (n < schedule.count_kv && own.split < schedule.head_splits)
                starts.push_back({own.batch, own.kv_head, own.split, n});
        });
    }
    return starts;
}

constexpr int kCases = 3000;

TEST(BackwardDispatch, every_key_block_has_one_number) {
    Cases cases(1);
    for (int i = 0; i < kCases; ++i) {
        const Case c = cases.next();
        const auto starts = starts_of_launch(c);
        std::set<std::tuple<int, int, int, int>> seen;
        for (const auto& own : starts) seen.insert({own.sequence, own.kv_head, own.split, own.n});
        ASSERT_EQ(seen.size(), starts.size()) << "a key block starts twice: " << describe(c);
        std::size_t expected = 0;
        for (std::size_t sequence = 0; sequence < c.lengths.size(); ++sequence) {
            ask_sequence(c, sequence, [&](const auto& schedule) {
                expected += static_cast<std::size_t>(c.problem.heads_kv) *
                            static_cast<std::size_t>(schedule.head_splits * schedule.count_kv);
            });
        }
        ASSERT_EQ(starts.size(), expected) << describe(c);
    }
}

/// The semaphore of a dQ tile counts key blocks in the order in which they start.
TEST(BackwardDispatch, no_cta_waits_for_one_that_starts_later) {
    Cases cases(2);
    int checked = 0;
    for (int i = 0; i < kCases; ++i) {
        const Case c = cases.next();
        if (fa3::config_of(c.problem).splits_dv_dk() || c.problem.rows_kv() * c.problem.heads_kv > 40'000) continue;
        ++checked;
        std::map<std::tuple<int, int, int, int, int>, int> semaphores;
        for (const auto& own : starts_of_launch(c)) {
            ask_sequence(c, static_cast<std::size_t>(own.sequence), [&](const auto& schedule) {
                const auto queries = schedule.query_blocks_of(own.n);
                for (int m = queries.begin; m < queries.end; ++m) {
                    const bool wraps = !schedule.ascending && m < schedule.first_query_block(own.n);
                    const int accumulator = wraps ? 1 : 0;
                    int& count = semaphores[{own.sequence, own.kv_head, own.split, accumulator, m}];
                    ASSERT_LT(accumulator, fa3::dq_accumulators(c.problem)) << describe(c);
                    ASSERT_EQ(schedule.position(accumulator, m, own.n), count)
                        << "key block " << own.n << ", query block " << m << " of " << describe(c);
                    ++count;
                }
            });
            if (HasFatalFailure()) return;
        }
    }
    EXPECT_GT(checked, kCases / 4);
}

TEST(BackwardDispatch, the_cost_model_starts_the_ctas_of_the_launch) {
    Cases cases(3);
    int rounds = 0, segments = 0, longest_first = 0, splits = 0;
    for (int i = 0; i < kCases; ++i) {
        const Case c = cases.next();
        if (fa3::config_of(c.problem).splits_dv_dk()) continue;
        ASSERT_EQ(model::key_block_starts(c.problem, c.lengths), starts_of_launch(c)) << describe(c);
        const fa3::KeyBlockNumbering numbering = fa3::key_block_numbering(c.problem);
        rounds += numbering.heads_per_round < numbering.heads ? 1 : 0;
        segments += fa3::uses_segments(c.problem) ? 1 : 0;
        longest_first += fa3::starts_longest_first(c.problem) ? 1 : 0;
        splits += numbering.splits > 1 ? 1 : 0;
    }
    for (const int count : {rounds, segments, longest_first, splits}) EXPECT_GT(count, 20) << "the cases miss a mode";
}

/// Bounds that are the lengths', missing, or far beyond the tensors: the same CTAs start in the same order, as many as
/// the totals can need at most.
TEST(BackwardDispatch, bounds_of_lengths_change_no_start) {
    Cases cases(5);
    int checked = 0;
    for (int i = 0; i < kCases; ++i) {
        Case c = cases.next();
        Problem& p = c.problem;
        if (!p.ragged || p.total_kv * p.heads_kv > 40'000) continue;
        ++checked;
        p.len_q = p.len_kv = 0;
        for (const auto& [len_q, len_kv] : c.lengths) {
            p.len_q = std::max(p.len_q, len_q);
            p.len_kv = std::max(p.len_kv, len_kv);
        }
        const std::int64_t most_q = p.len_q, most_kv = p.len_kv;
        const auto starts = starts_of_launch(c);
        for (const std::int64_t times : {0, 10, 100'000}) {
            p.len_q = times == 0 ? p.total_q : most_q * times;
            p.len_kv = times == 0 ? p.total_kv : most_kv * times;
            ASSERT_EQ(starts_of_launch(c), starts) << times << " times: " << describe(c);
            const std::int64_t blocks = p.total_kv / fa3::config_of(p).block_kv + p.batch;
            ASSERT_LE(fa3::list_items(p), blocks * fa3::head_splits(p));
            ASSERT_LE(fa3::head_splits(p), p.group());
        }
    }
    EXPECT_GT(checked, kCases / 10);
}

/// One long sequence among thousands of short ones, some of which are empty.
TEST(BackwardDispatch, the_longest_sequence_starts_first) {
    Case c;
    Problem& p = c.problem;
    p = Problem::dense(4000, 20'000, 16, 128, DType::bf16);
    p.ragged = true;
    p.heads_kv = 4;
    p.mask.causal = Causal::top_left;
    for (int b = 0; b < 4000; ++b) {
        const std::int64_t len = b == 2718 ? 20'000 : b % 3 == 0 ? 0 : 1 + b % 300;
        c.lengths.emplace_back(len, len);
        p.total_q = p.total_kv += len;
    }
    const auto starts = starts_of_launch(c);
    const std::int64_t of_longest = 157 * 4 * 2;  // key blocks, kv heads, head splits
    for (std::size_t i = 0; i < starts.size(); ++i) {
        ASSERT_EQ(starts[i].sequence == 2718, static_cast<std::int64_t>(i) < of_longest) << i;
    }
    EXPECT_EQ(starts.front().n, 0) << "the block with the most queries";
}

TEST(BackwardDispatch, classes_of_length_ascend) {
    EXPECT_EQ(cuda::length_class(0), 0);
    for (int len = 1; len < 100'000; ++len) {
        const int step = cuda::length_class(len) - cuda::length_class(len - 1);
        ASSERT_TRUE(step == 0 || step == 1) << len;
    }
    EXPECT_EQ(cuda::length_class(std::numeric_limits<int>::max()), cuda::kLengthClasses - 1);
}

/// The tiles of the dQ kernel: each once, a head's last one first.
TEST(BackwardDispatch, every_query_tile_has_one_number) {
    Cases cases(4);
    for (int i = 0; i < kCases; ++i) {
        const Case c = cases.next();
        const fa3::QueryTileNumbering numbering = fa3::query_tile_numbering(c.problem);
        std::vector<int> next(static_cast<std::size_t>(numbering.heads), numbering.tiles - 1);
        for (int number = 0; number < numbering.heads * numbering.tiles; ++number) {
            const fa3::QueryTileNumber own = numbering.decode(number);
            ASSERT_TRUE(own.batch_head >= 0 && own.batch_head < numbering.heads) << number << " of " << describe(c);
            ASSERT_EQ(own.tile, next[static_cast<std::size_t>(own.batch_head)]--) << number << " of " << describe(c);
        }
    }
}

/// The measured rules (fa3/backward/TRIED.md), by hand.
TEST(BackwardDispatch, rounds_of_known_problems) {
    Problem p = Problem::dense(4, 4096, 16, 128, DType::bf16);
    p.mask.causal = Causal::top_left;
    fa3::KeyBlockRounds rounds = fa3::key_block_rounds(p);
    EXPECT_EQ(rounds.segments, cuda::kSegments);
    EXPECT_EQ(rounds.segment_size, 8);
    EXPECT_EQ(rounds.heads, 16) << "512 CTAs a round";
    EXPECT_FALSE(fa3::writes_dq(p)) << "segments";
    p.mask = {};
    rounds = fa3::key_block_rounds(p);
    EXPECT_EQ(rounds.segments, 1);
    EXPECT_EQ(rounds.heads, 64) << "all heads";
    EXPECT_FALSE(fa3::writes_dq(p)) << "two accumulators";
    p = Problem::dense(32, 512, 16, 128, DType::bf16);
    rounds = fa3::key_block_rounds(p);
    EXPECT_EQ(rounds.segments, 4) << "a segment for each of four aligned key blocks";
    EXPECT_EQ(rounds.heads, 24) << "1 MiB a head";
    EXPECT_TRUE(fa3::writes_dq(p));
    p.batch = 15;
    EXPECT_FALSE(fa3::writes_dq(p)) << "960 key blocks";
    p = Problem::dense(1, 4096, 64, 128, DType::bf16);
    p.heads_kv = 8;
    p.mask.causal = Causal::bottom_right;
    EXPECT_EQ(fa3::head_splits(p), 4);
    rounds = fa3::key_block_rounds(p);
    EXPECT_EQ(rounds.segments, 32);
    EXPECT_EQ(rounds.heads, 8) << "of 32, with 32 key blocks each";
}

}  // namespace
}  // namespace tessera::backward_dispatch_test
