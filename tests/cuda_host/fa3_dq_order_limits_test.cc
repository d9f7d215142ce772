// SPDX-License-Identifier: Apache-2.0
//
// The order in which key blocks add to dQ (src/cuda/fa3/host/dq_order.hpp), at the largest lengths that CUDA
// kernels count in 32 bits.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <string>
#include <utility>

#include "cuda/fa3/host/dq_order.hpp"
#include "cuda/host/kernel_table.hpp"

namespace tessera::fa3_dq_order_limits_test {
namespace {

using cuda::kMaxIndex;
using cuda::Span;
using cuda::fa3::backward::BlockSchedule;

Span tiles(Range rows, int block) {
    if (rows.empty()) return {0, 0};
    return {static_cast<int>(rows.begin / block), static_cast<int>((rows.end + block - 1) / block)};
}

/// With the longest tensors, 32-bit sums give what the Band gives, for the first blocks, the last and those between.
template <int kBlockQ, int kBlockKv>
void expect_spans_right(const Mask& mask, int len_q, int len_kv) {
    BlockSchedule<kBlockQ, kBlockKv> schedule{};
    schedule.set(mask, len_q, len_kv, 1);
    const Band band = mask.bind(len_q, len_kv);
    for (const int n : {0, 1, schedule.count_kv / 2, schedule.count_kv - 2, schedule.count_kv - 1}) {
        if (n < 0 || n >= schedule.count_kv) continue;
        const std::int64_t key = std::int64_t{n} * kBlockKv;
        const std::int64_t end = std::min<std::int64_t>(key + kBlockKv, len_kv);
        const Span all_blocks = tiles(band.q_range(key, end), kBlockQ);
        const cuda::QueryParts parts(len_q, cuda::QueryParts::kMaxTerms);
        for (const int part : {0, parts.count() / 2, parts.count() - 1}) {
            BlockSchedule<kBlockQ, kBlockKv> of_part{};
            of_part.set(mask, len_q, len_kv, 1);
            of_part.set_part(part, cuda::QueryParts::kMaxTerms);
            const int begin = std::max(all_blocks.begin, parts.begin(part) / kBlockQ);
            const int past = std::min(all_blocks.end, (parts.begin(part + 1) + kBlockQ - 1) / kBlockQ);
            const Span expected = begin < past ? Span{begin, past} : Span{0, 0};
            const Span got = of_part.query_blocks_of(n);
            EXPECT_TRUE(got.begin == expected.begin && got.end == expected.end) << "queries of " << n << ", " << part;
        }
        const Span full = schedule.unmasked_query_blocks(static_cast<int>(key), kBlockKv);
        for (const int m : {full.begin - 1, full.begin, full.end - 1, full.end}) {
            if (m < 0 || m >= schedule.count_q) continue;
            const std::int64_t query = std::int64_t{m} * kBlockQ;
            const bool all = query + kBlockQ <= len_q && key + kBlockKv <= len_kv &&
                             band.coverage(query, query + kBlockQ, key, key + kBlockKv) == Coverage::full;
            EXPECT_EQ(m >= full.begin && m < full.end, all) << "queries " << m << ", keys " << n;
        }
    }
    for (const int m : {0, 1, schedule.count_q / 2, schedule.count_q - 2, schedule.count_q - 1}) {
        if (m < 0 || m >= schedule.count_q) continue;
        const std::int64_t query = std::int64_t{m} * kBlockQ;
        const Range keys = band.kv_range(query, std::min<std::int64_t>(query + kBlockQ, len_q));
        const Span expected = tiles(keys, kBlockKv);
        const Span got = schedule.key_blocks_of(m);
        EXPECT_TRUE(got.begin == expected.begin && got.end == expected.end) << "keys of " << m;
        if (expected.begin >= expected.end) continue;
        // Positions begin with 0 in each accumulator; the last block of the first segment adds first.
        const int last = std::min(expected.end - 1, schedule.segment_last(0));
        const int accumulator = schedule.has_contributions(1, m) ? 1 : 0;
        EXPECT_EQ(
            schedule.position(accumulator, m, accumulator == 1 ? last : std::min(last, schedule.last_started_by(m))), 0)
            << m;
        if (schedule.segmented) {
            EXPECT_EQ(schedule.position(0, m, schedule.segment_begin(expected.end - 1)) + 1, expected.end) << m;
        }
    }
}

TEST(Fa3DqOrderLimits, spans_of_blocks_hold_at_the_largest_lengths) {
    constexpr int kMost = static_cast<int>(kMaxIndex) - 1;
    const std::array<Mask, 7> masks{Mask{},
                                    {.causal = Causal::bottom_right},
                                    {.causal = Causal::top_left},
                                    {.window_left = 100, .window_right = 50},
                                    {.window_left = 0, .window_right = 0},
                                    {.window_left = kMost, .window_right = 0},
                                    {.causal = Causal::top_left, .window_left = 90}};
    for (std::size_t i = 0; i < masks.size(); ++i) {
        for (const auto& [len_q, len_kv] : {std::pair{kMost, kMost},
                                            {kMost, 1},
                                            {1, kMost},
                                            {kMost, 70},
                                            {130, kMost},
                                            {kMost, kMost / 2},
                                            {kMost / 2 + 1, kMost}}) {
            SCOPED_TRACE(std::to_string(i) + ": " + std::to_string(len_q) + " x " + std::to_string(len_kv));
            expect_spans_right<64, 128>(masks[i], len_q, len_kv);
            expect_spans_right<128, 128>(masks[i], len_q, len_kv);
            expect_spans_right<64, 64>(masks[i], len_q, len_kv);
        }
    }
}

}  // namespace
}  // namespace tessera::fa3_dq_order_limits_test
