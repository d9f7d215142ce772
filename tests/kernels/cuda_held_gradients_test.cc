// SPDX-License-Identifier: Apache-2.0
//
// Gradients in fp16 are scaled by powers of two (docs/numerics.md). The inputs are very large numbers, very small ones
// and both, with and without the residual of O. Skipped without a GPU.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>

#include "kernels/support.hpp"
#include "registry.hpp"

namespace tessera::check::cuda_held_gradients_test {
namespace {

/// The Dims reach every compiled shape of fa3; the features the general ones.
struct Case {
    const char* feature;
    Dims dims;
};
const Case kCases[] = {{"plain", {64, 64}},   {"plain", {128, 128}},   {"plain", {192, 128}},  {"plain", {192, 192}},
                       {"plain", {256, 256}}, {"causal", {64, 64}},    {"causal", {128, 128}}, {"causal", {192, 128}},
                       {"ragged", {64, 64}},  {"ragged", {128, 128}},  {"ragged", {256, 256}}, {"dropout", {64, 64}},
                       {"dropout", {96, 96}}, {"softcap", {128, 128}}, {"alibi", {64, 64}},    {"window", {128, 128}}};

void PrintTo(const Case& c, std::ostream* out) { *out << c.feature << " " << c.dims.qk << "/" << c.dims.v; }

Attention make_call(const Case& c) {
    const std::string feature = c.feature;
    const bool ragged = feature == "ragged";
    Problem p = ragged ? make_ragged({33, 0, 150}, {200, 9, 165}, 4, 2, c.dims.qk, DType::fp16)
                       : make_problem(2, 150, 300, 4, feature == "causal" ? 2 : 4, c.dims.qk, DType::fp16);
    p.head_dim_v = c.dims.v;
    if (feature == "causal" || feature == "alibi") p.mask.causal = Causal::bottom_right;
    p.alibi = feature == "alibi";
    if (feature == "window") p.mask = {.window_left = 40, .window_right = 3};
    if (feature == "dropout") p.dropout = {.probability = 0.97, .seed = 7};
    if (feature == "softcap") p.softcap = 3;
    return ragged ? Attention(p, 1, {33, 0, 150}, {200, 9, 165}) : Attention(p);
}

/// Multiplies row i of every head of dO by 2^power(i), and each head by 2^(head * by_head).
void scale_rows(Tensor& t, const std::function<double(std::int64_t)>& power, int by_head = 0) {
    const std::int64_t columns = t.view.shape[t.view.rank - 1];
    const std::int64_t heads = t.view.shape[t.view.rank - 2];
    for_each_element(t.view, [&](std::int64_t flat, std::byte* element) {
        const std::int64_t row = flat / columns / heads;
        const double head = static_cast<double>(flat / columns % heads) * by_head;
        store_from_double(element, t.view.dtype, std::exp2(power(row) + head) * load_as_double(element, t.view.dtype));
    });
}

struct Sizes {
    const char* name;
    std::function<void(Attention&)> make;
};
const Sizes kSizes[] = {
    {"dO near the largest number", [](Attention& a) { a.d_o.scale_by(4096); }},
    {"dO and V near it", [](Attention& a) { a.d_o.scale_by(4096), a.v.scale_by(512); }},
    {"dO of a scaled loss", [](Attention& a) { a.d_o.scale_by(0x1p-13); }},
    {"dO and V subnormal", [](Attention& a) { a.d_o.scale_by(0x1p-15), a.v.scale_by(0x1p-14); }},
    {"K and Q small", [](Attention& a) { a.q.scale_by(0x1p-8), a.k.scale_by(0x1p-10); }},
    {"one row of dO large",
     [](Attention& a) { scale_rows(a.d_o, [](std::int64_t i) { return i == 40 ? 10.0 : 0.0; }); }},
    {"rows of dO fall",
     [](Attention& a) { scale_rows(a.d_o, [](std::int64_t i) { return -0.05 * static_cast<double>(i); }); }},
    {"heads of dO rise",
     [](Attention& a) {
         scale_rows(
             a.d_o, [](std::int64_t) { return -10.0; }, 5);
     }},
    {"one row of V large", [](Attention& a) { scale_rows(a.v, [](std::int64_t i) { return i == 17 ? 9.0 : 0.0; }); }},
    {"sharp weights", [](Attention& a) { a.q.scale_by(6); }},
    {"LSE over 256", [](Attention& a) { a.q.scale_by(20), a.k.scale_by(20); }},
    {"dLSE large",
     [](Attention& a) {
         a.dlse = a.lse;
         fill(a.dlse.view, Fill::normal, 9);
         a.dlse.scale_by(1e4);
     }},
};

class CudaHeldGradients : public testing::TestWithParam<Case> {
 protected:
    void SetUp() override {
        if (const auto reason = unavailable({DeviceType::cuda, 0})) GTEST_SKIP() << *reason;
    }
};

void expect_right(Attention& a, const KernelInfo& kernel, const char* which) {
    ASSERT_TRUE(a.backward(kernel));
    const Report report = a.check_backward();
    EXPECT_TRUE(report.pass()) << kernel.name << ", " << which << ", " << a.problem.describe() << "\n"
                               << report.describe();
}

TEST_P(CudaHeldGradients, are_right_whatever_the_sizes) {
    for (const Sizes& sizes : kSizes) {
        SCOPED_TRACE(sizes.name);
        Attention a = make_call(GetParam());
        sizes.make(a);
        a.prepare_backward();
        for_each_kernel(Pass::backward, [&](const KernelInfo& kernel) {
            if (kernel.name != "cuda.fa3.backward" && kernel.name != "cuda.fa2.backward") return;
            expect_right(a, kernel, "summed");
        });
        const KernelInfo* first = nullptr;  // the first that writes the residual
        for_each_kernel(Pass::forward, [&](const KernelInfo& kernel) {
            if (kernel.name == "cuda.fa3.forward") first = &kernel;
        });
        ASSERT_NE(first, nullptr);
        a.keep_residual();
        if (!a.forward(*first)) continue;
        for_each_kernel(Pass::backward, [&](const KernelInfo& kernel) {
            if (kernel.name == "cuda.fa3.backward") expect_right(a, kernel, "with the residual of O");
        });
    }
}

/// Replaces elements that are not finite in the reference by the reference's, so that they are not judged: infinity
/// times 0 or minus infinity depends on the order of additions. If all pairs count, none of them may be finite in
/// `got`. (A dropped pair may be left out, and the slope of a softcap is 0 far out.)
void expect_not_finite(Tensor& got, const TensorView& right, bool every_pair) {
    const auto* values = static_cast<const double*>(right.data);
    std::int64_t look_finite = 0;
    for_each_element(got.view, [&](std::int64_t flat, std::byte* element) {
        if (std::isfinite(values[flat])) return;
        look_finite += static_cast<int>(std::isfinite(load_as_double(element, got.view.dtype)));
        store_from_double(element, got.view.dtype, values[flat]);
    });
    if (every_pair) {
        EXPECT_EQ(look_finite, 0);
    }
}

/// NaN and infinities do not count for the powers of two: gradients that do not depend on them stay within the limits.
TEST_P(CudaHeldGradients, do_not_depend_on_what_is_not_finite) {
    for (const double value : {std::nan(""), HUGE_VAL, -HUGE_VAL}) {
        for (Tensor Attention::*const which : {&Attention::d_o, &Attention::v, &Attention::q}) {
            Attention a = make_call(GetParam());
            if (a.problem.ragged) (a.*which).set(value, 20, 1, 3);
            else (a.*which).set(value, 1, 20, 1, 3);
            a.prepare_backward();
            for_each_kernel(Pass::backward, [&](const KernelInfo& kernel) {
                if (kernel.name != "cuda.fa3.backward") return;
                ASSERT_TRUE(a.backward(kernel));
                const BackwardGold right(a.problem, a.backward_args());
                const bool every_pair = a.problem.dropout.probability == 0 && a.problem.softcap == 0;
                expect_not_finite(a.dq, right.dq(), every_pair);
                expect_not_finite(a.dk, right.dk(), every_pair);
                expect_not_finite(a.dv, right.dv(), every_pair);
                const Report report = a.check_backward();
                EXPECT_TRUE(report.pass()) << a.problem.describe() << "\n" << report.describe();
            });
        }
    }
}

/// Dropout keeps one pair in 2^31, and dLSE still has all weights. dP of dropped pairs must not count for the powers of
/// two, whatever 1 / (1 - p) is.
TEST(CudaHeldGradientsOfDropped, dlse_is_what_is_left) {
    if (const auto reason = unavailable({DeviceType::cuda, 0})) GTEST_SKIP() << *reason;
    for (const std::int64_t head_dim : {64, 96, 128, 256}) {
        Problem p = make_problem(2, 150, 300, 4, 2, head_dim, DType::fp16);
        p.dropout = {.probability = 1 - 0x1p-31, .seed = 7};
        Attention a(p);
        a.dlse = a.lse;
        a.dlse.fill_value(1);
        a.prepare_backward();
        for_each_kernel(Pass::backward, [&](const KernelInfo& kernel) {
            if (kernel.backend != Backend::cuda || !a.backward(kernel)) return;
            const Report report = a.check_backward();
            EXPECT_TRUE(report.pass()) << a.problem.describe() << "\n" << report.describe();
        });
    }
}

INSTANTIATE_TEST_SUITE_P(Cases, CudaHeldGradients, testing::ValuesIn(kCases), [](const auto& which) {
    return std::string(which.param.feature) + "_" + std::to_string(which.param.dims.qk) + "x" +
           std::to_string(which.param.dims.v);
});

}  // namespace
}  // namespace tessera::check::cuda_held_gradients_test
