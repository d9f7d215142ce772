// SPDX-License-Identifier: Apache-2.0
//
// An additive bias in 16 bits on a GPU: the layout of the bias and of its gradient changes no bit. fa3 reads pairs of
// keys where the layout has them as aligned words, else single elements. Skipped without a GPU.
#include <gtest/gtest.h>

#include <tuple>

#include "kernels/support.hpp"
#include "registry.hpp"

namespace tessera::check::cuda_bias_test {
namespace {

struct Rows {
    const char* name;
    std::int64_t stride;  ///< elements from a query's bias to the next query's, beyond the keys
};
/// A copy to the device aligns the first element, so that only the strides differ there.
constexpr Rows kLayouts[] = {{"pairs", 0}, {"wide pairs", 6}, {"odd rows", 1}};

/// [batch, heads, len_q, len_kv] with other rows.
Tensor with_rows(const Tensor& from, const Rows& rows) {
    const std::int64_t batch = from.view.shape[0], heads = from.view.shape[1];
    const std::int64_t len_q = from.view.shape[2], len_kv = from.view.shape[3];
    Tensor to(from.view.dtype, {batch, heads, len_q, len_kv + rows.stride});
    to.view.shape[3] = len_kv;
    for (std::int64_t i = 0; i < batch * heads * len_q * len_kv; ++i) {
        const std::int64_t b = i / (heads * len_q * len_kv), h = i / (len_q * len_kv) % heads, q = i / len_kv % len_q,
                           j = i % len_kv;
        to.set(from.get(b, h, q, j), b, h, q, j);
    }
    return to;
}

class CudaBias : public testing::TestWithParam<std::tuple<DType, int>> {
 protected:
    void SetUp() override {
        if (const auto reason = unavailable({DeviceType::cuda, 0})) GTEST_SKIP() << *reason;
    }
};

TEST_P(CudaBias, has_the_same_bits_in_every_layout) {
    const DType dtype = std::get<0>(GetParam());
    const int head_dim = std::get<1>(GetParam());
    Problem p = make_problem(2, 200, 270, 4, 2, head_dim, dtype);
    p.bias = p.bias_gradient = true;
    p.mask.causal = Causal::bottom_right;
    Attention plain(p, 5);
    const Tensor drawn = plain.bias;
    plain.bias = Tensor(dtype, {2, 4, 200, 270});
    for_each_element(plain.bias.view, [&, i = drawn.memory.data()](std::int64_t, std::byte* element) mutable {
        store_from_double(element, dtype, load_as_double(i, DType::fp32));
        i += sizeof(float);
    });
    plain.prepare_backward();
    for (const KernelInfo& kernel : kernels()) {
        if (kernel.backend != Backend::cuda || splits_keys(kernel)) continue;
        SCOPED_TRACE(kernel.name);
        Tensor first[4];
        for (const Rows& rows : kLayouts) {
            Attention a = plain;
            a.bias = with_rows(plain.bias, rows);
            a.dbias = a.bias;
            if (kernel.pass == Pass::forward) {
                ASSERT_TRUE(a.forward(kernel));
                EXPECT_TRUE(a.check_forward().pass()) << rows.name << "\n" << a.check_forward().describe();
            } else {
                ASSERT_TRUE(a.backward(kernel));
                EXPECT_TRUE(a.check_backward().pass()) << rows.name << "\n" << a.check_backward().describe();
            }
            Tensor found[4] = {a.o, a.lse, {}, {}};
            if (kernel.pass == Pass::backward) {
                const Rows dense{"", 0};
                Tensor gradients[4] = {a.dq, a.dk, a.dv, with_rows(a.dbias, dense)};
                std::copy(gradients, gradients + 4, found);
            }
            for (int i = 0; i < 4; ++i) {
                if (rows.stride == 0) first[i] = found[i];
                EXPECT_TRUE(found[i].same_bits(first[i])) << rows.name << ", result " << i;
            }
        }
    }
}

INSTANTIATE_TEST_SUITE_P(Types, CudaBias,
                         testing::Combine(testing::Values(DType::bf16, DType::fp16), testing::Values(64, 128)),
                         [](const auto& which) {
                             return std::string(name_of(std::get<0>(which.param))) + "_" +
                                    std::to_string(std::get<1>(which.param));
                         });

}  // namespace
}  // namespace tessera::check::cuda_bias_test
