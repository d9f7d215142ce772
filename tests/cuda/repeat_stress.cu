// SPDX-License-Identifier: Apache-2.0
//
// The same call gives the same bits, a thousand times, while other work keeps the device busy: what a missing barrier
// or fence would break now and then.
#include "cuda/stress.cuh"

namespace tessera::cuda::test {
namespace {

constexpr int kRepeats = 1000;

/// Keeps some multiprocessors busy for a while, a different while each time.
__global__ void spin(unsigned nanoseconds) {
    for (unsigned waited = 0; waited < nanoseconds; waited += 500) __nanosleep(500);
}

/// Other streams' work: copies that use the memory, kernels of odd lengths that take multiprocessors away.
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

/// Twenty: every head_dim with an instance of its own and some between, both types, every feature.
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
        {"causal_64", shape(kFp16, 2, 700, 700, 4, 1, 64, kCausal)},
        {"causal_128", shape(kBf16, 3, 513, 513, 8, 2, 128, kCausal)},
        {"causal_256", shape(kFp16, 1, 400, 777, 4, 2, 256, kCausal)},
        {"top_left_128", shape(kBf16, 1, 600, 300, 4, 4, 128, kTopLeft)},
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

/// Runs the call kRepeats times on a stream while others are busy; returns how many words of O and LSE ever differed
/// from the first run's.
unsigned differing_words(const Plan& how, const check::Attention& a) {
    device::DeviceCopy copy(kDevice);
    const ForwardArgs args = copy.add(a.forward_args());
    const auto workspace = copy.workspace(how.workspace_bytes);
    const std::size_t o_bytes = a.o.memory.size();
    const std::size_t lse_bytes = a.lse.memory.size();
    const Memory first_o(o_bytes), first_lse(lse_bytes);
    const Mirror<unsigned> count(1);
    const Stream stream;
    Load load;
    const auto run = [&] {
        cudaMemsetAsync(args.o.data, 0xFF, o_bytes, stream);
        cudaMemsetAsync(args.lse.data, 0xFF, lse_bytes, stream);
        forward(how, args, workspace, {.stream = stream});
    };
    run();
    cudaMemcpyAsync(first_o.data(), args.o.data, o_bytes, cudaMemcpyDeviceToDevice, stream);
    cudaMemcpyAsync(first_lse.data(), args.lse.data, lse_bytes, cudaMemcpyDeviceToDevice, stream);
    for (int repeat = 0; repeat < kRepeats; ++repeat) {
        load.add(repeat);
        run();
        for (const auto& [now, first] : {std::pair{&args.o, &first_o}, std::pair{&args.lse, &first_lse}}) {
            count_differences<<<64, 256, 0, stream>>>(static_cast<const std::uint32_t*>(now->data),
                                                      static_cast<const std::uint32_t*>(first->data()),
                                                      first->bytes() / 4, count.device());
        }
    }
    const cudaError_t status = cudaDeviceSynchronize();
    EXPECT_EQ(status, cudaSuccess) << cudaGetErrorString(status);
    unsigned differing = 0;
    cudaMemcpy(&differing, count.device(), sizeof(differing), cudaMemcpyDeviceToHost);
    EXPECT_TRUE(copy.workspace_bands_unchanged());
    return differing;
}

class Repeats : public OnDevice, public testing::WithParamInterface<Configuration> {};

TEST_P(Repeats, give_the_same_bits_a_thousand_times_on_a_busy_device) {
    const Configuration& c = GetParam();
    check::Attention a(c.problem, 3, c.lengths_q, c.lengths_kv);
    ASSERT_EQ(a.o.memory.size() % 4, 0U);
    const std::vector<Plan> plans = plans_of(c.problem);
    EXPECT_FALSE(plans.empty()) << "no CUDA kernel takes " << c.problem.describe();
    for (const Plan& how : plans) {
        try {
            EXPECT_EQ(differing_words(how, a), 0U) << how.kernel->name;
        } catch (const Error& e) {  // tensors that the kernel does not take
            EXPECT_EQ(e.code(), ErrorCode::unsupported) << how.kernel->name << ": " << e.what();
        }
    }
}

INSTANTIATE_TEST_SUITE_P(stress, Repeats, testing::ValuesIn(configurations()),
                         [](const auto& which) { return which.param.name; });

}  // namespace
}  // namespace tessera::cuda::test
