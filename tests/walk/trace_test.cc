// SPDX-License-Identifier: Apache-2.0
//
// A trace holds what the kernel computes: the same bits at the end, and at every step the values of an independent
// computation in fp64.
#include "walk/trace.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "core/case.hpp"
#include "tessera/error.hpp"

namespace tessera::walk::trace_test {
namespace {

using test::Case;
using test::Tensor;

constexpr std::int64_t kHead = 1;
constexpr std::int64_t kRow = 70;

Problem small_problem(Causal causal = Causal::bottom_right, std::int64_t len = 150, std::int64_t len_kv = 0) {
    Problem p = Problem::dense(2, len, 2, 24);
    p.head_dim_v = 40;
    p.heads_kv = 1;
    if (len_kv > 0) p.len_kv = len_kv;
    p.mask.causal = causal;
    return p;
}

Plan plan_of(const Problem& p, Schedule schedule, Pass pass, std::optional<Tile> tile = Tile{32, 32}) {
    return plan(p, {.pass = pass, .backend = Backend::cpu, .schedule = schedule, .tile = tile, .threads = 1});
}

/// The scores of a row in fp64: scaled dot products, -inf where hidden.
std::vector<double> scores_of(const Case& c, std::int64_t row) {
    const Problem& p = c.problem;
    const Band band = p.mask.bind(p.len_q, p.len_kv);
    std::vector<double> s;
    for (std::int64_t j = 0; j < p.len_kv; ++j) {
        double dot = 0;
        for (std::int64_t x = 0; x < p.head_dim; ++x) dot += c.q.at(1, row, kHead, x) * c.k.at(1, j, 0, x);
        s.push_back(band.visible(row, j) ? dot * p.effective_scale() : -test::kInfinity);
    }
    return s;
}

struct Softmax {
    double m = -test::kInfinity;
    double l = 0;
    std::vector<double> o;  // [head_dim_v], not divided by l
};

/// The softmax over keys [begin, end) alone.
Softmax softmax_of(const Case& c, const std::vector<double>& s, std::int64_t begin, std::int64_t end) {
    Softmax r;
    r.o.assign(static_cast<std::size_t>(c.problem.head_dim_v), 0.0);
    for (std::int64_t j = begin; j < end; ++j) r.m = std::max(r.m, s[static_cast<std::size_t>(j)]);
    for (std::int64_t j = begin; j < end && r.m > -test::kInfinity; ++j) {
        const double p = std::exp(s[static_cast<std::size_t>(j)] - r.m);
        r.l += p;
        for (std::size_t x = 0; x < r.o.size(); ++x) r.o[x] += p * c.v.at(1, j, 0, static_cast<std::int64_t>(x));
    }
    return r;
}

void expect_near(double got, double expected, const std::string& what) {
    if (std::isinf(expected)) EXPECT_EQ(got, expected) << what;
    else EXPECT_NEAR(got, expected, 3e-5 * std::max(1.0, std::abs(expected))) << what;
}

void expect_state(const Step& step, std::size_t lane, const Softmax& right, bool divided) {
    const std::string what = "keys to " + std::to_string(step.keys.end);
    expect_near(step.m[lane], right.m, "m, " + what);
    expect_near(step.l[lane], right.l, "l, " + what);
    for (std::size_t x = 0; x < right.o.size() && !step.o.empty(); ++x) {
        const double o = divided && right.l > 0 ? right.o[x] / right.l : right.o[x];
        expect_near(step.o.at(static_cast<std::int64_t>(lane), static_cast<std::int64_t>(x)), o, "o, " + what);
    }
}

/// Every step of a fa1 or fa2 trace, for each of its queries.
void expect_right_steps(const Case& c, const Trace& trace) {
    const bool is_fa2 = trace.plan.kernel->schedule == Schedule::fa2;
    for (std::int64_t row = trace.queries.begin; row < trace.queries.end; ++row) {
        const auto lane = static_cast<std::size_t>(row - trace.queries.begin);
        const std::vector<double> s = scores_of(c, row);
        double old_m = -test::kInfinity, old_l = 0;
        for (const Step& step : trace.steps) {
            if (step.coverage == Coverage::empty) continue;
            if (step.step != TileStep::values) {
                expect_state(step, lane, softmax_of(c, s, 0, step.keys.end), step.step == TileStep::finish || !is_fa2);
                continue;
            }
            const std::int64_t begin = is_fa2 ? step.keys.begin / 512 * 512 : 0;  // fa2 sums chunks of 512 keys
            if (is_fa2 && step.keys.begin == begin) old_m = -test::kInfinity, old_l = 0;
            const Softmax right = softmax_of(c, s, begin, step.keys.end);
            expect_state(step, lane, right, !is_fa2);
            if (right.l > 0) {
                const double alpha = std::exp(old_m - right.m);
                expect_near(step.rescale[lane], is_fa2 ? alpha : alpha * old_l / right.l, "rescale");
            }
            old_m = right.m, old_l = right.l;
        }
    }
}

TEST(Trace, forward_gives_the_bits_of_a_normal_run) {
    for (const Schedule schedule : {Schedule::standard, Schedule::fa1, Schedule::fa2}) {
        for (const std::int64_t len_kv : {150, 700}) {
            Case c(small_problem(Causal::bottom_right, 150, len_kv));
            // A matrix unit takes no tiles of 48 keys, and a call with an observer runs without the unit.
            const Plan how = plan_of(c.problem, schedule, Pass::forward, Tile{32, 48});
            forward(how, c.forward_args(), Workspace(how));
            const auto o = c.o.bytes(), lse = c.lse.bytes();
            for (Tensor* out : {&c.o, &c.lse}) test::fill(*out, test::kNan);
            const Trace trace = trace_forward(how, c.forward_args(), {1, kHead, kRow});
            EXPECT_EQ(c.o.bytes(), o);
            EXPECT_EQ(c.lse.bytes(), lse);
            EXPECT_EQ(trace.queries, (Range{64, 96}));
            const Step& last = trace.steps.back();
            ASSERT_EQ(last.step, TileStep::finish);
            for (std::int64_t row = 64; row < 96; ++row) {
                const auto lane = static_cast<std::size_t>(row - 64);
                for (std::int64_t x = 0; x < c.problem.head_dim_v; ++x) {
                    EXPECT_EQ(static_cast<double>(last.o.at(row - 64, x)), c.o.at(1, row, kHead, x))
                        << name_of(schedule);
                }
                const auto stored = static_cast<float>(last.m[lane] + std::log(static_cast<double>(last.l[lane])));
                EXPECT_EQ(static_cast<double>(stored), c.lse.at(1, kHead, row));
            }
        }
    }
}

TEST(Trace, forward_steps_agree_with_fp64) {
    for (const Schedule schedule : {Schedule::fa1, Schedule::fa2}) {
        for (const Causal causal : {Causal::none, Causal::bottom_right, Causal::top_left}) {
            for (const Tile tile : {Tile{32, 32}, Tile{16, 48}, Tile{64, 128}}) {
                Case c(small_problem(causal, 150, 1100));
                const Plan how = plan_of(c.problem, schedule, Pass::forward, tile);
                SCOPED_TRACE(how.describe());
                expect_right_steps(c, trace_forward(how, c.forward_args(), {1, kHead, kRow}));
            }
        }
    }
}

TEST(Trace, standard_forward_holds_scores_and_weights) {
    Case c(small_problem());
    const Plan how = plan_of(c.problem, Schedule::standard, Pass::forward);
    const Trace trace = trace_forward(how, c.forward_args(), {1, kHead, kRow});
    const std::vector<double> s = scores_of(c, kRow);
    const Softmax whole = softmax_of(c, s, 0, 150);
    std::int64_t seen = 0;
    for (const Step& step : trace.steps) {
        if (step.coverage == Coverage::empty || (step.s.empty() && step.step != TileStep::softmax)) continue;
        for (std::int64_t j = step.keys.begin; j < step.keys.end; ++j) {
            const double score = s[static_cast<std::size_t>(j)];
            if (step.step == TileStep::scores) expect_near(step.s.at(kRow - 64, j - step.keys.begin), score, "s");
            else expect_near(step.p.at(kRow - 64, j - step.keys.begin), std::exp(score - whole.m) / whole.l, "p");
            ++seen;
        }
    }
    EXPECT_EQ(seen, 2 * 96);  // the tile ends at its last query's diagonal, in both passes
}

TEST(Trace, tiles_are_those_that_the_kernel_counts) {
    for (const Schedule schedule : {Schedule::standard, Schedule::fa1, Schedule::fa2}) {
        for (const Pass pass : {Pass::forward, Pass::backward}) {
            for (const Tile tile : {Tile{32, 32}, Tile{16, 48}}) {
                Problem p = small_problem(Causal::bottom_right, 150, 1100);
                p.mask.window_left = 300;
                Case c(p);
                c.run_forward();
                const Plan how = plan_of(p, schedule, pass, tile);
                TileCounters counters;
                std::int64_t full = 0, partial = 0, skipped = 0;
                for (std::int64_t batch = 0; batch < 2; ++batch) {
                    for (std::int64_t head = 0; head < 2; ++head) {
                        for (std::int64_t row = 0; row < 150; row += tile.block_q) {
                            const bool first = batch == 0 && head == 0 && row == 0;
                            const Execution counting{.counters = first ? &counters : nullptr};
                            const Trace t = pass == Pass::forward
                                                ? trace_forward(how, c.forward_args(), {batch, head, row}, counting)
                                                : trace_backward(how, c.backward_args(), {batch, head, row}, counting);
                            full += t.count(Coverage::full);
                            partial += t.count(Coverage::partial);
                            skipped += t.count(Coverage::empty);
                        }
                    }
                }
                SCOPED_TRACE(how.describe());
                EXPECT_EQ(full, counters.full);
                EXPECT_EQ(partial, counters.partial);
                EXPECT_EQ(skipped, counters.skipped);
            }
        }
    }
}

/// P, dP and dS of a row in fp64.
struct RowGradient {
    std::vector<double> p, ds;
};

RowGradient gradient_of(const Case& c, std::int64_t row) {
    const std::vector<double> s = scores_of(c, row);
    const Softmax whole = softmax_of(c, s, 0, c.problem.len_kv);
    double delta = -c.dlse.at(1, kHead, row);
    for (std::size_t x = 0; x < whole.o.size(); ++x)
        delta += whole.o[x] / whole.l * c.d_o.at(1, row, kHead, static_cast<std::int64_t>(x));
    RowGradient r;
    for (std::int64_t j = 0; j < c.problem.len_kv; ++j) {
        double dp = 0;
        for (std::int64_t x = 0; x < c.problem.head_dim_v; ++x) dp += c.d_o.at(1, row, kHead, x) * c.v.at(1, j, 0, x);
        r.p.push_back(std::exp(s[static_cast<std::size_t>(j)] - whole.m) / whole.l);
        r.ds.push_back(r.p.back() * (dp - delta));
    }
    return r;
}

TEST(Trace, backward_gives_the_bits_of_a_normal_run_and_agrees_with_fp64) {
    for (const Schedule schedule : {Schedule::standard, Schedule::fa1, Schedule::fa2}) {
        Case c(small_problem());
        c.run_forward();
        const Plan how = plan_of(c.problem, schedule, Pass::backward);
        SCOPED_TRACE(how.describe());
        backward(how, c.backward_args(), Workspace(how));
        const auto dq = c.dq.bytes(), dk = c.dk.bytes(), dv = c.dv.bytes();
        for (Tensor* out : {&c.dq, &c.dk, &c.dv}) test::fill(*out, test::kNan);
        const Trace trace = trace_backward(how, c.backward_args(), {1, kHead, kRow});
        EXPECT_EQ(c.dq.bytes(), dq);
        EXPECT_EQ(c.dk.bytes(), dk);
        EXPECT_EQ(c.dv.bytes(), dv);
        const RowGradient right = gradient_of(c, kRow);
        std::vector<double> sum(24, 0.0);
        const Step* last_dq = nullptr;
        for (const Step& step : trace.steps) {
            if (step.coverage == Coverage::empty) continue;
            for (std::int64_t j = step.keys.begin; j < step.keys.end; ++j) {
                const auto key = static_cast<std::size_t>(j);
                expect_near(step.p.at(kRow - 64, j - step.keys.begin), right.p[key], "p");
                expect_near(step.ds.at(kRow - 64, j - step.keys.begin), right.ds[key], "ds");
                for (std::size_t x = 0; x < 24 && !step.dq.empty(); ++x)
                    sum[x] += right.ds[key] * c.k.at(1, j, 0, static_cast<std::int64_t>(x));
            }
            if (step.dq.empty()) continue;
            last_dq = &step;
            for (std::int64_t x = 0; x < 24; ++x)
                expect_near(step.dq.at(kRow - 64, x), sum[static_cast<std::size_t>(x)], "dq");
        }
        ASSERT_NE(last_dq, nullptr);
        const auto scale = static_cast<float>(c.problem.effective_scale());
        for (std::int64_t x = 0; x < 24; ++x)
            EXPECT_EQ(static_cast<double>(last_dq->dq.at(kRow - 64, x) * scale), c.dq.at(1, kRow, kHead, x));
    }
}

/// Sums the traffic that the last steps report, over all tiles of queries.
Traffic moved_by_all(const Case& c, Schedule schedule, Pass pass) {
    const Plan how = plan_of(c.problem, schedule, pass);
    Traffic sum;
    for (std::int64_t row = 0; row < c.problem.len_q; row += 32) {
        const Trace t = pass == Pass::forward ? trace_forward(how, c.forward_args(), {0, 0, row})
                                              : trace_backward(how, c.backward_args(), {0, 0, row});
        sum.schedule += t.steps.back().moved.schedule;
        sum.standard += t.steps.back().moved.standard;
        double parts = 0;
        for (const Moved& part : t.moved) parts += part.bytes;
        EXPECT_NEAR(parts, t.steps.back().moved.schedule, 1e-9 * parts) << "what the text says it is the sum of";
        for (std::size_t i = 1; i < t.steps.size(); ++i) {
            EXPECT_GE(t.steps[i].moved.schedule, t.steps[i - 1].moved.schedule);
            EXPECT_GE(t.steps[i].moved.standard, t.steps[i - 1].moved.standard);
        }
    }
    return sum;
}

TEST(Trace, moves_as_much_as_the_schedule_says) {
    for (const Causal causal : {Causal::none, Causal::bottom_right}) {
        Problem p = Problem::dense(1, 250, 1, 64);
        p.mask.causal = causal;
        Case c(p);
        c.run_forward();
        for (const Pass pass : {Pass::forward, Pass::backward}) {
            const auto bytes = [&](Schedule schedule) {
                const schedule::Workload w{.problem = p, .schedule = schedule, .pass = pass, .tile = {32, 32}};
                return static_cast<double>(schedule::cost(w).work.bytes.l2);
            };
            for (const Schedule schedule : {Schedule::standard, Schedule::fa1, Schedule::fa2}) {
                SCOPED_TRACE(std::string(name_of(schedule)) + " " + name_of(pass));
                const Traffic moved = moved_by_all(c, schedule, pass);
                EXPECT_NEAR(moved.schedule, bytes(schedule), 1e-9 * bytes(schedule));
                EXPECT_NEAR(moved.standard, bytes(Schedule::standard), 1e-9 * bytes(Schedule::standard));
            }
        }
    }
}

TEST(Trace, refuses_what_it_cannot_follow) {
    Case c(small_problem());
    const Plan how = plan_of(c.problem, Schedule::fa2, Pass::forward);
    const auto refused = [&](const Plan& plan, const Selection& selection, const char* argument) {
        try {
            trace_forward(plan, c.forward_args(), selection);
            ADD_FAILURE() << argument;
        } catch (const Error& error) {
            EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
            EXPECT_EQ(error.argument(), argument);
        }
    };
    refused(how, {2, 0, 0}, "batch");
    refused(how, {0, 2, 0}, "head");
    refused(how, {0, 0, 150}, "row");
    refused(how, {0, 0, -1}, "row");
    refused(plan(c.problem, {.backend = Backend::reference}), {0, 0, 0}, "plan");
    if (plan(c.problem, {.backend = Backend::cpu, .threads = 2}).threads == 2)
        refused(plan(c.problem, {.backend = Backend::cpu, .threads = 2}), {0, 0, 0}, "threads");
}

TEST(Trace, rows_that_see_no_key_end_as_zeros) {
    Problem p = small_problem(Causal::bottom_right, 150, 100);  // the first 50 queries see nothing
    Case c(p);
    for (const Schedule schedule : {Schedule::standard, Schedule::fa1, Schedule::fa2}) {
        const Trace trace = trace_forward(plan_of(p, schedule, Pass::forward), c.forward_args(), {1, kHead, 3});
        EXPECT_EQ(trace.count(Coverage::full) + trace.count(Coverage::partial), 0);
        const Step& last = trace.steps.back();
        ASSERT_EQ(last.step, TileStep::finish) << name_of(schedule);
        for (const float o : last.o.values) EXPECT_EQ(o, 0);
        EXPECT_EQ(last.l[3], 0);
    }
}

}  // namespace
}  // namespace tessera::walk::trace_test
