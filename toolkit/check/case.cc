// SPDX-License-Identifier: Apache-2.0
#include "check/case.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <numeric>

#include "check/feature_cases.hpp"

namespace tessera::check {
namespace {

constexpr std::int64_t kMaxMultiplies =
    10'000'000;  // cost of one forward: batch * heads * len * len * (head_dim + head_dim_v)

/// Draws from the random numbers of one case, one after another.
class Draw {
 public:
    Draw(std::uint64_t seed, std::uint64_t index) : random_(seed, index) {}
    std::int64_t between(std::int64_t low, std::int64_t high) {
        return low + static_cast<std::int64_t>(random_.bits(next_++) % static_cast<std::uint64_t>(high - low + 1));
    }
    bool chance(double probability) { return random_.uniform(next_++) < probability; }
    template <class T>
    T pick(std::initializer_list<T> values) {
        return *(values.begin() + between(0, static_cast<std::int64_t>(values.size()) - 1));
    }

 private:
    Random random_;
    std::uint64_t next_ = 0;
};

std::int64_t draw_head_dim(Draw& draw) {
    if (draw.chance(0.4)) return draw.pick<std::int64_t>({64, 80, 96, 128, 32, 16});
    if (draw.chance(0.6)) return draw.between(1, 40);
    return draw.between(1, 256);
}

std::int64_t draw_length(Draw& draw) {
    if (draw.chance(0.03)) return 0;
    if (draw.chance(0.35)) return draw.between(1, 17);
    if (draw.chance(0.5)) return draw.between(1, 4) * 64 + draw.between(-2, 2);
    if (draw.chance(0.15)) return 2048 + draw.between(-3, 67);  // near fa3's limit for short rows
    return draw.between(18, 300);
}

void draw_mask(Draw& draw, Problem& p) {
    if (draw.chance(0.5)) p.mask.causal = draw.pick({Causal::bottom_right, Causal::top_left});
    if (draw.chance(0.25)) p.mask.window_left = draw.chance(0.2) ? 0 : draw.between(0, p.len_kv + 3);
    if (draw.chance(0.2)) p.mask.window_right = draw.chance(0.3) ? 0 : draw.between(0, p.len_kv + 3);
}

void draw_scores(Draw& draw, Case& c) {
    Problem& p = c.problem;
    if (draw.chance(0.25)) p.scale = draw.pick({0.0, -0.3, 1.0, 1.7, 0.05, 1.0 / 3});
    if (draw.chance(0.2)) p.softcap = draw.pick({0.5, 5.0, 30.0, 50.0});
    p.alibi = draw.chance(0.2);
    c.alibi_per_batch = draw.chance(0.5);
    p.bias = draw.chance(0.25);
    p.bias_gradient = p.bias && draw.chance(0.6);
    c.bias_dtype = draw.chance(0.5) ? DType::fp32 : p.dtype;
    for (bool& broadcast : c.bias_broadcast) broadcast = draw.chance(0.4);
    c.bias_holes =
        draw.pick({BiasHoles::none, BiasHoles::none, BiasHoles::scattered, BiasHoles::prefix, BiasHoles::rows});
    if (draw.chance(0.2)) {
        p.dropout.probability = draw.pick({0.1, 0.5, 0.9, 1e-6});
        p.dropout.seed = static_cast<std::uint64_t>(draw.between(0, std::int64_t{1} << 62));
    }
}

void draw_fills(Draw& draw, Case& c) {
    const auto any = [&] { return draw.chance(0.7) ? Fill::normal : Fill::outliers; };
    c.q = draw.chance(0.08) ? Fill::large_logits : any();
    c.k = any();
    c.v = draw.chance(0.1) ? draw.pick({Fill::index_coded, Fill::ones}) : any();
    c.d_o = any();
    c.layout = draw.pick({Layout::bshd, Layout::bhsd, Layout::random, Layout::random});
    for (bool& expanded : c.expanded) expanded = draw.chance(0.15);
    c.dlse = draw.chance(0.3);
    c.lse = !draw.chance(0.1);
}

/// Draws sequence lengths, some of them 0, within the bounds len_q and len_kv.
void draw_ragged(Draw& draw, Case& c) {
    Problem& p = c.problem;
    if (!draw.chance(0.25)) return;
    std::vector<std::int64_t> of_q;
    std::vector<std::int64_t> of_kv;
    for (std::int64_t b = 0; b < p.batch; ++b) {
        of_q.push_back(draw.chance(0.2) ? 0 : draw.between(0, p.len_q));
        of_kv.push_back(draw.chance(0.2) ? 0 : draw.between(0, p.len_kv));
    }
    c.set_lengths(std::move(of_q), std::move(of_kv));
    c.cu_seqlens_dtype = draw.pick({DType::int32, DType::int64});
}

void make_cheap(Problem& p) {
    const auto cost = [&] { return p.batch * p.heads_q * p.len_q * p.len_kv * (p.head_dim + p.head_dim_v); };
    while (cost() > kMaxMultiplies) {
        if (p.heads_kv > 1) p.heads_q /= p.heads_kv, p.heads_kv = 1;
        else if (p.batch > 2) p.batch = 2;
        else if (p.head_dim + p.head_dim_v > 64)
            p.head_dim = (p.head_dim + 1) / 2, p.head_dim_v = (p.head_dim_v + 1) / 2;
        else if (p.heads_q > 2) p.heads_q = 2;
        else if (p.batch > 1) p.batch = 1;
        else if (p.heads_q > 1) p.heads_q = 1;
        else if (p.len_q > 70) p.len_q = p.len_q / 2 + 1;
        else p.len_kv = p.len_kv / 2 + 1;
    }
}

/// Draws what few calls have: long rows, NaN, scores far from 0, negative slopes, a bias of stride 0, many threads.
void draw_extremes(Draw& draw, Case& c) {
    constexpr std::int64_t all = SetElements::all;
    Problem& p = c.problem;
    if (draw.chance(0.03) && !p.ragged) {
        p.len_kv = draw.between(2116, 9000);
        make_cheap(p);
        c.expanded[2] = false;  // long sums of one value are outside of the limits (docs/numerics.md)
    }
    c.alibi_both_signs = draw.chance(0.3);
    c.bias_expanded = draw.chance(0.2);
    if (draw.chance(0.1)) c.threads = static_cast<int>(draw.between(5, 16));
    if (draw.chance(0.06)) {
        const Input input = draw.pick({Input::q, Input::k, Input::v, Input::d_o});
        std::array<std::int64_t, 4> index{};
        for (std::int64_t& i : index) i = draw.between(0, 1000);
        // A dropped weight times NaN may be 0 or NaN in gradients (docs/numerics.md).
        if (p.dropout.probability == 0 || input == Input::d_o) c.elements.push_back({input, index, std::nan("")});
    } else if (draw.chance(0.06) && p.softcap == 0 && p.effective_scale() != 0) {
        // A constant part of 300 in every score, so that |LSE| exceeds 256. It comes from the last column: fp32 adds
        // the terms after it at the size of the score, which the limits do not allow for (docs/numerics.md).
        const double column = std::sqrt(300 / std::abs(p.effective_scale()));
        // Tensors of a ragged batch have the column as their third dimension.
        const std::int64_t last = p.head_dim - 1;
        const std::array<std::int64_t, 4> last_column{all, all, p.ragged ? last : all, last};
        for (const Input input : {Input::q, Input::k}) c.elements.push_back({input, last_column, column});
    }
    p.sinks = draw.chance(0.1);
    c.sinks_of_all_sizes = draw.chance(0.3);
}

const char* name_of_layout(Layout layout) {
    return layout == Layout::bshd ? "bshd" : layout == Layout::bhsd ? "bhsd" : "random layout";
}

const char* name_of_cache_layout(CacheLayout cache_layout) {
    constexpr const char* kNames[] = {"separate", "side by side", "heads first", "in layers", "in alternating pages"};
    return kNames[static_cast<std::size_t>(cache_layout)];
}

/// Turns few cases into calls on a cache: some sequences without keys, with a negative length or with one over the
/// capacity.
void draw_cache(Draw& draw, Case& c) {
    Problem& p = c.problem;
    if (p.ragged || p.batch == 0 || p.len_kv == 0 || !draw.chance(0.1)) return;
    p.bias = p.bias_gradient = false;
    c.expanded = {};
    const std::int64_t page = draw.pick<std::int64_t>({0, 1, 3, 5, 16, 64, 784, 1056});
    if (page > 0) p.len_kv = (p.len_kv + page - 1) / page * page;
    std::vector<std::int64_t> lengths, padding, queries;
    for (std::int64_t b = 0; b < p.batch; ++b) {
        lengths.push_back(draw.chance(0.1)   ? -draw.between(0, 2)
                          : draw.chance(0.1) ? p.len_kv + draw.between(0, 100)
                                             : draw.between(0, p.len_kv));
        padding.push_back(draw.between(-2, 20));
        queries.push_back(draw.between(0, p.len_q));
    }
    c.set_cache(page, std::move(lengths), draw.chance(0.3) ? std::move(padding) : std::vector<std::int64_t>{});
    if (draw.chance(0.4)) c.set_queries(std::move(queries));
    c.cache_layout = static_cast<CacheLayout>(draw.between(0, 4));
}

}  // namespace

void Case::set_lengths(std::vector<std::int64_t> of_q, std::vector<std::int64_t> of_kv) {
    problem.ragged = true;
    problem.batch = static_cast<std::int64_t>(of_q.size());
    problem.total_q = std::accumulate(of_q.begin(), of_q.end(), std::int64_t{0});
    problem.total_kv = std::accumulate(of_kv.begin(), of_kv.end(), std::int64_t{0});
    for (const std::int64_t n : of_q) problem.len_q = std::max(problem.len_q, n);
    for (const std::int64_t n : of_kv) problem.len_kv = std::max(problem.len_kv, n);
    lengths_q = std::move(of_q);
    lengths_kv = std::move(of_kv);
}

void Case::set_cache(std::int64_t page_size, std::vector<std::int64_t> lengths,
                     std::vector<std::int64_t> left_padding) {
    problem.kv_lengths = true;
    problem.page_size = page_size;
    problem.left_padding = !left_padding.empty();
    problem.batch = static_cast<std::int64_t>(lengths.size());
    lengths_kv = std::move(lengths);
    padding = std::move(left_padding);
}

void Case::set_queries(std::vector<std::int64_t> of_q) {
    problem.ragged = true;
    problem.total_q = std::accumulate(of_q.begin(), of_q.end(), std::int64_t{0});
    for (const std::int64_t n : of_q) problem.len_q = std::max(problem.len_q, n);
    lengths_q = std::move(of_q);
}

std::string describe(const SetElements& set) {
    constexpr const char* kNames[] = {"q", "k", "v", "dO", "bias", "dlse"};
    std::string index;
    for (const std::int64_t i : set.index) {
        index += (index.empty() ? "" : ", ") + (i == SetElements::all ? std::string(":") : std::to_string(i));
    }
    return fmt::format("{}[{}] = {:g}", kNames[static_cast<std::size_t>(set.input)], index, set.value);
}

std::string Case::describe() const {
    std::string text = problem.describe();
    text += fmt::format(", {}, q {}, k {}, v {}, dO {}", name_of_layout(layout), name_of(q), name_of(k), name_of(v),
                        name_of(d_o));
    if (problem.ragged && problem.kv_lengths) {
        text += fmt::format(", queries [{}] {}", fmt::join(lengths_q, " "), tessera::name_of(cu_seqlens_dtype));
    } else if (problem.ragged) {
        text += fmt::format(", lengths [{}] x [{}] {}", fmt::join(lengths_q, " "), fmt::join(lengths_kv, " "),
                            tessera::name_of(cu_seqlens_dtype));
    }
    if (problem.kv_lengths) {
        text += fmt::format(", keys [{}]", fmt::join(lengths_kv, " "));
        if (!padding.empty()) text += fmt::format(" from [{}]", fmt::join(padding, " "));
        text += fmt::format(", K and V {}", name_of_cache_layout(cache_layout));
    }
    if (problem.bias) {
        const char* holes[] = {"none", "scattered", "prefix", "rows"};
        text += fmt::format(", bias {} broadcast [{:d}] -inf {}", tessera::name_of(bias_dtype),
                            fmt::join(bias_broadcast, " "), holes[static_cast<int>(bias_holes)]);
    }
    if (layout == Layout::random) text += fmt::format(", stride 0 [{:d}]", fmt::join(expanded, " "));
    if (layout == Layout::random && bias_expanded) text += ", bias of stride 0";
    if (problem.alibi && alibi_both_signs) text += ", slopes of both signs";
    if (problem.sinks && sinks_of_all_sizes) text += ", sinks of all sizes";
    for (const SetElements& set : elements) text += ", " + check::describe(set);
    if (dlse) text += ", dlse";
    if (!lse) text += ", no lse";
    if (o_residual) text += ", residual of O";
    if (tile) text += fmt::format(", tile {}x{}", tile->block_q, tile->block_kv);
    return text + fmt::format(", threads {}", threads);
}

Case random_case(std::uint64_t seed, std::uint64_t index) {
    Draw draw(seed, index);
    Case c{.id = std::to_string(index), .seed = seed};
    Problem& p = c.problem;
    p.dtype = draw.pick({DType::fp32, DType::fp32, DType::bf16, DType::fp16});
    p.batch = draw.chance(0.02) ? 0 : draw.between(1, 5);
    p.heads_kv = draw.chance(0.02) ? 0 : draw.between(1, 4);
    p.heads_q = p.heads_kv * draw.pick<std::int64_t>({1, 1, 2, 3, 7});
    p.head_dim = draw_head_dim(draw);
    p.head_dim_v = draw.chance(0.7) ? p.head_dim : draw_head_dim(draw);
    p.len_q = draw.chance(0.1) ? 1 : draw_length(draw);
    p.len_kv = draw.chance(0.4) ? p.len_q : draw_length(draw);
    make_cheap(p);
    draw_mask(draw, p);
    draw_scores(draw, c);
    draw_fills(draw, c);
    draw_ragged(draw, c);
    c.threads = static_cast<int>(draw.between(1, 4));
    if (draw.chance(0.15)) c.tile = Tile{draw.between(1, 100), draw.between(1, 130)};
    c.o_residual = is_16_bit(p.dtype) && draw.chance(0.6);
    draw_extremes(draw, c);
    draw_cache(draw, c);
    return c;
}

std::optional<Case> find_case(std::uint64_t seed, std::string_view id) {
    std::uint64_t index = 0;
    const auto [end, error] = std::from_chars(id.data(), id.data() + id.size(), index);
    if (error == std::errc{} && end == id.data() + id.size()) return random_case(seed, index);
    for (Case& c : corner_cases()) {
        if (c.id == id) return std::move(c);
    }
    for (FeatureCase& c : feature_cases(seed)) {
        if (c.which.id == id) return std::move(c.which);
    }
    return std::nullopt;
}

std::string to_command(const Case& which, std::string_view kernel) {
    return fmt::format("tessera check --kernel {} --seed {} --case {}", kernel, which.seed, which.id);
}

}  // namespace tessera::check
