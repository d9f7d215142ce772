// SPDX-License-Identifier: Apache-2.0
//
// Cards that the project never ran on, beside tables that others published (bench/results/published). Constants were
// fitted to fitted_cards.jsonl; cards.jsonl has other lengths, shapes and cards.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <map>
#include <string>

#include "measure/coverage.hpp"
#include "model/family.hpp"
#include "model/predict.hpp"

namespace tessera::model::cards_test {
namespace {

measure::Comparisons published(std::initializer_list<const char*> names) {
    std::vector<measure::Record> all;
    for (const char* name : names) {
        const auto records =
            measure::read_records(fmt::format("{}/bench/results/published/{}", TESSERA_SOURCE_DIR, name));
        all.insert(all.end(), records.begin(), records.end());
    }
    return measure::compare(all);
}

/// The split is by shape: no length of a fitted table of a card is held out in the same table.
TEST(Cards, fitted_rows_are_told_from_held_out_rows) {
    for (const measure::Comparison& row : published({"fitted_cards.jsonl"}).rows) EXPECT_FALSE(row.held_out);
    const auto held_out = published({"cards.jsonl"});
    EXPECT_GE(held_out.rows.size(), 300U);
    for (const measure::Comparison& row : held_out.rows) EXPECT_TRUE(row.held_out);
}

TEST(Cards, tables_are_predicted) {
    const auto compared = published({"cards.jsonl"});
    std::map<std::string, double> medians;
    for (const measure::Accuracy& a : measure::summarise(compared)) {
        if (a.kernels.empty()) medians[a.device] = a.median;
    }
    // GPU, and the median error of its rows: the figure of docs/model.md, section 6, and a point.
    const std::pair<const char*, double> most[] = {{"NVIDIA GB200", 0.055},
                                                   {"NVIDIA GB300", 0.058},
                                                   {"NVIDIA B200", 0.051},
                                                   {"NVIDIA A100 80GB PCIe", 0.045},
                                                   {"NVIDIA RTX PRO 6000 Blackwell Server Edition", 0.06}};
    for (const auto& [device, median] : most) {
        ASSERT_TRUE(medians.contains(device)) << device;
        EXPECT_LE(medians.at(device), median) << device;
    }
}

/// Nine of ten rows lie inside of the bars that predictions state, on each card.
TEST(Cards, rows_are_inside_of_the_stated_bars) {
    for (const measure::Coverage& one : measure::stated_coverage(published({"cards.jsonl", "others.jsonl"}))) {
        if (one.rows < 10) continue;
        EXPECT_GE(one.inside, 0.88 * one.rows) << one.of;
    }
}

/// A card that nobody measured has the bars of such cards: each table is judged by the bars of all others.
TEST(Cards, a_new_table_is_inside_of_the_bars_of_the_others) {
    const auto tables = measure::leave_one_table_out(published({"cards.jsonl", "others.jsonl"}));
    ASSERT_GE(tables.size(), 8U);
    const measure::Coverage& all = tables.back();
    EXPECT_TRUE(all.of.empty());
    EXPECT_GE(all.rows, 300);
    EXPECT_GE(all.inside, 0.85 * all.rows);
}

/// Kernels made for tcgen05: a B200 is faster than an H200, and no kernel of Hopper's is offered there.
TEST(Cards, blackwell_has_kernels_of_its_own) {
    const Problem p = Problem::dense(4, 8192, 16, 128, DType::bf16);
    const auto ms = [&](const char* card, const char* by, Pass pass) {
        return predict(p, Schedule::fa3, pass, *find_machine(card), {.by = by}).ms;
    };
    for (const char* by : {"cudnn", "flash-attention"}) {
        for (const Pass pass : {Pass::forward, Pass::backward}) {
            for (const char* card : {"b200", "gb200", "b300", "gb300"})
                EXPECT_LT(1.5 * ms(card, by, pass), ms("h200", by, pass)) << card << " " << by;
        }
    }
    EXPECT_TRUE(refusal(p, Schedule::fa3, Pass::forward, *find_machine("b200"), {.by = "tessera"}));
    EXPECT_TRUE(refusal(p, Schedule::fa3, Pass::forward, *find_machine("rtx5090"), {.by = "flash-attention"}));
}

/// cuDNN runs on every card from Ampere on, as fa2 where MMA is mma.sync.
TEST(Cards, cudnn_runs_on_ampere_and_ada) {
    const Problem p = Problem::dense(4, 4096, 16, 128, DType::bf16);
    for (const char* card : {"a100", "a10", "l4", "l40s", "rtx4090", "rtx5090", "rtxpro6000", "a6000"}) {
        EXPECT_FALSE(refusal(p, Schedule::fa2, Pass::forward, *find_machine(card), {.by = "cudnn"})) << card;
        EXPECT_FALSE(refusal(p, Schedule::fa2, Pass::backward, *find_machine(card), {.by = "cudnn"})) << card;
        EXPECT_TRUE(refusal(p, Schedule::fa3, Pass::forward, *find_machine(card), {.by = "cudnn"})) << card;
    }
    EXPECT_TRUE(refusal(p, Schedule::fa2, Pass::forward, *find_machine("h200"), {.by = "cudnn"}));
    const Problem wide = Problem::dense(4, 4096, 16, 256, DType::bf16);
    EXPECT_EQ(refusal(wide, Schedule::fa2, Pass::backward, *find_machine("a100"), {.by = "cudnn"}),
              "cudnn's backward takes head_dims up to 128 on a100");
}

TEST(Cards, are_found_by_device_names) {
    const std::pair<const char*, const char*> names[] = {
        {"NVIDIA GB200", "gb200"},
        {"NVIDIA B300", "b300"},
        {"NVIDIA GB300", "gb300"},
        {"NVIDIA GH200 480GB", "gh200"},
        {"NVIDIA H20", "h20"},
        {"NVIDIA H200", "h200"},
        {"NVIDIA L40S", "l40s"},
        {"NVIDIA L4", "l4"},
        {"NVIDIA RTX A6000", "a6000"},
        {"NVIDIA A800-SXM4-80GB", "a800"},
        {"NVIDIA A100 80GB PCIe", "a100-pcie"},
        {"NVIDIA A100-SXM4-80GB", "a100"},
        {"NVIDIA GeForce RTX 5090", "rtx5090"},
        {"NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtxpro6000"}};
    for (const auto& [device, name] : names) {
        const Machine* machine = machine_of_device(device);
        ASSERT_NE(machine, nullptr) << device;
        EXPECT_EQ(machine->name, name);
    }
}

}  // namespace
}  // namespace tessera::model::cards_test
