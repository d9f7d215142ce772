// SPDX-License-Identifier: Apache-2.0
#include "check/feature_cases.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <tuple>

#include "registry.hpp"

namespace tessera::check {
namespace {

struct Dims {
    std::int64_t qk, v;
};
/// Head dimensions that kernels are compiled for.
constexpr Dims kExact[] = {{64, 64}, {96, 96}, {128, 128}, {192, 128}, {192, 192}, {256, 256}};
/// Head dimensions that are padded. fa3 takes multiples of 8.
constexpr Dims kPadded[] = {{24, 24},  {128, 64},  {64, 128},  {40, 88},  {256, 64},
                            {64, 256}, {128, 256}, {256, 128}, {160, 96}, {136, 184}};

/// Sizes. `tall` has two tiles of queries of any kernel, and keys for two blocks. `wide` has few queries, and enough
/// blocks of keys to wrap around any ring of stages. `long_row` exceeds the 2,048 keys up to which fa3 treats a row as
/// short. `small` fits into one tile of queries and one block of keys.
enum class Size : std::uint8_t { tall, wide, long_row, small };
const char* name_of_size(Size size) {
    constexpr const char* kNames[] = {"tall", "wide", "long", "small"};
    return kNames[static_cast<std::size_t>(size)];
}

/// Numbers that depend on the seed and their purpose, but not on the number of earlier draws.
class Numbers {
 public:
    Numbers(std::uint64_t seed, Size size, Dims dims)
        : random_(seed, 0xFEA7 + static_cast<std::uint64_t>(size) * 65536 +
                            static_cast<std::uint64_t>(dims.qk * 257 + dims.v) * 1048576) {}
    std::int64_t between(std::uint64_t what, std::int64_t low, std::int64_t high) const {
        return low + static_cast<std::int64_t>(random_.bits(what) % static_cast<std::uint64_t>(high - low + 1));
    }

