// SPDX-License-Identifier: Apache-2.0
//
// A row of O and LSE has the same bits in a full prefill, in chunks, alone, in any batch and on any number of threads,
// and gradients have the same bits among any other heads, for CPU kernels and the reference. cuda_row_bits_test.cc
// tests CUDA kernels.
#include "kernels/row_bits.hpp"

#include <gtest/gtest.h>

namespace tessera::check::row_bits_test {
namespace {

struct Call {
    std::string name;
    std::int64_t len, heads_q, heads_kv, head_dim;
    DType dtype;
    Mask mask{.causal = Causal::bottom_right};
    double softcap = 0;
    bool alibi = false;

    Problem problem() const {
        Problem p = make_problem(1, len, len, heads_q, heads_kv, head_dim, dtype);
        p.mask = mask;
        p.softcap = softcap;
        p.alibi = alibi;
        return p;
    }
};
void PrintTo(const Call& call, std::ostream* out) { *out << call.problem().describe(); }

/// Lengths that are several tiles of keys and of queries, and no multiple of any.
const Call kCalls[] = {
    {"fp32", 333, 2, 2, 64, DType::fp32},
    {"fp32_grouped", 333, 4, 1, 40, DType::fp32},
    {"bf16", 333, 2, 2, 64, DType::bf16},
    {"bf16_grouped", 400, 8, 2, 128, DType::bf16},
    {"bf16_wide", 270, 2, 1, 256, DType::bf16},
    {"fp16", 333, 2, 2, 80, DType::fp16},
    {"long_rows", 2100, 1, 1, 32, DType::bf16},
    {"window", 400, 2, 2, 64, DType::fp32, {.causal = Causal::bottom_right, .window_left = 100}},
    {"softcap", 300, 2, 2, 64, DType::bf16, {.causal = Causal::bottom_right}, 20},
    {"alibi", 300, 2, 2, 64, DType::fp32, {.causal = Causal::bottom_right}, 0, true},
};

class RowBits : public testing::TestWithParam<Call> {
 protected:
    /// Calls f for each kernel that is not on a GPU and takes the call, after it computed `whole`.
    template <class F>
    void for_each_host_kernel(Attention& whole, F&& f) {
        int ran = 0;
        for_each_kernel(Pass::forward, [&](const KernelInfo& kernel) {
            if (kernel.backend == Backend::cuda || (kernel.backend == Backend::reference && !is_small(whole))) return;
            if (!whole.forward(kernel)) return;
            f(kernel);
            ++ran;
        });
        EXPECT_GE(ran, 3) << whole.problem.describe();
    }

 private:
    /// Is the call small enough for the reference, which is slow?
    static bool is_small(const Attention& whole) {
        return whole.q.view.size() <= std::int64_t{333} * 2 * 64 && whole.problem.len_kv < 1000;
    }
};

TEST_P(RowBits, parts_of_a_causal_call_have_the_bits_of_the_whole) {
    Attention whole(GetParam().problem());
    for_each_host_kernel(whole, [&](const KernelInfo& kernel) {
        for (const Part& cut : causal_parts(GetParam().len, {1, 2, 7, 70, 200})) expect_same_rows(whole, kernel, cut);
    });
}

TEST_P(RowBits, parts_have_them_among_other_members_and_on_more_threads) {
    Attention whole(GetParam().problem());
    for_each_host_kernel(whole, [&](const KernelInfo& kernel) {
        for (const Part& cut : causal_parts(GetParam().len, {1, 150})) {
            expect_same_rows(whole, kernel, cut, 3, 1);
            expect_same_rows(whole, kernel, cut, 1, 3);
        }
    });
}

/// Without a mask a row sees the same keys if any neighbouring queries are left out.
TEST_P(RowBits, queries_without_a_mask_have_the_same_bits_alone) {
    Problem p = GetParam().problem();
    p.mask = {};
    Attention whole(p);
    for_each_host_kernel(whole, [&](const KernelInfo& kernel) {
        for (const std::int64_t size : {1, 5, 64}) {
            // ALiBi counts from the last query, so only the last ones keep their distances.
            for (const std::int64_t first : {std::int64_t{0}, p.len_q / 2, p.len_q - size}) {
                if (p.alibi && first + size != p.len_q) continue;
                expect_same_rows(whole, kernel, {first, size, p.len_kv}, 1, 2);
            }
        }
    });
}

/// Other tiles of keys give a row other last bits. If the comparison missed that, the tests above would miss it, too.
TEST(RowBitsOfTiles, are_those_of_one_order_of_the_keys) {
    Attention whole(kCalls[0].problem());
    for_each_kernel(Pass::forward, [&](const KernelInfo& kernel) {
        if (kernel.name != "cpu.fa2.forward") return;
        ASSERT_TRUE(whole.forward(kernel, {.tile = Tile{32, 96}}));
        const Part all{0, kCalls[0].len, kCalls[0].len};
        Attention part = call_of(whole, all);
        ASSERT_TRUE(part.forward(kernel, {.tile = Tile{32, 16}}));
        EXPECT_NE(first_other_row(whole, all, part, 0), -1);
    });
}

/// The promise holds within one kernel, so the choice of the kernel must not depend on the number of queries.
TEST_P(RowBits, plan_takes_the_same_kernel_for_every_part) {
    const Attention whole(GetParam().problem());
    const Plan chosen = plan(whole.problem, {.backend = Backend::cpu});
    for (const Part& cut : causal_parts(GetParam().len, {1, 7, 64, 200})) {
        const Plan of_part = plan(call_of(whole, cut).problem, {.backend = Backend::cpu});
        EXPECT_EQ(of_part.kernel, chosen.kernel) << cut.queries << " queries on " << cut.keys << " keys";
        EXPECT_EQ(of_part.tile.block_kv, chosen.tile.block_kv) << cut.queries << " queries on " << cut.keys << " keys";
    }
}

TEST_P(RowBits, gradients_of_a_head_have_the_same_bits_among_others) {
    Problem p = GetParam().problem();
    if (p.alibi) GTEST_SKIP() << "each head has a slope of its own";
    p.len_q = p.len_kv = std::min(p.len_q, std::int64_t{700});
    p.heads_q = p.group();
    p.heads_kv = 1;
    Attention alone(p);
    alone.prepare_backward();
    int ran = 0;
    for_each_kernel(Pass::backward, [&](const KernelInfo& kernel) {
        if (kernel.backend == Backend::cpu) ran += expect_same_gradients(alone, kernel, 5, 3) ? 1 : 0;
    });
    EXPECT_GE(ran, 3);
}

INSTANTIATE_TEST_SUITE_P(Calls, RowBits, testing::ValuesIn(kCalls), [](const auto& which) { return which.param.name; });

}  // namespace
}  // namespace tessera::check::row_bits_test
