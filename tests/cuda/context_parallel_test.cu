// SPDX-License-Identifier: Apache-2.0
//
// context_parallel() with ranks that are threads and share one GPU: copies and sums of rows, streams and kernels are
// those of several GPUs, and an exchange is a copy.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cmath>
#include <string>

#include "context_parallel/thread_ranks.hpp"
#include "tessera/tessera.hpp"

namespace tessera::test::cuda_context_parallel_test {
namespace {

constexpr std::int64_t kTotal = 1536;
const Device kGpu{DeviceType::cuda, 0};

bool has_gpu() {
    int devices = 0;
    return cudaGetDeviceCount(&devices) == cudaSuccess && devices > 0;
}

class GpuRank : public ThreadRank {
 public:
    using ThreadRank::ThreadRank;

 protected:
    void wait_for(void* stream) override {
        ASSERT_EQ(cudaStreamSynchronize(static_cast<cudaStream_t>(stream)), cudaSuccess);
    }
    void copy(void* to, const void* from, std::size_t bytes, void* stream) override {
        const auto on = static_cast<cudaStream_t>(stream);
        ASSERT_EQ(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, on), cudaSuccess);
        ASSERT_EQ(cudaStreamSynchronize(on), cudaSuccess);
    }
};

/// A tensor in the GPU's memory.
class OnGpu {
 public:
    explicit OnGpu(const Owned& host) : view(host.view), bytes_(host.memory.size()) {
        EXPECT_EQ(cudaMalloc(&view.data, bytes_), cudaSuccess);
        EXPECT_EQ(cudaMemcpy(view.data, host.memory.data(), bytes_, cudaMemcpyHostToDevice), cudaSuccess);
        view.device = kGpu;
    }
    ~OnGpu() { cudaFree(view.data); }
    OnGpu(const OnGpu&) = delete;

    void read(Owned& host) const {
        EXPECT_EQ(cudaMemcpy(host.memory.data(), view.data, bytes_, cudaMemcpyDeviceToHost), cudaSuccess);
    }

    TensorView view;

 private:
    std::size_t bytes_;
};

class GpuBytes {
 public:
    explicit GpuBytes(std::size_t bytes) : bytes_(bytes) { EXPECT_EQ(cudaMalloc(&data_, bytes + 1), cudaSuccess); }
    ~GpuBytes() { cudaFree(data_); }
    GpuBytes(const GpuBytes&) = delete;
    operator std::span<std::byte>() const { return {static_cast<std::byte*>(data_), bytes_}; }

 private:
    void* data_ = nullptr;
    std::size_t bytes_;
};

struct Case {
    std::string name;
    Problem whole;
    std::vector<std::int64_t> cu_seqlens{};
};

Problem problem(DType dtype, Mask mask) {
    Problem p = Problem::dense(1, kTotal, 4, 128, dtype);
    p.heads_kv = 2;
    p.mask = mask;
    return p;
}

std::vector<Case> cases() {
    const Mask causal{.causal = Causal::bottom_right};
    Case documents{"documents", problem(DType::bf16, causal), {0, 130, 700, 701, 1536}};
    documents.whole.ragged = true;
    documents.whole.batch = 4;
    documents.whole.total_q = documents.whole.total_kv = kTotal;
    return {{"causal bf16", problem(DType::bf16, causal)},
            {"causal fp16", problem(DType::fp16, causal)},
            {"causal fp32", problem(DType::fp32, causal)},
            {"full", problem(DType::bf16, {})},
            {"window", problem(DType::bf16, {.window_left = 200, .window_right = 90})},
            documents};
}

Owned tensor(const Case& c, std::int64_t heads, unsigned seed) {
    const auto shape = c.whole.ragged ? std::vector<std::int64_t>{kTotal, heads, c.whole.head_dim}
                                      : std::vector<std::int64_t>{1, kTotal, heads, c.whole.head_dim};
    Owned t(c.whole.dtype, shape);
    t.fill(seed);
    return t;
}

Owned lse_of(const Case& c, std::int64_t rows) {
    if (c.whole.ragged) return {DType::fp32, {c.whole.heads_q, rows}};
    return {DType::fp32, {1, c.whole.heads_q, rows}};
}

/// Inputs, and the results of one call on the GPU.
struct Whole {
    const Case& of;
    Owned q, k, v, d_o, o, lse, dq, dk, dv;

    explicit Whole(const Case& c)
        : of(c),
          q(tensor(c, 4, 1)),
          k(tensor(c, 2, 2)),
          v(tensor(c, 2, 3)),
          d_o(tensor(c, 4, 4)),
          o(tensor(c, 4, 5)),
          lse(lse_of(c, kTotal)),
          dq(tensor(c, 4, 6)),
          dk(tensor(c, 2, 7)),
          dv(tensor(c, 2, 8)) {}

