// SPDX-License-Identifier: Apache-2.0
#include "parallel.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cfenv>
#include <chrono>
#include <cstdlib>
#include <stdexcept>
#include <thread>
#include <vector>

#include "core/case.hpp"

namespace tessera::test::parallel_test {
namespace {

TEST(TbbParallelFor, runs_every_task_once_and_shares_no_worker) {
    for (const std::int64_t tasks : {0, 1, 2, 7, 1000}) {
        for (const int workers : {1, 2, 3, 8, 64}) {
            std::vector<std::atomic<int>> runs(static_cast<std::size_t>(tasks));
            std::vector<std::atomic<bool>> busy(static_cast<std::size_t>(workers));
            std::atomic<bool> shared{false}, out_of_range{false};
            default_parallel_for(tasks, workers, [&](std::int64_t task, int worker) {
                if (worker < 0 || worker >= workers) {
                    out_of_range = true;
                    return;
                }
                auto& mine = busy[static_cast<std::size_t>(worker)];
                if (mine.exchange(true)) shared = true;
                runs.at(static_cast<std::size_t>(task)).fetch_add(1);
                if (task % 100 == 0) std::this_thread::sleep_for(std::chrono::microseconds(50));
                mine = false;
            });
            EXPECT_FALSE(shared || out_of_range) << tasks << " tasks, " << workers << " workers";
            EXPECT_TRUE(std::all_of(runs.begin(), runs.end(), [](const auto& n) { return n == 1; })) << tasks;
        }
    }
}

TEST(TbbParallelFor, one_worker_runs_in_order_on_the_calling_thread) {
    std::vector<std::int64_t> order;
    const auto caller = std::this_thread::get_id();
    default_parallel_for(5, 1, [&](std::int64_t task, int worker) {
        EXPECT_EQ(worker, 0);
        EXPECT_EQ(std::this_thread::get_id(), caller);
        order.push_back(task);
    });
    EXPECT_EQ(order, (std::vector<std::int64_t>{0, 1, 2, 3, 4}));
}

TEST(TbbParallelFor, exceptions_reach_the_caller) {
    for (const int workers : {1, 2, 8}) {
        for (const std::int64_t bad : {0, 37, 99}) {
            try {
                default_parallel_for(100, workers, [&](std::int64_t task, int) {
                    if (task == bad) throw std::runtime_error("task " + std::to_string(task));
                });
                ADD_FAILURE() << "no exception with " << workers << " workers";
            } catch (const std::runtime_error& e) {
                EXPECT_EQ(e.what(), "task " + std::to_string(bad));
            }
        }
    }
}

TEST(TbbParallelFor, nests_and_runs_from_several_threads_at_once) {
    std::atomic<std::int64_t> sum{0};
    const auto outer = [&] {
        default_parallel_for(8, 4, [&](std::int64_t, int) {
            default_parallel_for(16, 3, [&](std::int64_t task, int) { sum += task; });
        });
    };
    std::vector<std::thread> callers;
    for (int i = 0; i < 3; ++i) callers.emplace_back(outer);
    for (std::thread& t : callers) t.join();
    EXPECT_EQ(sum, 3 * 8 * 120);
}

TEST(TbbParallelForDeathTest, prints_nothing_when_asked_for_more_threads_than_there_are) {
    // oneTBB warns on stderr, once in a process, about arenas wider than its worker pool; the library never prints.
    GTEST_FLAG_SET(death_test_style, "threadsafe");  // runs the test in a new process
    const auto many_threads = [] {
        default_parallel_for(2000, 1024, [](std::int64_t, int) {});
        std::exit(0);
    };
    EXPECT_EXIT(many_threads(), ::testing::ExitedWithCode(0), ::testing::Eq(""));
}

/// The kernels of this build that run on the host and take the case, forward and backward.
template <class F>
void for_each_host_kernel(const Problem& p, const F& f) {
    for (const KernelInfo& k : kernels()) {
        if (k.backend == Backend::cuda) continue;
        try {
            plan(p, {.pass = k.pass, .kernel = k.name});
        } catch (const Error&) {
            continue;
        }
        f(k);
    }
}

void run(const Case& c, const Plan& p, const Execution& how) {
    const Workspace workspace(p);
    if (p.pass == Pass::forward) forward(p, c.forward_args(), workspace, how);
    else backward(p, c.backward_args(), workspace, how);
}

TEST(Calls, print_nothing) {
    testing::internal::CaptureStdout();
    testing::internal::CaptureStderr();
    Problem p = Problem::dense(2, 70, 4, 16);
    p.mask.causal = Causal::bottom_right;
    const Case clean(p);
    for_each_host_kernel(p, [&](const KernelInfo& kernel) {
        Case c = clean;
        c.run_forward();
        const Plan chosen = plan(p, {.pass = kernel.pass, .kernel = kernel.name});
        run(c, chosen, {});
        EXPECT_THROW(forward(chosen, {}, Workspace(chosen)), Error) << "no tensors";
        EXPECT_THROW(plan(p, {.kernel = kernel.name, .tile = Tile{3000, 3000}}), Error) << "no such tile";
    });
    const std::string err = testing::internal::GetCapturedStderr();
    EXPECT_EQ(testing::internal::GetCapturedStdout(), "");
    EXPECT_EQ(err, "");
}

TEST(Injected, parallel_for_is_used_within_the_plans_threads) {
    Problem p = Problem::dense(2, 70, 4, 16);
    p.mask.causal = Causal::bottom_right;
    for_each_host_kernel(p, [&](const KernelInfo& kernel) {
        for (const int threads : {1, 3}) {
            Case c(p);
            c.run_forward();
            const Case clean = c;
            std::int64_t calls = 0, bodies = 0;
            Execution how;
            how.parallel_for = [&](std::int64_t tasks, int workers, const TaskBody& body) {
                ++calls;
                EXPECT_GE(workers, 1);
                EXPECT_LE(workers, threads) << kernel.name;
                // The order is free, and any worker may take any task: last first, workers in turn.
                for (std::int64_t task = tasks; task-- > 0; ++bodies) body(task, static_cast<int>(task % workers));
            };
            const Plan chosen = plan(p, {.pass = kernel.pass, .kernel = kernel.name, .threads = threads});
            run(c, chosen, how);
            EXPECT_GE(calls, 1) << kernel.name;
            EXPECT_GE(bodies, 1) << kernel.name;
            Case own = clean;
            run(own, chosen, {});
            for (Tensor Case::*t : {&Case::o, &Case::lse, &Case::dq, &Case::dk, &Case::dv}) {
                EXPECT_EQ(bits(c.*t), bits(own.*t)) << kernel.name << " with " << threads << " threads";
            }
        }
    });
}

TEST(Injected, exceptions_of_the_loop_reach_the_caller) {
    const Problem p = Problem::dense(1, 40, 2, 16);
    for_each_host_kernel(p, [&](const KernelInfo& kernel) {
        const Case c(p);
        Execution how;
        how.parallel_for = [](std::int64_t, int, const TaskBody&) {
            throw std::runtime_error("cancelled by the caller");
        };
        const Plan chosen = plan(p, {.pass = kernel.pass, .kernel = kernel.name});
        EXPECT_THROW(run(c, chosen, how), std::runtime_error) << kernel.name;
    });
}

/// Runs every second task on the calling thread, each other one on a new thread that rounds to nearest.
void half_elsewhere(std::int64_t tasks, int workers, const TaskBody& body) {
    for (std::int64_t task = 0; task < tasks; ++task) {
        if (workers == 1 || task % 2 == 0) {
            body(task, 0);
            continue;
        }
        std::thread([&] {
            std::fesetround(FE_TONEAREST);
            body(task, 1);
        }).join();
    }
}

/// Quotients in the current rounding mode, which differ between the modes. std::fegetround() would not do: on x86-64 it
/// asks the x87 unit, which no kernel uses.
std::array<double, 3> rounded_quotients() {
    const volatile double one = 1, two = 2, three = 3;
    return {one / three, -one / three, two / three};
}

TEST(Threads, the_callers_rounding_does_not_enter) {
    for (const DType dtype : {DType::fp32, DType::bf16}) {
        Problem p = Problem::dense(2, 70, 2, 16, dtype);
        p.softcap = 5;
        for_each_host_kernel(p, [&](const KernelInfo& kernel) {
            const Plan chosen = plan(p, {.pass = kernel.pass, .kernel = kernel.name, .threads = 2});
            Case c(p);
            c.run_forward();
            Case nearest = c;
            run(nearest, chosen, {});
            for (const int mode : {FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO}) {
                for (const bool own_loop : {true, false}) {
                    Case other = c;
                    std::fesetround(mode);
                    const auto before = rounded_quotients();
                    run(other, chosen, {.parallel_for = own_loop ? ParallelFor() : ParallelFor(half_elsewhere)});
                    const auto after = rounded_quotients();
                    std::fesetround(FE_TONEAREST);
                    EXPECT_EQ(after, before) << kernel.name;
                    for (Tensor Case::*t : {&Case::o, &Case::lse, &Case::dq, &Case::dk, &Case::dv})
                        EXPECT_EQ(bits(other.*t), bits(nearest.*t)) << kernel.name << " " << name_of(dtype);
                }
            }
        });
    }
}

TEST(Threads, one_plan_serves_concurrent_calls) {
    const Problem p = Problem::dense(2, 50, 2, 16);
    for_each_host_kernel(p, [&](const KernelInfo& kernel) {
        const Plan chosen = plan(p, {.pass = kernel.pass, .kernel = kernel.name, .threads = 2});
        Case first(p);
        first.run_forward();
        std::vector<Case> cases(3, first);
        std::vector<std::thread> callers;
        for (Case& c : cases) callers.emplace_back([&c, &chosen] { run(c, chosen, {}); });
        for (std::thread& t : callers) t.join();
        run(first, chosen, {});
        for (const Case& c : cases) {
            EXPECT_EQ(bits(c.o), bits(first.o)) << kernel.name;
            EXPECT_EQ(bits(c.dk), bits(first.dk)) << kernel.name;
        }
    });
}

}  // namespace
}  // namespace tessera::test::parallel_test
