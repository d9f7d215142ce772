// SPDX-License-Identifier: Apache-2.0
//
// The scheduler without a model: what holds in every step of random runs.
#include <gtest/gtest.h>

#include <random>
#include <set>

#include "llama/scheduler.hpp"
#include "llama/support.hpp"

namespace llama::test::scheduler_test {
namespace {

/// Random limits, and requests that arrive in the middle of the run.
struct RandomRun {
    std::mt19937 random;
    std::int64_t page_size;
    std::int32_t pages;
    SchedulerOptions options;
    Scheduler scheduler;
    std::int64_t submitted = 0, finished = 0;

    std::int64_t draw(std::int64_t low, std::int64_t high) {
        return std::uniform_int_distribution<std::int64_t>(low, high)(random);
    }

    explicit RandomRun(unsigned seed)
        : random(seed),
          page_size(draw(1, 9)),
          pages(static_cast<std::int32_t>(draw(6, 40))),
          options{.running = draw(1, 6)},
          scheduler(limited(), pages, page_size) {}

    SchedulerOptions limited() {
        options.step_tokens = options.running + draw(0, 20);
        return options;
    }

    void submit_some() {
        for (std::int64_t n = draw(0, 3); n > 0 && submitted < 20; --n) {
            const std::int64_t most = pages * page_size + 1;
            const std::int64_t prompt = draw(1, std::min<std::int64_t>(most - 1, 60));
            Request request{.prompt = std::vector<std::int32_t>(static_cast<std::size_t>(prompt), 1)};
            request.new_tokens = draw(1, std::min<std::int64_t>(most - prompt, 30));
            scheduler.submit(request, submitted++);
        }
    }

    void check(const std::vector<Chunk>& chunks, const Batch& batch) {
        ASSERT_LE(batch.rows(), options.step_tokens);
        ASSERT_LE(static_cast<std::int64_t>(scheduler.running()), options.running);
        ASSERT_EQ(batch.sequences(), static_cast<std::int64_t>(chunks.size()));
        std::set<std::int32_t> owned;
        std::int64_t held = 0;
        for (const auto& [sequence, count] : chunks) {
            ASSERT_GE(count, 1);
            ASSERT_LE(sequence->cached + count, sequence->size());
            ASSERT_LE(sequence->cached + count, static_cast<std::int64_t>(sequence->pages.size()) * page_size);
            owned.insert(sequence->pages.begin(), sequence->pages.end());
            held += static_cast<std::int64_t>(sequence->pages.size());
        }
        ASSERT_EQ(static_cast<std::int64_t>(owned.size()), held) << "two sequences have the same page";
        ASSERT_EQ(held, scheduler.pages().used()) << "a sequence that does not run has pages";
        const std::set<std::int64_t> slots(batch.slots.begin(), batch.slots.end());
        ASSERT_EQ(static_cast<std::int64_t>(slots.size()), batch.rows()) << "two rows go to the same slot";
    }

    /// Takes a step as the engine does, with tokens of its own.
    void finish_step(const std::vector<Chunk>& chunks, const Batch& batch) {
        std::size_t wanted = 0;
        for (const auto& [sequence, count] : chunks) {
            sequence->cached += count;
            if (sequence->cached < sequence->size()) continue;
            ++wanted;
            sequence->tokens.push_back(2);
            if (sequence->size() < sequence->most && draw(0, 19) > 0) continue;
            scheduler.finish(*sequence);
            ++finished;
        }
        ASSERT_EQ(batch.wanted_rows.size(), wanted);
    }
};

TEST(Scheduler, random_runs_keep_their_limits_and_end) {
    std::int64_t preemptions = 0;
    for (unsigned seed = 0; seed < 300; ++seed) {
        RandomRun run(seed);
        for (int step = 0; step < 20'000; ++step) {
            run.submit_some();
            const std::vector<Chunk> chunks = run.scheduler.next();
            if (chunks.empty()) {
                ASSERT_EQ(run.finished, run.submitted) << "nothing runs, and requests wait; seed " << seed;
                if (run.submitted == 20) break;
                continue;
            }
            const Batch batch = run.scheduler.batch(chunks);
            run.check(chunks, batch);
            run.finish_step(chunks, batch);
            if (testing::Test::HasFatalFailure()) FAIL() << "seed " << seed << ", step " << step;
        }
        ASSERT_EQ(run.finished, 20) << "seed " << seed;
        ASSERT_EQ(run.scheduler.pages().used(), 0) << "seed " << seed;
        preemptions += run.scheduler.preemptions();
    }
    EXPECT_GT(preemptions, 300);  // the runs are tight enough to test them
}

}  // namespace
}  // namespace llama::test::scheduler_test
