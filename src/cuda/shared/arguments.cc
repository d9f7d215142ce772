// SPDX-License-Identifier: Apache-2.0
#include "cuda/shared/arguments.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "core/arguments.hpp"
#include "core/batch.hpp"
#include "core/dropout.hpp"
#include "cuda/device.hpp"
#include "cuda/host/typical_keys.hpp"
#include "tessera/error.hpp"

namespace tessera::cuda {
namespace {

template <class Args>
void expect_memory_of_device(const Call<Args>& call) {
    for (const TensorArgument<Args>& argument : kTensors<Args>)
        expect_device_memory(argument.name, call.args.*argument.view, call.plan.device);
    if (call.plan.workspace_bytes > 0) expect_device_memory("workspace", call.workspace.data(), call.plan.device);
}

/// LSE, [batch, heads, len] or varlen [heads, total].
Rows lse_of(const TensorView& t) {
    if (!t.given()) return {};
    const bool ragged = t.rank == 2;
    const std::size_t first = ragged ? 0 : 1;
    return {.data = static_cast<char*>(t.data),
            .batch = ragged ? 0 : step(t, 0),
            .row = step(t, first + 1),
            .head = step(t, first)};
}

Bias bias_of(const TensorView& t) {
    if (!t.given()) return {};
    return {.data = static_cast<const char*>(t.data),
            .fp32 = t.dtype == DType::fp32,
            .batch = step(t, 0),
            .head = step(t, 1),
            .row = step(t, 2),
            .column = step(t, 3)};
}

BiasGradient bias_gradient_of(const TensorView& t) {
    if (!t.given()) return {};
    return {.data = static_cast<char*>(t.data),
            .fp32 = t.dtype == DType::fp32,
            .batch = step(t, 0),
            .head = step(t, 1),
            .row = step(t, 2),
            .column = step(t, 3)};
}

void set_alibi(ForwardParams& params, const TensorView& slopes) {
    if (!slopes.given()) return;
    params.alibi_slopes = static_cast<const float*>(slopes.data);
    params.alibi_batch = slopes.rank == 2 ? step(slopes, 0) : 0;
    params.alibi_head = step(slopes, slopes.rank == 2 ? 1 : 0);
}

void set_sinks(ForwardParams& params, const TensorView& sinks) {
    if (!sinks.given()) return;
    params.sinks = static_cast<const float*>(sinks.data);
    params.sinks_step = step(sinks, 0);
}

SinkGradient sink_gradient_of(const TensorView& t) {
    if (!t.given()) return {};
    return {.data = static_cast<char*>(t.data), .fp64 = t.dtype == DType::fp64, .step = step(t, 0)};
}

void set_sequences(ForwardParams& params, const TensorView& cu_q, const TensorView& cu_kv) {
    if (!cu_q.given()) return;
    params.cu_seqlens_q = cu_q.data;
    params.cu_seqlens_kv = cu_kv.data;
    params.cu_stride_q = step(cu_q, 0);
    params.cu_stride_kv = step(cu_kv, 0);
    params.cu_q_is_64 = cu_q.dtype == DType::int64;
    params.cu_kv_is_64 = cu_kv.dtype == DType::int64;
}

void set_dropout(ForwardParams& params, const Dropout& dropout) {
    if (dropout.probability <= 0) return;
    params.keep = KeepRule(dropout.seed, keep_threshold(dropout.probability));
    params.keep_scale = static_cast<float>(1 / (1 - dropout.probability));
}

/// The parameters of both passes.
template <class Args>
ForwardParams common_params(const Call<Args>& call) {
    const Problem& p = call.plan.problem;
    const Args& a = call.args;
    if (!call.skip_memory_check) expect_memory_of_device(call);
    ForwardParams params;
    params.q = rows_of(a.q);
    params.k = rows_of(a.k);
    params.v = rows_of(a.v);
    params.o = rows_of(a.o);
    params.lse = lse_of(a.lse);
    params.bias = bias_of(a.bias);
    set_alibi(params, a.alibi_slopes);
    set_sinks(params, a.sinks);
    set_sequences(params, a.cu_seqlens_q, a.cu_seqlens_kv);
    params.total_q = p.total_q;
    params.total_kv = p.total_kv;
    params.batch = p.batch;
    params.len_q = static_cast<int>(p.len_q);
    params.len_kv = static_cast<int>(p.len_kv);
    params.heads_q = static_cast<int>(p.heads_q);
    params.heads_kv = static_cast<int>(p.heads_kv);
    params.group = static_cast<int>(p.group());
    params.head_dim = static_cast<int>(p.head_dim);
    params.head_dim_v = static_cast<int>(p.head_dim_v);
    params.mask = p.mask;
    params.scale = static_cast<float>(p.effective_scale());
    params.softcap = static_cast<float>(p.softcap);
    set_dropout(params, p.dropout);
    return params;
}

}  // namespace

Rows rows_of(const TensorView& t) {
    if (!t.given()) return {};
    const bool ragged = t.rank == 3;
    const std::size_t first = ragged ? 0 : 1;
    return {.data = static_cast<char*>(t.data),
            .batch = ragged ? 0 : step(t, 0),
            .row = step(t, first),
            .head = step(t, first + 1),
            .column = step(t, first + 2)};
}

bool takes_vectors(const Rows& rows, int dim) {
    constexpr std::int64_t kVector = 16;
    const auto whole = [](std::int64_t stride) { return stride * 2 % kVector == 0; };
    return rows.column == 1 && dim % 8 == 0 && reinterpret_cast<std::uintptr_t>(rows.data) % kVector == 0 &&
           whole(rows.batch) && whole(rows.row) && whole(rows.head);
}

bool takes_byte_vectors(const Rows& rows, int dim) {
    constexpr std::int64_t kVector = 8;
    return rows.column == 1 && dim % kVector == 0 && reinterpret_cast<std::uintptr_t>(rows.data) % kVector == 0 &&
           rows.batch % kVector == 0 && rows.row % kVector == 0 && rows.head % kVector == 0;
}

bool takes_bias_pairs(const Bias& bias, int len_kv) {
    const auto even = [](std::int64_t stride) { return stride % 2 == 0; };
    return bias.data != nullptr && !bias.fp32 && bias.column == 1 && even(bias.batch) && even(bias.head) &&
           even(bias.row) && even(len_kv) && reinterpret_cast<std::uintptr_t>(bias.data) % 4 == 0;
}
bool takes_bias_pairs(const BiasGradient& dbias, int len_kv) {
    return takes_bias_pairs(Bias{dbias.data, dbias.fp32, dbias.batch, dbias.head, dbias.row, dbias.column}, len_kv);
}

int heads_together(const Problem& p, std::int64_t l2_share) {
    const bool has_diagonal = p.ragged ? !p.mask.trivial() : p.mask.bind(p.len_q, p.len_kv).high < p.len_kv - 1;
    if (!has_diagonal) return 1;
    constexpr std::int64_t kElementBytes = 2;
    // Most of a varlen call's work is in sequences that are longer than the mean.
    const std::int64_t keys = p.ragged ? std::min(2 * typical_keys(p), p.total_kv) : p.len_kv;
    const std::int64_t kv_bytes = std::max<std::int64_t>(keys * (p.head_dim + p.head_dim_v) * kElementBytes, 1);
    const std::int64_t kv_heads = std::max<std::int64_t>(l2_share / kv_bytes, 1);
    return static_cast<int>(std::min(kv_heads * p.group(), query_heads(p)));
}

Cache cache_of(const Problem& p, const ForwardArgs& a) {
    if (!p.kv_lengths) return {};
    const auto integers = [](const TensorView& t) {
        return t.given() ? static_cast<const std::int32_t*>(t.data) : nullptr;
    };
    const auto stride = [](const TensorView& t, std::size_t dimension) { return t.given() ? step(t, dimension) : 0; };
    return {.lengths = integers(a.kv_lengths),
            .pages = p.page_size > 0 ? integers(a.page_table) : nullptr,
            .slots = integers(a.cache_batch_index),
            .padding = integers(a.left_padding),
            .lengths_step = stride(a.kv_lengths, 0),
            .pages_batch = stride(a.page_table, 0),
            .pages_step = p.page_size > 0 ? stride(a.page_table, 1) : 0,
            .slots_step = stride(a.cache_batch_index, 0),
            .padding_step = stride(a.left_padding, 0),
            .count = a.k.shape[0],
            .page_size = Divider(static_cast<int>(std::max<std::int64_t>(p.page_size, 1)))};
}

ForwardParams forward_params(const ForwardCall& call) { return common_params(call); }

BackwardParams backward_params(const BackwardCall& call) {
    const BackwardArgs& a = call.args;
    return {.forward = common_params(call),
            .d_o = rows_of(a.d_o),
            .dlse = lse_of(a.dlse),
            .dq = rows_of(a.dq),
            .dk = rows_of(a.dk),
            .dv = rows_of(a.dv),
            .dbias = bias_gradient_of(a.dbias),
            .dsinks = sink_gradient_of(a.dsinks)};
}

}  // namespace tessera::cuda
