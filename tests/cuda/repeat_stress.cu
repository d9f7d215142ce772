// SPDX-License-Identifier: Apache-2.0
//
// A call gives the same bits a thousand times, while other work keeps the device busy. A missing barrier or fence would
// break that now and then.
#include <memory>

#include "cuda/stress.cuh"

namespace tessera::cuda::test {
namespace {

constexpr int kRepeats = 1000;

/// Keeps some multiprocessors busy for a while, a different while each time.
__global__ void spin(unsigned nanoseconds) {
    for (unsigned waited = 0; waited < nanoseconds; waited += 500) __nanosleep(500);
}

/// Work of other streams: copies that use the memory, and kernels of various lengths that occupy multiprocessors.
class Load {
 public:
    void add(int repeat) {
        constexpr std::size_t kHalf = kBytes / 2;
        auto* data = static_cast<std::byte*>(memory_.data());
        if (repeat % 4 == 0) cudaMemcpyAsync(data, data + kHalf, kHalf, cudaMemcpyDeviceToDevice, copies_);
        spin<<<1 + repeat * 7 % 61, 256, 0, kernels_>>>(static_cast<unsigned>(repeat * 37 % 20) * 1000);
    }

 private:
    static constexpr std::size_t kBytes = 32 << 20;
    Memory memory_{kBytes};
    Stream copies_, kernels_;
};

struct Configuration {
    const char* name;
    Problem problem;
    std::vector<std::int64_t> lengths_q{}, lengths_kv{};  // ragged
};
void PrintTo(const Configuration& c, std::ostream* out) { *out << c.problem.describe(); }

Problem shape(DType dtype, std::int64_t batch, std::int64_t len_q, std::int64_t len_kv, std::int64_t heads_q,
              std::int64_t heads_kv, std::int64_t dim, Mask mask = {}) {
    Problem p = check::make_problem(batch, len_q, len_kv, heads_q, heads_kv, dim, dtype);
    p.mask = mask;
    return p;
}

template <class Change>
Problem with(Problem p, const Change& change) {
    change(p);
    return p;
}

Configuration ragged(const char* name, DType dtype, std::int64_t dim, const std::vector<std::int64_t>& lengths_q,
                     const std::vector<std::int64_t>& lengths_kv, Mask mask) {
    Problem p = check::make_ragged(lengths_q, lengths_kv, 4, 2, dim, dtype);
    p.mask = mask;
    return {name, p, lengths_q, lengths_kv};
}

/// Every compiled head_dim and some between, every dtype and feature.
std::vector<Configuration> configurations() {
    constexpr DType kBf16 = DType::bf16, kFp16 = DType::fp16;
    constexpr Mask kCausal{.causal = Causal::bottom_right};
    constexpr Mask kTopLeft{.causal = Causal::top_left};
    constexpr Mask kWindow{.window_left = 100, .window_right = 30};
    constexpr Mask kCausalWindow{.causal = Causal::bottom_right, .window_left = 128};
    return {
        {"plain_64", shape(kBf16, 2, 512, 512, 4, 4, 64)},
        {"plain_128", shape(kBf16, 1, 1024, 1024, 4, 4, 128)},
        {"plain_256", shape(kBf16, 1, 512, 512, 4, 4, 256)},
        {"plain_128_fp16", shape(kFp16, 2, 384, 640, 4, 2, 128)},
        {"plain_64_fp32", shape(DType::fp32, 1, 200, 260, 4, 2, 64)},
        {"causal_64", shape(kFp16, 2, 700, 700, 4, 1, 64, kCausal)},
        {"causal_128", shape(kBf16, 3, 513, 513, 8, 2, 128, kCausal)},
        {"pairs_128", shape(kBf16, 1, 2100, 2100, 4, 2, 128)},
        {"head_pairs_128", shape(kBf16, 1, 8192, 8192, 4, 2, 128, kCausal)},
        {"causal_256", shape(kFp16, 1, 400, 777, 4, 2, 256, kCausal)},
        {"top_left_128", shape(kBf16, 1, 600, 300, 4, 4, 128, kTopLeft)},
        // More key blocks than multiprocessors; some have no queries ...
        {"many_blocks_128", shape(kBf16, 4, 200, 700, 12, 12, 128, kTopLeft)},
        {"many_groups_128", shape(kFp16, 6, 700, 700, 16, 8, 128, kCausal)},
        // ... and enough that the last key block writes dQ.
        {"last_makes_dq_128", shape(kBf16, 8, 260, 260, 48, 48, 128, kCausal)},
        {"window_64", shape(kBf16, 1, 1000, 1000, 4, 2, 64, kWindow)},
        {"window_128", shape(kFp16, 1, 1000, 1000, 4, 4, 128, kCausalWindow)},
        {"dims_40", shape(kBf16, 2, 300, 300, 4, 2, 40)},
        {"dims_96", shape(kFp16, 2, 300, 500, 4, 2, 96, kCausal)},
        {"dims_192_128", with(shape(kBf16, 1, 500, 500, 4, 4, 192, kCausal), [](Problem& p) { p.head_dim_v = 128; })},
        {"dims_33", shape(kBf16, 1, 200, 300, 4, 2, 33, kCausal)},
        {"softcap", with(shape(kBf16, 1, 500, 500, 4, 2, 128, kCausal), [](Problem& p) { p.softcap = 20; })},
        {"alibi", with(shape(kFp16, 1, 500, 500, 4, 2, 64, kCausal), [](Problem& p) { p.alibi = true; })},
        {"bias", with(shape(kBf16, 1, 300, 300, 2, 2, 128), [](Problem& p) { p.bias = true; })},
        {"dropout", with(shape(kBf16, 1, 300, 300, 4, 2, 256),
                         [](Problem& p) {
                             p.dropout = {0.2, 42};
                         })},
        ragged("ragged_128", kBf16, 128, {300, 0, 1, 513, 64}, {300, 20, 700, 513, 0}, kCausal),
        ragged("ragged_64", kFp16, 64, {65, 640, 3, 0, 190}, {65, 640, 3, 50, 100}, kCausalWindow),
    };
}

/// Adds to `count` how many of `words` differ.
__global__ void count_differences(const std::uint32_t* a, const std::uint32_t* b, std::size_t words, unsigned* count) {
    const std::size_t step = std::size_t{gridDim.x} * blockDim.x;
    unsigned mine = 0;
    for (std::size_t i = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < words; i += step) mine += a[i] != b[i];
    if (mine > 0) atomicAdd(count, mine);
}

/// An output on the device.
struct Output {
    void* data;
    std::size_t bytes;
};

/// Runs call(stream) kRepeats times while other streams are busy. Returns how many words of the outputs differed from
/// those of the first run, in all runs.
template <class Call>
unsigned differing_words(const std::vector<Output>& outputs, const Call& call) {
    const Mirror<unsigned> count(1);
    const Stream stream;
    Load load;
    std::vector<std::unique_ptr<Memory>> first;
    const auto run = [&] {
        for (const Output& out : outputs) cudaMemsetAsync(out.data, 0xFF, out.bytes, stream);
        call(stream);
    };
    run();
    for (const Output& out : outputs) {
        first.push_back(std::make_unique<Memory>(out.bytes));
        cudaMemcpyAsync(first.back()->data(), out.data, out.bytes, cudaMemcpyDeviceToDevice, stream);
    }
    for (int repeat = 0; repeat < kRepeats; ++repeat) {
        load.add(repeat);
        run();
        for (std::size_t i = 0; i < outputs.size(); ++i) {
            count_differences<<<64, 256, 0, stream>>>(static_cast<const std::uint32_t*>(outputs[i].data),
                                                      static_cast<const std::uint32_t*>(first[i]->data()),
                                                      outputs[i].bytes / 4, count.device());
        }
    }
    const cudaError_t status = cudaDeviceSynchronize();
    EXPECT_EQ(status, cudaSuccess) << cudaGetErrorString(status);
    unsigned differing = 0;
    cudaMemcpy(&differing, count.device(), sizeof(differing), cudaMemcpyDeviceToHost);
    return differing;
}

/// A backward whose tensors are on the device, with O and LSE of a forward.
struct BackwardOnDevice {
    const Plan& how;
    device::DeviceCopy copy{kDevice};
    BackwardArgs args;
    std::span<std::byte> workspace;
    std::vector<Output> outputs;

