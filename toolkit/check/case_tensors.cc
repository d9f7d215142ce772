// SPDX-License-Identifier: Apache-2.0
#include "check/case_tensors.hpp"

#include <cmath>
#include <limits>
#include <vector>

#include "check/case_cache.hpp"
#include "check/packed.hpp"
#include "core/numeric.hpp"

namespace tessera::check {

namespace {
constexpr double kHoleProbability = 0.2;
}  // namespace

std::uint64_t seed_of(const Case& c, Tensor tensor) {
    std::uint64_t id = 0;  // the id enters, so that corner cases of one seed differ too
    for (const char letter : c.id) id = id * 131 + static_cast<unsigned char>(letter);
    return Random(c.seed, id).bits(tensor);
}

GuardedTensor rows_tensor(const Case& c, Tensor tensor, bool of_queries, std::int64_t dim, bool expand) {
    const Problem& p = c.problem;
    const std::int64_t heads = of_queries ? p.heads_q : p.heads_kv;
    const std::uint64_t seed = seed_of(c, tensor);
    if (!of_queries && p.kv_lengths)
        return {p.dtype, {cache_count(p), p.page_size > 0 ? p.page_size : p.len_kv, heads, dim}, c.layout, seed};
    if (p.ragged) return {p.dtype, {of_queries ? p.total_q : p.total_kv, heads, dim}, c.layout, seed, expand};
    return {p.dtype, {p.batch, of_queries ? p.len_q : p.len_kv, heads, dim}, c.layout, seed, expand};
}

GuardedTensor residual_tensor(const Case& c) {
    const Problem& p = c.problem;
    const std::uint64_t seed = seed_of(c, kOResidual);
    if (p.ragged) return {DType::int8, {p.total_q, p.heads_q, p.head_dim_v}, c.layout, seed};
    return {DType::int8, {p.batch, p.len_q, p.heads_q, p.head_dim_v}, c.layout, seed};
}

GuardedTensor lse_tensor(const Case& c, Tensor tensor) {
    const Problem& p = c.problem;
    if (p.ragged) return {DType::fp32, {p.heads_q, p.total_q}, c.layout, seed_of(c, tensor)};
    return {DType::fp32, {p.batch, p.heads_q, p.len_q}, c.layout, seed_of(c, tensor)};
}

GuardedTensor bias_tensor(const Case& c, Tensor tensor, bool expand) {
    const Problem& p = c.problem;
    const auto size = [&](std::size_t d, std::int64_t full) { return c.bias_broadcast[d] ? 1 : full; };
    return {c.bias_dtype,
            {size(0, p.batch), size(1, p.heads_q), size(2, p.len_q), size(3, p.len_kv)},
            c.layout,
            seed_of(c, tensor),
            expand};
}

void punch_holes(const TensorView& bias, BiasHoles holes, std::uint64_t seed) {
    if (holes == BiasHoles::none) return;
    const Random random(seed, 0x401E5);
    const std::int64_t columns = bias.shape[3];
    for_each_element(bias, [&](std::int64_t flat, std::byte* element) {
        const std::int64_t row = flat / columns;
        const std::int64_t column = flat % columns;
        bool hole = false;
        if (holes == BiasHoles::scattered) hole = random.uniform(static_cast<std::uint64_t>(flat)) < kHoleProbability;
        if (holes == BiasHoles::prefix) hole = column < columns * 9 / 10;
        if (holes == BiasHoles::rows) hole = random.uniform(static_cast<std::uint64_t>(row)) < kHoleProbability;
        if (hole) store_from_double(element, bias.dtype, -std::numeric_limits<double>::infinity());
    });
}

GuardedTensor cu_seqlens(const Case& c, Tensor tensor, const std::vector<std::int64_t>& lengths) {
    GuardedTensor result(c.cu_seqlens_dtype, {c.problem.batch + 1}, c.layout, seed_of(c, tensor));
    std::int64_t sum = 0;
    for (std::int64_t b = 0; b <= c.problem.batch; ++b) {
        if (c.cu_seqlens_dtype == DType::int32) *result.view().at<std::int32_t>(b) = static_cast<std::int32_t>(sum);
        else *result.view().at<std::int64_t>(b) = sum;
        if (b < c.problem.batch) sum += lengths[static_cast<std::size_t>(b)];
    }
    return result;
}

GuardedTensor slopes_tensor(const Case& c) {
    const Problem& p = c.problem;
    GuardedTensor result = c.alibi_per_batch
                               ? GuardedTensor(DType::fp32, {p.batch, p.heads_q}, c.layout, seed_of(c, kSlopes))
                               : GuardedTensor(DType::fp32, {p.heads_q}, c.layout, seed_of(c, kSlopes));
    for_each_element(result.view(), [&](std::int64_t flat, std::byte* element) {
        const double sign = c.alibi_both_signs && flat % 2 == 0 ? -1 : 1;
        store_from_double(element, DType::fp32, sign * std::exp2(-0.7 * static_cast<double>(flat % 9 + 1)));
    });
    return result;
}

GuardedTensor sinks_tensor(const Case& c, Tensor tensor) {
    return {DType::fp32, {c.problem.heads_q}, c.layout, seed_of(c, tensor)};
}

void set_sinks_of_all_sizes(const TensorView& sinks) {
    constexpr double kSizes[] = {30, -std::numeric_limits<double>::infinity(), 2, -30, 330};
    for_each_element(sinks, [&](std::int64_t head, std::byte* element) {
        store_from_double(element, DType::fp32, kSizes[head % 5]);
    });
}

}  // namespace tessera::check
