// SPDX-License-Identifier: Apache-2.0
//
// One sequence over all GPUs of this machine, both passes, with a thread and an ncclComm_t for each GPU. O and LSE have
// the bits of one GPU that computes the whole sequence. Options: [ROWS OF A GPU] [HEADS OF Q] [HEADS OF K].
#include "tessera/context_parallel.hpp"

#include <cuda_runtime.h>
#include <nccl.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "tessera/tessera.hpp"

namespace {

using tessera::Pass;
using tessera::TensorView;

constexpr std::int64_t kDim = 128;
using Bits = std::vector<std::uint16_t>;  // of bf16

void expect_ok(cudaError_t error) {
    if (error == cudaSuccess) return;
    std::fprintf(stderr, "%s\n", cudaGetErrorString(error));
    std::exit(1);
}
void expect_ok(ncclResult_t result) {
    if (result == ncclSuccess) return;
    std::fprintf(stderr, "%s\n", ncclGetErrorString(result));
    std::exit(1);
}

/// Numbers between -2 and 2 for [rows, heads, kDim]: the same on every run.
Bits drawn(std::int64_t rows, std::int64_t heads, std::uint32_t state) {
    Bits bits(static_cast<std::size_t>(rows * heads * kDim));
    for (std::uint16_t& x : bits) {
        state = state * 1664525 + 1013904223;
        const float value = static_cast<float>(state >> 8) / (1 << 22) - 2;
        std::uint32_t word = 0;
        std::memcpy(&word, &value, sizeof(word));
        x = static_cast<std::uint16_t>(word >> 16);
    }
    return bits;
}

/// The rows of a [rows, heads, kDim] tensor at these positions.
Bits rows_at(const Bits& whole, std::int64_t heads, std::span<const std::int64_t> positions) {
    Bits part;
    for (const std::int64_t position : positions)
        part.insert(part.end(), whole.begin() + position * heads * kDim, whole.begin() + (position + 1) * heads * kDim);
    return part;
}

/// The tensors of one GPU, in its memory.
class OnGpu {
 public:
    explicit OnGpu(int index) : device_{tessera::DeviceType::cuda, index} {}

    void* bytes(std::size_t count) {
        void* data = nullptr;
        expect_ok(cudaMalloc(&data, count + 1));
        return data;
    }
    TensorView rows(std::int64_t count, std::int64_t heads, const Bits* from = nullptr) {
        void* data = bytes(static_cast<std::size_t>(count * heads * kDim) * 2);
        if (from != nullptr) expect_ok(cudaMemcpy(data, from->data(), from->size() * 2, cudaMemcpyHostToDevice));
        return tessera::dense_view(data, tessera::DType::bf16, {1, count, heads, kDim}, device_);
    }
    TensorView lse(std::int64_t count, std::int64_t heads) {
        void* data = bytes(static_cast<std::size_t>(count * heads) * 4);
        return tessera::dense_view(data, tessera::DType::fp32, {1, heads, count}, device_);
    }
    std::span<std::byte> workspace(std::size_t size) { return {static_cast<std::byte*>(bytes(size)), size}; }

 private:
    tessera::Device device_;
};

template <class T>
std::vector<T> on_host(const TensorView& t) {
    std::vector<T> values(static_cast<std::size_t>(t.size()));
    expect_ok(cudaMemcpy(values.data(), t.data, values.size() * sizeof(T), cudaMemcpyDeviceToHost));
    return values;
}

struct Inputs {
    std::int64_t rows;  // of the whole sequence
    std::int64_t heads_q, heads_kv;
    Bits q, k, v, d_o;
};

struct Results {
    Bits o, dk;
    std::vector<float> lse;
    float forward_ms = 0, both_ms = 0;  // of one call
};

/// The least milliseconds of a call over some runs.
template <class Call>
float milliseconds(const Call& call, cudaStream_t stream) {
    cudaEvent_t begin, end;
    expect_ok(cudaEventCreate(&begin));
    expect_ok(cudaEventCreate(&end));
    float least = 1e30f;
    for (int run = 0; run < 6; ++run) {
        expect_ok(cudaEventRecord(begin, stream));
        for (int i = 0; i < 4; ++i) call();
        expect_ok(cudaEventRecord(end, stream));
        expect_ok(cudaEventSynchronize(end));
        float taken = 0;
        expect_ok(cudaEventElapsedTime(&taken, begin, end));
        if (run > 0) least = std::min(least, taken / 4);
    }
    return least;
}

/// This GPU's part of the sequence; with one rank all of it.
Results compute(const Inputs& in, ncclComm_t comm, int gpu) {
    expect_ok(cudaSetDevice(gpu));
    const auto ranks = tessera::nccl_communicator(comm);
    tessera::Problem whole = tessera::Problem::dense(1, in.rows, in.heads_q, kDim, tessera::DType::bf16);
    whole.heads_kv = in.heads_kv;
    whole.mask.causal = tessera::Causal::bottom_right;
    auto attention = tessera::context_parallel(whole, *ranks, {.device = {tessera::DeviceType::cuda, gpu}});

    const auto positions = attention.positions();
    const auto rows = static_cast<std::int64_t>(positions.size());
    OnGpu memory(gpu);
    const auto input = [&](const Bits& bits, std::int64_t heads) {
        const Bits part = rows_at(bits, heads, positions);
        return memory.rows(rows, heads, &part);
    };
    const TensorView q = input(in.q, in.heads_q), k = input(in.k, in.heads_kv), v = input(in.v, in.heads_kv);
    const TensorView d_o = input(in.d_o, in.heads_q), o = memory.rows(rows, in.heads_q),
                     lse = memory.lse(rows, in.heads_q);
    const TensorView dq = memory.rows(rows, in.heads_q), dk = memory.rows(rows, in.heads_kv);
    const TensorView dv = memory.rows(rows, in.heads_kv);
    const auto forward_memory = memory.workspace(attention.workspace_bytes(Pass::forward));
    const auto backward_memory = memory.workspace(attention.workspace_bytes(Pass::backward));
    cudaStream_t stream;
    expect_ok(cudaStreamCreate(&stream));

    const auto forward = [&] {
        attention.forward({.q = q, .k = k, .v = v, .o = o, .lse = lse}, forward_memory, {.stream = stream});
    };
    const auto both = [&] {
        forward();
        attention.backward({.q = q, .k = k, .v = v, .o = o, .lse = lse, .d_o = d_o, .dq = dq, .dk = dk, .dv = dv},
                           backward_memory, {.stream = stream});
    };
    Results results;
    results.forward_ms = milliseconds(forward, stream);
    results.both_ms = milliseconds(both, stream);
    results.o = on_host<std::uint16_t>(o);
    results.dk = on_host<std::uint16_t>(dk);
    results.lse = on_host<float>(lse);
    return results;
}

float value_of(std::uint16_t bits) {
    const std::uint32_t word = std::uint32_t{bits} << 16;
    float value = 0;
    std::memcpy(&value, &word, sizeof(value));
    return value;
}

}  // namespace

