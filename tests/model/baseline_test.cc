// SPDX-License-Identifier: Apache-2.0
//
// Baselines of a win: PyTorch's ways without FlashAttention, beside published and measured times.
#include "model/baseline.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "measure/accuracy.hpp"
#include "measure/sweep.hpp"
#include "tessera/error.hpp"

namespace tessera::model::baseline_test {
namespace {

const Machine& card(const char* name) { return *find_machine(name); }

/// FlashAttention-2's paper (arXiv 2307.08691, figure 4, head_dim 64): TFLOP/s of forward and backward on an A100 SXM
/// of 80 GB, 2,048 columns of heads, 16,384 tokens. "PyTorch" is a chain of operators, out of memory at 16,384 keys.
struct Published {
    std::int64_t len;
    double pytorch, fa2;
};
constexpr Published kFull[] = {{512, 36, 132}, {1024, 40, 153}, {2048, 43, 162}, {4096, 45, 171}, {8192, 46, 175}};
constexpr Published kCausal[] = {{512, 15, 88}, {1024, 16, 119}, {2048, 17, 140}, {4096, 18, 156}, {8192, 18, 165}};

TEST(Baseline, speed_ups_of_flash_attention_2_on_an_a100) {
    for (const bool causal : {false, true}) {
        for (const Published& row : causal ? kCausal : kFull) {
            Problem p = Problem::dense(16384 / row.len, row.len, 32, 64, DType::fp16);
            if (causal) p.mask.causal = Causal::bottom_right;
            const measure::SweepQuestion question{
                card("a100"), {Schedule::fa2}, {Pass::forward, Pass::backward}, {.by = "published"}, Baseline::eager};
            const measure::SweepRow found = measure::sweep_one(p, question);
            const double published = row.fa2 / row.pytorch;
            EXPECT_NEAR(found.win(&found.cells.front()) / published, 1, 0.2) << row.len << " causal " << causal;
        }
    }
}

/// PyTorch's math path and its memory-efficient kernels on an H200: half of the lengths were fitted.
TEST(Baseline, of_pytorch_on_an_h200) {
    const auto records =
        measure::read_records(fmt::format("{}/bench/results/h200/pytorch_held_out.jsonl", TESSERA_SOURCE_DIR));
    const measure::Comparisons compared = measure::compare(records);
    EXPECT_EQ(compared.rows.size(), records.size());
    for (const measure::Comparison& row : compared.rows) {
        EXPECT_TRUE(row.held_out);
        EXPECT_LE(std::max(row.predicted_ms / row.record.ms, row.record.ms / row.predicted_ms),
                  1 + 1.5 * row.prediction.error)
            << row.kernels << " " << row.record.len_kv << " " << row.record.mask;
    }
    for (const measure::Accuracy& a : measure::summarise(compared)) EXPECT_LE(a.median, 0.08) << a.kernels << a.pass;
}

TEST(Baseline, without_flash_is_what_pytorch_takes) {
    const Problem p = Problem::dense(2, 2048, 16, 64, DType::bf16);
    EXPECT_EQ(without_flash(p, card("a100")), Baseline::efficient);
    EXPECT_EQ(without_flash(Problem::dense(2, 2048, 16, 60, DType::bf16), card("a100")), Baseline::math);
    // PyTorch runs memory-efficient here, though the model does not predict it.
    const Problem fp32 = Problem::dense(2, 2048, 16, 64, DType::fp32);
    EXPECT_EQ(without_flash(fp32, card("h200")), Baseline::efficient);
    EXPECT_EQ(refusal(fp32, Baseline::efficient, Pass::forward, card("h200")),
              "the constants of memory-efficient are of 16-bit inputs");
    EXPECT_EQ(without_flash(Problem::dense(2, 2048, 16, 60, DType::fp32), card("h200")), Baseline::efficient);
    EXPECT_EQ(without_flash(Problem::dense(2, 2048, 16, 64, DType::fp16), card("t4")), Baseline::efficient);
    EXPECT_EQ(without_flash(p, card("xeon-16")), Baseline::standard);
}

/// There is no win where one side lacks a cost, nor where the baseline could not run.
TEST(Baseline, no_win_where_a_cost_is_missing) {
    const auto ask = [](const Problem& p, Baseline baseline, const char* by) {
        return measure::sweep_one(p, {card("h200"), {Schedule::fa3}, {Pass::forward}, {.by = by}, baseline});
    };
    Problem p = Problem::dense(4, 2048, 16, 64, DType::bf16);
    const measure::SweepRow plain = ask(p, Baseline::efficient, "tessera");
    EXPECT_GT(plain.win(&plain.cells.front()), 1);
    EXPECT_GT(plain.win_error(plain.cells.front()), plain.cells.front().longest().error);
    p.dropout.probability = 0.1;
    const measure::SweepRow efficient = ask(p, Baseline::efficient, "tessera");
    EXPECT_EQ(efficient.win(&efficient.cells.front()), 0);
    EXPECT_EQ(efficient.no_win(efficient.cells.front()), "dropout is not in its time");
    const measure::SweepRow eager = ask(p, Baseline::eager, "tessera");
    EXPECT_GT(eager.win(&eager.cells.front()), 1) << "both draw";
    p.dropout.probability = 0;
    p.softcap = 30;
    const measure::SweepRow capped = ask(p, Baseline::eager, "tessera");
    EXPECT_EQ(capped.win(&capped.cells.front()), 0);
    const measure::SweepRow large =
        ask(Problem::dense(1, 1 << 19, 16, 64, DType::bf16), Baseline::eager, "flash-attention");
    EXPECT_EQ(large.no_win(large.cells.front()), "it does not fit the memory");
}

/// The lengths of a cache's sequences are PyTorch's mask; the call has the FLOP of its own keys.
TEST(Baseline, of_a_cache_with_lengths) {
    Problem p{.dtype = DType::bf16, .batch = 3, .len_q = 1, .len_kv = 8192, .heads_q = 16, .heads_kv = 16};
    p.kv_lengths = true;
    const PredictOptions lengths{.sequences = {{1, 4000}, {1, 17}, {1, 512}}};
    for (const Baseline baseline : {Baseline::eager, Baseline::math, Baseline::efficient}) {
        const Prediction found = predict(p, baseline, Pass::forward, card("h200"), lengths);
        Problem whole = p;
        whole.kv_lengths = false;
        const Prediction all = predict(whole, baseline, Pass::forward, card("h200"));
        EXPECT_GT(found.ms, all.ms) << name_of(baseline);
        EXPECT_LT(found.cost.work.flop, all.cost.work.flop) << name_of(baseline);
    }
}

/// A window is a mask of all pairs, a bool tensor and one of the dtype, which a call must hold.
TEST(Baseline, efficient_holds_the_mask_of_a_window) {
    Problem p = Problem::dense(1, 1 << 18, 16, 128, DType::bf16);
    const Prediction full = predict(p, Baseline::efficient, Pass::forward, card("h200"));
    p.mask.window_left = 1023;
    p.mask.window_right = 0;
    const Prediction window = predict(p, Baseline::efficient, Pass::forward, card("h200"));
    const double pairs = std::pow(2.0, 36);
    EXPECT_EQ(static_cast<double>(window.memory.workspace - full.memory.workspace), 3 * pairs);
    EXPECT_GE(static_cast<double>(window.cost.work.bytes.dram), 16 * 2 * pairs) << "each head reads it";
    const measure::SweepRow row =
        measure::sweep_one(p, {card("h200"), {Schedule::fa3}, {Pass::forward}, {.by = "published"}, std::nullopt});
    EXPECT_EQ(row.no_win(row.cells.front()), "it does not fit the memory");
    p.len_q = p.len_kv = 2048;
    const Prediction in_l2 = predict(p, Baseline::efficient, Pass::forward, card("h200"));
    p.mask = {};
    const Prediction no_mask = predict(p, Baseline::efficient, Pass::forward, card("h200"));
    EXPECT_EQ(in_l2.cost.work.bytes.dram - no_mask.cost.work.bytes.dram, 2 * 2048 * 2048) << "the L2 holds it";
}

/// The rows of PyTorch's kernels are of prefills in bf16: other calls have a wider bar.
TEST(Baseline, bars_only_of_calls_that_have_rows) {
    const Problem prefill = Problem::dense(4, 2048, 16, 64, DType::bf16);
    std::vector<Problem> others(5, prefill);
    others[0].mask.window_left = 128;
    others[1].heads_kv = 4;
    others[2].len_q = 1;
    others[3].dtype = DType::fp16;
    others[4].dropout.probability = 0.1;
    for (const Baseline baseline : {Baseline::math, Baseline::efficient}) {
        EXPECT_EQ(predict(prefill, baseline, Pass::forward, card("h200")).error, 0.1) << name_of(baseline);
        for (const Problem& p : others)
            EXPECT_GE(predict(p, baseline, Pass::forward, card("h200")).error, 0.5)
                << name_of(baseline) << " " << p.describe();
    }
}

/// The rows of the math path take milliseconds. Calls of traces were up to a quarter over 1 ms, and more than twice
/// over 0.07 ms.
TEST(Baseline, bars_of_the_math_path_are_wide_for_short_calls) {
    const auto bar_of = [](std::int64_t batch, std::int64_t len) {
        const Prediction found =
            predict(Problem::dense(batch, len, 16, 64, DType::bf16), Baseline::math, Pass::forward, card("h200"));
        return std::pair{found.ms, found.error};
    };
    for (const auto& [batch, len] : {std::pair{16, 4096}, {8, 2048}, {4, 1024}, {2, 512}, {1, 256}, {1, 64}}) {
        const auto [ms, bar] = bar_of(batch, len);
        EXPECT_EQ(bar, ms < 0.1 ? 1.5 : ms < 0.5 ? 0.5 : ms < 2.5 ? 0.3 : 0.1) << ms;
    }
    EXPECT_LT(bar_of(1, 64).first, 0.1);
    EXPECT_GT(bar_of(16, 4096).first, 2.5);
}

TEST(Baseline, refuses_what_pytorch_has_not) {
    Problem p = Problem::dense(2, 2048, 16, 64, DType::bf16);
    p.sinks = true;
    EXPECT_EQ(refusal(p, Baseline::eager, Pass::forward, card("a100")), "PyTorch's attention takes no sinks");
    p.sinks = false;
    EXPECT_FALSE(refusal(p, Baseline::eager, Pass::backward, card("t4")) == std::nullopt) << "T4 has no bf16";
    EXPECT_THROW(predict(p, Baseline::math, Pass::forward, card("xeon-16")), Error);
}

/// Grouped heads are repeated before PyTorch's operators run, so they take no less than as many heads of keys.
TEST(Baseline, grouped_heads_are_repeated) {
    Problem p = Problem::dense(2, 2048, 32, 128, DType::bf16);
    for (const Baseline baseline : {Baseline::eager, Baseline::math, Baseline::efficient}) {
        const double all = predict(p, baseline, Pass::forward, card("h200")).ms;
        Problem grouped = p;
        grouped.heads_kv = 8;
        const Prediction found = predict(grouped, baseline, Pass::forward, card("h200"), {.worksheet = true});
        EXPECT_GT(found.ms, all) << name_of(baseline);
        double sum = 0;
        for (const Part& part : found.parts) sum += part.ms;
        EXPECT_NEAR(sum / found.ms, 1, 1e-9) << name_of(baseline);
    }
}

}  // namespace
}  // namespace tessera::model::baseline_test
