// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <array>
#include <utility>

#include "context_parallel/host_rows.hpp"
#include "core/checks.hpp"
#include "registry.hpp"
#include "tessera/context_parallel.hpp"
#include "tessera/error.hpp"

namespace tessera {
namespace {

/// Where rows of a [rows, heads, dim] tensor lie whose heads lie side by side.
RowsAt rows_of(const char* name, const TensorView& t) {
    const bool heads_follow = t.shape[1] == 1 || t.strides[1] == t.shape[2];
    if (t.strides[2] != 1 || !heads_follow)
        throw Error(ErrorCode::invalid_argument, name,
                    fmt::format("expected rows whose heads lie side by side, got {}", t.describe()));
    return {t.data, static_cast<std::size_t>(t.strides[0] * size_of(t.dtype))};
}

}  // namespace

void add_parts(const TensorView& parts, const TensorView& first, const TensorView& sources, const TensorView& dk,
               const TensorView& dv, const Execution& how) {
    const DType dtypes[] = {DType::fp32, DType::bf16, DType::fp16, DType::fp64};
    const DType integers[] = {DType::int64};
    if (dk.rank != 3 || dv.rank != 3)
        throw Error(ErrorCode::invalid_argument, dk.rank != 3 ? "dk" : "dv", "expected [rows, heads, head_dim]");
    const std::int64_t rows = dk.shape[0], width_k = dk.shape[1] * dk.shape[2], width_v = dv.shape[1] * dv.shape[2];
    const std::int64_t count_of_parts = parts.shape[0], count = sources.shape[0];
    expect_tensor("parts", parts, std::to_array({count_of_parts, width_k + width_v}), dtypes);
    const DType same[] = {parts.dtype};
    expect_tensor("dk", dk, std::to_array({rows, dk.shape[1], dk.shape[2]}), same);
    expect_tensor("dv", dv, std::to_array({rows, dv.shape[1], dv.shape[2]}), same);
    expect_tensor("first", first, std::to_array({rows + 1}), integers);
    expect_tensor("sources", sources, std::to_array({count}), integers);
    const std::pair<const char*, const TensorView*> packed[] = {
        {"parts", &parts}, {"first", &first}, {"sources", &sources}};
    for (const auto& [name, t] : packed) {
        const bool is_packed =
            t->strides[static_cast<std::size_t>(t->rank) - 1] == 1 && (t->rank == 1 || t->strides[0] == t->shape[1]);
        if (!is_packed && t->size() > 1)
            throw Error(ErrorCode::invalid_argument, name,
                        fmt::format("expected packed memory, got {}", t->describe()));
        if (t->device != dk.device)
            throw Error(ErrorCode::invalid_argument, name, "expected memory of the device of dk");
    }
    if (rows == 0) return;
    const RowSums sums{.dtype = parts.dtype,
                       .parts = parts.data,
                       .first = static_cast<const std::int64_t*>(first.data),
                       .sources = static_cast<const std::int64_t*>(sources.data),
                       .rows = rows,
                       .widths = {width_k, width_v},
                       .to = {rows_of("dk", dk), rows_of("dv", dv)}};
    if (dk.device.type == DeviceType::cuda) add_rows_on_cuda(sums, dk.device, how.stream);
    else ranks::host_rows()->add(sums, nullptr);
}

}  // namespace tessera
