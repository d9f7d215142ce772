// SPDX-License-Identifier: Apache-2.0
//
// Families of bugs that attention libraries had: 32-bit index arithmetic, counts past 65,535, layouts.
// BUGS.md lists the families by the number at the end of a test's name.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <memory>

#include "check/run_case.hpp"
#include "kernels/sparse_memory.hpp"
#include "kernels/support.hpp"

namespace tessera::check::bug_families_limits_test {
namespace {

/// Runs once for each dtype, since most CUDA kernels take 16 bits only.
class BugFamiliesLimits : public testing::TestWithParam<DType> {};
INSTANTIATE_TEST_SUITE_P(Types, BugFamiliesLimits, testing::ValuesIn(kStorageTypes),
                         [](const auto& which) { return std::string(name_of(which.param)); });

constexpr std::int64_t kPast32Bits = (std::int64_t{1} << 32) + 16;  // as a 32-bit number: 16

/// Small head_dims for tests whose other sizes are large: one for all kernels, and 8, the smallest that TMA takes, for
/// kernels of a GPU.
struct SmallDim {
    std::int64_t head_dim;
    std::optional<Backend> only;
};
std::vector<SmallDim> small_dims(std::int64_t least) {
    std::vector<SmallDim> dims{{least, {}}};
    if (device::cuda_available()) dims.push_back({8, Backend::cuda});
    return dims;
}

/// Moves every tensor of a call to memory where one dimension has a stride past 2^32 elements. Returns false when the
/// system does not give the address space.
class Spread {
 public:
    Spread(Attention& a, std::size_t dimension, std::int64_t stride) {
        for (Tensor* t : {&a.q, &a.k, &a.v, &a.d_o, &a.o, &a.dq, &a.dk, &a.dv}) {
            const TensorView packed = t->view;
            TensorView wide = packed;
            wide.strides[dimension] = stride;
            const std::int64_t elements = stride * packed.shape[dimension] + packed.size();
            memory_.push_back(
                std::make_unique<SparseMemory>(static_cast<std::size_t>(elements * size_of(packed.dtype))));
            wide.data = memory_.back()->data();
            if (wide.data == nullptr) return;
            t->view = wide;
            copy(packed, wide);
        }
        ok_ = true;
    }
    bool ok() const { return ok_; }

    static void copy(const TensorView& from, const TensorView& to) {
        const Packed values = packed_copy(from);
        for_each_element(to, [&](std::int64_t flat, std::byte* element) {
            store_from_double(element, to.dtype, values.data[static_cast<std::size_t>(flat)]);
        });
    }

