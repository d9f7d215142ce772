// SPDX-License-Identifier: Apache-2.0
//
// Recognition of an attention by hand from the order of the kernels alone.
#include "diagnose/by_hand.hpp"

#include <gtest/gtest.h>

namespace tessera::diagnose::by_hand_test {
namespace {

struct Kernel {
    Role role;
    bool fits = false;  ///< a product over a matrix like the scores'
    bool compiled = false;
    bool batched = true;
};

constexpr Role kProduct = Role::gemm;
constexpr Role kSum = Role::other;
constexpr Role kBack = Role::softmax_backward;

/// The attentions in a row of kernels on one stream; the softmax's input has the shape `scores`.
std::vector<ByHand> found(const std::vector<Kernel>& kernels, const Sizes& scores) {
    Trace trace;
    for (std::size_t i = 0; i < kernels.size(); ++i) {
        KernelRun run{};
        run.start_us = static_cast<double>(i);
        run.count = 1;
        trace.runs.push_back(run);
    }
    RunFacts facts;
    facts.role = [&](std::uint32_t run) { return kernels[run].role; };
    facts.taken = [](std::uint32_t) { return false; };
    facts.compiled = [&](std::uint32_t run) { return kernels[run].compiled; };
    facts.batched = [&](std::uint32_t run) { return kernels[run].batched; };
    facts.softmax_input = [&](std::uint32_t) { return scores; };
    facts.reads = [&](std::uint32_t run, const Sizes& s) { return !s.empty() && kernels[run].fits; };
    facts.writes = facts.reads;
    return find_by_hand(trace, facts);
}

const Sizes kScores{2, 8, 64, 64};

/// Swin V2 makes its bias of positions by a small network: its gradient stands between the softmax's and those of Q and
/// K.
TEST(ByHand, goes_over_products_of_a_learned_bias_in_the_backward) {
    const std::vector<Kernel> backward{{kProduct, true}, {kProduct, true}, {kBack},
                                       {kSum},           {kProduct},       {kProduct},
                                       {kSum},           {kProduct, true}, {kProduct, true}};
    const auto with_bias = found(backward, kScores);
    ASSERT_EQ(with_bias.size(), 1U);
    EXPECT_EQ(with_bias[0].pass, KernelPass::backward);
    EXPECT_EQ(with_bias[0].runs.size(), 9U);
    EXPECT_TRUE(found(backward, {}).empty()) << "without shapes nobody can tell whose products they are";
    std::vector<Kernel> forward = backward;
    forward[2].role = Role::softmax;
    EXPECT_TRUE(found(forward, kScores).empty()) << "in a forward the next product is that with V";
}

/// A compiler's pieces are one softmax; two softmaxes of a library are two.
TEST(ByHand, takes_the_pieces_of_a_compiled_softmax_for_one) {
    std::vector<Kernel> pieces{{kProduct}, {Role::softmax, false, true}, {Role::softmax, false, true}, {kProduct}};
    EXPECT_EQ(found(pieces, kScores).size(), 1U);
    pieces[2].compiled = false;
    EXPECT_TRUE(found(pieces, kScores).empty());
}

/// A softmax over a matrix of rank 2 chooses experts or words, whatever stands around it.
TEST(ByHand, wants_scores_of_several_heads) {
    const std::vector<Kernel> router{{kProduct}, {Role::elementwise}, {Role::softmax, false, true}, {kProduct}};
    EXPECT_TRUE(found(router, {512, 8}).empty());
    EXPECT_EQ(found(router, {2, 8, 64, 64}).size(), 1U);
}

/// Words and experts are chosen among a layer's weights.
TEST(ByHand, wants_products_of_many_matrices) {
    std::vector<Kernel> words{{kProduct, false, false, false}, {Role::softmax}, {kProduct}};
    EXPECT_TRUE(found(words, kScores).empty());
    EXPECT_EQ(found(words, {}).size(), 1U) << "nothing is told of the operators";
    words[0].batched = true;
    EXPECT_EQ(found(words, kScores).size(), 1U);
}

}  // namespace
}  // namespace tessera::diagnose::by_hand_test
