// SPDX-License-Identifier: Apache-2.0
//
// Predictions are as near to the kept Records as promised.
#include "measure/accuracy.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <map>
#include <tuple>

#include "model/predict.hpp"

namespace tessera::model::accuracy_test {
namespace {

std::vector<measure::Record> kept(const std::string& folder, std::initializer_list<const char*> names) {
    std::vector<measure::Record> all;
    for (const char* name : names) {
        const auto records =
            measure::read_records(fmt::format("{}/bench/results/{}/{}", TESSERA_SOURCE_DIR, folder, name));
        all.insert(all.end(), records.begin(), records.end());
    }
    return all;
}

/// The Records that constants were fitted on, without the drawn shapes.
TEST(Accuracy, h200) {
    const auto comparisons =
        measure::compare(kept("h200", {"forward.jsonl", "peers.jsonl", "now/forward.jsonl", "now/backward.jsonl"}));
    EXPECT_GE(comparisons.rows.size(), 700U);
    for (const measure::Comparison& row : comparisons.rows) EXPECT_FALSE(row.held_out);
    for (const measure::Accuracy& a : measure::summarise(comparisons)) {
        if (a.kernels.empty()) continue;
        EXPECT_LE(a.median, 0.08) << a.kernels << " " << a.pass;
        // Short causal rows of cuDNN took up to 1.6 times as long in some runs (src/cuda/fa3/TRIED.md). fa3's forward
        // is up to a tenth faster than the kernel that its constants were fitted to.
        const bool faster_now = a.kernels == "tessera fa3" && a.pass == "forward";
        EXPECT_LE(a.worst, a.kernels == "cudnn" ? 0.40 : faster_now ? 0.25 : 0.20) << a.kernels << " " << a.pass;
    }
}

constexpr auto kDrawn = {"drawn_8128.jsonl",
                         "drawn_20261123.jsonl",
                         "now/drawn_60511.jsonl",
                         "now/drawn_20261123_backward.jsonl",
                         "now/drawn_715517.jsonl",
                         "now/drawn_241124.jsonl",
                         "now/drawn_611201_backward.jsonl",
                         "now/drawn_833202.jsonl",
                         "now/drawn_611501_backward.jsonl"};
constexpr auto kBlind = {"now/blind_902203.jsonl", "now/blind_664214.jsonl",         "now/blind_777101.jsonl",
                         "now/blind_217240.jsonl", "now/blind_833101.jsonl",         "now/blind_611302_backward.jsonl",
                         "now/blind_833203.jsonl", "now/blind_611502_backward.jsonl"};

/// Shapes that no constant was fitted on, and the error that a prediction states for itself. The bounds are medians
/// that the model reaches, not goals.
TEST(Accuracy, held_out) {
    auto records = kept("h200", kDrawn);
    for (const auto& others : {kept("h200", {"held_out.jsonl"}), kept("h200", kBlind)})
        records.insert(records.end(), others.begin(), others.end());
    auto held_out = measure::compare(records);
    std::erase_if(held_out.rows, [](const measure::Comparison& row) { return !row.held_out; });
    ASSERT_GE(held_out.rows.size(), 1000U);
    for (const measure::Accuracy& a : measure::summarise_held_out(held_out)) {
        if (a.kernels.empty()) continue;
        EXPECT_LE(a.median, 0.12) << a.kernels << " " << a.pass;
    }
    // Nine of ten rows lie inside of the error bars: of every library, schedule and pass, and of every cell of the
    // table that has rows enough. tools/error_bars.py --check makes the bars from other shapes than it counts.
    struct Count {
        int rows = 0, inside = 0;
    };
    std::map<std::tuple<std::string, Pass>, Count> kernels;
    std::map<std::tuple<std::string, Pass, std::string, bool>, Count> cells;
    for (const measure::Comparison& row : held_out.rows) {
        const Prediction& p = row.prediction;
        const auto [kind, is_short] = bar_cell_of(measure::problem_of(row.record), p);
        const bool inside = std::max(p.ms / row.record.ms, row.record.ms / p.ms) <= 1 + p.error;
        for (Count* count : {&kernels[{row.kernels, p.pass}], &cells[{row.kernels, p.pass, kind, is_short}]})
            ++count->rows, count->inside += inside ? 1 : 0;
    }
    for (const auto& [key, count] : kernels)
        EXPECT_GE(count.inside, 0.9 * count.rows) << std::get<0>(key) << " " << name_of(std::get<1>(key));
    for (const auto& [key, count] : cells) {
        if (count.rows < 20) continue;
        EXPECT_GE(count.inside, 0.88 * count.rows)
            << std::get<0>(key) << " " << name_of(std::get<1>(key)) << " " << std::get<2>(key) << count.rows;
    }
}

/// Published tables of cards that no constant was fitted on lie inside of the bars of such cards, and a card that
/// nobody measured has a wider one.
TEST(Accuracy, error_bars_of_other_cards) {
    int rows = 0, inside = 0;
    for (const measure::Comparison& row : measure::compare(kept("published", {"others.jsonl"})).rows) {
        ++rows;
        inside +=
            std::max(row.prediction.ms / row.record.ms, row.record.ms / row.prediction.ms) <= 1 + row.prediction.error;
    }
    EXPECT_EQ(rows, 28);
    EXPECT_GE(inside, 26);
    const Problem problem{
        .dtype = DType::fp16, .batch = 4, .len_q = 4096, .len_kv = 4096, .heads_q = 16, .heads_kv = 16};
    const auto bar = [&](const char* name) {
        return predict(problem, Schedule::fa2, Pass::forward, *find_machine(name), {.by = "flash-attention"}).error;
    };
    EXPECT_LT(bar("h200"), bar("rtxa5000"));
    EXPECT_LT(bar("rtxa5000"), bar("rtx4090"));
}

/// Drawn shapes with an even number of keys are fitted, and the others are not, whatever the kernel and the file.
TEST(Accuracy, drawn_shapes_are_split_by_shape) {
    for (const measure::Comparison& row : measure::compare(kept("h200", kDrawn)).rows)
        EXPECT_EQ(row.held_out, row.record.len_kv % 2 == 1) << row.record.file << " " << row.record.len_kv;
}

/// Records of kernels that have changed are marked and left out. Later Records of these shapes are not.
TEST(Accuracy, older_kernels_are_left_out) {
    const auto before = measure::compare(kept("h200", {"forward_fa3.jsonl"}));
    EXPECT_EQ(before.left_out.at("measured with a kernel that has been replaced"), 46);
    const auto now = measure::compare(kept("h200", {"now/forward.jsonl"}));
    EXPECT_FALSE(now.left_out.contains("measured with a kernel that has been replaced"));
}

/// Blind rows are held out and reported separately, except those of an older fa2 backward, and one whose tile has
/// changed.
TEST(Accuracy, blind) {
    const auto gpu = measure::compare(kept("h200", kBlind));
    for (const measure::Comparison& row : gpu.rows) EXPECT_TRUE(row.blind && row.held_out);
    const auto rows = measure::summarise_held_out(gpu, true);
    const int older = gpu.left_out.at("measured with a kernel that has been replaced");
    EXPECT_EQ(static_cast<std::size_t>(rows.back().rows + older), kept("h200", kBlind).size());
    for (const measure::Accuracy& a : rows) EXPECT_LE(a.median, a.kernels.empty() ? 0.045 : 0.09) << a.kernels;
    EXPECT_GE(rows.back().within, 0.91);
}

/// The newest draws, each for one purpose. Their rows are in no fit, and were opened after the constants were fixed:
/// fa3's backward up to head_dim 64; calls of up to 2e10 FLOP, also of fa1 and standard; fa3 and standard with dropout.
TEST(Accuracy, blind_of_one_purpose) {
    const auto all_of = [](const char* name) {
        return measure::summarise_held_out(measure::compare(kept("h200", {name})), true);
    };
    const auto backward = all_of("now/blind_611302_backward.jsonl");
    EXPECT_EQ(backward.back().rows, 59);  // 11 had another order of sums
    EXPECT_LE(backward.back().median, 0.025);
    EXPECT_NEAR(backward.back().within, 1, 1e-9);
    const auto small = all_of("now/blind_833203.jsonl");
    EXPECT_EQ(small.back().rows, 450);  // 58 are of kernels that have been replaced
    EXPECT_LE(small.back().median, 0.065);
    for (const measure::Accuracy& a : small) EXPECT_LE(a.median, 0.126) << a.kernels << " " << a.pass;
    const auto dropout = all_of("now/blind_611402_dropout.jsonl");
    EXPECT_EQ(dropout.back().rows, 111);
    EXPECT_LE(dropout.back().median, 0.085);
}

/// For each library's kernels, up to head_dim 128 and over it, decoding as a whole is predicted neither too fast nor
/// too slow. A small error of all kernels together could hide large ones of each.
TEST(Accuracy, decoding_of_each_kernel) {
    auto rows = measure::compare(kept("h200", kDrawn)).rows;
    const auto blind = measure::compare(kept("h200", kBlind)).rows;
    rows.insert(rows.end(), blind.begin(), blind.end());
    std::map<std::string, std::vector<double>> errors;
    for (const measure::Comparison& row : rows) {
        if (row.kind != "decode" || !row.held_out || row.kernels.ends_with("fa1") || row.kernels.ends_with("standard"))
            continue;
        errors[row.kernels + (row.record.head_dim > 128 ? " over 128" : "")].push_back(row.error());
    }
    ASSERT_EQ(errors.size(), 8U);
    for (auto& [kernels, signed_errors] : errors) {
        std::sort(signed_errors.begin(), signed_errors.end());
        const auto good =
            std::count_if(signed_errors.begin(), signed_errors.end(), [](double e) { return std::abs(e) < 0.15; });
        EXPECT_GE(signed_errors.size(), 4U) << kernels;
        EXPECT_LE(std::abs(signed_errors[signed_errors.size() / 2]), 0.06) << kernels;
        EXPECT_GE(20 * good, 17 * static_cast<std::ptrdiff_t>(signed_errors.size())) << kernels;
    }
}

/// cuda.decode.forward: fitted on the shapes of `cuda_decode.py --set short` of an earlier form of the kernel, judged
/// on all Records of the present one.
TEST(Accuracy, decode_kernel) {
    const auto fitted = measure::compare(kept("h200", {"now/decode_fitted.jsonl"}));
    const auto held_out = measure::compare(kept("h200", {"now/decode_held_out.jsonl"}));
    EXPECT_GE(fitted.rows.size(), 14U);
    EXPECT_GE(held_out.rows.size(), 20U);
    for (const measure::Comparison& row : fitted.rows) EXPECT_FALSE(row.held_out);
    std::vector<double> errors;
    for (const measure::Comparison& row : held_out.rows) {
        EXPECT_TRUE(row.held_out);
        EXPECT_EQ(row.kernels, "tessera decode");
        errors.push_back(std::abs(row.error()));
    }
    EXPECT_LE(measure::summarise(fitted).front().median, 0.06);
    EXPECT_LE(measure::summarise(held_out).front().median, 0.05);
    EXPECT_GE(measure::summarise(held_out).front().within, 0.8);
    std::sort(errors.begin(), errors.end());
    EXPECT_LE(errors[errors.size() * 9 / 10], 0.21);
    const measure::Comparison& row = held_out.rows.front();
    EXPECT_TRUE(measure::error_bar_text(measure::problem_of(row.record), row.prediction, *model::find_machine("h200"))
                    .starts_with("+-20 %, which nine of ten held-out rows of such calls (decode, forward)"));
}

/// Calibrated hosts, on drawn calls of new seeds. rounds_95001 is an exception: the task counts of the CPU's kernels
/// were developed with it. On 16 threads the figures are medians over rounds of all calls in turn.
TEST(Accuracy, calibrated_hosts) {
    struct Session {
        const char* name;
        std::size_t rows;
        double median;
        double within;
        bool blind;
    };
    for (const Session& one : {Session{"rounds_95001_xeon16.jsonl", 60, 0.09, 0.65, false},
                               {"blind_96001_xeon16.jsonl", 60, 0.07, 0.85, true},
                               {"blind_97002_epyc2.jsonl", 100, 0.07, 0.80, true},
                               {"blind_97006_epyc2.jsonl", 72, 0.06, 0.85, true},
                               {"blind_97007_epyc2.jsonl", 70, 0.06, 0.80, true},
                               {"blind_98001_xeon16.jsonl", 75, 0.085, 0.65, true}}) {
        const auto host = measure::compare(kept("cpu", {one.name}));
        ASSERT_EQ(host.rows.size(), one.rows) << one.name;
        for (const measure::Comparison& row : host.rows) {
            EXPECT_TRUE(row.held_out && row.prediction.measured);
            EXPECT_EQ(row.blind, one.blind);
            EXPECT_NE(row.device.find("calibrated"), std::string::npos);
        }
        const measure::Accuracy all = measure::summarise_held_out(host).back();
        EXPECT_LE(all.median, one.median) << one.name;
        EXPECT_GE(all.within, one.within) << one.name;
    }
}

/// One to eight queries per head without AMX: rows that no constant was fitted on, from a host that others used.
TEST(Accuracy, few_queries_on_a_cpu) {
    const auto host = measure::compare(kept("cpu", {"blind_71004_few_epyc2.jsonl"}));
    ASSERT_EQ(host.rows.size(), 60U);
    for (const measure::Comparison& row : host.rows) EXPECT_TRUE(row.blind && !row.prediction.measured);
    for (const measure::Accuracy& a : measure::summarise_held_out(host)) EXPECT_LE(a.median, 0.19) << a.pass;
    EXPECT_GE(measure::summarise_held_out(host).back().within, 0.5);
}

/// A ragged batch is predicted by its sequences' lengths, and without them not at all.
TEST(Accuracy, ragged) {
    auto records = kept("h200", kBlind);
    std::erase_if(records, [](const measure::Record& r) { return r.lens_q.empty(); });
    ASSERT_GE(records.size(), 50U);
    const auto whole = measure::compare(records);
    const auto older = static_cast<std::size_t>(whole.left_out.at("measured with a kernel that has been replaced"));
    EXPECT_EQ(whole.rows.size() + older, records.size());
    for (const measure::Comparison& row : whole.rows) EXPECT_EQ(row.kind, "ragged");
    for (measure::Record& record : records) record.lens_q.clear(), record.lens_kv.clear();
    EXPECT_TRUE(measure::compare(records).rows.empty());
}

/// Packed documents: the terms of ragged calls were fitted to mean lengths of 64, 1,024 and 8,192, and these are of
/// 256, 4,096 and 32,768. The bounds are what the model reaches, and half a point.
TEST(Accuracy, packed_documents) {
    const auto packed = measure::compare(kept("h200/now", {"packed.jsonl"}));
    ASSERT_EQ(packed.rows.size(), 126U);
    std::map<std::string, double> medians;
    for (const measure::Accuracy& a : measure::summarise(packed)) medians[a.kernels + " " + a.pass] = a.median;
    EXPECT_LE(medians.at("tessera fa3 forward"), 0.072);
    EXPECT_LE(medians.at("tessera fa3 backward"), 0.051);
    EXPECT_LE(medians.at("flash-attention fa2 backward"), 0.08);
    int inside = 0, rows = 0;
    std::map<std::string, std::pair<int, int>> bars;  // rows, and those inside of the bar that the prediction states
    for (const measure::Comparison& row : packed.rows) {
        EXPECT_TRUE(row.held_out);
        auto& [all, held] = bars[row.kernels + " " + row.record.pass];
        ++all, held += std::max(row.prediction.ms / row.record.ms, row.record.ms / row.prediction.ms) <=
                       1 + row.prediction.error;
        if (row.record.by != "tessera") continue;
        ++rows, inside += std::abs(row.error()) <= 0.15;
    }
    EXPECT_GE(inside, 0.9 * rows);
    EXPECT_EQ(bars.size(), 5U);
    for (const auto& [kernel, count] : bars) EXPECT_GE(count.second, 0.88 * count.first) << kernel;
    for (const measure::Comparison& row : measure::compare(kept("h200/now", {"fitted_packed.jsonl"})).rows)
        EXPECT_FALSE(row.held_out);
}

/// Few queries on many keys, head_dims 65 to 128: key blocks wait for each other to add to dQ.
TEST(Accuracy, dq_order_of_few_queries) {
    std::vector<double> errors;
    for (const auto& records : {kept("h200", kDrawn), kept("h200", kBlind)}) {
        for (const measure::Comparison& row : measure::compare(records).rows) {
            const measure::Record& r = row.record;
            const bool few = r.len_kv > 4 * r.len_q && r.len_q > 16 && r.head_dim > 64 && r.head_dim <= 128;
            if (few && row.held_out && row.kernels == "tessera fa3" && r.pass == "backward")
                errors.push_back(std::abs(row.error()));
        }
    }
    ASSERT_GE(errors.size(), 10U);
    std::sort(errors.begin(), errors.end());
    EXPECT_LE(errors[errors.size() / 2], 0.06);
    EXPECT_LE(errors.back(), 0.2);
}

TEST(Accuracy, cpu) {
    const auto comparisons = measure::compare(kept("cpu", {"torch_amx_xeon16.jsonl"}));
    EXPECT_EQ(comparisons.rows.size(), 176U);
    for (const measure::Accuracy& a : measure::summarise(comparisons)) {
        // These Records are of another host and older kernels. The constants are those of probes_95001_xeon16.jsonl.
        EXPECT_LE(a.median, 0.22) << a.kernels << " " << a.pass;
    }
}

/// Decoding is predicted within a factor of two, from memory or from the last-level cache, which the model ignores.
TEST(Accuracy, cpu_decoding) {
    const auto comparisons = measure::compare(kept("cpu", {"decode_amx_xeon16.jsonl"}));
    EXPECT_EQ(comparisons.rows.size(), 8U);
    for (const measure::Accuracy& a : measure::summarise(comparisons)) EXPECT_LE(a.worst, 1.0) << a.kernels;
}

/// Published tables of devices that no constant was fitted on.
TEST(Accuracy, published_tables) {
    const auto comparisons = measure::compare(kept("published", {"others.jsonl"}));
    EXPECT_EQ(comparisons.rows.size(), 28U);
    for (const measure::Accuracy& a : measure::summarise(comparisons))
        EXPECT_LE(a.mean, 0.15) << a.device << " " << a.kernels << " " << a.pass;
}

/// The schedules' bytes beside those that Nsight Compute read, for working sets beyond the L2. Under a diagonal fa2 and
/// fa3 mix the tiles of several heads, whose K and V push each other out of the L2: DRAM has more than is counted.
/// Kinds of cuDNN's calls on other cards, on rows that nothing was fitted on.
TEST(Accuracy, kinds_of_published_tables) {
    std::map<std::string, std::vector<double>> kinds;
    for (const measure::Comparison& row : measure::compare(kept("published", {"cards.jsonl"})).rows) {
        EXPECT_TRUE(row.held_out);
        if (row.kernels == "cudnn" && row.record.pass == "forward")
            kinds[row.device + " " + row.kind].push_back(std::abs(row.error()));
    }
    const auto median = [&](const std::string& kind) {
        auto errors = kinds.at(kind);
        std::sort(errors.begin(), errors.end());
        return errors[errors.size() / 2];
    };
    EXPECT_LE(median("NVIDIA A100 80GB PCIe decode"), 0.06) << "the splits and waves of one block";
    EXPECT_LE(median("NVIDIA A100 80GB PCIe cross lengths"), 0.03);
    EXPECT_LE(median("NVIDIA GB200 window"), 0.05);
    EXPECT_LE(median("NVIDIA GB300 window"), 0.05);
    EXPECT_LE(median("NVIDIA GB200 prefill"), 0.075);
    EXPECT_LE(median("NVIDIA GB300 prefill"), 0.03);
}

TEST(Accuracy, bytes_of_nsight_compute) {
    const auto records = kept("h200", {"bytes.jsonl"});
    ASSERT_GE(records.size(), 16U);
    for (const measure::Record& r : records) {
        const auto schedule = std::find_if(std::begin(kSchedules), std::end(kSchedules),
                                           [&](Schedule which) { return r.schedule == name_of(which); });
        ASSERT_NE(schedule, std::end(kSchedules)) << r.schedule;
        const Prediction x =
            predict(measure::problem_of(r), *schedule, Pass::forward, *find_machine("h200"), {.by = "tessera"});
        const auto& bytes = x.cost.work.bytes;
        const bool mixed = r.mask != "none" && (r.schedule == "fa2" || r.schedule == "fa3");
        EXPECT_NEAR(static_cast<double>(bytes.l2) / r.bytes.at("l2"), 1, 0.1) << r.kernel << " " << r.head_dim;
        EXPECT_NEAR(static_cast<double>(bytes.dram) / r.bytes.at("dram"), 1, mixed ? 0.31 : 0.1)
            << r.kernel << " " << r.head_dim << " " << r.mask;
    }
}

}  // namespace
}  // namespace tessera::model::accuracy_test
