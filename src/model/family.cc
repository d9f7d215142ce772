// SPDX-License-Identifier: Apache-2.0
#include "model/family.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <string_view>
#include <vector>

#include "cuda/decode/host/dispatch.hpp"
#include "cuda/fa1/host/dispatch.hpp"
#include "cuda/fa2/host/dispatch.hpp"
#include "cuda/fa3/host/backward_dispatch.hpp"
#include "cuda/fa3/host/forward_dispatch.hpp"
#include "cuda/standard/host/dispatch.hpp"
#include "schedule/grid.hpp"
#include "tessera/error.hpp"

namespace tessera::model {
namespace {

struct TileRow {
    std::int64_t head_dim;  ///< up to
    Tile whole;             ///< without a mask
    Tile cut;               ///< with one
};

/// The tile of the first row that holds head_dim.
Tile choose(std::span<const TileRow> rows, std::int64_t head_dim, bool cut) {
    const auto row = std::find_if(rows.begin(), rows.end(), [&](const TileRow& r) { return head_dim <= r.head_dim; });
    const TileRow& chosen = row == rows.end() ? rows.back() : *row;
    return cut ? chosen.cut : chosen.whole;
}

// flash-attention: hopper/tile_size.h; csrc/flash_attn/src/flash_fwd_launch_template.h, flash_bwd_launch_template.h
constexpr TileRow kFlash3[] = {{64, {192, 192}, {192, 128}},
                               {96, {192, 144}, {192, 128}},
                               {128, {128, 176}, {128, 128}},
                               {192, {128, 112}, {128, 112}},
                               {256, {128, 80}, {128, 80}}};
constexpr TileRow kFlash2[] = {{64, {128, 128}, {128, 128}}, {256, {128, 64}, {128, 64}}};
constexpr TileRow kFlash2Small[] = {
    {64, {128, 128}, {128, 128}}, {128, {128, 32}, {64, 64}}, {192, {128, 64}, {64, 64}}, {256, {64, 64}, {64, 64}}};
constexpr TileRow kFlash3Backward[] = {{64, {128, 128}, {128, 128}},
                                       {96, {64, 128}, {64, 128}},
                                       {128, {80, 128}, {64, 128}},
                                       {192, {64, 96}, {64, 96}},
                                       {256, {64, 80}, {64, 80}}};
constexpr TileRow kFlash2Backward[] = {
    {64, {128, 128}, {128, 128}}, {128, {64, 128}, {64, 128}}, {256, {64, 64}, {64, 64}}};
constexpr TileRow kFlash2BackwardSmall[] = {{64, {64, 128}, {64, 128}}, {256, {64, 64}, {64, 64}}};
// PyTorch, aten/src/ATen/native/transformers/cuda/mem_eff_attention
constexpr TileRow kEfficientTiles[] = {{64, {64, 64}, {64, 64}}, {256, {64, 128}, {64, 128}}};
constexpr TileRow kEfficientBackward[] = {{64, {64, 64}, {64, 64}}, {256, {128, 64}, {128, 64}}};
// Two tiles of 128 queries in a thread block: FlashAttention-4 (flash_attn/cute/flash_fwd_sm100.py), and cuDNN.
constexpr Tile kTcgen05{256, 128};
constexpr Tile kTcgen05Backward{128, 128};
constexpr TileRow kCudnn[] = {{128, {128, 128}, {128, 128}}, {256, {128, 64}, {128, 64}}};

/// Padded head_dims of a list of compiled shapes, ascending.
template <class Shapes>
std::vector<std::int64_t> sizes_of() {
    std::vector<std::int64_t> sizes;
    for (const auto& config : Shapes::kConfigs) sizes.push_back(config.head_dim);
    std::sort(sizes.begin(), sizes.end());
    return sizes;
}

/// The padded head_dims of tessera's CUDA kernels.
struct OurSizes {
    Schedule schedule;
    Pass pass;
    std::vector<std::int64_t> (*sizes)();
};
constexpr OurSizes kOurSizes[] = {
    {Schedule::standard, Pass::forward, sizes_of<cuda::standard::Shapes>},
    {Schedule::standard, Pass::backward, sizes_of<cuda::standard::Shapes>},
    {Schedule::fa1, Pass::forward, sizes_of<cuda::fa1::Shapes>},
    {Schedule::fa1, Pass::backward, sizes_of<cuda::fa1::BackwardShapes>},
    {Schedule::fa2, Pass::forward, sizes_of<cuda::fa2::Shapes>},
    {Schedule::fa2, Pass::backward, sizes_of<cuda::fa2::BackwardShapes>},
    {Schedule::fa3, Pass::forward, sizes_of<cuda::fa3::Shapes>},
    {Schedule::fa3, Pass::backward, sizes_of<cuda::fa3::backward::Shapes>},
};

/// Padded head_dims of fa3's shapes for keys in a cache, ascending.
std::vector<std::int64_t> sizes_for_cache() {
    std::vector<std::int64_t> sizes;
    for (const auto& config : cuda::fa3::Shapes::kConfigs) {
        if (config.cached) sizes.push_back(config.head_dim);
    }
    std::sort(sizes.begin(), sizes.end());
    return sizes;
}

std::vector<std::int64_t> our_sizes(const Family& family, bool cached) {
    if (is_decode(family)) return sizes_of<cuda::decode::Shapes>();
    if (cached) return sizes_for_cache();
    for (const OurSizes& of : kOurSizes) {
        if (of.schedule == family.schedule && of.pass == family.pass) return of.sizes();
    }
    throw Error(ErrorCode::internal, "",
                fmt::format("expected the head dims of cuda.{}.{} in kOurSizes (model/family.cc), got none",
                            name_of(family.schedule), name_of(family.pass)));
}

std::vector<std::int64_t> their_sizes(const Family& family) {
    if (std::string_view(family.by) == kEfficient) return {32, 64, 96, 128, 160, 192, 224, 256};
    if (family.schedule == Schedule::fa2) return {32, 64, 96, 128, 192, 256};
    return {64, 96, 128, 192, 256};
}

constexpr std::int64_t kSplitQueries = 64;  // queries of a tile of flash-attention's fa2 that splits the keys
std::int64_t keys_of_split(std::int64_t head_dim) { return head_dim <= 64 ? 256 : head_dim <= 128 ? 128 : 64; }

/// Is the shared memory too small for the tiles of 8.0 and 9.0? It is on 8.6, 8.9 and older.
bool is_small(const Machine& machine) { return machine.shared_kib < 128; }

/// Do two tiles of head_dim 256 fit a multiprocessor? flash-attention's fa2 then takes tiles of 64 x 64.
bool fits_two_blocks_of_256(const Machine& machine) { return machine.shared_kib > 192; }

}  // namespace

double pages_factor(double boxes) {
    const PagesTime *from = std::begin(kPagesInFa3), *to = from + 1;
    while (to + 1 != std::end(kPagesInFa3) && boxes > to->boxes) from = to++;
    return from->factor + (boxes - from->boxes) * (to->factor - from->factor) / (to->boxes - from->boxes);
}

bool has_tcgen05(const Machine& machine) { return machine.capability >= 10 && machine.capability < 12; }

bool is_ours(const Family& family) { return std::string_view(family.by) == "tessera"; }

bool is_decode(const Family& family) { return is_ours(family) && family.few_queries; }

const cuda::KernelEntry& entry_of(const Family& family) {
    return is_decode(family) ? cuda::kernel_entry(kDecodeKernel) : cuda::kernel_entry(family.schedule, family.pass);
}

const cuda::KernelEntry& our_kernel(const Problem& problem, Schedule schedule, Pass pass, const Machine& machine,
                                    const PredictOptions& options) {
    if (!options.kernel.empty()) return cuda::kernel_entry(options.kernel);
    const cuda::KernelEntry* to_report = nullptr;
    for (const cuda::KernelEntry& entry : cuda::kernel_entries()) {
        if (entry.schedule != schedule || entry.pass != pass) continue;
        if (!cuda::refusal(entry, problem, options.tile, limits_of(machine))) return entry;
        if (entry.takes_cache && problem.kv_lengths) to_report = &entry;
    }
    return to_report != nullptr ? *to_report : cuda::kernel_entry(schedule, pass);
}

const Family* find_family(Schedule schedule, Pass pass, const std::string& by) {
    const auto rank = [](const Family* family) {
        if (family == nullptr) return 0;
        const bool fitted = family->fitted_on[0] != '\0';
        return fitted && is_ours(*family) ? 3 : fitted ? 2 : 1;
    };
    const Family* found = nullptr;
    for (const Family& family : gpu_families()) {
        if (family.schedule != schedule || family.pass != pass || (!by.empty() && by != family.by)) continue;
        if (family.over_dim > 0 || family.few_queries || family.tcgen05) continue;
        if (rank(&family) > rank(found)) found = &family;
    }
    return found;
}

const Family& family_for(const Family& family, const Problem& problem, const Machine& machine,
                         std::string_view kernel) {
    const auto dim = std::max(problem.head_dim, problem.head_dim_v);
    const bool few = is_ours(family) ? kernel == kDecodeKernel : splits_keys(family, problem, machine);
    const auto variant = [&](bool tcgen05) {
        const Family* found = nullptr;
        for (const Family& f : gpu_families()) {
            const bool kind =
                f.schedule == family.schedule && f.pass == family.pass && std::string_view(f.by) == family.by;
            if (!kind || f.few_queries != few || f.tcgen05 != tcgen05) continue;
            if (dim > f.over_dim && (found == nullptr || f.over_dim > found->over_dim)) found = &f;
        }
        return found;
    };
    const Family* found = has_tcgen05(machine) ? variant(true) : nullptr;
    if (found == nullptr) found = variant(false);
    return found == nullptr ? family : *found;
}

std::optional<std::string> refusal_of(const Family& family, const Problem& problem, const Machine& machine) {
    const std::string_view by = family.by;
    const cuda::Limits limits = limits_of(machine);
    // flash-attention: README and csrc/flash_attn/flash_api.cpp, hopper/flash_api.cpp; cuDNN: support matrix of
    // scaled_dot_product_attention
    if (size_of(problem.dtype) > 2)
        return by == kEfficient ? "the constants of memory-efficient are of 16-bit inputs"
                                : std::string(by) + " takes 16-bit inputs";
    if (problem.sinks && by != "cudnn") return std::string(by) + " takes no sinks";
    const auto dim = std::max(problem.head_dim, problem.head_dim_v);
    if (by == kEfficient) {
        constexpr std::int64_t kAligned = 8;  // 16 bytes
        if (limits.capability < 80)
            return fmt::format("the constants of memory-efficient need compute capability 8.0, {} has {:.1f}",
                               machine.name, machine.capability.value);
        if (problem.head_dim % kAligned != 0 || problem.head_dim_v % kAligned != 0)
            return "memory-efficient needs head_dims that are multiples of 8";
        return std::nullopt;
    }
    if (by == "cudnn" && problem.softcap > 0) return "cudnn takes no softcap";
    if (by == "cudnn" && family.schedule == Schedule::fa2) {
        const bool mma_sync = (limits.capability >= 80 && limits.capability < 90) || limits.capability >= 120;
        if (!mma_sync)
            return fmt::format(
                "cudnn has kernels of fa2 on compute capability 8 and 12, of fa3 on 9 and 10, {} has "
                "{:.1f}",
                machine.name, machine.capability.value);
        constexpr std::int64_t kMostBackward = 128;
        if (family.pass == Pass::backward && dim > kMostBackward)
            return fmt::format("cudnn's backward takes head_dims up to 128 on {}", machine.name);
        return std::nullopt;
    }
    if (family.schedule == Schedule::fa2) {
        if (limits.capability < 80)
            return fmt::format("flash-attention 2 needs compute capability 8.0, {} has {:.1f}", machine.name,
                               machine.capability.value);
        if (problem.bias) return "flash-attention 2 takes no additive bias";
        if (problem.head_dim != problem.head_dim_v) return "flash-attention 2 takes one head_dim for q, k and v";
        return std::nullopt;
    }
    if (limits.capability != 90 && !has_tcgen05(machine))
        return fmt::format("fa3 needs wgmma or tcgen05: compute capability 9 or 10, {} has {:.1f}", machine.name,
                           machine.capability.value);
    constexpr std::int64_t kMostOfTcgen05 = 128;
    if (has_tcgen05(machine) && family.pass == Pass::backward && problem.head_dim_v > kMostOfTcgen05)
        return fmt::format("no published table has {}'s backward of head_dims over 128 on compute capability 10", by);
    if (by == "flash-attention" && (problem.bias || problem.alibi || problem.dropout.probability > 0))
        return "flash-attention 3 and 4 take no bias, ALiBi or dropout";
    return std::nullopt;
}

bool computes_in_parts(const Family& family, const Problem& problem) {
    constexpr std::int64_t kMostBackward = 128;
    return is_ours(family) && problem.dtype == DType::fp32 &&
           (family.pass == Pass::forward || std::max(problem.head_dim, problem.head_dim_v) <= kMostBackward);
}

double gemm_flop(const Family& family, const Problem& problem, const Machine& machine) {
    if (computes_in_parts(family, problem)) return machine.gemm_flop(DType::bf16, family.warp_wide) / kMmasPerFp32;
    return machine.gemm_flop(problem.dtype, family.warp_wide);
}

Tile tile_of(const Family& family, const Problem& problem, const Machine& machine) {
    const std::int64_t dim = std::max(problem.head_dim, problem.head_dim_v);
    const bool cut = !problem.mask.trivial();
    if (is_ours(family)) return entry_of(family).tile_of(problem, limits_of(machine));
    if (std::string_view(family.by) == kEfficient)
        return family.pass == Pass::forward ? choose(kEfficientTiles, dim, cut) : choose(kEfficientBackward, dim, cut);
    if (family.tcgen05 && family.pass == Pass::backward) return kTcgen05Backward;
    if (family.tcgen05 && !family.few_queries) return kTcgen05;
    if (family.pass == Pass::backward) {
        if (family.schedule == Schedule::fa3 && !(std::string_view(family.by) == "cudnn"))
            return choose(kFlash3Backward, dim, cut);
        if (is_small(machine)) return choose(kFlash2BackwardSmall, dim, cut);
        return choose(kFlash2Backward, dim, cut);
    }
    if (std::string_view(family.by) == "cudnn") {
        Tile tile = choose(kCudnn, dim, cut);
        if (splits_keys(family, problem, machine)) tile.block_q = kSplitQueries;
        return tile;
    }
    if (family.schedule == Schedule::fa3) return choose(kFlash3, dim, cut);
    if (flash2_splits(problem, machine) > 1) return {kSplitQueries, keys_of_split(problem.head_dim)};
    if (is_small(machine)) return choose(kFlash2Small, dim, cut);
    return fits_two_blocks_of_256(machine) && dim > 192 ? Tile{64, 64} : choose(kFlash2, dim, cut);
}

int blocks_at_a_time(const Family& family, const Problem& problem, const Machine& machine) {
    constexpr std::int64_t kMostForTwo = 128;  // registers of two tiles of 128 queries
    if (family.schedule != Schedule::fa2 || family.pass != Pass::forward) return 1;
    const std::int64_t dim = std::max(problem.head_dim, problem.head_dim_v);
    // cuDNN's waves on an A100 are of one block, but for few queries.
    if (std::string_view(family.by) == "cudnn") return family.few_queries ? 2 : 1;
    if (dim <= kMostForTwo) return 2;
    return !is_ours(family) && tile_of(family, problem, machine).block_q <= kSplitQueries &&
                   fits_two_blocks_of_256(machine)
               ? 2
               : 1;
}

bool splits_keys(const Family& family, const Problem& problem, const Machine& machine) {
    constexpr std::int64_t kFewQueries = 16;  // up to this many queries cuDNN splits
    if (is_ours(family) || family.pass != Pass::forward || std::string_view(family.by) == kEfficient) return false;
    if (std::string_view(family.by) == "cudnn") return problem.len_q <= kFewQueries;
    return family.schedule == Schedule::fa2 && flash2_splits(problem, machine) > 1;
}

/// The fewest splits that fill the last round of blocks to 0.85 of the best filling or more. The rule of
/// flash-attention.
template <class Efficiency>
static std::int64_t fewest_efficient(std::int64_t most, Efficiency&& efficiency) {
    constexpr double kGoodEnough = 0.85;
    double best = 0;
    for (std::int64_t splits = 1; splits <= most; ++splits) best = std::max(best, efficiency(splits));
    for (std::int64_t splits = 1; splits <= most; ++splits) {
        if (efficiency(splits) >= kGoodEnough * best) return splits;
    }
    return 1;
}

std::int64_t flash3_ragged_splits(const Problem& p, const Machine& machine) {
    using schedule::ceil_div;
    constexpr std::int64_t kMost = 128, kLeastBlocks = 5;
    if (!p.ragged || p.len_q == 0 || p.heads_kv == 0) return 1;
    const Tile tile = choose(kFlash3, std::max(p.head_dim, p.head_dim_v), !p.mask.trivial());
    std::int64_t keys = p.len_kv;
    const Mask& mask = p.mask;
    if (mask.window_left != unbounded && mask.window_left < p.len_kv) {
        const std::int64_t right = mask.window_right == unbounded ? 0 : mask.window_right;
        keys = std::min(keys, mask.window_left + right + 1 + tile.block_q);
    }
    const std::int64_t key_blocks = ceil_div(keys, tile.block_kv);
    const std::int64_t blocks = p.heads_kv * ceil_div(p.len_q * std::max<std::int64_t>(p.group(), 1), tile.block_q);
    const auto slots = static_cast<std::int64_t>(machine.cores.value);
    if (10 * blocks >= 8 * slots || key_blocks < kLeastBlocks) return 1;
    return fewest_efficient(std::min({kMost, slots, key_blocks}), [&](std::int64_t splits) {
        const double rounds = static_cast<double>(blocks * splits) / static_cast<double>(slots);
        return rounds / std::ceil(rounds);
    });
}

std::int64_t flash2_splits(const Problem& p, const Machine& machine) {
    using schedule::ceil_div;
    if (p.ragged || p.len_q == 0 || p.dropout.probability > 0) return 1;
    constexpr std::int64_t kMost = 128;
    const std::int64_t blocks = p.batch * p.heads_q * ceil_div(p.len_q, kSplitQueries);
    const std::int64_t slots = 2 * static_cast<std::int64_t>(machine.cores.value);
    const std::int64_t key_blocks = ceil_div(p.len_kv, keys_of_split(p.head_dim));
    if (10 * blocks >= 8 * slots) return 1;
    const auto efficiency = [&](std::int64_t splits) {  // fill of the last round
        if (splits > 1 && ceil_div(key_blocks, splits) == ceil_div(key_blocks, splits - 1)) return 0.0;
        const double rounds = static_cast<double>(blocks * splits) / static_cast<double>(slots);
        return rounds / std::ceil(rounds);
    };
    return fewest_efficient(std::min({kMost, slots, key_blocks}), efficiency);
}

std::int64_t padded_dim(const Family& family, std::int64_t head_dim, bool cached) {
    const auto sizes = is_ours(family) ? our_sizes(family, cached) : their_sizes(family);
    const auto size = std::lower_bound(sizes.begin(), sizes.end(), head_dim);
    return size == sizes.end() ? head_dim : *size;
}

std::int64_t rows_per_reader(const Family& family, std::int64_t head_dim) {
    if (!family.warp_wide) return 64;
    return family.pass == Pass::forward && head_dim > 128 ? 16 : 32;
}

}  // namespace tessera::model
