// SPDX-License-Identifier: Apache-2.0
//
// decode_block() as one launch, whose thread blocks wait for each other: the bits of the chain in a CUDA graph of many
// launches, while other work keeps the device busy, on two streams at once, and after other Problems in one workspace.
#include <array>
#include <memory>
#include <optional>
#include <vector>

#include "cuda/stress.cuh"

// nvcc hands a pointer to a member of DecodeBlockTensor to the host compiler with parentheses, which warns of them.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wparentheses"
#include "kernels/decode_block_case.hpp"
#pragma GCC diagnostic pop
#include "long_run.hpp"

namespace tessera::cuda::test {
namespace {

using decode_block_case::Block;

Block block_of(std::int64_t batch, std::int64_t hidden, std::int64_t heads_q, std::int64_t heads_kv,
               std::int64_t head_dim, std::vector<std::int32_t> lengths) {
    Block block;
    block.problem.batch = batch;
    block.problem.hidden = hidden;
    block.problem.heads_q = heads_q;
    block.problem.heads_kv = heads_kv;
    block.problem.head_dim = head_dim;
    block.problem.capacity = 1024;
    block.problem.page_size = 16;
    block.problem.rotary_dim = head_dim;
    block.problem.qk_norm = head_dim == 128;
    block.lengths = std::move(lengths);
    block.make();
    return block;
}

std::vector<Block> blocks() {
    std::vector<Block> all;
    all.push_back(block_of(1, 2048, 32, 8, 64, {1023}));
    all.push_back(block_of(3, 1024, 16, 8, 128, {700, 0, 64}));
    all.push_back(block_of(8, 512, 10, 2, 64, {1, 5, 100, 1000, 1024, -1, 63, 64}));
    return all;
}

/// A call whose tensors are on the device, and the result that the chain has for it.
class OnDeviceBlock {
 public:
    explicit OnDeviceBlock(const Block& block) : host_(block) {
        for (const DecodeBlockTensor& t : kDecodeBlockTensors) args_.*t.view = copy_.add(host_.args().*t.view);
        const DecodeBlockPlan chain = plan_for(DecodeBlockWay::chain);
        decode_block(chain, args_, copy_.workspace(chain.workspace_bytes));
        plan_ = plan_for(DecodeBlockWay::one_launch);
        device::synchronize(kDevice);
        cudaMemcpy(expected_.data(), args_.out.data, bytes(), cudaMemcpyDeviceToDevice);
    }

    const DecodeBlockPlan& plan() const { return *plan_; }
    void clear(cudaStream_t stream) const { cudaMemsetAsync(args_.out.data, 0xFF, bytes(), stream); }
    void run(std::span<std::byte> workspace, cudaStream_t stream) const {
        decode_block(*plan_, args_, workspace, {.stream = stream});
    }
    /// Is the result that of the chain? Waits for the stream.
    bool is_right(cudaStream_t stream) const {
        std::vector<std::byte> result(bytes()), expected(bytes());
        cudaStreamSynchronize(stream);
        cudaMemcpy(result.data(), args_.out.data, bytes(), cudaMemcpyDeviceToHost);
        cudaMemcpy(expected.data(), expected_.data(), bytes(), cudaMemcpyDeviceToHost);
        return result == expected;
    }

 private:
    DecodeBlockPlan plan_for(DecodeBlockWay way) const {
        return decode_block_plan(host_.problem, {.way = way, .device = kDevice});
    }
    std::size_t bytes() const { return static_cast<std::size_t>(host_.problem.batch * host_.problem.hidden) * 2; }

    Block host_;
    device::DeviceCopy copy_{kDevice};
    DecodeBlockArgs args_;
    Memory expected_{static_cast<std::size_t>(host_.problem.batch * host_.problem.hidden) * 2};
    std::optional<DecodeBlockPlan> plan_;
};

/// A workspace whose first bytes are 0, the others poison.
class BlockWorkspace {
 public:
    BlockWorkspace(std::size_t bytes, std::size_t counters) : memory_(bytes) {
        cudaMemset(memory_.data(), 0xFF, bytes);
        cudaMemset(memory_.data(), 0, counters);
        cudaDeviceSynchronize();
    }
    std::span<std::byte> span() const { return {static_cast<std::byte*>(memory_.data()), memory_.bytes()}; }

