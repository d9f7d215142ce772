// SPDX-License-Identifier: Apache-2.0
//
// The named cases. Each one covers a corner that some attention library got wrong or that a tile size makes likely.
#include <array>
#include <limits>
#include <utility>

#include "check/case.hpp"

namespace tessera::check {
namespace {

struct Shape {
    std::int64_t batch, len_q, len_kv, heads_q, heads_kv, head_dim, head_dim_v;
};

class List {
 public:
    /// Appends a case of this shape that the caller refines.
    Case& add(const char* id, const Shape& s, DType dtype = DType::fp32) {
        Case c{.id = id, .seed = cases.size() + 1};
        c.problem = {.dtype = dtype,
                     .batch = s.batch,
                     .len_q = s.len_q,
                     .len_kv = s.len_kv,
                     .heads_q = s.heads_q,
                     .heads_kv = s.heads_kv,
                     .head_dim = s.head_dim,
                     .head_dim_v = s.head_dim_v};
        cases.push_back(std::move(c));
        return cases.back();
    }
    std::vector<Case> cases;
};

void add_sizes(List& list) {
    list.add("one_of_everything", {1, 1, 1, 1, 1, 1, 1});
    list.add("no_batch", {0, 5, 7, 2, 2, 8, 8});
    list.add("no_heads", {2, 5, 7, 0, 0, 8, 8});
    list.add("no_query_heads", {2, 5, 7, 0, 2, 8, 8});
    list.add("no_queries", {2, 0, 7, 2, 1, 8, 8});
    list.add("no_keys", {2, 5, 0, 2, 2, 8, 8}).dlse = true;
    list.add("nothing", {0, 0, 0, 0, 0, 1, 1});
    list.add("one_key", {2, 33, 1, 2, 1, 16, 16});
    list.add("decode", {2, 1, 777, 8, 2, 64, 64});
    list.add("decode_bf16", {2, 1, 777, 8, 2, 64, 64}, DType::bf16);
    list.add("square_64", {1, 64, 64, 1, 1, 64, 64});
    list.add("past_64", {1, 65, 65, 1, 1, 65, 65});
    list.add("under_64", {1, 63, 63, 1, 1, 63, 63});
    list.add("three_times_512", {1, 3, 1537, 1, 1, 32, 32}).threads = 3;
    list.add("many_queries", {1, 1537, 3, 1, 1, 32, 32}).threads = 3;
    list.add("head_dim_256", {1, 70, 90, 2, 1, 256, 256});
    list.add("head_dim_1", {2, 70, 90, 2, 1, 1, 1});
    list.add("head_dim_3_v_200", {1, 40, 70, 2, 2, 3, 200});
    list.add("head_dim_192_v_128", {1, 40, 70, 2, 1, 192, 128}, DType::bf16);
    list.add("head_dim_200_v_1", {1, 40, 70, 2, 2, 200, 1}, DType::fp16);
}

void add_masks(List& list) {
    const auto causal = [&](const char* id, std::int64_t len_q, std::int64_t len_kv, Causal kind) {
        list.add(id, {1, len_q, len_kv, 2, 1, 32, 32}).problem.mask.causal = kind;
    };
    causal("causal_square", 130, 130, Causal::bottom_right);
    causal("causal_br_more_keys", 70, 200, Causal::bottom_right);
    causal("causal_br_more_queries", 200, 70, Causal::bottom_right);
    causal("causal_tl_more_keys", 70, 200, Causal::top_left);
    causal("causal_tl_more_queries", 200, 70, Causal::top_left);
    const auto window = [&](const char* id, std::int64_t len_q, std::int64_t len_kv, std::int64_t left,
                            std::int64_t right) {
        Mask& mask = list.add(id, {1, len_q, len_kv, 2, 2, 16, 16}).problem.mask;
        mask.window_left = left;
        mask.window_right = right;
    };
    window("window_self_only", 100, 100, 0, 0);
    window("window_left", 150, 150, 17, 0);
    window("window_right", 150, 150, 0, 17);
    window("window_decode", 1, 300, 20, 0);
    window("window_more_queries", 300, 20, 5, 5);
    window("window_wide", 80, 90, 1000, 1000);
    Case& both = list.add("causal_tl_window", {1, 120, 60, 1, 1, 16, 16});
    both.problem.mask = {.causal = Causal::top_left, .window_left = 70, .window_right = unbounded};
}

void add_scores(List& list) {
    Case& cap = list.add("softcap_causal_gqa", {2, 70, 70, 4, 2, 32, 32});
    cap.problem.softcap = 20;
    cap.problem.mask.causal = Causal::bottom_right;
    cap.q = Fill::large_logits;
    Case& alibi = list.add("alibi_more_keys", {2, 40, 170, 4, 4, 32, 32});
    alibi.problem.alibi = true;
    alibi.alibi_per_batch = true;
    Case& bias = list.add("bias_full_gradient", {2, 40, 70, 4, 2, 32, 32});
    bias.problem.bias = bias.problem.bias_gradient = true;
    bias.bias_holes = BiasHoles::scattered;
    Case& rows = list.add("bias_rows_all_inf", {1, 70, 70, 2, 1, 32, 32});
    rows.problem.bias = rows.problem.bias_gradient = true;
    rows.bias_holes = BiasHoles::rows;
    rows.dlse = true;
    Case& prefix = list.add("bias_inf_prefix", {1, 33, 1540, 1, 1, 16, 16});
    prefix.problem.bias = true;
    prefix.bias_holes = BiasHoles::prefix;
    prefix.bias_broadcast = {true, true, true, false};
    Case& scalar = list.add("bias_scalar_gradient", {2, 30, 40, 2, 2, 8, 8});
    scalar.problem.bias = scalar.problem.bias_gradient = true;
    scalar.bias_broadcast = {true, true, true, true};
    scalar.dlse = true;  // a row of dS sums to its dLSE; without dLSE this gradient is 0 in any kernel
    Case& dropout = list.add("dropout_half", {2, 100, 130, 2, 1, 32, 32});
    dropout.problem.dropout = {.probability = 0.5, .seed = 42};
    dropout.dlse = true;
    list.add("scale_zero", {1, 50, 60, 1, 1, 32, 32}).problem.scale = 0;
    list.add("scale_negative", {1, 50, 60, 1, 1, 32, 32}).problem.scale = -0.7;
    list.add("large_logits", {1, 100, 300, 2, 2, 64, 64}).q = Fill::large_logits;
    list.add("outliers_bf16", {1, 100, 300, 2, 2, 64, 64}, DType::bf16).k = Fill::outliers;
}

/// Adds sinks: in rows that see no key, in decoding with and without groups, and beside scores far from 0.
void add_sinks(List& list) {
    const auto sinks = [&](const char* id, const Shape& shape, DType dtype = DType::fp32) -> Case& {
        Case& c = list.add(id, shape, dtype);
        c.problem.sinks = c.sinks_of_all_sizes = c.dlse = true;
        return c;
    };
    sinks("sinks_causal_more_queries", {2, 200, 70, 4, 2, 32, 32}).problem.mask.causal = Causal::bottom_right;
    sinks("sinks_without_keys", {1, 5, 0, 2, 1, 16, 16});
    sinks("sinks_decode", {2, 1, 300, 8, 2, 64, 64});
    sinks("sinks_decode_bf16", {2, 1, 5003, 8, 1, 64, 64}, DType::bf16);
    sinks("sinks_few_queries_bf16", {2, 4, 700, 8, 2, 64, 64}, DType::bf16).problem.mask.causal = Causal::bottom_right;
    sinks("sinks_window_softcap_fp16", {1, 150, 150, 4, 1, 32, 32}, DType::fp16).problem.softcap = 20;
    Case& dropout = sinks("sinks_dropout_alibi", {2, 100, 130, 4, 1, 32, 32}, DType::bf16);
    dropout.problem.dropout = {.probability = 0.5, .seed = 42};
    dropout.problem.alibi = true;
    const auto large_lse = [&](const char* id, DType dtype) {
        Case& c = sinks(id, {1, 70, 130, 6, 1, 32, 32}, dtype);
        c.problem.scale = 1;  // q . k has a constant part of 324
        c.elements = {{Input::q, {SetElements::all, SetElements::all, SetElements::all, 31}, 18},
                      {Input::k, {SetElements::all, SetElements::all, SetElements::all, 31}, 18}};
    };
    large_lse("sinks_large_lse", DType::fp32);
    large_lse("sinks_large_lse_bf16", DType::bf16);
    Case& ragged = sinks("sinks_ragged", {1, 0, 0, 4, 2, 24, 24});
    ragged.set_lengths({0, 5, 1, 70, 3}, {0, 9, 33, 0, 300});
    ragged.threads = 2;
}

void add_ragged(List& list) {
    const auto ragged = [&](const char* id, std::vector<std::int64_t> of_q, std::vector<std::int64_t> of_kv) -> Case& {
        Case& c = list.add(id, {1, 0, 0, 4, 2, 24, 24});
        c.set_lengths(std::move(of_q), std::move(of_kv));
        c.threads = 2;
        return c;
    };
    ragged("ragged_zero_everywhere", {0, 5, 0, 70, 0}, {0, 9, 33, 0, 0}).dlse = true;
    ragged("ragged_one_key_each", {1, 1, 1, 1}, {1, 1, 1, 1});
    ragged("ragged_decode", {1, 0, 1, 1}, {300, 10, 0, 65});
    Case& causal = ragged("ragged_causal_softcap", {64, 1, 100, 17}, {64, 65, 90, 17});
    causal.problem.mask.causal = Causal::bottom_right;
    causal.problem.softcap = 10;
    causal.cu_seqlens_dtype = DType::int64;
    Case& loose = ragged("ragged_loose_bounds", {10, 20}, {30, 5});
    loose.problem.len_q = 1000;  // bounds over the longest sequence are legal
    loose.problem.len_kv = 700;
    ragged("ragged_all_empty", {0, 0, 0}, {0, 0, 0});
}

void add_caches(List& list) {
    const auto cache = [&](const char* id, const Shape& shape, DType dtype, std::int64_t page_size,
                           std::vector<std::int64_t> lengths, std::vector<std::int64_t> padding = {}) -> Case& {
        Case& c = list.add(id, shape, dtype);
        c.set_cache(page_size, std::move(lengths), std::move(padding));
        c.problem.mask.causal = Causal::bottom_right;
        c.threads = 3;
        return c;
    };
    cache("cache_slots", {3, 1, 700, 8, 2, 64, 64}, DType::fp32, 0, {700, 0, 513});
    cache("cache_padded_slots", {3, 5, 300, 2, 2, 40, 24}, DType::bf16, 0, {300, -1, 999}, {7, 3, 290});
    cache("cache_pages_of_1", {2, 1, 130, 4, 1, 128, 128}, DType::bf16, 1, {129, 64});
    cache("cache_pages_of_3", {3, 70, 201, 4, 2, 64, 64}, DType::fp32, 3, {200, 70, 30}, {1, 2, 0});
    cache("cache_pages_of_16", {4, 1, 1600, 8, 2, 128, 128}, DType::bf16, 16, {1585, 1, 0, 512});
    cache("cache_pages_of_784", {2, 3, 1568, 10, 2, 32, 32}, DType::fp16, 784, {1000, 783}).problem.softcap = 20;
    Case& window = cache("cache_window", {2, 2, 640, 4, 4, 64, 64}, DType::bf16, 16, {640, 333});
    window.problem.mask.window_left = 40;
    cache("cache_side_by_side", {3, 1, 600, 4, 1, 64, 64}, DType::bf16, 0, {600, 31, 0}).cache_layout =
        CacheLayout::side_by_side;
    cache("cache_heads_first", {2, 4, 300, 4, 2, 64, 40}, DType::fp32, 4, {299, 150}).cache_layout =
        CacheLayout::heads_first;
    Case& layers = cache("cache_layers", {3, 1, 160, 6, 3, 32, 32}, DType::fp16, 1, {160, 3, 77}, {5, 0, 70});
    layers.cache_layout = CacheLayout::layers;
    layers.problem.mask.window_left = 11;
    Case& turns = cache("cache_turns", {4, 1, 2112, 5, 1, 64, 64}, DType::bf16, 1056, {2112, 1056, 1057, 4000});
    turns.cache_layout = CacheLayout::interleaved_pages;
    turns.problem.mask.window_left = 900;
    turns.set_queries({1, 0, 4, 2});
}

void add_layouts(List& list) {
    list.add("bhsd", {2, 70, 90, 4, 2, 64, 64}).layout = Layout::bhsd;
    Case& random = list.add("random_layout", {2, 70, 90, 4, 2, 40, 24});
    random.layout = Layout::random;
    Case& expanded = list.add("expanded_inputs", {3, 40, 50, 4, 4, 32, 32});
    expanded.layout = Layout::random;
    expanded.expanded = {true, true, true, true};
    Case& bf16 = list.add("random_layout_bf16", {2, 70, 90, 4, 2, 33, 65}, DType::bf16);
    bf16.layout = Layout::random;
    bf16.problem.mask.causal = Causal::bottom_right;
    Case& codes = list.add("index_coded", {2, 70, 600, 2, 1, 32, 32});
    codes.v = Fill::index_coded;
    Case& tile = list.add("tile_1x1", {1, 9, 11, 2, 1, 8, 8});
    tile.tile = Tile{1, 1};
    Case& odd_tile = list.add("tile_7x13", {1, 50, 61, 2, 1, 20, 20});
    odd_tile.tile = Tile{7, 13};
    odd_tile.problem.mask.causal = Causal::bottom_right;
}

/// Adds a tile of queries with keys and then many without, in every block of a persistent grid. This order can make a
/// persistent kernel wait forever.
void add_waiting(List& list) {
    list.add("queries_without_keys", {9, 799, 3, 6, 6, 128, 128}, DType::fp16).problem.mask.causal =
        Causal::bottom_right;
}

/// Adds one bias for a batch, for all heads and for all queries. Its gradient is the sum over them.
void add_shared_biases(List& list) {
    const auto shared = [&](const char* id, std::array<bool, 4> broadcast, DType dtype = DType::fp32) {
        Case& c = list.add(id, {3, 30, 40, 4, 2, 8, 8}, dtype);
        c.problem.bias = c.problem.bias_gradient = true;
        c.bias_broadcast = broadcast;
    };
    shared("bias_gradient_of_a_batch", {true, false, false, false});
    shared("bias_gradient_of_all_heads", {true, true, false, false});
    shared("bias_gradient_of_all_heads_bf16", {true, true, false, false}, DType::bf16);
    shared("bias_gradient_of_all_queries", {true, true, true, false});
}

/// Adds NaN and infinities, which may reach nothing but the rows that see them.
void add_special_values(List& list) {
    constexpr std::int64_t all = SetElements::all;
    constexpr double inf = std::numeric_limits<double>::infinity();
    constexpr double nan = std::numeric_limits<double>::quiet_NaN();
    const auto causal = [&](const char* id, const SetElements& set, DType dtype = DType::fp32) -> Case& {
        Case& c = list.add(id, {2, 70, 70, 2, 2, 24, 24}, dtype);
        c.problem.mask.causal = Causal::bottom_right;
        c.elements.push_back(set);
        return c;
    };
    causal("nan_in_a_query", {Input::q, {1, 33, 1, 21}, nan});
    causal("nan_in_a_key", {Input::k, {1, 33, 1, 21}, nan});
    causal("nan_in_a_key_bf16", {Input::k, {1, 33, 1, 21}, nan}, DType::bf16);
    causal("nan_in_a_value", {Input::v, {1, 33, 1, 21}, nan});
    causal("nan_in_a_value_fp16", {Input::v, {1, 33, 1, 21}, nan}, DType::fp16);
    causal("nan_in_an_output_gradient", {Input::d_o, {1, 40, 1, 7}, nan});
    causal("nan_in_an_lse_gradient", {Input::dlse, {1, 1, 12, 0}, nan}).dlse = true;
    Case& hidden = list.add("nan_and_infinity_out_of_sight", {1, 40, 75, 2, 1, 24, 24});
    hidden.problem.mask.causal = Causal::top_left;
    hidden.elements = {{Input::k, {0, 60, 0, all}, nan}, {Input::v, {0, 70, 0, all}, inf}};
    Case& value = list.add("infinity_in_a_value", {1, 30, 70, 1, 1, 32, 32});
    value.problem.scale = 0.05;  // no weight so small that fp32 has none
    value.elements = {{Input::v, {0, 20, 0, 3}, inf}, {Input::v, {0, 50, 0, 4}, -inf}};
    Case& bias = list.add("infinity_in_a_bias", {1, 20, 90, 1, 1, 16, 16});
    bias.problem.bias = bias.problem.bias_gradient = true;
    bias.elements = {{Input::bias, {0, 0, 7, 50}, inf}, {Input::bias, {0, 0, 11, all}, -inf}};
    Case& lowest = list.add("lowest_finite_bias", {1, 20, 90, 1, 1, 16, 16});
    lowest.problem.bias = lowest.problem.bias_gradient = true;
    lowest.elements = {{Input::bias, {0, 0, 11, all}, -std::numeric_limits<float>::max()}};
    // A query of padding, all zeros, has a NaN score with this key.
    Case& padding = list.add("infinite_key_of_weight_0", {1, 7, 70, 1, 1, 24, 24});
    padding.problem.bias = padding.problem.bias_gradient = true;
    padding.bias_broadcast = {true, true, true, false};
    padding.elements = {{Input::q, {all, all, all, all}, -1}, {Input::k, {0, 30, 0, 7}, inf}};
}

/// Adds scores and sums at the ends of fp32's range, and long rows and columns.
void add_extremes(List& list) {
    constexpr std::int64_t all = SetElements::all;
    const auto large_lse = [&](const char* id, DType dtype) {
        Case& c = list.add(id, {1, 70, 130, 2, 1, 32, 32}, dtype);
        c.problem.scale = 1;  // q . k has a constant part of 324
        c.elements = {{Input::q, {all, all, all, 31}, 18}, {Input::k, {all, all, all, 31}, 18}};
    };
    large_lse("large_lse", DType::fp32);
    large_lse("large_lse_bf16", DType::bf16);
    // Sums of weights times V overflow before the division. dP stays finite, as docs/numerics.md requires.
    const auto large_sum = [&](const char* id, DType dtype) {
        list.add(id, {1, 30, 90, 1, 1, 16, 16}, dtype).elements = {{Input::v, {all, all, all, 3}, 3e38},
                                                                   {Input::d_o, {all, all, all, 3}, 1e-37}};
    };
    large_sum("sum_over_largest_fp32", DType::fp32);
    large_sum("sum_over_largest_fp32_bf16", DType::bf16);
    list.add("long_row", {1, 3, 5003, 1, 1, 32, 32});
    list.add("long_row_bf16", {1, 3, 5003, 4, 1, 64, 64}, DType::bf16);
    list.add("long_column", {1, 5003, 3, 1, 1, 32, 32});
    Case& slopes = list.add("alibi_of_both_signs", {2, 70, 170, 4, 2, 32, 32});
    slopes.problem.alibi = true;
    slopes.alibi_both_signs = true;
    Case& expanded = list.add("expanded_bias", {3, 40, 50, 4, 4, 32, 32});
    expanded.problem.bias = expanded.problem.bias_gradient = true;
    expanded.layout = Layout::random;
    expanded.bias_expanded = true;
    list.add("seven_threads", {2, 150, 190, 3, 3, 32, 32}).threads = 7;
    list.add("sixteen_threads_bf16", {1, 70, 700, 4, 2, 64, 64}, DType::bf16).threads = 16;
}

}  // namespace

std::vector<Case> corner_cases() {
    List list;
    add_sizes(list);
    add_masks(list);
    add_scores(list);
    add_ragged(list);
    add_caches(list);
    add_layouts(list);
    add_waiting(list);
    add_shared_biases(list);
    add_special_values(list);
    add_extremes(list);
    add_sinks(list);
    return std::move(list.cases);
}

}  // namespace tessera::check
