// SPDX-License-Identifier: Apache-2.0
//
// Predictions of an H100, on which no constant was fitted, beside this project's Records of one (bench/results/h100).
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <map>
#include <string>
#include <vector>

#include "measure/accuracy.hpp"

namespace tessera::model::h100_test {
namespace {

std::vector<measure::Comparison> rows_of_an_h100() {
    std::vector<measure::Record> all;
    for (const char* name : {"forward_beside_fa3.jsonl", "backward.jsonl"}) {
        const auto records = measure::read_records(fmt::format("{}/bench/results/h100/{}", TESSERA_SOURCE_DIR, name));
        all.insert(all.end(), records.begin(), records.end());
    }
    return measure::compare(all).rows;
}

/// Rows of an H100, on which no constant was fitted, lie inside of its bars.
TEST(H100, rows_lie_inside_of_the_error_bars) {
    std::map<std::string, std::pair<int, int>> kernels;
    const auto rows = rows_of_an_h100();
    EXPECT_GE(rows.size(), 340U);
    for (const measure::Comparison& row : rows) {
        const Prediction& p = row.prediction;
        auto& [all, inside] = kernels[row.kernels + " " + row.record.pass];
        ++all;
        inside += std::max(p.ms / row.record.ms, row.record.ms / p.ms) <= 1 + p.error;
    }
    for (const auto& [name, count] : kernels) EXPECT_GE(count.second, 0.9 * count.first) << name;
}

/// Medians of an H100 by kernel, pass and length: the figures of docs/model.md, section 6, and a point.
TEST(H100, medians_by_length) {
    struct Row {
        const char* kernel;
        double most[3];  ///< 512 and 1,024 keys; 2,048 and 4,096; from 8,192 on
    };
    constexpr Row kRows[] = {
        {"flash-attention fa2 forward", {0.067, 0.035, 0.054}}, {"flash-attention fa2 backward", {0.05, 0.043, 0.035}},
        {"flash-attention fa3 forward", {0.054, 0.102, 0.104}}, {"cudnn forward", {0.06, 0.054, 0.06}},
        {"tessera fa2 forward", {0.073, 0.055, 0.044}},         {"tessera fa2 backward", {0.044, 0.044, 0.034}},
        {"tessera fa3 forward", {0.06, 0.051, 0.039}},          {"tessera fa3 backward", {0.069, 0.044, 0.049}}};
    std::map<std::string, std::vector<double>> errors;
    for (const measure::Comparison& row : rows_of_an_h100()) {
        constexpr std::int64_t kShort = 1024, kLong = 8192;
        const int length = row.record.len_kv <= kShort ? 0 : row.record.len_kv < kLong ? 1 : 2;
        errors[fmt::format("{} {} {}", row.kernels, row.record.pass, length)].push_back(std::abs(row.error()));
    }
    EXPECT_EQ(errors.size(), 3 * std::size(kRows));
    for (const auto& [kernel, most] : kRows) {
        for (int length = 0; length < 3; ++length) {
            auto& all = errors.at(fmt::format("{} {}", kernel, length));
            std::sort(all.begin(), all.end());
            const double median = (all[(all.size() - 1) / 2] + all[all.size() / 2]) / 2;
            EXPECT_LE(median, most[length]) << kernel << " " << length;
        }
    }
}

}  // namespace
}  // namespace tessera::model::h100_test
