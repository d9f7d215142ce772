// SPDX-License-Identifier: Apache-2.0
#include "cuda/fa2/kernels.hpp"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <fmt/format.h>

#include <algorithm>

#include "cuda/device.hpp"
#include "cuda/fa2/launch.hpp"
#include "cuda/shared/arguments.hpp"

namespace tessera::cuda::fa2 {
namespace {

constexpr int kLeastCapability = 80;                       // bf16 products and cp.async
constexpr std::int64_t kMaxIndex = std::int64_t{1} << 30;  // sums of two of these fit 32 bits

/// head_dim and head_dim_v are padded to this.
int padded_dim(const Problem& problem) {
    const std::int64_t dim = std::max(problem.head_dim, problem.head_dim_v);
    if (dim <= 64) return 64;
    return dim <= 128 ? 128 : 256;
}

/// In 16 bits. The plain and the general shape of a head_dim have the same tile.
Config config_of(const Problem& problem) {
    const int dim = padded_dim(problem);
    if (dim == 64) return HeadDim64::kConfig;
    return dim == 128 ? HeadDim128::kConfig : HeadDim256::kConfig;
}

Tile default_tile(const Problem& problem) {
    if (problem.dtype == DType::fp32) {
        const int block = block_fp32(padded_dim(problem));
        return {block, block};
    }
    const Config c = config_of(problem);
    return {c.block_q(), c.block_kv};
}

std::optional<std::string> refuse(const Problem& problem, const std::optional<Tile>& tile, const Device& device) {
    if (auto reason = refuse_below(device, kLeastCapability)) return reason;
    if (auto reason = refuse_sizes(problem)) return reason;
    const Tile own = default_tile(problem);
    const std::int64_t tiles = problem.batch * problem.heads_q * ((problem.len_q + own.block_q - 1) / own.block_q);
    const std::int64_t longest = std::max({problem.len_q, problem.len_kv, problem.total_q, problem.total_kv});
    if (longest >= kMaxIndex || tiles >= kMaxIndex) {
        return fmt::format("counts rows and tiles up to {}, got {} and {}", kMaxIndex, longest, tiles);
    }
    if (tile && *tile != own) return fmt::format("is compiled for tiles of {} x {}", own.block_q, own.block_kv);
    return std::nullopt;
}

template <class T>
cudaError_t start(const Config& c, const Launch& launch, cudaStream_t stream) {
    const bool general = needs_general(launch.params);
    if (c.head_dim == 64) {
        return general ? start_forward<T, HeadDim64General>(launch, stream)
                       : start_forward<T, HeadDim64>(launch, stream);
    }
    if (c.head_dim == 128) {
        return general ? start_forward<T, HeadDim128General>(launch, stream)
                       : start_forward<T, HeadDim128>(launch, stream);
    }
    return general ? start_forward<T, HeadDim256General>(launch, stream) : start_forward<T, HeadDim256>(launch, stream);
}

cudaError_t start_fp32(int dim, const Launch& launch, cudaStream_t stream) {
    if (dim == 64) return start_forward_fp32<64>(launch, stream);
    return dim == 128 ? start_forward_fp32<128>(launch, stream) : start_forward_fp32<256>(launch, stream);
}

void forward(const ForwardCall& call) {
    const Problem& p = call.plan.problem;
    const ForwardParams params = forward_params(call);
    if (p.rows_q() == 0 || p.heads_q == 0 || p.len_q == 0) return;
    const CurrentDevice current(call.plan.device);
    const auto block_q = static_cast<int>(default_tile(p).block_q);
    const Launch launch = make_launch(params, block_q, properties(call.plan.device).l2_bytes);
    const cudaStream_t stream = stream_of(call);
    cudaError_t status = cudaSuccess;
    if (p.dtype == DType::fp32) status = start_fp32(padded_dim(p), launch, stream);
    else if (p.dtype == DType::bf16) status = start<__nv_bfloat16>(config_of(p), launch, stream);
    else status = start<__half>(config_of(p), launch, stream);
    check(status, "cuda.fa2.forward");
}

}  // namespace

std::vector<Kernel> kernels() {
    return {{.info = {.name = "cuda.fa2.forward",
                      .backend = Backend::cuda,
                      .schedule = Schedule::fa2,
                      .pass = Pass::forward,
                      .dtypes = {DType::bf16, DType::fp16, DType::fp32},
                      .summary = "Q blocks outer, O in registers until it is done; memory O(len)",
                      .limits = "sm_80 and later"},
             .refuse = refuse,
             .default_tile = default_tile,
             .workspace_bytes = [](const Plan&) { return std::size_t{0}; },
             .target = target,
             .forward = forward,
             .backward = nullptr}};
}

}  // namespace tessera::cuda::fa2