 private:
    Random random_;
};

void set_ragged(Case& c, const Numbers& numbers) {
    const Problem& p = c.problem;
    const bool is_long = p.len_kv > 640;  // in the mean too, by which fa3 takes a tile
    c.set_lengths({1, 0, p.len_q, numbers.between(10, 2, p.len_q)},
                  {numbers.between(11, 1, p.len_kv), 7, p.len_kv, is_long ? 2 * p.len_kv : 0});
    c.cu_seqlens_dtype = numbers.between(12, 0, 1) == 0 ? DType::int32 : DType::int64;
}

void set_window(Mask& mask, const Problem& p, const Numbers& numbers) {
    // In long rows the band stays longer than a short row; at other sizes it cuts blocks on both sides.
    const bool wide = p.len_kv > 2048;
    mask.window_left = wide ? p.len_kv - numbers.between(20, 1, 40) : numbers.between(20, 1, p.len_kv / 2);
    mask.window_right = numbers.between(21, 0, p.len_kv / 4);
}

/// Sets enough queries that some see a long row, with top-left alignment and when the first queries see nothing.
void set_long_columns(Feature feature, Problem& p) {
    if (feature != Feature::causal_top_left && feature != Feature::empty_rows) return;
    p.heads_q = p.heads_kv = 1;
    p.len_q = p.len_kv + (feature == Feature::empty_rows ? 40 : 0);
}

void set_mask(Feature feature, Case& c, const Numbers& numbers) {
    Problem& p = c.problem;
    if (feature == Feature::causal_bottom_right) p.mask.causal = Causal::bottom_right;
    if (feature == Feature::causal_top_left) p.mask.causal = Causal::top_left;
    if (feature == Feature::window || feature == Feature::all_but_bias) set_window(p.mask, p, numbers);
    if (feature == Feature::cross_lengths || feature == Feature::empty_rows) {
        p.mask.causal = Causal::bottom_right;
        const bool swap = (feature == Feature::empty_rows) != (p.len_q > p.len_kv);
        if (swap && p.len_kv <= 2048) std::swap(p.len_q, p.len_kv);
    }
    if (feature == Feature::all_but_bias) p.mask.causal = Causal::bottom_right;
}

/// Sets groups of 2 to 16 heads under the masks of a decoding step or of a chunk of a prompt.
void set_stacked_heads(Case& c, const Numbers& numbers, bool wide) {
    Problem& p = c.problem;
    p.heads_kv = wide ? 2 : 1;
    p.heads_q = p.heads_kv << numbers.between(50, 1, wide ? 3 : 2);
    if (p.len_q <= 60 && p.len_kv <= 125) p.heads_q = 2 * p.heads_kv, p.len_q = (p.len_q + 1) / 2;  // still small
    const std::int64_t kind = numbers.between(51, 0, 3);
    if (kind != 0) p.mask.causal = Causal::bottom_right;
    if (kind == 1) p.mask.window_left = p.len_kv - 1 - numbers.between(52, 0, 40);
    if (kind == 2) set_ragged(c, numbers);
}

void set_scores(Feature feature, Case& c, const Numbers& numbers) {
    Problem& p = c.problem;
    const bool all = feature == Feature::all_but_bias;
    if (feature == Feature::large_logits) c.q = Fill::large_logits;
    if (feature == Feature::softcap || all) p.softcap = 5;
    if (feature == Feature::alibi || all) p.alibi = true;
    if (feature == Feature::sinks) p.sinks = true;
    if (feature == Feature::dropout || all) {
        p.dropout = {.probability = 0.3, .seed = static_cast<std::uint64_t>(numbers.between(30, 0, 1 << 30))};
    }
    if (feature == Feature::scale_zero) p.scale = 0;
    if (feature == Feature::scale_negative) p.scale = -0.2;
    if (feature == Feature::bias || feature == Feature::bias_gradient) {
        p.bias = true;
        p.bias_gradient = feature == Feature::bias_gradient;
        c.bias_dtype = numbers.between(31, 0, 1) == 0 ? DType::fp32 : p.dtype;
        c.bias_holes = BiasHoles::scattered;
        c.bias_broadcast[1] = numbers.between(32, 0, 1) == 0;
    }
}

/// Puts the keys into a cache whose sequences have all, none and some of its rows.
void set_cache(Feature feature, Case& c, const Numbers& numbers) {
    constexpr std::int64_t kPage = 16;
    Problem& p = c.problem;
    const bool pages = feature == Feature::pages;
    if (pages) p.len_kv = (p.len_kv + kPage - 1) / kPage * kPage;
    p.mask.causal = Causal::bottom_right;
    const std::vector<std::int64_t> lengths{p.len_kv, 0, numbers.between(60, 1, p.len_kv)};
    c.set_cache(pages ? kPage : 0, lengths, pages ? std::vector<std::int64_t>{} : std::vector<std::int64_t>{3, 2, 0});
    c.cache_layout = static_cast<CacheLayout>(numbers.between(61, 0, 4));
}

Case make_case(Feature feature, DType dtype, Dims dims, Size size, std::uint64_t seed) {
    const Numbers numbers(seed, size, dims);
    Case c{.id = fmt::format("{}/{}/{}x{}/{}", name_of(feature), tessera::name_of(dtype), dims.qk, dims.v,
                             name_of_size(size)),
           .seed = seed};
    Problem& p = c.problem;
    p = {.dtype = dtype, .heads_q = 2, .heads_kv = 2, .head_dim = dims.qk, .head_dim_v = dims.v};
    if (size == Size::tall) p.len_q = numbers.between(0, 194, 250), p.len_kv = numbers.between(1, 130, 190);
    if (size == Size::wide) p.len_q = numbers.between(0, 2, 30), p.len_kv = numbers.between(1, 641, 710);
    if (size == Size::small) p.len_q = numbers.between(0, 2, 60), p.len_kv = numbers.between(1, 65, 125);
    if (size == Size::long_row) {
        p.len_q = numbers.between(0, 2, 30), p.len_kv = numbers.between(1, 2101, 2200);
        set_long_columns(feature, p);
    }
    set_mask(feature, c, numbers);
    set_scores(feature, c, numbers);
    if (size == Size::tall && dims.qk + dims.v > 256) p.heads_q = p.heads_kv = 1;  // keeps the reference fast
    if (feature == Feature::grouped_heads || feature == Feature::all_but_bias) p.heads_q = 3, p.heads_kv = 1;
    if (feature == Feature::stacked_heads) set_stacked_heads(c, numbers, size != Size::tall);
    if (feature == Feature::ragged || feature == Feature::all_but_bias) set_ragged(c, numbers);
    if (feature == Feature::strided) c.layout = Layout::bhsd, p.batch = 2;
    if (in_cache(feature)) set_cache(feature, c, numbers);
    c.dlse = feature == Feature::dlse || feature == Feature::sinks;
    c.lse = feature != Feature::no_lse;
    // fa3 does not stack heads (PackGQA) if the residual of O is requested.
    c.o_residual = is_16_bit(dtype) && feature != Feature::stacked_heads && numbers.between(41, 0, 1) == 0;
    c.threads = static_cast<int>(numbers.between(40, 1, 3));
    return c;
}

/// Returns the number of cases like this one that a shape of a kernel gets. Kernels that are compiled for one shape
/// run every head_dim and size in the random cases. They get one case of each feature and dtype here.
int most_cases(const KernelInfo& kernel, const FeatureCase& c) {
    if (kernel_of(kernel).shapes.size() > 1) return c.padded ? 1 : 2;
    return c.padded ? 0 : 1;
}

}  // namespace

const char* name_of(Feature feature) {
    constexpr const char* kNames[] = {"plain",           "large_logits",  "causal_bottom_right",
                                      "causal_top_left", "window",        "cross_lengths",
                                      "empty_rows",      "grouped_heads", "stacked_heads",
                                      "ragged",          "softcap",       "alibi",
                                      "sinks",           "dropout",       "scale_zero",
                                      "scale_negative",  "all_but_bias",  "bias",
                                      "bias_gradient",   "dlse",          "no_lse",
                                      "strided",         "slots",         "pages"};
    static_assert(std::size(kNames) == kFeatures.size());
    return kNames[static_cast<std::size_t>(feature)];
}

bool applies_to(Feature feature, Pass pass) {
    if (feature == Feature::dlse || feature == Feature::bias_gradient) return pass == Pass::backward;
    return pass == Pass::forward || (feature != Feature::no_lse && !in_cache(feature));
}

std::vector<FeatureCase> feature_cases(std::uint64_t seed) {
    std::vector<FeatureCase> cases;
    const auto add = [&](Dims dims, Size size, bool padded) {
        for (const Feature feature : kFeatures) {
            for (const DType dtype : {DType::fp32, DType::bf16, DType::fp16}) {
                cases.push_back({feature, padded, make_case(feature, dtype, dims, size, seed)});
            }
        }
    };
    for (const Size size : {Size::tall, Size::wide, Size::long_row, Size::small}) {
        for (const Dims dims : kExact) add(dims, size, false);
        for (const Dims dims : kPadded) add(dims, size, true);
    }
    return cases;
}

Support support_of(const KernelInfo& kernel, const Problem& problem) {
    const Kernel& row = kernel_of(kernel);
    const Device device{kernel.backend == Backend::cuda ? DeviceType::cuda : DeviceType::cpu, 0};
    if (const auto reason = unavailable(device)) return {.unavailable = true, .reason = *reason};
    if (problem.kv_lengths && kernel.pass == Pass::backward) return {.reason = "a cache of keys has no gradient"};
    if (std::find(kernel.dtypes.begin(), kernel.dtypes.end(), problem.dtype) == kernel.dtypes.end()) {
        return {.reason = fmt::format("does not take {}", tessera::name_of(problem.dtype))};
    }
    if (auto reason = row.refuse(problem, {}, device)) return {.reason = std::move(*reason)};
    return {.supported = true, .shape = row.shape_name(problem)};
}

std::vector<SelectedCase> select_feature_cases(std::uint64_t seed, const std::vector<const KernelInfo*>& kernels,
                                               std::optional<Feature> only) {
    std::map<std::tuple<const KernelInfo*, std::string, Feature, DType, bool>, int> counts;
    std::vector<SelectedCase> chosen;
    for (FeatureCase& candidate : feature_cases(seed)) {
        if (only && candidate.feature != *only) continue;
        SelectedCase choice{.item = std::move(candidate)};
        const Problem& p = choice.item.which.problem;
        for (const KernelInfo* kernel : kernels) {
            if (!applies_to(choice.item.feature, kernel->pass)) continue;
            const Support support = support_of(*kernel, p);
            if (!support.supported) continue;
            int& count = counts[{kernel, support.shape, choice.item.feature, p.dtype, choice.item.padded}];
            if (++count <= most_cases(*kernel, choice.item)) choice.kernels.push_back(kernel);
        }
        if (!choice.kernels.empty()) chosen.push_back(std::move(choice));
    }
    return chosen;
}

}  // namespace tessera::check