 private:
    std::vector<std::unique_ptr<SparseMemory>> memory_;
    bool ok_ = false;
};

bool same_values(const Tensor& a, const Tensor& b) { return packed_copy(a.view).data == packed_copy(b.view).data; }

/// Runs a kernel of the host through views whose storage is not the Attention's own (Attention::forward would poison
/// too much).
template <class Args, class Call>
bool run_on(const Attention& a, const KernelInfo& kernel, const Args& args, Call&& call) {
    Ran refused;
    const auto how = detail::plan_for(a.problem, kernel, {}, refused);
    if (!how) return false;
    call(*how, args, Workspace(*how), Execution{});
    return true;
}

void expect_spread_is_packed(const Problem& p, std::size_t dimension, std::int64_t stride) {
    Attention packed(p);
    packed.prepare_backward();
    Attention wide = packed;
    const Spread spread(wide, dimension, stride);
    if (!spread.ok()) GTEST_SKIP() << "no address space for " << p.describe();
    const double nan = std::nan("");
    for_each_kernel(Pass::forward, [&](const KernelInfo& kernel) {
        if (kernel.backend == Backend::cuda)
            return;  // a copy on the device would include all memory between the elements
        if (!packed.forward(kernel)) return;
        for (Tensor* out : {&wide.o, &wide.lse}) out->fill_value(nan);
        ASSERT_TRUE(run_on(wide, kernel, wide.forward_args(), forward));
        EXPECT_TRUE(same_values(packed.o, wide.o)) << "stride " << stride << " of dimension " << dimension;
        EXPECT_TRUE(same_values(packed.lse, wide.lse)) << "stride " << stride << " of dimension " << dimension;
    });
    packed.prepare_backward();
    Spread::copy(packed.o.view, wide.o.view);
    Spread::copy(packed.lse.view, wide.lse.view);
    for_each_kernel(Pass::backward, [&](const KernelInfo& kernel) {
        if (kernel.backend == Backend::cuda || !packed.backward(kernel)) return;
        for (Tensor* out : {&wide.dq, &wide.dk, &wide.dv}) out->fill_value(nan);
        ASSERT_TRUE(run_on(wide, kernel, wide.backward_args(), backward));
        for (Tensor Attention::*which : {&Attention::dq, &Attention::dk, &Attention::dv}) {
            EXPECT_TRUE(same_values(packed.*which, wide.*which))
                << "stride " << stride << " of dimension " << dimension;
        }
    });
}

// An offset multiplied in 32 bits lands in mapped memory, and nothing crashes.
TEST(BugFamilies, offsets_past_2_to_the_32_bug_26_30) {
    const Problem p = make_problem(3, 9, 11, 4, 2, 8, DType::bf16);
    expect_spread_is_packed(p, 0, kPast32Bits);          // batch
    expect_spread_is_packed(p, 2, kPast32Bits);          // heads
    expect_spread_is_packed(p, 1, kPast32Bits / 4);      // rows: the fifth is past 2^32
    expect_spread_is_packed(p, 1, kPast32Bits / 8 + 3);  // and signed 32 bits
}

TEST(BugFamilies, four_million_keys_bug_27) {
    for (const SmallDim& dim : small_dims(1)) {
        for (const std::int64_t extra : {-128, 0, 128}) {
            const std::int64_t len = (std::int64_t{1} << 22) + extra;
            Problem p = make_problem(1, 1, len, 1, 1, dim.head_dim, DType::bf16);
            Attention a(p);
            a.q.fill_value(0);
            fill(a.v.view, Fill::index_coded, 0);
            double mean = 0;
            for (std::int64_t j = 0; j < len; ++j) mean += a.v.get(0, j, 0, 0) / static_cast<double>(len);
            for_each_kernel(Pass::forward, [&](const KernelInfo& kernel) {
                if (dim.only && kernel.backend != *dim.only) return;
                a.problem.mask = {};
                if (!a.forward(kernel, {.threads = 2})) return;
                EXPECT_NEAR(a.lse.get(0, 0, 0), std::log(static_cast<double>(len)), 2e-6 + 16 * 0x1p-20);
                EXPECT_NEAR(a.o.get(0, 0, 0, 0), mean, 3 * 0x1p-8 * 64);
                a.problem.mask.window_left = 0;  // the last key only
                ASSERT_TRUE(a.forward(kernel));
                EXPECT_EQ(a.o.get(0, 0, 0, 0), a.v.get(0, len - 1, 0, 0));
            });
        }
    }
}

// len_q * len_kv is past 2^32, in a bias whose last rows matter.
TEST(BugFamilies, scores_past_2_to_the_32_bug_30) {
    constexpr std::int64_t kLen = 70'000;
    constexpr std::int64_t kWindow = 8;
    const SparseMemory memory(static_cast<std::size_t>(kLen * kLen) * sizeof(float));
    if (memory.data() == nullptr) GTEST_SKIP() << "no address space";
    Problem p = make_problem(1, kLen, kLen, 1, 1, 1);
    p.mask = {.window_left = kWindow, .window_right = 0};
    Attention a(p);
    a.problem.bias = true;
    a.bias.view = dense_view(memory.data(), DType::fp32, {1, 1, kLen, kLen});
    *a.bias.view.at<float>(0, 0, kLen - 1, kLen - 4) = 5;
    *a.bias.view.at<float>(0, 0, 65'000, 64'999) = 5;
    for (const KernelInfo& kernel : kernels()) {
        // The reference would take minutes, since it clears len_kv weights for every query. A copy for CUDA would take
        // 18 GiB.
        if (kernel.backend == Backend::reference || kernel.backend == Backend::cuda) continue;
        if (kernel.pass != Pass::forward || !a.forward(kernel, {.threads = 2})) continue;
        SCOPED_TRACE(kernel.name);
        for (const std::int64_t row : {kWindow, std::int64_t{65'000}, std::int64_t{65'001}, kLen - 2, kLen - 1}) {
            double sum = 0;
            double o = 0;
            for (std::int64_t j = row - kWindow; j <= row; ++j) {
                const bool biased = (row == kLen - 1 && j == kLen - 4) || (row == 65'000 && j == 64'999);
                const double weight = std::exp(a.q.get(0, row, 0, 0) * a.k.get(0, j, 0, 0) + (biased ? 5 : 0));
                sum += weight;
                o += weight * a.v.get(0, j, 0, 0);
            }
            EXPECT_NEAR(a.lse.get(0, 0, row), std::log(sum), 1e-5) << "row " << row;
            EXPECT_NEAR(a.o.get(0, row, 0, 0), o / sum, 1e-5) << "row " << row;
        }
    }
}

// More than 65,535 sequences or heads. On the host they are the count of a loop, in any dtype.
TEST_P(BugFamiliesLimits, seventy_thousand_batches_and_heads_bug_32) {
    if (GetParam() != DType::fp32 && !device::cuda_available()) GTEST_SKIP() << "no CUDA device";
    for (const SmallDim& dim : small_dims(2)) {
        if (GetParam() != DType::fp32 && !dim.only) continue;
        for (const bool heads : {false, true}) {
            const std::int64_t n = heads ? 65'536 : 70'000;
            Attention a(heads ? make_problem(1, 1, 2, n, n / 2, dim.head_dim, GetParam())
                              : make_problem(n, 1, 2, 1, 1, dim.head_dim, GetParam()));
            if (dim.only) expect_forward_right(a, dim.only);
            else expect_right(a);
        }
    }
}

/// Every tensor, dO too, has its own order of dimensions, gaps and alignment.
TEST(BugFamilies, every_tensor_has_its_own_strides_bug_34_35) {
    for (std::uint64_t seed = 0; seed < 24; ++seed) {
        Case c{.id = "strides", .seed = seed};
        c.problem = make_problem(2, 37, 45, 4, 2, 24, kStorageTypes[seed % 3]);
        c.problem.mask.causal = Causal::bottom_right;
        c.layout = Layout::random;
        c.expanded = {seed % 5 == 1, seed % 5 == 2, seed % 5 == 3, seed % 2 == 1};
        CaseRunner runner(c);
        for (const KernelInfo& kernel : kernels()) {
            const Outcome outcome = runner.run(kernel);
            EXPECT_TRUE(outcome.pass()) << kernel.name << " seed " << seed << "\n" << outcome.report.describe();
        }
    }
}

// Guard bands around every tensor show a write past its end.
TEST(BugFamilies, nothing_is_written_past_the_end_bug_37) {
    for (const std::int64_t dim : {1, 15, 17, 33, 63, 65, 72, 96, 100, 129, 160, 192, 255}) {
        for (const DType dtype : kStorageTypes) {
            Case c{.id = "guards"};
            c.problem = make_problem(1, 66, 67, 2, 1, dim, dtype);
            c.layout = dim % 2 == 0 ? Layout::bhsd : Layout::bshd;
            c.threads = 3;
            CaseRunner runner(c);
            for (const KernelInfo& kernel : kernels()) {
                const Outcome outcome = runner.run(kernel);
                EXPECT_TRUE(outcome.pass()) << kernel.name << " head_dim " << dim << "\n" << outcome.report.describe();
            }
        }
    }
}

void expect_rejected(const char* argument, const auto& call) {
    try {
        call();
        ADD_FAILURE() << "was accepted, though " << argument << " is wrong";
    } catch (const Error& e) {
        EXPECT_EQ(e.code(), ErrorCode::invalid_argument) << e.what();
        EXPECT_EQ(e.argument(), argument) << e.what();
    }
}

TEST(BugFamilies, negative_window_is_an_error_bug_54) {
    Problem p = make_problem(1, 4, 4, 1, 1, 8);
    p.mask.window_left = -1;
    expect_rejected("window_left", [&] { (void)plan(p); });
    p.mask = {.window_right = -1};
    expect_rejected("window_right", [&] { (void)plan(p); });
}

// An invalid call changes no byte.
TEST(BugFamilies, malformed_cu_seqlens_are_refused_bug_64) {
    const std::vector<std::int64_t> lengths{3, 4, 5};
    Attention a(make_ragged(lengths, lengths, 2, 1, 8), 1, lengths, lengths);
    struct Wrong {
        std::int64_t index;
        double value;
    };
    for (Tensor Attention::*which : {&Attention::cu_q, &Attention::cu_kv}) {
        for (const Wrong wrong : {Wrong{0, 1}, {1, -1}, {1, 8}, {2, 2}, {2, 13}, {3, 13}}) {
            Attention b = a;
            *(b.*which).view.at<std::int32_t>(wrong.index) = static_cast<std::int32_t>(wrong.value);
            b.o.poison();
            b.lse.poison();
            const Attention before = b;
            const char* name = which == &Attention::cu_q ? "cu_seqlens_q" : "cu_seqlens_kv";
            for_each_kernel(Pass::forward, [&](const KernelInfo& kernel) {
                if (kernel.backend == Backend::cuda)
                    return;  // CUDA kernels clamp them: a check would wait for the device
                expect_rejected(name, [&] { (void)run_on(b, kernel, b.forward_args(), forward); });
                EXPECT_TRUE(b.o.same_bits(before.o) && b.lse.same_bits(before.lse));
            });
        }
    }
}

TEST(BugFamilies, key_and_value_lengths_that_differ_are_refused_bug_84) {
    Attention a(make_problem(1, 8, 8, 1, 1, 8));
    a.v.view.shape[1] = 7;
    for_each_kernel(Pass::forward, [&](const KernelInfo& kernel) {
        if (kernel.backend == Backend::cuda) return;  // it takes no host tensors
        expect_rejected("v", [&] { (void)run_on(a, kernel, a.forward_args(), forward); });
    });
}

}  // namespace
}  // namespace tessera::check::bug_families_limits_test
