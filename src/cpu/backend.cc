// SPDX-License-Identifier: Apache-2.0
#include "cpu/backend.hpp"

#include <fmt/format.h>

#include "cpu/fa2/paths.hpp"
#include "cpu/matrix/primitives.hpp"
#include "cpu/schedules.hpp"
#include "cpu/simd/isa.hpp"
#include "cpu/simd/primitives.hpp"

namespace tessera::cpu {
namespace {

constexpr std::int64_t kMaxBlock = 1024;

/// The default tile. 64 queries fill four AVX-512 vectors, all that the accumulators of the tile product take. 64 keys
/// keep the scores at 16 KiB, beside Q^T in the L1 cache, and waste the least work on a causal diagonal. Measured on a
/// 16-core Xeon with AVX-512 (2026-11): 64 x 64 is within 3 % of the best of ten shapes for every length, head_dim and
/// pass.
constexpr Tile kTile{64, 64};

Tile default_tile(const Problem&, const Device&) { return kTile; }

bool matrix_path(const Problem& problem) { return matrix::packing_pays(problem.dtype); }

/// Default tiles of fa2. On a matrix unit, 32 queries are two lane tiles, which fill the accumulators of AMX; long key
/// blocks keep merges rare.
Tile fa2_forward_tile(const Problem& problem, const Device&) { return matrix_path(problem) ? Tile{32, 512} : kTile; }
Tile fa2_backward_tile(const Problem& problem, const Device&) {
    return matrix_path(problem) && !problem.bias_gradient ? Tile{128, 256} : kTile;
}

std::string fa2_matrix_unit(const Plan& plan) {
    const bool taken =
        plan.pass == Pass::forward ? fa2::matrix_path::takes_forward(plan) : fa2::matrix_path::takes_backward(plan);
    return taken ? matrix::name_of(matrix::unit()) : "";
}

std::optional<std::string> refuse(const Problem&, const std::optional<Tile>& tile, const Device&) {
    if (tile && (tile->block_q > kMaxBlock || tile->block_kv > kMaxBlock)) {
        return fmt::format("takes tiles up to {} x {}", kMaxBlock, kMaxBlock);
    }
    return simd::isa_refusal();
}

/// fa1 normalises O at every K/V block, as in the paper. At longer rows that rounding alone exceeds 2e-6.
constexpr std::int64_t kFa1MaxLenKv = 65536;

std::optional<std::string> refuse_fa1_forward(const Problem& problem, const std::optional<Tile>& tile,
                                              const Device& device) {
    if (problem.len_kv > kFa1MaxLenKv) {
        // For a ragged Problem len_kv is only an upper bound; the lengths come with cu_seqlens.
        return fmt::format("renormalises O at every K/V block: too inexact over {} keys, got {}{}", kFa1MaxLenKv,
                           problem.len_kv, problem.ragged ? " as the bound of the sequences" : "");
    }
    return refuse(problem, tile, device);
}

struct Entry {
    Schedule schedule;
    const char* forward_summary;
    const char* backward_summary;
    const char* forward_limits;
    const char* backward_limits;
    std::size_t (*forward_workspace)(const Plan&);
    void (*forward)(const ForwardCall&);
    std::size_t (*backward_workspace)(const Plan&);
    void (*backward)(const BackwardCall&);
};

/// The registry's rows, in order of preference.
constexpr Entry kEntries[] = {
    {Schedule::fa2, "Q blocks outer, O stays near until it is done; memory O(len)",
     "parallel over K/V blocks in rounds, dQ without atomics; memory O(len)", "none", "none", fa2::forward_workspace,
     fa2::forward, fa2::backward_workspace, fa2::backward},
    {Schedule::fa1, "K/V blocks outer, O, m, l rescaled and written back each step; memory O(len)",
     "K/V blocks outer, dQ read and written each step; memory O(len)", "at most 65,536 keys", "none",
     fa1::forward_workspace, fa1::forward, fa1::backward_workspace, fa1::backward},
    {Schedule::standard, "S and P materialised; memory O(len_q * len_kv)",
     "P and dS materialised; memory O(len_q * len_kv)", "memory for the scores of all heads",
     "memory for two matrices of all scores", standard::forward_workspace, standard::forward,
     standard::backward_workspace, standard::backward},
};

Kernel row(const Entry& entry, Pass pass) {
    const bool is_forward = pass == Pass::forward;
    return {
        .info = {.name = fmt::format("cpu.{}.{}", name_of(entry.schedule), name_of(pass)),
                 .backend = Backend::cpu,
                 .schedule = entry.schedule,
                 .pass = pass,
                 .dtypes = {DType::fp32, DType::bf16, DType::fp16},
                 .summary = is_forward ? entry.forward_summary : entry.backward_summary,
                 .limits = is_forward ? entry.forward_limits : entry.backward_limits},
        .refuse = is_forward && entry.schedule == Schedule::fa1 ? refuse_fa1_forward : refuse,
        .default_tile = entry.schedule != Schedule::fa2 ? default_tile
                        : is_forward                    ? fa2_forward_tile
                                                        : fa2_backward_tile,
        .workspace_bytes = is_forward ? entry.forward_workspace : entry.backward_workspace,
        .target = [](const Device&) { return simd::target_name(); },
        .matrix_unit = entry.schedule == Schedule::fa2 ? fa2_matrix_unit : nullptr,
        .forward = is_forward ? entry.forward : nullptr,
        .backward = is_forward ? nullptr : entry.backward,
    };
}

}  // namespace

std::vector<Kernel> kernels() {
    std::vector<Kernel> rows;
    for (const Entry& entry : kEntries) rows.push_back(row(entry, Pass::forward));
    for (const Entry& entry : kEntries) rows.push_back(row(entry, Pass::backward));
    return rows;
}

}  // namespace tessera::cpu
