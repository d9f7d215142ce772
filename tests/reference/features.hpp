// SPDX-License-Identifier: Apache-2.0
//
// Small fp64 problems that use every feature of the contract alone, and all of them together.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <ostream>
#include <string>
#include <vector>

#include "core/case.hpp"

namespace tessera::test {

struct Feature {
    std::string name;
    Problem problem;
    CaseOptions options;
    friend std::ostream& operator<<(std::ostream& out, const Feature& f) { return out << f.problem.describe(); }
};

/// batch 2, 5 queries x 7 keys, 4/2 heads, head_dim 3, head_dim_v 2.
inline Problem small_problem() {
    Problem p = Problem::dense(2, 5, 4, 3, DType::fp64);
    p.len_kv = 7;
    p.heads_kv = 2;
    p.head_dim_v = 2;
    return p;
}

inline void use_everything(Problem& p) {
    p.mask = {Causal::bottom_right, 3, 2};
    p.scale = 0.7;
    p.softcap = 1.5;
    p.alibi = p.bias = p.bias_gradient = p.sinks = true;
    p.dropout = {0.3, 17};
}

inline std::vector<Feature> masked_features() {
    struct Rule {
        const char* name;
        Mask mask;
    };
    const Rule rules[] = {{"bottom_right", {.causal = Causal::bottom_right}},
                          {"top_left", {.causal = Causal::top_left}},
                          {"window_1_2", {.window_left = 1, .window_right = 2}},
                          {"window_left_0", {.window_left = 0}},
                          {"window_0_0", {.window_left = 0, .window_right = 0}},
                          {"top_left_window_1", {.causal = Causal::top_left, .window_left = 1}}};
    std::vector<Feature> features;
    for (const Rule& rule : rules) {
        for (const std::int64_t len_kv : {3, 5, 8}) {
            Feature f{std::string(rule.name).append("_5x").append(std::to_string(len_kv)), small_problem(), {}};
            f.problem.len_kv = len_kv;
            f.problem.mask = rule.mask;
            features.push_back(f);
        }
    }
    return features;
}

inline std::vector<Feature> bias_features() {
    const std::array<std::int64_t, 4> shapes[] = {{2, 4, 5, 7}, {1, 4, 5, 7}, {2, 1, 5, 7}, {2, 4, 1, 7},
                                                  {2, 4, 5, 1}, {1, 1, 1, 7}, {1, 1, 5, 1}, {1, 1, 1, 1}};
    std::vector<Feature> features;
    for (const auto& s : shapes) {
        std::string name = "bias";
        for (const std::int64_t n : s) name.append("_").append(std::to_string(n));
        Feature f{name, small_problem(), {.bias_shape = s}};
        f.problem.bias = f.problem.bias_gradient = true;
        f.problem.mask = {.causal = Causal::bottom_right};
        features.push_back(f);
    }
    return features;
}

inline std::vector<Feature> ragged_features() {
    Feature plain{"ragged", small_problem(), {}};
    set_ragged(plain.problem, plain.options, {0, 3, 1, 0, 4}, {2, 5, 0, 0, 3});
    Feature longer_bound = plain;
    longer_bound.name = "ragged_int64_loose_bounds";
    longer_bound.problem.len_q = 9;
    longer_bound.problem.len_kv = 11;
    longer_bound.options.cu_dtype = DType::int64;
    Feature everything = plain;
    everything.name = "ragged_everything";
    use_everything(everything.problem);
    everything.options.slopes_per_batch = true;
    return {plain, longer_bound, everything};
}

inline std::vector<Feature> features() {
    std::vector<Feature> all;
    const auto add = [&](const char* name, const std::function<void(Problem&)>& change) {
        all.push_back({name, small_problem(), {}});
        change(all.back().problem);
    };
    add("grouped_heads", [](Problem&) {});
    add("one_head_each", [](Problem& p) { p.heads_kv = 4; });
    add("one_kv_head", [](Problem& p) { p.heads_kv = 1; });
    add("wider_values", [](Problem& p) { p.head_dim = 1, p.head_dim_v = 5; });
    add("scale", [](Problem& p) { p.scale = -1.3; });
    add("scale_0", [](Problem& p) { p.scale = 0; });
    add("softcap", [](Problem& p) { p.softcap = 0.8; });
    add("alibi", [](Problem& p) { p.alibi = true; });
    add("sinks", [](Problem& p) { p.sinks = true; });
    add("sinks_rows_without_keys",
        [](Problem& p) { p.sinks = true, p.len_q = 9, p.mask.causal = Causal::bottom_right; });
    add("alibi_more_queries", [](Problem& p) { p.alibi = true, p.len_q = 8; });
    add("dropout", [](Problem& p) { p.dropout = {0.4, 99}; });
    add("dropout_seed_of_64_bits", [](Problem& p) { p.dropout = {0.1, 0xfedcba9876543210}; });
    add("everything", use_everything);
    add("alibi_per_batch", [](Problem& p) { p.alibi = true; });
    all.back().options.slopes_per_batch = true;
    for (const auto& more : {masked_features(), bias_features(), ragged_features()})
        all.insert(all.end(), more.begin(), more.end());
    return all;
}

inline std::string feature_name(const ::testing::TestParamInfo<Feature>& info) { return info.param.name; }

}  // namespace tessera::test
