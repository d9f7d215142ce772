// SPDX-License-Identifier: Apache-2.0
//
// Promises of the backward on a GPU besides right numbers: the bits of a sequence's gradients depend on the sequence
// alone, key blocks add to a tile of dQ in one order, and invalid cu_seqlens never make a call hang. Skipped without a
// GPU.
#include <gtest/gtest.h>

#include <optional>

#include "kernels/support.hpp"
#include "registry.hpp"

namespace tessera::check::cuda_gradients_test {
namespace {

class CudaGradients : public testing::Test {
 protected:
    void SetUp() override {
        if (const auto reason = unavailable({DeviceType::cuda, 0})) GTEST_SKIP() << *reason;
    }
};

template <class F>
void for_each_cuda_kernel(const F& f) {
    for_each_kernel(Pass::backward, [&](const KernelInfo& kernel) {
        if (kernel.backend == Backend::cuda) f(kernel);
    });
}

struct Shape {
    std::int64_t len_q, len_kv, heads_q, heads_kv, head_dim;
    DType dtype;
    Mask mask;
};

/// Lengths that are several blocks of every kernel, and no multiple of any.
const Shape kShapes[] = {
    {333, 333, 4, 2, 64, DType::bf16, {}},
    {333, 401, 4, 2, 128, DType::fp16, {.causal = Causal::bottom_right}},
    {257, 300, 2, 2, 256, DType::bf16, {.causal = Causal::top_left}},
    {300, 260, 4, 2, 192, DType::bf16, {.window_left = 90, .window_right = 70}},
    {500, 500, 2, 1, 128, DType::bf16, {.causal = Causal::bottom_right, .window_left = 150}},
    {500, 500, 3, 1, 128, DType::bf16, {.causal = Causal::top_left}},
    {130, 700, 4, 1, 128, DType::bf16, {.window_left = 300, .window_right = 100}},
    {150, 170, 2, 1, 40, DType::fp32, {.causal = Causal::bottom_right}},
};

/// For fa3: a batch of nine of these has enough key blocks that the last one writes dQ; one sequence has too few.
const Shape kShapesOfManyHeads[] = {
    {200, 200, 64, 64, 64, DType::bf16, {.causal = Causal::top_left}},
    {260, 260, 48, 48, 128, DType::fp16, {.causal = Causal::bottom_right}},
    {200, 140, 64, 64, 128, DType::bf16, {}},
};
/// For fa3: head splits, in which CTAs share the query heads of a kv head (at 200, of 48 and of 64).
const Shape kShapesOfShares[] = {
    {270, 270, 32, 1, 64, DType::bf16, {.causal = Causal::bottom_right}},
    {270, 270, 64, 2, 128, DType::fp16, {.causal = Causal::top_left}},
    {200, 200, 64, 1, 128, DType::bf16, {.causal = Causal::top_left}},
    {200, 200, 48, 1, 192, DType::bf16, {.causal = Causal::bottom_right}},
    {200, 200, 64, 1, 256, DType::fp16, {.causal = Causal::bottom_right}},
};
/// For fa3: the key blocks of this shape start in segments.
const Shape kShapeInParts = {2111, 2111, 16, 16, 64, DType::bf16, {.causal = Causal::top_left}};

/// For fa2: several CTAs share the query heads of a group.
const Shape kShapesInShares[] = {
    {130, 130, 32, 1, 64, DType::bf16, {.causal = Causal::bottom_right}},
    {200, 333, 48, 1, 128, DType::fp16, {}},
    {150, 150, 70, 2, 128, DType::bf16, {.causal = Causal::top_left}},
    {140, 260, 32, 1, 200, DType::bf16, {.window_left = 100, .window_right = 40}},
};

Problem problem_of(const Shape& s, std::int64_t batch) {
    Problem p = make_problem(batch, s.len_q, s.len_kv, s.heads_q, s.heads_kv, s.head_dim, s.dtype);
    p.mask = s.mask;
    return p;
}

constexpr Tensor Attention::*kInputs[] = {&Attention::q, &Attention::k, &Attention::v, &Attention::d_o};
constexpr Tensor Attention::*kOutputs[] = {&Attention::dq, &Attention::dk, &Attention::dv};

void expect_the_same_bits_in_batches(const Shape& shape, const std::optional<Schedule>& only = {}) {
    Attention alone(problem_of(shape, 1), 3);
    alone.prepare_backward();
    for_each_cuda_kernel([&](const KernelInfo& kernel) {
        if ((only && kernel.schedule != *only) || !alone.backward(kernel)) return;
        for (const std::int64_t batch : {2, 9}) {
            Attention among(problem_of(shape, batch), static_cast<std::uint64_t>(batch));
            for (const std::int64_t place : {std::int64_t{0}, batch - 1}) {
                for (auto which : kInputs) {
                    const auto& from = (alone.*which).memory;
                    std::copy(from.begin(), from.end(),
                              (among.*which).memory.begin() + place * static_cast<std::ptrdiff_t>(from.size()));
                }
            }
            among.prepare_backward();
            ASSERT_TRUE(among.backward(kernel));
            for (const std::int64_t place : {std::int64_t{0}, batch - 1}) {
                for (auto which : kOutputs) {
                    const auto& expected = (alone.*which).memory;
                    const auto begin =
                        (among.*which).memory.begin() + place * static_cast<std::ptrdiff_t>(expected.size());
                    EXPECT_TRUE(std::equal(expected.begin(), expected.end(), begin))
                        << kernel.name << ": " << alone.problem.describe() << ", place " << place << " of " << batch;
                }
            }
        }
    });
}

void expect_right_gradients_of_fa3(const Problem& problem) {
    Attention a(problem, 7);
    a.prepare_backward();
    for_each_cuda_kernel([&](const KernelInfo& kernel) {
        if (kernel.schedule != Schedule::fa3) return;
        ASSERT_TRUE(a.backward(kernel));
        const Report report = a.check_backward();
        EXPECT_TRUE(report.pass()) << a.problem.describe() << "\n" << report.describe();
    });
}

TEST_F(CudaGradients, a_sequence_has_the_same_bits_at_every_place_of_every_batch) {
    for (const Shape& shape : kShapes) expect_the_same_bits_in_batches(shape);
    for (const Shape& shape : kShapesInShares) expect_the_same_bits_in_batches(shape, Schedule::fa2);
}

/// Either a separate kernel converts the sum of dQ, or the last key block to add does.
TEST_F(CudaGradients, a_sequence_has_the_same_bits_among_few_and_many_blocks) {
    for (const Shape& shape : kShapesOfManyHeads) expect_the_same_bits_in_batches(shape, Schedule::fa3);
    for (const Shape& shape : kShapesOfShares) expect_the_same_bits_in_batches(shape, Schedule::fa3);
}

/// More key blocks than a GPU has multiprocessors: some with many steps, some that no query sees.
const Shape kShapesOfManyBlocks[] = {
    {150, 1100, 40, 40, 128, DType::bf16, {.causal = Causal::top_left}},
    {300, 900, 30, 30, 128, DType::fp16, {.window_left = 40, .window_right = 90}},
    {700, 520, 80, 40, 120, DType::bf16, {.causal = Causal::bottom_right}},
};

TEST_F(CudaGradients, many_key_blocks_run_one_after_the_other) {
    for (const Shape& shape : kShapesOfManyBlocks) {
        expect_right_gradients_of_fa3(problem_of(shape, 2));
        expect_the_same_bits_in_batches(shape, Schedule::fa3);
    }
}

/// CTAs share a group's query heads, with and without a softcap.
TEST_F(CudaGradients, shares_of_a_group_add_up) {
    for (const Shape& shape : kShapesOfShares) {
        for (const float softcap : {0.0F, 20.0F}) {
            if (softcap != 0 && shape.head_dim > 128) continue;
            Problem p = problem_of(shape, 2);
            p.softcap = softcap;
            expect_right_gradients_of_fa3(p);
        }
    }
}

void expect_the_bits_of_a_dense_one(const Shape& shape, const std::optional<Schedule>& only = {}) {
    Attention alone(problem_of(shape, 1), 3);
    alone.prepare_backward();
    for_each_cuda_kernel([&](const KernelInfo& kernel) {
        if ((only && kernel.schedule != *only) || !alone.backward(kernel)) return;
        const std::vector<std::int64_t> of_q{70, 0, shape.len_q, 77};
        const std::vector<std::int64_t> of_kv{1, 640, shape.len_kv, 900};
        Attention among(make_ragged(of_q, of_kv, shape.heads_q, shape.heads_kv, shape.head_dim, shape.dtype), 9, of_q,
                        of_kv);
        among.problem.mask = shape.mask;
        const auto place = [&](Tensor Attention::*which) {
            const bool of_queries = which == &Attention::q || which == &Attention::d_o || which == &Attention::dq;
            const std::size_t rows = of_queries ? 70 : 641;
            const auto len = static_cast<std::size_t>(of_queries ? shape.len_q : shape.len_kv);
            return (among.*which).memory.begin() +
                   static_cast<std::ptrdiff_t>(rows * ((alone.*which).memory.size() / len));
        };
        for (auto which : kInputs) {
            std::copy((alone.*which).memory.begin(), (alone.*which).memory.end(), place(which));
        }
        among.prepare_backward();
        ASSERT_TRUE(among.backward(kernel));
        for (auto which : kOutputs) {
            EXPECT_TRUE(std::equal((alone.*which).memory.begin(), (alone.*which).memory.end(), place(which)))
                << kernel.name << ": " << alone.problem.describe();
        }
    });
}

TEST_F(CudaGradients, a_ragged_sequence_has_the_bits_of_a_dense_one) {
    for (const Shape& shape : kShapes) expect_the_bits_of_a_dense_one(shape);
    for (const Shape& shape : kShapesInShares) expect_the_bits_of_a_dense_one(shape, Schedule::fa2);
    expect_the_bits_of_a_dense_one(kShapeInParts, Schedule::fa3);
    for (const Shape& shape : kShapesOfShares) expect_the_bits_of_a_dense_one(shape, Schedule::fa3);
}

/// More key blocks than the device has multiprocessors add to the same few query tiles.
TEST_F(CudaGradients, many_blocks_of_keys_share_few_queries) {
    for (const std::int64_t len_q : {1, 130}) {
        Attention a(make_problem(1, len_q, 30'000, 1, 1, 64, DType::bf16));
        a.prepare_backward();
        for_each_cuda_kernel([&](const KernelInfo& kernel) {
            if (!a.backward(kernel)) return;
            const Report report = a.check_backward();
            EXPECT_TRUE(report.pass()) << a.problem.describe() << "\n" << report.describe();
        });
    }
}

TEST_F(CudaGradients, shares_of_a_group_are_summed) {
    for (const Shape& shape : kShapesInShares) {
        Attention a(problem_of(shape, 2));
        a.prepare_backward();
        for_each_cuda_kernel([&](const KernelInfo& kernel) {
            if (kernel.schedule != Schedule::fa2 || !a.backward(kernel)) return;
            const Report report = a.check_backward();
            EXPECT_TRUE(report.pass()) << a.problem.describe() << "\n" << report.describe();
        });
    }
}

/// Gradients without a key or without a query are 0, and no CTA waits.
TEST_F(CudaGradients, empty_sizes_give_zeros) {
    const std::pair<std::int64_t, std::int64_t> lengths[] = {{0, 70}, {70, 0}, {130, 5}};
    for (const auto& [len_q, len_kv] : lengths) {
        for (const DType dtype : {DType::bf16, DType::fp16, DType::fp32}) {
            Problem p = make_problem(2, len_q, len_kv, 2, 1, 64, dtype);
            p.mask.causal = Causal::bottom_right;
            p.bias = p.bias_gradient = true;
            Attention a(p);
            expect_backward_right(a);
        }
    }
}

/// cu_seqlens on a device are not checked. The call has to end whatever they hold.
TEST_F(CudaGradients, broken_cu_seqlens_do_not_hang) {
    const std::vector<std::int64_t> lengths(4, 300);
    for (const DType dtype : {DType::bf16, DType::fp32}) {
        Attention a(make_ragged(lengths, lengths, 2, 1, 64, dtype), 3, lengths, lengths);
        a.prepare_backward();
        constexpr std::int32_t kBroken[][5] = {
            {0, 300, 0, 300, 1200}, {1200, 0, 1200, 0, 1200}, {-5, 2000000, 7, 1199, 0}, {900, 600, 300, 0, 0}};
        for (const auto& broken : kBroken) {
            for (Tensor* t : {&a.cu_q, &a.cu_kv}) {
                for (std::int64_t i = 0; i < 5; ++i) *t->view.at<std::int32_t>(i) = broken[i];
            }
            for_each_cuda_kernel([&](const KernelInfo& kernel) {
                if (!takes(kernel, dtype)) return;
                const Plan how = plan(a.problem, {.pass = Pass::backward, .kernel = kernel.name});
                device::DeviceCopy copy(how.device);
                const BackwardArgs args = copy.add(a.backward_args());
                backward(how, args, copy.workspace(how.workspace_bytes));
                copy.copy_back();  // waits, and throws where a kernel failed
                EXPECT_TRUE(copy.workspace_bands_unchanged());
            });
        }
    }
}

}  // namespace
}  // namespace tessera::check::cuda_gradients_test
