// SPDX-License-Identifier: Apache-2.0
//
// fp32 as three bf16 parts on a GPU (cuda/tile/parts.cuh): both tiles of the backward, and numbers that parts do not
// hold. Skipped without a GPU.
#include <gtest/gtest.h>

#include <stdexcept>

#include "kernels/support.hpp"
#include "registry.hpp"

namespace tessera::check::cuda_fp32_parts_test {
namespace {

const KernelInfo& kernel_of(std::string_view name) {
    for (const KernelInfo& kernel : kernels()) {
        if (kernel.name == name) return kernel;
    }
    throw std::runtime_error("no such kernel");
}

class CudaFp32Parts : public testing::Test {
 protected:
    void SetUp() override {
        if (const auto reason = unavailable({DeviceType::cuda, 0})) GTEST_SKIP() << *reason;
    }
};

/// Only a device with less shared memory takes the smaller tile by itself, so on an H200 no other test runs it.
TEST_F(CudaFp32Parts, every_tile_of_the_backward_is_right) {
    for (const bool general : {false, true}) {
        for (const Causal causal : {Causal::none, Causal::bottom_right}) {
            Problem p = make_problem(2, 200, 270, 4, 2, 64);
            p.mask.causal = causal;
            if (general) {
                p.softcap = 20;
                p.bias = p.alibi = true;
                p.dropout = {.probability = 0.2, .seed = 3};
            }
            Attention a(p, 5);
            a.prepare_backward();
            for (const std::int64_t block_kv : {64, 128}) {
                if (!a.backward(kernel_of("cuda.fa2.backward"), {.tile = Tile{64, block_kv}})) continue;
                EXPECT_TRUE(a.check_backward().pass()) << block_kv << "\n" << a.check_backward().describe();
            }
        }
    }
}

/// One query of tiny numbers and one key of huge ones, whose products are ordinary.
void make_extreme(Attention& a, std::int64_t query, std::int64_t key) {
    for (std::int64_t c = 0; c < a.problem.head_dim; ++c) {
        a.q.set(a.q.get(0, query, 0, c) * 1e-36, 0, query, 0, c);
        a.k.set(a.k.get(0, key, 0, c) * 1e36, 0, key, 0, c);
    }
}

TEST_F(CudaFp32Parts, tiny_numbers_beside_huge_ones_are_right) {
    for (const std::int64_t head_dim : {64, 128, 256}) {
        Attention a(make_problem(1, 70, 90, 1, 1, head_dim), 7);
        make_extreme(a, 3, 60);
        expect_forward_right(a, Backend::cuda);
        a.prepare_backward();
        if (!a.backward(kernel_of("cuda.fa2.backward"))) continue;
        EXPECT_TRUE(a.check_backward().pass()) << head_dim << "\n" << a.check_backward().describe();
    }
}

/// Products that are computed another way do not change the bits of rows beside them.
TEST_F(CudaFp32Parts, such_numbers_change_no_bit_of_other_rows) {
    for (const std::int64_t head_dim : {64, 128, 256}) {
        Problem p = make_problem(1, 64, 64, 1, 1, head_dim);
        p.mask.causal = Causal::bottom_right;
        constexpr std::int64_t kTiny = 3;
        constexpr std::int64_t kHuge = 60;
        Attention plain(p, 7);
        Attention extreme(p, 7);
        make_extreme(extreme, kTiny, kHuge);
        ASSERT_TRUE(plain.forward(kernel_of("cuda.fa2.forward")));
        ASSERT_TRUE(extreme.forward(kernel_of("cuda.fa2.forward")));
        for (std::int64_t query = 0; query < kHuge; ++query) {
            if (query == kTiny) continue;
            EXPECT_EQ(extreme.lse.get(0, 0, query), plain.lse.get(0, 0, query)) << query;
            for (std::int64_t c = 0; c < head_dim; ++c) {
                EXPECT_EQ(extreme.o.get(0, query, 0, c), plain.o.get(0, query, 0, c)) << query << ", " << c;
            }
        }
    }
}

}  // namespace
}  // namespace tessera::check::cuda_fp32_parts_test
