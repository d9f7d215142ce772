// SPDX-License-Identifier: Apache-2.0
//
// Predictions never exceed a roof, and their parts add up. accuracy_test.cc compares them with Records.
#include "model/predict.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <map>
#include <set>
#include <tuple>

#include "core/property.hpp"
#include "measure/accuracy.hpp"
#include "measure/sweep.hpp"
#include "model/cpu.hpp"
#include "model/family.hpp"
#include "registry.hpp"
#include "tessera/error.hpp"

namespace tessera::model::predict_test {
namespace {

Problem any_problem() {
    const auto length = [] {
        return *rc::gen::weightedOneOf<std::int64_t>({{1, rc::gen::just<std::int64_t>(1)},
                                                      {1, rc::gen::just<std::int64_t>(0)},
                                                      {6, rc::gen::inRange<std::int64_t>(1, 9000)}});
    };
    Problem p;
    p.dtype = *rc::gen::element(DType::bf16, DType::fp16, DType::fp32);
    p.batch = *rc::gen::inRange(0, 5);
    p.heads_kv = *rc::gen::inRange(1, 9);
    p.heads_q = p.heads_kv * *rc::gen::inRange(1, 5);
    p.len_q = length();
    p.len_kv = length();
    p.head_dim = *rc::gen::inRange(1, 257);
    p.head_dim_v = *rc::gen::inRange(1, 257);
    p.mask.causal = *rc::gen::element(Causal::none, Causal::bottom_right, Causal::top_left);
    if (*rc::gen::inRange(0, 3) == 0) p.mask.window_left = *rc::gen::inRange<std::int64_t>(0, 600);
    return p;
}

/// A longer call never moves fewer bytes, whatever part of its data the L2 holds.
TEST(Predict, bytes_grow_with_the_length) {
    Problem p;
    p.batch = 4;
    p.heads_q = p.heads_kv = 32;
    p.dtype = DType::bf16;
    for (const char* name : {"h200", "a100", "rtx3090", "l4", "t4"}) {
        const Machine& machine = *find_machine(name);
        for (const Schedule schedule : kSchedules) {
            for (const Pass pass : {Pass::forward, Pass::backward}) {
                for (const Causal causal : {Causal::none, Causal::bottom_right}) {
                    for (const std::int64_t dim : {64, 128}) {
                        p.head_dim = p.head_dim_v = dim;
                        p.mask.causal = causal;
                        std::int64_t before = 0;
                        for (p.len_q = 96; p.len_q <= 4096; p.len_q += 16) {
                            p.len_kv = p.len_q;
                            if (refusal(p, schedule, pass, machine)) continue;
                            const std::int64_t bytes = predict(p, schedule, pass, machine).cost.work.bytes.dram;
                            EXPECT_GE(bytes, before)
                                << name << " " << name_of(schedule) << " " << name_of(pass) << " " << p.describe();
                            before = bytes;
                        }
                    }
                }
            }
        }
    }
}

TEST(Predict, is_never_above_a_roof_and_adds_up) {
    EXPECT_TRUE(test::holds(300, [] {
        const Problem p = any_problem();
        for (const Machine& machine : machines()) {
            for (const Schedule schedule : kSchedules) {
                for (const Pass pass : {Pass::forward, Pass::backward}) {
                    for (const char* by : {"", "flash-attention", "cudnn"}) {
                        const PredictOptions options{.by = by, .worksheet = true};
                        if (refusal(p, schedule, pass, machine, options)) {
                            RC_ASSERT_THROWS_AS(predict(p, schedule, pass, machine, options), Error);
                            continue;
                        }
                        const Prediction x = predict(p, schedule, pass, machine, options);
                        RC_LOG() << machine.name << " " << name_of(schedule) << " " << p.describe() << "\n";
                        RC_ASSERT(std::isfinite(x.ms) && x.ms >= 0);
                        double sum = 0;
                        for (const Part& part : x.parts) {
                            RC_ASSERT(std::isfinite(part.ms) && part.ms >= 0);
                            sum += part.ms;
                        }
                        RC_ASSERT(std::abs(sum - x.ms) <= 1e-9 * x.ms);
                        for (const Roof& roof : x.roofs) RC_ASSERT(roof.ms <= x.ms * (1 + 1e-9));
                        RC_ASSERT(x.tflops <= machine.peak_tflops(p.dtype) * (1 + 1e-9));
                        RC_ASSERT(!x.worksheet.empty());
                    }
                }
            }
        }
    }));
}

/// Worked out by hand from the formulas of docs/model.md.
TEST(Predict, agrees_with_paper_and_pencil) {
    Problem p = Problem::dense(1, 4096, 16, 128, DType::bf16);
    const Machine& h200 = *find_machine("h200");
    const Prediction x = predict(p, Schedule::fa3, Pass::forward, h200, {.by = "flash-attention"});
    // Tiles of 128 x 176: 2816 + 0.641 * 1408 = 3718.5 clk; 24 of them in each of 32 * 16 tiles of queries, and 204.
    const double unit = 24 * (2816 + 0.641 * 1408) + 204;
    const double clocks = 4 * unit;  // 512 units on 132 multiprocessors: 4 rounds
    const double load = 512 * 24 * 128.0 * 176 * 512 / (clocks * 132 * 4096);
    const double ghz = 1.98 - 0.35 * load;
    const double q_and_o = (2.0 * 4096 * 2048 * 2 + 4 * 4096 * 16) / (4800e6 * 0.94);
    EXPECT_NEAR(x.ms, clocks / (ghz * 1e6) + 0.85 * q_and_o + 0.003, 1e-9);
    EXPECT_EQ(x.tile, (Tile{128, 176}));
    EXPECT_EQ(x.bound, "tensor");
}

/// roofline advises the schedule that was measured to be the fastest on a CPU (schedules_xeon16.jsonl): fa2 for long
/// rows.
TEST(Predict, the_fastest_on_a_cpu_is_the_measured_one) {
    const auto records = measure::read_records(TESSERA_SOURCE_DIR "/bench/results/cpu/schedules_xeon16.jsonl");
    const auto rows = measure::compare(records).rows;
    ASSERT_EQ(rows.size(), 12U);
    for (const measure::Comparison& row : rows) EXPECT_LE(std::abs(row.error()), 0.70) << row.record.schedule;
    for (const std::int64_t head_dim : {64, 128}) {
        const Problem p = Problem::dense(1, 2048, 8, head_dim, DType::fp32);
        const auto ms = [&](Schedule schedule) {
            return predict(p, schedule, Pass::forward, *find_machine("xeon-16")).ms;
        };
        EXPECT_LT(ms(Schedule::fa2), ms(Schedule::fa1));
        EXPECT_LT(ms(Schedule::fa2), ms(Schedule::standard));
    }
}

/// If a machine's own kernels were measured, their constants count, and a worksheet shows them.
TEST(Predict, measured_kernels_of_a_cpu_count) {
    const Problem p = Problem::dense(1, 700, 16, 64, DType::bf16);
    Machine machine = *find_machine("xeon-16");
    const auto ms = [&](Schedule schedule, const PredictOptions& options = {}) {
        return predict(p, schedule, Pass::forward, machine, options).ms;
    };
    const double before = ms(Schedule::fa2), other = ms(Schedule::fa1);
    const double on_simd_path = ms(Schedule::fa2, {.tile = Tile{33, 64}});
    KernelShares shares{.gemm_share = 0.5, .exp_share = 1, .extra_tiles = 0, .loop_starts = 0, .call_us = 20};
    set_measured_kernels(machine, {{"bf16 forward", shares, "a test"}});
    EXPECT_EQ(predict(p, Schedule::fa2, Pass::forward, machine).fitted_on, "a test");
    EXPECT_TRUE(predict(p, Schedule::fa2, Pass::forward, machine).measured);
    for (const PredictOptions& options : {PredictOptions{}, PredictOptions{.tile = Tile{33, 64}}}) {
        const Schedule schedule = options.tile ? Schedule::fa2 : Schedule::fa1;  // that tile runs in multiply-adds
        EXPECT_FALSE(predict(p, schedule, Pass::forward, machine, options).measured);
    }
    EXPECT_LT(ms(Schedule::fa1), other);  // contended_speed is that of the host: 1
    EXPECT_LT(ms(Schedule::fa2, {.tile = Tile{33, 64}}), on_simd_path);
    const double fast = ms(Schedule::fa2);
    EXPECT_NE(fast, before);
    KernelShares contended = shares;
    contended.contended_speed = 0.5;  // all cores at half the speed
    contended.start_us = 300;
    set_measured_kernels(machine, {{"bf16 forward", contended, "a test"}});
    const double slow = ms(Schedule::fa2);
    EXPECT_GT(slow, fast + 0.3);
    const double slow_alone = ms(Schedule::fa2, {.threads = 1});
    set_measured_kernels(machine, {{"bf16 forward", shares, "a test"}});
    EXPECT_EQ(slow_alone, ms(Schedule::fa2, {.threads = 1}));
}

/// Kinds that a machine has not measured start and contend as its others do in the median, so that no wake-up is one
/// schedule's alone; and what is said of the error is said of the kernels that were asked for.
TEST(Predict, what_a_cpu_measured_is_told_of_other_kernels_too) {
    const Problem p = Problem::dense(1, 700, 16, 64, DType::bf16);
    Machine machine = *find_machine("xeon-16");
    machine.name = "this-host";
    const auto error_of = [&](Schedule schedule) {
        return measure::error_bar_text(p, predict(p, schedule, Pass::forward, machine), machine);
    };
    EXPECT_NE(error_of(Schedule::fa1).find("its kernels were not measured"), std::string::npos);
    KernelShares shares{.gemm_share = 0.5, .exp_share = 1, .extra_tiles = 0, .loop_starts = 0, .call_us = 20};
    std::vector<MeasuredKernels> all;
    for (const auto& [kernels, start_us, contended_speed] :
         {std::tuple{"bf16 forward", 700.0, 0.5}, {"fp32 forward", 100.0, 0.4}, {"bf16 backward", 300.0, 0.9}}) {
        shares.start_us = start_us, shares.contended_speed = contended_speed;
        all.push_back({kernels, shares, "a test"});
    }
    set_measured_kernels(machine, all);
    const PredictOptions options;
    const Question fa1{p, Schedule::fa1, Pass::forward, machine, options};
    EXPECT_EQ(shares_of(fa1).start_us, 300);
    EXPECT_EQ(shares_of(fa1).contended_speed, 0.5);
    EXPECT_EQ(shares_of(fa1).gemm_share, cpu_family_of(fa1).constants.gemm_share);
    all.pop_back();
    set_measured_kernels(machine, all);
    EXPECT_EQ(shares_of(fa1).start_us, 400);
    EXPECT_EQ(shares_of({p, Schedule::fa2, Pass::forward, machine, options}).start_us, 700);  // its own
    EXPECT_NE(error_of(Schedule::fa2).find("in the median on two cores"), std::string::npos);
    EXPECT_NE(error_of(Schedule::fa1).find("such kernels were not measured"), std::string::npos);
}

/// An error bar says whose rows it comes from.
TEST(Predict, says_whether_a_card_was_measured) {
    const Problem p = Problem::dense(1, 4096, 8, 64, DType::bf16);
    const auto bar_of = [&](const char* device) {
        const Machine& machine = *find_machine(device);
        return measure::error_bar_text(p, predict(p, Schedule::fa2, Pass::forward, machine), machine);
    };
    EXPECT_NE(bar_of("h200").find("held-out rows"), std::string::npos);
    EXPECT_NE(bar_of("b200").find("by published tables of b200"), std::string::npos);
    EXPECT_NE(bar_of("l4").find("no Records of l4 itself exist"), std::string::npos);
}

/// fa3's counter of tiles is set to 0 by a launch, where there is one: under a mask, with more tiles than run at once.
TEST(Predict, a_counter_of_tiles_costs_a_launch) {
    const auto launches = [](std::int64_t heads, bool causal) {
        Problem p = Problem::dense(1, 512, heads, 64, DType::bf16);
        if (causal) p.mask.causal = Causal::bottom_right;
        for (const Part& part :
             predict(p, Schedule::fa3, Pass::forward, *find_machine("h200"), {.by = "tessera"}).parts)
            if (part.name == "launch") return part.ms;
        return 0.0;
    };
    EXPECT_EQ(launches(8, true), launches(8, false));
    EXPECT_EQ(launches(128, true), 2 * launches(128, false));
}

TEST(Predict, refuses_what_no_kernel_can) {
    const Problem p = Problem::dense(1, 64, 1, 64, DType::bf16);
    EXPECT_TRUE(refusal(p, Schedule::fa3, Pass::forward, *find_machine("a100")).has_value());
    EXPECT_TRUE(refusal(p, Schedule::fa2, Pass::forward, *find_machine("v100")).has_value());
    EXPECT_TRUE(refusal(p, Schedule::fa3, Pass::forward, *find_machine("xeon-16")).has_value());
    EXPECT_TRUE(refusal(p, Schedule::fa2, Pass::forward, *find_machine("h200"), {.by = "nobody"}).has_value());
    // Tiles that no such kernel has, and none.
    for (const Tile tile : {Tile{256, 128}, Tile{4096, 128}, Tile{3, 5}, Tile{0, 128}}) {
        for (const char* by : {"tessera", "flash-attention"}) {
            const auto reason =
                refusal(p, Schedule::fa3, Pass::backward, *find_machine("h200"), {.by = by, .tile = tile});
            EXPECT_TRUE(reason.has_value()) << by << " " << tile.block_q;
        }
    }
    EXPECT_TRUE(refusal(p, Schedule::fa2, Pass::forward, *find_machine("xeon-16"), {.tile = Tile{0, 128}}).has_value());
    EXPECT_FALSE(refusal(p, Schedule::fa3, Pass::forward, *find_machine("h100")).has_value());
    Problem wrong = p;
    wrong.heads_kv = 0;
    EXPECT_THROW(predict(wrong, Schedule::fa2, Pass::forward, *find_machine("h200")), Error);
}

TEST(Predict, the_longest_that_fits_fits) {
    const Machine& machine = *find_machine("l4");
    const double room = machine.memory_gib * 1073741824.0;
    for (const Schedule schedule : kSchedules) {
        for (const Pass pass : {Pass::forward, Pass::backward}) {
            Problem p = Problem::dense(2, 128, 16, 64, DType::bf16);
            const std::int64_t longest = longest_that_fits(p, schedule, pass, machine);
            const auto bytes = [&](std::int64_t len) {
                p.len_q = p.len_kv = len;
                return static_cast<double>(
                    schedule::footprint({.problem = p, .schedule = schedule, .pass = pass, .tile = {64, 64}}).total());
            };
            EXPECT_LE(bytes(longest), room) << name_of(schedule);
            EXPECT_GT(bytes(longest + 1), room) << name_of(schedule);
        }
    }
}

/// Tensors whose bytes pass 2^63 fit nowhere; so do those that wrap to a few.
TEST(Predict, the_longest_that_fits_is_counted_without_wrapping) {
    const Machine& machine = *find_machine("h200");
    const std::int64_t heads = std::int64_t{1} << 32;
    for (const Schedule schedule : {Schedule::standard, Schedule::fa2}) {
        const Problem p = Problem::dense(1 << 20, 1, heads >> 20, 64, DType::bf16);
        const auto longest = static_cast<double>(longest_that_fits(p, schedule, Pass::forward, machine));
        EXPECT_LE(longest * static_cast<double>(heads) * 64 * 4 * 2, machine.memory_gib * 0x1p30) << name_of(schedule);
    }
}

/// So many heads that the longest lengths of the search are beyond counting: it says what it has found until there.
TEST(Sweep, crossings_of_many_heads) {
    const measure::SweepQuestion question{
        *find_machine("h200"), {Schedule::standard, Schedule::fa3}, {Pass::forward}, {}};
    const Problem few = Problem::dense(1, 1024, 32, 128, DType::bf16);
    Problem many = few;
    many.batch = 64;
    const auto ranges = *measure::faster_than_standard(many, Schedule::fa3, question);
    ASSERT_FALSE(ranges.empty());
    for (const Problem& problem : {few, many}) {  // as far as standard runs, and no further
        Problem at_end = problem;
        at_end.len_q = at_end.len_kv = measure::faster_than_standard(problem, Schedule::fa3, question)->back().end;
        ASSERT_GT(at_end.len_q, 0);
        const measure::SweepCell standard = measure::sweep_one(at_end, question).cells.front();
        EXPECT_TRUE(!standard.known() || !standard.fits) << at_end.describe();
        at_end.len_q = at_end.len_kv = at_end.len_q - 1;  // the last length is exact to one key
        EXPECT_TRUE(measure::sweep_one(at_end, question).cells.front().fits) << at_end.describe();
    }
    many.batch = std::int64_t{1} << 31;
    many.heads_q = many.heads_kv = 2048;  // not even the shortest can be counted
    EXPECT_TRUE(measure::faster_than_standard(many, Schedule::fa3, question)->empty());
}

TEST(Sweep, no_crossings_where_a_cost_is_missing) {
    const measure::SweepQuestion question{
        *find_machine("h200"), {Schedule::standard, Schedule::fa1}, {Pass::forward}, {}};
    Problem p = Problem::dense(1, 4096, 16, 64, DType::bf16);
    EXPECT_TRUE(measure::faster_than_standard(p, Schedule::fa1, question));
    p.softcap = 30;
    EXPECT_FALSE(measure::faster_than_standard(p, Schedule::fa1, question));
}

TEST(Sweep, wins_and_crossings) {
    const Machine& machine = *find_machine("h200");
    const measure::SweepQuestion question{machine, {Schedule::standard, Schedule::fa1}, {Pass::forward}, {}};
    // At head_dim 256, fa1 moves more than the N x N matrix (src/cuda/fa1/README.md): it loses from some length on.
    const Problem p = Problem::dense(16, 1024, 8, 256, DType::bf16);
    const auto ranges = *measure::faster_than_standard(p, Schedule::fa1, question);
    ASSERT_FALSE(ranges.empty());
    for (const Range& range : ranges) {
        const auto win = [&](std::int64_t len) {
            Problem at = p;
            at.len_q = at.len_kv = len;
            const auto row = measure::sweep_one(at, question);
            return row.win(&row.cells.back());
        };
        EXPECT_GT(win(range.begin), 1);
        if (range.end > 0) {
            EXPECT_LE(win(range.end), 1);
        }
    }
    EXPECT_NEAR(measure::amdahl_speedup(0.5, 2), 1 / 0.75, 1e-12);
    EXPECT_NEAR(measure::amdahl_speedup(0, 9), 1, 1e-12);
    EXPECT_NEAR(measure::amdahl_speedup(1, 9), 9, 1e-12);
}

/// The model's tiles of tessera's CUDA kernels are the kernels' own (in builds that have them). Backwards are
/// left out, since some have the constants of related kernels (docs/model.md).
TEST(Families, tiles_are_those_of_the_kernels) {
    for (const Kernel& kernel : registry()) {
        if (kernel.info.backend != Backend::cuda || kernel.info.pass == Pass::backward) continue;
        const Family* found = find_family(kernel.info.schedule, kernel.info.pass, "tessera");
        ASSERT_NE(found, nullptr) << kernel.info.name;
        for (const std::int64_t head_dim : {32, 64, 80, 128, 192, 256}) {
            for (const Causal causal : {Causal::none, Causal::bottom_right}) {
                for (const std::int64_t len : {512, 4096}) {
                    Problem p = Problem::dense(1, len, 2, head_dim, DType::bf16);
                    p.mask.causal = causal;
                    for (const double softcap : {0.0, 30.0}) {
                        p.softcap = softcap;
                        const Family* family = &family_for(*found, p, *find_machine("h200"), kernel.info.name);
                        EXPECT_EQ(tile_of(*family, p, *find_machine("h200")), kernel.default_tile(p, Device{}))
                            << kernel.info.name << " " << p.describe();
                    }
                }
            }
        }
    }
}

/// Decode steps of all lengths lie on one point of a roofline, so they have a picture of their own.
TEST(Predict, decode_picture_is_over_keys) {
    std::vector<measure::SweepRow> rows;
    const measure::SweepQuestion question{
        *find_machine("h200"), {Schedule::fa2, Schedule::fa3}, {Pass::forward}, {.by = "published"}};
    for (const std::int64_t keys : {1024, 8192, 65536}) {
        Problem p = Problem::dense(8, keys, 32, 128, DType::bf16);
        p.heads_kv = 8;
        p.len_q = 1;
        rows.push_back(measure::sweep_one(p, question));
    }
    ASSERT_TRUE(measure::is_decode(rows));
    const plot::Figure figure = measure::decode_figure(*find_machine("h200"), rows);
    ASSERT_EQ(figure.series.size(), 2U);
    EXPECT_EQ(figure.series[0].points.size(), 3U);
    EXPECT_EQ(figure.series[0].points[1].x, 8192);
    EXPECT_LT(figure.series[0].points[0].y, figure.series[0].points[2].y) << "longer caches read at a higher rate";
    rows.front().problem.len_q = 1024;
    EXPECT_FALSE(measure::is_decode(rows));
}

/// A picture says which kernels nobody here ran.
TEST(Predict, pictures_have_the_caveat_of_others_tables) {
    const auto subtitle = [](const char* machine) {
        const measure::SweepQuestion question{
            *find_machine(machine), {Schedule::fa3}, {Pass::forward}, {.by = "published"}};
        const std::vector<measure::SweepRow> rows{
            measure::sweep_one(Problem::dense(4, 4096, 16, 128, DType::bf16), question)};
        return measure::roofline_figure(*find_machine(machine), rows).subtitle;
    };
    EXPECT_NE(subtitle("b200").find("by others' tables: never run here"), std::string::npos);
    EXPECT_EQ(subtitle("h200").find("never run here"), std::string::npos);
}

}  // namespace
}  // namespace tessera::model::predict_test
