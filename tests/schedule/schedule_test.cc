// SPDX-License-Identifier: Apache-2.0
//
// Schedules as data: the steps sum to the closed form, and the CPU kernels count the same tiles and elements.
#include "schedule/schedule.hpp"

#include <fmt/format.h>

#include "core/case.hpp"
#include "core/property.hpp"
#include "schedule/grid.hpp"

namespace tessera::schedule::schedule_test {
namespace {

constexpr Pass kPasses[] = {Pass::forward, Pass::backward};

Mask any_mask() {
    const auto side = [] {
        return *rc::gen::weightedOneOf<std::int64_t>(
            {{2, rc::gen::just(unbounded)}, {1, rc::gen::inRange<std::int64_t>(0, 40)}});
    };
    Mask mask;
    mask.causal = *rc::gen::element(Causal::none, Causal::bottom_right, Causal::top_left);
    mask.window_left = side();
    mask.window_right = side();
    return mask;
}

/// Dense or ragged, square or not, one query, grouped heads, sizes of 0.
Workload any_workload() {
    Workload w;
    Problem& p = w.problem;
    p.dtype = *rc::gen::element(DType::fp32, DType::bf16);
    p.heads_kv = *rc::gen::inRange(1, 3);
    p.heads_q = p.heads_kv * *rc::gen::inRange(1, 4);
    p.head_dim = *rc::gen::inRange(1, 20);
    p.head_dim_v = *rc::gen::inRange(1, 20);
    p.mask = any_mask();
    const auto length = [] {
        return *rc::gen::weightedOneOf<std::int64_t>(
            {{1, rc::gen::just<std::int64_t>(1)}, {6, rc::gen::inRange<std::int64_t>(0, 90)}});
    };
    p.batch = *rc::gen::inRange(0, 4);
    p.ragged = *rc::gen::arbitrary<bool>();
    if (p.ragged) {
        for (std::int64_t b = 0; b < p.batch; ++b) {
            w.sequences.emplace_back(length(), length());
            p.len_q = std::max(p.len_q, w.sequences.back().first);
            p.len_kv = std::max(p.len_kv, w.sequences.back().second);
            p.total_q += w.sequences.back().first;
            p.total_kv += w.sequences.back().second;
        }
    } else {
        p.len_q = length();
        p.len_kv = length();
    }
    w.tile = {*rc::gen::inRange(1, 40), *rc::gen::inRange(1, 40)};
    w.residency = {.keys = *rc::gen::arbitrary<bool>(),
                   .queries = *rc::gen::arbitrary<bool>(),
                   .scores = *rc::gen::arbitrary<bool>(),
                   .tiles_at_once = *rc::gen::inRange(1, 5)};
    return w;
}

std::string text(const Cost& c) {
    return fmt::format("dram {} l2 {} shared {} flop {} exps {} full {} partial {} skipped {} elements {} pairs {}",
                       c.work.bytes.dram, c.work.bytes.l2, c.work.bytes.shared, c.work.flop, c.work.exps, c.full,
                       c.partial, c.skipped, c.elements, c.pairs);
}

TEST(Schedule, steps_sum_to_the_closed_form) {
    EXPECT_TRUE(test::holds(2000, [] {
        Workload w = any_workload();
        for (const Schedule schedule : kSchedules) {
            for (const Pass pass : kPasses) {
                w.schedule = schedule;
                w.pass = pass;
                RC_LOG() << name_of(schedule) << " " << tessera::name_of(pass) << " " << w.problem.describe()
                         << " tile " << w.tile.block_q << " x " << w.tile.block_kv << "\n";
                RC_ASSERT(text(sum_of_steps(w)) == text(cost(w)));
            }
        }
    }));
}

/// A cost takes as many steps as the mask's edges cross tiles: 2^32 queries of one key are as quick as one.
TEST(Schedule, long_sides_are_counted_by_runs) {
    constexpr std::int64_t kLong = std::int64_t{1} << 32;
    for (const Mask mask : {Mask{}, Mask{.causal = Causal::bottom_right}, Mask{.causal = Causal::top_left},
                            Mask{.window_left = 5, .window_right = 3}}) {
        for (const bool tall : {true, false}) {
            const std::int64_t len_q = tall ? kLong : 3;
            const std::int64_t len_kv = tall ? 3 : kLong;
            const Grid grid{mask.bind(len_q, len_kv), {1, 1}};
            std::int64_t rows = 0, columns = 0, runs = 0;
            for_each_run_of_rows(grid, [&](std::int64_t, std::int64_t times) { rows += times, ++runs; });
            for_each_run_of_columns(grid, [&](std::int64_t, std::int64_t times) { columns += times, ++runs; });
            EXPECT_EQ(rows, len_q);
            EXPECT_EQ(columns, len_kv);
            EXPECT_LE(runs, 40);
        }
        Workload w{.problem = Problem::dense(1, 1, 1, 16), .tile = {1, 1}};
        w.problem.mask = mask;
        w.problem.len_q = kLong;
        for (const bool resident : {true, false}) {
            w.residency = {.keys = resident, .queries = resident, .scores = resident};
            for (const Schedule schedule : kSchedules) {
                for (const Pass pass : kPasses) {
                    w.schedule = schedule;
                    w.pass = pass;
                    EXPECT_EQ(cost(w).pairs, visible_pairs(mask.bind(kLong, 1)));
                }
            }
        }
    }
}

TEST(Schedule, work_is_that_of_visible_pairs) {
    EXPECT_TRUE(test::holds(300, [] {
        Workload w = any_workload();
        std::int64_t pairs = 0;
        const auto add = [&](std::int64_t q, std::int64_t kv) { pairs += w.problem.mask.bind(q, kv).visible_pairs(); };
        if (w.problem.ragged) {
            for (const auto& [q, kv] : w.sequences) add(q, kv);
        } else {
            for (std::int64_t b = 0; b < w.problem.batch; ++b) add(w.problem.len_q, w.problem.len_kv);
        }
        pairs *= w.problem.heads_q;
        for (const Schedule schedule : kSchedules) {
            w.schedule = schedule;
            w.pass = Pass::forward;
            const Cost forward = cost(w);
            RC_ASSERT(forward.pairs == pairs && forward.work.exps == pairs);
            RC_ASSERT(forward.work.flop == 2 * pairs * (w.problem.head_dim + w.problem.head_dim_v));
            RC_ASSERT(forward.elements >= pairs);
            w.pass = Pass::backward;
            RC_ASSERT(cost(w).work.flop == 2 * pairs * (3 * w.problem.head_dim + 2 * w.problem.head_dim_v));
        }
    }));
}

/// The counts of the papers, for sizes that can be worked out by hand.
TEST(Schedule, published_counts) {
    const std::int64_t n = 1024;
    const std::int64_t d = 64;
    Workload w{.problem = Problem::dense(1, n, 1, d, DType::bf16), .tile = {128, 128}};
    w.residency.queries = false;
    w.schedule = Schedule::fa2;
    EXPECT_EQ(cost(w).work.bytes.dram, 2 * 4 * n * d + 4 * n);          // every tensor once, and LSE
    EXPECT_EQ(cost(w).work.bytes.l2, 2 * (2 + 2 * 8) * n * d + 4 * n);  // K and V by each of 8 tiles of queries
    EXPECT_EQ(cost(w).work.flop, 4 * n * n * d);
    w.schedule = Schedule::standard;
    EXPECT_EQ(cost(w).work.bytes.dram, 2 * 4 * n * d + 4 * n + 12 * n * n);
    w.schedule = Schedule::fa1;
    // Algorithm 1 with O in fp32: 8 tiles of keys, each with Q and twice O, m, l; one more pass at each end.
    EXPECT_EQ(cost(w).work.bytes.dram,
              2 * 2 * n * d + 8 * (2 * n * d + 2 * n * (4 * d + 8)) + 2 * n * (4 * d + 8) + 2 * n * d + 4 * n);
    w.problem.mask.causal = Causal::bottom_right;
    EXPECT_EQ(cost(w).full, 28);
    EXPECT_EQ(cost(w).partial, 8);
    EXPECT_EQ(cost(w).skipped, 28);
    EXPECT_EQ(cost(w).pairs, n * (n + 1) / 2);
}

/// Algorithm 1 of FlashAttention-3: the next scores are begun before the values of the tile before.
TEST(Schedule, fa3_runs_scores_ahead_of_values) {
    const Workload w{.problem = Problem::dense(1, 96, 1, 8), .schedule = Schedule::fa3, .tile = {96, 32}};
    std::string order;
    for_each_step(w, [&](const Step& step) {
        if (step.operation == Operation::scores) order += fmt::format("S{} ", step.keys.begin / 32);
        if (step.operation == Operation::values) order += fmt::format("O{} ", step.keys.begin / 32);
        if (step.operation == Operation::softmax) order += fmt::format("P{} ", step.keys.begin / 32);
    });
    EXPECT_EQ(order, "S0 P0 S1 O0 P1 S2 O1 P2 O2 ");
}

struct Counted {
    std::int64_t full, partial, skipped, elements;
    friend bool operator==(const Counted&, const Counted&) = default;
    friend std::ostream& operator<<(std::ostream& out, const Counted& c) {
        return out << c.full << " full, " << c.partial << " partial, " << c.skipped << " skipped, " << c.elements;
    }
};

Counted counted_by_kernel(const Workload& w, int threads) {
    test::CaseOptions options;
    Problem p = w.problem;
    if (p.ragged) {
        std::vector<std::int64_t> q;
        std::vector<std::int64_t> kv;
        for (const auto& [len_q, len_kv] : w.sequences) q.push_back(len_q), kv.push_back(len_kv);
        test::set_ragged(p, options, q, kv);
    }
    test::Case c(p, options);
    TileCounters counters;
    const Plan plan = tessera::plan(
        p, {.pass = w.pass, .backend = Backend::cpu, .schedule = w.schedule, .tile = w.tile, .threads = threads});
    if (w.pass == Pass::forward) forward(plan, c.forward_args(), Workspace(plan), {.counters = &counters});
    else backward(plan, c.backward_args(), Workspace(plan), {.counters = &counters});
    return {counters.full, counters.partial, counters.skipped, counters.computed_pairs};
}

/// The calls have one thread, because more may split the lanes of a tile over several tasks (fa2 forward), which makes
/// more tiles. Tiles of keys divide 512, the chunk at which fa2's forward starts its tiles anew.
TEST(Schedule, cpu_kernels_count_the_same_tiles_and_elements) {
    EXPECT_TRUE(test::holds(150, [] {
        Workload w = any_workload();
        w.tile.block_kv = *rc::gen::element<std::int64_t>(1, 4, 16, 32);
        for (const Schedule schedule : {Schedule::standard, Schedule::fa1, Schedule::fa2}) {
            for (const Pass pass : kPasses) {
                w.schedule = schedule;
                w.pass = pass;
                const Cost c = cost(w);
                RC_LOG() << name_of(schedule) << " " << tessera::name_of(pass) << " " << w.problem.describe()
                         << " tile " << w.tile.block_q << " x " << w.tile.block_kv << "\n";
                RC_ASSERT(counted_by_kernel(w, 1) == (Counted{c.full, c.partial, c.skipped, c.elements}));
            }
        }
    }));
}

TEST(Schedule, refuses_what_is_not_legal) {
    Workload w{.problem = Problem::dense(1, 8, 1, 8), .tile = {0, 4}};
    EXPECT_THROW(cost(w), Error);
    w.tile = {4, 4};
    w.sequences = {{8, 8}};
    EXPECT_THROW(cost(w), Error);
    w.sequences.clear();
    w.problem.head_dim = 0;
    EXPECT_THROW(cost(w), Error);
    w.problem = Problem::dense(1, std::int64_t{1} << 30, 1, 128);  // legal, but its FLOP pass 2^63
    EXPECT_THROW(cost(w), Error);
}

}  // namespace
}  // namespace tessera::schedule::schedule_test
