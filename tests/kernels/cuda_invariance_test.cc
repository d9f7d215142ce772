// SPDX-License-Identifier: Apache-2.0
//
// The bits of a row on a GPU depend on the row, its keys and values, and nothing else. The size of the batch, the place
// in it, other sequences and other heads do not matter. Skipped without a GPU.
#include <gtest/gtest.h>

#include <functional>

#include "check/limits.hpp"
#include "cuda/fa3/host/forward_dispatch.hpp"
#include "kernels/support.hpp"
#include "registry.hpp"

namespace tessera::check::cuda_invariance_test {
namespace {

class CudaInvariance : public testing::Test {
 protected:
    void SetUp() override {
        if (const auto reason = unavailable({DeviceType::cuda, 0})) GTEST_SKIP() << *reason;
    }
};

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
    {500, 500, 2, 1, 128, DType::bf16, {.causal = Causal::bottom_right, .window_left = 150}},
    {1, 700, 4, 1, 128, DType::bf16, {}},
};

Problem problem_of(const Shape& s, std::int64_t batch) {
    Problem p = make_problem(batch, s.len_q, s.len_kv, s.heads_q, s.heads_kv, s.head_dim, s.dtype);
    p.mask = s.mask;
    return p;
}

/// Without cuda.decode.forward, which takes few queries only (cuda_decode_test.cc).
void for_each_cuda_kernel(const std::function<void(const KernelInfo&)>& f) {
    for_each_kernel(Pass::forward, [&](const KernelInfo& kernel) {
        if (kernel.backend == Backend::cuda && !splits_keys(kernel)) f(kernel);
    });
}

using Bytes = std::vector<std::byte>;
/// Part `index` of memory that consists of equal parts of `size`.
Bytes part(const Bytes& memory, std::int64_t index, std::size_t size) {
    const auto begin = memory.begin() + index * static_cast<std::ptrdiff_t>(size);
    return {begin, begin + static_cast<std::ptrdiff_t>(size)};
}

TEST_F(CudaInvariance, a_sequence_has_the_same_bits_at_every_place_of_every_batch) {
    for (const Shape& shape : kShapes) {
        Attention alone(problem_of(shape, 1), 3);
        for_each_cuda_kernel([&](const KernelInfo& kernel) {
            if (!alone.forward(kernel)) return;
            for (const std::int64_t batch : {2, 3, 40}) {
                Attention among(problem_of(shape, batch), static_cast<std::uint64_t>(batch));
                const std::int64_t places[] = {0, batch / 2, batch - 1};
                for (const std::int64_t place : places) {
                    for (auto which : {&Attention::q, &Attention::k, &Attention::v}) {
                        const Bytes& from = (alone.*which).memory;
                        std::copy(from.begin(), from.end(),
                                  (among.*which).memory.begin() + place * static_cast<std::ptrdiff_t>(from.size()));
                    }
                }
                ASSERT_TRUE(among.forward(kernel));
                for (const std::int64_t place : places) {
                    EXPECT_TRUE(part(among.o.memory, place, alone.o.memory.size()) == alone.o.memory &&
                                part(among.lse.memory, place, alone.lse.memory.size()) == alone.lse.memory)
                        << kernel.name << ": " << alone.problem.describe() << ", place " << place << " of " << batch;
                }
            }
        });
    }
}

TEST_F(CudaInvariance, a_head_has_the_same_bits_whatever_the_other_heads_hold_and_however_many_there_are) {
    for (const Shape& shape : kShapes) {
        Attention alone([&] {
            Problem p = problem_of(shape, 1);
            p.heads_q = p.heads_kv = 1;
            return p;
        }());
        Attention among([&] {
            Problem p = problem_of(shape, 1);
            p.heads_q = 6;
            p.heads_kv = 3;
            return p;
        }());
        for (auto which : {&Attention::q, &Attention::k, &Attention::v}) {  // query heads 2 and 3 use kv head 1
            const Tensor& from = alone.*which;
            Tensor& to = among.*which;
            for (std::int64_t row = 0; row < from.view.shape[1]; ++row) {
                for (std::int64_t d = 0; d < from.view.shape[3]; ++d) {
                    to.set(from.get(0, row, 0, d), 0, row, which == &Attention::q ? 3 : 1, d);
                }
            }
        }
        for_each_cuda_kernel([&](const KernelInfo& kernel) {
            if (!alone.forward(kernel)) return;
            ASSERT_TRUE(among.forward(kernel));
            for (std::int64_t row = 0; row < shape.len_q; ++row) {
                ASSERT_EQ(alone.lse.get(0, 0, row), among.lse.get(0, 3, row)) << kernel.name << ", row " << row;
                for (std::int64_t d = 0; d < shape.head_dim; ++d) {
                    ASSERT_EQ(alone.o.get(0, row, 0, d), among.o.get(0, row, 3, d)) << kernel.name << ", row " << row;
                }
            }
        });
    }
}

TEST_F(CudaInvariance, a_ragged_sequence_has_the_same_bits_among_sequences_of_any_length) {
    const std::vector<std::vector<std::int64_t>> neighbours{{}, {1, 700}, {0, 0, 64}, {129, 128, 127, 5}};
    for (const Shape& shape : kShapes) {
        Attention alone(
            make_ragged({shape.len_q}, {shape.len_kv}, shape.heads_q, shape.heads_kv, shape.head_dim, shape.dtype), 3,
            {shape.len_q}, {shape.len_kv});
        alone.problem.mask = shape.mask;
        for_each_cuda_kernel([&](const KernelInfo& kernel) {
            if (!alone.forward(kernel)) return;
            for (const auto& before : neighbours) {
                std::vector<std::int64_t> of_q = before;
                std::vector<std::int64_t> of_kv(before.rbegin(), before.rend());
                const std::int64_t first_q = std::accumulate(of_q.begin(), of_q.end(), std::int64_t{0});
                const std::int64_t first_kv = std::accumulate(of_kv.begin(), of_kv.end(), std::int64_t{0});
                of_q.insert(of_q.end(), {shape.len_q, 77});
                of_kv.insert(of_kv.end(), {shape.len_kv, 900});
                Attention among(make_ragged(of_q, of_kv, shape.heads_q, shape.heads_kv, shape.head_dim, shape.dtype), 9,
                                of_q, of_kv);
                among.problem.mask = shape.mask;
                for (auto which : {&Attention::q, &Attention::k, &Attention::v}) {
                    const Bytes& from = (alone.*which).memory;
                    const auto row_bytes = static_cast<std::int64_t>(from.size()) / (alone.*which).view.shape[0];
                    const std::int64_t first = which == &Attention::q ? first_q : first_kv;
                    std::copy(from.begin(), from.end(), (among.*which).memory.begin() + first * row_bytes);
                }
                ASSERT_TRUE(among.forward(kernel));
                bool same = true;
                for (std::int64_t h = 0; h < shape.heads_q; ++h) {
                    for (std::int64_t row = 0; row < shape.len_q; ++row) {
                        same = same && alone.lse.get(h, row) == among.lse.get(h, first_q + row);
                        for (std::int64_t d = 0; d < shape.head_dim; ++d) {
                            same = same && alone.o.get(row, h, d) == among.o.get(first_q + row, h, d);
                        }
                    }
                }
                EXPECT_TRUE(same) << kernel.name << ": " << alone.problem.describe() << ", behind " << before.size()
                                  << " sequences";
            }
        });
    }
}

/// Compares the sequences of a ragged batch with the same ones in front of another sequence, whose many keys give the
/// batch another mean length and so another compiled shape of fa3. No bit of theirs may change.
void expect_same_bits_in_both_shapes(const std::vector<std::int64_t>& of_q, const std::vector<std::int64_t>& of_kv,
                                     std::int64_t heads_kv, std::int64_t head_dim, const std::string& short_shape,
                                     const std::string& long_shape) {
    const Mask masks[] = {{},
                          {.causal = Causal::bottom_right},
                          {.causal = Causal::top_left},
                          {.window_left = 1100, .window_right = 1100}};
    const auto shape = [](const Attention& a) {
        return cuda::fa3::Shapes::names().at(cuda::fa3::shape_of(a.problem).value());
    };
    for (const DType dtype : {DType::bf16, DType::fp16}) {
        for (const Mask& mask : masks) {
            Attention tight(make_ragged(of_q, of_kv, 4, heads_kv, head_dim, dtype), 3, of_q, of_kv);
            tight.problem.mask = mask;
            std::vector<std::int64_t> long_q = of_q, long_kv = of_kv;
            long_q.push_back(2000);  // a mask may let no query see more keys than queries
            long_kv.push_back(9000);
            Attention loose(make_ragged(long_q, long_kv, 4, heads_kv, head_dim, dtype), 4, long_q, long_kv);
            loose.problem.mask = mask;
            for (auto which : {&Attention::q, &Attention::k, &Attention::v}) {
                std::ranges::copy((tight.*which).memory, (loose.*which).memory.begin());
            }
            const auto same_lse = [&] {
                for (std::int64_t h = 0; h < 4; ++h) {
                    for (std::int64_t row = 0; row < tight.problem.total_q; ++row) {
                        if (tight.lse.get(h, row) != loose.lse.get(h, row)) return false;
                    }
                }
                return true;
            };
            ASSERT_EQ(shape(tight), short_shape) << tight.problem.describe();
            ASSERT_EQ(shape(loose), long_shape) << loose.problem.describe();
            for_each_cuda_kernel([&](const KernelInfo& kernel) {
                ASSERT_TRUE(tight.forward(kernel));
                ASSERT_TRUE(loose.forward(kernel));
                EXPECT_TRUE(
                    std::ranges::equal(tight.o.memory, std::span(loose.o.memory).subspan(0, tight.o.memory.size())))
                    << kernel.name << ": " << tight.problem.describe();
                EXPECT_TRUE(same_lse()) << kernel.name << ": " << tight.problem.describe();
            });
        }
    }
}

TEST_F(CudaInvariance, short_and_long_tiles_have_the_same_bits) {
    for (const std::int64_t head_dim : {64, 40}) {
        expect_same_bits_in_both_shapes({1, 300, 0, 129, 700, 63}, {700, 301, 5, 64, 900, 0}, 2, head_dim,
                                        "HeadDim64Short", "HeadDim64");
    }
}

TEST_F(CudaInvariance, small_tiles_have_the_same_bits) {
    std::vector<std::int64_t> of_q{1, 300, 0, 129, 64, 63, 0, 17}, of_kv{290, 301, 5, 64, 65, 0, 0, 18};
    for (std::int64_t len = 2; len < 130; len += 9) {
        of_q.push_back(len);
        of_kv.push_back(len);
    }
    for (const std::int64_t heads_kv : {2, 4}) {
        expect_same_bits_in_both_shapes(of_q, of_kv, heads_kv, 64, "HeadDim64Small", "HeadDim64Short");
        expect_same_bits_in_both_shapes(of_q, of_kv, heads_kv, 112, "HeadDim128Small", "HeadDim128");
    }
}

/// At head_dim 64 a dense call without a mask has long tiles, and its sequences as a ragged batch have short ones. Both
/// give the same bits.
TEST_F(CudaInvariance, a_dense_batch_has_the_bits_of_a_ragged_one) {
    const std::int64_t len_q = 450;
    const std::int64_t len_kv = 777;
    for (const DType dtype : {DType::bf16, DType::fp16}) {
        for (const std::int64_t head_dim : {64, 96, 128, 192, 256}) {
            const std::vector<std::int64_t> of_q(3, len_q);
            const std::vector<std::int64_t> of_kv(3, len_kv);
            Attention dense(make_problem(3, len_q, len_kv, 4, 2, head_dim, dtype), 3);
            Attention ragged(make_ragged(of_q, of_kv, 4, 2, head_dim, dtype), 3, of_q, of_kv);
            for_each_cuda_kernel([&](const KernelInfo& kernel) {
                ASSERT_TRUE(dense.forward(kernel));
                ASSERT_TRUE(ragged.forward(kernel));
                EXPECT_TRUE(dense.o.same_bits(ragged.o)) << kernel.name << ": " << dense.problem.describe();
                bool same = true;
                for (std::int64_t h = 0; h < 4; ++h) {
                    for (std::int64_t row = 0; row < 3 * len_q; ++row) {
                        same = same && dense.lse.get(row / len_q, h, row % len_q) == ragged.lse.get(h, row);
                    }
                }
                EXPECT_TRUE(same) << kernel.name << ", LSE: " << dense.problem.describe();
            });
        }
    }
}

}  // namespace
}  // namespace tessera::check::cuda_invariance_test
