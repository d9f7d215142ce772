// SPDX-License-Identifier: Apache-2.0
//
// Throughput of exponentials on the SFU, of fused multiply-adds, and of both at once, as in a softmax.
#include "cuda/ptx/math.cuh"
#include "micro/measure.cuh"

namespace tessera::micro {
namespace {

using namespace tessera::cuda;

constexpr int kThreads = 1024;
constexpr int kUnrolled = 16;
constexpr int kChains =
    4;  // chains of dependent operations in a thread; with 8 warps per scheduler they hide latencies

/// Runs kExps exponentials and kFmas multiply-adds per chain and round.
template <int kExps, int kFmas>
__global__ void __launch_bounds__(kThreads, 1) work(int rounds, float factor, float* sink, long long* clocks) {
    float exps[kChains], sums[kChains];
    for (int c = 0; c < kChains; ++c) {
        exps[c] = -0.1F * static_cast<float>(threadIdx.x + c);
        sums[c] = exps[c];
    }
    BlockClock clock(clocks);
#pragma unroll 1
    for (int round = 0; round < rounds; ++round) {
#pragma unroll
        for (int unrolled = 0; unrolled < kUnrolled; ++unrolled) {
#pragma unroll
            for (int c = 0; c < kChains; ++c) {
#pragma unroll
                for (int i = 0; i < kExps; ++i) exps[c] = ptx::exp2_approx(exps[c]);
#pragma unroll
                for (int i = 0; i < kFmas; ++i) sums[c] = fmaf(sums[c], factor, factor);
            }
        }
    }
    clock.stop();
    float sum = 0;
    for (int c = 0; c < kChains; ++c) sum += exps[c] + sums[c];
    if (sum == 0.123F) *sink = sum;
}

template <int kExps, int kFmas>
void add(std::vector<Figure>& figures, const Chip& chip) {
    const int rounds = 15'000 / (8 * kExps + kFmas);
    const Buffer<float> sink(1);
    const double rounds_of_all = 1.0 * kUnrolled * kChains * rounds * kThreads * chip.multiprocessors;
    Figure exps{.name = "ex2",
                .variant = kFmas == 0 ? "alone" : "with " + std::to_string(kFmas) + " FMA each",
                .resource = "ex2",
                .unit = "op",
                .work = kExps * rounds_of_all,
                .nominal = 16,
                .threads = kThreads};
    exps = timed(exps, chip.multiprocessors, [&](long long* clocks) {
        launch(work<kExps, kFmas>, chip.multiprocessors, kThreads, 0, rounds, 0.999F, sink.data(), clocks);
    });
    Figure fmas = exps;
    fmas.name = "FMA, fp32";
    fmas.variant = kExps == 0 ? "alone" : std::to_string(kFmas) + " with each ex2";
    fmas.resource = "fma";
    fmas.work = kFmas * rounds_of_all;
    fmas.nominal = 128;
    if (kExps > 0) figures.push_back(exps);
    if (kFmas > 0) figures.push_back(fmas);
}

}  // namespace

std::vector<Figure> arithmetic_figures(const Chip& chip) {
    std::vector<Figure> figures;
    add<1, 0>(figures, chip);
    add<0, 1>(figures, chip);
    add<1, 1>(figures, chip);
    add<1, 2>(figures, chip);
    add<1, 4>(figures, chip);
    add<1, 6>(figures, chip);
    add<1, 8>(figures, chip);
    return figures;
}

}  // namespace tessera::micro
