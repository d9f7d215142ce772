// SPDX-License-Identifier: Apache-2.0
//
// Infinite elements of K that make scores -inf (docs/numerics.md, "Special values"), for every kernel.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "kernels/support.hpp"
#include "registry.hpp"

namespace tessera::check::infinite_keys_test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// Runs over every dtype and every compiled head_dim.
class InfiniteKeys : public testing::TestWithParam<Storage> {};
INSTANTIATE_TEST_SUITE_P(Types, InfiniteKeys, testing::ValuesIn(storages()), name_of_storage);

/// Gives every query scores of -inf with these keys: their K is infinite, of either sign.
void make_keys_infinite(Attention& a, const std::vector<std::int64_t>& keys) {
    for_each_element(a.q.view, [&](std::int64_t flat, std::byte* element) {
        const std::int64_t column = flat % a.problem.head_dim;
        if (column == 5 || column == 22) store_from_double(element, a.q.view.dtype, column == 5 ? -0.5 : 0.25);
    });
    const bool ragged = a.problem.ragged;
    for (const std::int64_t key : keys) {
        for (std::int64_t b = 0; b < (ragged ? 1 : a.problem.batch); ++b) {
            const std::int64_t column = (key + b) % 2 == 0 ? 5 : 22;
            const double element = column == 5 ? kInfinity : -kInfinity;
            if (ragged) a.k.set(element, key, 0, column);
            else a.k.set(element, b, key, 0, column);
        }
    }
}

/// A key with the score -inf has the weight 0, and adds 0 times infinity to dQ in its infinite column: NaN there in the
/// rows that see it, and nothing elsewhere.
TEST_P(InfiniteKeys, have_weight_0) {
    constexpr Mask kMasks[] = {{}, {.causal = Causal::bottom_right}, {.window_left = 40, .window_right = 10}};
    for (const Mask& mask : kMasks) {
        Problem p = GetParam().problem(1, 200, 290, 2, 1);
        p.mask = mask;
        Attention a(p);
        make_keys_infinite(a, {0, 70, 75, 140, 289});
        expect_right(a);
        ASSERT_TRUE(std::isfinite(a.lse.get(0, 1, 150)));
    }
    Problem p = make_ragged({130, 0, 75}, {140, 9, 200}, 2, 1, GetParam().dims.qk, GetParam().dtype);
    p.head_dim_v = GetParam().dims.v;
    p.mask.causal = Causal::bottom_right;
    Attention a(p, 1, {130, 0, 75}, {140, 9, 200});
    make_keys_infinite(a, {3, 139, 145, 200});
    expect_right(a);
}

/// ALiBi, dropout, a softcap, under which such a score is finite, and a call of so many blocks of keys that the last
/// one to add to dQ writes it (cuda.fa3.backward).
TEST(InfiniteKeysOnce, have_weight_0_with_score_options_and_many_blocks) {
    for (const auto& [dtype, dim] : {std::pair{DType::bf16, std::int64_t{64}}, {DType::fp16, 128}}) {
        Problem p = make_problem(1, 150, 200, 2, 1, dim, dtype);
        p.alibi = true;
        Attention alibi(p);
        make_keys_infinite(alibi, {70, 75, 199});
        expect_right(alibi);
        p.alibi = false;
        p.dropout = {.probability = 0.25, .seed = 3};
        Attention dropout(p);
        make_keys_infinite(dropout, {70, 75, 199});
        expect_right(dropout);
        p.dropout = {};
        p.softcap = 5;
        Attention softcap(p);
        make_keys_infinite(softcap, {70, 75, 199});
        expect_right(softcap);
        if (unavailable({DeviceType::cuda, 0})) continue;
        Attention many(make_problem(256, 4, 130, 2, 2, dim, dtype));
        make_keys_infinite(many, {20, 70, 129});
        many.prepare_backward();
        for_each_kernel(Pass::backward, [&](const KernelInfo& kernel) {
            if (kernel.name != "cuda.fa3.backward" || !many.backward(kernel)) return;
            const Report report = many.check_backward();
            EXPECT_TRUE(report.pass()) << kernel.name << "\n" << report.describe();
        });
    }
}

}  // namespace
}  // namespace tessera::check::infinite_keys_test