    BackwardOnDevice(const check::Attention& a, const Plan& backward_plan)
        : how(backward_plan), args(copy.add(a.backward_args())), workspace(copy.workspace(how.workspace_bytes)) {
        const Plan before = plan(a.problem, {.backend = Backend::cuda, .schedule = Schedule::fa2});
        forward(before, copy.add(a.forward_args()), {});
        device::synchronize(kDevice);  // a stream of one's own waits neither for this nor for what fills the workspace
        for (const auto& [view, tensor] : {std::pair{args.dq, &a.dq}, {args.dk, &a.dk}, {args.dv, &a.dv}})
            outputs.push_back({view.data, tensor->memory.size()});
    }
    void run(cudaStream_t stream) const { backward(how, args, workspace, {.stream = stream}); }
};

class Repeats : public OnDevice, public testing::WithParamInterface<Configuration> {
 protected:
    check::Attention attention() const {
        check::Attention a(GetParam().problem, 3, GetParam().lengths_q, GetParam().lengths_kv);
        for (const check::Tensor* t : {&a.o, &a.lse, &a.dq, &a.dk, &a.dv}) EXPECT_EQ(t->memory.size() % 4, 0U);
        return a;
    }
};

TEST_P(Repeats, give_the_same_bits_a_thousand_times_on_a_busy_device) {
    const check::Attention a = attention();
    const std::vector<Plan> plans = plans_of(a.problem);
    EXPECT_FALSE(plans.empty()) << "no CUDA kernel takes " << a.problem.describe();
    for (const Plan& how : plans) {
        device::DeviceCopy copy(kDevice);
        const ForwardArgs args = copy.add(a.forward_args());
        const auto workspace = copy.workspace(how.workspace_bytes);
        device::synchronize(kDevice);
        const std::vector<Output> outputs{{args.o.data, a.o.memory.size()}, {args.lse.data, a.lse.memory.size()}};
        try {
            const auto call = [&](cudaStream_t stream) { forward(how, args, workspace, {.stream = stream}); };
            EXPECT_EQ(differing_words(outputs, call), 0U) << how.kernel->name;
        } catch (const Error& e) {  // tensors that the kernel does not take
            EXPECT_EQ(e.code(), ErrorCode::unsupported) << how.kernel->name << ": " << e.what();
        }
        EXPECT_TRUE(copy.workspace_bands_unchanged());
    }
}

TEST_P(Repeats, give_the_same_gradients_a_thousand_times_on_a_busy_device) {
    const check::Attention a = attention();
    const std::vector<Plan> plans = plans_of(a.problem, Pass::backward);
    EXPECT_FALSE(plans.empty()) << "no CUDA kernel takes " << a.problem.describe();
    for (const Plan& how : plans) {
        BackwardOnDevice mirrored(a, how);
        const auto call = [&](cudaStream_t stream) { mirrored.run(stream); };
        EXPECT_EQ(differing_words(mirrored.outputs, call), 0U) << how.kernel->name;
        EXPECT_TRUE(mirrored.copy.workspace_bands_unchanged());
    }
}

/// A graph is captured once and launched three times. No launch may depend on an earlier one, or wait for the device.
TEST_P(Repeats, give_the_same_gradients_from_a_graph) {
    const check::Attention a = attention();
    for (const Plan& how : plans_of(a.problem, Pass::backward)) {
        BackwardOnDevice mirrored(a, how);
        const auto results = [&] {
            device::synchronize(kDevice);
            std::vector<std::vector<std::byte>> all;
            for (const Output& out : mirrored.outputs) {
                all.emplace_back(out.bytes);
                cudaMemcpy(all.back().data(), out.data, out.bytes, cudaMemcpyDeviceToHost);
                cudaMemset(out.data, 0xFF, out.bytes);
            }
            device::synchronize(kDevice);
            return all;
        };
        const Stream stream;
        mirrored.run(stream);
        const auto expected = results();
        cudaGraph_t graph = nullptr;
        cudaGraphExec_t run = nullptr;
        ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
        mirrored.run(stream);
        ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess) << how.kernel->name;
        ASSERT_EQ(cudaGraphInstantiate(&run, graph, 0), cudaSuccess) << how.kernel->name;
        for (int launch = 0; launch < 3; ++launch) {
            ASSERT_EQ(cudaGraphLaunch(run, stream), cudaSuccess);
            EXPECT_EQ(results(), expected) << how.kernel->name << ", launch " << launch;
        }
        cudaGraphExecDestroy(run);
        cudaGraphDestroy(graph);
    }
}

INSTANTIATE_TEST_SUITE_P(Stress, Repeats, testing::ValuesIn(configurations()),
                         [](const auto& which) { return which.param.name; });

}  // namespace
}  // namespace tessera::cuda::test
