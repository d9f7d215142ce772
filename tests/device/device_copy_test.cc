// SPDX-License-Identifier: Apache-2.0
#include "device/device_copy.hpp"

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "tessera/error.hpp"

namespace tessera::device::device_copy_test {
namespace {

constexpr Device kCuda{DeviceType::cuda, 0};

class DeviceCopyTest : public testing::Test {
 protected:
    void SetUp() override {
        if (!cuda_available()) GTEST_SKIP() << "no CUDA device";
        for (std::size_t i = 0; i < memory.size(); ++i) memory[i] = static_cast<std::byte>(i * 7);
    }
    float* at(std::size_t element) { return reinterpret_cast<float*>(memory.data()) + element; }

    std::vector<std::byte> memory = std::vector<std::byte>(4096);
};

TEST(DeviceCopyWithout, a_device_is_unavailable) {
    if (cuda_available()) GTEST_SKIP() << "there is a CUDA device";
    float value = 1;
    DeviceCopy copy(kCuda);
    try {
        copy.add(dense_view(&value, DType::fp32, {1}));
        ADD_FAILURE();
    } catch (const Error& e) {
        EXPECT_EQ(e.code(), ErrorCode::device_unavailable) << e.what();
    }
    EXPECT_FALSE(copy.add(TensorView{}).given());
    EXPECT_NO_THROW(synchronize(Device{}));
}

TEST_F(DeviceCopyTest, brings_every_byte_back) {
    const std::vector<std::byte> before = memory;
    DeviceCopy copy(kCuda);
    const TensorView host = strided_view(at(500), DType::fp32, {5, 3}, {-40, 0});
    const TensorView view = copy.add(host, memory);
    EXPECT_EQ(view.device, kCuda);
    EXPECT_EQ(view.strides, host.strides);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(view.data) % 256, 500 * sizeof(float) % 256);
    std::memset(memory.data(), 0, memory.size());
    copy.copy_back();
    EXPECT_TRUE(memory == before);
}

TEST_F(DeviceCopyTest, copies_what_a_view_spans_and_no_more) {
    const std::vector<std::byte> before = memory;
    DeviceCopy copy(kCuda);
    copy.add(strided_view(at(100), DType::fp32, {4}, {-10}));  // elements 70..100
    std::memset(memory.data(), 0, memory.size());
    copy.copy_back();
    for (std::size_t i = 0; i < memory.size(); ++i) {
        const bool spanned = i >= 70 * sizeof(float) && i < 101 * sizeof(float);
        ASSERT_EQ(memory[i], spanned ? before[i] : std::byte{0}) << i;
    }
}

TEST_F(DeviceCopyTest, tensors_that_share_memory_share_it_there) {
    ForwardArgs args;
    args.q = strided_view(at(0), DType::fp32, {1, 4, 2, 8}, {0, 48, 8, 1});
    args.k = strided_view(at(16), DType::fp32, {1, 4, 2, 8}, {0, 48, 8, 1});
    args.v = strided_view(at(32), DType::fp32, {1, 4, 2, 8}, {0, 48, 8, 1});
    args.o = dense_view(at(512), DType::fp32, {1, 4, 2, 8});
    DeviceCopy copy(kCuda);
    const ForwardArgs there = copy.add(args);
    EXPECT_EQ(there.k.at<float>(0) - there.q.at<float>(0), 16);
    EXPECT_EQ(there.v.at<float>(0) - there.q.at<float>(0), 32);
    EXPECT_FALSE(there.bias.given());
    EXPECT_EQ(there.o.device, kCuda);
}

TEST_F(DeviceCopyTest, a_workspace_has_bands) {
    DeviceCopy copy(kCuda);
    EXPECT_TRUE(copy.workspace_bands_unchanged());
    for (const std::size_t bytes : {std::size_t{0}, std::size_t{1000}}) {
        const auto workspace = copy.workspace(bytes);
        EXPECT_EQ(workspace.size(), bytes);
        EXPECT_EQ(reinterpret_cast<std::uintptr_t>(workspace.data()) % Plan::kWorkspaceAlignment, 0U);
        EXPECT_TRUE(copy.workspace_bands_unchanged());
    }
    EXPECT_THROW(copy.workspace(std::size_t{1} << 50), Error);
}

}  // namespace
}  // namespace tessera::device::device_copy_test
