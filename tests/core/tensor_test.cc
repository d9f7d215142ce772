// SPDX-License-Identifier: Apache-2.0
#include "tessera/tensor.hpp"

#include <gtest/gtest.h>

#include <array>
#include <limits>

#include "tessera/error.hpp"

namespace tessera::tensor_test {
namespace {

template <class F>
void expect_invalid(const char* argument, const F& f) {
    try {
        f();
        FAIL() << "expected an error about " << argument;
    } catch (const Error& e) {
        EXPECT_EQ(e.code(), ErrorCode::invalid_argument);
        EXPECT_EQ(e.argument(), argument);
        EXPECT_EQ(std::string(e.what()).rfind(std::string(argument) + ": ", 0), 0u) << e.what();
    }
}

TEST(TensorView, default_is_not_given) {
    const TensorView none;
    EXPECT_FALSE(none.given());
    EXPECT_EQ(none.describe(), "nothing");
}

TEST(TensorView, dense_is_packed_in_c_order) {
    std::array<float, 24> memory{};
    const TensorView t = dense_view(memory.data(), DType::fp32, {2, 3, 4});
    EXPECT_EQ(t.rank, 3);
    EXPECT_EQ(t.size(), 24);
    EXPECT_EQ(t.strides, (std::array<std::int64_t, 4>{12, 4, 1, 0}));
    EXPECT_EQ(t.at<float>(1, 2, 3), &memory[23]);
    EXPECT_EQ(t.device, Device{});
    EXPECT_EQ(t.describe(), "fp32 [2, 3, 4] strides [12, 4, 1]");
}

TEST(TensorView, sizes_of_zero) {
    const TensorView t = dense_view(nullptr, DType::bf16, {2, 0, 4, 8});
    EXPECT_TRUE(t.given());
    EXPECT_EQ(t.size(), 0);
    EXPECT_EQ(t.strides, (std::array<std::int64_t, 4>{32, 32, 8, 1}));
}

TEST(TensorView, strided_views_go_anywhere) {
    std::array<double, 10> memory{};
    const TensorView backwards = strided_view(&memory[9], DType::fp64, {5, 3}, {-2, 0});
    EXPECT_EQ(backwards.at<double>(4, 2), &memory[1]);
    const TensorView constant_memory = strided_view(static_cast<const double*>(memory.data()), DType::fp64, {1}, {1});
    EXPECT_EQ(constant_memory.data, memory.data());
}

TEST(TensorView, transposed_is_the_same_memory) {
    std::array<float, 120> memory{};
    const TensorView bhsd = dense_view(memory.data(), DType::fp32, {1, 4, 5, 6}, {DeviceType::cuda, 3});
    const TensorView bshd = transposed(bhsd, 1, 2);
    EXPECT_EQ(bshd.shape, (std::array<std::int64_t, 4>{1, 5, 4, 6}));
    EXPECT_EQ(bshd.strides, (std::array<std::int64_t, 4>{120, 6, 30, 1}));
    EXPECT_EQ(bshd.at<float>(0, 2, 3, 1), bhsd.at<float>(0, 3, 2, 1));
    EXPECT_EQ(bshd.device, (Device{DeviceType::cuda, 3}));
    EXPECT_EQ(transposed(bhsd, 2, 2).strides, bhsd.strides);
}

TEST(TensorView, malformed_shapes_are_errors) {
    expect_invalid("shape", [] { dense_view(nullptr, DType::fp32, {}); });
    expect_invalid("shape", [] { dense_view(nullptr, DType::fp32, {1, 1, 1, 1, 1}); });
    expect_invalid("shape", [] { dense_view(nullptr, DType::fp32, {2, -1}); });
    expect_invalid("shape", [] { strided_view(nullptr, DType::fp32, {-1}, {1}); });
    expect_invalid("shape", [] { strided_view(nullptr, DType::fp32, {}, {}); });
    expect_invalid("strides", [] { strided_view(nullptr, DType::fp32, {2, 2}, {1}); });
    const TensorView t = dense_view(nullptr, DType::fp32, {2, 2});
    expect_invalid("dimension", [&] { transposed(t, 0, 2); });
    expect_invalid("dimension", [&] { transposed(t, -1, 0); });
}

TEST(TensorView, sizes_do_not_wrap) {
    constexpr std::int64_t kBig = std::int64_t{1} << 40;
    expect_invalid("shape", [] { dense_view(nullptr, DType::fp32, {kBig, kBig}); });
    EXPECT_EQ(strided_view(nullptr, DType::fp32, {kBig, kBig}, {0, 0}).size(),
              std::numeric_limits<std::int64_t>::max());
    EXPECT_EQ(strided_view(nullptr, DType::fp32, {kBig, kBig, 0}, {0, 0, 0}).size(), 0);
    EXPECT_EQ(dense_view(nullptr, DType::fp32, {kBig, 1 << 20}).size(), std::int64_t{1} << 60);
}

TEST(TensorView, a_wrong_rank_can_be_described) {
    TensorView t = dense_view(nullptr, DType::fp32, {0});
    t.rank = 9;
    EXPECT_EQ(t.describe(), "fp32 [0, 0, 0, 0] strides [1, 0, 0, 0]");
    EXPECT_EQ(t.size(), 0);
    t.rank = -1;
    EXPECT_EQ(t.describe(), "nothing");
}

TEST(DTypes, sizes_and_names) {
    EXPECT_EQ(size_of(DType::fp64), 8);
    EXPECT_EQ(size_of(DType::fp32), 4);
    EXPECT_EQ(size_of(DType::fp16), 2);
    EXPECT_EQ(size_of(DType::bf16), 2);
    EXPECT_EQ(size_of(DType::int32), 4);
    EXPECT_EQ(size_of(DType::int64), 8);
    for (const DType d : {DType::fp64, DType::fp32, DType::fp16, DType::bf16})
        EXPECT_TRUE(is_floating(d)) << name_of(d);
    for (const DType d : {DType::int32, DType::int64}) EXPECT_FALSE(is_floating(d)) << name_of(d);
}

}  // namespace
}  // namespace tessera::tensor_test
