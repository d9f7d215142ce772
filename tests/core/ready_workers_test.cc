// SPDX-License-Identifier: Apache-2.0
#include "ready_workers.hpp"

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <thread>

namespace tessera::ready_workers_test {
namespace {

/// A worker finds its data of the previous call in its core's cache only if it is the same thread.
TEST(ReadyWorkers, a_place_has_the_same_thread_in_every_call) {
    constexpr int kWorkers = 4;
    std::array<std::thread::id, kWorkers> threads{};
    for (int call = 0; call < 200; ++call) {
        const int workers = 2 + call % (kWorkers - 1);
        std::atomic<int> joined{0};
        std::atomic<int> wrong{0};
        ASSERT_TRUE(run_on_ready_workers(workers, [&](int worker) {
            if (worker < 0 || worker >= workers) ++wrong;
            std::thread::id& thread = threads.at(static_cast<std::size_t>(worker));
            if (thread == std::thread::id{}) thread = std::this_thread::get_id();
            if (thread != std::this_thread::get_id()) ++wrong;
            ++joined;
            for (int i = 0; i < 1000 && joined < workers; ++i) std::this_thread::yield();  // so that others join
        }));
        EXPECT_EQ(wrong, 0) << call;
    }
    EXPECT_EQ(threads[0], std::this_thread::get_id());
    EXPECT_NE(threads[1], std::thread::id{}) << "no second thread ever came";
}

TEST(ReadyWorkers, one_call_at_a_time) {
    bool inner = true;
    ASSERT_TRUE(run_on_ready_workers(2, [&](int worker) {
        if (worker == 0) inner = run_on_ready_workers(2, [](int) {});
    }));
    EXPECT_FALSE(inner);
}

}  // namespace
}  // namespace tessera::ready_workers_test
