// SPDX-License-Identifier: Apache-2.0
#include "cuda/host/kernel_table.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "core/arena.hpp"
#include "cuda/decode/host/dispatch.hpp"
#include "cuda/fa1/host/config.h"
#include "cuda/fa1/host/dispatch.hpp"
#include "cuda/fa2/host/config.h"
#include "cuda/fa2/host/dispatch.hpp"
#include "cuda/fa3/host/backward_dispatch.hpp"
#include "cuda/fa3/host/forward_dispatch.hpp"
#include "cuda/gradient/host/dispatch.hpp"
#include "cuda/host/query_parts.hpp"
#include "cuda/host/query_tiles.hpp"
#include "cuda/host/scores.hpp"
#include "cuda/standard/host/dispatch.hpp"
#include "tessera/error.hpp"

namespace tessera::cuda {
namespace {

using Refusal = std::optional<std::string>;
using AskedTile = std::optional<Tile>;

constexpr int kAmpere = 80;  // bf16 MMA and cp.async
constexpr int kHopper = 90;  // wgmma and setmaxnreg exist on 9.0 only

std::string capability_text(int capability) { return fmt::format("{}.{}", capability / 10, capability % 10); }

/// Refuses devices older than `wanted`; with `only`, all others.
Refusal refuse_capability(const Limits& limits, int wanted, bool only = false) {
    if (limits.capability == wanted || (!only && limits.capability > wanted)) return std::nullopt;
    return fmt::format("needs compute capability {}, {} has {}", capability_text(wanted), limits.who,
                       capability_text(limits.capability));
}

Refusal refuse_tile(const AskedTile& asked, const Tile& own) {
    if (!asked || *asked == own) return std::nullopt;
    return fmt::format("is compiled for tiles of {} x {}", own.block_q, own.block_kv);
}

std::int64_t longest_of(const Problem& p) { return std::max({p.len_q, p.len_kv, p.total_q, p.total_kv}); }

/// Tiles of `heads` heads in each of `batch` sequences. Saturates: the sizes of a varlen Problem are bounds, whose
/// product may pass int64.
std::int64_t tiles_of(std::int64_t batch, std::int64_t heads, std::int64_t len, std::int64_t block) {
    return saturating_product(saturating_product(batch, heads), (len + block - 1) / block);
}

/// Refuses a Problem with kMaxIndex rows or more, or with that many of what is `counted` ("tiles").
Refusal refuse_counts(const Problem& p, const char* counted, std::int64_t count) {
    if (longest_of(p) < kMaxIndex && count < kMaxIndex) return std::nullopt;
    return fmt::format("counts rows and {} up to {}, got {} and {}", counted, kMaxIndex, longest_of(p), count);
}

Refusal refuse_shared(const Problem& p, std::int64_t needed, const Limits& limits) {
    if (needed <= limits.shared_bytes) return std::nullopt;
    return fmt::format("needs {} bytes of shared memory for head_dim {}, {} has {}", needed,
                       std::max(p.head_dim, p.head_dim_v), limits.who, limits.shared_bytes);
}

Refusal refuse_odd_dims(const Problem& p) {
    if (p.head_dim % 8 == 0 && p.head_dim_v % 8 == 0) return std::nullopt;
    return fmt::format("takes a head_dim in multiples of 8, got {} and {}", p.head_dim, p.head_dim_v);
}

/// Few keys, and many queries, are faster in a kernel that does not split the keys.
constexpr std::int64_t kFewestKeysToSplit = 512;
constexpr std::int64_t kMostQueriesToSplit = 8;

Refusal refuse_decode(const Problem& p, const AskedTile& tile, const Limits& limits) {
    if (auto reason = refuse_capability(limits, kAmpere)) return reason;
    if (auto reason = refuse_sizes(p)) return reason;
    if (p.bias || p.dropout.probability > 0) return "takes no bias or dropout";
    if (!p.kv_lengths) {  // other kernels take these too
        if (p.len_q > kMostQueriesToSplit)
            return fmt::format("takes up to {} queries a sequence without a cache, got {}", kMostQueriesToSplit,
                               p.len_q);
        if (p.len_kv < kFewestKeysToSplit)
            return fmt::format("takes {} keys and more without a cache, got {}", kFewestKeysToSplit, p.len_kv);
    }
    if (auto reason = refuse_counts(p, "splits", decode::most_items(p))) return reason;
    const std::int64_t rows = saturating_product(saturating_product(p.batch, p.len_q), p.heads_q);
    if (auto reason = refuse_counts(p, "rows", rows)) return reason;
    const decode::Config& config = decode::config_of(p);
    if (auto reason = refuse_shared(p, config.shared_bytes() + config.static_bytes(), limits)) return reason;
    return refuse_tile(tile, decode::tile_of(p));
}

Refusal refuse_fa3_forward(const Problem& p, const AskedTile& tile, const Limits& limits) {
    if (auto reason = refuse_capability(limits, kHopper, true)) return reason;
    if (auto reason = refuse_sizes(p)) return reason;
    if (p.kv_lengths && fa3::scores_of(p) != fa3::Scores::plain)
        return "takes softcap, ALiBi, biases, dropout and scales of 0 and less without a cache only";
    if (!fa3::shape_of(p)) {
        return fmt::format("takes softcap, ALiBi, biases, dropout and scales of 0 and less up to head_dim {}, got {}",
                           fa3::largest_dim(fa3::scores_of(p)), std::max(p.head_dim, p.head_dim_v));
    }
    if (auto reason = refuse_odd_dims(p)) return reason;
    if (p.page_size > 0 && p.left_padding) return "takes no left_padding with pages";
    if (p.page_size % 8 != 0) return fmt::format("takes pages of a multiple of 8 keys, got {}", p.page_size);
    const std::int64_t tiles = query_heads(p) * query_tiles(p, fa3::config_of(p).block_q());
    if (auto reason = refuse_counts(p, "tiles", tiles)) return reason;
    return refuse_tile(tile, fa3::tile_of(p));
}

Refusal refuse_fa3_backward(const Problem& p, const AskedTile& tile, const Limits& limits) {
    if (auto reason = refuse_capability(limits, kHopper, true)) return reason;
    if (auto reason = refuse_sizes(p)) return reason;
    if (!fa3::backward::shape_of(p)) {
        return fmt::format("takes softcap, ALiBi, biases, dropout and scales of 0 and less up to head_dim {}, got {}",
                           fa3::backward::largest_dim(p), std::max(p.head_dim, p.head_dim_v));
    }
    if (auto reason = refuse_odd_dims(p)) return reason;
    constexpr std::int64_t kRows = fa3::backward::Config::kRows;  // rows of the smallest block
    const std::int64_t of_queries = p.ragged ? p.total_q / kRows + p.batch : p.batch * ((p.len_q + kRows - 1) / kRows);
    const std::int64_t of_keys = p.ragged ? (p.total_kv / kRows + p.batch) * fa3::backward::head_splits(p)
                                          : p.batch * ((p.len_kv + kRows - 1) / kRows);
    const std::int64_t blocks = std::max(2 * p.heads_q * of_queries,  // query blocks of both dQ accumulators
                                         p.heads_kv * of_keys);
    if (auto reason = refuse_counts(p, "blocks", blocks)) return reason;
    return refuse_tile(tile, fa3::backward::tile_of(p));
}

Refusal refuse_fa2_forward(const Problem& p, const AskedTile& tile, const Limits& limits) {
    if (auto reason = refuse_capability(limits, kAmpere)) return reason;
    if (auto reason = refuse_sizes(p)) return reason;
    if (auto reason = refuse_shared(p, fa2::shared_bytes_of(p, limits.shared_bytes), limits)) return reason;
    const Tile own = fa2::tile_of(p);
    if (auto reason = refuse_counts(p, "tiles", query_heads(p) * query_tiles(p, own.block_q))) return reason;
    return refuse_tile(tile, own);
}

Refusal refuse_fa1_forward(const Problem& p, const AskedTile& tile, const Limits& limits) {
    if (auto reason = refuse_capability(limits, kAmpere)) return reason;
    if (auto reason = refuse_sizes(p)) return reason;
    const fa1::Config c = fa1::config_of(p);
    if (auto reason = refuse_shared(p, c.shared_bytes(), limits)) return reason;
    const std::int64_t tiles = tiles_of(p.batch, p.heads_q, p.len_q, c.block_q());
    if (auto reason = refuse_counts(p, "tiles", tiles)) return reason;
    return refuse_tile(tile, fa1::tile_of(p));
}

/// Checks shared by the backwards that are built on gradient/. `own`: the kernel's tile; `shared_bytes`: its dynamic
/// shared memory.
Refusal refuse_gradient(const Problem& p, const AskedTile& tile, const Limits& limits, const Tile& own,
                        int shared_bytes) {
    if (auto reason = refuse_capability(limits, kAmpere)) return reason;
    if (auto reason = refuse_sizes(p)) return reason;
    constexpr std::int64_t kQ = gradient::kBlockQ;
    const std::int64_t q_tiles = (p.len_q + kQ - 1) / kQ;
    const std::int64_t tiles_of_head = p.ragged ? p.total_q / kQ + 1 + p.batch : p.batch * q_tiles;
    // Key blocks of a ragged call count once for each head split of a group.
    const std::int64_t of_keys = p.ragged ? saturating_product(p.heads_q, p.total_kv / own.block_kv + p.batch)
                                          : tiles_of(p.batch, p.heads_kv, p.len_kv, own.block_kv);
    const std::int64_t tiles = std::max(saturating_product(p.heads_q, tiles_of_head), of_keys);
    if (auto reason = refuse_counts(p, "tiles", tiles)) return reason;
    if (auto reason = refuse_shared(p, shared_bytes + gradient::kDeclaredShared, limits)) return reason;
    return refuse_tile(tile, own);
}

gradient::Config fa1_backward_config(const Problem& p) {
    return fa1::BackwardShapes::kConfigs[gradient::shape_index_by_dim<fa1::BackwardShapes>(p)];
}

Tile fa1_backward_tile(const Problem& p) { return {gradient::kBlockQ, fa1_backward_config(p).block_kv()}; }

Refusal refuse_fa1_backward(const Problem& p, const AskedTile& tile, const Limits& limits) {
    return refuse_gradient(p, tile, limits, fa1_backward_tile(p), fa1_backward_config(p).shared_bytes());
}

Refusal refuse_fa2_backward(const Problem& p, const AskedTile& tile, const Limits& limits) {
    const bool has_asked = p.dtype == DType::fp32 && tile && fa2::backward_extents_fp32(p, *tile);
    const Tile own = has_asked ? *tile : fa2::backward_tile_of(p, limits.shared_bytes);
    const int shared_bytes = p.dtype == DType::fp32 ? fa2::backward_extents_fp32(p, own)->shared_bytes
                                                    : fa2::backward_config_of(p).shared_bytes();
    return refuse_gradient(p, tile, limits, own, shared_bytes);
}

/// Checks of the kernels that keep `matrices` fp32 matrices of all pairs, and one factor for each row.
Refusal refuse_matrices(const Problem& p, const AskedTile& tile, const Limits& limits, std::int64_t shared,
                        int matrices) {
    if (auto reason = refuse_capability(limits, kAmpere)) return reason;
    if (auto reason = refuse_sizes(p)) return reason;
    const std::int64_t tiles = tiles_of(p.batch, p.heads_q, p.len_q, standard::kBlockQ);
    const std::int64_t rows = std::max(saturating_product(query_heads(p), query_tiles(p, 1)), tiles);
    if (auto reason = refuse_counts(p, "rows", rows)) return reason;
    if (auto reason = refuse_shared(p, shared, limits)) return reason;
    const std::int64_t pitch = (p.len_kv + standard::kBlockKv - 1) / standard::kBlockKv * standard::kBlockKv;
    const double needed = 4 * static_cast<double>(p.heads_q) * static_cast<double>(p.rows_q()) *
                          (matrices * static_cast<double>(pitch) + 1);
    if (const auto memory = static_cast<double>(limits.memory_bytes); needed > memory) {
        return fmt::format("needs {:.1f} GiB for the scores of all pairs, {} has {:.1f} GiB", needed / (1 << 30),
                           limits.who, memory / (1 << 30));
    }
    return refuse_tile(tile, standard::tile_of(p));
}

Refusal refuse_standard_forward(const Problem& p, const AskedTile& tile, const Limits& limits) {
    const std::int64_t shared =
        std::max(standard::Shapes::kConfigs[standard::shape_of(p.head_dim)].score_shared_bytes(),
                 standard::Shapes::kConfigs[standard::shape_of(p.head_dim_v)].value_shared_bytes());
    return refuse_matrices(p, tile, limits, shared, 1);
}

/// dK and dV are sums over the queries of a group, dQ is a sum over the keys, each in one accumulator of an MMA, which
/// truncates (cuda/host/query_parts.hpp).
Refusal refuse_long_sums(const Problem& p) {
    const std::int64_t most = QueryParts::max_terms(p.dtype);
    const std::int64_t longest = std::max(saturating_product(p.len_q, p.group()), p.len_kv);
    if (longest <= most) return std::nullopt;
    return fmt::format("has one accumulator for each sum: too inexact over {} terms, got {}", most, longest);
}

Refusal refuse_standard_backward(const Problem& p, const AskedTile& tile, const Limits& limits) {
    const std::int64_t blocks = tiles_of(p.batch, p.heads_kv, p.len_kv, standard::kKeysOfBlock);
    if (blocks >= kMaxIndex) return fmt::format("counts blocks of keys up to {}, got {}", kMaxIndex, blocks);
    const standard::Config& larger = standard::Shapes::kConfigs[standard::shape_of(std::max(p.head_dim, p.head_dim_v))];
    const int matrices = 2 + (p.dtype == DType::fp16 ? 1 : 0) + (p.bias_gradient ? 1 : 0);  // S, dP, dS, its gradient
    const std::int64_t shared = std::max(larger.score_shared_bytes(), larger.value_shared_bytes());
    if (auto reason = refuse_matrices(p, tile, limits, shared, matrices)) return reason;
    return refuse_long_sums(p);
}

/// A tile that depends on the Problem alone.
template <Tile (*kTileOf)(const Problem&)>
Tile on_any(const Problem& p, const Limits&) {
    return kTileOf(p);
}

}  // namespace

Refusal refuse_sizes(const Problem& p) {
    // Half of an int's range, so that a sum of two sizes and a tile past the end fit too.
    constexpr std::int64_t kMost = std::numeric_limits<int>::max() / 2;
    const std::pair<const char*, std::int64_t> sizes[] = {{"batch", p.batch},       {"len_q", p.len_q},
                                                          {"len_kv", p.len_kv},     {"total_q", p.total_q},
                                                          {"total_kv", p.total_kv}, {"heads_q", p.heads_q}};
    for (const auto& [name, size] : sizes) {
        if (size > kMost) return fmt::format("counts in 32 bits: takes {} up to {}, got {}", name, kMost, size);
    }
    return std::nullopt;
}

std::span<const KernelEntry> kernel_entries() {
    const auto bf16 = DType::bf16, fp16 = DType::fp16, fp32 = DType::fp32;
    static const std::vector<KernelEntry> list = {
        {"cuda.decode.forward",
         Schedule::fa2,
         Pass::forward,
         {bf16, fp16},
         refuse_decode,
         on_any<decode::tile_of>,
         true},
        {"cuda.fa3.forward",
         Schedule::fa3,
         Pass::forward,
         {bf16, fp16},
         refuse_fa3_forward,
         on_any<fa3::tile_of>,
         true},
        {"cuda.fa3.backward",
         Schedule::fa3,
         Pass::backward,
         {bf16, fp16},
         refuse_fa3_backward,
         on_any<fa3::backward::tile_of>},
        {"cuda.fa2.forward",
         Schedule::fa2,
         Pass::forward,
         {bf16, fp16, fp32},
         refuse_fa2_forward,
         on_any<fa2::tile_of>},
        {"cuda.fa2.backward",
         Schedule::fa2,
         Pass::backward,
         {bf16, fp16, fp32},
         refuse_fa2_backward,
         [](const Problem& p, const Limits& limits) { return fa2::backward_tile_of(p, limits.shared_bytes); }},
        {"cuda.fa1.forward", Schedule::fa1, Pass::forward, {bf16, fp16}, refuse_fa1_forward, on_any<fa1::tile_of>},
        {"cuda.fa1.backward",
         Schedule::fa1,
         Pass::backward,
         {bf16, fp16},
         refuse_fa1_backward,
         on_any<fa1_backward_tile>},
        {"cuda.standard.forward",
         Schedule::standard,
         Pass::forward,
         {bf16, fp16},
         refuse_standard_forward,
         on_any<standard::tile_of>},
        {"cuda.standard.backward",
         Schedule::standard,
         Pass::backward,
         {bf16, fp16},
         refuse_standard_backward,
         on_any<standard::tile_of>},
    };
    return list;
}

const KernelEntry& kernel_entry(std::string_view name) {
    for (const KernelEntry& entry : kernel_entries()) {
        if (name == entry.name) return entry;
    }
    throw Error(ErrorCode::internal, "",
                fmt::format("expected an entry for {} in the table of CUDA kernels (kernel_table.cc), got none", name));
}

const KernelEntry& kernel_entry(Schedule schedule, Pass pass) {
    return kernel_entry(fmt::format("cuda.{}.{}", name_of(schedule), name_of(pass)));
}

Refusal refusal(const KernelEntry& entry, const Problem& problem, const AskedTile& tile, const Limits& limits) {
    if (std::find(entry.dtypes.begin(), entry.dtypes.end(), problem.dtype) == entry.dtypes.end())
        return fmt::format("does not take {}", name_of(problem.dtype));
    if (problem.kv_lengths && !entry.takes_cache) return "takes no cache of keys";
    return entry.refuse(problem, tile, limits);
}

Refusal refusal(Schedule schedule, Pass pass, const Problem& problem, const AskedTile& tile, const Limits& limits) {
    return refusal(kernel_entry(schedule, pass), problem, tile, limits);
}

}  // namespace tessera::cuda