int main(int count, char** arguments) {
    int gpus = 0;
    if (cudaGetDeviceCount(&gpus) != cudaSuccess || gpus < 2) {
        std::printf("needs two CUDA devices\n");
        return 77;
    }
    const auto argument = [&](int i, std::int64_t otherwise) {
        return count > i ? std::strtoll(arguments[i], nullptr, 10) : otherwise;
    };
    Inputs in{.rows = argument(1, 2048) * gpus,
              .heads_q = argument(2, 32),
              .heads_kv = argument(3, 8),
              .q = {},
              .k = {},
              .v = {},
              .d_o = {}};
    in.q = drawn(in.rows, in.heads_q, 1), in.k = drawn(in.rows, in.heads_kv, 2);
    in.v = drawn(in.rows, in.heads_kv, 3), in.d_o = drawn(in.rows, in.heads_q, 4);

    const int first = 0;
    ncclComm_t alone;
    expect_ok(ncclCommInitAll(&alone, 1, &first));
    const Results one = compute(in, alone, 0);

    std::vector<ncclComm_t> comms(static_cast<std::size_t>(gpus));
    expect_ok(ncclCommInitAll(comms.data(), gpus, nullptr));
    std::vector<Results> parts(comms.size());
    std::vector<std::thread> threads;
    for (int gpu = 0; gpu < gpus; ++gpu) {
        threads.emplace_back([&, gpu] {
            const auto i = static_cast<std::size_t>(gpu);
            parts[i] = compute(in, comms[i], gpu);
        });
    }
    for (std::thread& thread : threads) thread.join();

    // Zig-zag: rank r has the chunks r and 2 * gpus - 1 - r.
    const std::int64_t chunk = in.rows / (2 * gpus);
    std::int64_t different = 0;
    double error = 0, size = 0, slowest_forward = 0, slowest_both = 0;
    for (int gpu = 0; gpu < gpus; ++gpu) {
        const Results& part = parts[static_cast<std::size_t>(gpu)];
        for (std::int64_t i = 0; i < 2 * chunk; ++i) {
            const std::int64_t position = i < chunk ? gpu * chunk + i : (2 * gpus - 2 - gpu) * chunk + i;
            const std::int64_t of_q = in.heads_q * kDim, of_k = in.heads_kv * kDim;
            for (std::int64_t c = 0; c < of_q; ++c)
                different += part.o[static_cast<std::size_t>(i * of_q + c)] !=
                             one.o[static_cast<std::size_t>(position * of_q + c)];
            for (std::int64_t h = 0; h < in.heads_q; ++h)
                different += part.lse[static_cast<std::size_t>(h * 2 * chunk + i)] !=
                             one.lse[static_cast<std::size_t>(h * in.rows + position)];
            for (std::int64_t c = 0; c < of_k; ++c) {
                const float want = value_of(one.dk[static_cast<std::size_t>(position * of_k + c)]);
                const float off = value_of(part.dk[static_cast<std::size_t>(i * of_k + c)]) - want;
                error += double{off} * off;
                size += double{want} * want;
            }
        }
        slowest_forward = std::max(slowest_forward, double{part.forward_ms});
        slowest_both = std::max(slowest_both, double{part.both_ms});
    }
    std::printf("%d GPUs, %lld rows each, %lld/%lld heads of %lld\n", gpus, static_cast<long long>(2 * chunk),
                static_cast<long long>(in.heads_q), static_cast<long long>(in.heads_kv), static_cast<long long>(kDim));
    std::printf("elements of O and LSE with other bits than one GPU's: %lld\n", static_cast<long long>(different));
    std::printf("relative difference of dK: %.2e\n", size > 0 ? std::sqrt(error / size) : 0.0);
    std::printf("forward %.3f ms, one GPU %.3f ms: share %.3f\n", slowest_forward, one.forward_ms,
                one.forward_ms / gpus / slowest_forward);
    std::printf("forward and backward %.3f ms, one GPU %.3f ms: share %.3f\n", slowest_both, one.both_ms,
                one.both_ms / gpus / slowest_both);
    for (ncclComm_t comm : comms) expect_ok(ncclCommDestroy(comm));
    expect_ok(ncclCommDestroy(alone));
    return different == 0 && error < 1e-4 * size ? 0 : 1;
}
