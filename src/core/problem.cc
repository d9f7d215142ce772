// SPDX-License-Identifier: Apache-2.0
#include "tessera/problem.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/invalid.hpp"
#include "core/problem_fields.hpp"

namespace tessera {
namespace {

constexpr std::int64_t kMaxHeadDim = 256;
constexpr std::int64_t kMaxLength = std::int64_t{1} << 32;  // the dropout counter has 32 bits for query and key / 4
constexpr std::int64_t kMaxElements = std::int64_t{1} << 62;

void expect_size(const char* field, std::int64_t value, std::int64_t low, std::int64_t high) {
    if (value < low || value > high) invalid(field, fmt::format("expected {}..{}, got {}", low, high, value));
}

void expect_window(const char* field, std::int64_t value) {
    if (value < 0) {
        invalid(field, fmt::format("expected a number of keys >= 0, or the largest int64 for no limit, got {}", value));
    }
}

/// Index arithmetic is in int64: no tensor may have more elements than that can count, N x N scores included. Sizes 0
/// count as 1, so that the product of any few of the sizes fits too, in whatever order it is made.
void expect_countable(const Problem& p) {
    const auto at_least_1 = [](std::int64_t n) { return static_cast<double>(std::max<std::int64_t>(n, 1)); };
    const double widest = at_least_1(std::max(p.head_dim, p.head_dim_v));
    const double sequences = at_least_1(p.batch);
    const double rows_q = p.ragged ? std::max(at_least_1(p.total_q), sequences) : sequences * at_least_1(p.len_q);
    const bool ragged_kv = p.ragged && !p.kv_lengths;
    const double rows_kv = ragged_kv ? std::max(at_least_1(p.total_kv), sequences) : sequences * at_least_1(p.len_kv);
    const auto limit = static_cast<double>(kMaxElements);
    const auto expect_at_most = [&](const char* field, const char* what, double count) {
        if (count > limit)
            invalid(field, fmt::format("expected at most 2^62 {} over all heads, got {:.3g}", what, count));
    };
    expect_at_most(p.ragged ? "total_q" : "len_q", "elements of the queries", rows_q * at_least_1(p.heads_q) * widest);
    expect_at_most(ragged_kv ? "total_kv" : "len_kv", "elements of the keys",
                   rows_kv * at_least_1(p.heads_kv) * widest);
    expect_at_most("len_kv", "scores",
                   std::max(rows_q, at_least_1(p.len_q)) * at_least_1(p.heads_q) * at_least_1(p.len_kv));
}

void expect_cache(const Problem& p) {
    const auto expect_without = [](const char* field, bool is_set, const char* other) {
        if (is_set) invalid(field, fmt::format("expected none {}, got one", other));
    };
    if (!p.kv_lengths) {
        if (p.page_size != 0) invalid("page_size", fmt::format("expected 0 without kv_lengths, got {}", p.page_size));
        expect_without("cache_batch_index", p.cache_batch_index, "without kv_lengths");
        expect_without("left_padding", p.left_padding, "without kv_lengths");
        return;
    }
    expect_size("page_size", p.page_size, 0, kMaxLength);
    if (p.page_size > 0 && p.len_kv % p.page_size != 0) {
        invalid("len_kv", fmt::format("expected a multiple of page_size = {}, got {}", p.page_size, p.len_kv));
    }
    if (p.ragged && p.total_kv != 0) {
        invalid("total_kv", fmt::format("expected 0 with a cache, whose keys are not ragged, got {}", p.total_kv));
    }
    expect_without("cache_batch_index", p.cache_batch_index && p.page_size > 0, "with pages, which page_table finds");
    expect_without("bias", p.bias, "with a cache");
}

std::string side(std::int64_t window) { return window == unbounded ? "unbounded" : std::to_string(window); }

std::string describe_mask(const Mask& mask) {
    std::string text;
    if (mask.causal == Causal::bottom_right) text += ", causal bottom-right";
    if (mask.causal == Causal::top_left) text += ", causal top-left";
    if (mask.window_left != unbounded || mask.window_right != unbounded) {
        text += fmt::format(", window {},{}", side(mask.window_left), side(mask.window_right));
    }
    return text;
}

}  // namespace

Problem Problem::dense(std::int64_t batch, std::int64_t len, std::int64_t heads, std::int64_t head_dim, DType dtype) {
    return {.dtype = dtype,
            .batch = batch,
            .len_q = len,
            .len_kv = len,
            .heads_q = heads,
            .heads_kv = heads,
            .head_dim = head_dim,
            .head_dim_v = head_dim};
}

double Problem::effective_scale() const { return scale ? *scale : 1.0 / std::sqrt(static_cast<double>(head_dim)); }

void Problem::validate() const {
    if (!is_floating(dtype) || size_of(dtype) == 0) {
        invalid("dtype", fmt::format("expected fp32, bf16, fp16 or fp64, got {}", name_of(dtype)));
    }
    constexpr std::int64_t kMaxCount = std::numeric_limits<std::uint32_t>::max();  // batch and head are Philox words
    expect_size("batch", batch, 0, kMaxCount);
    expect_size("len_q", len_q, 0, kMaxLength);
    expect_size("len_kv", len_kv, 0, kMaxLength);
    expect_size("heads_q", heads_q, 0, kMaxCount);
    expect_size("heads_kv", heads_kv, 0, kMaxCount);
    expect_size("head_dim", head_dim, 1, kMaxHeadDim);
    expect_size("head_dim_v", head_dim_v, 1, kMaxHeadDim);
    if (heads_kv == 0 ? heads_q != 0 : heads_q % heads_kv != 0) {
        invalid("heads_q", fmt::format("expected a multiple of heads_kv = {}, got {}", heads_kv, heads_q));
    }
    if (ragged) {
        expect_size("total_q", total_q, 0, kMaxElements);
        expect_size("total_kv", total_kv, 0, kMaxElements);
    } else if (total_q != 0 || total_kv != 0) {
        invalid(total_q != 0 ? "total_q" : "total_kv",
                "expected 0 for a Problem that is not ragged (set ragged, or leave the totals alone)");
    }
    if (mask.causal > Causal::top_left) {
        invalid("causal",
                fmt::format("expected none, bottom_right or top_left, got {}", static_cast<int>(mask.causal)));
    }
    expect_cache(*this);
    expect_countable(*this);
    expect_window("window_left", mask.window_left);
    expect_window("window_right", mask.window_right);
    if (!std::isfinite(effective_scale()) || !std::isfinite(static_cast<float>(effective_scale()))) {
        invalid("scale", fmt::format("expected a number that is finite in fp32, got {}", *scale));
    }
    if (!(softcap >= 0) || !std::isfinite(static_cast<float>(softcap))) {
        invalid("softcap", fmt::format("expected 0 (none) or a finite number > 0, got {}", softcap));
    }
    if (softcap > 0 && static_cast<float>(softcap) == 0.0F) {
        invalid("softcap", fmt::format("expected a number that is over 0 in fp32, got {}", softcap));
    }
    if (!(dropout.probability >= 0 && dropout.probability < 1)) {
        invalid("dropout", fmt::format("expected a probability in [0, 1), got {}", dropout.probability));
    }
    if (bias_gradient && !bias) invalid("bias_gradient", "expected a Problem with a bias");
}

std::string describe_features(const Problem& problem) {
    std::string text;
    const auto add = [&](const std::string& feature) { text += (text.empty() ? "" : ", ") + feature; };
    if (problem.softcap > 0) add(fmt::format("softcap {}", problem.softcap));
    if (problem.alibi) add("alibi");
    if (problem.sinks) add("sinks");
    if (problem.kv_lengths)
        add(problem.page_size > 0 ? fmt::format("cache in pages of {}", problem.page_size) : "cache");
    if (problem.cache_batch_index) add("batch index");
    if (problem.left_padding) add("left padding");
    if (problem.bias) add(problem.bias_gradient ? "bias with gradient" : "bias");
    if (problem.dropout.probability > 0)
        add(fmt::format("dropout {}", problem.dropout.probability));  // last: describe()
    return text;
}

std::string Problem::describe() const {
    std::string text = fmt::format("{} batch {}, heads {}/{}, len {} x {}, head_dim {}", name_of(dtype), batch, heads_q,
                                   heads_kv, len_q, len_kv, head_dim);
    if (head_dim_v != head_dim) text += fmt::format("/{}", head_dim_v);
    if (ragged) text += fmt::format(", ragged (rows {} x {})", total_q, total_kv);
    text += describe_mask(mask);
    if (scale) text += fmt::format(", scale {}", *scale);
    if (const std::string features = describe_features(*this); !features.empty()) text += ", " + features;
    if (dropout.probability > 0) text += fmt::format(" seed {}", dropout.seed);
    return text;
}

}  // namespace tessera
