// SPDX-License-Identifier: Apache-2.0
#include "tessera/problem.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <string>

#include "tessera/error.hpp"

namespace tessera::problem_test {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

struct Wrong {
    const char* argument;
    std::function<void(Problem&)> change;
    bool ragged = false;
};

Problem dense_problem() { return Problem::dense(2, 16, 4, 64); }

Problem ragged_problem() {
    Problem p = Problem::dense(2, 16, 4, 64);
    p.ragged = true;
    p.total_q = p.total_kv = 20;
    return p;
}

void expect_invalid(const Problem& p, const std::string& argument, std::size_t number) {
    try {
        p.validate();
        ADD_FAILURE() << "row " << number << ": expected an error about " << argument << " for " << p.describe();
    } catch (const Error& e) {
        EXPECT_EQ(e.code(), ErrorCode::invalid_argument);
        EXPECT_EQ(e.argument(), argument) << "row " << number << ": " << e.what();
    }
}

TEST(Problem, each_field_wrong_in_turn_is_named) {
    constexpr std::int64_t kCount = std::int64_t{1} << 32;
    const Wrong rows[] = {
        {"dtype", [](Problem& p) { p.dtype = DType::int32; }},
        {"dtype", [](Problem& p) { p.dtype = DType::int64; }},
        {"dtype", [](Problem& p) { p.dtype = static_cast<DType>(77); }},
        {"batch", [](Problem& p) { p.batch = -1; }},
        {"batch", [](Problem& p) { p.batch = kCount; }},
        {"len_q", [](Problem& p) { p.len_q = -1; }},
        {"len_q", [](Problem& p) { p.len_q = kCount + 1; }},
        {"len_kv", [](Problem& p) { p.len_kv = -1; }},
        {"len_kv", [](Problem& p) { p.len_kv = std::numeric_limits<std::int64_t>::max(); }},
        {"heads_q", [](Problem& p) { p.heads_q = -4; }},
        {"heads_kv", [](Problem& p) { p.heads_kv = -1; }},
        {"heads_q", [](Problem& p) { p.heads_kv = 3; }},
        {"heads_q", [](Problem& p) { p.heads_kv = 0; }},
        {"heads_q", [](Problem& p) { p.heads_kv = 8; }},
        {"head_dim", [](Problem& p) { p.head_dim = 0; }},
        {"head_dim", [](Problem& p) { p.head_dim = 257; }},
        {"head_dim_v", [](Problem& p) { p.head_dim_v = 0; }},
        {"head_dim_v", [](Problem& p) { p.head_dim_v = 257; }},
        {"total_q", [](Problem& p) { p.total_q = 1; }},
        {"total_kv", [](Problem& p) { p.total_kv = 1; }},
        {"total_q", [](Problem& p) { p.total_q = -1; }, true},
        {"total_kv", [](Problem& p) { p.total_kv = -1; }, true},
        {"total_q", [](Problem& p) { p.total_q = std::int64_t{1} << 60; }, true},
        {"total_kv", [](Problem& p) { p.total_kv = std::int64_t{1} << 60; }, true},
        {"causal", [](Problem& p) { p.mask.causal = static_cast<Causal>(3); }},
        {"window_left", [](Problem& p) { p.mask.window_left = -1; }},
        {"window_right", [](Problem& p) { p.mask.window_right = std::numeric_limits<std::int64_t>::min(); }},
        {"scale", [](Problem& p) { p.scale = kInf; }},
        {"scale", [](Problem& p) { p.scale = std::nan(""); }},
        {"scale", [](Problem& p) { p.scale = 1e39; }},
        {"softcap", [](Problem& p) { p.softcap = -1; }},
        {"softcap", [](Problem& p) { p.softcap = std::nan(""); }},
        {"softcap", [](Problem& p) { p.softcap = kInf; }},
        {"softcap", [](Problem& p) { p.softcap = 1e-60; }},
        {"dropout", [](Problem& p) { p.dropout.probability = 1; }},
        {"dropout", [](Problem& p) { p.dropout.probability = -0.1; }},
        {"dropout", [](Problem& p) { p.dropout.probability = std::nan(""); }},
        {"bias_gradient", [](Problem& p) { p.bias_gradient = true; }},
        {"page_size", [](Problem& p) { p.page_size = 16; }},
        {"page_size", [](Problem& p) { p.kv_lengths = true, p.page_size = -1; }},
        {"len_kv", [](Problem& p) { p.kv_lengths = true, p.page_size = 16, p.len_kv = 40; }},
        {"cache_batch_index", [](Problem& p) { p.cache_batch_index = true; }},
        {"cache_batch_index",
         [](Problem& p) { p.kv_lengths = p.cache_batch_index = true, p.page_size = p.len_kv = 16; }},
        {"left_padding", [](Problem& p) { p.left_padding = true; }},
        {"bias", [](Problem& p) { p.kv_lengths = p.bias = true; }},
        {"total_kv", [](Problem& p) { p.kv_lengths = true; }, true},
        // Products that do not fit: 2^64 rows, which wrap to 0 in 64 bits; 2^64 scores.
        {"len_q", [](Problem& p) { p.batch = kCount / 2, p.len_q = kCount; }},
        {"len_kv", [](Problem& p) { p.batch = kCount / 2, p.len_kv = kCount; }},
        {"len_kv", [](Problem& p) { p.len_q = kCount, p.len_kv = kCount; }},
        {"len_kv", [](Problem& p) { p.len_q = kCount, p.len_kv = kCount; },
         true},  // the bounds are too large, though there are few rows
        {"len_q",
         [](Problem& p) { p.batch = kCount - 1, p.heads_q = p.heads_kv = kCount - 1, p.len_q = p.len_kv = 0; }},
    };
    for (std::size_t i = 0; i < std::size(rows); ++i) {
        Problem p = rows[i].ragged ? ragged_problem() : dense_problem();
        EXPECT_NO_THROW(p.validate());
        rows[i].change(p);
        expect_invalid(p, rows[i].argument, i);
    }
}

TEST(BugFamilies, negative_window_is_refused_bug_54) {
    for (const std::int64_t side : {std::int64_t{-1}, std::int64_t{-128}, std::numeric_limits<std::int64_t>::min()}) {
        Problem p = dense_problem();
        p.mask.window_left = side;
        expect_invalid(p, "window_left", 0);
        p.mask = {.window_right = side};
        expect_invalid(p, "window_right", 0);
    }
}

TEST(Problem, limits_are_legal) {
    const std::function<void(Problem&)> changes[] = {
        [](Problem& p) { p.batch = 0; },
        [](Problem& p) { p.len_q = 0; },
        [](Problem& p) { p.len_kv = 0; },
        [](Problem& p) { p.heads_q = 0; },
        [](Problem& p) { p.heads_q = p.heads_kv = 0; },
        [](Problem& p) { p.heads_kv = 1; },
        [](Problem& p) { p.head_dim = 1, p.head_dim_v = 256; },
        [](Problem& p) { p.head_dim = 256, p.head_dim_v = 1; },
        [](Problem& p) { p.batch = 70000; },
        [](Problem& p) { p.heads_q = p.heads_kv = 70000; },
        [](Problem& p) { p.len_q = p.len_kv = (std::int64_t{1} << 22) + 128; },
        [](Problem& p) { p.len_q = 1, p.len_kv = std::int64_t{1} << 32; },
        [](Problem& p) {
            p.mask = {Causal::top_left, 0, 0};
        },
        [](Problem& p) { p.mask.window_left = unbounded - 1; },
        [](Problem& p) { p.scale = 0; },
        [](Problem& p) { p.scale = -2.5; },
        [](Problem& p) { p.scale = 1e-45; },
        [](Problem& p) { p.softcap = 1e-30; },
        [](Problem& p) { p.dropout.probability = std::nextafter(1.0, 0.0); },
        [](Problem& p) { p.bias = p.bias_gradient = p.alibi = true; },
        [](Problem& p) { p.dtype = DType::fp64; },
    };
    for (std::size_t i = 0; i < std::size(changes); ++i) {
        Problem p = dense_problem();
        changes[i](p);
        EXPECT_NO_THROW(p.validate()) << "row " << i;
    }
    Problem p = ragged_problem();
    p.total_q = p.total_kv = p.len_q = p.len_kv = p.batch = 0;
    EXPECT_NO_THROW(p.validate());
}

TEST(Problem, derived_values) {
    Problem p = Problem::dense(3, 10, 8, 16, DType::bf16);
    EXPECT_EQ(p.effective_scale(), 0.25);
    EXPECT_EQ(p.rows_q(), 30);
    EXPECT_EQ(p.rows_kv(), 30);
    EXPECT_EQ(p.group(), 1);
    p.heads_kv = 2;
    EXPECT_EQ(p.group(), 4);
    p.scale = 0;
    EXPECT_EQ(p.effective_scale(), 0);
    p.heads_q = p.heads_kv = 0;
    EXPECT_EQ(p.group(), 1);
    EXPECT_EQ(ragged_problem().rows_q(), 20);
}

TEST(Problem, describe_is_one_line) {
    Problem p = Problem::dense(2, 128, 8, 64);
    p.heads_kv = 2;
    p.len_kv = 256;
    p.mask.causal = Causal::bottom_right;
    EXPECT_EQ(p.describe(), "fp32 batch 2, heads 8/2, len 128 x 256, head_dim 64, causal bottom-right");
    p.head_dim_v = 32;
    p.mask = {Causal::top_left, 5, unbounded};
    p.softcap = 30;
    p.dropout = {0.5, 7};
    EXPECT_EQ(
        p.describe(),
        "fp32 batch 2, heads 8/2, len 128 x 256, head_dim 64/32, causal top-left, window 5,unbounded, softcap 30, "
        "dropout 0.5 seed 7");
    EXPECT_EQ(p.describe().find('\n'), std::string::npos);
    p = {.batch = 2, .len_q = 1, .len_kv = 64, .kv_lengths = true, .page_size = 16, .left_padding = true};
    EXPECT_EQ(p.describe(), "fp32 batch 2, heads 1/1, len 1 x 64, head_dim 64, cache in pages of 16, left padding");
}

TEST(Errors, what_names_the_argument) {
    const Error named(ErrorCode::bad_data, "k", "wrong");
    EXPECT_STREQ(named.what(), "k: wrong");
    EXPECT_EQ(named.argument(), "k");
    EXPECT_EQ(named.code(), ErrorCode::bad_data);
    EXPECT_STREQ(Error(ErrorCode::internal, "", "wrong").what(), "wrong");
}

}  // namespace
}  // namespace tessera::problem_test
