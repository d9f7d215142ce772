// SPDX-License-Identifier: Apache-2.0
#include "tessera/decode_block.hpp"

#include <fmt/format.h>

#include <cmath>

#include "core/invalid.hpp"

namespace tessera {
namespace {

constexpr std::int64_t kMaxCapacity = std::int64_t{1} << 31;  // lengths are int32
constexpr std::int64_t kMaxRows = std::int64_t{1} << 20;      // of x, and heads: products of three sizes fit in int64
constexpr std::int64_t kMaxHidden = std::int64_t{1} << 24;

void expect_between(const char* field, std::int64_t value, std::int64_t low, std::int64_t high) {
    if (value < low || value > high) invalid(field, fmt::format("expected {}..{}, got {}", low, high, value));
}

}  // namespace

Problem DecodeBlockProblem::attention() const {
    Problem problem;
    problem.dtype = dtype;
    problem.batch = batch;
    problem.len_q = 1;
    problem.len_kv = capacity;
    problem.heads_q = heads_q;
    problem.heads_kv = heads_kv;
    problem.head_dim = problem.head_dim_v = head_dim;
    problem.mask.window_left = window_left;
    problem.scale = scale;
    problem.softcap = softcap;
    problem.sinks = sinks;
    problem.kv_lengths = true;
    problem.page_size = page_size;
    problem.cache_batch_index = cache_batch_index;
    problem.left_padding = left_padding;
    return problem;
}

void DecodeBlockProblem::validate() const {
    if (dtype != DType::bf16 && dtype != DType::fp32) {
        invalid("dtype", fmt::format("expected bf16 or fp32, got {}", name_of(dtype)));
    }
    if (weights_dtype != DType::bf16 && weights_dtype != dtype) {
        const char* const own = dtype == DType::fp32 ? " or fp32" : "";
        invalid("weights_dtype", fmt::format("expected bf16{}, got {}", own, name_of(weights_dtype)));
    }
    expect_between("batch", batch, 0, kMaxRows);
    expect_between("hidden", hidden, 1, kMaxHidden);
    expect_between("heads_q", heads_q, 1, kMaxRows);
    expect_between("heads_kv", heads_kv, 1, kMaxRows);
    expect_between("head_dim", head_dim, 1, 256);
    expect_between("page_size", page_size, 0, kMaxCapacity);
    expect_between("capacity", capacity, 1, kMaxCapacity);
    if (page_size > 0 && capacity % page_size != 0) {
        invalid("capacity", fmt::format("expected a multiple of page_size = {}, got {}", page_size, capacity));
    }
    expect_between("rotary_dim", rotary_dim, 0, head_dim);
    if (rotary_dim % 2 != 0) invalid("rotary_dim", fmt::format("expected an even number, got {}", rotary_dim));
    if (!(norm_eps >= 0) || !std::isfinite(norm_eps)) {
        invalid("norm_eps", fmt::format("expected a finite number >= 0, got {}", norm_eps));
    }
    attention().validate();
}

std::string DecodeBlockProblem::describe() const {
    std::string text = fmt::format("{} batch {}, hidden {}, heads {}/{} of {}, capacity {}", name_of(dtype), batch,
                                   hidden, heads_q, heads_kv, head_dim, capacity);
    if (page_size > 0) text += fmt::format(" in pages of {}", page_size);
    if (weights_dtype != dtype) text += fmt::format(", weights {}", name_of(weights_dtype));
    if (window_left != unbounded) text += fmt::format(", window {}", window_left);
    if (softcap > 0) text += fmt::format(", softcap {}", softcap);
    if (rotary_dim > 0) text += fmt::format(", rotary {}{}", rotary_dim, rotary_interleaved ? " interleaved" : "");
    const auto add = [&](bool is_set, const char* what) {
        if (is_set) text += fmt::format(", {}", what);
    };
    add(qk_norm, "QK norm");
    add(qkv_bias, "QKV bias");
    add(out_bias, "output bias");
    add(sinks, "sinks");
    add(cache_batch_index, "slots by index");
    add(left_padding, "left padding");
    return text;
}

}  // namespace tessera
