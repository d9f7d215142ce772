// SPDX-License-Identifier: Apache-2.0
#include "check/packed.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <span>

#include "core/numeric.hpp"
#include "core/o_residual.hpp"

namespace tessera::check {
namespace {

/// Makes an fp64 tensor in the shape of `like` in C order. With `keep_expanded`, dimensions of stride 0 take no memory.
Packed make(const TensorView& like, bool keep_expanded) {
    Packed result;
    result.view = TensorView{.dtype = DType::fp64, .rank = like.rank, .shape = like.shape};
    std::int64_t count = 1;
    for (auto d = static_cast<std::size_t>(like.rank); d-- > 0;) {
        const bool expanded = keep_expanded && like.strides[d] == 0 && like.shape[d] > 1;
        result.view.strides[d] = expanded ? 0 : count;
        if (!expanded) count *= std::max<std::int64_t>(like.shape[d], 1);
    }
    if (like.given() && like.size() > 0) result.data.assign(static_cast<std::size_t>(count), 0.0);
    result.view.data = result.data.data();
    return result;
}

}  // namespace

Packed packed_zeros(const TensorView& like) { return make(like, false); }

Packed packed_copy(const TensorView& from) {
    Packed result = make(from, true);
    TensorView source = from;  // one index of every expanded dimension suffices
    TensorView target = result.view;
    for (std::size_t d = 0; d < static_cast<std::size_t>(from.rank); ++d) {
        if (target.strides[d] == 0 && target.shape[d] > 1) source.shape[d] = target.shape[d] = 1;
    }
    for_each_element(source, [&](std::int64_t flat, const std::byte* element) {
        result.data[static_cast<std::size_t>(flat)] = load_as_double(element, from.dtype);
    });
    return result;
}

void store_all(const TensorView& from, const TensorView& to) {
    const auto* values = static_cast<const double*>(from.data);
    for_each_element(
        to, [&](std::int64_t flat, std::byte* element) { store_from_double(element, to.dtype, values[flat]); });
}

void store_residuals(const TensorView& from, const TensorView& to, DType dtype) {
    const auto* values = static_cast<const double*>(from.data);
    for_each_element(to, [&](std::int64_t flat, std::byte* element) {
        const auto exact = static_cast<float>(values[flat]);
        const std::int32_t rest = dtype == DType::bf16
                                      ? residual_of<DType::bf16>(exact, to_float(from_double<Bf16>(values[flat])))
                                      : residual_of<DType::fp16>(exact, to_float(from_double<Fp16>(values[flat])));
        *reinterpret_cast<std::int8_t*>(element) = static_cast<std::int8_t>(rest);
    });
}

std::string index_text(const TensorView& t, std::int64_t flat) {
    std::array<std::int64_t, TensorView::kMaxRank> index{};
    for (auto d = static_cast<std::size_t>(t.rank); d-- > 0;) {
        index[d] = flat % t.shape[d];
        flat /= t.shape[d];
    }
    return fmt::format("[{}]", fmt::join(std::span(index).first(static_cast<std::size_t>(t.rank)), ", "));
}

}  // namespace tessera::check