    void compute() {
        Owned offsets(DType::int64, {static_cast<std::int64_t>(of.cu_seqlens.size())});
        std::memcpy(offsets.memory.data(), of.cu_seqlens.data(), of.cu_seqlens.size() * 8);
        const OnGpu cu(offsets), q_(q), k_(k), v_(v), d(d_o), o_(o), l(lse), a(dq), b(dk), c(dv);
        const TensorView given = of.whole.ragged ? cu.view : TensorView{};
        const Plan forwards = plan(of.whole, {.pass = Pass::forward, .device = kGpu});
        const Plan backwards = plan(of.whole, {.pass = Pass::backward, .device = kGpu});
        const GpuBytes of_forward(forwards.workspace_bytes), of_backward(backwards.workspace_bytes);
        forward(forwards,
                {.q = q_.view,
                 .k = k_.view,
                 .v = v_.view,
                 .cu_seqlens_q = given,
                 .cu_seqlens_kv = given,
                 .o = o_.view,
                 .lse = l.view},
                of_forward);
        backward(backwards,
                 {.q = q_.view,
                  .k = k_.view,
                  .v = v_.view,
                  .cu_seqlens_q = given,
                  .cu_seqlens_kv = given,
                  .o = o_.view,
                  .lse = l.view,
                  .d_o = d.view,
                  .dq = a.view,
                  .dk = b.view,
                  .dv = c.view},
                 of_backward);
        ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
        o_.read(o), l.read(lse), a.read(dq), b.read(dk), c.read(dv);
    }
};

struct Results {
    std::vector<std::int64_t> positions;
    Owned o, lse, dq, dk, dv;
};

Results run(const Whole& whole, Communicator& communicator, ContextParallelOptions options) {
    const Case& c = whole.of;
    options.cu_seqlens = c.cu_seqlens;
    options.device = kGpu;
    ContextParallel attention = context_parallel(c.whole, communicator, options);
    const auto positions = attention.positions();
    const auto own = [&](const Owned& t) { return rows_at(t, c.whole.ragged ? 0 : 1, positions); };
    Results to{{positions.begin(), positions.end()},
               own(whole.d_o),
               lse_of(c, static_cast<std::int64_t>(positions.size())),
               own(whole.q),
               own(whole.k),
               own(whole.v)};
    const OnGpu q(own(whole.q)), k(own(whole.k)), v(own(whole.v)), d_o(own(whole.d_o));
    const OnGpu o(to.o), lse(to.lse), dq(to.dq), dk(to.dk), dv(to.dv);
    const GpuBytes of_forward(attention.workspace_bytes(Pass::forward));
    const GpuBytes of_backward(attention.workspace_bytes(Pass::backward));
    cudaStream_t stream = nullptr;
    EXPECT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
    for (int again = 0; again < 3; ++again) {  // calls in a row on one workspace
        attention.forward({.q = q.view, .k = k.view, .v = v.view, .o = o.view, .lse = lse.view}, of_forward,
                          {.stream = stream});
        attention.backward({.q = q.view,
                            .k = k.view,
                            .v = v.view,
                            .o = o.view,
                            .lse = lse.view,
                            .d_o = d_o.view,
                            .dq = dq.view,
                            .dk = dk.view,
                            .dv = dv.view},
                           of_backward, {.stream = stream});
    }
    EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
    o.read(to.o), lse.read(to.lse), dq.read(to.dq), dk.read(to.dk), dv.read(to.dv);
    return to;
}

void expect_close(const Owned& got, const Owned& want, double limit, const std::string& what) {
    double error = 0, size = 0;
    for (std::int64_t i = 0; i < want.view.size(); ++i) {
        error += (got.at(i) - want.at(i)) * (got.at(i) - want.at(i));
        size += want.at(i) * want.at(i);
    }
    EXPECT_LE(std::sqrt(error), limit * std::sqrt(size)) << what;
}

TEST(CudaContextParallel, has_the_bits_of_one_call) {
    if (!has_gpu()) GTEST_SKIP() << "no CUDA device";
    for (const Case& c : cases()) {
        Whole one(c);
        one.compute();
        const double limit = c.whole.dtype == DType::bf16 ? 1e-2 : c.whole.dtype == DType::fp16 ? 2e-3 : 1e-5;
        for (int ranks = 1; ranks <= 3; ++ranks) {
            for (const SequenceOrder order : {SequenceOrder::zigzag, SequenceOrder::contiguous}) {
                on_ranks<GpuRank>(ranks, [&](Communicator& communicator) {
                    const Results got = run(one, communicator, {.order = order, .steps = 1 + ranks % 2});
                    const auto own = [&](const Owned& t) { return rows_at(t, c.whole.ragged ? 0 : 1, got.positions); };
                    const std::string what =
                        c.name + ", rank " + std::to_string(communicator.rank()) + " of " + std::to_string(ranks);
                    EXPECT_EQ(got.o.memory, own(one.o).memory) << what;
                    EXPECT_EQ(got.lse.memory, rows_at(one.lse, c.whole.ragged ? 1 : 2, got.positions).memory) << what;
                    expect_close(got.dq, own(one.dq), limit, what + ": dq");
                    expect_close(got.dk, own(one.dk), limit, what + ": dk");
                    expect_close(got.dv, own(one.dv), limit, what + ": dv");
                });
            }
        }
    }
}

TEST(CudaContextParallel, gradient_blocks_give_every_number_of_ranks_the_same_gradients) {
    if (!has_gpu()) GTEST_SKIP() << "no CUDA device";
    for (const Case& c : cases()) {
        const Whole inputs(c);
        Whole want(c);
        on_ranks<GpuRank>(1, [&](Communicator& communicator) {
            const Results got = run(inputs, communicator, {.order = SequenceOrder::contiguous, .gradient_blocks = 12});
            want.dq.memory = got.dq.memory, want.dk.memory = got.dk.memory, want.dv.memory = got.dv.memory;
        });
        for (int ranks = 2; ranks <= 3; ++ranks) {
            on_ranks<GpuRank>(ranks, [&](Communicator& communicator) {
                const Results got = run(inputs, communicator, {.gradient_blocks = 12, .steps = 2});
                const auto own = [&](const Owned& t) { return rows_at(t, c.whole.ragged ? 0 : 1, got.positions); };
                EXPECT_EQ(got.dq.memory, own(want.dq).memory) << c.name;
                EXPECT_EQ(got.dk.memory, own(want.dk).memory) << c.name;
                EXPECT_EQ(got.dv.memory, own(want.dv).memory) << c.name;
            });
        }
    }
}

}  // namespace
}  // namespace tessera::test::cuda_context_parallel_test
