// SPDX-License-Identifier: Apache-2.0
//
// Tests of the judge: bugs that attention kernels had, planted in a right kernel one by one and in each dtype.
// docs/decisions/judging-draws.md says which of them an earlier judge let pass.
#include "kernels/planted_bugs.hpp"

#include <gtest/gtest.h>

#include <functional>
#include <ostream>
#include <string>
#include <tuple>

namespace tessera::check::planted_bugs_test {
namespace {

struct Planted {
    Bug bug;
    const char* name;
    /// Changes a plain case of 4 heads on 2, 192 x 180, head_dim 24 into the one that shows the bug.
    void (*prepare)(Attention&) = [](Attention&) {};
};
void PrintTo(const Planted& planted, std::ostream* out) { *out << planted.name; }

void causal(Attention& a) { a.problem.mask.causal = Causal::bottom_right; }
void dropout(Attention& a) { a.problem.dropout = {.probability = 0.25, .seed = 11}; }
void softcap(Attention& a) { a.problem.softcap = 2, a.problem.scale = 1; }
void peaked(Attention& a) { a.problem.scale = 1; }
void prescaled(Attention& a) { a.problem.scale = 0.9; }
void values_of_mean(Attention& a) {
    for (Tensor* t : {&a.k, &a.v}) {
        for_each_element(t->view, [&](std::int64_t, std::byte* x) {
            store_from_double(x, t->view.dtype, 2 + load_as_double(x, t->view.dtype) / 2);
        });
    }
}
void with_dlse(Attention& a) {
    a.dlse = a.lse;
    fill(a.dlse.view, Fill::normal, 99);
}

constexpr Planted kForward[] = {
    {Bug::wrong_row, "wrong_row"},
    {Bug::skipped_tile, "skipped_tile"},
    {Bug::stale_sum, "stale_sum"},
    {Bug::stale_output, "stale_output"},
    {Bug::output_cut, "output_cut"},
    {Bug::weights_cut, "weights_cut"},
    {Bug::key_dropped_at_edge, "key_dropped_at_edge"},
    {Bug::key_doubled_at_edge, "key_doubled_at_edge"},
    {Bug::diagonal_one_more, "diagonal_one_more", causal},
    {Bug::diagonal_one_fewer, "diagonal_one_fewer", causal},
    {Bug::padding_counted, "padding_counted"},
    {Bug::queries_prescaled, "queries_prescaled", prescaled},
    {Bug::sum_in_dtype, "sum_in_dtype"},
    {Bug::scores_in_dtype, "scores_in_dtype", peaked},
    {Bug::lse_of_base_two, "lse_of_base_two"},
    {Bug::lse_off_in_one_row, "lse_off_in_one_row"},
    {Bug::other_kv_head, "other_kv_head"},
    {Bug::late_rows_noisy, "late_rows_noisy", causal},
    {Bug::peaked_rows_noisy, "peaked_rows_noisy", peaked},
    {Bug::value_of_neighbour, "value_of_neighbour"},
    {Bug::output_in_dtype, "output_in_dtype"},
    {Bug::exponential_coarse, "exponential_coarse"},
    {Bug::dropout_of_neighbour, "dropout_of_neighbour", dropout},
    {Bug::dropout_unscaled_once, "dropout_unscaled_once", dropout},
};

constexpr Planted kBackward[] = {
    {Bug::gradient_row_wrong, "gradient_row_wrong"},
    {Bug::delta_missing_in_tile, "delta_missing_in_tile"},
    {Bug::delta_of_rounded_o, "delta_of_rounded_o", values_of_mean},
    {Bug::last_queries_missing, "last_queries_missing"},
    {Bug::group_head_missing, "group_head_missing"},
    {Bug::score_gradient_cut, "score_gradient_cut"},
    {Bug::dlse_ignored, "dlse_ignored", with_dlse},
    {Bug::softcap_slope_missing, "softcap_slope_missing", softcap},
    {Bug::dropout_missing_in_dp, "dropout_missing_in_dp", dropout},
    {Bug::scale_twice_in_dk, "scale_twice_in_dk"},
    {Bug::late_dq_noisy, "late_dq_noisy", causal},
    {Bug::transposed_weights_cut, "transposed_weights_cut"},
};

/// The case of a bug. It has 180 keys, so the last tile of keys is partial.
Attention prepared(const Planted& planted, DType dtype) {
    Attention a(make_problem(1, 192, 180, 4, 2, 24, dtype));
    planted.prepare(a);
    return a;
}

std::string of_dtype(const testing::TestParamInfo<std::tuple<Planted, DType>>& info) {
    return std::string(std::get<0>(info.param).name) + "_" + name_of(std::get<1>(info.param));
}

class PlantedForward : public testing::TestWithParam<std::tuple<Planted, DType>> {};

TEST_P(PlantedForward, is_caught_and_passes_without) {
    const auto& [planted, dtype] = GetParam();
    Attention a = prepared(planted, dtype);
    planted_forward(a, Bug::none);
    EXPECT_TRUE(a.check_forward().pass()) << a.check_forward().describe();
    planted_forward(a, planted.bug);
    EXPECT_FALSE(a.check_forward().pass()) << a.check_forward().describe();
}

INSTANTIATE_TEST_SUITE_P(Bugs, PlantedForward,
                         testing::Combine(testing::ValuesIn(kForward), testing::ValuesIn(kStorageTypes)), of_dtype);

class PlantedBackward : public testing::TestWithParam<std::tuple<Planted, DType>> {};

TEST_P(PlantedBackward, is_caught_and_passes_without) {
    const auto& [planted, dtype] = GetParam();
    Attention a = prepared(planted, dtype);
    planted_backward(a, Bug::none);
    EXPECT_TRUE(a.check_backward().pass()) << a.check_backward().describe();
    planted_backward(a, planted.bug);
    EXPECT_FALSE(a.check_backward().pass()) << a.check_backward().describe();
}

INSTANTIATE_TEST_SUITE_P(Bugs, PlantedBackward,
                         testing::Combine(testing::ValuesIn(kBackward), testing::ValuesIn(kStorageTypes)), of_dtype);

}  // namespace
}  // namespace tessera::check::planted_bugs_test
