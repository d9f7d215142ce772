// SPDX-License-Identifier: Apache-2.0
#include "model/timeline.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include "schedule/fast_memory.hpp"
#include "tessera/error.hpp"

namespace tessera::model::timeline_test {
namespace {

schedule::Workload workload(Schedule schedule, Pass pass = Pass::forward) {
    schedule::Workload w{.problem = Problem::dense(1, 1024, 1, 128), .schedule = schedule, .pass = pass};
    w.problem.dtype = DType::bf16;
    w.problem.mask.causal = Causal::bottom_right;
    w.tile = {128, 128};
    return w;
}

const Machine& h200() { return *find_machine("h200"); }

double end_of(const std::vector<TimedStep>& steps) {
    double end = 0;
    for (const TimedStep& s : steps) end = std::max(end, s.end_us);
    return end;
}

TEST(Timeline, its_steps_are_those_of_the_schedule) {
    for (const Schedule schedule : kSchedules) {
        for (const Pass pass : {Pass::forward, Pass::backward}) {
            const schedule::Workload w = workload(schedule, pass);
            schedule::Work sum;
            for (const TimedStep& s : timeline(w, h200())) sum += s.step.work;
            EXPECT_EQ(sum, schedule::cost(w).work) << name_of(schedule) << ' ' << name_of(pass);
        }
    }
}

TEST(Timeline, a_unit_does_one_step_at_a_time) {
    for (const Schedule schedule : kSchedules) {
        std::map<Unit, double> free;
        for (const TimedStep& s : timeline(workload(schedule), h200())) {
            EXPECT_GE(s.begin_us, free[s.unit]) << name_of(schedule);
            EXPECT_GE(s.end_us, s.begin_us);
            free[s.unit] = s.end_us;
        }
    }
}

/// Microseconds in which products and exponentials run at once.
double overlap_of(const std::vector<TimedStep>& steps) {
    double overlap = 0;
    for (const TimedStep& a : steps) {
        for (const TimedStep& b : steps) {
            if (a.unit == Unit::gemms && b.unit == Unit::exps)
                overlap += std::max(0.0, std::min(a.end_us, b.end_us) - std::max(a.begin_us, b.begin_us));
        }
    }
    return overlap;
}

TEST(Timeline, fa3_hides_exponentials_that_fa2_waits_for) {
    const auto fa2 = timeline(workload(Schedule::fa2), h200());
    const auto fa3 = timeline(workload(Schedule::fa3), h200());
    double exps = 0;
    for (const TimedStep& s : fa3) exps += s.unit == Unit::exps ? s.end_us - s.begin_us : 0;
    EXPECT_EQ(overlap_of(fa2), 0);
    EXPECT_GT(overlap_of(fa3), exps / 2);
    EXPECT_LT(end_of(fa3), end_of(fa2));
}

TEST(Timeline, standard_waits_for_memory_most) {
    const auto steps = timeline(workload(Schedule::standard), h200());
    std::map<Unit, double> busy;
    for (const TimedStep& s : steps) busy[s.unit] += s.end_us - s.begin_us;
    EXPECT_GT(busy[Unit::memory], busy[Unit::gemms] + busy[Unit::exps]);
    EXPECT_GT(end_of(steps), 2 * end_of(timeline(workload(Schedule::fa2), h200())));
}

TEST(Timeline, refuses_a_dtype_that_the_machine_lacks) {
    const Machine* t4 = find_machine("t4");
    ASSERT_NE(t4, nullptr);
    EXPECT_THROW(timeline(workload(Schedule::fa2), *t4), Error);
}

TEST(FastMemory, counts_each_part_of_a_tile_once) {
    const schedule::FastMemory near = schedule::fast_memory(workload(Schedule::fa2));
    EXPECT_EQ(near.q, 128 * 128 * 2);
    EXPECT_EQ(near.k, near.q);
    EXPECT_EQ(near.loaded(), 3 * 128 * 128 * 2);
    EXPECT_EQ(near.scores, 128 * 128 * 4);
    EXPECT_EQ(near.o, 128 * (128 * 4 + 8));  // O, m and l of its queries
    EXPECT_EQ(schedule::fast_memory_of_whole_rows(workload(Schedule::fa2)).scores, 128 * 1024 * 4);
    // 227 KiB less Q's 32, for K and V of 512 bytes a key, once and twice.
    EXPECT_EQ(schedule::most_keys(workload(Schedule::fa2), 227 * 1024, 1, false), 195 * 1024 / 512);
    EXPECT_EQ(schedule::most_keys(workload(Schedule::fa2), 227 * 1024, 2, false), 195);
    EXPECT_EQ(schedule::most_keys(workload(Schedule::fa2), 1024, 1, false), 0);
}

}  // namespace
}  // namespace tessera::model::timeline_test
