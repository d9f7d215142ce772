// SPDX-License-Identifier: Apache-2.0
//
// Compares the online softmax of a warp, 16 rows in several blocks of keys, with a softmax in fp64 over the whole row.
#include <cmath>
#include <limits>

#include "cuda/on_device.cuh"
#include "cuda/tile/softmax.cuh"

namespace tessera::cuda::test::softmax {
namespace {

constexpr int kRows = 16;
constexpr int kTiles = 4;
constexpr int kBlocks = 5;
constexpr int kKeys = 8 * kTiles * kBlocks;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

/// scores, weights: [kRows][kKeys]; rescale: [kRows][kBlocks]; inverse, lse: [kRows].
template <class T>
__global__ void online_softmax(const float* scores, Scale scale, float* weights, float* rescale, float* inverse,
                               float* lse) {
    const int lane = static_cast<int>(threadIdx.x);
    OnlineSoftmax<T> rows;
    for (int block = 0; block < kBlocks; ++block) {
        float s[kTiles][4];
        const auto at = [&](int j, int e) {
            return (lane / 4 + e / 2 * 8) * kKeys + 8 * (kTiles * block + j) + lane % 4 * 2 + e % 2;
        };
#pragma unroll
        for (int j = 0; j < kTiles; ++j) {
#pragma unroll
            for (int e = 0; e < 4; ++e) s[j][e] = scores[at(j, e)];
        }
        float factor[2];
        rows.update(s, scale, factor);
#pragma unroll
        for (int j = 0; j < kTiles; ++j) {
#pragma unroll
            for (int e = 0; e < 4; ++e) weights[at(j, e)] = s[j][e];
        }
        for (int r = 0; r < 2; ++r) rescale[(lane / 4 + 8 * r) * kBlocks + block] = factor[r];
    }
    rows.finish();
    for (int r = 0; r < 2; ++r) {
        inverse[lane / 4 + 8 * r] = rows.inverse_sum(r);
        lse[lane / 4 + 8 * r] = rows.lse(r, scale);
    }
}

/// In bf16 weights are scaled by 2^-32; under 2^-126 they are flushed to 0.
constexpr double kFlushed = 0x1p-93;

struct Softmax {
    std::vector<double> weights;  // [kRows][kKeys]
    std::vector<float> lse;       // [kRows]
};

template <class T>
Softmax online(const std::vector<float>& scores, float scale) {
    const Mirror<float> in(scores);
    Mirror<float> weights(kRows * kKeys), rescale(kRows * kBlocks), inverse(kRows), lse(kRows);
    run_block(online_softmax<T>, 32, 0, static_cast<const float*>(in.device()), Scale{scale, scale * kLog2E},
              weights.device(), rescale.device(), inverse.device(), lse.device());
    weights.fetch();
    rescale.fetch();
    inverse.fetch();
    Softmax result{std::vector<double>(kRows * kKeys), lse.fetch()};
    for (std::size_t i = 0; i < kRows * kKeys; ++i) {
        const std::size_t row = i / kKeys;
        double w = weights.host[i];
        // The factor by which later blocks rescale a weight.
        for (std::size_t b = i % kKeys / (8 * kTiles) + 1; b < kBlocks; ++b) w *= rescale.host[row * kBlocks + b];
        result.weights[i] = w * inverse.host[row];
    }
    return result;
}

void expect_right(const Softmax& got, const std::vector<float>& scores, double scale) {
    for (std::size_t row = 0; row < kRows; ++row) {
        const float* s = &scores[row * kKeys];
        double top = -kInfinity;
        double largest = 0;
        for (std::size_t j = 0; j < kKeys; ++j) {
            top = std::max(top, scale * s[j]);
            if (std::isfinite(s[j])) largest = std::max(largest, std::abs(scale * s[j]));
        }
        if (top == -kInfinity) {
            EXPECT_EQ(got.lse[row], -kInfinity) << "row " << row;
            for (std::size_t j = 0; j < kKeys; ++j) ASSERT_EQ(got.weights[row * kKeys + j], 0) << "row " << row;
            continue;
        }
        double sum = 0;
        for (std::size_t j = 0; j < kKeys; ++j) sum += std::exp(scale * s[j] - top);
        const double lse = top + std::log(sum);
        EXPECT_NEAR(got.lse[row], lse, 2e-6 + 0x1p-20 * std::abs(lse)) << "row " << row;
        // A score in fp32 is known to half an ulp; its scaled value and the maximum's are rounded once more each.
        const double relative = 2e-6 + 4 * 0x1p-24 * largest;
        for (std::size_t j = 0; j < kKeys; ++j) {
            const double right = std::exp(scale * s[j] - lse);
            ASSERT_NEAR(got.weights[row * kKeys + j], right, relative * right + kFlushed)
                << "row " << row << " key " << j;
        }
    }
}

std::vector<float> random_scores(double size, std::uint64_t seed) {
    const check::Random random(seed);
    std::vector<float> scores(kRows * kKeys);
    for (std::size_t i = 0; i < scores.size(); ++i) {
        scores[i] = static_cast<float>(size * (static_cast<double>(random.bits(i) % 2'000'001) * 1e-6 - 1));
    }
    return scores;
}

void expect_online_right(const std::vector<float>& scores, float scale) {
    for_both_types([&](auto t) {
        using T = decltype(t);
        expect_right(online<T>(scores, scale), scores, scale);
        expect_right(online<T>(scores, 1), scores, 1);
    });
}

class OnlineSoftmax : public OnHopper {};

TEST_F(OnlineSoftmax, is_the_softmax_of_the_whole_row) {
    for (const double size : {0.1, 8.0, 80.0}) expect_online_right(random_scores(size, 21), 0.125F);
}

TEST_F(OnlineSoftmax, of_hidden_scores_gives_weights_of_0_and_of_a_row_of_them_an_lse_of_minus_infinity) {
    std::vector<float> scores = random_scores(8, 22);
    for (std::size_t i = 0; i < scores.size(); ++i) {
        const std::size_t row = i / kKeys;
        const std::size_t key = i % kKeys;
        if (row % 4 == 0 || (row % 4 == 1 && key < 100) || (row % 4 == 2 && key >= 40)) scores[i] = -kInfinity;
    }
    scores[3 * kKeys + 5] = -kInfinity;
    expect_online_right(scores, 0.125F);
}

TEST_F(OnlineSoftmax, of_logits_of_any_size_has_no_weight_over_1) {
    for (const double size : {3e3, 3e5, 3e6, 3e37}) {
        for (const double offset : {-1.0, 0.0, 1.0}) {
            SCOPED_TRACE("size " + std::to_string(size));
            std::vector<float> scores = random_scores(size, 23);
            for (float& s : scores) s = static_cast<float>(s + offset * size);
            for_both_types([&](auto t) {
                using T = decltype(t);
                for (const Softmax& got : {online<T>(scores, 0.125F), online<T>(scores, 1)}) {
                    for (std::size_t row = 0; row < kRows; ++row) {
                        double sum = 0;
                        for (std::size_t j = 0; j < kKeys; ++j) sum += got.weights[row * kKeys + j];
                        EXPECT_NEAR(sum, 1, 1e-5);
                        EXPECT_TRUE(std::isfinite(got.lse[row]));
                    }
                }
                if (size < 1e6) expect_right(online<T>(scores, 0.125F), scores, 0.125);
                if (size < 1e6) expect_right(online<T>(scores, 1), scores, 1);
            });
        }
    }
}

TEST_F(OnlineSoftmax, of_a_row_does_not_depend_on_the_other_rows) {
    const std::vector<float> scores = random_scores(8, 24);
    std::vector<float> mixed = scores;
    for (std::size_t j = 0; j < kKeys; ++j) {
        mixed[3 * kKeys + j] *= 1e6F;  // takes the other way through the exponentials
        mixed[12 * kKeys + j] = std::nanf("");
    }
    const Softmax alone = online<__nv_bfloat16>(scores, 0.125F);
    const Softmax among = online<__nv_bfloat16>(mixed, 0.125F);
    for (std::size_t row = 0; row < kRows; ++row) {
        if (row == 12) EXPECT_TRUE(std::isnan(among.lse[row]));
        if (row == 3 || row == 12) continue;
        EXPECT_EQ(alone.lse[row], among.lse[row]);
        for (std::size_t j = 0; j < kKeys; ++j) {
            ASSERT_EQ(alone.weights[row * kKeys + j], among.weights[row * kKeys + j]) << "row " << row;
        }
    }
}

TEST_F(OnlineSoftmax, of_a_score_of_plus_infinity_or_nan_is_nan) {
    for (const float special : {kInfinity, std::nanf("")}) {
        std::vector<float> scores = random_scores(8, 25);
        scores[6 * kKeys + 70] = special;
        for_both_types([&](auto t) {
            using T = decltype(t);
            EXPECT_TRUE(std::isnan(online<T>(scores, 0.125F).lse[6]));
            EXPECT_TRUE(std::isnan(online<T>(scores, 1).lse[6]));
        });
    }
}

}  // namespace
}  // namespace tessera::cuda::test::softmax
