// SPDX-License-Identifier: Apache-2.0
//
// A ragged batch whose tensors are longer than its last offset: rows past it belong to no sequence. They may hold
// anything, the forward does not write their results, and their gradients are 0.
#include <gtest/gtest.h>

#include <cmath>

#include "kernels/support.hpp"

namespace tessera::check::rows_behind_test {
namespace {

/// The rows of `from`, and `spare` rows more, all bits 1: a NaN.
Tensor longer(const Tensor& from, std::int64_t spare) {
    const bool rows_last = from.view.rank == 2;  // LSE
    Tensor to = rows_last
                    ? Tensor(from.view.dtype, {from.view.shape[0], from.view.shape[1] + spare})
                    : Tensor(from.view.dtype, {from.view.shape[0] + spare, from.view.shape[1], from.view.shape[2]});
    to.poison();
    for (std::int64_t a = 0; a < from.view.shape[0]; ++a) {
        for (std::int64_t b = 0; b < from.view.shape[1]; ++b) {
            for (std::int64_t c = 0; c < (rows_last ? 1 : from.view.shape[2]); ++c) to.set(from.get(a, b, c), a, b, c);
        }
    }
    return to;
}

/// The call on longer tensors.
Attention padded(const Attention& a, std::int64_t spare_q, std::int64_t spare_kv) {
    Attention b = a;
    b.problem.total_q += spare_q;
    b.problem.total_kv += spare_kv;
    for (Tensor Attention::*t :
         {&Attention::q, &Attention::o, &Attention::lse, &Attention::d_o, &Attention::dq, &Attention::dlse})
        b.*t = longer(a.*t, spare_q);
    for (Tensor Attention::*t : {&Attention::k, &Attention::v, &Attention::dk, &Attention::dv})
        b.*t = longer(a.*t, spare_kv);
    return b;
}

/// Compares the rows of the sequences by their bits; rows past them are all `behind`, or poison if that is NaN.
void expect_rows(const Tensor& got, const Tensor& expected, double behind, const char* name) {
    const bool rows_last = got.view.rank == 2;
    const std::int64_t rows = expected.view.shape[rows_last ? 1 : 0];
    for (std::int64_t a = 0; a < got.view.shape[0]; ++a) {
        for (std::int64_t b = 0; b < got.view.shape[1]; ++b) {
            for (std::int64_t c = 0; c < (rows_last ? 1 : got.view.shape[2]); ++c) {
                const double value = got.get(a, b, c);
                if ((rows_last ? b : a) < rows)
                    ASSERT_EQ(value, expected.get(a, b, c)) << name << " " << a << " " << b << " " << c;
                else if (std::isnan(behind)) ASSERT_TRUE(std::isnan(value)) << name << " row " << a << " is written";
                else ASSERT_EQ(value, behind) << name << " row " << (rows_last ? b : a);
            }
        }
    }
}

class RowsBehind : public testing::TestWithParam<DType> {};

TEST_P(RowsBehind, belong_to_no_sequence) {
    struct Shape {
        std::vector<std::int64_t> lengths_q, lengths_kv;
        std::int64_t heads_q, heads_kv, spare_q, spare_kv;
    };
    const Shape shapes[] = {{{30, 0, 1}, {94, 5, 7}, 4, 2, 33, 987},
                            {{1, 3, 2}, {40, 600, 9}, 4, 1, 64, 1},  // few queries
                            {{140, 70}, {300, 70}, 2, 2, 1, 130},
                            {{0, 0}, {0, 0}, 2, 1, 70, 70},
                            {{65}, {65}, 2, 2, 0, 200},
                            {{65}, {65}, 2, 2, 200, 0}};
    for (const Shape& s : shapes) {
        for (const bool plain : {true, false}) {
            Problem p = make_ragged(s.lengths_q, s.lengths_kv, s.heads_q, s.heads_kv, 32, GetParam());
            if (!plain) {
                p.mask.causal = Causal::bottom_right;
                p.sinks = p.alibi = true;
                p.softcap = 20;
            }
            Attention exact(p, 3, s.lengths_q, s.lengths_kv);
            exact.dlse = exact.lse;
            fill(exact.dlse.view, Fill::normal, 9);
            SCOPED_TRACE(p.describe());
            const double nan = std::nan("");
            for_each_kernel(Pass::forward, [&](const KernelInfo& kernel) {
                if (kernel.backend == Backend::cuda || !exact.forward(kernel)) return;
                for (const int threads : {1, 3}) {
                    Attention more = padded(exact, s.spare_q, s.spare_kv);
                    ASSERT_TRUE(more.forward(kernel, {.threads = threads}));
                    expect_rows(more.o, exact.o, nan, "o");
                    expect_rows(more.lse, exact.lse, nan, "lse");
                }
            });
            exact.prepare_backward();
            for_each_kernel(Pass::backward, [&](const KernelInfo& kernel) {
                if (kernel.backend == Backend::cuda || !exact.backward(kernel)) return;
                for (const int threads : {1, 3}) {
                    Attention more = padded(exact, s.spare_q, s.spare_kv);
                    ASSERT_TRUE(more.backward(kernel, {.threads = threads}));
                    expect_rows(more.dq, exact.dq, 0, "dq");
                    expect_rows(more.dk, exact.dk, 0, "dk");
                    expect_rows(more.dv, exact.dv, 0, "dv");
                    EXPECT_TRUE(more.dsinks.same_bits(exact.dsinks));
                }
            });
        }
    }
}

INSTANTIATE_TEST_SUITE_P(All, RowsBehind, testing::ValuesIn(kStorageTypes),
                         [](const auto& which) { return std::string(name_of(which.param)); });

}  // namespace
}  // namespace tessera::check::rows_behind_test