 private:
    Memory memory_;
};
BlockWorkspace workspace_of(const OnDeviceBlock& block) {
    return {block.plan().workspace_bytes, block.plan().counter_bytes};
}

class DecodeBlocks : public OnDevice {
 protected:
    void SetUp() override {
        OnDevice::SetUp();
        if (IsSkipped()) return;
        try {
            for (const Block& block : blocks()) on_device_.push_back(std::make_unique<OnDeviceBlock>(block));
        } catch (const Error& error) {
            if (error.code() != ErrorCode::unsupported) throw;
            GTEST_SKIP() << error.what();
        }
    }
    std::vector<std::unique_ptr<OnDeviceBlock>> on_device_;
};

/// Keeps some multiprocessors busy for a while.
__global__ void wait_nanoseconds(unsigned nanoseconds) {
    for (unsigned waited = 0; waited < nanoseconds; waited += 500) __nanosleep(500);
}

TEST_F(DecodeBlocks, a_graph_of_many_launches_has_the_bits_of_the_chain_on_a_busy_device) {
    constexpr int kLaunches = 1000;
    const int replays = long_run() ? 340 : 5;  // with TESSERA_LONG a million launches in three Problems
    for (const auto& block : on_device_) {
        const BlockWorkspace workspace = workspace_of(*block);
        const Stream stream, other;
        cudaGraph_t graph = nullptr;
        cudaGraphExec_t executable = nullptr;
        ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
        for (int i = 0; i < kLaunches; ++i) block->run(workspace.span(), stream);
        ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
        ASSERT_EQ(cudaGraphInstantiate(&executable, graph, 0), cudaSuccess);
        for (int replay = 0; replay < replays; ++replay) {
            for (int i = 0; i < 20; ++i)
                wait_nanoseconds<<<1 + (7 * i + replay) % 61, 256, 0, other>>>(static_cast<unsigned>(i) * 1000);
            block->clear(stream);
            ASSERT_EQ(cudaGraphLaunch(executable, stream), cudaSuccess);
            ASSERT_TRUE(block->is_right(stream)) << "replay " << replay;
        }
        cudaStreamSynchronize(other);
        cudaGraphExecDestroy(executable);
        cudaGraphDestroy(graph);
    }
}

TEST_F(DecodeBlocks, launches_on_two_streams_at_once_do_not_wait_for_each_other) {
    const OnDeviceBlock &first = *on_device_[0], &second = *on_device_[1];
    const BlockWorkspace of_first = workspace_of(first), of_second = workspace_of(second);
    const Stream stream, other;
    for (int round = 0; round < 20; ++round) {
        first.clear(stream);
        second.clear(other);
        for (int i = 0; i < 100; ++i) {
            first.run(of_first.span(), stream);
            second.run(of_second.span(), other);
        }
        ASSERT_TRUE(first.is_right(stream)) << "round " << round;
        ASSERT_TRUE(second.is_right(other)) << "round " << round;
    }
}

TEST_F(DecodeBlocks, several_problems_follow_each_other_in_one_workspace) {
    std::size_t bytes = 0, counters = 0;
    for (const auto& block : on_device_) {
        bytes = std::max(bytes, block->plan().workspace_bytes);
        counters = std::max(counters, block->plan().counter_bytes);
    }
    const BlockWorkspace workspace(bytes, counters);
    const Stream stream;
    for (int round = 0; round < 200; ++round) {
        for (std::size_t i = 0; i < on_device_.size(); ++i) {
            const OnDeviceBlock& block = *on_device_[(i * 2 + static_cast<std::size_t>(round)) % on_device_.size()];
            block.clear(stream);
            block.run(workspace.span(), stream);
            ASSERT_TRUE(block.is_right(stream)) << "round " << round << ", " << block.plan().problem.describe();
        }
    }
}

/// The number of a launch is counted in the first four bytes of the workspace. 0 is that of words that were never
/// written, so 1 follows on 2^32 - 1.
TEST_F(DecodeBlocks, the_numbers_of_launches_begin_again_with_1) {
    const Stream stream;
    for (const auto& block : on_device_) {
        const BlockWorkspace workspace = workspace_of(*block);
        cudaMemset(workspace.span().data(), 0xFF, sizeof(std::uint32_t));
        cudaDeviceSynchronize();
        for (int launch = 0; launch < 2; ++launch) {
            block->clear(stream);
            block->run(workspace.span(), stream);
            ASSERT_TRUE(block->is_right(stream)) << "launch " << launch;
        }
    }
}

}  // namespace
}  // namespace tessera::cuda::test
