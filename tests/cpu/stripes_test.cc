// SPDX-License-Identifier: Apache-2.0
#include "cpu/fa2/matrix/stripes.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "check/run_case.hpp"

namespace tessera::cpu::fa2::matrix_path::stripes_test {
namespace {

/// Every block comes once. A stripe takes its blocks in order, each after the previous stripe has taken it.
TEST(Stripes, blocks_come_once_and_in_order) {
    constexpr std::int64_t kHeads = 5, kStripes = 3;
    for (const int threads : {1, 2, 8}) {
        Stripes stripes(kHeads, kStripes);
        std::int64_t all = 0;
        for (std::int64_t head = 0; head < kHeads; ++head) {
            stripes.set_blocks(head, head + 1);
            all += kStripes * (head + 1);
        }
        std::atomic<std::int64_t> done[kHeads][kStripes] = {};
        std::atomic<std::int64_t> blocks{0};
        std::atomic<int> wrong{0};
        const auto run = [&](const Stripes::Block& b) {
            ++blocks;
            const bool in_order = done[b.head][b.stripe] == b.block;
            const bool after_the_one_before = b.stripe == 0 || done[b.head][b.stripe - 1] > b.block;
            const bool last = b.last_of_stripe == (b.block == b.head) && b.last_of_block == (b.stripe == kStripes - 1);
            if (!in_order || !after_the_one_before || !last) ++wrong;
            std::this_thread::yield();
            ++done[b.head][b.stripe];
        };
        std::vector<std::thread> workers;
        for (int i = 0; i < threads; ++i) workers.emplace_back([&] { stripes.work(run); });
        for (std::thread& worker : workers) worker.join();
        EXPECT_EQ(blocks, all);
        EXPECT_EQ(wrong, 0);
    }
}

TEST(Stripes, an_exception_ends_all_workers) {
    Stripes stripes(2, 2);
    stripes.set_blocks(0, 50);
    stripes.set_blocks(1, 50);
    std::atomic<int> thrown{0};
    std::vector<std::thread> workers;
    for (int i = 0; i < 4; ++i) {
        workers.emplace_back([&] {
            try {
                stripes.work([](const Stripes::Block& b) {
                    if (b.block == 3) throw std::runtime_error("stop");
                });
            } catch (const std::runtime_error&) {
                ++thrown;
            }
        });
    }
    for (std::thread& worker : workers) worker.join();
    EXPECT_GE(thrown, 1);
}

/// Three stripes and three key blocks per head, with own or shared keys. (tests/kernels/properties_test.cc checks that
/// threads change no bit.)
TEST(Stripes, make_a_right_backward) {
    for (const auto& [dtype, heads_kv] :
         {std::pair{DType::bf16, 4}, std::pair{DType::fp32, 4}, std::pair{DType::bf16, 2}, std::pair{DType::fp32, 1}}) {
        check::Case c{.id = "stripes", .seed = 3};
        c.problem = {.dtype = dtype,
                     .batch = 1,
                     .len_q = 300,
                     .len_kv = 600,
                     .heads_q = 4,
                     .heads_kv = heads_kv,
                     .head_dim = 16,
                     .head_dim_v = 16};
        c.problem.mask.causal = Causal::bottom_right;
        c.threads = 3;
        check::CaseRunner runner(c);
        for (const KernelInfo& kernel : kernels()) {
            if (kernel.name != "cpu.fa2.backward") continue;
            const check::Outcome outcome = runner.run(kernel);
            EXPECT_TRUE(outcome.pass()) << outcome.report.describe();
        }
    }
}

}  // namespace
}  // namespace tessera::cpu::fa2::matrix_path::stripes_test
