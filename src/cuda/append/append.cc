// SPDX-License-Identifier: Apache-2.0
#include "cuda/append/append.hpp"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "core/append_tensors.hpp"
#include "core/batch.hpp"
#include "cuda/append/launch.hpp"
#include "cuda/device.hpp"
#include "tessera/error.hpp"

namespace tessera::cuda {
namespace {

using namespace append_rows;

Rows rows_of(const TensorView& t) {
    if (!t.given()) return {};
    const bool dense = t.rank == 4;
    const std::size_t row = dense ? 1 : 0;
    return {.data = static_cast<char*>(t.data),
            .count = dense ? t.shape[0] * t.shape[1] : t.shape[0],
            .len = std::max<std::int64_t>(t.shape[row], 1),
            .batch = dense ? step(t, 0) : 0,
            .row = step(t, row),
            .head = step(t, row + 1),
            .column = step(t, row + 2),
            .heads = static_cast<int>(t.shape[row + 1])};
}

Rows cache_of(const TensorView& t) {
    Rows rows = rows_of(t);
    rows.len = t.shape[1];
    return rows;
}

Integers integers_of(const TensorView& t) {
    if (!t.given()) return {};
    const std::size_t last = static_cast<std::size_t>(t.rank) - 1;
    return {.data = t.data,
            .step = step(t, last),
            .row_step = t.rank == 2 ? step(t, 0) : 0,
            .count = t.shape[last],
            .is_64 = t.dtype == DType::int64};
}

Numbers numbers_of(const TensorView& t) {
    if (!t.given()) return {};
    const std::size_t last = static_cast<std::size_t>(t.rank) - 1;
    return {.data = t.data,
            .row_step = t.rank == 2 ? step(t, 0) : 0,
            .step = step(t, last),
            .fp32 = t.dtype == DType::fp32};
}

}  // namespace

append_rows::Launch append_rows::launch_of(const AppendArgs& a, const AppendOptions& options) {
    Launch launch{.k = rows_of(a.k),
                  .v = rows_of(a.v),
                  .q = rows_of(a.q),
                  .q_out = rows_of(a.q_out),
                  .k_cache = cache_of(a.k_cache),
                  .v_cache = cache_of(a.v_cache),
                  .slots = a.k_cache.shape[0],
                  .slot_mapping = integers_of(a.slot_mapping),
                  .kv_lengths = integers_of(a.kv_lengths),
                  .page_table = integers_of(a.page_table),
                  .cache_batch_index = integers_of(a.cache_batch_index),
                  .cu_seqlens_k = integers_of(a.cu_seqlens_k),
                  .positions = integers_of(a.positions),
                  .q_positions = integers_of(a.q_positions),
                  .sequences = a.kv_lengths.given() ? a.kv_lengths.shape[0] : 0,
                  .cos = numbers_of(a.rotary_cos),
                  .sin = numbers_of(a.rotary_sin),
                  .k_norm = numbers_of(a.k_norm),
                  .q_norm = numbers_of(a.q_norm),
                  .interleaved = options.rotary_interleaved,
                  .norm_eps = options.norm_eps,
                  .head_dim = static_cast<int>(a.k_cache.shape[3]),
                  .head_dim_v = static_cast<int>(a.v_cache.shape[3])};
    if (a.rotary_cos.given()) {
        launch.rotary_positions = a.rotary_cos.shape[0];
        launch.pairs = static_cast<int>(a.rotary_cos.shape[1]);
    }
    return launch;
}

void append(const AppendArgs& args, const AppendOptions& options, void* stream) {
    const Device device = args.k.device;
    for (const AppendTensor& t : kAppendTensors) expect_device_memory(t.name, args.*t.view, device);
    const Launch launch = launch_of(args, options);
    constexpr std::int64_t kMost = std::numeric_limits<int>::max() / 2;
    for (const auto& [name, rows] : {std::pair("k", &launch.k), std::pair("q", &launch.q)}) {
        if (rows->count * rows->heads <= kMost) continue;
        throw Error(ErrorCode::unsupported, name,
                    fmt::format("expected up to {} heads of rows, got {}", kMost, rows->count * rows->heads));
    }
    const CurrentDevice current(device);
    const auto on = static_cast<cudaStream_t>(stream);
    if (args.k.dtype == DType::fp32) check(start_append<float>(launch, on), "append");
    else if (args.k.dtype == DType::bf16) check(start_append<__nv_bfloat16>(launch, on), "append");
    else if (args.k.dtype == DType::fp16) check(start_append<__half>(launch, on), "append");
    else
        throw Error(ErrorCode::unsupported, "k",
                    fmt::format("takes fp32, bf16 and fp16 on CUDA, got {}", name_of(args.k.dtype)));
}

}  // namespace tessera::cuda
