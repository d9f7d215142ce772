// SPDX-License-Identifier: Apache-2.0
//
// The times at which the thread blocks of decode_block()'s one launch reach its phases, by the kernel itself.
//
//     block_timeline HIDDEN HEADS_Q HEADS_KV HEAD_DIM BATCH KEYS LAYERS TABLE.csv
//
// It launches the blocks of LAYERS layers, which have weights and caches of their own, and records the last but one.
// block_timeline.py draws the table.
#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <string>
#include <vector>

#include "cuda/block/kernels.hpp"
#include "cuda/block/launch.hpp"
#include "cuda/device.hpp"
#include "tessera/decode_block.hpp"

namespace tessera::bench {
namespace {

using cuda::block::Mark;

constexpr Device kDevice{DeviceType::cuda, 0};
constexpr std::int64_t kPage = 16;

struct Named {
    Mark mark;
    const char* name;
};
/// The marks of the consumer warps, and of the producer warp.
constexpr Named kMarks[] = {{Mark::start, "start"},
                            {Mark::inputs, "launch before has ended"},
                            {Mark::normed, "norm of x"},
                            {Mark::qkv_done, "Q, K, V written"},
                            {Mark::queries, "Q of the split"},
                            {Mark::attention_done, "splits written"},
                            {Mark::partials, "partial results read"},
                            {Mark::combined, "O written"},
                            {Mark::output_ready, "all of O read"},
                            {Mark::end, "result written"},
                            {Mark::loads_qkv, "weights of Q, K, V asked for"},
                            {Mark::loads_keys, "keys asked for"},
                            {Mark::loads_output, "weights of the output asked for"}};

/// Device memory, all 0, that is freed with the process.
void* memory(std::int64_t bytes) {
    void* data = nullptr;
    cuda::check(cudaMalloc(&data, static_cast<std::size_t>(bytes)), "memory");
    cuda::check(cudaMemset(data, 0, static_cast<std::size_t>(bytes)), "memory");
    return data;
}

TensorView tensor(DType dtype, std::initializer_list<std::int64_t> shape) {
    TensorView view = dense_view(nullptr, dtype, shape, kDevice);
    view.data = memory(view.size() * static_cast<std::int64_t>(size_of(dtype)));
    return view;
}

TensorView integers(const std::vector<std::int32_t>& values, std::initializer_list<std::int64_t> shape) {
    TensorView view = tensor(DType::int32, shape);
    cuda::check(cudaMemcpy(view.data, values.data(), values.size() * sizeof(values[0]), cudaMemcpyHostToDevice),
                "integers");
    return view;
}

DecodeBlockArgs layer_of(const DecodeBlockProblem& p, const TensorView& x) {
    const std::int64_t pages = p.batch * p.capacity / kPage;
    std::vector<std::int32_t> numbers(static_cast<std::size_t>(pages));
    for (std::size_t i = 0; i < numbers.size(); ++i) numbers[i] = static_cast<std::int32_t>(i);
    const std::vector<std::int32_t> lengths(static_cast<std::size_t>(p.batch),
                                            static_cast<std::int32_t>(p.capacity - 1));
    DecodeBlockArgs args;
    args.x = args.residual = x;
    args.norm = tensor(DType::bf16, {p.hidden});
    args.w_qkv = tensor(DType::bf16, {p.qkv_rows(), p.hidden});
    args.w_o = tensor(DType::bf16, {p.hidden, p.heads_q * p.head_dim});
    args.rotary_cos = tensor(DType::fp32, {p.capacity, p.rotary_dim / 2});
    args.rotary_sin = args.rotary_cos;
    args.k_cache = tensor(DType::bf16, {pages, kPage, p.heads_kv, p.head_dim});
    args.v_cache = tensor(DType::bf16, {pages, kPage, p.heads_kv, p.head_dim});
    args.kv_lengths = args.positions = integers(lengths, {p.batch});
    args.page_table = integers(numbers, {p.batch, p.capacity / kPage});
    args.out = tensor(DType::bf16, {p.batch, p.hidden});
    return args;
}

int run(char** argv) {
    const auto number = [&](int i) { return std::strtoll(argv[i], nullptr, 10); };
    DecodeBlockProblem p;
    p.hidden = number(1);
    p.heads_q = number(2);
    p.heads_kv = number(3);
    p.head_dim = p.rotary_dim = number(4);
    p.batch = number(5);
    p.capacity = number(6);
    p.page_size = kPage;
    const DecodeBlockPlan plan = decode_block_plan(p, {.way = DecodeBlockWay::one_launch, .device = kDevice});
    std::vector<DecodeBlockArgs> layers;
    TensorView x = tensor(DType::bf16, {p.batch, p.hidden});
    for (std::int64_t i = 0; i < std::max<long long>(number(7), 2); ++i) {
        layers.push_back(layer_of(p, x));
        x = layers.back().out;
    }
    const std::span<std::byte> workspace(
        static_cast<std::byte*>(memory(static_cast<std::int64_t>(plan.workspace_bytes))), plan.workspace_bytes);
    const auto count = static_cast<std::size_t>(Mark::count);
    std::vector<std::uint64_t> times(static_cast<std::size_t>(cuda::block::marks_of_launch(kDevice)));
    auto* const marks = static_cast<std::uint64_t*>(memory(static_cast<std::int64_t>(times.size() * sizeof(times[0]))));
    for (int round = 0; round < 20; ++round) {
        for (std::size_t i = 0; i < layers.size(); ++i) {
            const DecodeBlockCall call{p, layers[i], kDevice, {}, 1, nullptr, false, {}};
            cuda::block::one_launch(call, workspace, {.marks = i + 2 == layers.size() ? marks : nullptr});
        }
    }
    cuda::check(cudaMemcpy(times.data(), marks, times.size() * sizeof(times[0]), cudaMemcpyDeviceToHost), "times");

    const std::size_t ctas = times.size() / count;
    std::uint64_t first = ~std::uint64_t{0};
    for (std::size_t c = 0; c < ctas; ++c) first = std::min(first, times[c * count]);
    std::ofstream table(argv[8]);
    table << "thread block";
    for (const Named& m : kMarks) table << ",\"" << m.name << '"';
    table << "\n";
    for (std::size_t c = 0; c < ctas; ++c) {
        table << c;
        for (std::size_t i = 0; i < std::size(kMarks); ++i) {
            const std::uint64_t time = times[c * count + static_cast<std::size_t>(kMarks[i].mark)];
            table << ",";
            if (time == 0) continue;  // a thread block without this phase
            table << time - first;
        }
        table << "\n";
    }
    return 0;
}

}  // namespace
}  // namespace tessera::bench

int main(int argc, char** argv) {
    if (argc != 9) {
        fmt::print(stderr, "usage: {} HIDDEN HEADS_Q HEADS_KV HEAD_DIM BATCH KEYS LAYERS TABLE.csv\n", argv[0]);
        return 2;
    }
    try {
        return tessera::bench::run(argv);
    } catch (const std::exception& error) {
        fmt::print(stderr, "{}\n", error.what());
        return 1;
    }
}
