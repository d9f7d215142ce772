// SPDX-License-Identifier: Apache-2.0
//
// A row of O and LSE from a CUDA kernel has the same bits in a full prefill, in chunks, alone and in any batch. Skipped
// without a GPU.
#include <gtest/gtest.h>

#include "kernels/row_bits.hpp"
#include "registry.hpp"

namespace tessera::check::cuda_row_bits_test {
namespace {

struct Heads {
    std::int64_t q, kv;
};

/// Runs all CUDA kernels that take the call; the dtype is bf16 or fp16.
class CudaRowBits : public testing::TestWithParam<std::int64_t> {  // head_dim
 protected:
    void SetUp() override {
        if (const auto reason = unavailable({DeviceType::cuda, 0})) GTEST_SKIP() << *reason;
    }

    static void expect_parts(const Problem& problem, const std::vector<Part>& parts,
                             const std::vector<std::int64_t>& batches) {
        Attention whole(problem);
        for_each_kernel(Pass::forward, [&](const KernelInfo& kernel) {
            if (kernel.backend != Backend::cuda || !whole.forward(kernel)) return;
            for (const Part& cut : parts) {
                for (const std::int64_t batch : batches) expect_same_rows(whole, kernel, cut, batch);
            }
        });
    }
};

Problem causal(std::int64_t len, Heads heads, std::int64_t head_dim, DType dtype) {
    Problem p = make_problem(1, len, len, heads.q, heads.kv, head_dim, dtype);
    p.mask.causal = Causal::bottom_right;
    return p;
}

/// Parts with few queries pack groups of 4 and 8 heads into tiles (PackGQA); the whole call does not.
TEST_P(CudaRowBits, parts_of_a_causal_call_have_the_bits_of_the_whole) {
    for (const DType dtype : {DType::bf16, DType::fp16}) {
        for (const Heads heads : {Heads{4, 4}, {8, 2}, {8, 1}}) {
            const std::int64_t len = 1537;
            expect_parts(causal(len, heads, GetParam(), dtype), causal_parts(len, {1, 2, 7, 64, 200, 1000}), {1});
        }
    }
}

TEST_P(CudaRowBits, parts_have_them_among_other_members) {
    for (const Heads heads : {Heads{4, 4}, {8, 1}}) {
        const std::int64_t len = 1537;
        std::vector<Part> parts;
        for (const std::int64_t n : {1, 3, 129, 1200}) {
            parts.push_back({len - n, n, len});
            parts.push_back({0, n, n});
        }
        expect_parts(causal(len, heads, GetParam(), DType::bf16), parts, {2, 40});
    }
}

TEST_P(CudaRowBits, a_window_moves_with_the_queries) {
    Problem p = causal(1537, {4, 2}, GetParam(), DType::bf16);
    p.mask.window_left = 300;
    expect_parts(p, causal_parts(1537, {1, 64, 700}), {1, 3});
}

TEST_P(CudaRowBits, queries_without_a_mask_have_the_same_bits_alone) {
    for (const Heads heads : {Heads{4, 4}, {8, 1}}) {
        const std::int64_t len = 2304;
        const Problem p = make_problem(1, len, len, heads.q, heads.kv, GetParam(), DType::bf16);
        std::vector<Part> parts;
        for (const std::int64_t n : {1, 5, 64, 500})
            for (const std::int64_t first : {std::int64_t{0}, len / 2, len - n}) parts.push_back({first, n, len});
        expect_parts(p, parts, {1, 3});
    }
}

/// Long causal rows of grouped heads.
TEST_P(CudaRowBits, long_rows_have_the_bits_of_their_parts) {
    const std::int64_t len = 8200;
    std::vector<Part> parts;
    for (const std::int64_t n : {1, 64, 1000, 4096}) {
        parts.push_back({len - n, n, len});
        parts.push_back({0, n, n});
    }
    expect_parts(causal(len, {2, 1}, GetParam(), DType::bf16), parts, {1});
}

INSTANTIATE_TEST_SUITE_P(HeadDims, CudaRowBits, testing::Values(64, 80, 128, 192, 256),
                         [](const auto& which) { return std::to_string(which.param); });

/// Gradients promise less: repeats, neighbours and other heads change no bit (cuda_gradients_test.cc). These tests
/// check it for batches whose sequences have any length, and for any number of heads.
class CudaRowBitsBackward : public CudaRowBits {};

TEST_P(CudaRowBitsBackward, a_member_has_the_bits_that_it_has_alone) {
    for (const Heads heads : {Heads{4, 4}, {8, 2}}) {
        Attention alone(causal(700, heads, GetParam(), DType::bf16));
        alone.prepare_backward();
        for (const std::int64_t batch : {3, 20}) {
            Problem p = alone.problem;
            p.batch = batch;
            Attention among(p, 9);
            among.prepare_backward();
            for (auto which : {&Attention::q, &Attention::k, &Attention::v, &Attention::d_o, &Attention::o})
                detail::copy_rows(alone.*which, 0, 700, among.*which, batch / 2);
            for (std::int64_t h = 0; h < heads.q; ++h)
                for (std::int64_t row = 0; row < 700; ++row) among.lse.set(alone.lse.get(0, h, row), batch / 2, h, row);
            for_each_kernel(Pass::backward, [&](const KernelInfo& kernel) {
                if (kernel.backend != Backend::cuda || !alone.backward(kernel)) return;
                ASSERT_TRUE(among.backward(kernel));
                for (auto which : {&Attention::dq, &Attention::dk, &Attention::dv}) {
                    const auto& part = (among.*which).memory;
                    const auto& own = (alone.*which).memory;
                    EXPECT_TRUE(std::equal(own.begin(), own.end(),
                                           part.begin() + batch / 2 * static_cast<std::ptrdiff_t>(own.size())))
                        << kernel.name << ": " << p.describe();
                }
            });
        }
    }
}

/// 2,304 keys are enough for segments of key blocks and for splits of a group (cuda/backward/host).
TEST_P(CudaRowBitsBackward, a_head_has_the_bits_that_it_has_alone) {
    for (const DType dtype : {DType::bf16, DType::fp16}) {
        for (const std::int64_t group : {1, 4}) {
            Attention alone(causal(2304, {group, 1}, GetParam(), dtype));
            for_each_kernel(Pass::forward, [&](const KernelInfo& kernel) {
                if (kernel.name != "cuda.fa2.forward") return;
                EXPECT_TRUE(alone.forward(kernel));
            });
            for_each_kernel(Pass::backward, [&](const KernelInfo& kernel) {
                if (kernel.backend != Backend::cuda || kernel.schedule == Schedule::standard) return;
                for (const std::int64_t heads : {2, 17}) expect_same_gradients(alone, kernel, heads, heads / 2);
            });
        }
    }
}

INSTANTIATE_TEST_SUITE_P(HeadDims, CudaRowBitsBackward, testing::Values(64, 128, 256),
                         [](const auto& which) { return std::to_string(which.param); });

}  // namespace
}  // namespace tessera::check::cuda_row_bits_test
