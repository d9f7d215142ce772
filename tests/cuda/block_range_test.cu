// SPDX-License-Identifier: Apache-2.0
//
// The key tiles that a query tile works on, and those of them that need mask code, compared with the host's Band.
#include "cuda/host/block_range.hpp"
#include "cuda/on_device.cuh"
#include "cuda/tile/score.cuh"

namespace tessera::cuda::test {
namespace {

struct Answer {
    int first, end, full_begin, full_end;
    bool any;
    bool full;  // all of the keys of tile 0, of all queries
};

__global__ void ask(Band band, std::int64_t q_begin, std::int64_t q_end, int block_kv, Answer* answer) {
    const BlockRange tiles(band, q_begin, q_end, block_kv);
    const Band32 visible(band);
    const int begin = static_cast<int>(q_begin);
    const int end = static_cast<int>(q_end);
    *answer = {tiles.begin,
               tiles.end,
               tiles.full_begin,
               tiles.full_end,
               visible.any(begin, end),
               visible.full(begin, end, 0, block_kv)};
}

/// Calls f(band, q_begin, q_end, block_kv, answer) for masks, lengths and blocks of all sorts.
template <class F>
void for_each_case(const F& f) {
    const Mask masks[] = {{},
                          {.causal = Causal::bottom_right},
                          {.causal = Causal::top_left},
                          {.window_left = 10, .window_right = 3},
                          {.causal = Causal::bottom_right, .window_left = 40},
                          {.causal = Causal::top_left, .window_left = 100},
                          {.window_left = 0, .window_right = 0}};
    Mirror<Answer> answer(1);
    for (const Mask& mask : masks) {
        for (const auto& [len_q, len_kv] : {std::pair{100, 100}, {33, 150}, {150, 33}, {1, 129}, {64, 1}, {20, 0}}) {
            const Band band = mask.bind(len_q, len_kv);
            for (const int block_q : {16, 64}) {
                for (std::int64_t q = 0; q < len_q; q += block_q) {
                    for (const int block_kv : {32, 80}) {
                        const std::int64_t q_end = std::min<std::int64_t>(q + block_q, len_q);
                        run_block(ask, 1, 0, band, q, q_end, block_kv, answer.device());
                        f(band, q, q_end, block_kv, answer.fetch()[0]);
                    }
                }
            }
        }
    }
}

class Tiles : public OnHopper {};

TEST_F(Tiles, of_keys_are_those_that_the_band_does_not_call_empty_and_full_are_those_that_it_calls_full) {
    for_each_case([](const Band& band, std::int64_t q, std::int64_t q_end, int block_kv, const Answer& got) {
        for (int tile = 0; tile * block_kv < band.len_kv; ++tile) {
            const Coverage is = band.coverage(q, q_end, tile * block_kv, (tile + 1) * block_kv);
            const bool held = tile >= got.first && tile < got.end;
            ASSERT_EQ(held, is != Coverage::empty) << "queries " << q << ", tile " << tile << " of " << block_kv;
            const bool full = tile >= got.full_begin && tile < got.full_end;
            if (held)
                ASSERT_EQ(full, is == Coverage::full) << "queries " << q << ", tile " << tile << " of " << block_kv;
        }
    });
}

TEST_F(Tiles, visible_says_what_the_band_says) {
    for_each_case([](const Band& band, std::int64_t q, std::int64_t q_end, int block_kv, const Answer& got) {
        EXPECT_EQ(got.any, !band.kv_range(q, q_end).empty()) << "queries " << q << " of " << band.len_q;
        if (band.len_kv < block_kv) return;
        EXPECT_EQ(got.full, band.coverage(q, q_end, 0, block_kv) == Coverage::full) << "queries " << q;
    });
}

}  // namespace
}  // namespace tessera::cuda::test
