// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <array>
#include <cstring>
#include <utility>

#include "context_parallel/host_rows.hpp"
#include "core/checks.hpp"
#include "registry.hpp"
#include "tessera/context_parallel.hpp"
#include "tessera/error.hpp"

namespace tessera {
namespace {

/// Address and stride of the rows of a [rows, heads, dim] tensor, whose heads must be contiguous.
RowsAt rows_of(const char* name, const TensorView& t) {
    const bool heads_follow = t.shape[1] == 1 || t.strides[1] == t.shape[2];
    if (t.strides[2] != 1 || !heads_follow)
        throw Error(ErrorCode::invalid_argument, name,
                    fmt::format("expected rows whose heads lie side by side, got {}", t.describe()));
    return {t.data, static_cast<std::size_t>(t.strides[0] * size_of(t.dtype))};
}

void expect_on(const char* name, const TensorView& t, const Device& device) {
    if (t.device != device)
        throw Error(ErrorCode::invalid_argument, name, "expected memory of the device of the other tensors");
}

void expect_packed(const char* name, const TensorView& t, const Device& device) {
    const bool is_packed = t.strides[static_cast<std::size_t>(t.rank) - 1] == 1 &&
                           (t.rank == 1 || t.strides[0] == t.shape[1] || t.shape[0] < 2);
    if (!is_packed && t.size() > 1)
        throw Error(ErrorCode::invalid_argument, name, fmt::format("expected packed memory, got {}", t.describe()));
    expect_on(name, t, device);
}

void copy_on_host(const RowCopies& copies) {
    for (std::int64_t i = 0; i < copies.count; ++i) {
        const int which = copies.to[i] < copies.split ? 0 : 1;
        const auto row = static_cast<std::size_t>(copies.to[i] - (which == 0 ? 0 : copies.split));
        auto* to = static_cast<std::byte*>(copies.target[which].data) + row * copies.target[which].pitch;
        for (int half = 0; half < 2; ++half) {
            const RowsAt& source = copies.source[half];
            const auto* from =
                static_cast<const std::byte*>(source.data) + static_cast<std::size_t>(copies.from[i]) * source.pitch;
            if (copies.bytes[half] == 0) continue;  // its pointers may be null
            std::memcpy(to, from, static_cast<std::size_t>(copies.bytes[half]));
            to += copies.bytes[half];
        }
    }
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
    expect_packed("parts", parts, dk.device);
    expect_packed("first", first, dk.device);
    expect_packed("sources", sources, dk.device);
    expect_on("dv", dv, dk.device);
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

void copy_rows(const TensorView& first, const TensorView& second, const TensorView& k, const TensorView& v,
               const TensorView& from, const TensorView& to, const Execution& how) {
    const DType dtypes[] = {DType::fp32, DType::bf16, DType::fp16, DType::fp64};
    const DType integers[] = {DType::int64};
    if (k.rank != 3 || v.rank != 3)
        throw Error(ErrorCode::invalid_argument, k.rank != 3 ? "k" : "v", "expected [rows, heads, head_dim]");
    const std::int64_t width_k = k.shape[1] * k.shape[2], width_v = v.shape[1] * v.shape[2];
    expect_tensor("k", k, std::to_array({k.shape[0], k.shape[1], k.shape[2]}), dtypes);
    const DType same[] = {k.dtype};
    expect_tensor("v", v, std::to_array({k.shape[0], v.shape[1], v.shape[2]}), same);
    expect_tensor("first", first, std::to_array({first.shape[0], width_k + width_v}), same);
    expect_tensor("second", second, std::to_array({second.shape[0], width_k + width_v}), same);
    expect_tensor("from", from, std::to_array({from.shape[0]}), integers);
    expect_tensor("to", to, std::to_array({from.shape[0]}), integers);
    for (const auto& [name, t] : {std::pair{"first", &first}, {"second", &second}, {"from", &from}, {"to", &to}})
        expect_packed(name, *t, k.device);
    expect_on("v", v, k.device);
    const std::int64_t size = size_of(k.dtype);
    const auto pitch = static_cast<std::size_t>((width_k + width_v) * size);
    const RowCopies copies{.from = static_cast<const std::int64_t*>(from.data),
                           .to = static_cast<const std::int64_t*>(to.data),
                           .count = from.shape[0],
                           .split = first.shape[0],
                           .bytes = {width_k * size, width_v * size},
                           .source = {rows_of("k", k), rows_of("v", v)},
                           .target = {{first.data, pitch}, {second.data, pitch}}};
    if (copies.count == 0) return;
    if (k.device.type == DeviceType::cuda) copy_rows_on_cuda(copies, k.device, how.stream);
    else copy_on_host(copies);
}

}  // namespace tessera
