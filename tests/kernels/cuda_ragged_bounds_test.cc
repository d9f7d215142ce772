// SPDX-License-Identifier: Apache-2.0
//
// Ragged calls on a GPU: O, LSE and gradients of a sequence depend on that sequence alone. They do not depend on the
// bounds of the lengths, which may be missing or far too large, nor on the other sequences. Skipped without a GPU.
#include <gtest/gtest.h>

#include <random>

#include "check/limits.hpp"
#include "kernels/support.hpp"
#include "registry.hpp"

namespace tessera::check::cuda_ragged_bounds_test {
namespace {

class CudaRaggedBounds : public testing::Test {
 protected:
    void SetUp() override {
        if (const auto reason = unavailable({DeviceType::cuda, 0})) GTEST_SKIP() << *reason;
    }
};

using Lengths = std::vector<std::int64_t>;

struct Batch {
    const char* name;
    Lengths q, kv;
    std::int64_t heads_q, heads_kv;
};

Lengths exponential(unsigned seed, int count, double mean) {
    std::mt19937 random(seed);
    Lengths lengths;
    for (int i = 0; i < count; ++i) {
        const double u = (static_cast<double>(random()) + 1) / 4294967297.0;
        lengths.push_back(1 + static_cast<std::int64_t>(-mean * std::log(u)));
    }
    return lengths;
}

/// One long sequence among many short ones, some of which are empty.
Lengths one_long() {
    Lengths lengths;
    for (std::int64_t i = 0; i < 1500; ++i) lengths.push_back(i % 5 == 0 ? 0 : i % 37);
    lengths[700] = 1900;
    return lengths;
}

std::vector<Batch> batches() {
    const Lengths packed = exponential(1, 40, 200), pairs = exponential(2, 40, 150);
    return {{"documents", packed, packed, 4, 4},
            {"documents_grouped", packed, packed, 8, 2},
            {"cross", packed, pairs, 4, 2},
            {"empty", {3, 0, 70, 1, 0, 333}, {600, 40, 0, 1300, 0, 257}, 4, 2},
            {"nothing", {0, 0}, {0, 0}, 2, 2},
            {"one_long", one_long(), one_long(), 2, 2},
            {"one_long_grouped", one_long(), one_long(), 4, 1},
            {"segments", {100, 4300, 0, 4097, 700}, {100, 4300, 0, 4097, 700}, 1, 1},  // 32 key blocks and more
            {"splits", {60, 2200, 0, 1300}, {60, 2200, 0, 1300}, 8, 1}};               // head splits in the longest
}

const Mask kMasks[] = {{},
                       {.causal = Causal::bottom_right},
                       {.causal = Causal::top_left},
                       {.causal = Causal::bottom_right, .window_left = 100}};

Attention attention_of(const Batch& batch, std::int64_t head_dim, DType dtype, const Mask& mask, bool residual) {
    Problem p = make_ragged(batch.q, batch.kv, batch.heads_q, batch.heads_kv, head_dim, dtype);
    p.mask = mask;
    Attention a(p, 3, batch.q, batch.kv);
    if (residual) a.keep_residual();
    return a;
}

/// Calls f(batch, attention, name) for batches, masks, head_dims and dtypes. Every second one keeps the residual of O.
template <class F>
void for_each_call(const F& f) {
    int number = 0;
    for (const Batch& batch : batches()) {
        for (const std::int64_t head_dim : {64, 128, 256}) {
            for (const DType dtype : {DType::bf16, DType::fp16}) {
                const Mask& mask = kMasks[static_cast<std::size_t>(number) % std::size(kMasks)];
                const bool square = batch.name == std::string("segments") || batch.name == std::string("splits");
                Attention a = attention_of(batch, head_dim, dtype, square ? kMasks[1] : mask, ++number / 2 % 2 == 0);
                SCOPED_TRACE(std::string(batch.name) + ": " + a.problem.describe());
                f(batch, a);
            }
        }
    }
}

/// `standard` lays scores out by the bounds.
bool takes_loose_bounds(const KernelInfo& kernel) {
    return kernel.backend == Backend::cuda && kernel.schedule != Schedule::standard && !splits_keys(kernel);
}

/// Calls f(loose) with bounds that are missing, so that the totals stand for them, and ten times too large.
template <class F>
void for_each_loose(const Attention& tight, const F& f) {
    for (const bool missing : {true, false}) {
        Attention loose = tight;
        Problem& p = loose.problem;
        p.len_q = missing ? p.total_q : 10 * p.len_q;
        p.len_kv = missing ? p.total_kv : 10 * p.len_kv;
        SCOPED_TRACE(missing ? "without bounds" : "with bounds ten times too large");
        f(loose);
    }
}

TEST_F(CudaRaggedBounds, forward_has_the_bits_of_tight_bounds) {
    for_each_call([](const Batch&, Attention& tight) {
        for_each_kernel(Pass::forward, [&](const KernelInfo& kernel) {
            if (!takes_loose_bounds(kernel) || !tight.forward(kernel)) return;
            for_each_loose(tight, [&](Attention& loose) {
                ASSERT_TRUE(loose.forward(kernel));
                EXPECT_TRUE(loose.o.same_bits(tight.o) && loose.lse.same_bits(tight.lse));
            });
        });
    });
}

TEST_F(CudaRaggedBounds, backward_has_the_bits_of_tight_bounds) {
    for_each_call([](const Batch&, Attention& tight) {
        bool has_forward = false;
        for_each_kernel(Pass::forward, [&](const KernelInfo& kernel) {
            if (!has_forward && takes_loose_bounds(kernel)) has_forward = tight.forward(kernel).ran;
        });
        ASSERT_TRUE(has_forward);
        for_each_kernel(Pass::backward, [&](const KernelInfo& kernel) {
            if (!takes_loose_bounds(kernel) || !tight.backward(kernel)) return;
            for_each_loose(tight, [&](Attention& loose) {
                ASSERT_TRUE(loose.backward(kernel));
                EXPECT_TRUE(loose.dq.same_bits(tight.dq)) << "dQ";
                EXPECT_TRUE(loose.dk.same_bits(tight.dk)) << "dK";
                EXPECT_TRUE(loose.dv.same_bits(tight.dv)) << "dV";
            });
        });
    });
}

/// Rows [first, first + count) of a tensor of rows, as bytes.
std::span<std::byte> rows_of(Tensor& tensor, std::int64_t all, std::int64_t first, std::int64_t count) {
    if (all == 0) return {};
    const std::int64_t row = static_cast<std::int64_t>(tensor.memory.size()) / all;
    return std::span(tensor.memory)
        .subspan(static_cast<std::size_t>(first * row), static_cast<std::size_t>(count * row));
}

/// The longest sequence of a batch, in a dense call of its own.
TEST_F(CudaRaggedBounds, a_sequence_has_the_bits_that_it_has_alone) {
    for_each_call([](const Batch& batch, Attention& among) {
        const auto at = std::max_element(batch.q.begin(), batch.q.end()) - batch.q.begin();
        const auto index = static_cast<std::size_t>(at);
        const std::int64_t first_q = std::accumulate(batch.q.begin(), batch.q.begin() + at, std::int64_t{0});
        const std::int64_t first_kv = std::accumulate(batch.kv.begin(), batch.kv.begin() + at, std::int64_t{0});
        Problem p = make_problem(1, batch.q[index], batch.kv[index], batch.heads_q, batch.heads_kv,
                                 among.problem.head_dim, among.problem.dtype);
        p.mask = among.problem.mask;
        if (p.len_q == 0) return;
        Attention alone(p);
        if (among.o_residual.view.given()) alone.keep_residual();
        const auto part = [&](Tensor Attention::*which) {
            const bool queries =
                which != &Attention::k && which != &Attention::v && which != &Attention::dk && which != &Attention::dv;
            return queries ? rows_of(among.*which, among.problem.total_q, first_q, p.len_q)
                           : rows_of(among.*which, among.problem.total_kv, first_kv, p.len_kv);
        };
        const auto same = [&](Tensor Attention::*which) {
            return std::ranges::equal(part(which), (alone.*which).memory);
        };
        for (const auto which : {&Attention::q, &Attention::k, &Attention::v, &Attention::d_o}) {
            std::ranges::copy(part(which), (alone.*which).memory.begin());
        }
        for (const char* schedule : {"fa3", "fa2", "fa1"}) {
            const std::string name = std::string("cuda.") + schedule;
            bool ran = false;
            for_each_kernel(Pass::forward, [&](const KernelInfo& kernel) {
                if (kernel.name != name + ".forward") return;
                ran = among.forward(kernel) && alone.forward(kernel);
                if (!ran) return;
                EXPECT_TRUE(same(&Attention::o)) << "O";
            });
            for_each_kernel(Pass::backward, [&](const KernelInfo& kernel) {
                if (!ran || kernel.name != name + ".backward") return;
                if (!among.backward(kernel) || !alone.backward(kernel)) return;
                EXPECT_TRUE(same(&Attention::dq)) << "dQ";
                EXPECT_TRUE(same(&Attention::dk)) << "dK";
                EXPECT_TRUE(same(&Attention::dv)) << "dV";
            });
        }
    });
}

/// Gradients of small batches beside the fp64 reference.
TEST_F(CudaRaggedBounds, gradients_without_bounds_are_right) {
    const Lengths packed = exponential(4, 12, 90), pairs = exponential(5, 12, 120);
    for (const Batch& batch : {Batch{"documents", packed, packed, 4, 2}, Batch{"cross", packed, pairs, 2, 2},
                               Batch{"empty", {3, 0, 70, 1, 0, 133}, {200, 40, 0, 300, 0, 257}, 2, 1}}) {
        for (const std::int64_t head_dim : {64, 128, 192}) {
            for (const Mask& mask : kMasks) {
                Attention a = attention_of(batch, head_dim, DType::bf16, mask, false);
                a.problem.len_q = a.problem.total_q;
                a.problem.len_kv = a.problem.total_kv;
                a.prepare_backward();
                for_each_kernel(Pass::backward, [&](const KernelInfo& kernel) {
                    if (!takes_loose_bounds(kernel) || !a.backward(kernel)) return;
                    const Report report = a.check_backward();
                    EXPECT_TRUE(report.pass()) << batch.name << ": " << a.problem.describe() << "\n"
                                               << report.describe();
                });
            }
        }
    }
}

}  // namespace
}  // namespace tessera::check::cuda_ragged_bounds_test
