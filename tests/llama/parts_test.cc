// SPDX-License-Identifier: Apache-2.0
//
// The parts of examples/llama one by one: matrix products, sampling, pages, the terminal.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstring>
#include <map>
#include <random>

#include "llama/bf16.hpp"
#include "llama/linear.hpp"
#include "llama/support.hpp"
#include "llama/terminal.hpp"

namespace llama::test::parts_test {
namespace {

TEST(Linear, is_near_fp64_and_a_row_has_the_same_bits_beside_any_others) {
    std::mt19937 random(3);
    std::normal_distribution<float> draw;
    Threads threads(2);
    for (const auto& [inputs, outputs] :
         std::vector<std::pair<std::int64_t, std::int64_t>>{{1, 1}, {5, 3}, {16, 4}, {44, 130}, {67, 9}, {256, 65}}) {
        for (const bool is_bf16 : {false, true}) {
            constexpr std::int64_t kRows = 8;
            std::vector<float> w(static_cast<std::size_t>(inputs * outputs)),
                x(static_cast<std::size_t>(kRows * inputs));
            std::vector<std::uint16_t> narrow;
            for (float& value : w) {
                value = from_bf16(to_bf16(draw(random)));
                narrow.push_back(to_bf16(value));
            }
            for (float& value : x) value = draw(random);
            const Matrix matrix{is_bf16 ? static_cast<const void*>(narrow.data()) : w.data(),
                                is_bf16 ? tessera::DType::bf16 : tessera::DType::fp32, outputs, inputs};
            std::vector<float> y(static_cast<std::size_t>(kRows * outputs)), alone(static_cast<std::size_t>(outputs));
            linear(matrix, x.data(), kRows, y.data(), threads);
            for (std::int64_t r = 0; r < kRows; ++r) {
                linear(matrix, x.data() + r * inputs, 1, alone.data(), threads);
                EXPECT_EQ(std::memcmp(alone.data(), y.data() + r * outputs, alone.size() * sizeof(float)), 0);
                for (std::int64_t o = 0; o < outputs; ++o) {
                    double sum = 0, size = 0;
                    for (std::int64_t i = 0; i < inputs; ++i) {
                        const double product = static_cast<double>(w[static_cast<std::size_t>(o * inputs + i)]) *
                                               x[static_cast<std::size_t>(r * inputs + i)];
                        sum += product;
                        size += std::abs(product);
                    }
                    EXPECT_NEAR(alone[static_cast<std::size_t>(o)], sum, 1e-6 * size + 1e-30);
                }
            }
        }
    }
}

TEST(Bf16, rounds_to_nearest_even) {
    EXPECT_EQ(from_bf16(to_bf16(1.5F)), 1.5F);
    EXPECT_EQ(from_bf16(to_bf16(1 + 0x1p-8F)), 1.0F);             // a tie, to even
    EXPECT_EQ(from_bf16(to_bf16(1 + 3 * 0x1p-8F)), 1 + 0x1p-6F);  // a tie, to even
    EXPECT_EQ(from_bf16(to_bf16(1 + 0x1p-8F + 0x1p-20F)), 1 + 0x1p-7F);
    EXPECT_TRUE(std::isnan(from_bf16(to_bf16(std::nanf("")))));
    EXPECT_TRUE(std::isinf(from_bf16(to_bf16(3.4e38F))));
}

const std::array<float, 6> kLogits = {1.0F, 3.0F, 2.0F, -1.0F, 3.0F, 0.5F};

std::vector<std::int32_t> draw(const SamplingOptions& options, int count, std::uint64_t number = 0) {
    Sampler sampler(options, number);
    std::vector<std::int32_t> tokens;
    for (int n = 0; n < count; ++n) tokens.push_back(sampler.choose(kLogits));
    return tokens;
}

TEST(Sampling, greedy_takes_the_first_of_the_largest) {
    EXPECT_EQ(draw({}, 3), (std::vector<std::int32_t>{1, 1, 1}));
    EXPECT_EQ(draw({.temperature = 1, .top_k = 1}, 3), (std::vector<std::int32_t>{1, 1, 1}));
    EXPECT_EQ(draw({.temperature = 1, .top_p = 1e-9}, 3), (std::vector<std::int32_t>{1, 1, 1}));
}

/// Frequencies of 40,000 draws within five standard deviations of the probabilities, which are computed here anew.
TEST(Sampling, draws_with_the_probabilities_of_the_softmax) {
    struct Case {
        SamplingOptions options;
        std::vector<std::int32_t> kept;
    };
    for (const Case& c :
         {Case{{.temperature = 1}, {0, 1, 2, 3, 4, 5}}, Case{{.temperature = 2, .seed = 5}, {0, 1, 2, 3, 4, 5}},
          Case{{.temperature = 1, .top_k = 3}, {1, 2, 4}},
          Case{{.temperature = 1, .top_p = 0.9}, {1, 2, 4}},  // 0.39 + 0.39 + 0.14
          Case{{.temperature = 1, .top_k = 4, .top_p = 0.5}, {1, 4}}}) {
        constexpr int kDraws = 40'000;
        std::map<std::int32_t, int> counts;
        for (const std::int32_t token : draw(c.options, kDraws)) ++counts[token];
        double sum = 0;
        for (const std::int32_t token : c.kept) {
            sum += std::exp(kLogits[static_cast<std::size_t>(token)] / c.options.temperature);
        }
        int of_kept = 0;
        for (const std::int32_t token : c.kept) {
            const double p = std::exp(kLogits[static_cast<std::size_t>(token)] / c.options.temperature) / sum;
            EXPECT_NEAR(counts[token], kDraws * p, 5 * std::sqrt(kDraws * p * (1 - p))) << token;
            of_kept += counts[token];
        }
        EXPECT_EQ(of_kept, kDraws);
    }
}

TEST(Sampling, depends_on_the_seed_and_on_the_number_of_the_sequence) {
    const SamplingOptions options{.temperature = 1, .seed = 3};
    EXPECT_EQ(draw(options, 30), draw(options, 30));
    EXPECT_NE(draw(options, 30), draw(options, 30, 1));
    EXPECT_NE(draw(options, 30), draw({.temperature = 1, .seed = 4}, 30));
}

TEST(Sampling, names_what_is_wrong) {
    EXPECT_EQ(error_of([] { draw({.temperature = NAN}, 1); }), "temperature: expected a number >= 0, got nan");
    EXPECT_EQ(error_of([] { draw({.top_k = -2}, 1); }), "top_k: expected a number >= 0, got -2");
    EXPECT_EQ(error_of([] { draw({.top_p = 0}, 1); }), "top_p: expected a number over 0 and at most 1, got 0");
    const std::array<float, 2> nan = {1.0F, NAN};
    EXPECT_EQ(error_of([&] { Sampler({}, 0).choose(nan); }), "logits: expected finite numbers, got nan");
}

TEST(Pages, each_page_has_one_owner) {
    PageAllocator pages(3);
    std::vector<std::int32_t> taken;
    while (const auto page = pages.take()) taken.push_back(*page);
    std::sort(taken.begin(), taken.end());
    EXPECT_EQ(taken, (std::vector<std::int32_t>{0, 1, 2}));
    EXPECT_EQ(pages.used(), 3);
    pages.give_back(1);
    EXPECT_THROW(pages.give_back(1), std::logic_error);
    EXPECT_THROW(pages.give_back(3), std::logic_error);
    EXPECT_THROW(pages.give_back(-1), std::logic_error);
    EXPECT_EQ(pages.take(), 1);
    EXPECT_EQ(pages.used(), 3);
    EXPECT_EQ(pages.most_used(), 3);
}

TEST(Terminal, prints_texts_in_their_order_and_the_first_one_at_once) {
    testing::internal::CaptureStdout();
    Terminal terminal({"a", "b", "c"}, true, true);
    terminal.show({1, 'x', false});
    terminal.show({0, 'y', false});
    terminal.show({2, 'z', true});
    std::fflush(stdout);
    terminal.show({0, '!', true});
    terminal.show({1, '\n', true});
    EXPECT_EQ(testing::internal::GetCapturedStdout(), "[1] ay!\n[2] bx\n\n[3] cz\n");
}

TEST(Terminal, shows_control_characters_as_text) {
    testing::internal::CaptureStdout();
    Terminal terminal({"a"}, true, true);
    for (const std::int32_t byte : {0x1B, 0x5B, 0x32, 0x4A, 0x09, 0x7F, 0x9B}) terminal.show({0, byte, false});
    EXPECT_EQ(testing::internal::GetCapturedStdout(), "a\\x1B[2J\t\\x7F\\x9B");
    testing::internal::CaptureStdout();
    Terminal numbers({" 5"}, false, true);
    numbers.show({0, 300, true});
    EXPECT_EQ(testing::internal::GetCapturedStdout(), " 5 300\n");
}

}  // namespace
}  // namespace llama::test::parts_test
