// SPDX-License-Identifier: Apache-2.0
//
// Runs two calls on two CUDA streams, on tensors in CUDA memory; the host waits once, at the end. Without a GPU it
// prints a message and exits with 77, which CTest counts as skipped.
#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstdlib>
#include <vector>

#include "tessera/tessera.hpp"

using tessera::DType, tessera::Problem, tessera::TensorView;

constexpr std::int64_t kLen = 1024, kHeads = 8, kDim = 64, kSize = kLen * kHeads * kDim;

void expect_ok(cudaError_t error) {
    if (error == cudaSuccess) return;
    std::fprintf(stderr, "%s\n", cudaGetErrorString(error));
    std::exit(1);
}

/// [1, kLen, kHeads, kDim] of bf16 in CUDA memory, every element 1 (its bits are 0x3F80) or 0.
TensorView on_device(bool ones) {
    void* data = nullptr;
    expect_ok(cudaMalloc(&data, 2 * kSize));
    const std::vector<std::uint16_t> bits(kSize, ones ? std::uint16_t{0x3F80} : std::uint16_t{0});
    expect_ok(cudaMemcpy(data, bits.data(), 2 * kSize, cudaMemcpyHostToDevice));
    return tessera::dense_view(data, DType::bf16, {1, kLen, kHeads, kDim}, {tessera::DeviceType::cuda, 0});
}

int main() {
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
        std::printf("no CUDA device\n");
        return 77;
    }
    Problem problem = Problem::dense(1, kLen, kHeads, kDim);
    problem.dtype = DType::bf16;
    problem.mask.causal = tessera::Causal::bottom_right;
    const tessera::Plan plan = tessera::plan(problem, {.backend = tessera::Backend::cuda});
    std::printf("%s\n", plan.describe().c_str());

    cudaStream_t streams[2];
    TensorView results[2];
    void* workspaces[2] = {};  // one per stream: concurrent calls must not share a workspace
    const TensorView q = on_device(true), k = on_device(true), v = on_device(true);
    for (int i = 0; i < 2; ++i) {
        expect_ok(cudaStreamCreate(&streams[i]));
        expect_ok(cudaMalloc(&workspaces[i], plan.workspace_bytes + 1));
        results[i] = on_device(false);
        tessera::forward(plan, {.q = q, .k = k, .v = v, .o = results[i]},
                         {static_cast<std::byte*>(workspaces[i]), plan.workspace_bytes}, {.stream = streams[i]});
    }
    int wrong = 0;
    for (int i = 0; i < 2; ++i) {
        expect_ok(cudaStreamSynchronize(streams[i]));
        std::vector<std::uint16_t> bits(kSize);
        expect_ok(cudaMemcpy(bits.data(), results[i].data, 2 * kSize, cudaMemcpyDeviceToHost));
        for (const std::uint16_t x : bits) wrong += x != 0x3F80;  // a mean of ones
    }
    std::printf("%d wrong elements\n", wrong);
    return wrong == 0 ? 0 : 1;
}
