// SPDX-License-Identifier: Apache-2.0
//
// Score modifications of a fragment, compared with the host's Mask and Philox and with fp64; and sequences of a batch.
#include <cmath>
#include <limits>

#include "core/numeric.hpp"
#include "cuda/on_device.cuh"
#include "cuda/tile/score.cuh"
#include "cuda/tile/sequence.cuh"

namespace tessera::cuda::test::score {
namespace {

constexpr int kTiles = 4;
constexpr int kKeys = 8 * kTiles;
constexpr int kRows = 16;

struct Place {
    int query, key;  // of the fragment's first element
};

enum class What { hide, transform, transform_masked, drop };

/// One warp: a [16][32] block of scores at `place` of (batch, head), in and out.
template <class T>
__global__ void handle(ForwardParams p, Sequence sequence, std::int64_t batch, int head, Place place, What what,
                       float* s) {
    const int lane = static_cast<int>(threadIdx.x);
    const auto at = [&](int j, int e) { return (lane / 4 + e / 2 * 8) * kKeys + 8 * j + lane % 4 * 2 + e % 2; };
    float fragment[kTiles][4];
    for (int j = 0; j < kTiles; ++j) {
        for (int e = 0; e < 4; ++e) fragment[j][e] = s[at(j, e)];
    }
    const int query = place.query + lane / 4;
    const int key = place.key + lane % 4 * 2;
    const Band32 visible(p.mask.bind(sequence.len_q, sequence.len_kv));
    const HeadScores<T> scores(p, sequence, batch, head);
    if (what == What::hide) apply_mask(fragment, visible, query, key);
    if (what == What::transform) scores.template transform<false>(fragment, visible, query, key);
    if (what == What::transform_masked) scores.template transform<true>(fragment, visible, query, key);
    if (what == What::drop) scores.drop(fragment, query, key, lane);
    for (int j = 0; j < kTiles; ++j) {
        for (int e = 0; e < 4; ++e) s[at(j, e)] = fragment[j][e];
    }
}

__global__ void sequences(ForwardParams p, int count, Sequence* out) {
    for (int b = static_cast<int>(threadIdx.x); b < count; b += 32) out[b] = sequence_of(p, b);
}

template <class T>
std::vector<float> handled(const ForwardParams& p, const Sequence& sequence, Place place, What what,
                           const std::vector<float>& scores, std::int64_t batch = 0, int head = 0) {
    Mirror<float> s(scores);
    run_block(handle<T>, 32, 0, p, sequence, batch, head, place, what, s.device());
    return s.fetch();
}

std::vector<float> some_scores(std::uint64_t seed) {
    const check::Random random(seed);
    std::vector<float> scores(kRows * kKeys);
    for (std::size_t i = 0; i < scores.size(); ++i) scores[i] = static_cast<float>(random.bits(i) % 4001) * 0.01F - 20;
    return scores;
}

Place place_of(std::size_t index, Place first) {
    return {first.query + static_cast<int>(index) / kKeys, first.key + static_cast<int>(index) % kKeys};
}

class Scores : public OnHopper {};

TEST_F(Scores, hidden_are_the_pairs_that_the_mask_of_the_host_hides) {
    const Mask masks[] = {{},
                          {.causal = Causal::bottom_right},
                          {.causal = Causal::top_left},
                          {.window_left = 3, .window_right = 5},
                          {.causal = Causal::bottom_right, .window_left = 0},
                          {.causal = Causal::top_left, .window_left = 20, .window_right = 1}};
    const std::vector<float> scores = some_scores(31);
    for (const Mask& mask : masks) {
        for (const auto& [len_q, len_kv] : {std::pair{40, 40}, {17, 70}, {70, 17}, {1, 33}, {33, 1}}) {
            const Band band = mask.bind(len_q, len_kv);
            for (const Place first : {Place{0, 0}, {0, 32}, {16, 0}, {32, 32}, {64, 0}}) {
                ForwardParams p;
                p.mask = mask;
                const auto got = handled<__half>(p, {0, 0, len_q, len_kv}, first, What::hide, scores);
                for (std::size_t i = 0; i < got.size(); ++i) {
                    const Place at = place_of(i, first);
                    if (at.query >= len_q) continue;  // rows past the last query are not used
                    ASSERT_EQ(got[i], band.visible(at.query, at.key) ? scores[i] : -INFINITY)
                        << len_q << " x " << len_kv << ", query " << at.query << " key " << at.key;
                }
            }
        }
    }
}

TEST_F(Scores, go_through_scale_softcap_alibi_and_bias_as_in_fp64) {
    constexpr int kLenQ = 30, kLenKv = 50, kHeads = 3, kBatch = 2;
    const std::vector<float> scores = some_scores(32);
    const Mirror<float> slopes({0.5F, 0.0F, 0.25F, 1.0F, 0.125F, 0.75F});  // [batch][heads]
    for_both_types([&](auto t) {
        using T = decltype(t);
        const std::size_t count = std::size_t{kBatch} * kHeads * kLenQ * kLenKv;
        const Mirror<T> bias16(small_integers<T>(count, 33));
        std::vector<float> wide(count);
        for (std::size_t i = 0; i < count; ++i) wide[i] = as_double(bias16.host[i]) * 1.25;
        const Mirror<float> bias32(wide);
        for (int features = 0; features < 16; ++features) {
            const bool cap = features & 1, alibi = features & 2, bias = features & 4, fp32 = features & 8;
            ForwardParams p;
            p.scale = 0.3F;
            p.mask.causal = Causal::bottom_right;
            if (cap) p.softcap = 2.5F;
            if (alibi) {
                p.alibi_slopes = slopes.device();
                p.alibi_batch = kHeads;
                p.alibi_head = 1;
            }
            if (bias) {
                p.bias = {.data = fp32 ? reinterpret_cast<const char*>(bias32.device())
                                       : reinterpret_cast<const char*>(bias16.device()),
                          .fp32 = fp32,
                          .batch = kHeads * kLenQ * kLenKv,
                          .head = kLenQ * kLenKv,
                          .row = kLenKv,
                          .column = 1};
            }
            const Band band = p.mask.bind(kLenQ, kLenKv);
            constexpr Place kFirst{16, 32};  // its last rows and keys do not exist
            const auto got = handled<T>(p, {0, 0, kLenQ, kLenKv}, kFirst, What::transform_masked, scores, 1, 2);
            for (std::size_t i = 0; i < got.size(); ++i) {
                const Place at = place_of(i, kFirst);
                if (at.query >= kLenQ) continue;
                if (!band.visible(at.query, at.key)) {
                    ASSERT_EQ(got[i], -INFINITY);
                    continue;
                }
                double right = static_cast<double>(p.scale) * scores[i];
                if (cap) right = 2.5 * std::tanh(right / 2.5);
                if (alibi) right -= 0.75 * std::abs(at.query + kLenKv - kLenQ - at.key);
                const std::size_t element =
                    static_cast<std::size_t>(((kHeads + 2) * kLenQ + at.query) * kLenKv + at.key);
                if (bias) right += fp32 ? wide[element] : as_double(bias16.host[element]);
                ASSERT_NEAR(got[i], right, 4e-6 * (1 + std::abs(right))) << "features " << features << " element " << i;
            }
        }
    });
}

TEST_F(Scores, of_full_tiles_are_transformed_without_a_mask) {
    ForwardParams p;
    p.scale = 0.5F;
    p.mask.window_left = 0;
    const std::vector<float> scores = some_scores(34);
    const auto got = handled<__half>(p, {0, 0, 64, 64}, {0, 0}, What::transform, scores);
    for (std::size_t i = 0; i < got.size(); ++i) EXPECT_EQ(got[i], scores[i] * 0.5F);
}

TEST_F(Scores, dropped_are_the_weights_that_the_philox_of_the_host_drops) {
    for (const double probability : {0.1, 0.5, 0.99}) {
        for (const Place first : {Place{0, 0}, {16, 32}, {4096, 64}, {48, (1 << 20) + 32}}) {
            ForwardParams p;
            constexpr std::uint64_t kSeed = 0x123456789ABCDEF0;
            p.keep = KeepRule(kSeed, keep_threshold(probability));
            const std::vector<float> ones(kRows * kKeys, 1.0F);
            const auto got = handled<__half>(p, {0, 0, 64, 64}, first, What::drop, ones, 70'000, 13);
            for (std::size_t i = 0; i < got.size(); ++i) {
                const Place at = place_of(i, first);
                const bool kept = dropout_word(kSeed, 70'000, 13, at.query, at.key) < keep_threshold(probability);
                ASSERT_EQ(got[i], kept ? 1.0F : 0.0F) << "query " << at.query << " key " << at.key;
            }
        }
    }
}

std::vector<Sequence> sequences_of(ForwardParams p, int count) {
    Mirror<Sequence> out(static_cast<std::size_t>(count));
    run_block(sequences, 32, 0, p, count, out.device());
    return out.fetch();
}

TEST_F(Scores, sequences_of_a_dense_batch_all_have_its_lengths) {
    ForwardParams p;
    p.len_q = 5;
    p.len_kv = 7;
    for (const Sequence& m : sequences_of(p, 3)) {
        EXPECT_EQ(m.first_q + m.first_kv, 0);
        EXPECT_EQ(m.len_q, 5);
        EXPECT_EQ(m.len_kv, 7);
    }
}

TEST_F(Scores, sequences_of_a_ragged_batch_are_read_in_both_widths_and_with_strides) {
    const Mirror<std::int32_t> narrow({0, -1, 3, -1, 3, -1, 10, -1});  // every second counts
    const Mirror<std::int64_t> wide({0, 4, 4, 9});
    ForwardParams p;
    p.cu_seqlens_q = narrow.device();
    p.cu_stride_q = 2;
    p.cu_seqlens_kv = wide.device();
    p.cu_kv_is_64 = true;
    p.total_q = 10;
    p.total_kv = 9;
    p.len_q = 7;
    p.len_kv = 5;
    const auto got = sequences_of(p, 3);
    const Sequence expected[] = {{0, 0, 3, 4}, {3, 4, 0, 0}, {3, 4, 7, 5}};
    for (std::size_t b = 0; b < 3; ++b) {
        EXPECT_EQ(got[b].first_q, expected[b].first_q);
        EXPECT_EQ(got[b].first_kv, expected[b].first_kv);
        EXPECT_EQ(got[b].len_q, expected[b].len_q);
        EXPECT_EQ(got[b].len_kv, expected[b].len_kv);
    }
}

TEST_F(Scores, sequences_name_no_row_outside_of_the_tensors_whatever_cu_seqlens_hold) {
    constexpr std::int64_t kLeast = std::numeric_limits<std::int64_t>::min();
    constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();
    const Mirror<std::int64_t> wild({-5, 100, 3, kMost, kLeast, 8, kLeast, kMost});
    ForwardParams p;
    p.cu_seqlens_q = p.cu_seqlens_kv = wild.device();
    p.cu_q_is_64 = p.cu_kv_is_64 = true;
    p.total_q = 10;
    p.total_kv = 12;
    p.len_q = 10;
    p.len_kv = 6;
    for (const Sequence& m : sequences_of(p, 7)) {
        EXPECT_GE(m.first_q, 0);
        EXPECT_GE(m.len_q, 0);
        EXPECT_LE(m.first_q + m.len_q, 10);
        EXPECT_GE(m.first_kv, 0);
        EXPECT_GE(m.len_kv, 0);
        EXPECT_LE(m.len_kv, 6);
        EXPECT_LE(m.first_kv + m.len_kv, 12);
    }
}

}  // namespace
}  // namespace tessera::cuda::test::score
